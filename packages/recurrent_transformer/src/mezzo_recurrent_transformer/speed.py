"""The paper's speeds: Table 2, latency over the length, throughput of training, and decoding.

Each is measured into `speed_NAME.json` below a folder. The algorithm of the paper stands beside our
op: it is Algorithm 1 in eager PyTorch (`schedule`), launched from Python or as one CUDA graph.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from mezzo_core.bench import (
    Layer,
    Timing,
    attempt,
    build_layer,
    captured,
    check_layer,
    compiled,
    measure,
    start_afresh,
)
from mezzo_core.bench.generation import time_throughput
from mezzo_core.bench.result import Say
from mezzo_core.bench.timing import WARMUP_CALLS
from mezzo_core.bench.training_step import time_training
from mezzo_core.nn.lm import LM
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.speeds import AbstractSizes, Measurers, as_measured, open_speeds
from mezzo_core.train.config import TrainConfig
from torch import Tensor

from mezzo_recurrent_transformer.block import RecurrentBlock, RecurrentBlockConfig, stack_weights
from mezzo_recurrent_transformer.criteria import with_layers
from mezzo_recurrent_transformer.ops.recurrent_layers import recurrent_layers
from mezzo_recurrent_transformer.recipes import PAPER_NAMES, recipe
from mezzo_recurrent_transformer.schedule import tiled_forward
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig

NAIVE, EAGER, GRAPH = "naive", "tiled, without CUDA Graphs", "tiled, with CUDA Graphs"
OP, TRANSFORMER = "our op", "Transformer"
LAYERS = {"graphs": (EAGER, GRAPH, OP, TRANSFORMER), "length": (NAIVE, GRAPH, OP, TRANSFORMER)}
"""The layers that are timed over the batch (Table 2) and over the length T."""
DEPTHS = (12, 6)
MODELS = {
    with_layers(paper_name, depth): (depth, architecture)
    for depth in DEPTHS
    for architecture, paper_name in reversed(PAPER_NAMES.items())
}
"""The models whose throughput the paper prints: layers and architecture."""
PASSES = 3


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speeds.

    Attributes:
        d_model, head_dim: C and D of a layer.
        seq_len: T of Table 2.
        batches: B of Table 2.
        batch: B of the latency over the length.
        lengths: its T.
        naive: the longest T at which the naive loop is timed; it reads T^2 positions.
        trained: the size whose recipes are trained, by its layers.
        most_trained: sequences of a training step, if the recipe computes more at once.
        contexts: tokens of a generated sequence in the end.
        new_tokens: those of them that follow the prompt.
        most_generated: sequences that are generated at once, if more fit.
        seconds: for each timing.
    """

    d_model: int
    head_dim: int
    seq_len: int
    batches: tuple[int, ...]
    batch: int
    lengths: tuple[int, ...]
    naive: int
    trained: Mapping[int, str]
    most_trained: int
    contexts: tuple[int, ...]
    new_tokens: int
    most_generated: int
    seconds: float


FULL = Sizes(
    device="cuda",
    d_model=1024,
    head_dim=64,
    seq_len=512,
    batches=tuple(2**i for i in range(5, 12)),
    batch=512,
    lengths=tuple(2**i for i in range(6, 13)),
    naive=1024,
    trained={12: "300m_12", 6: "300m_6"},
    most_trained=512,
    contexts=(512, 4096),
    new_tokens=128,
    most_generated=2048,
    seconds=0.05,
)
DRY = Sizes(
    device="cpu",
    d_model=16,
    head_dim=8,
    seq_len=8,
    batches=(1, 2),
    batch=2,
    lengths=(4, 8),
    naive=8,
    trained=dict.fromkeys(DEPTHS, "tiny"),
    most_trained=1,
    contexts=(8,),
    new_tokens=4,
    most_generated=8,
    seconds=0.0,
)
"""A rehearsal on a CPU: the same steps at toy sizes."""


def measure_layers(name: str, sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure the forward of one layer over the batch ("graphs") or over T ("length").

    Returns:
        What the file then has; None if none of its models is wanted.

    Raises:
        UserError: if a layer computes wrong results, which is then not timed, or the file cannot be
            written or continued.
    """
    by_batch = name == "graphs"
    cells = [(str(T), sizes.batch, T) for T in sizes.lengths]
    if by_batch:
        cells = [(f"B={B}", B, sizes.seq_len) for B in sizes.batches]
    what = {"graphs": "latency over the batch (Table 2)", "length": "latency over the length"}[name]
    cuda = sizes.device == "cuda"
    result = open_speeds(
        folder / f"speed_{name}.json",
        sizes,
        FULL,
        say,
        title=f"One layer: {what}",
        setting=f"forward of one layer, attention and MLP, C = {sizes.d_model}, heads of "
        f"{sizes.head_dim}, {f'T = {sizes.seq_len}' if by_batch else f'B = {sizes.batch}'}, "
        f"{'bf16' if cuda else 'float32'}; naive: the definition in eager PyTorch, a token at a "
        "time; tiled: Algorithm 1 in eager PyTorch; the Transformer compiled; medians of "
        f"{PASSES} passes",
        columns=tuple(column for column, *_ in cells),
        models=LAYERS[name],
        unit="ms",
        better="lower",
    )
    wanted = [model for model in LAYERS[name] if sizes.wants(model)]
    missing = [
        (model, *cell)
        for model in wanted
        for cell in cells
        if not result.has(model, cell[0]) and not (model == NAIVE and cell[2] > sizes.naive)
    ]
    if missing:
        start_afresh()
        time = _timers(sizes)
        for model, column, B, T in missing:
            passes = attempt(partial(time[model], B, T))
            result.add_passes(passes, "ms", model=model, column=column, B=B)
    return as_measured(result)


def measure_throughput(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure the tokens a second of training steps of the 300M models.

    Returns, raises: as `measure_layers`.
    """
    sizes_named = ", ".join(dict.fromkeys(sizes.trained.values()))
    result = open_speeds(
        folder / "speed_throughput.json",
        sizes,
        FULL,
        say,
        title="Training throughput of the 300M models",
        setting=f"whole training steps (forward, backward, fused AdamW) of the recipes of "
        f"{sizes_named}, random tokens, bf16 autocast over float32 on a GPU, where the "
        "Transformer's layers are compiled; B: sequences that are computed at once",
        columns=("tokens/s",),
        models=tuple(MODELS),
        unit="tokens/s",
        better="higher",
    )
    for model, (depth, architecture) in MODELS.items():
        if result.has(model, "tokens/s") or not sizes.wants(model):
            continue
        config, lm = _build(sizes, depth, architecture)
        if sizes.device == "cuda" and config.compile:
            for unit in lm.stack.units():
                unit.compile(dynamic=False)
        B = min(config.micro_batch_size or config.batch_size, sizes.most_trained)
        passes = attempt(partial(time_training, lm, B, config.seq_len, passes=PASSES))
        result.add_passes(passes, "tokens_per_second", model=model, column="tokens/s", B=B)
    return as_measured(result)


def measure_decoding(sizes: Sizes, folder: Path, say: Say) -> Measurement | None:
    """Measure the tokens a second that the 300M models generate, each at its largest batch.

    Returns, raises: as `measure_layers`.
    """
    sizes_named = ", ".join(dict.fromkeys(sizes.trained.values()))
    dtype = "bf16" if sizes.device == "cuda" else "float32"
    result = open_speeds(
        folder / "speed_decoding.json",
        sizes,
        FULL,
        say,
        title="Decoding of the 300M models",
        setting=f"models of the recipes of {sizes_named}, {dtype}; the last {sizes.new_tokens} of "
        "T tokens, by a CUDA graph of a step, at the largest batch B that fits, at most "
        f"{sizes.most_generated}",
        columns=tuple(f"T={T}" for T in sizes.contexts),
        models=tuple(MODELS),
        unit="tokens/s",
        better="higher",
    )
    for model, (depth, architecture) in MODELS.items():
        for T in sizes.contexts:
            if result.has(model, f"T={T}") or not sizes.wants(model):
                continue
            _, lm = _build(sizes, depth, architecture)
            lm = lm.eval()
            lm = lm.bfloat16() if sizes.device == "cuda" else lm
            work = partial(time_throughput, lm, T, sizes.new_tokens, passes=PASSES)
            limits = {"max_batch": sizes.most_generated, "seconds": sizes.seconds}
            passes = attempt(partial(work, **limits))
            result.add_passes(passes, "tokens_per_second", model=model, column=f"T={T}")
    return as_measured(result)


def _build(sizes: Sizes, depth: int, architecture: str) -> tuple[TrainConfig, LM]:
    """Return a recipe and its model."""
    start_afresh()
    config = recipe(sizes.trained[depth], architecture)
    torch.manual_seed(0)
    with torch.device(sizes.device):
        return config, config.model.build()


MEASURERS: Measurers = {
    **{name: partial(measure_layers, name) for name in LAYERS},
    "throughput": measure_throughput,
    "decoding": measure_decoding,
}
"""What this module measures, by the names in the files' names."""


def by_definition(block: RecurrentBlock, x: Tensor) -> Tensor:
    """Compute a layer by its reference: every token reads all pairs before it again."""
    config = block.config
    return recurrent_layers(
        x,
        stack_weights((block,)),
        num_heads=block.num_heads,
        residual_scale=config.residual_scale,
        norm=config.norm,
        eps=config.norm_eps,
        persistent_norm=config.persistent_norm,
        block_size=config.block_size,
        alibi_slopes=block.slopes(),
        impl="reference",
    ).z


def _timers(sizes: Sizes) -> dict[str, Callable[[int, int], list[Timing]]]:
    """Return for each layer a function that times it at B and T."""
    device = torch.device(sizes.device)

    def checked(config: RecurrentBlockConfig | TransformerBlockConfig) -> Layer:
        layer = build_layer(config, sizes.d_model, device, alone=True)
        check_layer(layer)
        return layer.bfloat16() if device.type == "cuda" else layer

    ours, transformer = (
        checked(config(head_dim=sizes.head_dim))
        for config in (RecurrentBlockConfig, TransformerBlockConfig)
    )
    block = ours.mixer
    assert isinstance(block, RecurrentBlock)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        NAIVE: partial(by_definition, block),
        EAGER: partial(tiled_forward, block),
        GRAPH: partial(tiled_forward, block),
        OP: ours,
        TRANSFORMER: compiled(transformer),
    }

    @torch.no_grad()
    def time(model: str, B: int, T: int) -> list[Timing]:
        x = torch.randn(B, T, sizes.d_model, device=device, dtype=ours.norm.weight.dtype)
        work: Callable[[], object] = partial(runs[model], x)
        if model == GRAPH:
            work = captured(work, device)
        return [
            measure(work, device, seconds=sizes.seconds, warmup=0 if i else WARMUP_CALLS, least=2)
            for i in range(PASSES)
        ]

    return {model: partial(time, model) for model in runs}
