"""Whatever is put in the place of an argument, every op names it or gives a right result."""

import math

import numpy as np
import pytest
import torch
from mezzo_core.ops.attention import attention
from mezzo_core.ops.decode_attention import append_token_, decode_attention
from mezzo_core.ops.decode_linear import decode_linear
from mezzo_core.ops.linear_scan import linear_scan
from mezzo_core.ops.online_softmax import SoftmaxPart, merge_softmax
from mezzo_core.positions import (
    alibi_slopes,
    apply_rope,
    rope_angles,
    rope_frequencies,
    sequence_ids,
    sequence_positions,
)


def merge(out_a, lse_a, out_b, lse_b, impl="auto"):
    return merge_softmax(SoftmaxPart(out_a, lse_a), SoftmaxPart(out_b, lse_b), impl=impl)


def cache(D=8):
    lengths = torch.tensor([3])
    return {"k": torch.ones(1, 4, 2, D), "v": torch.ones(1, 4, 2, D), "lengths": lengths}


OPS = {
    attention: lambda: {
        **{name: torch.ones(1, 6, 2, 8) for name in ("q", "k", "v")},
        "causal": True, "window_size": 3, "alibi_slopes": torch.ones(2), "scale": 0.3,
        "cu_seqlens": torch.tensor([0, 6]), "return_lse": False, "impl": "auto",
    },
    decode_attention: lambda: {
        "q": torch.ones(1, 2, 8), **cache(), "alibi_slopes": torch.ones(2), "scale": 0.3,
        "impl": "auto",
    },
    append_token_: lambda: {
        **{name: torch.ones(1, 2, 8) for name in ("q", "k", "v")},
        "k_cache": cache()["k"], "v_cache": cache()["v"], "lengths": torch.tensor([3]),
        "rope_base": 50.0, "impl": "auto",
    },
    decode_linear: lambda: {
        "x": torch.ones(1, 8), "weight": torch.ones(4, 8), "bias": torch.ones(4),
        "norm_weight": torch.ones(8), "norm_eps": 1e-6, "impl": "auto",
    },
    linear_scan: lambda: {
        "a": torch.ones(1, 6, 3), "x": torch.ones(1, 6, 3), "initial_state": torch.ones(1, 3),
        "chunk_size": 2, "cu_seqlens": torch.tensor([0, 6]), "impl": "auto",
    },
    merge: lambda: {
        "out_a": torch.ones(2, 5, 3, 4), "lse_a": torch.ones(2, 5, 3),
        "out_b": torch.ones(2, 5, 3, 4), "lse_b": torch.ones(2, 5, 3), "impl": "auto",
    },
    rope_angles: lambda: {"positions": torch.arange(3), "dim": 8, "base": 50.0},
    rope_frequencies: lambda: {"dim": 8, "base": 50.0},
    apply_rope: lambda: {
        "x": torch.ones(1, 6, 2, 8), "cos": torch.ones(6, 4), "sin": torch.ones(6, 4)
    },
    alibi_slopes: lambda: {"num_heads": 12, "formula": "press"},
    sequence_ids: lambda: {"num_tokens": 6, "cu_seqlens": torch.tensor([0, 6])},
    sequence_positions: lambda: {"num_tokens": 6, "cu_seqlens": torch.tensor([0, 6])},
}  # fmt: skip
ALIASES = {"out_a": "a.out", "lse_a": "a.lse", "out_b": "b.out", "lse_b": "b.lse"}
STRANGE = {
    "an object": object(),
    "text": "cat",
    "list": [1.0, 2.0],
    "array": np.ones(3),
    "complex number": 1j,
    "NaN": math.nan,
    "infinity": math.inf,
    "huge": 10**400,
    "float8": torch.ones(1, 6, 2, 8).to(torch.float8_e4m3fn),
    "complex tensor": torch.ones(1, 6, 2, 8, dtype=torch.complex64),
    "bool tensor": torch.ones(1, 6, 2, 8, dtype=torch.bool),
    "meta tensor": torch.ones(1, 6, 2, 8, device="meta"),
    "no numbers": torch.ones(0),
}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_the_arguments_are_right_as_they_are(op):
    with torch.no_grad():
        op(**OPS[op]())


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_strange_argument_is_named(op, kind):
    for name in OPS[op]():
        arguments = {**OPS[op](), name: STRANGE[kind]}
        shown = "one shape|" + name if name in ("a", "x") else ALIASES.get(name, name)
        words = f"{shown}|shape|must be|is on" if kind in TENSORS else shown
        with torch.no_grad(), pytest.raises((TypeError, ValueError), match=words):
            op(**arguments)


TENSORS = ("meta tensor", "no numbers")


@pytest.mark.parametrize("value", [0, -1, 0.0, math.nan, True])
def test_what_must_be_positive_is_refused_otherwise(value):
    for op, name in ((append_token_, "rope_base"), (rope_angles, "base"), (rope_angles, "dim")):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            op(**{**OPS[op](), name: value})


@pytest.mark.parametrize("scale", [-0.7, 0, -0.0])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_scale_of_decoding_may_be_zero_or_negative(impl, scale):
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v = torch.randn(1, 2, 32), *torch.randn(2, 1, 4, 2, 32)
    if torch.cuda.is_available():
        q, k, v = q.cuda(), k.cuda(), v.cuda()
    k[:, 3], v[:, 3] = math.nan, math.nan  # no token is there yet
    lengths = torch.tensor([3], device=q.device)
    out = decode_attention(q, k, v, lengths, scale=scale, impl=impl)
    weights = (torch.einsum("bhd,bshd->bhs", q, k[:, :3]) * scale).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhs,bshd->bhd", weights, v[:, :3]))
