"""Measure decoding (Table 3), training (Figure 3a, Table 4), and reading to 16M tokens.

    python packages/drt/experiments/speed.py --out packages/drt/results/nvidia-h200
    python packages/drt/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes inference.json, length.json, training_speed.json and reading.json; `--models inference
BaseLM` measures a part. `mezzo-drt bench` measures the same at this machine's sizes, and `mezzo-drt
reproduce` compares it with the paper.
"""

import sys

from mezzo_drt.reproduction.speed import SPEEDS

if __name__ == "__main__":
    sys.exit(SPEEDS.script(__doc__))
