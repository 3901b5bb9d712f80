"""Measure recall as GSA's authors did (Figure 3a), in three parts that --models selects.

    python packages/gsa/experiments/mqar.py --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/mqar.py --out DIR --models gsa_2_layers gsa_4_layers --jobs 2
    python packages/gsa/experiments/mqar.py --dry-run --out DIR           # toy sizes, on a CPU

First GSA at C = 128 with two layers and with the authors' four, and then there with the paper's
damping and with its scale, each at three rates and with three seeds: mqar_authors_variants.json.
Then all models at all widths and six rates: mqar_authors.json. A run ends after 64 epochs or when
it has solved the task, and is never cut by time.

mqar_authors_variants feeds no claim. The committed result mqar is of an earlier program: its
"setting" says what was different.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mezzo_core.reproduction import Header, Options, run_script
from mezzo_core.reproduction.runner import Job, run
from mezzo_gsa.mqar.task import MQARConfig
from mezzo_gsa.reproduction.mqar import NAMES, PROTOCOLS, SweepConfig

GSA = NAMES["gsa"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gsa_2_layers": (f"{GSA}, two layers", {"num_layers": 2}),
    "gsa_4_layers": (GSA, {}),
    "gsa_damping_8": (f"{GSA}, damping 8", {"damping": 8.0}),
    "gsa_scale_1": (f"{GSA}, scale 1", {"scale": "one"}),
}
"""GSA at one width: its row, and what differs from the authors' setting."""
FULL = replace(PROTOCOLS["authors"], skip_solved=True, precision="bf16", compile=True)
TOY = MQARConfig(vocab_size=64, seq_len=32, num_pairs=4, train_rows=64, test_rows=16)
RATES = 3
"""Of a variant: the first of the setting's six, which are from the middle."""
SEEDS = 3
"""Of a variant, from the setting's own on: whether a model learns the task at all depends on it."""
REHEARSAL = replace(
    PROTOCOLS["authors"], task=TOY, widths=(16, 32), learning_rates=(1e-2,), batch_size=16, epochs=1
)


def measure(options: Options) -> None:
    """Run the parts; what the result has is left out."""
    config = replace(REHEARSAL if options.dry_run else FULL, cuda_graph=options.cuda_graph)
    tasks = [replace(config.task, seed=config.task.seed + i) for i in range(SEEDS)]
    variants = [
        at_one_width(config, task=task, **changes).job("gsa", config.widths[1], options.runs, row)
        for task in tasks
        for name, (row, changes) in VARIANTS.items()
        if name in options.models
    ]
    rows = tuple(row for row, _ in VARIANTS.values())
    header = replace(at_one_width(config).header(), models=rows)
    fill(f"{config.name}_variants", header, variants, options)
    models = [name for name in options.models if name in config.models]
    fill(config.name, config.header(), config.jobs(options.runs, models), options)


def at_one_width(config: SweepConfig, **changes: Any) -> SweepConfig:
    """Return a variant of the setting, at one width and few rates."""
    rates = config.learning_rates[:RATES]
    return replace(config, widths=config.widths[1:2], learning_rates=rates, **changes)


def fill(name: str, header: Header, jobs: Sequence[Job], options: Options) -> None:
    """Do the jobs of a result; without any there is no file."""
    if jobs:
        run(options.open(name, header), jobs, *options.where)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, [*VARIANTS, *FULL.models], parallel=True, replayed=True))
