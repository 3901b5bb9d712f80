"""Landmark attention (Mohtashami and Jaggi 2023, arXiv 2305.16300), in two forms of one definition.

A chunk is L tokens and a landmark, P = L + 1 places. A query sees the earlier tokens of its own
chunk, the `local` chunks before it, and of all earlier chunks the `retrieved` ones whose landmarks
have the highest logits; each query and head chooses alone. The tokens of its own chunk share one
softmax with the landmarks of the other chunks that it sees. The weight of a landmark is divided
among the tokens of its chunk by a softmax of their own:

    s_ij = q_i k_j / sqrt(D)
    w_ij = softmax(s_i over own tokens and landmarks)_j                           j in i's chunk
    w_ij = softmax(s_i over own tokens and landmarks)_m softmax(s_i over m's chunk)_j     elsewhere

Up to `local + retrieved + 1` chunks all of the past is seen: this is how the model is trained.

RoPE rotates a key by its place in its chunk, and a query by its distance from the beginning of the
key's chunk. Chunks further away than `local + retrieved`, the furthest in training, are read as if
they were at that distance (ours: the paper moves the chosen chunks there in their order).
"""

from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import rotate
from torch import Tensor

TILE = 64
"""Queries whose chunks are gathered at a time: 160 MB in float32 at C = 768, 12 chunks of 65."""
PREFERENCE = 1e-4
"""When chunks are chosen, a landmark's logit loses this for each chunk of distance. In the first
layer all landmarks have the same key, so far ones tie: then the nearest is taken, not one that
rounding picks. `LandmarkConfig` describes the effect in long texts."""


class Places(NamedTuple):
    """Where queries stand, in a grid of chunks."""

    chunk: Tensor  # (B, X) int64, the chunk of each query
    offset: Tensor  # (B, X) int64, its place in the chunk, from 0 to L (the landmark)
    first: Tensor  # (B, X) int64, the first chunk of its sequence


class Reach(NamedTuple):
    """How far a query sees."""

    local: int
    retrieved: int
    rope_base: float

    @property
    def furthest(self) -> int:
        """The largest distance in chunks; chunks beyond it are read as if they were there."""
        return self.local + self.retrieved


def landmark_attention(q: Tensor, k: Tensor, v: Tensor, places: Places, reach: Reach) -> Tensor:
    """Attend from some places to the grid of chunks.

    Args:
        q: (B, X, H, D), not rotated, X queries in any order.
        k: (B, N, P, H, D), rotated; the landmark is at the last of P places. Places that no query
            may see may hold anything.
        v: likewise, not rotated.
        places: of the queries.
        reach: how far they see.

    Returns:
        (B, X, H, D) in the dtype of q.
    """
    if k.shape[1] <= reach.furthest + 1:  # every query sees all of its past
        return dense(q, k, v, places, reach)
    parts = []
    for begin in range(0, q.shape[1], TILE):
        its_places = Places(*(x[:, begin : begin + TILE] for x in places))
        parts.append(gathered(q[:, begin : begin + TILE], k, v, its_places, reach))
    return torch.cat(parts, 1) if parts else q


def dense(q: Tensor, k: Tensor, v: Tensor, places: Places, reach: Reach) -> Tensor:
    """Compute all logits of all chunks: the definition, for few chunks."""
    B, X, H, D = q.shape
    N, P = k.shape[1:3]
    chunk, offset, first = (x[..., None] for x in places)
    j = torch.arange(N, device=q.device)
    is_own = j == chunk  # (B, X, N)
    is_past = (j < chunk) & (j >= first)
    distance = (chunk - j).clamp(0, reach.furthest)
    turned = rotate(
        q[:, :, None].expand(B, X, N, H, D).flatten(1, 2),
        (distance * P + offset).flatten(1),
        reach.rope_base,
    ).unflatten(1, (X, N))
    k, v, is_bad = _finite(k, v)
    logits = torch.einsum("bxnhd,bnphd->bxhnp", _high(turned), _high(k)) * D**-0.5
    at_landmarks = logits[..., -1]
    is_seen = is_past & (j >= chunk - reach.local)
    is_far = (is_past & ~is_seen)[:, :, None].expand_as(at_landmarks)
    scores = at_landmarks - PREFERENCE * (chunk - j)[:, :, None]
    is_seen = is_seen[:, :, None] | _highest(scores, is_far, reach.retrieved)
    # One softmax for the tokens of the own chunk and the landmarks of the others.
    tokens = torch.arange(P - 1, device=q.device)
    is_near = is_own[..., None] & (tokens <= offset[..., None])  # (B, X, N, L)
    is_near = is_near[:, :, None].expand(B, X, H, N, P - 1)
    shared = torch.cat([logits[..., :-1].flatten(3), at_landmarks], -1)
    mask = torch.cat([is_near.flatten(3), is_seen], -1)
    weights = shared.masked_fill(~mask, float("-inf")).softmax(-1)
    own, gates = weights.split([N * (P - 1), N], -1)
    inside = torch.where(is_seen[..., None], logits[..., :-1], 0).softmax(-1)
    p = own.unflatten(-1, (N, P - 1)) + gates[..., None] * inside
    out = torch.einsum("bxhnl,bnlhd->bxhd", p, _high(v[:, :, :-1]))
    # A query that sees a NaN or an infinity gets NaN.
    sees = torch.cat([is_near | is_seen[..., None], is_seen[..., None]], -1)
    is_spoilt = (sees & is_bad[:, None, None]).flatten(3).any(-1)
    return out.masked_fill(is_spoilt[..., None], float("nan")).to(q.dtype)


def gathered(q: Tensor, k: Tensor, v: Tensor, places: Places, reach: Reach) -> Tensor:
    """Gather the chunks that each query and head sees: for many chunks."""
    index = choose(q, k[:, :, -1], places, reach, k.shape[2])
    rows = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
    heads = torch.arange(q.shape[2], device=q.device)[:, None]
    # (B, X, H, A, P, D): index tensors that are not adjacent put their axes first.
    k, v = (x[rows, index.clamp(min=0), :, heads] for x in (k, v))
    return attend(q, k, v, index, places, reach)


def choose(q: Tensor, landmarks: Tensor, places: Places, reach: Reach, P: int) -> Tensor:
    """Return (B, X, H, A), the chunks that each query and head sees, -1 for none.

    Its own comes first, then the local ones, the nearest first, then those that it retrieves.
    `landmarks` is (B, N, H, D).
    """
    chunk, _, first = (x[..., None] for x in places)
    near = chunk - torch.arange(reach.local + 1, device=q.device)
    near = torch.where(near >= first, near, -1)[:, :, None].expand(-1, -1, q.shape[2], -1)
    return torch.cat([near, _retrieve(q, landmarks, places, reach, P)], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, places: Places, reach: Reach) -> Tensor:
    """Attend to the chunks (B, X, H, A) of `choose`, whose k and v are (B, X, H, A, P, D)."""
    D, P = q.shape[-1], k.shape[-2]
    chunk, offset, _ = (x[..., None] for x in places)
    is_there = index >= 0
    hidden = ~is_there[..., None].expand(*index.shape, P).clone()
    tokens = torch.arange(P, device=q.device)
    hidden[..., 0, :] = ((tokens > offset) | (tokens == P - 1))[:, :, None]
    k, v = (x.masked_fill(hidden[..., None], 0) for x in (k, v))
    distance = (chunk[..., None] - index).clamp(0, reach.furthest)
    angle = distance * P + offset[..., None]
    turned = rotate(
        q[:, :, :, None].expand(*index.shape, D).flatten(1, 2).flatten(1, 2)[:, :, None],
        angle.flatten(1),
        reach.rope_base,
    ).reshape(*index.shape, D)
    logits = torch.einsum("bxhad,bxhapd->bxhap", _high(turned), _high(k)) * D**-0.5
    own = logits[..., 0, :-1].masked_fill(hidden[..., 0, :-1], float("-inf"))
    gates = logits[..., 1:, -1].masked_fill(~is_there[..., 1:], float("-inf"))
    weights = torch.cat([own, gates], -1).softmax(-1)
    own, gates = weights.split([P - 1, index.shape[-1] - 1], -1)
    p = torch.cat([own[..., None, :], gates[..., None] * logits[..., 1:, :-1].softmax(-1)], -2)
    return torch.einsum("bxhal,bxhald->bxhd", p, _high(v[..., :-1, :])).to(q.dtype)


def _retrieve(q: Tensor, landmarks: Tensor, places: Places, reach: Reach, P: int) -> Tensor:
    """Return (B, X, H, R), the chunks that each query and head retrieves, -1 for none.

    `landmarks` is (B, N, H, D). Only the chunks before the local ones can be retrieved.
    """
    B, X, H, _ = q.shape
    N = landmarks.shape[1]
    chunk, offset, first = places
    scores = q.new_full((B, X, H, N), float("-inf"), dtype=_high(q).dtype)
    j = torch.arange(N, device=q.device)
    for distance in range(reach.local + 1, reach.furthest + 1):
        turned = _high(rotate(q, distance * P + offset, reach.rope_base))
        found = torch.einsum("bxhd,bnhd->bxhn", turned, _high(landmarks)) * q.shape[-1] ** -0.5
        gap = (chunk[..., None] - j)[:, :, None]
        is_it = gap >= distance if distance == reach.furthest else gap == distance
        scores = torch.where(
            is_it & (j >= first[..., None])[:, :, None], found - PREFERENCE * gap, scores
        )
    best, index = scores.topk(min(reach.retrieved, N), -1)
    return torch.where(best == float("-inf"), -1, index)


def _highest(scores: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` highest scores in the last axis, among those in `mask`."""
    scores = scores.masked_fill(~mask, float("-inf"))
    index = scores.topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(mask).scatter(-1, index, True) & mask


def _high(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Set places with a NaN or an infinity to 0, because 0 * NaN is NaN; also return which."""
    is_bad = ~(k.isfinite() & v.isfinite()).all(-1).all(-1)
    where = is_bad[..., None, None]
    return k.masked_fill(where, 0), v.masked_fill(where, 0), is_bad
