"""Compile the steps of a tile for Hopper: with few rows, and only then, all of a step begins early.

What begins before the kernel before it has ended must write nothing until it has waited.
"""

import torch
from mezzo_core.testing.compile_only import compile_only, keep_kernels
from mezzo_recurrent_transformer.ops.recurrent_layers import triton
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import run_tile_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import run_tile
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    ForwardBuffers,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace

FORWARD = {"attend_step_kernel", "product_add_kernel", "product_kernel", "add_normed_kernel"}
BACKWARD = {"pairs_step_bwd_kernel", "product_kernel", "normed_bwd_kernel"}
WAIT, WRITE = "griddepcontrol.wait", "st.global"


def steps(kind, run, B, n=2, C=1024, F=4096, H=16, S=3):
    """Return the names of all kernels that steps of a tile launch, and of those that wait."""
    form = Form(H, 1.0, "rms", 1e-5, True, 1)

    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, device="meta")

    matrices = empty(n, 3 * C, C), empty(n, C, C), empty(n, F, C), empty(n, C, F)
    w = Matrices(*matrices, *(empty(n, C) for _ in range(4)))
    slopes = torch.empty(H, device="meta")
    with keep_kernels() as kernels:
        run(Workspace(kind.of(empty(B, S, C), w, S, form), w, slopes, form, triton))
    texts = [(kernel.metadata.name, kernel.asm["ptx"]) for kernel in kernels]
    for name, text in texts:
        waits, writes = text.find(WAIT), text.find(WRITE)
        assert waits < writes, f"{name} writes before it waits"
        assert (waits >= 0) == ("griddepcontrol.launch_dependents" in text), name
    return {name for name, _ in texts}, {name for name, text in texts if WAIT in text}


with compile_only(assembled=True):  # Triton writes the waiting in inline assembly
    launched, early = steps(ForwardBuffers, run_tile, 32)
    assert early == FORWARD, early
    assert launched - early == {"split_pair_kernel"}, launched  # the last one
    launched, early = steps(BackwardBuffers, run_tile_bwd, 32)
    assert launched == early == BACKWARD, (launched, early)
    for kind, run in ((ForwardBuffers, run_tile), (BackwardBuffers, run_tile_bwd)):
        _, early = steps(kind, run, 512)
        assert not early, early
