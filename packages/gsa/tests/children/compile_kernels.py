"""Compile all kernels of gated slot attention for Hopper, in every form that they have."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_gsa.ops.gsa import op
from mezzo_gsa.ops.gsa.form import Form
from triton.runtime.jit import JITFunction

HOPPER = 227 * 1024  # bytes of shared memory that one program may have


def apart(
    T, K, V, M, dtype, *, B=1, HQ=4, H=4, strength=False, packed=False, state=False,
    between="softmax", keep_states=False,
):  # fmt: skip
    """Launch a forward and a backward on separate tensors."""
    q, k, v = (torch.zeros(B, T, n, D, dtype=dtype) for n, D in ((HQ, K), (H, K), (H, V)))
    g, s = torch.zeros(B, T, H, M), torch.zeros(B, T, H, M) if strength else None
    borders = torch.tensor([0, 3, T]) if packed else None
    S = 2 if packed else B
    first = [torch.zeros(S, H, M, D) if state else None for D in (K, V)]
    tensors = (q, k, v, g, s, *first, borders)
    form = Form(1.0, between, None, False, "states" if keep_states else "weights")
    out, k, v, *saved = op.gsa(*tensors, *form)
    last = (k, v) if state else (None, None)
    op.gsa_bwd(out, *last, *tensors, saved, *form)


def projection(T, D, M, dtype, *, B=1, HQ=4, H=4, swish=True, keep_states=False):
    """Launch a forward and a backward on a projection."""
    x = torch.zeros(B, T, (HQ + 2 * H) * D + H * M, dtype=dtype)
    form = Form(1.0, "softmax", 8.0, swish, "states" if keep_states else "weights")
    out, _, _, *saved = op.gsa_projected(x, None, None, None, HQ, H, M, *form)
    op.gsa_projected_bwd(out, None, None, x, None, None, None, saved, HQ, H, M, *form)


def compile_forms():
    """Launch every form."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        projection(100, 512, 64, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        apart(100, 512, 512, 128, dtype, strength=True, state=True)
    projection(5000, 128, 64, torch.bfloat16, HQ=8, H=2, swish=False, keep_states=True)
    apart(100, 40, 72, 20, torch.bfloat16, HQ=4, H=2, packed=True, strength=True)
    apart(100, 32, 32, 16, torch.float32, HQ=2, H=1, state=True, keep_states=True)
    for between in ("none", "swish", "relu", "relu_squared"):
        apart(100, 64, 64, 16, torch.bfloat16, between=between)
    q, g = torch.zeros(1, 100, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 100, 4, 64)
    op.gsa(q, q, q, g, None, None, None, None, *Form(1.0, "softmax", None, False, "nothing"))


with compile_only() as compiled:
    run, too_large = JITFunction.run, set()

    def run_measured(self, *arguments, **sizes):
        kernel = run(self, *arguments, **sizes)
        if kernel.metadata.shared > HOPPER:
            form = {name: sizes.get(name) for name in ("M", "K", "V", "D", "BANDS", "VALUES")}
            too_large.add(f"{self.fn.__name__}: {kernel.metadata.shared} bytes, {form}")
        return kernel

    JITFunction.run = run_measured  # compile_only puts the first one back
    compile_forms()
    names = {name.rsplit(".")[-1] for name in compiled}
    assert names >= {
        "gate_kernel", "segment_states_kernel", "join_segments_kernel",
        "slots_fwd_kernel", "slots_bwd_kernel",
    }, names  # fmt: skip
    assert not too_large, f"too much shared memory: {too_large}"

    for T in (100, 5000):  # one segment, several
        projection(T, 64, 32, torch.bfloat16)
    known = len(compiled)
    for B, T in ((1, 2000), (3, 4096), (2, 1), (2, 1500), (5, 1777), (1, 70_001)):
        projection(T, 64, 32, torch.bfloat16, B=B)
    assert not compiled[known:], f"a new length compiled {compiled[known:]}"
    projection(100, 64, 16, torch.bfloat16)
    assert len(compiled) > known, "compilations are seen"
