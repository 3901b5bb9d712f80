"""Random inputs of attention, and borders of packed sequences."""

from itertools import accumulate

import torch


def problem(B=2, T=7, S=None, HQ=4, H=None, D=8, V=None, dtype=torch.float32, device="cpu", seed=0):
    """Random q, k, v and the gradient of the output."""
    S, H, V = S or T, H or HQ, V or D
    draw = torch.Generator().manual_seed(seed)
    shapes = [(B, T, HQ, D), (B, S, H, D), (B, S, H, V), (B, T, HQ, V)]
    q, k, v, dout = (torch.randn(s, generator=draw).to(device, dtype) for s in shapes)
    return {"q": q, "k": k, "v": v}, dout


def borders(lengths, device="cpu"):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
