"""Benchmarks of ops: chunk_gsa, chunk_gla and softmax attention over the same tokens.

Before an op is timed, it is compared with its definition. At every shape that is timed, it is also
compared with its chunked form in float32, because the definition would take minutes there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mezzo_core.bench import Contender, Row
from mezzo_core.errors import UserError
from mezzo_core.testing import assert_close, grads
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mezzo_gsa.bench import fla
from mezzo_gsa.bench.setting import Setting
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import chunk_gla, chunk_gsa, recurrent_gla, recurrent_gsa

Op = Callable[..., Tensor]
CHECKED_TOKENS = 200
"""T of the comparison with the definition: whole chunks and a part of a chunk."""
STEEP = 2.0
"""Subtracted from a log gate, so that a slot keeps at most exp(-2) of its memory at a token."""
FLA_RTOL = 2e-2
"""A tolerance that tells whether fla computes the same function."""


def gsa_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gsa, with steep gates too, then its forms in eager PyTorch at a small shape."""
    shapes, impl, first = setting.shapes, setting.impl, setting.shapes.batches[0]
    scale = shapes.head_dim**-0.5
    ours, definition = _op(chunk_gsa, scale), _op(recurrent_gsa, scale)
    chunked = _op(partial(chunk_gsa, impl="reference"), scale)
    keeping = _op(partial(chunk_gsa, keep_states=True), scale)
    for M in shapes.slots:
        inputs = gsa_contender(setting, ours, (1, CHECKED_TOKENS), M).inputs
        check_op("chunk_gsa", ours, definition, inputs)
    cases = [(batch, shapes.slots[0]) for batch in shapes.batches]
    for batch, M in [*cases, *((first, M) for M in shapes.slots[1:])]:
        contender = gsa_contender(setting, ours, batch, M)
        yield from _checked_rows(setting, contender, chunked)
        kept = replace(contender, impl=f"{impl}, states kept", run=keeping, phases=("train",))
        yield from _checked_rows(setting, kept, chunked)
        if setting.has_fla:
            with fla.excused("its GSA op", setting.say):
                for theirs in fla.gsa_contenders(contender, scale):
                    yield from peer_rows(setting, theirs, chunked(**_upcast(contender.inputs)))
    steep = gsa_contender(setting, ours, first, shapes.slots[0])
    steep.inputs["g"][..., 0] -= STEEP
    yield from _checked_rows(setting, replace(steep, impl=f"{impl}, steep"), chunked)
    for form, run in {"by chunks": chunked, "by tokens": definition}.items():
        slow = gsa_contender(setting, run, shapes.reference, shapes.slots[0])
        yield from setting.time(replace(slow, impl=f"reference, {form}"))


def gla_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gla at the widths of the layer: K is half of V."""
    scale = (setting.shapes.head_dim // 2) ** -0.5
    ours, definition = _op(chunk_gla, scale), _op(recurrent_gla, scale)
    chunked = _op(partial(chunk_gla, impl="reference"), scale)
    inputs = gla_contender(setting, ours, (1, CHECKED_TOKENS)).inputs
    check_op("chunk_gla", ours, definition, inputs)
    for batch in setting.shapes.batches:
        contender = gla_contender(setting, ours, batch)
        yield from _checked_rows(setting, contender, chunked)
        if setting.has_fla:
            with fla.excused("its GLA op", setting.say):
                theirs = replace(contender, impl=fla.title(), run=fla.gla_op(scale))
                yield from peer_rows(setting, theirs, chunked(**_upcast(contender.inputs)))


def attention_rows(setting: Setting) -> Iterator[Row]:
    """Time causal softmax attention with the same number of channels, by each torch kernel."""
    D = setting.shapes.attention_dim
    H = setting.shapes.d_model // D
    backends = {"sdpa": SDPBackend.FLASH_ATTENTION}
    if setting.device.type == "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for B, T in setting.shapes.batches:
        inputs = {name: setting.normal(B, H, T, D) for name in "qkv"}
        shape = {"B": B, "T": T, "H": H, "D": D}
        for impl, backend in backends.items():
            run = partial(_attention, backend)
            yield from setting.time(Contender("attention op", impl, shape, run, inputs))


def gsa_contender(setting: Setting, op: Op, batch: tuple[int, int], M: int) -> Contender:
    """Return the op on random q, k, v (B, T, H, K), and g (B, T, H, M) like the layer's."""
    (B, T), H, K = batch, setting.shapes.num_heads, setting.shapes.head_dim
    inputs = {name: setting.normal(B, T, H, K) for name in "qkv"}
    logits = torch.randn(B, T, H, M, device=setting.device)
    shape = {"B": B, "T": T, "H": H, "K": K, "V": K, "M": M}
    g = F.logsigmoid(logits) / GSAConfig().damping
    return Contender("gsa op", setting.impl, shape, op, {**inputs, "g": g})


def gla_contender(setting: Setting, op: Op, batch: tuple[int, int]) -> Contender:
    """Return the op on random q, k (B, T, H, K), v (B, T, H, 2 K), and g (B, T, H, K)."""
    (B, T), H, V = batch, setting.shapes.num_heads, setting.shapes.head_dim
    widths = {"q": V // 2, "k": V // 2, "v": V}
    inputs = {name: setting.normal(B, T, H, D) for name, D in widths.items()}
    logits = torch.randn(B, T, H, V // 2, device=setting.device)
    shape = {"B": B, "T": T, "H": H, "K": V // 2, "V": V}
    g = F.logsigmoid(logits) / GLAConfig().damping
    return Contender("gla op", setting.impl, shape, op, {**inputs, "g": g})


def check_op(name: str, op: Op, definition: Op, inputs: Mapping[str, Tensor]) -> None:
    """Compare an op's output and gradients with its definition's in a higher precision.

    Raises:
        UserError: if the output or a gradient is wrong; the message names it.
    """
    with torch.no_grad():
        dout = torch.randn_like(op(**inputs))
    out, ours = grads(op, inputs, dout)
    exact, expected = grads(definition, _upcast(inputs), dout)
    usual, special = (1e-5, {}) if out.dtype == torch.float32 else (5e-3, {"g": 8e-3})
    pairs = {"out": (out, exact), **{key: (ours[key], expected[key]) for key in expected}}
    try:
        for key, (found, true) in pairs.items():
            assert_close(key, found.to(true.dtype), true, rtol=special.get(key, usual))
    except AssertionError as error:
        raise UserError(f"{name} is wrong here ({error}): no speed") from None


def peer_rows(setting: Setting, contender: Contender, exact: Tensor) -> Iterator[Row]:
    """Time another library's op, unless it fails or its results differ."""
    with fla.excused(f"{contender.name} at {contender.shape}", setting.say):
        with torch.no_grad():
            out = contender.run(**contender.inputs)
        assert_close("its output", out.to(exact.dtype), exact, rtol=FLA_RTOL)
        del out
        yield from setting.time(contender)


def _checked_rows(setting: Setting, contender: Contender, chunked: Op) -> Iterator[Row]:
    """Time an op, after a comparison at this shape with the form in eager PyTorch."""
    if setting.impl != "reference":
        name = f"{contender.name}, {contender.impl}, at {contender.shape}"
        check_op(name, contender.run, chunked, contender.inputs)
    yield from setting.time(contender)


def _op(op: Callable[..., Any], scale: float) -> Op:
    return lambda q, k, v, g: op(q, k, v, g, scale=scale).out


def _attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _upcast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert bf16 inputs to float32, and float32 inputs to float64."""
    higher = torch.float64 if inputs["q"].dtype == torch.float32 else torch.float32
    return {name: x.to(higher) for name, x in inputs.items()}
