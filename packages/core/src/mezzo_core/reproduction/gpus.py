"""Work in several processes, one on each GPU, and the speed of a training there."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mezzo_core.data import load_tokenizer
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.result_file import Cell, Entry, say
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.script import Options
from mezzo_core.reproduction.training import WARMUP, measure_run
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World
from mezzo_core.train.peaks import peak_flops, peak_speed

Found = TypeVar("Found")
COLUMNS = ("tokens/s", "% of bf16 peak", "peak GB of a GPU", "Train. loss")
STEPS = 2 * WARMUP
"""Steps of a training that is timed."""


def time_trainings(
    options: Options, rows: Mapping[str, tuple[TrainConfig, int]], setting: str
) -> None:
    """Train for a few steps, and write speed, memory and loss to train_gpus.json.

    Each of the rows is a run, which gets the text of the options, and the number of its processes.
    `setting` says how much a step trains on, and what is the same in all rows.
    """
    most = max(1, torch.cuda.device_count())
    for row in options.models:
        if rows[row][1] > most:
            say(f"{row}: not measured, with {most} GPUs")
    is_compiled = all(run.compile for run, _ in rows.values())
    how = "layers and loss compiled" if is_compiled else "without torch.compile"
    columns = COLUMNS if has_known_peak(options.device) else (COLUMNS[0], COLUMNS[-1])
    options.run(
        "train_gpus",
        [
            Job(tuple(Cell(row, c) for c in columns), partial(_time_training, run, count, options))
            for row, (run, count) in rows.items()
            if count <= most
        ],
        title="Whole models on one GPU and on two",
        setting=f"{STEPS} steps of {setting} by the recipes, but for the vocabulary, which is that "
        f"of {Path(options.tokenizer).name}; bf16 autocast over float32, {how}; "
        f"speed: of all GPUs, median after {WARMUP} steps; the peak is the data sheet's, at 3 "
        "times the forward's FLOPs",
        how="scaled down" if options.dry_run else "other hardware",
        columns=COLUMNS,
        models=tuple(rows),
        unit="",
        better="higher",
    )


def _time_training(
    config: TrainConfig,
    count: int,
    options: Options,
    cells: tuple[Cell, ...],
    folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    steps = STEPS
    if options.dry_run:
        config, steps = replace(config, seq_len=16, batch_size=2), 2
    config = replace(
        config,
        model=replace(config.model, vocab_size=load_tokenizer(options.tokenizer).vocab_size),
        data=options.text,
        steps=steps,
        eval_every=steps,
        eval_batches=1,
        checkpoint_every=steps,
    )
    device = torch.device(device.type)
    found = run_processes(count, measure_run, config, folder, device)
    speed, loss = found[0]["tokens_per_second"], found[0]["steps"]["train"][-1][1]
    peak = max(each["peak_gb"] or 0 for each in found.values())
    told = (speed, share_of_peak(config, speed / count, device), peak, loss)
    values = dict(zip(COLUMNS, told, strict=True))
    yield [cell.entry(values[cell.column]) for cell in cells]


def run_processes(count: int, work: Callable[..., Found], *arguments: Any) -> dict[int, Found]:
    """Call `work` in new processes, as torchrun does; return what each returns, by its rank.

    Raises:
        torch.OutOfMemoryError: if one has no room on its GPU.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if one fails otherwise.
    """
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="mezzo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        found: dict[int, Found] = elastic_launch(launch, _call)(work, *arguments)
    except ChildFailedError as error:
        if "OutOfMemoryError" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
    return found


def _call(work: Callable[..., Found], *arguments: Any) -> Found:
    """Call `work`: the launcher wants a function with a name, which a `partial` has not."""
    return work(*arguments)


def share_of_peak(config: TrainConfig, tokens_per_second: float, device: torch.device) -> float:
    """Return the % of a GPU's peak at 3 times the forward's FLOPs; NaN if the peak is not known."""
    peak = peak_speed(config, on_meta(config.model), World(device))
    return 100 * tokens_per_second / (peak or math.nan)


def has_known_peak(device: torch.device) -> bool:
    """Tell whether a device is a GPU whose peak is known here."""
    return device.type == "cuda" and peak_flops(torch.cuda.get_device_name(device)) is not None
