"""`mezzo-drt bench`: grouped cross-attention alone, and the tiny models.

On a GPU the op reads 131,072 tokens of chunks that were retrieved at random, in the paper's sizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Row, run, say
from mezzo_core.bench.rows import Contender, timed
from mezzo_core.bench.training_step import model_rows
from mezzo_core.errors import FailedRunError
from torch import Tensor

from mezzo_drt.ops import grouped_cross_attention
from mezzo_drt.ops.grouped_cross_attention.reference import grouped_cross_attention_reference
from mezzo_drt.recipes import RECIPES

ERROR = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""The largest relative error of the op before it is timed."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of one benchmark."""

    tokens: int  # B T
    lengths: tuple[int, ...]  # T
    num_heads: int
    head_dim: int
    chunk_size: int
    num_retrieved: int
    models: tuple[str, ...]  # recipes
    seconds: float  # for each timing


QUICK = Shapes(512, (256, 512), 2, 16, 16, 4, ("tiny_base", "tiny_drt1"), 0.05)
CPU = Shapes(4096, (1024, 4096), 4, 16, 16, 4, QUICK.models, 1.0)
GPU = Shapes(131_072, (16_384, 65_536), 12, 64, 64, 8, QUICK.models, 0.5)
"""The heads, chunks and retrieved chunks of the paper's 128M models."""


def bench(
    device: torch.device, quick: bool = False, out: Path | None = None
) -> list[dict[str, Any]]:
    """Measure the op and tiny models on `device`, say each row, and append it to `out`.

    Returns:
        The rows as JSON values.

    Raises:
        FailedRunError: if the op computes wrong results; it is not timed.
    """
    shapes = QUICK if quick else GPU if device.type == "cuda" else CPU

    def rows() -> Iterator[Row]:
        yield from op_rows(shapes, device)
        for name in shapes.models:
            config = RECIPES[name]()
            size = config.batch_size, config.seq_len
            yield from model_rows(name, "auto", config.model, *size, device, shapes.seconds)

    return run(rows(), device, out, say)


def op_rows(shapes: Shapes, device: torch.device) -> Iterator[Row]:
    """Time forward and forward+backward of the op at each length, after a check of it."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    make = partial(op_inputs, shapes=shapes, device=device, dtype=dtype)
    check_op(**make(B=2, T=8 * shapes.chunk_size))
    for T in shapes.lengths:
        B = shapes.tokens // T
        sizes = {"H": shapes.num_heads, "D": shapes.head_dim, "L": shapes.chunk_size}
        shape = {"B": B, "T": T, **sizes, "R": shapes.num_retrieved}
        inputs = make(B=B, T=T)
        code: Callable[..., Tensor] = partial(
            grouped_cross_attention, indices=inputs.pop("indices"), softmax1=True
        )
        impl = "triton" if is_cuda else "reference"
        yield from timed(
            Contender("gca op", impl, shape, code, inputs), device, shapes.seconds, say
        )


def op_inputs(
    B: int, T: int, shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return arguments of the op: each chunk reads chunks that it may, drawn at random.

    Queries come with landmarks. A chunk that may read fewer than R reads each of them.
    """
    H, D, L, R = shapes.num_heads, shapes.head_dim, shapes.chunk_size, shapes.num_retrieved
    N = T // L
    generator = torch.Generator(device).manual_seed(0)
    noise = partial(torch.randn, generator=generator, device=device)
    q = noise(B, N, L + 1, H, D, dtype=dtype)
    k, v = (noise(B, N, L, H, D, dtype=dtype) for _ in range(2))
    # Chunk n reads what chunk n - 1 retrieved among the chunks before n - 1.
    chunk = torch.arange(N, device=device)
    is_past = chunk < chunk[:, None] - 1
    scores = torch.rand(B, N, N, generator=generator, device=device).masked_fill(~is_past, -1)
    best, indices = scores.topk(min(R, N), -1)
    indices = indices.masked_fill(best < 0, -1)
    weights = noise(B, N, indices.shape[-1]).masked_fill(indices < 0, -torch.inf)
    weights = weights.softmax(-1).nan_to_num()  # the first two chunks read nothing
    return {"q": q, "k": k, "v": v, "indices": indices, "weights": weights}


def check_op(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor) -> None:
    """Compare the op's output and gradients with the reference's in float32.

    Raises:
        FailedRunError: if one of them is wrong.
    """
    bound = ERROR[q.dtype]
    dout = torch.randn_like(q)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, weights)]
    high = [x.detach().float().requires_grad_() for x in (q, k, v, weights)]
    (q, k, v, weights), (q32, k32, v32, weights32) = leaves, high
    out = grouped_cross_attention(q, k, v, indices, weights, softmax1=True)
    scale = q.shape[-1] ** -0.5
    right = grouped_cross_attention_reference(q32, k32, v32, indices, weights32, True, scale)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    expected = (right, *torch.autograd.grad(right, high, dout.float()))
    names = ("the output", "dq", "dk", "dv", "the gradient of the weights")
    for name, a, b in zip(names, found, expected, strict=True):
        error = float(((a.float() - b).norm() / b.norm()).detach())
        if not error <= bound:  # not ">", so that NaN fails
            raise FailedRunError(
                f"grouped_cross_attention: {name} is wrong here (error {error:.1e}, bound "
                f"{bound:.0e}): no speed"
            )
