"""Measure recall as GSA's authors did (Figure 3a): all models at all widths and six rates.

    python packages/gsa/experiments/mqar.py --out packages/gsa/results/nvidia-h200 --jobs 12
    python packages/gsa/experiments/mqar.py --dry-run --out DIR           # toy sizes, on a CPU

Writes mqar_authors.json. A run ends after 64 epochs or when it has solved the task, and is never
cut by time. The committed result mqar is of an earlier program: its "setting" says what was
different.
"""

import sys
from dataclasses import replace

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.runner import run
from mezzo_gsa.mqar.task import MQARConfig
from mezzo_gsa.reproduction.mqar import PROTOCOLS

FULL = replace(PROTOCOLS["authors"], skip_solved=True, precision="bf16", compile=True)
TOY = MQARConfig(vocab_size=64, seq_len=32, num_pairs=4, train_rows=64, test_rows=16)
REHEARSAL = replace(
    PROTOCOLS["authors"], task=TOY, widths=(16, 32), learning_rates=(1e-2,), batch_size=16, epochs=1
)


def measure(options: Options) -> None:
    """Run what the result has not."""
    config = replace(REHEARSAL if options.dry_run else FULL, cuda_graph=options.cuda_graph)
    jobs = config.jobs(options.runs, options.models)
    run(options.open(config.name, config.header()), jobs, *options.where)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, FULL.models, parallel=True, replayed=True))
