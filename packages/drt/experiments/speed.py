"""Measure decoding (Table 3), training (Figure 3a, Table 4), and reading to 16M tokens.

    python packages/drt/experiments/speed.py --out packages/drt/results/nvidia-h200
    python packages/drt/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes inference.json, length.json, training_speed.json and reading.json. `--models` takes some of
these files, some models, or both: `--models inference BaseLM`. What a file has is not measured
again. `mezzo-drt reproduce --scale gpu` measures the same and compares it with the paper.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Options, run_script, say
from mezzo_drt.speed import DECODING, DRY, GROWING, MEASURERS, PAPER, READING, TRAINING

MODELS = tuple(dict.fromkeys((*DECODING, *GROWING, *TRAINING, *READING)))


def measure(options: Options) -> None:
    """Measure one after another."""
    models = tuple(name for name in options.models if name in MODELS)
    sizes = replace(DRY if options.dry_run else PAPER, models=models or None)
    files = [name for name in options.models if name in MEASURERS]
    for name in files or MEASURERS:
        MEASURERS[name](sizes, options.out, say)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, (*MEASURERS, *MODELS)))
