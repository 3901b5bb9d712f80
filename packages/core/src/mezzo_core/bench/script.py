"""The command line that the scripts of `packages/*/experiments/` share.

A script says what to measure, in one function that takes `Options`, and ends with

    if __name__ == "__main__":
        sys.exit(run_script(measure, __doc__, MODELS))
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mezzo_core.errors import UserError, nearest, printable


@dataclass(frozen=True)
class Options:
    """What a command line selects.

    Attributes:
        out: folder of the result files.
        models: the models to measure, in the order of the paper.
        device: the GPU; the CPU in a dry run.
        dry_run: whether this is a rehearsal at toy size.
        data, tokenizer: the text to train on, as in `DataConfig`.
        seeds: of the trainings.
        runs: scratch folder of the trainings.
    """

    out: Path
    models: tuple[str, ...]
    device: torch.device
    dry_run: bool
    data: str = "embedded"
    tokenizer: str = "byte"
    seeds: tuple[int, ...] = (0, 1, 2)
    runs: Path = Path("runs/experiments")


def run_script(
    measure: Callable[[Options], None],
    description: str,
    models: Sequence[str],
    *,
    trains: bool = False,
    words: Sequence[str] | None = None,
) -> int:
    """Run a script's function on what the command line selects.

    Args:
        measure: the script's function.
        description: the script's docstring; its first line is shown by --help.
        models: all models that the script can measure.
        trains: whether it trains: then the command line has the options of text and seeds too.
        words: the command line; None takes the process's own.

    Returns:
        The exit code: 0, or 2 after a mistake that the user can mend, which is told in one line.
    """
    try:
        measure(_parse(description, tuple(models), trains, words))
    except UserError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return 2
    return 0


def say(line: str) -> None:
    """Write a line to the standard output at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parse(
    description: str, models: tuple[str, ...], trains: bool, words: Sequence[str] | None
) -> Options:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--models", nargs="+", default=models, help=f"of {', '.join(models)}")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    if trains:
        usual = Options
        parser.add_argument("--data", default=usual.data, help="a file, a folder or a glob of text")
        parser.add_argument("--tokenizer", default=usual.tokenizer)
        parser.add_argument("--seeds", nargs="+", type=int, default=usual.seeds)
        parser.add_argument("--runs", type=Path, default=usual.runs, help="scratch")
    found = vars(parser.parse_args(words))
    for name in found["models"]:
        if name not in models:
            raise UserError(f"no model is named {name!r}{nearest(name, models)}")
    if not (found["dry_run"] or torch.cuda.is_available()):
        raise UserError("this needs a CUDA GPU: --dry-run rehearses it on a CPU")
    found["models"] = tuple(name for name in models if name in found["models"])
    if trains:
        found["seeds"] = tuple(found["seeds"])
    return Options(**found, device=torch.device("cpu" if found["dry_run"] else "cuda"))
