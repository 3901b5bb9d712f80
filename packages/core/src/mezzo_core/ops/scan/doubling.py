"""The linear scan by doubling, for ONNX: log2(T) steps of plain operations, for any T."""

import torch
from torch import Tensor

from mezzo_core.ops.precision import accumulation_dtype

_LONGEST = 2**31  # the most tokens, if T is symbolic


def doubling_scan(
    a: Tensor,
    x: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return h (B, T, D) and the last states, as the registered op does for unpacked rows.

    After the step of width d, each h is the decayed sum over its last 2d tokens.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    if cu_seqlens is not None:
        raise ValueError("linear_scan: an export to ONNX takes no packed sequences")
    dtype, T = accumulation_dtype(x.dtype), x.shape[1]
    decay, h = a.to(dtype), x.to(dtype)
    if h0 is not None:
        h = torch.cat([h[:, :1] + decay[:, :1] * h0[:, None], h[:, 1:]], 1)
    if chunk_size:
        start = torch.arange(T, device=x.device) % chunk_size == 0
        decay = decay.masked_fill(start[:, None], 0)
    width, most = 1, chunk_size or _LONGEST
    while width < most and not statically_known_true(width >= T):
        h = h + decay * _later(h, width)
        decay = decay * _later(decay, width)
        width *= 2
    return h.to(x.dtype), h[:, -1]


def _later(x: Tensor, width: int) -> Tensor:
    """Shift x (B, T, D) to later tokens by `width`, with zeros before it."""
    source = torch.arange(x.shape[1], device=x.device) - width
    return x[:, source.clamp(min=0)].masked_fill((source < 0)[:, None], 0)
