"""Train one recurrent layer and one Transformer layer on synthetic tasks (Figure synth).

    python packages/recurrent_transformer/experiments/synthetic.py \
        --out packages/recurrent_transformer/results/nvidia-h200
    python packages/recurrent_transformer/experiments/synthetic.py --dry-run --out DIR  # on a CPU

First whole runs, of 20,000 steps at most, with one rate: they give synthetic.json, the figure. Then
short runs, of 4,000 steps at most, with all rates of the paper's protocol: they give
synthetic_rates.json, which must speak for that rate. `--jobs 12` trains twelve layers at the same
time; `--models recurrent`, and then `--models transformer`, fill the same results, what they have
is not trained again. For other sizes use the command `mezzo-recurrent-transformer synthetic`.
"""

import sys
from dataclasses import replace

from mezzo_core.reproduction import Options, run_script
from mezzo_recurrent_transformer.reproduction.synthetic import NAMES, SweepConfig, sweep
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

SWEEPS = {
    "synthetic": SweepConfig(learning_rates=(1e-3,)),
    "synthetic_rates": SweepConfig(max_steps=4_000),
}
"""Of each result. The recurrent layer does best with the highest rate in nearly all short runs; if
the Transformer's do not agree, the whole runs must have its rate too.
"""
TOY = SweepConfig(
    tuple(replace(task, train_rows=16, test_rows=4) for task in TASKS.values()),
    learning_rates=(1e-3,),
    weight_decays=(0.0,),
    seeds=(0,),
    d_model=16,
    batch_size=8,
    max_steps=2,
    precision="bf16",  # as on a GPU
)


def measure(options: Options) -> None:
    """Run one sweep after the other."""
    runs, device, jobs = options.where
    for name, whole in SWEEPS.items():
        config = TOY if options.dry_run else whole
        config = replace(config, models=options.models, cuda_graph=options.cuda_graph)
        sweep(config, options.out, name=name, runs=runs, device=device, jobs=jobs)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, list(NAMES), parallel=True, replayed=True))
