"""Run the sweep of `mezzo-gsa mqar` cut down for one GPU (Figure 3a).

    python packages/gsa/benchmarks/mqar.py --out DIR --vocab-size 1024 --epochs 64
    python packages/gsa/benchmarks/mqar.py --out DIR --widths 64 128 --models gsa gla
    python packages/gsa/benchmarks/mqar.py --out DIR --join A B    # no runs: those of other folders
    python packages/gsa/benchmarks/mqar.py --dry-run --out DIR             # toy sizes, on a CPU

The protocol's task, models and widths, but fewer rows, epochs and learning rates, and most rows to
train on have fewer pairs, which is easier to learn: the result's "setting" says so.
A folder goes on where it was left; with several GPUs, give each a folder and join them afterwards.

The committed results were made before this task went through core's training loop, with --compile,
for some models --lr 2.15e-3, and a limit of 220 seconds a run (150 with --conv-width 3 or --init
fan_in): by CUDA graphs of the steps, the learning rate falling by epoch, each row weighing the same
whatever its pairs, weight decay for all weights, and a LayerNorm before the head.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from mezzo_core.papers.runs import write_result
from mezzo_gsa.mqar.config import MIXERS, SweepConfig
from mezzo_gsa.mqar.sweep import RecallRun, best, read_runs, result_path, sweep, write_runs
from mezzo_gsa.mqar.task import MQARConfig
from rich.console import Console

WHOLE = SweepConfig()


def main(words: list[str] | None = None) -> int:
    """Train what the command line selects; return 0, or 2 when the user can mend a mistake."""
    arguments = parse(words)
    say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    try:
        config = configure(arguments)
        if not (arguments.dry_run or torch.cuda.is_available()):
            raise UserError("this takes days without a CUDA GPU: --dry-run rehearses on a CPU")
        device = torch.device("cpu" if arguments.dry_run else "cuda")
        if arguments.join:
            runs = join(config, arguments.join, arguments.out, device)
        else:
            runs = sweep(config, arguments.out, say, device=device)
    except UserError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    path = result_path(config, arguments.out)
    if arguments.commit and path.exists():
        write_result(path, {**json.loads(path.read_text()), "commit": arguments.commit})
    for run in best(runs).values():
        accuracy = "diverged" if run.accuracy is None else f"{run.accuracy:.4f}"
        say(f"{run.model} C={run.width}: {accuracy} with lr {run.lr:g}")
    return 0


def join(
    config: SweepConfig, folders: list[Path], out: Path, device: torch.device
) -> list[RecallRun]:
    """Add to the runs of one folder those of others, which trained in the same way.

    Raises:
        UserError: if a folder has no result, or one of another training or machine.
    """
    runs = read_runs(config, result_path(config, out), device)
    for folder in folders:
        path = result_path(config, folder)
        part = read_runs(config, path, device)
        if not part:
            raise UserError(f"{path} holds no runs")
        runs += [run for run in part if run not in runs]
    write_runs(config, result_path(config, out), device, runs)
    return runs


def configure(arguments: argparse.Namespace) -> SweepConfig:
    """Return the sweep within the budget."""
    task = MQARConfig(
        vocab_size=arguments.vocab_size,
        train_rows=arguments.train_rows,
        train_pairs=tuple(arguments.train_pairs),
        test_rows=arguments.test_rows,
    )
    config = SweepConfig(
        task=task,
        models=tuple(arguments.models),
        widths=tuple(arguments.widths),
        learning_rates=tuple(arguments.lr),
        skip_solved=True,
        epochs=arguments.epochs,
        conv_width=arguments.conv_width,
        init=arguments.init,
        compile=arguments.compile,
    )
    if not arguments.dry_run:
        return config
    toy = MQARConfig(vocab_size=64, seq_len=32, num_pairs=4, train_rows=64, test_rows=16)
    return replace(config, task=toy, widths=(16,), batch_size=16, epochs=1)


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    models = list(WHOLE.models)
    parser.add_argument("--join", nargs="+", type=Path, help="folders whose runs to add; none runs")
    parser.add_argument("--models", nargs="+", default=models, help=f"of {', '.join(MIXERS)}")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WHOLE.widths))
    parser.add_argument("--lr", nargs="+", type=float, default=[4.64e-4])
    parser.add_argument("--vocab-size", type=int, default=WHOLE.task.vocab_size)
    parser.add_argument("--train-pairs", nargs="*", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--train-rows", type=int, default=50_000)
    parser.add_argument("--test-rows", type=int, default=1000)
    parser.add_argument("--conv-width", type=int, default=0, help="of a first layer's convolution")
    parser.add_argument("--init", default=WHOLE.init, help="zoology or fan_in")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--commit", help="of the code, where no checkout tells it")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
