"""Measure the paper's Table 2, latency over length, training throughputs, and decoding.

    python packages/recurrent_transformer/experiments/speed.py \
        --out packages/recurrent_transformer/results/nvidia-h200
    python packages/recurrent_transformer/experiments/speed.py --out DIR --dry-run    # on a CPU

Writes speed_graphs.json, speed_length.json, speed_throughput.json and speed_decoding.json;
`--models length decoding` measures a part. `mezzo-recurrent-transformer bench` measures the same at
this machine's sizes, and `mezzo-recurrent-transformer reproduce` compares it with the paper.
"""

import sys

from mezzo_recurrent_transformer.reproduction.speed import SPEEDS

if __name__ == "__main__":
    sys.exit(SPEEDS.script(__doc__))
