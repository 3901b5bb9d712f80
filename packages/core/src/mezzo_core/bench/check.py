"""A layer is checked before it is timed: a wrong result has no speed."""

import copy

import torch
from torch import Tensor

from mezzo_core.bench.layer import Layer, build_layer
from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LMConfig

FACTOR = 3.0
"""The layer's error may be this many times that of the reference in bf16 on the CPU."""
TOKENS = 160  # two chunks of 128, ten of 16


def check_mixers(config: LMConfig, device: torch.device) -> None:
    """Check each kind of layer of a model that is described by its mixers; see `check_layer`."""
    for mixer in dict.fromkeys(config.mixers):
        check_layer(build_layer(mixer, config.d_model, device))


def check_layer(layer: Layer) -> None:
    """Check training under bf16 autocast and decoding with bf16 weights, against float32.

    The references of all ops run on the CPU, in float32 and in bf16. The float32 results are taken
    as exact. The layer's error may be `FACTOR` times that of the bf16 reference.

    Raises:
        UserError: if an output or the input's gradient is wrong; the message names it.
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
    """Return the output and the input's gradient, without the residual, which would hide errors."""
    device = layer.norm.weight.device
    x = x.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = layer.mixer(layer.norm(x))[0]
    (dx,) = torch.autograd.grad(out, x, dout.to(out))
    return {"the output in training": out.detach(), "the input's gradient": dx}


def _decode(layer: Layer, x: Tensor) -> Tensor:
    """Prefill all but the last 20 tokens, and decode these in place: (B, 20, C)."""
    x = layer.norm(x.to(layer.norm.weight.device))
    first = TOKENS - 20
    _, state = layer.mixer(x[:, :first], layer.mixer.init_state(len(x)))
    state = layer.mixer.reserve(state, TOKENS - first)
    return torch.cat([layer.mixer.step(x[:, t : t + 1], state) for t in range(first, TOKENS)], 1)


def _compare(layer: Layer, name: str, ours: Tensor, exact: Tensor, low: Tensor) -> None:
    def error(x: Tensor) -> float:
        return float((x.float().cpu() - exact).norm() / exact.norm())

    # "not <=" and not ">", so that NaN fails.
    if not error(ours) <= FACTOR * error(low) + 1e-4:
        raise UserError(
            f"{type(layer.mixer).__name__}: {name} is wrong here (error {error(ours):.1e}, "
            f"the reference's in bf16 {error(low):.1e}): no speed"
        )
