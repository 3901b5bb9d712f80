"""The inputs of the gated scan's kernels: tensors in a form that the kernels can read."""

import torch
from torch import Tensor


def channels_last(t: Tensor) -> Tensor:
    """Return t, copied if the channels of a token are not adjacent in memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """Return t contiguous, or None."""
    return None if t is None else t.contiguous()


def states_or_zeros(given: Tensor | None, zvg: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return one state for each row or packed sequence: the given ones, or zeros."""
    if given is not None:
        return given.contiguous()
    num_states = zvg.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.zeros((num_states, zvg.shape[2] // 3), dtype=torch.float32, device=zvg.device)


def owners_of(cu_seqlens: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None]:
    """Return for each token the sequence that begins at it, and the one that ends after it.

    Each is (T + 1,) int32, with -1 for none; both are None without packed sequences.
    """
    if cu_seqlens is None:
        return None, None
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    sequences = torch.arange(len(starts), dtype=torch.int32, device=cu_seqlens.device)
    # Sequences without tokens are written to the place past the end, which no kernel reads.
    none = torch.full((T + 1,), -1, dtype=torch.int32, device=cu_seqlens.device)
    opens = none.scatter(0, torch.where(starts < ends, starts, T), sequences)
    closes = none.scatter(0, torch.where(starts < ends, ends - 1, T), sequences)
    return opens, closes
