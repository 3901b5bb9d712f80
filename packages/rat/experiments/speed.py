"""Measure the paper's Tables 6, 7 and 8 and Figure 5 (the throughputs of Tables 1 and 11).

    python packages/rat/experiments/speed.py --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/speed.py --out DIR --dry-run      # toy sizes, on a CPU

Writes speed_NAME.json for each. `mezzo-rat reproduce --scale gpu` measures the same and compares it
with the paper.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Options, run_script, say
from mezzo_rat.speed import DRY, FULL, GENERATING, LAYERS, MEASURERS

MODELS = tuple(dict.fromkeys((*LAYERS, *GENERATING)))


def measure(options: Options) -> None:
    """Measure one after another."""
    sizes = replace(DRY if options.dry_run else FULL, models=options.models)
    for measurer in MEASURERS.values():
        measurer(sizes, options.out, say)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS))
