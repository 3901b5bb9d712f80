"""The command line that the scripts of `packages/*/experiments/` share.

A script says what to measure, in one function that takes `Options`, and ends with

    if __name__ == "__main__":
        sys.exit(run_script(measure, __doc__, MODELS))
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mezzo_core.errors import UserError, nearest, printable
from mezzo_core.reproduction.result_file import Result
from mezzo_core.reproduction.runner import Job, fill
from mezzo_core.train.stopping import StoppedError

if TYPE_CHECKING:
    from mezzo_core.data import DataConfig
    from mezzo_core.train.config import TrainConfig

TRAINING: dict[str, Any] = {"kind": "training", "unit": "perplexity"}
"""What a result's header says unless a script says otherwise."""


@dataclass(frozen=True)
class Options:
    """What a command line selects; what follows `dry_run` is for trainings."""

    out: Path  # folder of the result files
    models: tuple[str, ...]  # the models to measure, in the order of the paper
    device: torch.device  # the GPU; the CPU in a dry run
    dry_run: bool  # whether this is a rehearsal at toy size
    data: str = "embedded"  # the text to train on, as in `DataConfig`
    tokenizer: str = "byte"
    seeds: tuple[int, ...] = (0, 1, 2)
    runs: Path = Path("runs/experiments")  # scratch folder
    jobs: int = 1  # trainings at the same time
    cuda_graph: bool = False  # whether small models' steps are replayed
    tokens: int = 0  # millions of tokens of a training, where that can be chosen

    @property
    def text(self) -> "DataConfig":
        """The text to train on."""
        from mezzo_core.data import DataConfig  # which needs mezzo-core[train]

        return DataConfig(source=self.data, tokenizer=self.tokenizer)

    def run(self, name: str, jobs: Iterable[Job], **header: Any) -> Result:
        """Measure the models that are asked for, and return the result file of this name.

        The jobs are those of all models: the header's models, columns and groups come from them.
        """
        return fill(
            self.out / f"{name}.json",
            TRAINING | header,
            jobs,
            self.runs / name,
            self.device,
            models=self.models,
            processes=self.jobs,
        )

    def sweep(
        self,
        name: str,
        configs: Mapping[str, "TrainConfig"],
        rates: Mapping[str, float],
        seeds: Sequence[int] | None = None,
        **header: Any,
    ) -> Result:
        """Train the models that are asked for at several rates, see `training.sweep`."""
        from mezzo_core.reproduction.training import sweep  # which needs mezzo-core[train]

        result = self.run(name, [], columns=tuple(rates), models=tuple(configs), **header)
        wanted = {model: config for model, config in configs.items() if model in self.models}
        where = (self.runs / name, self.device, self.jobs)
        sweep(result, wanted, rates, self.seeds if seeds is None else seeds, *where)
        return result


def run_script(
    measure: Callable[[Options], None],
    description: str,
    models: Sequence[str],
    *,
    trains: bool = False,
    parallel: bool = False,
    replayed: bool = False,
    tokens: int = 0,
) -> int:
    """Run a script's function on what the command line selects.

    --help shows the first line of the script's docstring. A script that `trains` has options of
    text, a `parallel` one of seeds and jobs, one with `tokens` that of the millions of tokens of a
    training. Models that may be `replayed` are so small that their steps can be CUDA graphs.

    Returns:
        The exit code: 0, 2 after a mistake that the user can mend, 130, 143 or 129 where Ctrl-C,
        SIGTERM or SIGHUP ended a training. One line tells of it.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the results")
    add("--models", nargs="+", default=models, help=f"of {', '.join(models)}")
    add("--dry-run", action="store_true", help="toy sizes, on a CPU")
    if trains:
        add("--data", default=Options.data, help="a file, a folder or a glob of text")
        add("--tokenizer", default=Options.tokenizer)
        add("--runs", type=Path, default=Options.runs, help="scratch")
    if parallel:
        add("--seeds", nargs="+", type=int, default=Options.seeds)
        add("--jobs", type=int, default=1, help="trainings at the same time, over all GPUs")
    if replayed:
        add("--cuda-graph", action="store_true", help="replay steps as CUDA graphs")
    if tokens:
        add("--tokens", type=int, default=tokens, help="millions of tokens of a training")
    found = vars(parser.parse_args())
    found["seeds"] = tuple(found.get("seeds", Options.seeds))
    try:
        for name in found["models"]:
            if name not in models:
                raise UserError(f"no model is named {name!r}{nearest(name, models)}")
        if found.get("jobs", 1) < 1:
            raise UserError(f"--jobs must be 1 or more, got {found['jobs']}")
        if not (found["dry_run"] or torch.cuda.is_available()):
            raise UserError("this needs a CUDA GPU: --dry-run rehearses it on a CPU")
        found["models"] = tuple(name for name in models if name in found["models"])
        measure(Options(**found, device=torch.device("cpu" if found["dry_run"] else "cuda")))
    except UserError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return 2
    except StoppedError as stop:
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"{printable(str(stop))}\n")
        return stop.exit_code
    return 0
