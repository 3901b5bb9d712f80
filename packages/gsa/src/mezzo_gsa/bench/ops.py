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
from mezzo_core.errors import FailedRunError
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
CHECKED = (1, 200)
"""(B, T) of the comparison with the definition: whole chunks and a part of a chunk."""
STEEP = 2.0
"""Subtracted from a log gate, so that a slot keeps at most exp(-2) of its memory at a token."""
FLA_RTOL = 2e-2
"""A tolerance that tells whether fla computes the same function."""


def gsa_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gsa, with narrow heads and steep gates too, then its forms in eager PyTorch."""
    shapes, impl = setting.shapes, setting.impl
    (first, *_), (usual, *others) = shapes.batches, shapes.slots
    scale = shapes.head_dim**-0.5
    ours, definition = _op(chunk_gsa, scale), _op(recurrent_gsa, scale)
    chunked = _op(chunk_gsa, scale, impl="reference")

    def contender(batch: tuple[int, int], M: int, D: int = shapes.head_dim) -> Contender:
        made = _contender(setting, "gsa op", ours, D, D, M, GSAConfig().damping, batch)
        return replace(made, shape={**made.shape, "M": M})

    for M in shapes.slots:
        check_op("chunk_gsa", ours, definition, contender(CHECKED, M).inputs)
    for batch, M, D in [
        *((batch, usual, shapes.head_dim) for batch in shapes.batches),
        *((first, M, shapes.head_dim) for M in others),
        shapes.narrow,
    ]:
        each = contender(batch, M, D)
        yield from _checked_rows(setting, each, chunked)
        keeping = _op(chunk_gsa, scale, keep_states=True)
        kept = replace(each, impl=f"{impl}, states kept", run=keeping, phases=("train",))
        yield from _checked_rows(setting, kept, chunked)
        if setting.has_fla:
            with fla.excused("its GSA op", setting.say):
                for theirs in fla.gsa_contenders(each, scale):
                    yield from peer_rows(setting, theirs, chunked(**_upcast(each.inputs)))
    steep = replace(contender(first, usual), impl=f"{impl}, steep")
    steep.inputs["g"][..., 0] -= STEEP
    yield from _checked_rows(setting, steep, chunked)
    for form, run in {"by chunks": chunked, "by tokens": definition}.items():
        slow = contender(shapes.reference, usual)
        yield from setting.time(replace(slow, impl=f"reference, {form}", run=run))


def gla_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gla at the widths of the layer: K is half of V."""
    V = setting.shapes.head_dim
    K = V // 2
    scale = K**-0.5
    ours, definition = _op(chunk_gla, scale), _op(recurrent_gla, scale)
    chunked = _op(chunk_gla, scale, impl="reference")
    contender = partial(_contender, setting, "gla op", ours, K, V, K, GLAConfig().damping)
    check_op("chunk_gla", ours, definition, contender(CHECKED).inputs)
    for each in map(contender, setting.shapes.batches):
        yield from _checked_rows(setting, each, chunked)
        if setting.has_fla:
            with fla.excused("its GLA op", setting.say):
                theirs = replace(each, impl=fla.title(), run=fla.gla_op(scale))
                yield from peer_rows(setting, theirs, chunked(**_upcast(each.inputs)))


def attention_rows(setting: Setting) -> Iterator[Row]:
    """Time causal softmax attention with the same number of channels, by each torch kernel."""
    D = setting.shapes.attention_dim
    H = setting.shapes.d_model // D
    backends = {"sdpa": SDPBackend.FLASH_ATTENTION}
    if setting.device.type == "cuda":
        backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

    def attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for B, T in setting.shapes.batches:
        inputs = {name: setting.normal(B, H, T, D) for name in "qkv"}
        shape = {"B": B, "T": T, "H": H, "D": D}
        for impl, backend in backends.items():
            run = partial(attention, backend)
            yield from setting.time(Contender("attention op", impl, shape, run, inputs))


def check_op(name: str, op: Op, definition: Op, inputs: Mapping[str, Tensor]) -> None:
    """Compare an op's output and gradients with its definition's in a higher precision.

    Raises:
        FailedRunError: if the output or a gradient is wrong; the message names it.
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
        raise FailedRunError(f"{name} is wrong here ({error}): no speed") from None


def peer_rows(setting: Setting, contender: Contender, exact: Tensor) -> Iterator[Row]:
    """Time another library's op, unless it fails or its results differ."""
    with fla.excused(f"{contender.name} at {contender.shape}", setting.say):
        with torch.no_grad():
            out = contender.run(**contender.inputs)
        assert_close("its output", out.to(exact.dtype), exact, rtol=FLA_RTOL)
        del out
        yield from setting.time(contender)


def _contender(
    setting: Setting, name: str, op: Op, K: int, V: int, M: int, damping: float,
    batch: tuple[int, int],
) -> Contender:  # fmt: skip
    """Return an op on random q, k (B, T, H, K), v (B, T, H, V), and g (B, T, H, M) as a layer's."""
    (B, T), H = batch, setting.shapes.num_heads
    inputs = {name: setting.normal(B, T, H, D) for name, D in {"q": K, "k": K, "v": V}.items()}
    logits = torch.randn(B, T, H, M, device=setting.device)
    inputs["g"] = F.logsigmoid(logits) / damping
    return Contender(name, setting.impl, {"B": B, "T": T, "H": H, "K": K, "V": V}, op, inputs)


def _checked_rows(setting: Setting, contender: Contender, chunked: Op) -> Iterator[Row]:
    """Time an op, after a comparison at this shape with the form in eager PyTorch."""
    if setting.impl != "reference":
        name = f"{contender.name}, {contender.impl}, at {contender.shape}"
        check_op(name, contender.run, chunked, contender.inputs)
    yield from setting.time(contender)


def _op(op: Callable[..., Any], scale: float, **options: Any) -> Op:
    return lambda q, k, v, g: op(q, k, v, g, scale=scale, **options).out


def _upcast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert bf16 inputs to float32, and float32 inputs to float64."""
    higher = torch.float64 if inputs["q"].dtype == torch.float32 else torch.float32
    return {name: x.to(higher) for name, x in inputs.items()}
