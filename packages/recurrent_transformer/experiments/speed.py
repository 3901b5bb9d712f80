"""Measure the paper's Table 2, latency over length, training throughputs, and decoding.

    python packages/recurrent_transformer/experiments/speed.py \
        --out packages/recurrent_transformer/results/nvidia-h200
    python packages/recurrent_transformer/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes speed_graphs.json, speed_length.json, speed_throughput.json and speed_decoding.json;
`--models length decoding` measures a part. `mezzo-recurrent-transformer reproduce --scale gpu`
measures the same and compares it with the paper.
"""

import sys

from mezzo_core.papers.speeds import run_speeds
from mezzo_recurrent_transformer.speed import DRY, FULL, LAYERS, MEASURERS, MODELS

if __name__ == "__main__":
    every = (*LAYERS["graphs"], *LAYERS["length"], *MODELS)
    sys.exit(run_speeds(__doc__, MEASURERS, FULL, DRY, every))
