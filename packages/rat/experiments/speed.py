"""Measure the paper's Tables 6, 7 and 8 and Figure 5 (the throughputs of Tables 1 and 11).

    python packages/rat/experiments/speed.py --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/speed.py --out DIR --dry-run      # toy sizes, on a CPU

Writes speed_table6.json and so on; `--models table6 "RAT(L=16)"` measures a part. `mezzo-rat bench`
measures the same at this machine's sizes, and `mezzo-rat reproduce` compares it with the paper.
"""

import sys

from mezzo_rat.reproduction.speed import SPEEDS

if __name__ == "__main__":
    sys.exit(SPEEDS.script(__doc__))
