"""Landmark attention with its chunks in the host's memory.

The host keeps the keys and values of all complete chunks. The device keeps the landmarks' keys, by
which tokens choose, and the chunks that are always read: the open one and the local ones before it.
In every layer a step fetches the chunks that it has chosen: it waits for the GPU to choose, gathers
on the host into one pinned block, and copies the block. On the host a head's part of a chunk is
contiguous, so that few large pieces are gathered. As for DRT (`mezzo_drt.memory.host`), the rest of
the host's memory is pageable.

The tokens of a segment together choose much of the past. So a segment copies all chunks to the
device, one layer at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_drt.baselines.landmark.attention import Places, Reach, attend, choose
from mezzo_drt.baselines.landmark.state import Near


class Held(NamedTuple):
    """A layer's part of the state: chunks (B, N, H, L + 1, D) on the host, and `Near`."""

    k: Tensor
    v: Tensor
    near: Near


def brought(chunks: Tensor, near: Tensor, seen: Tensor) -> Tensor:
    """Copy all chunks of a layer to the device, (B, N, L + 1, H, D), including the open one.

    Args:
        chunks: (B, N, H, L + 1, D), on the host.
        near: (B, W, H, L + 1, D), on the device.
        seen: (B,), the tokens of each row.
    """
    N, W, L = chunks.shape[1], near.shape[1], near.shape[3] - 1
    chunk = seen // L
    rows = torch.arange(len(seen), device=seen.device)
    is_open = torch.arange(N, device=seen.device) == chunk[:, None]
    newest = near[rows, chunk % W][:, None]
    grid = torch.where(is_open[:, :, None, None, None], newest, chunks.to(near.device))
    return grid.transpose(2, 3).contiguous()


def nearest(grid: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return a layer's `count` newest chunks of a grid, in the layout of `Near`."""
    N, L = grid.shape[1], grid.shape[2] - 1
    chunk = seen[:, None] // L
    slot = torch.arange(count, device=seen.device)
    chunk = (chunk - (chunk - slot) % count).clamp(0, N - 1)
    rows = torch.arange(len(seen), device=seen.device)[:, None]
    return grid[rows, chunk].transpose(2, 3)


def stored(chunks: Tensor, y: int, grid: Tensor, first: int) -> Tensor:
    """Store layer y's chunks from `first` on in (B, Y, N, H, L + 1, D) on the host.

    Without gradients they are stored in place.
    """
    new = grid[:, first:].transpose(2, 3).to(chunks)
    if torch.is_grad_enabled():
        return chunks.select_scatter(torch.cat([chunks[:, y, :first], new], 1), 1, y)
    chunks[:, y, first:] = new
    return chunks


def store_(chunks: Tensor, near: Tensor, rows: Tensor, chunk: Tensor) -> None:
    """Copy the chunk (n,) that each row of `rows` (n,) completes to the host, in all layers."""
    slot = chunk % near.shape[2]
    chunks[rows, :, chunk] = near[rows.to(near.device), :, slot.to(near.device)].to(chunks.device)


def attend_(q: Tensor, k: Tensor, v: Tensor, held: Held, places: Places, reach: Reach) -> Tensor:
    """Attend from the newest token of each row, and write its key and value; waits for a GPU.

    Args:
        q: (B, X, H, D), of a token and, if X is 2, of its chunk's landmark.
        k: likewise, rotated.
        v: likewise.
        held: by the layer.
        places: of the queries.
        reach: how far they see.

    Returns:
        (B, X, H, D) in the dtype of q.
    """
    near, heads = held.near, torch.arange(q.shape[2], device=q.device)[:, None]
    W, P = near.k.shape[1], near.k.shape[3]
    rows = torch.arange(len(q), device=q.device)[:, None]
    for old, new in ((near.k, k), (near.v, v)):
        old[rows, places.chunk % W, :, places.offset] = new.to(old.dtype)
    if k.shape[1] == 2:
        near.landmarks[rows[:, 0], places.chunk[:, 1]] = k[:, 1].to(near.landmarks.dtype)
    index = choose(q, near.landmarks.to(q.dtype), places, reach, P)  # (B, X, H, A), W near ones
    slot = index[..., :W].clamp(min=0) % W
    fetched = fetch(held.k, held.v, index[..., W:].clamp(min=0), q.device)
    k, v = (
        torch.cat([part[rows[..., None, None], slot, heads], far], 3).to(q.dtype)
        for part, far in zip(near[1:], fetched, strict=True)
    )
    return attend(q, k, v, index, places, reach)


def fetch(k: Tensor, v: Tensor, index: Tensor, device: torch.device) -> Tensor:
    """Copy heads' parts of chunks to the device, without waiting for the copy.

    Args:
        k: (B, N, H, L + 1, D), on the host.
        v: likewise.
        index: (B, X, H, R), the chunks that each query and head reads.
        device: the target.

    Returns:
        (2, B, X, H, R, L + 1, D), keys and values.
    """
    H, P, D = k.shape[2:]
    chosen = index.cpu() * H + torch.arange(H, device="cpu")[:, None]
    block = torch.empty(
        2, *index.shape, P, D, dtype=k.dtype, device="cpu", pin_memory=device.type == "cuda"
    )
    for part, found in zip((k, v), block, strict=True):
        for row, pieces, there in zip(part, chosen.flatten(1), found, strict=True):
            torch.index_select(row.view(-1, P * D), 0, pieces, out=there.view(-1, P * D))
    return block.to(device, non_blocking=True)
