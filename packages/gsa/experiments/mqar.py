"""Run three sweeps of `mezzo-gsa mqar` cut down for one GPU (Figure 3a).

    python packages/gsa/experiments/mqar.py --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/mqar.py --dry-run --out DIR           # toy sizes, on a CPU

The protocol's task, models and widths, but fewer rows and learning rates, and most rows to train on
have fewer pairs, which is easier to learn. The second sweep has wider initial weights, the third a
convolution as the first layer. For other sizes use the command.

The committed results are of an earlier program, with a limit on the seconds of a run; their
"setting" says what was different.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Options, run_script, say
from mezzo_gsa.mqar.sweep import NAMES, SweepConfig, sweep
from mezzo_gsa.mqar.task import MQARConfig

TASK = MQARConfig(
    vocab_size=1024, train_rows=50_000, train_pairs=(4, 8, 16, 32, 64), test_rows=1000
)
TOY = MQARConfig(vocab_size=64, seq_len=32, num_pairs=4, train_rows=64, test_rows=16)
SMALL = SweepConfig(
    TASK, learning_rates=(4.64e-4, 2.15e-3), skip_solved=True, precision="auto", compile=True
)
REHEARSAL = SweepConfig(TOY, widths=(16,), learning_rates=(1e-2,), batch_size=16, epochs=1)
CHANGES = ({}, {"init": "fan_in"}, {"conv_width": 3})


def measure(options: Options) -> None:
    """Run one sweep after another."""
    config = replace(REHEARSAL if options.dry_run else SMALL, models=options.models)
    for change in CHANGES:
        each = replace(config, **change)
        sweep(each, options.out, say, runs=options.runs, device=options.device)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, list(NAMES)))
