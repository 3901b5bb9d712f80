"""Random inputs of RAT attention on one projection."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(B, T, H, G, D, *, dtype=torch.float32, bias=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    return {
        "zvgqk": normal(B, T, (3 * H + 2 * G) * D).to(dtype),
        "gate_bias": normal(H, D) + bias,
    }
