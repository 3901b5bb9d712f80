"""What the kernels share: the sizes of their tiles, where a chunk is, and a read's key tile.

A program has BM queries of one head in one chunk, and reads at most BN keys of a chunk at a time.
With landmarks there are L + 1 queries, so if tiles have L, one query is left over. In the forward
the program of the last tile takes it. It collects this query's logits in an extra tile, with keys
as rows (matrix units have many rows) and a column for each of the R reads. After the loop over the
chunks it computes the softmax of all columns at once, and a second loop reads the values. In the
backward, the program that has a chunk's keys takes the left-over queries of all readers.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from mezzo_core.ops.ptxas import require_ptxas
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

require_ptxas()  # every module that launches kernels of this op imports this one

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


class Tiles(NamedTuple):
    """The sizes of a launch."""

    BM: int
    """Queries in a tile."""
    BN: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    registers: int | None = None
    """The most registers of a thread: fewer let more programs run on a multiprocessor."""
    one_more: bool = False
    """Whether whole tiles leave one query over, see above."""

    def count(self, M: int) -> int:
        """Return the number of tiles for M queries."""
        return M // self.BM if self.one_more else ceil_div(M, self.BM)

    def settings(self, x: Tensor) -> dict[str, Any]:
        """Return the constants of a launch on tensors like x (..., H, D)."""
        return {
            "BM": self.BM,
            "BN": self.BN,
            "H": x.shape[-2],
            "D": x.shape[-1],
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.registers,
        }

    def query_settings(self, x: Tensor, R: int) -> dict[str, Any]:
        """Return the constants of a launch whose programs own queries, which read R chunks."""
        reads = max(16, next_power_of_2(R))  # 16 is the least for tl.dot
        return {**self.settings(x), "R": R, "READS": reads}


def key_tile(L: int, D: int, dtype: torch.dtype) -> int:
    """Return BN: all keys of a chunk, or as many as fit."""
    if dtype == torch.float32:
        return 16
    return min(max(16, next_power_of_2(L)), 128 if D <= 128 else 32)


def query_tile(M: int, BN: int, L: int, most: int) -> tuple[int, bool]:
    """Return BM, at most `most`, and whether one query is left over."""
    below = min(2 ** (max(M, 1).bit_length() - 1), most)
    if below >= 32 and M % below == 1 and L <= BN:  # chunks must be read in one go
        return below, True
    return min(max(16, next_power_of_2(M)), most), False


def tile_sizes(
    M: int, L: int, D: int, dtype: torch.dtype, *, wide: int, stages: int, registers: int
) -> Tiles:
    """Return the sizes for M queries and L keys of width D.

    Float32 tiles wider than `wide` have more warps. Small tiles have `stages` and `registers`.
    """
    BN = key_tile(L, D, dtype)
    if dtype == torch.float32:
        return Tiles(16, BN, 4 if wide >= D else 8, 1)
    BM, one_more = query_tile(M, BN, L, 128 if D <= 64 else 64)
    warps = 4 if max(BM, BN) <= 64 and D <= 128 else 8
    if BM * D <= 64 * 64 and BN * D <= 64 * 64:
        return Tiles(BM, BN, warps, stages, registers, one_more)
    return Tiles(BM, BN, warps, 2, None, one_more)


forward_tiles = partial(tile_sizes, wide=128, stages=2, registers=128)
backward_tiles = partial(tile_sizes, wide=64, stages=3, registers=168)


def chunked(x: Tensor, BN: int) -> TensorDescriptor:
    """Return a descriptor of keys or values (B, S, L, H, D), for tiles of BN rows of one head.

    With it the GPU's copy engine computes addresses, which saves registers. The engine wants chunks
    at equal distances, and everything at multiples of 16 bytes; otherwise x is copied.
    """
    if x.shape[1] == 0:
        x = x.new_zeros(len(x), 1, *x.shape[2:])  # descriptors must not be empty; nobody reads it
    B, S, L, H, D = x.shape
    chunk = x.stride(0 if S == 1 else 1)  # the stride of an axis of size 1 says nothing
    one_row = x.stride()[3:] == (D, 1)
    equal = B == 1 or S == 1 or x.stride(0) == S * chunk
    bytes_between = (chunk * x.element_size(), x.stride(2) * x.element_size())
    aligned = x.data_ptr() % 16 == 0 and all(n > 0 and n % 16 == 0 for n in bytes_between)
    if not (one_row and equal and aligned):
        x = x.clone(memory_format=torch.contiguous_format)
        chunk = L * H * D
    return TensorDescriptor(x, [B * S, L, H * D], [chunk, x.stride(2), 1], [1, BN, D])


@triton.jit
def place(chunks, tiles):
    """Return this program's head, chunk and tile: a head's chunks run together and stay in L2."""
    pid = tl.program_id(0)
    i_c = pid // tiles % chunks
    return pid // tiles // chunks, i_c.to(tl.int64), pid % tiles


@triton.jit
def load_reads(indices, weights, i_c, R: tl.constexpr, READS: tl.constexpr):
    """Load the indices of the R chunks that a chunk reads, and their weights, before the loop.

    If these loads were in the loop, those of keys would depend on them and start a stage later.
    """
    o_r = tl.arange(0, READS)
    b_index = tl.load(indices + i_c * R + o_r, mask=o_r < R, other=-1).to(tl.int32)
    return b_index, tl.load(weights + i_c * R + o_r, mask=b_index >= 0, other=0.0)


@triton.jit
def pick(b_x, r):
    """Return element r of a vector."""
    return tl.sum(tl.where(tl.arange(0, b_x.shape[0]) == r, b_x, 0), 0)


@triton.jit
def row_offsets(o_m, i_h, H: tl.constexpr, D: tl.constexpr):
    """Return the offsets (BM, D) of rows of one head, from the first row of their chunk.

    They are int32, with half the registers of int64: only the offset of a chunk can be large.
    """
    return (o_m[:, None] * H + i_h) * D + tl.arange(0, D)[None, :]


@triton.jit
def load_keys(x, index, first, j, i_h, BN: tl.constexpr, D: tl.constexpr):
    """Load rows j to j + BN, (BN, D), of chunk `first + index` of a descriptor.

    Rows beyond the chunk are zeros; if the index is -1, all rows are.
    """
    i_c = tl.where(index >= 0, first + index, -1).to(tl.int32)
    return tl.reshape(x.load([i_c, j, i_h * D]), [BN, D])


@triton.jit
def logits(
    b_a, b_b, j, L: tl.constexpr, BN: tl.constexpr, AXIS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a bᵀ, with -inf for keys beyond L; keys are along AXIS."""
    b_s = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)
    if L % BN:
        m_l = tl.expand_dims(j + tl.arange(0, BN) < L, 1 - AXIS)
        b_s = tl.where(m_l, b_s, float("-inf"))
    return b_s
