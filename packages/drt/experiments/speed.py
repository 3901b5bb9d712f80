"""Measure decoding (Table 3), training (Figure 3a, Table 4), and reading to 16M tokens.

    python packages/drt/experiments/speed.py --out packages/drt/results/nvidia-h200
    python packages/drt/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes inference.json, length.json, training_speed.json and reading.json; `--models inference
BaseLM` measures a part. `mezzo-drt reproduce --scale gpu` measures the same and compares it with
the paper.
"""

import sys

from mezzo_core.papers.speeds import run_speeds
from mezzo_drt.speed import DECODING, DRY, GROWING, MEASURERS, PAPER, READING, TRAINING

if __name__ == "__main__":
    every = (*DECODING, *GROWING, *TRAINING, *READING)
    sys.exit(run_speeds(__doc__, MEASURERS, PAPER, DRY, every))
