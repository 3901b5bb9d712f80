"""A layer as papers time it, and its check: no speed for a wrong one."""

import copy

import torch
from torch import Tensor, nn

from mezzo_core.errors import UserError
from mezzo_core.nn.contract import AbstractMixer

FACTOR = 3.0
"""How much worse than the reference in bf16, on the CPU, a layer may be."""
TOKENS = 160  # two chunks of 128, ten of 16


class Layer(nn.Module):
    """What the paper times: norm, mixer with its projections, residual."""

    def __init__(self, mixer: AbstractMixer, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Mix (B, T, C) along time, without a state."""
        return x + self.mixer(self.norm(x))[0]


def check_layer(layer: Layer) -> None:
    """Compare training under bf16 autocast, and decoding with bf16 weights, with float32.

    The CPU computes the references of all ops: once in float32, which tells both errors, the
    layer's and the one that bf16 costs the reference itself.

    Raises:
        UserError: if an output or the input's gradient is wrong, naming which.
    """
    reference = copy.deepcopy(layer).float().cpu()
    width = len(layer.norm.weight)
    x, dout = (torch.randn(2, TOKENS, width) for _ in range(2))
    exact, low, ours = (
        _train(reference, x, dout, autocast=False),
        _train(reference, x, dout, autocast=True),
        _train(layer, x, dout, autocast=True),
    )
    for name in exact:
        _compare(layer, name, ours[name], exact[name], low[name])
    with torch.no_grad():
        half = copy.deepcopy(reference).bfloat16()
        low_out = half.mixer(half.norm(x.bfloat16()))[0]
        decoded = _decode(copy.deepcopy(layer).bfloat16(), x.bfloat16())
    last = slice(TOKENS - decoded.shape[1], None)
    expected = exact["the output in training"][:, last]
    _compare(layer, "the output in decoding", decoded, expected, low_out[:, last])


def _train(layer: Layer, x: Tensor, dout: Tensor, *, autocast: bool) -> dict[str, Tensor]:
    """Return the mixer's output and the gradient of its input; the residual would hide errors."""
    device = layer.norm.weight.device
    x = x.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = layer.mixer(layer.norm(x))[0]
    (dx,) = torch.autograd.grad(out, x, dout.to(out))
    return {"the output in training": out.detach(), "the input's gradient": dx}


def _decode(layer: Layer, x: Tensor) -> Tensor:
    """Prefill all but a few tokens, and decode these in place: (B, few, C)."""
    x = layer.norm(x.to(layer.norm.weight.device))
    first = TOKENS - 20
    _, state = layer.mixer(x[:, :first], layer.mixer.init_state(len(x)))
    state = layer.mixer.reserve(state, TOKENS - first)
    return torch.cat([layer.mixer.step(x[:, t : t + 1], state) for t in range(first, TOKENS)], 1)


def _compare(layer: Layer, name: str, ours: Tensor, exact: Tensor, low: Tensor) -> None:
    def error(x: Tensor) -> float:
        return float((x.float().cpu() - exact).norm() / exact.norm())

    # Written so that NaN fails.
    if not error(ours) <= FACTOR * error(low) + 1e-4:
        raise UserError(
            f"{type(layer.mixer).__name__}: {name} is wrong here (error {error(ours):.1e}, "
            f"the reference's in bf16 {error(low):.1e}): no speed"
        )
