"""How much of a call one program of a kernel takes: tokens of a chunk, slots of a tile."""

import torch


def chunk_length(dtype: torch.dtype, num_slots: int) -> int:
    """Return L: as long as what a program holds of a chunk fits on the chip."""
    if dtype == torch.float32:
        return 64 if num_slots <= 64 else 32
    return 128 if dtype == torch.bfloat16 and num_slots <= 64 else 64


def gate_tiles(num_slots: int) -> int:
    """Return in how many tiles of 32 slots a kernel takes the gates of a chunk, a power of two."""
    return 1 << (-(-num_slots // 32) - 1).bit_length()
