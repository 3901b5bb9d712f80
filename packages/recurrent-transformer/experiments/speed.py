"""Measure the paper's Table 2, latency over length, training throughputs, and decoding.

    python packages/recurrent-transformer/experiments/speed.py \
        --out packages/recurrent-transformer/results/nvidia-h200
    python packages/recurrent-transformer/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes speed_graphs.json, speed_length.json, speed_throughput.json and speed_decoding.json;
`--models` takes some layers or models alone. `mezzo-recurrent-transformer reproduce --scale gpu`
measures the same and compares it with the paper.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Options, run_script, say
from mezzo_recurrent_transformer.speed import DRY, FULL, LAYERS, MEASURERS, MODELS

EVERY = tuple(dict.fromkeys((*LAYERS["graphs"], *LAYERS["length"], *MODELS)))


def measure(options: Options) -> None:
    """Measure one after another."""
    sizes = replace(DRY if options.dry_run else FULL, models=options.models)
    for measurer in MEASURERS.values():
        measurer(sizes, options.out, say)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, EVERY))
