"""The ops: chunk_gsa, chunk_gla and softmax attention over the same tokens.

An op is compared with its definition before it is timed, and at every shape that is timed with its
chunked form in float32 (the definition would take minutes there).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mezzo_core.bench import Row
from mezzo_core.errors import UserError
from mezzo_core.testing import assert_close, grads
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mezzo_gsa.bench import fla
from mezzo_gsa.bench.setting import Contender, Setting, timed
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import chunk_gla, chunk_gsa, recurrent_gla, recurrent_gsa

Op = Callable[..., Tensor]
CHECKED_TOKENS = 200
"""T of the comparison with the definition: whole chunks and a part of one."""
STEEP = 2.0
"""Taken off a log gate: a memory keeps at most exp(-2) a token."""
FLA_RTOL = 2e-2
"""Enough to tell whether fla computes the same thing."""


def gsa_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gsa, then its forms in plain PyTorch at a small shape."""
    scale = setting.scale
    chunked = _gsa(partial(chunk_gsa, impl="reference"), setting)
    ours, definition = _gsa(chunk_gsa, setting), _gsa(recurrent_gsa, setting)
    keeping = _gsa(partial(chunk_gsa, keep_states=True), setting)
    cases = [(batch, scale.slots[0]) for batch in scale.batches]
    cases += [(scale.batches[0], M) for M in scale.slots[1:]]
    for M in scale.slots:
        check_op("chunk_gsa", ours, definition, gsa_inputs(setting, 1, CHECKED_TOKENS, M))
    for (B, T), M in cases:
        inputs = gsa_inputs(setting, B, T, M)
        shape = _gsa_shape(setting, B, T, M)
        if setting.impl != "reference":
            check_op(f"chunk_gsa at {shape}", ours, chunked, inputs)
            check_op(f"chunk_gsa, states kept, at {shape}", keeping, chunked, inputs)
        contender = Contender("gsa op", setting.impl, shape, ours, inputs)
        yield from timed(setting, contender)
        impl = f"{setting.impl}, states kept"
        yield from timed(setting, replace(contender, impl=impl, run=keeping, phases=("train",)))
        if setting.has_fla:
            with fla.excused("its GSA op", setting.say):
                yield from _fla_gsa_rows(setting, contender, chunked)
    yield from _steep_rows(setting, ours, chunked)
    B, T = scale.reference
    inputs = gsa_inputs(setting, B, T, scale.slots[0])
    shape = _gsa_shape(setting, B, T, scale.slots[0])
    for impl, form in {"by chunks": chunked, "by tokens": definition}.items():
        yield from timed(setting, Contender("gsa op", f"reference, {impl}", shape, form, inputs))


def _steep_rows(setting: Setting, ours: Op, chunked: Op) -> Iterator[Row]:
    """Time chunk_gsa where one slot of each head forgets nearly all from token to token."""
    (B, T), M = setting.scale.batches[0], setting.scale.slots[0]
    inputs, shape = gsa_inputs(setting, B, T, M), _gsa_shape(setting, B, T, M)
    inputs["g"][..., 0] -= STEEP
    if setting.impl != "reference":
        check_op(f"chunk_gsa with steep gates at {shape}", ours, chunked, inputs)
    yield from timed(setting, Contender("gsa op", f"{setting.impl}, steep", shape, ours, inputs))


def _fla_gsa_rows(setting: Setting, ours: Contender, chunked: Op) -> Iterator[Row]:
    exact = chunked(**_upcast(ours.inputs))
    s = -torch.expm1(ours.inputs["g"]).to(setting.dtype)
    for impl, run in fla.gsa_ops(setting.scale.head_dim**-0.5).items():
        phases = ("train",) if "kept" in impl else ours.phases
        inputs = {**ours.inputs, "s": s}
        theirs = replace(ours, impl=impl, run=run, inputs=inputs, phases=phases)
        yield from _peer_rows(setting, theirs, exact)


def gla_rows(setting: Setting) -> Iterator[Row]:
    """Time chunk_gla at the widths of the layer: K is half of V."""
    K = setting.scale.head_dim // 2
    ours, definition = _gla(chunk_gla, K), _gla(recurrent_gla, K)
    chunked = _gla(partial(chunk_gla, impl="reference"), K)
    check_op("chunk_gla", ours, definition, gla_inputs(setting, 1, CHECKED_TOKENS))
    for B, T in setting.scale.batches:
        inputs = gla_inputs(setting, B, T)
        shape = {"B": B, "T": T, "H": setting.scale.num_heads, "K": K, "V": 2 * K}
        if setting.impl != "reference":
            check_op(f"chunk_gla at {shape}", ours, chunked, inputs)
        contender = Contender("gla op", setting.impl, shape, ours, inputs)
        yield from timed(setting, contender)
        if setting.has_fla:
            with fla.excused("its GLA op", setting.say):
                theirs = replace(contender, impl=fla.title(), run=fla.gla_op(K**-0.5))
                yield from _peer_rows(setting, theirs, chunked(**_upcast(inputs)))


def attention_rows(setting: Setting) -> Iterator[Row]:
    """Time causal softmax attention of as many channels, by each of torch's kernels."""
    D = setting.scale.attention_dim
    num_heads = setting.scale.d_model // D
    for B, T in setting.scale.batches:
        inputs = {name: setting.normal(B, num_heads, T, D) for name in "qkv"}
        shape = {"B": B, "T": T, "H": num_heads, "D": D}
        for impl, backend in sdpa_backends(setting.device).items():
            run = partial(_attention, backend)
            yield from timed(setting, Contender("attention op", impl, shape, run, inputs))


def sdpa_backends(device: torch.device) -> dict[str, SDPBackend]:
    """Return torch's kernels for softmax attention on a device, by what a row calls them."""
    if device.type != "cuda":
        return {"sdpa": SDPBackend.FLASH_ATTENTION}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def check_op(name: str, op: Op, definition: Op, inputs: Mapping[str, Tensor]) -> None:
    """Compare an op's output and gradients with its definition's in a higher precision.

    Raises:
        UserError: if one is wrong, naming which.
    """
    with torch.no_grad():
        dout = torch.randn_like(op(**inputs))
    out, ours = grads(op, inputs, dout)
    exact, expected = grads(definition, _upcast(inputs), dout)
    usual, special = (1e-5, {}) if out.dtype == torch.float32 else (5e-3, {"g": 8e-3})
    pairs = {"out": (out, exact), **{key: (ours[key], expected[key]) for key in expected}}
    try:
        for key, (found, true) in pairs.items():
            rtol = special.get(key, usual)
            assert_close(key, found.to(true.dtype), true, rtol=rtol)
    except AssertionError as error:
        raise UserError(f"{name} is wrong here ({error}): no speed") from None


def _peer_rows(setting: Setting, contender: Contender, exact: Tensor) -> Iterator[Row]:
    """Time another library's op, unless it fails or computes something else."""
    with fla.excused(f"{contender.name} at {contender.shape}", setting.say):
        with torch.no_grad():
            out = contender.run(**contender.inputs)
        assert_close("its output", out.to(exact.dtype), exact, rtol=FLA_RTOL)
        del out
        yield from timed(setting, contender)


def gsa_inputs(setting: Setting, B: int, T: int, M: int) -> dict[str, Tensor]:
    """Return q, k, v (B, T, H, K), normal, and g (B, T, H, M) as the layer makes it."""
    H, K = setting.scale.num_heads, setting.scale.head_dim
    inputs = {name: setting.normal(B, T, H, K) for name in "qkv"}
    logits = torch.randn(B, T, H, M, device=setting.device)
    return {**inputs, "g": F.logsigmoid(logits) / GSAConfig().damping}


def gla_inputs(setting: Setting, B: int, T: int) -> dict[str, Tensor]:
    """Return q, k (B, T, H, K), v (B, T, H, 2 K) and g (B, T, H, K) as the layer makes it."""
    H, V = setting.scale.num_heads, setting.scale.head_dim
    widths = {"q": V // 2, "k": V // 2, "v": V}
    inputs = {name: setting.normal(B, T, H, D) for name, D in widths.items()}
    logits = torch.randn(B, T, H, V // 2, device=setting.device)
    return {**inputs, "g": F.logsigmoid(logits) / GLAConfig().damping}


def _gsa_shape(setting: Setting, B: int, T: int, M: int) -> dict[str, int]:
    D = setting.scale.head_dim
    return {"B": B, "T": T, "H": setting.scale.num_heads, "K": D, "V": D, "M": M}


def _gsa(op: Callable[..., Any], setting: Setting) -> Op:
    scale = setting.scale.head_dim**-0.5
    return lambda q, k, v, g: op(q, k, v, g, scale=scale).out


def _gla(op: Callable[..., Any], K: int) -> Op:
    return lambda q, k, v, g: op(q, k, v, g, scale=K**-0.5).out


def _attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _upcast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 for bf16 inputs, float64 for float32's."""
    higher = torch.float64 if inputs["q"].dtype == torch.float32 else torch.float32
    return {name: x.to(higher) for name, x in inputs.items()}
