"""The speed and the memory of whole models in training, on one GPU or on several."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mezzo_core.bench.origin import origin
from mezzo_core.bench.result import Header, Result
from mezzo_core.bench.script import Options, say
from mezzo_core.bench.training import WARMUP, measure_run
from mezzo_core.data import DataConfig, load_tokenizer
from mezzo_core.train.config import TrainConfig

PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}
"""Dense bf16 FLOP/s in the GPU's data sheet."""
COLUMNS = ("tokens/s", "% of bf16 peak", "peak GB of a GPU", "Train. loss")
SETTINGS = {
    "1 GPU": (1, False),
    "2 GPUs": (2, False),
    "1 GPU, activations computed again": (1, True),
}
"""How many processes train, and whether with activation checkpointing."""
STEPS, TOKENS = 2 * WARMUP, 131_072
"""Of each training, and of a step."""


def measure_settings(options: Options, recipes: Mapping[str, TrainConfig]) -> None:
    """Train models for a few steps in each setting, and write train_gpus.json.

    Args:
        options: of the script. Models that are not among its own are left out; in a dry run a step
            has two sequences, and two processes share the CPU.
        recipes: all models by their names. Width, depth, T, optimizer and micro-batches are kept.

    Raises:
        UserError: if the result file cannot be written or continued.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if a training fails.
    """
    device, where = options.device, origin(options.device)
    header = Header(
        kind="training",
        title="Whole models on one GPU and on two",
        setting=f"{STEPS} steps of {TOKENS:,} tokens by the recipes, but for the vocabulary, which "
        f"is that of {Path(options.tokenizer).name}; bf16 autocast over float32, layers and loss "
        f"compiled; speed: of all GPUs, median after {WARMUP} steps; the peak is the data sheet's, "
        "at 3 times the forward's FLOPs",
        how="scaled down" if options.dry_run else "other hardware",
        columns=COLUMNS,
        models=tuple(f"{model}, {setting}" for model in recipes for setting in SETTINGS),
        unit="",
        better="higher",
    )
    result = Result(options.out / "train_gpus.json", header, where, say)
    # Settings one after another: a run that is cut short has all models on one GPU and on two.
    for (setting, (count, again)), model in product(SETTINGS.items(), options.models):
        config, row = shortened(recipes[model], options), f"{model}, {setting}"
        if result.has(row, COLUMNS[-1]):
            continue
        if device.type == "cuda" and count > torch.cuda.device_count():
            say(f"{row}: left out, there are {torch.cuda.device_count()}")
            continue
        changed = replace(config, activation_checkpointing=again)
        found = measure_processes(changed, count, options.runs / "train_gpus", device)
        speed, loss = found["tokens_per_second"], found["steps"]["train"][-1][1]
        share = share_of_peak(config, speed / count, where["gpu"])
        values = (speed, share, found["peak_gb"], loss)
        for column, value in zip(COLUMNS, values, strict=True):
            if value is not None and not result.has(row, column):
                result.add(value, model=row, column=column)


def shortened(recipe: TrainConfig, options: Options) -> TrainConfig:
    """Return a few steps of a recipe, on the given text."""
    vocab_size = load_tokenizer(options.tokenizer).vocab_size
    return replace(
        recipe,
        model=replace(recipe.model, vocab_size=vocab_size),
        data=DataConfig(source=options.data, tokenizer=options.tokenizer),
        batch_size=2 if options.dry_run else TOKENS // recipe.seq_len,
        steps=STEPS,
        eval_every=STEPS,
        eval_batches=1,
        checkpoint_every=STEPS,
    )


def measure_processes(
    config: TrainConfig, count: int, folder: Path, device: torch.device
) -> dict[str, Any]:
    """Do as `measure_run` in new processes, as many as asked for; the memory is their highest."""
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=config.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    found = elastic_launch(launch, measure_run)(config, folder, torch.device(device.type))
    peaks = [each["peak_gb"] for each in found.values()]
    return {**found[0], "peak_gb": None if None in peaks else max(peaks)}


def share_of_peak(config: TrainConfig, tokens_per_second: float, gpu: str | None) -> float | None:
    """Return the % of a GPU's peak at 3 times the forward's FLOPs; None if it is not known."""
    with torch.device("meta"):
        flops = 3 * config.model.build().flops_per_token(config.seq_len) * tokens_per_second
    peak = PEAK_FLOPS.get(gpu or "")
    return None if peak is None else 100 * flops / peak
