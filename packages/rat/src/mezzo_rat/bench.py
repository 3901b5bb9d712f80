"""Speed and memory of one layer and of whole models: RAT beside attention and the linear RNN.

A layer is x + mixer(norm(x)) with all projections, as the paper times it. Each layer is first
checked against its step-by-step form. A layer that fails is not timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Row, append, measure, origin
from mezzo_core.errors import UserError
from mezzo_core.layer_bench import Layer
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import RECIPES


@dataclass(frozen=True)
class Shapes:
    """The shapes of one benchmark: tokens a batch, sequence lengths, widths."""

    tokens: int
    seq_lens: tuple[int, ...]
    d_model: int
    head_dim: int
    seconds: float


QUICK = Shapes(2048, (512, 2048), 64, 32, 0.2)
CPU = Shapes(4096, (512, 1024, 2048, 4096), 128, 32, 1.0)
GPU = Shapes(262_144, (4096, 16_384, 65_536), 2048, 128, 0.5)


def mixers(head_dim: int) -> dict[str, MixerConfig]:
    """Return the layers compared, by the paper's names."""
    return {
        "RNN": LinearRNNConfig(),
        "RAT(L=64)": RATConfig(chunk_size=64, head_dim=head_dim),
        "RAT(L=16)": RATConfig(chunk_size=16, head_dim=head_dim),
        "Attention": AttentionConfig(head_dim=head_dim),
    }


def row_name(config: MixerConfig, device: torch.device) -> tuple[str, str]:
    """Return the layer's name in a row, and the implementation that `impl="auto"` chooses."""
    if isinstance(config, AttentionConfig):
        return "attention layer", "sdpa"
    name = "linear_rnn layer" if isinstance(config, LinearRNNConfig) else "rat layer"
    return name, "triton" if device.type == "cuda" else "reference"


def bench(device: torch.device, quick: bool = False, out: Path | None = None) -> list[dict]:
    """Measure layers and tiny models on `device`, print a table, append rows to `out`."""
    shapes = QUICK if quick else GPU if device.type == "cuda" else CPU
    console = Console()
    where = origin(device)
    rows = []
    for row in [*layer_rows(shapes, device), *model_rows(device, quick)]:
        rows.append(row.to_json(where))
        if out is not None:
            append(out, rows[-1:])
    console.print(_table(rows))
    return rows


def layer_rows(shapes: Shapes, device: torch.device) -> Iterator[Row]:
    """Time forward and forward+backward of each layer at each sequence length."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for config in mixers(shapes.head_dim).values():
        name, impl = row_name(config, device)
        torch.manual_seed(0)
        with device:
            layer = Layer(config.build(shapes.d_model), shapes.d_model)
        check_against_steps(layer)
        # Reset the compiler: past its limit of recompilations it would run layers eagerly.
        torch.compiler.reset()
        run = torch.compile(layer, dynamic=False) if device.type == "cuda" else layer
        for seq_len in shapes.seq_lens:
            batch = shapes.tokens // seq_len
            x = torch.randn(batch, seq_len, shapes.d_model, device=device, requires_grad=True)
            inputs, dout = (x, *layer.parameters()), torch.ones_like(x)
            shape = {"B": batch, "T": seq_len, "C": shapes.d_model, "D": shapes.head_dim}
            if isinstance(config, RATConfig):
                shape["L"] = config.chunk_size

            def forward(x: Tensor = x, run: Any = run) -> Tensor:
                with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
                    return run(x)

            def train(inputs: Any = inputs, dout: Tensor = dout, forward: Any = forward) -> None:
                torch.autograd.grad(forward(), inputs, dout)

            def prefill(forward: Any = forward) -> None:
                with torch.no_grad():
                    forward()

            for phase, fn in (("forward", prefill), ("train", train)):
                try:
                    timing = measure(fn, device, seconds=shapes.seconds)
                except torch.OutOfMemoryError:
                    Console().print(f"{name} {phase} at {shape}: out of memory")
                    continue
                yield Row(f"{name} {phase}", impl, shape, timing)


def model_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    """Time a training step (forward, backward) of the tiny recipes' models."""
    names = ("tiny_attention", "tiny_rat_l16") if quick else tuple(tiny_recipes())
    for name in names:
        config = RECIPES[name]()
        torch.manual_seed(0)
        with device:
            model = config.model.build()
        shape = (config.batch_size, config.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, device=device)

        def step(model: Any = model, tokens: Tensor = tokens) -> None:
            model.zero_grad()
            model.loss(tokens, tokens).backward()

        timing = measure(step, device, seconds=1.0 if quick else 5.0)
        sizes = {"B": shape[0], "T": shape[1], "C": config.model.d_model}
        yield Row(f"{name} model train", "auto", sizes, timing)


def tiny_recipes() -> list[str]:
    """Return the names of the million-weight recipes."""
    return [name for name in RECIPES if name.startswith("tiny_")]


def check_against_steps(layer: Layer, num_tokens: int = 70) -> None:
    """Raise unless the whole forward equals one token at a time (float32, 1e-4)."""
    weight = layer.norm.weight
    x = torch.randn(1, num_tokens, len(weight), device=weight.device)
    with torch.no_grad():
        whole = layer.mixer(x)[0]
        state = layer.mixer.init_state(1)
        steps = []
        for t in range(num_tokens):
            y, state = layer.mixer(x[:, t : t + 1], state)
            steps.append(y)
    error = (whole - torch.cat(steps, 1)).norm() / whole.norm()
    if not error < 1e-4:
        raise UserError(f"{type(layer.mixer).__name__} is wrong here (error {error:.1e}): no speed")


def _table(rows: list[dict]) -> Table:
    table = Table("benchmark", "implementation", "shape", "ms", "tokens/s", "peak GB")
    for row in rows:
        shape = row["shape"]
        speed = shape["B"] * shape["T"] / row["ms"] * 1e3
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
        text = " ".join(f"{letter}{size}" for letter, size in shape.items())
        table.add_row(row["name"], row["impl"], text, f"{row['ms']:.2f}", f"{speed:,.0f}", peak)
    return table
