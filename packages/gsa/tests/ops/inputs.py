"""Inputs of gated linear attention and of gated slot attention by name, and the ops of them."""

import torch
import torch.nn.functional as F
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gsa import GSAState

GATES = ["usual", "quick", "zero", "padded", "far", "mixture", "tiny"]
STATES = ("initial_state", "k0", "v0")  # GLA's; GSA's two


def draw_gla(
    B, T, HQ=2, H=1, K=3, V=5, *, gate="channel", states=None, dtype=torch.float64, seed=0
):
    """Draw inputs of GLA; `states` rows of initial state, B of them if None."""
    normal, wide = _normal(seed), torch.promote_types(dtype, torch.float32)
    return {
        "q": normal(B, T, HQ, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": F.logsigmoid(2 * normal(B, T, H, K if gate == "channel" else 1)).to(wide),
        "initial_state": normal(B if states is None else states, H, K, V).to(wide),
    }


def draw_gsa(
    B, T, HQ=2, H=1, K=3, V=5, M=4, *, gates="usual", strength=False, states=None,
    dtype=torch.float64, seed=0,
):  # fmt: skip
    """Draw inputs of GSA; `states` rows of initial memories, B of them if None."""
    normal, wide = _normal(seed), torch.promote_types(dtype, torch.float32)
    S = B if states is None else states
    inputs = {
        "q": normal(B, T, HQ, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": _gates(gates, normal(B, T, H, M)).to(wide),
    }
    if strength:
        inputs["s"] = normal(B, T, H, M).to(wide)
    return inputs | {"k0": normal(S, H, M, K).to(wide), "v0": normal(S, H, M, V).to(wide)}


def _normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def _gates(kind, normal):
    """Turn normal numbers into log gates of a kind."""
    gates = {
        "usual": F.logsigmoid(normal) / 8,
        "quick": F.logsigmoid(2 * normal),
        "zero": torch.zeros_like(normal),
        "padded": F.logsigmoid(normal) * (normal > -0.5),  # exact zeros between the others
        "far": torch.full_like(normal, -50.0),
        "mixture": torch.where(normal > 0.52, -50.0, F.logsigmoid(normal) / 8),  # 30% of them
        "tiny": torch.full_like(normal, -1e-4),
    }
    return gates[kind]


def call(op, k0=None, v0=None, **x):
    """Call an op, GSA's with the memories apart; return the output and the state's tensors."""
    if k0 is not None:
        x["initial_state"] = GSAState(k0, v0)
    out, state = op(**x)
    return out, *(state if isinstance(state, GSAState) else (state,))


def tokens(inputs, start=None, end=None):
    """Return the inputs that have tokens, cut to the tokens from `start` to `end`."""
    return {name: x[:, start:end] for name, x in inputs.items() if name not in STATES}


def states(inputs):
    return {name: x for name, x in inputs.items() if name in STATES}


def assert_same(fn, ref, inputs):
    """Compare all results and all gradients."""
    generator = torch.Generator().manual_seed(1)
    douts = tuple(torch.randn(x.shape, generator=generator).to(x) for x in fn(**inputs))
    (truth, dtruth), (found, dfound) = (grads(f, inputs, douts) for f in (ref, fn))
    for name, a, b in zip(("out", "state", "state's v"), found, truth, strict=False):
        assert_close(name, a, b, rtol=1e-10, atol=1e-12)
    for name, b in dtruth.items():
        assert_close(f"d{name}", dfound[name], b, rtol=1e-10, atol=1e-11)
