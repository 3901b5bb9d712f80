"""What the kernels of the gated scan are given: tensors as they can read them."""

import torch
from torch import Tensor


def channels_last(t: Tensor) -> Tensor:
    """Return t with the channels of a token side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """Return t contiguous, or None."""
    return None if t is None else t.contiguous()


def states_or_zeros(given: Tensor | None, zvg: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the states, zeros if none are given, one a row or one a packed sequence."""
    if given is not None:
        return given.contiguous()
    num_states = zvg.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.zeros((num_states, zvg.shape[2] // 3), dtype=torch.float32, device=zvg.device)


def owners_of(cu_seqlens: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None]:
    """Say for each token which sequence opens at it, and which closes after it; -1 for none."""
    if cu_seqlens is None:
        return None, None
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    sequences = torch.arange(len(starts), dtype=torch.int32, device=cu_seqlens.device)
    # Sequences without tokens all go to a place past the end, which no kernel reads.
    none = torch.full((T + 1,), -1, dtype=torch.int32, device=cu_seqlens.device)
    opens = none.scatter(0, torch.where(starts < ends, starts, T), sequences)
    closes = none.scatter(0, torch.where(starts < ends, ends - 1, T), sequences)
    return opens, closes
