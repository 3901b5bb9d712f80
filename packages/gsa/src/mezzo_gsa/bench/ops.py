"""Benchmarks of ops: chunk_gsa, chunk_gla and softmax attention over the same tokens.

Before an op is timed, it is compared with its definition. At every shape that is timed, it is also
compared with its chunked form in float32, because the definition would take minutes there.
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
from mezzo_gsa.bench.benchmark import Benchmark, Contender, timed
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


def gsa_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time chunk_gsa, then its forms in eager PyTorch at a small shape."""
    shapes = benchmark.shapes
    chunked = _gsa(partial(chunk_gsa, impl="reference"), benchmark)
    ours, definition = _gsa(chunk_gsa, benchmark), _gsa(recurrent_gsa, benchmark)
    keeping = _gsa(partial(chunk_gsa, keep_states=True), benchmark)
    cases = [(batch, shapes.slots[0]) for batch in shapes.batches]
    cases += [(shapes.batches[0], M) for M in shapes.slots[1:]]
    for M in shapes.slots:
        check_op("chunk_gsa", ours, definition, gsa_inputs(benchmark, 1, CHECKED_TOKENS, M))
    for (B, T), M in cases:
        inputs = gsa_inputs(benchmark, B, T, M)
        shape = _gsa_shape(benchmark, B, T, M)
        if benchmark.impl != "reference":
            check_op(f"chunk_gsa at {shape}", ours, chunked, inputs)
            check_op(f"chunk_gsa, states kept, at {shape}", keeping, chunked, inputs)
        contender = Contender("gsa op", benchmark.impl, shape, ours, inputs)
        yield from timed(benchmark, contender)
        impl = f"{benchmark.impl}, states kept"
        yield from timed(benchmark, replace(contender, impl=impl, run=keeping, phases=("train",)))
        if benchmark.has_fla:
            with fla.excused("its GSA op", benchmark.say):
                yield from _fla_gsa_rows(benchmark, contender, chunked)
    yield from _steep_rows(benchmark, ours, chunked)
    B, T = shapes.reference
    inputs = gsa_inputs(benchmark, B, T, shapes.slots[0])
    shape = _gsa_shape(benchmark, B, T, shapes.slots[0])
    for impl, form in {"by chunks": chunked, "by tokens": definition}.items():
        yield from timed(benchmark, Contender("gsa op", f"reference, {impl}", shape, form, inputs))


def _steep_rows(benchmark: Benchmark, ours: Op, chunked: Op) -> Iterator[Row]:
    """Time chunk_gsa with gates by which one slot of each head forgets nearly all at each token."""
    (B, T), M = benchmark.shapes.batches[0], benchmark.shapes.slots[0]
    inputs, shape = gsa_inputs(benchmark, B, T, M), _gsa_shape(benchmark, B, T, M)
    inputs["g"][..., 0] -= STEEP
    if benchmark.impl != "reference":
        check_op(f"chunk_gsa with steep gates at {shape}", ours, chunked, inputs)
    yield from timed(
        benchmark, Contender("gsa op", f"{benchmark.impl}, steep", shape, ours, inputs)
    )


def _fla_gsa_rows(benchmark: Benchmark, ours: Contender, chunked: Op) -> Iterator[Row]:
    exact = chunked(**_upcast(ours.inputs))
    s = -torch.expm1(ours.inputs["g"]).to(benchmark.dtype)
    for impl, run in fla.gsa_ops(benchmark.shapes.head_dim**-0.5).items():
        phases = ("train",) if "kept" in impl else ours.phases
        inputs = {**ours.inputs, "s": s}
        theirs = replace(ours, impl=impl, run=run, inputs=inputs, phases=phases)
        yield from _peer_rows(benchmark, theirs, exact)


def gla_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time chunk_gla at the widths of the layer: K is half of V."""
    K = benchmark.shapes.head_dim // 2
    ours, definition = _gla(chunk_gla, K), _gla(recurrent_gla, K)
    chunked = _gla(partial(chunk_gla, impl="reference"), K)
    check_op("chunk_gla", ours, definition, gla_inputs(benchmark, 1, CHECKED_TOKENS))
    for B, T in benchmark.shapes.batches:
        inputs = gla_inputs(benchmark, B, T)
        shape = {"B": B, "T": T, "H": benchmark.shapes.num_heads, "K": K, "V": 2 * K}
        if benchmark.impl != "reference":
            check_op(f"chunk_gla at {shape}", ours, chunked, inputs)
        contender = Contender("gla op", benchmark.impl, shape, ours, inputs)
        yield from timed(benchmark, contender)
        if benchmark.has_fla:
            with fla.excused("its GLA op", benchmark.say):
                theirs = replace(contender, impl=fla.title(), run=fla.gla_op(K**-0.5))
                yield from _peer_rows(benchmark, theirs, chunked(**_upcast(inputs)))


def attention_rows(benchmark: Benchmark) -> Iterator[Row]:
    """Time causal softmax attention with the same number of channels, by each torch kernel."""
    D = benchmark.shapes.attention_dim
    num_heads = benchmark.shapes.d_model // D
    for B, T in benchmark.shapes.batches:
        inputs = {name: benchmark.normal(B, num_heads, T, D) for name in "qkv"}
        shape = {"B": B, "T": T, "H": num_heads, "D": D}
        for impl, backend in sdpa_backends(benchmark.device).items():
            run = partial(_attention, backend)
            yield from timed(benchmark, Contender("attention op", impl, shape, run, inputs))


def sdpa_backends(device: torch.device) -> dict[str, SDPBackend]:
    """Return torch's kernels for softmax attention on a device, by their names in rows."""
    if device.type != "cuda":
        return {"sdpa": SDPBackend.FLASH_ATTENTION}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


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
            rtol = special.get(key, usual)
            assert_close(key, found.to(true.dtype), true, rtol=rtol)
    except AssertionError as error:
        raise UserError(f"{name} is wrong here ({error}): no speed") from None


def _peer_rows(benchmark: Benchmark, contender: Contender, exact: Tensor) -> Iterator[Row]:
    """Time another library's op, unless it fails or its results differ."""
    with fla.excused(f"{contender.name} at {contender.shape}", benchmark.say):
        with torch.no_grad():
            out = contender.run(**contender.inputs)
        assert_close("its output", out.to(exact.dtype), exact, rtol=FLA_RTOL)
        del out
        yield from timed(benchmark, contender)


def gsa_inputs(benchmark: Benchmark, B: int, T: int, M: int) -> dict[str, Tensor]:
    """Return random q, k, v (B, T, H, K), and g (B, T, H, M) like the layer's."""
    H, K = benchmark.shapes.num_heads, benchmark.shapes.head_dim
    inputs = {name: benchmark.normal(B, T, H, K) for name in "qkv"}
    logits = torch.randn(B, T, H, M, device=benchmark.device)
    return {**inputs, "g": F.logsigmoid(logits) / GSAConfig().damping}


def gla_inputs(benchmark: Benchmark, B: int, T: int) -> dict[str, Tensor]:
    """Return random q, k (B, T, H, K) and v (B, T, H, 2 K), and g (B, T, H, K) like the layer's."""
    H, V = benchmark.shapes.num_heads, benchmark.shapes.head_dim
    widths = {"q": V // 2, "k": V // 2, "v": V}
    inputs = {name: benchmark.normal(B, T, H, D) for name, D in widths.items()}
    logits = torch.randn(B, T, H, V // 2, device=benchmark.device)
    return {**inputs, "g": F.logsigmoid(logits) / GLAConfig().damping}


def _gsa_shape(benchmark: Benchmark, B: int, T: int, M: int) -> dict[str, int]:
    D = benchmark.shapes.head_dim
    return {"B": B, "T": T, "H": benchmark.shapes.num_heads, "K": D, "V": D, "M": M}


def _gsa(op: Callable[..., Any], benchmark: Benchmark) -> Op:
    scale = benchmark.shapes.head_dim**-0.5
    return lambda q, k, v, g: op(q, k, v, g, scale=scale).out


def _gla(op: Callable[..., Any], K: int) -> Op:
    return lambda q, k, v, g: op(q, k, v, g, scale=K**-0.5).out


def _attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _upcast(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert bf16 inputs to float32, and float32 inputs to float64."""
    higher = torch.float64 if inputs["q"].dtype == torch.float32 else torch.float32
    return {name: x.to(higher) for name, x in inputs.items()}
