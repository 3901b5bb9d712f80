"""Measure Figure 4 and footnote 7 (whole models of 1.3B), and ops and layers beside fla's.

    python packages/gsa/experiments/model_speed.py --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/model_speed.py --out DIR --models GSA GLA
    python packages/gsa/experiments/model_speed.py --out DIR --dry-run    # toy sizes, on a CPU

Writes speed_training.json (training on batches of 16,384 tokens, with the peak of the memory),
speed_slots.json (footnote 7), speed_generation.json (latency after a prompt of 2,048 tokens) and
bench_fla.json; `--models bench_fla` measures that alone. fla (flash-linear-attention) is left out
where it is not installed; it tunes its kernels for minutes. `mezzo-gsa bench` measures the same at
this machine's sizes.
"""

import sys

from mezzo_gsa.reproduction.speed import SPEEDS

if __name__ == "__main__":
    sys.exit(SPEEDS.script(__doc__))
