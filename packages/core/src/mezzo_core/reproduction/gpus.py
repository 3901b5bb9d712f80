"""The speed and the memory of whole models in training, on one GPU and on two."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mezzo_core.data import load_tokenizer
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.result_file import Cell, Entry, Header
from mezzo_core.reproduction.runner import Job, run
from mezzo_core.reproduction.script import Options, run_script, say
from mezzo_core.reproduction.training import WARMUP, measure_run
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World
from mezzo_core.train.peaks import peak_flops, peak_speed

SPEED, SHARE, PEAK, LOSS = ("tokens/s", "% of bf16 peak", "peak GB of a GPU", "Train. loss")
SETTINGS = {
    "1 GPU": (1, False),
    "2 GPUs": (2, False),
    "1 GPU, activations computed again": (1, True),
}
"""How many processes train, and whether with activation checkpointing."""
Found = TypeVar("Found")
STEPS, TOKENS = 2 * WARMUP, 131_072
"""Of each training, and of a step."""


def run_settings(
    description: str,
    models: Mapping[str, tuple[str, str]],
    recipe: Callable[[str, str], TrainConfig],
) -> int:
    """Run a script that trains models, of a size and an architecture, in each setting.

    In a dry run all are tiny. See `run_script`.
    """

    def measure(options: Options) -> None:
        tiny = options.dry_run
        recipes = {m: recipe("tiny" if tiny else size, name) for m, (size, name) in models.items()}
        measure_settings(options, recipes)

    return run_script(measure, description, tuple(models), trains=True)


def measure_settings(options: Options, recipes: Mapping[str, TrainConfig]) -> None:
    """Train recipes, by the models' names, for a few steps in each setting: train_gpus.json.

    Width, depth, T, optimizer and micro-batches are kept. In a dry run a step has two sequences,
    and two processes share the CPU.

    Raises:
        UserError: if the result file cannot be written or continued.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if a training fails.
    """
    header = Header(
        kind="training",
        title="Whole models on one GPU and on two",
        setting=f"{STEPS} steps of {TOKENS:,} tokens by the recipes, but for the vocabulary, which "
        f"is that of {Path(options.tokenizer).name}; bf16 autocast over float32, layers and loss "
        f"compiled; speed: of all GPUs, median after {WARMUP} steps; the peak is the data sheet's, "
        "at 3 times the forward's FLOPs",
        how="scaled down" if options.dry_run else "other hardware",
        columns=(SPEED, SHARE, PEAK, LOSS),
        models=tuple(f"{model}, {setting}" for model in recipes for setting in SETTINGS),
        unit="",
        better="higher",
    )
    jobs = []
    # Settings one after another: a run that is cut short has all models on one GPU and on two.
    for (setting, (count, again)), model in product(SETTINGS.items(), options.models):
        row = f"{model}, {setting}"
        if options.device.type == "cuda" and count > torch.cuda.device_count():
            say(f"{row}: left out, there are {torch.cuda.device_count()}")
            continue
        config = replace(shortened(recipes[model], options), activation_checkpointing=again)
        told = (SHARE, PEAK) if has_known_peak(options.device) else ()
        cells = tuple(Cell(row, column) for column in (SPEED, *told, LOSS))
        jobs.append(Job(cells, partial(_measure, config, count)))
    run(options.open("train_gpus", header), jobs, options.runs / "train_gpus", options.device)


def shortened(recipe: TrainConfig, options: Options) -> TrainConfig:
    """Return a few steps of a recipe, on the given text."""
    vocab_size = load_tokenizer(options.tokenizer).vocab_size
    return replace(
        recipe,
        model=replace(recipe.model, vocab_size=vocab_size),
        data=options.text,
        batch_size=2 if options.dry_run else TOKENS // recipe.seq_len,
        steps=STEPS,
        eval_every=STEPS,
        eval_batches=1,
        checkpoint_every=STEPS,
    )


def _measure(
    config: TrainConfig,
    count: int,
    cells: tuple[Cell, ...],
    folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    found = measure_processes(config, count, folder, device)
    speed = found["tokens_per_second"]
    values = {
        SPEED: speed,
        SHARE: share_of_peak(config, speed / count, device),
        PEAK: found["peak_gb"],
        LOSS: found["steps"]["train"][-1][1],
    }
    yield [cell.entry(values[cell.column]) for cell in cells]


def measure_processes(
    config: TrainConfig, count: int, folder: Path, device: torch.device
) -> dict[str, Any]:
    """Do as `measure_run` in new processes, as many as asked for; the memory is their highest."""
    found = run_processes(count, measure_run, config, folder, torch.device(device.type))
    peaks = [each["peak_gb"] for each in found.values()]
    return {**found[0], "peak_gb": None if None in peaks else max(peaks)}


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
        found: dict[int, Found] = elastic_launch(launch, work)(*arguments)
    except ChildFailedError as error:
        if "OutOfMemoryError" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
    return found


def share_of_peak(config: TrainConfig, tokens_per_second: float, device: torch.device) -> float:
    """Return the % of a GPU's peak at 3 times the forward's FLOPs; NaN if the peak is not known."""
    peak = peak_speed(config, on_meta(config.model), World(device))
    return 100 * tokens_per_second / (peak or math.nan)


def has_known_peak(device: torch.device) -> bool:
    """Tell whether a device is a GPU whose peak is known here."""
    return device.type == "cuda" and peak_flops(torch.cuda.get_device_name(device)) is not None
