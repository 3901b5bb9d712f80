"""Checks of `cu_seqlens`, the borders of sequences packed in one row."""

from torch import Tensor

from mezzo_core.ops.checks import check_dtype, is_read


def check_cu_seqlens(op: str, cu_seqlens: Tensor, x: Tensor) -> None:
    """Check all but the values of the borders of packed sequences x (B, T, ...).

    Raises:
        TypeError: if the borders are not an int32 or int64 tensor.
        ValueError: if they are not (S + 1,) with S >= 1, are on another device, or B is not 1.
    """
    check_dtype(op, "cu_seqlens", cu_seqlens, "int")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens must be (S + 1,), S >= 1, got {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"{op}: cu_seqlens is on {cu_seqlens.device}, the inputs on {x.device}")
    if x.shape[0] != 1:
        raise ValueError(f"{op}: cu_seqlens packs sequences into one row, got B = {x.shape[0]}")


def count_sequences(op: str, cu_seqlens: Tensor | None, x: Tensor) -> int:
    """Return the number of sequences in x (B, T, ...): B, or that of `cu_seqlens`, checked here."""
    if cu_seqlens is None:
        return x.shape[0]
    check_cu_seqlens(op, cu_seqlens, x)
    return cu_seqlens.shape[0] - 1


def check_borders(op: str, cu_seqlens: Tensor, num_tokens: int) -> None:
    """Check the values, on a CPU only: reading them would wait for a GPU or break a compiled graph.

    Raises:
        ValueError: if the borders do not start at 0, decrease, or do not end at `num_tokens`.
    """
    if not is_read(cu_seqlens):
        return
    ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
    # Not by their differences, which may overflow and then look like lengths.
    if ends != (0, num_tokens) or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        borders = [int(border) for border in cu_seqlens]  # `tolist` fails in torch.func of 2.8
        shown = borders if len(borders) <= 16 else [*borders[:8], "...", *borders[-8:]]
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, never decrease and end at T = {num_tokens}, "
            f"got {shown}"
        )
