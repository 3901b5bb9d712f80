"""Train on one long sequence, on one GPU and shared by two: speed and memory.

    python packages/core/experiments/context.py --out packages/core/results/nvidia-h200
    python packages/core/experiments/context.py --out DIR --dry-run      # toy sizes, on a CPU

Writes context.json. It starts the processes itself, as torchrun does.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from mezzo_core.data import Batch
from mezzo_core.device import autocast
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.reproduction import Options, gpus, run_script
from mezzo_core.reproduction.result_file import Cell, Entry
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.timing import peak_gb
from mezzo_core.reproduction.training_speed import TrainingSpeed
from mezzo_core.train.build import build_model
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.context import part_borders, sequence_part
from mezzo_core.train.distributed import backward, join_world, launched_place
from mezzo_core.train.optim import build_optimizer
from mezzo_gsa import GSAConfig
from mezzo_rat import RATConfig

MIXERS = {
    "GSA": GSAConfig(num_heads=4, num_slots=64),
    "RAT(L=16)": RATConfig(chunk_size=16),
    "Attention": AttentionConfig(head_dim=128),
}
ROWS = {f"{mixer}, {n} GPU{'s' * (n > 1)}": (mixer, n) for n, mixer in product((1, 2), MIXERS)}
LENGTHS, LONGEST = (2**17, 2**20), {"Attention": 2**17}
"""A step of attention on more tokens takes minutes."""
WARMUP, PASSES = 2, 3


def measure(options: Options) -> None:
    """Time training steps of each model at each length."""
    tiny = options.dry_run
    num_layers, C, vocab_size = (2, 128, 64) if tiny else (12, 1024, 32_768)
    lengths = (16, 32) if tiny else LENGTHS
    jobs = []
    for T, (row, (mixer, count)) in product(lengths[::-1], ROWS.items()):
        if mixer not in LONGEST or LONGEST[mixer] >= T:
            model = LMConfig(vocab_size, C, (MIXERS[mixer],) * num_layers)
            jobs.append(Job((Cell(row, str(T)),), partial(measure_row, model, T, count)))
    options.run(
        "context",
        jobs,
        kind="speed",
        title="Training on one sequence, on one GPU and shared by two",
        setting=f"whole steps (forward, backward, AdamW) of {num_layers} layers of width {C} on "
        "one sequence of T random tokens, activations computed again, bf16 autocast over float32 "
        "weights, layers compiled on a GPU; speed: of all GPUs together",
        columns=tuple(map(str, lengths)),
        models=tuple(ROWS),
        unit="tokens/s",
        better="higher",
    )


def measure_row(
    model: LMConfig, T: int, count: int, cells: tuple[Cell, ...], _: Path, device: torch.device
) -> Iterator[list[Entry]]:
    """Yield the speeds of a row, and the memory of the GPU that needs most."""
    found = gpus.run_processes(count, time_steps, model, T, device.type).values()
    first, peaks = next(iter(found)), [steps[-1].peak_gb for steps in found]
    details = {} if None in peaks else {"peak_gb": max(peaks)}
    for cell in cells:
        yield [
            cell._replace(seed=i).entry(step.tokens_per_second, **details)
            for i, step in enumerate(first)
        ]


def time_steps(model_config: LMConfig, T: int, device: str) -> list[TrainingSpeed]:
    """Time training steps on a sequence of T tokens, which all processes share."""
    is_gpu, size = device == "cuda", launched_place().size
    config = TrainConfig(
        "context",
        model_config,
        seq_len=T,
        compile=is_gpu,
        activation_checkpointing=True,
        shard=False,
        context_parallel=size,
    )
    with join_world(device, size) as world:
        model, loss_function = build_model(config, world)
        optimizer = build_optimizer(model, config.optim)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(model_config.vocab_size, (1, T + 1), generator=draw)
        tokens = tokens.to(world.device)
        whole = Batch(tokens[:, :-1], tokens[:, 1:])
        batch = sequence_part(whole, part_borders(model, T, size), world.rank)
        found = []
        for _ in range(WARMUP + PASSES):
            start = time.perf_counter()
            with autocast(world.device, "auto"):
                loss = loss_function(*batch, reduction="sum") / T
            backward(loss, model, world, is_last=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            told = float(world.sum(loss.detach()))  # which waits for all
            if not told < 100:
                raise FloatingPointError(f"a loss of {told} has no speed")
            seconds = time.perf_counter() - start
            found.append(TrainingSpeed(T / seconds, seconds * 1e3, None, peak_gb(world.device)))
    return found[WARMUP:]


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(ROWS)))
