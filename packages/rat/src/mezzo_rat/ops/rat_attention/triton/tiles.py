"""Constants of the launches: tiles, warps and stages for each kernel and head width."""

import math
from typing import Any, Literal

import torch
from mezzo_core.ops.sizes import next_power_of_2
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mezzo_rat.ops.rat_attention.triton.plan import Plan

LOG2_E = math.log2(math.e)

# Tiles (BM tokens by BN ends), warps and stages of 16-bit kernels. A key is the largest head width
# of its entry. With few ends, the start and end of a program take much of its time; with many ends,
# only the products count.
FEW_ENDS = 1024
TILES_FEW: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "fwd": {64: (64, 32, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 4, 2)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    "dkv": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 4, 2)},
}
TILES_MANY: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "fwd": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 4, 2)},
    "dq": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)},
    "dkv": {64: (64, 128, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 4, 2)},
}
TILES_FLOAT32 = (32, 32, 4, 1)


def scan_settings(plan: Plan) -> dict[str, Any]:
    """Return the constants of the scan's kernels."""
    sizes = plan.sizes
    H, G, D = sizes.H, sizes.G, sizes.D
    BR = next_power_of_2(H // G)
    # At least two warps: with one, the LLVM inside Triton 3.6 aborts on a tile of 4 by 128.
    return {
        "L": plan.form.chunk_size, "G": G, "R": H // G, "D": D, "BR": BR,
        "MODE": plan.mode, "num_warps": min(max(BR * D // 512, 2), 8), **sizes.offsets,
    }  # fmt: skip


def ends_settings(
    plan: Plan, dtype: torch.dtype, kernel: Literal["fwd", "dq", "dkv"], num_ends: int
) -> dict[str, Any]:
    """Return the constants of one kernel of the attention to `num_ends` ends a row."""
    sizes = plan.sizes
    tiles = (TILES_FEW if num_ends <= FEW_ENDS else TILES_MANY)[kernel]
    width = next(width for width in tiles if width >= sizes.D)
    fit = TILES_FLOAT32 if dtype == torch.float32 else tiles[width]
    BM, BN, num_warps, num_stages = fit
    return {
        "L": plan.form.chunk_size, "G": sizes.G, "H": sizes.H, "D": sizes.D, "BM": BM, "BN": BN,
        "MODE": plan.mode, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip


def tiled(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x (B, T, H, D) for loads of one head of `rows` tokens."""
    x, D = x.flatten(2), x.shape[3]
    if x.data_ptr() % 16:  # as a part of a wider gradient may be; bulk copies begin at 16 bytes
        x = x.clone()
    return TensorDescriptor.from_tensor(x, [1, rows, D])
