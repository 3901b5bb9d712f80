"""Compile the attention kernels for Hopper, in every form."""

import torch
from mezzo_core.testing.compile_only import compile_only
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.eager import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form


def attend(H, D, dtype, *, m=2, S=16, B=2, slots=64, first=32, b=1, past=False):
    """Launch each kernel."""
    C, form, slopes = H * D, Form(H, 1.0, "rms", 1e-6, True, b), torch.zeros(H)

    def tile(channels=C, dtype=dtype):
        return torch.zeros(m, S, B, channels, dtype=dtype)

    k, v = torch.zeros(2, m, B, slots, C, dtype=dtype)
    keys = Keys(k, v, torch.zeros(B, dtype=torch.int64) if past else None, first)
    o, lse = tile(dtype=torch.float32), tile(H, torch.float32)
    kernels.attend_earlier(tile(), keys, slopes, form, o, lse)


with compile_only() as compiled:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in (16, 32, 64, 128):
            attend(2, D, dtype)
    for S in (32, 64, 65):
        attend(2, 64, torch.bfloat16, S=S, b=S)
    attend(2, 64, torch.bfloat16, past=True)
    attend(22, 64, torch.bfloat16)
    known = len(compiled)
    for m, S, B, first in ((1, 16, 1, 0), (3, 13, 5, 39), (1, 1, 3, 7)):
        attend(2, 64, torch.bfloat16, m=m, S=S, B=B, slots=first + 40, first=first)
    assert not compiled[known:], f"new sizes compiled {compiled[known:]}"
