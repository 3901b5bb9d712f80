"""Run the sweep of `mezzo-gsa mqar` cut down for one GPU (Figure 3a).

    python packages/gsa/benchmarks/mqar.py --out DIR --vocab-size 1024 --epochs 64 --seconds 220
    python packages/gsa/benchmarks/mqar.py --out DIR --widths 64 128 --models gsa gla
    python packages/gsa/benchmarks/mqar.py --out DIR --join A B    # no runs: those of other folders
    python packages/gsa/benchmarks/mqar.py --dry-run --out DIR             # toy sizes, on a CPU

The protocol's task, models and widths, but fewer rows, epochs and learning rates, and most rows to
train on have fewer pairs, which is easier to learn: the result says under "left_out" what was cut.
The committed sweeps are the first command's, with --compile and for some models --lr 2.15e-3; that
of the file with "conv" has --conv-width 3, that with "fan_in" --init fan_in, both --seconds 150.
A folder goes on where it was left; with several GPUs, give each a folder and join them afterwards.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mezzo_core.data.mqar import MQARConfig
from mezzo_core.errors import UserError
from mezzo_core.papers.runs import write_result
from mezzo_gsa.mqar.config import RecallTraining, SweepConfig
from mezzo_gsa.mqar.model import MIXERS
from mezzo_gsa.mqar.result import SweepResult
from mezzo_gsa.mqar.sweep import sweep
from rich.console import Console

WHOLE = SweepConfig()
TOY = RecallTraining(
    task=MQARConfig(vocab_size=64, seq_len=32, num_pairs=4),
    train_rows=64,
    test_rows=16,
    batch_size=16,
    epochs=1,
)


def main(words: list[str] | None = None) -> int:
    """Train what the command line selects; return 0, or 2 when the user can mend a mistake."""
    arguments = parse(words)
    say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    try:
        config = configure(arguments)
        if not (arguments.dry_run or torch.cuda.is_available()):
            raise UserError("this takes days without a CUDA GPU: --dry-run rehearses on a CPU")
        device = "cpu" if arguments.dry_run else "cuda"
        if arguments.join:
            result = join(config.training, arguments.join, arguments.out, torch.device(device))
        else:
            result = sweep(config, arguments.out, say, device=device)
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    if arguments.commit and result.path.exists():
        content = {**json.loads(result.path.read_text()), "commit": arguments.commit}
        write_result(result.path, content)
    for run in result.best():
        say(f"{run.model} C={run.d_model}: {run.accuracy:.4f} with lr {run.lr:g}")
    for sentence in result.left_out():
        say(f"left out: {sentence}")
    return 0


def join(
    training: RecallTraining, folders: list[Path], out: Path, device: torch.device
) -> SweepResult:
    """Add to the runs of one folder those of others, which trained in the same way.

    Raises:
        UserError: if a folder has no result, or one of another training or machine.
    """
    result = SweepResult(training, out, device)
    for folder in folders:
        part = SweepResult(training, folder, device)
        if not part.runs:
            raise UserError(f"{part.path} holds no runs")
        for run in part.runs:
            if run not in result.runs:
                result.add(run)
    return result


def configure(arguments: argparse.Namespace) -> SweepConfig:
    """Return the sweep within the budget."""
    training = replace(
        TOY if arguments.dry_run else WHOLE.training,
        seconds=arguments.seconds,
        conv_width=arguments.conv_width,
        init=arguments.init,
        compile=arguments.compile,
    )
    if not arguments.dry_run:
        training = replace(
            training,
            train_pairs=tuple(arguments.train_pairs),
            task=replace(training.task, vocab_size=arguments.vocab_size),
            train_rows=arguments.train_rows,
            test_rows=arguments.test_rows,
            epochs=arguments.epochs,
        )
    return SweepConfig(
        models=tuple(arguments.models),
        widths=(16,) if arguments.dry_run else tuple(arguments.widths),
        learning_rates=tuple(arguments.lr),
        skip_solved=True,
        training=training,
    )


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    models = list(WHOLE.models)
    parser.add_argument("--join", nargs="+", type=Path, help="folders whose runs to add; none runs")
    parser.add_argument("--models", nargs="+", default=models, help=f"of {', '.join(MIXERS)}")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WHOLE.widths))
    parser.add_argument("--lr", nargs="+", type=float, default=[4.64e-4])
    parser.add_argument("--vocab-size", type=int, default=WHOLE.training.task.vocab_size)
    parser.add_argument("--train-pairs", nargs="*", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--train-rows", type=int, default=50_000)
    parser.add_argument("--test-rows", type=int, default=1000)
    parser.add_argument("--conv-width", type=int, default=0, help="of a first layer's convolution")
    parser.add_argument("--init", default=WHOLE.training.init, help="zoology or fan_in")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seconds", type=float, help="of a run: none begins an epoch after that")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
