"""Constants of the launches: tiles and precision of the kernels."""

from typing import Any

import torch
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import SEGMENT
from mezzo_gsa.ops.chunking.triton.states import INNER, padded, precision
from mezzo_gsa.ops.gsa.request import Request
from mezzo_gsa.ops.gsa.tiling import gate_tiles

BAND = {torch.float32: 40.0, torch.bfloat16: 120.0, torch.float16: 40.0}
"""Width of a band of running sums. Factors up to exp(BAND / 2) lose no digits."""


def chunk_settings(r: Request) -> dict[str, Any]:
    """Return the sizes and the precision of the kernels whose programs have a chunk and a head."""
    L, M = r.chunks.length, r.x.g.shape[3]
    return {
        "HQ": r.x.q.shape[2],
        "H": r.x.k.shape[2],
        "M": M,
        "L": L,
        "BM": padded(M),
        "SEGMENT": SEGMENT,
        "PRECISION": precision(r.x.q.dtype),
        "num_warps": 4 if L < 128 and M <= 64 else 8,
    }


def slot_settings(r: Request) -> dict[str, Any]:
    """Return further constants for the kernels in `slots.py`, which also use `chunk_settings`.

    They are those of gates and factors, and the function between the passes.
    """
    dtype = r.x.q.dtype
    return {
        "WIDTH": BAND[dtype],
        "INNER": INNER[dtype],
        "M_TILES": gate_tiles(r.x.g.shape[3]),
        "BETWEEN": r.form.between,
        "DAMPING": r.form.damping,
        "num_stages": 3,
    }


def band_forms(num_slots: int) -> tuple[str, ...]:
    """Return the forms of a kernel that share the chunks; with 128 slots one form is faster."""
    return ("one", "more") if num_slots <= 64 else ("any",)


def empty_squares(r: Request) -> Tensor:
    """Return an empty tensor for the weights between tokens, (chunks · HQ, L, L), type INNER."""
    q, L = r.x.q, r.chunks.length
    shape = (r.chunks.num_chunks * q.shape[2], L, L)
    return q.new_empty(shape, dtype=torch.float32 if q.dtype == torch.float16 else q.dtype)


def channel_tile(x: Tensor) -> int:
    """Return how many channels of a head are on chip at a time."""
    return min(32 if x.dtype == torch.float32 else 64, padded(x.shape[3]))
