"""Compile all kernels of gated linear attention for Hopper, in every form they have."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_gsa.ops.gla import op


def gla(T, K, V, dtype, *, B=1, HQ=4, H=2, head_gate=False, packed=False, state=False):
    """Launch a forward and a backward."""
    q = torch.zeros(B, T, HQ, K, dtype=dtype)
    k, v = torch.zeros(B, T, H, K, dtype=dtype), torch.zeros(B, T, H, V, dtype=dtype)
    g = torch.zeros(B, T, H, 1 if head_gate else K)
    borders = torch.tensor([0, 3, T]) if packed else None
    initial = torch.zeros(2 if packed else B, H, K, V) if state else None
    out, final = op.gla(q, k, v, g, initial, borders, K**-0.5)
    dfinal = torch.zeros(final.shape[0], HQ, K, V) if state and HQ == H else None
    op.gla_bwd(out, dfinal, q, k, v, g, initial, borders, K**-0.5)


with compile_only() as compiled:
    for head_gate in (False, True):
        gla(100, 256, 512, torch.bfloat16, HQ=4, H=4, head_gate=head_gate)
        gla(100, 64, 64, torch.float16, head_gate=head_gate, packed=True, state=True)
        gla(100, 128, 128, torch.float32, head_gate=head_gate)
    gla(100, 512, 1024, torch.bfloat16, HQ=1, H=1, head_gate=True)
    gla(100, 8, 24, torch.bfloat16, HQ=2, H=2, state=True)
    names = {name.rsplit(".")[-1] for name in compiled}
    assert names >= {"gate_kernel", "scores_kernel", "outputs_kernel", "keys_bwd_kernel"}, names

    gla(100, 64, 64, torch.bfloat16)
    gla(5000, 64, 64, torch.bfloat16)  # several segments
    known = len(compiled)
    for B, T in ((1, 2000), (3, 4096), (2, 1500), (5, 1777)):
        gla(T, 64, 64, torch.bfloat16, B=B)
    assert not compiled[known:], f"a new length compiled {compiled[known:]}"
