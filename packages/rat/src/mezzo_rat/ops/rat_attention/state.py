"""The decoding state of RAT: the open chunk's running key and value, and the ends of earlier ones.

A chunk's end is its last k~ and v~. The open chunk is not complete yet.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.ops.checks import check_counts, check_size
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor


class RATState(NamedTuple):
    """The state of a batch whose rows may have seen different numbers of tokens.

    A row that has seen n tokens has n // L closed chunks, in slots 0 to n // L - 1 of `k_ends` and
    `v_ends`. Later slots are never read. A state without slots has seen no token; `reserve` adds
    slots when more are needed.
    """

    k: Tensor
    """(B, H, D) float32: k~ of the open chunk's last token, before RoPE; unused if n % L == 0."""
    v: Tensor
    """(B, H, D) float32: v~ of the open chunk's last token; unused if n % L == 0."""
    k_ends: Tensor
    """(B, N, H, D) in the dtype of the inputs: k~ at the end of each chunk, after RoPE."""
    v_ends: Tensor
    """(B, N, H, D) in the dtype of the inputs: v~ at the end of each chunk."""
    lengths: Tensor
    """(B,) int64: n, the tokens that each row has seen."""


def init_state(
    batch: int, num_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> RATState:
    """Return the state before the first token; it has no slots yet."""
    running = accumulation_dtype(dtype)
    return RATState(
        k=torch.zeros(batch, num_heads, head_dim, dtype=running, device=device),
        v=torch.zeros(batch, num_heads, head_dim, dtype=running, device=device),
        k_ends=torch.zeros(batch, 0, num_heads, head_dim, dtype=dtype, device=device),
        v_ends=torch.zeros(batch, 0, num_heads, head_dim, dtype=dtype, device=device),
        lengths=torch.zeros(batch, dtype=torch.int64, device=device),
    )


def check_slots(op: str, argument: str, state: RATState, chunk_size: int) -> None:
    """Check that each row's closed chunks are in the slots; lengths are read on a CPU only.

    Raises:
        ValueError: if a row has seen more tokens, or fewer than none.
    """
    N, L = state.k_ends.shape[1], chunk_size
    symbol, most = ("N L + L - 1", N * L + L - 1) if N else ("N", 0)
    check_counts(op, f"{argument}.lengths", state.lengths, symbol, most)


def reserve(state: RATState, num_tokens: int, chunk_size: int) -> RATState:
    """Return the state with slots for `num_tokens` more tokens in every row.

    The ops call this themselves. It reads the lengths and thus waits for the GPU, which is
    impossible while a CUDA graph is captured and in a compiled decoding step. For these, reserve
    slots for all tokens beforehand: a step of one token then uses the slots that are there, and an
    index error tells when they run out.

    Raises:
        TypeError: if the state is no RATState, or a number is not an int.
        ValueError: if `num_tokens` is negative, `chunk_size` below 1, or, on a CPU, the state does
            not have the slots of a row's closed chunks.
    """
    if not isinstance(state, RATState):
        raise TypeError(f"reserve: state must be a RATState, got {type(state).__name__}")
    check_size("reserve", "num_tokens", num_tokens, 0)
    check_size("reserve", "chunk_size", chunk_size)
    check_slots("reserve", "state", state, chunk_size)
    slots = state.k_ends.shape[1]
    if num_tokens == 1 and slots > 0 and _must_not_wait(state.lengths):
        return state
    if slots == 0 or state.lengths.shape[0] == 0:
        longest = 0  # no token was seen yet
    elif torch.compiler.is_compiling() or state.lengths.is_meta:
        # An upper bound: reading the lengths would break the graph, and meta tensors have none.
        longest = slots * chunk_size
    else:
        longest = int(state.lengths.max())
    missing = ceil_div(longest + num_tokens, chunk_size) - slots
    if missing <= 0:
        return state
    grow = (0, 0, 0, 0, 0, missing)
    return replaced(state, k_ends=F.pad(state.k_ends, grow), v_ends=F.pad(state.v_ends, grow))


def _must_not_wait(lengths: Tensor) -> bool:
    if torch.compiler.is_compiling() or lengths.is_meta:
        return True
    return lengths.is_cuda and torch.cuda.is_current_stream_capturing()
