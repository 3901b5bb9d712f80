"""The state of Landmark Attention: keys and values of all places, in chunks."""

from typing import NamedTuple

import torch
from mezzo_core.ops.checks import check_counts
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor
from torch.nn import functional as F


class Near(NamedTuple):
    """The part of the state that stays on the device with offload; without it, Y is 0.

    Attributes:
        landmarks: (B, Y, N, H, D), the keys of the chunks' landmarks.
        k: (B, Y, W, H, L + 1, D), keys of the open chunk and of the W - 1 local ones; chunk n is in
            slot n % W. Places beyond the newest token hold anything.
        v: likewise the values.
    """

    landmarks: Tensor
    k: Tensor
    v: Tensor


class LandmarkState(NamedTuple):
    """Keys and values of all places of a row so far, in chunks.

    Attributes:
        k: (B, Y, N, L + 1, H, D) keys of Y layers. Places beyond the newest token are room. With
            offload they are (B, Y, N, H, L + 1, D) in the host's memory, and only complete chunks
            are read.
        v: likewise the values.
        seen: (B,) int64, the tokens of each row.
        near: the part on the device with offload.
    """

    k: Tensor
    v: Tensor
    seen: Tensor
    near: Near


def initial_state(
    batch: int, like: Tensor, num_layers: int, num_near: int, chunk: tuple[int, int, int],
    *, offload: bool,
) -> LandmarkState:  # fmt: skip
    """Return the state before the first token: chunks are (L + 1, H, D), W of them are near."""
    P, H, D = chunk

    def zeros(*sizes: int, device: torch.device = like.device) -> Tensor:
        # Not `like.new_zeros`: if `like` is sharded, the result would be too, but rows are not.
        return torch.zeros(batch, *sizes, dtype=like.dtype, device=device)

    where, sizes = like.device, (P, H, D)
    if offload:
        where, sizes = torch.device("cpu"), (H, P, D)
    k, v = (zeros(num_layers, 0, *sizes, device=where) for _ in range(2))
    held = num_layers if offload else 0
    near = Near(zeros(held, 0, H, D), *(zeros(held, num_near, H, P, D) for _ in range(2)))
    seen = torch.zeros(batch, dtype=torch.int64, device=like.device)
    return LandmarkState(k, v, seen, near)


def grown(state: LandmarkState, num_tokens: int, chunk_size: int) -> LandmarkState:
    """Return a copy of the state with room for `num_tokens` more tokens of every row.

    Raises:
        ValueError: if parts of the state disagree.
    """
    N, L = check_chunks(state), chunk_size
    check_counts("LandmarkStack", "state.seen", state.seen, "N L", N * L)
    longest = int(state.seen.max()) if N and len(state.seen) else 0
    more = max(ceil_div(longest + num_tokens, L) - N, 0)

    def copied(part: Tensor) -> Tensor:
        """Copy (B, Y, N, ...) with room for more chunks."""
        return F.pad(part, (*(0,) * (2 * part.ndim - 5), more)) if more else part.clone()

    near = Near(copied(state.near.landmarks), state.near.k.clone(), state.near.v.clone())
    return LandmarkState(copied(state.k), copied(state.v), state.seen.clone(), near)


def check_chunks(state: LandmarkState) -> int:
    """Return N; raise a ValueError if the device has landmarks of another number of chunks."""
    N = state.k.shape[2]
    _, num_layers, found, *_ = state.near.landmarks.shape
    if num_layers and found != N:
        raise ValueError(f"state.near.landmarks must be of {N} chunks, as state.k, got {found}")
    return N
