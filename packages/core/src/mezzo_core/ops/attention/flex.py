"""Attention by flex_attention on a GPU, which skips masked blocks of keys.

Without positions, each query sees an interval of keys, and both ends of the interval never decrease
along the queries. The block mask is computed from these ends, without building a (T, S) mask. With
positions, in any order, it is computed from the smallest and the largest in each block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mezzo_core.ops.attention.request import (
    AttentionOutput,
    Request,
    seen_interval,
    token_positions,
)
from mezzo_core.ops.gradients import refuse_second_gradient
from mezzo_core.positions import sequence_ids

# Exists since torch 2.9; before, the lse was requested by `return_lse=True`.
_AUX_REQUEST: Any = getattr(torch.nn.attention.flex_attention, "AuxRequest", None)

BLOCK = 128  # queries and keys in a block of the mask: flex_attention's default
LARGEST_KEPT = 2**32
"""Queries times keys of the largest mask in the cache, which takes 4 MB. Without this limit, 32
masks of a million queries and keys would take 32 GB."""
Distance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the distance for the indices of a row, a query and a key."""


def unsupported(r: Request) -> str | None:
    """Say why this backend cannot do the request, or None if it can."""
    if r.q.device.type != "cuda":
        return f"tensors on {r.q.device} (it needs CUDA)"
    if r.q.dtype == torch.float64:
        return "float64"
    if min(r.q.shape[-1], r.v.shape[-1]) < 16 or max(r.q.shape[-1], r.v.shape[-1]) > 256:
        return f"heads of width {r.q.shape[-1]} and {r.v.shape[-1]} (it needs 16 to 256)"
    # With fewer queries than a block, flex_attention runs its decoding kernel, which only supports
    # small groups of heads.
    if min(r.q.shape[1], r.k.shape[1]) < BLOCK:
        return f"fewer than {BLOCK} queries or keys"
    return None


def attention_flex(r: Request) -> AttentionOutput:
    """Compute attention and its lse with one fused kernel, which has a backward for both."""
    inputs = [x.transpose(1, 2) for x in (r.q, r.k, r.v)]
    options: dict[str, Any] = {}
    # Not enable_gqa=(...): with symbolic shapes the comparison is no bool for flex_attention.
    if r.q.shape[2] != r.k.shape[2]:
        options["enable_gqa"] = True
    if r.return_lse and _AUX_REQUEST is None:
        options["return_lse"] = True
    elif r.return_lse:
        options["return_aux"] = _AUX_REQUEST(lse=True)
    compiling = torch.compiler.is_compiling()
    slopes = r.slopes
    if slopes is not None and compiling:
        slopes = captured(slopes)
    distance: Distance = _in_order
    if r.q_positions is None:
        mask = _block_mask(r, cached=not compiling)
    else:
        q_positions, k_positions = (x.expand(len(r.q), -1) for x in token_positions(r))
        mask, distance = make_position_mask(q_positions, k_positions, r.causal, r.window_size)
    flex: Any = flex_attention if compiling else _compiled_flex()
    result = flex(
        *inputs,
        score_mod=None if slopes is None else _alibi(slopes, distance),
        block_mask=mask,
        scale=r.scale,
        **options,
    )
    if not r.return_lse:
        return AttentionOutput(refuse_second_gradient(result).transpose(1, 2), None)
    out, aux = result
    out = refuse_second_gradient(out)
    lse = aux if _AUX_REQUEST is None else aux.lse
    return AttentionOutput(out.transpose(1, 2), lse.transpose(1, 2))


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """Compile flex_attention once for all callers; uncompiled it does not run as a fused kernel."""
    return torch.compile(flex_attention)


def _in_order(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the distance of query i and key j without positions."""
    return i - j


def _alibi(slopes: Tensor, distance: Distance) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * distance(b, i, j).abs()

    return score_mod


def _block_mask(r: Request, cached: bool) -> BlockMask:
    """Return the block mask of the request, from a cache if it depends on shapes only.

    Under torch.compile the cache is not used, because torch would have to guard its tensors. There
    a few operations on (T/128)^2 numbers compute the mask, once for all layers.
    """
    T, S = r.q.shape[1], r.k.shape[1]
    where = (T, S, r.q.device, r.causal, r.window_size)
    if not cached or r.cu_seqlens is not None or T * S > LARGEST_KEPT:
        return make_block_mask(*where, r.cu_seqlens)
    if torch.cuda.is_current_stream_capturing():  # tensors made here have no values before a replay
        return make_block_mask(*where, None)
    # Another stream could read the mask before it is computed, or after it is freed.
    return _cached_block_mask(*where, torch.cuda.current_stream(r.q.device).cuda_stream)


@functools.lru_cache(maxsize=32)
def _cached_block_mask(
    T: int, S: int, device: torch.device, causal: bool, window_size: int | None, _stream: int
) -> BlockMask:
    # A later training step cannot use a tensor made in inference mode.
    with torch.inference_mode(False):
        return make_block_mask(T, S, device, causal, window_size, None)


def make_block_mask(
    T: int,
    S: int,
    device: torch.device,
    causal: bool,
    window_size: int | None,
    cu_seqlens: Tensor | None,
) -> BlockMask:
    """Return the block mask of T queries and S keys; arguments as in `attention`."""
    tokens = torch.arange(T, device=device)
    ids = None if cu_seqlens is None else owners(cu_seqlens, T)
    first, last = seen_interval(tokens, S, causal, window_size, cu_seqlens, ids)
    return _mask_of(interval_blocks(first, last, S), (T, S), _mask_mod(causal, window_size, ids))


def make_position_mask(
    q_positions: Tensor, k_positions: Tensor, causal: bool, window_size: int | None
) -> tuple[BlockMask, Distance]:
    """Return the block mask of positions (B, T) and (B, S), and the distance that they define."""
    *blocks, q_at, k_at = position_blocks(q_positions, k_positions, causal, window_size)

    def distance(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return q_at[b, i] - k_at[b, j]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = k_at[b, j] >= 0  # as in `visible_keys`
        if causal:
            visible = visible & (k_at[b, j] <= q_at[b, i])
        if window_size is not None:
            visible = visible & (k_at[b, j] > q_at[b, i].clamp(min=0) - window_size)
        return visible

    lengths = (q_positions.shape[1], k_positions.shape[1])
    return _mask_of(blocks, lengths, mask_mod), distance


def _mask_of(
    blocks: Sequence[Tensor], lengths: tuple[int, int], mask_mod: Callable[..., Tensor]
) -> BlockMask:
    """Build the mask from what `interval_blocks` or `position_blocks` returns of the blocks."""
    num_partial, partial, num_full, full = blocks
    q_num_partial, q_partial = transposed_blocks(num_partial, partial)
    q_num_full, q_full = transposed_blocks(num_full, full)
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=num_partial,
        kv_indices=partial,
        full_kv_num_blocks=num_full,
        full_kv_indices=full,
        q_num_blocks=q_num_partial,
        q_indices=q_partial,
        full_q_num_blocks=q_num_full,
        full_q_indices=q_full,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )


def _mask_mod(
    causal: bool, window_size: int | None, ids: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask inside a block; it captures a tensor only if sequences are packed."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = j >= 0
        if causal:
            visible = visible & (i >= j)
        if window_size is not None:
            visible = visible & (i - j < window_size)
        if ids is not None:
            visible = visible & (ids[i] == ids[j])
        return visible

    return mask_mod


# A registered op hides this index arithmetic from inductor: torch 2.13 fails to simplify it. Equal
# calls in one graph (all layers with the same window) are still computed once.
@torch.library.custom_op("mezzo::interval_blocks", mutates_args=())
def interval_blocks(
    first: Tensor, last: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the blocks of an interval mask that are seen in part, and those that are seen fully.

    A block is seen fully if all its queries see all its keys; it needs no mask. Blocks that no
    query sees are left out. As `first` and `last` never decrease, the blocks of both kinds are
    contiguous in each row of blocks.

    Args:
        first: (T,) int64, the first key that each query sees, never decreasing.
        last: (T,) int64, the last key that it sees, never decreasing.
        num_keys: S.

    Returns:
        The int32 arguments of BlockMask.from_kv_blocks: the number (1, 1, rows) and the indices
        (1, 1, rows, columns) of the blocks seen in part, then of the blocks seen fully.
    """
    T, device = first.shape[0], first.device
    top = torch.arange(0, T, BLOCK, device=device)
    bottom = (top + BLOCK - 1).clamp(max=T - 1)
    columns = _num_blocks(num_keys)
    # The queries in a row of blocks see keys in the blocks from `lo` to `hi` (exclusive).
    lo = first[top] // BLOCK
    hi = torch.maximum(last[bottom] // BLOCK + 1, lo)
    # Blocks that are seen fully. A short last block never is: its missing keys must be masked.
    full_lo = ((first[bottom] + BLOCK - 1) // BLOCK).clamp(lo, hi)
    full_hi = torch.minimum((last[top] + 1) // BLOCK, hi)
    full_hi = torch.maximum(full_hi, full_lo)
    place = torch.arange(columns, device=device)
    before = (full_lo - lo)[:, None]
    partial = torch.where(place < before, lo[:, None] + place, full_hi[:, None] + place - before)

    def ordered(count: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        # Indices after the first `count` are ignored, but they must be valid.
        index = index.clamp(max=columns - 1)
        return count.to(torch.int32)[None, None], index.to(torch.int32)[None, None]

    num_full = full_hi - full_lo
    return (
        *ordered(hi - lo - num_full, partial),
        *ordered(num_full, full_lo[:, None] + place),
    )


@interval_blocks.register_fake
def _fake_interval_blocks(
    first: Tensor, last: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _num_blocks(first.shape[0])
    counts = first.new_empty(1, 1, rows, dtype=torch.int32)
    indices = first.new_empty(1, 1, rows, _num_blocks(num_keys), dtype=torch.int32)
    return counts, indices, torch.empty_like(counts), torch.empty_like(indices)


# A registered op, because it returns copies of the positions for a mask_mod; see `captured`.
@torch.library.custom_op("mezzo::position_blocks", mutates_args=())
def position_blocks(
    q_positions: Tensor, k_positions: Tensor, causal: bool, window_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the blocks in which a query may see a key, from the range of positions in each block.

    Args:
        q_positions: (B, T).
        k_positions: (B, S); negative for a hidden key.
        causal: as in `attention`.
        window_size: as in `attention`.

    Returns:
        The int32 arguments of BlockMask.from_kv_blocks: the number (B, 1, rows) and the indices
        (B, 1, rows, columns) of the blocks seen in part, then of the blocks seen fully; and copies
        of the positions.
    """
    q, k = (_in_blocks(x) for x in (q_positions, k_positions))
    last_key, least_key = k.amax(-1)[:, None], k.amin(-1)[:, None]
    first_key = k.masked_fill(k < 0, torch.iinfo(k.dtype).max).amin(-1)[:, None]
    last_query, first_query = q.amax(-1)[..., None], q.amin(-1)[..., None]
    seen = (last_key >= 0).expand(-1, q.shape[1], -1)
    # A short last block never is seen fully: its missing keys must be masked.
    whole = torch.arange(1, k.shape[1] + 1, device=k.device) * BLOCK <= k_positions.shape[1]
    full = seen & (least_key >= 0) & whole
    if causal:
        seen, full = seen & (first_key <= last_query), full & (last_key <= first_query)
    if window_size is not None:
        seen = seen & (last_key > first_query.clamp(min=0) - window_size)
        full = full & (least_key > last_query.clamp(min=0) - window_size)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        index = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], index.to(torch.int32)[:, None]

    return *listed(seen & ~full), *listed(full), q_positions.clone(), k_positions.clone()


@position_blocks.register_fake
def _fake_position_blocks(
    q_positions: Tensor, k_positions: Tensor, causal: bool, window_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, T), S = q_positions.shape, k_positions.shape[1]
    count = q_positions.new_empty(B, 1, _num_blocks(T), dtype=torch.int32)
    index = count.new_empty(B, 1, _num_blocks(T), _num_blocks(S))
    blocks = (count, index, torch.empty_like(count), torch.empty_like(index))
    return *blocks, torch.empty_like(q_positions), torch.empty_like(k_positions)


# A registered op: inductor would turn the sort in it, as that in `BlockMask.from_kv_blocks`, into a
# kernel that takes half a minute to compile.
@torch.library.custom_op("mezzo::transposed_blocks", mutates_args=())
def transposed_blocks(count: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose a block mask: list the rows of blocks that see each column.

    Args:
        count: (..., rows) int32, how many columns each row sees.
        index: (..., rows, columns) int32, which ones; entries after the first `count` are ignored.

    Returns:
        The same for the columns: int32, (..., columns) and (..., columns, rows).
    """
    columns = index.shape[-1]
    counts = torch.arange(columns, device=index.device) < count[..., None]
    seen = index.new_zeros(*index.shape[:-1], columns + 1)  # the last takes what is ignored
    seen.scatter_(-1, index.where(counts, columns).long(), 1)
    seen = seen[..., :columns].transpose(-1, -2).contiguous()
    order = seen.argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), order.to(torch.int32)


@transposed_blocks.register_fake
def _fake_transposed_blocks(count: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    *outer, rows, columns = index.shape
    return index.new_empty(*outer, columns), index.new_empty(*outer, columns, rows)


def _in_blocks(positions: Tensor) -> Tensor:
    """Cut (B, T) into blocks, (B, rows, BLOCK); the last position pads the last block."""
    T = positions.shape[1]
    place = torch.arange(_num_blocks(T) * BLOCK, device=positions.device).clamp(max=T - 1)
    return positions[:, place].unflatten(1, (-1, BLOCK))


# A registered op, because a score_mod cannot read a tensor that inductor computes pointwise in the
# same graph.
@torch.library.custom_op("mezzo::captured", mutates_args=())
def captured(slopes: Tensor) -> Tensor:
    """Return a copy of the slopes, for a score_mod to read."""
    return slopes.clone()


@captured.register_fake
def _fake_captured(slopes: Tensor) -> Tensor:
    return torch.empty_like(slopes)


# A registered op, because a mask_mod has the same restriction.
@torch.library.custom_op("mezzo::sequence_owners", mutates_args=())
def owners(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return `sequence_ids`, (T,) int64."""
    return sequence_ids(num_tokens, cu_seqlens)


@owners.register_fake
def _fake_owners(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    return cu_seqlens.new_empty(num_tokens, dtype=torch.int64)


def _num_blocks(num_tokens: int) -> int:
    return (num_tokens + BLOCK - 1) // BLOCK
