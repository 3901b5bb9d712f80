"""The size of the work of one program of a kernel: tokens of a chunk, slots of a tile."""

import torch


def chunk_length(dtype: torch.dtype, num_slots: int) -> int:
    """Return L, the largest for which the data that a program needs of a chunk fits on chip."""
    if dtype == torch.float32:
        return 64 if num_slots <= 64 else 32
    return 128 if dtype == torch.bfloat16 and num_slots <= 64 else 64


def gate_tiles(num_slots: int) -> int:
    """Return how many tiles of 32 slots the gates of a chunk make, as a power of two."""
    return 1 << (-(-num_slots // 32) - 1).bit_length()
