"""The kernels of grouped cross-attention: here in the interpreter, or on a GPU."""

from functools import partial

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_drt.ops import grouped_cross_attention
from mezzo_drt.ops.grouped_cross_attention import op
from mezzo_drt.ops.grouped_cross_attention.readers import readers_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RTOL = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}


def draw(B, N, M, S, L, R, H, D, *, dtype=torch.float32):
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draws).to(DEVICE)

    inputs = {"q": (B, N, M, H, D), "k": (B, S, L, H, D), "v": (B, S, L, H, D)}
    inputs = {name: normal(*shape).to(dtype) for name, shape in inputs.items()}
    inputs["indices"] = torch.randint(-1, S, (B, N, R), generator=draws).to(DEVICE)
    return inputs | {"weights": normal(B, N, R)}


def run(inputs, impl="triton", softmax1=True, readers=None):
    """Return the output and all gradients by name."""
    dout = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    call = partial(grouped_cross_attention, impl=impl, softmax1=softmax1, readers=readers)
    out, found = grads(call, inputs, dout.to(inputs["q"].dtype))
    return {"out": out, **{f"d{name}": x for name, x in found.items()}}


def check(inputs, softmax1=True):
    """Compare with the reference in float32, by the numerics rule."""
    dtype = inputs["q"].dtype
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    found, low = (run(inputs, impl, softmax1) for impl in ("triton", "reference"))
    for name, ref in run(wide, "reference", softmax1).items():
        # The reference in 16 bits rounds nothing on the way to float32 weights.
        measured = dtype != torch.float32 and name != "dweights"
        yardstick = low[name] if measured else None
        assert_close(name, found[name], ref, rtol=RTOL[dtype], low=yardstick)


SHAPES = {
    "a landmark": (1, 2, 65, 3, 64, 2, 1, 32),
    "short chunks": (2, 2, 17, 3, 16, 2, 2, 16),
    "medium chunks": (1, 3, 33, 4, 32, 3, 1, 16),
    "long chunks": (1, 1, 129, 2, 128, 1, 1, 16),
    "odd chunks": (1, 2, 20, 3, 19, 2, 1, 16),
    "chunks between": (1, 1, 101, 2, 100, 1, 1, 16),
    "one query": (2, 5, 1, 7, 24, 3, 2, 16),
    "many retrieved": (1, 2, 5, 40, 5, 33, 1, 16),
    "popular chunks": (2, 12, 4, 2, 16, 3, 1, 16),
    "a popular chunk and landmarks": (1, 20, 33, 1, 32, 1, 1, 16),
    "wide heads": (1, 2, 9, 2, 16, 1, 1, 256),
    "wide heads of long chunks": (1, 1, 33, 2, 64, 1, 1, 256),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@shapes
def test_output_and_gradients_are_those_of_the_reference(shape, dtype):
    check(draw(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["a landmark", "odd chunks"])
def test_plain_softmax_is_that_of_the_reference(name, dtype):
    check(draw(*SHAPES[name], dtype=dtype), softmax1=False)


@pytest.mark.gpu
@pytest.mark.parametrize("softmax1", [True, False])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize("L", [16, 32, 63, 64, 100, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_full_sizes_are_those_of_the_reference(dtype, L, D, softmax1):
    check(draw(2, 24, L + 1, 24, L, 8, 3, D, dtype=dtype), softmax1)


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 64])
def test_few_and_many_retrieved_chunks_are_those_of_the_reference(R):
    check(draw(1, 70, 65, 70, 64, R, 2, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softmax1", [True, False])
def test_large_logits_do_not_overflow(softmax1, dtype):
    inputs = draw(1, 2, 33, 3, 32, 2, 1, 16, dtype=dtype)
    inputs["q"] *= 30
    inputs["k"] = 30 * inputs["k"].abs()
    inputs["q"][:, 1] = -inputs["q"][:, 1].abs()  # all of its logits are far below zero
    found, ref = (run(inputs, impl, softmax1) for impl in ("triton", "reference"))
    for name, x in found.items():
        assert x.isfinite().all(), name
    assert_close("out", found["out"], ref["out"], rtol=RTOL[dtype])


def test_a_chunk_that_all_read_is_summed_in_parts():
    inputs = draw(2, 40, 3, 3, 16, 2, 1, 16)
    inputs["indices"].zero_()
    readers = readers_of(inputs["indices"], 3)
    assert readers.parts.tolist() == [0, 4, 4, 4, 8, 8, 8], "80 reads: four parts and the last"
    check(inputs)


def test_lists_that_calls_share_give_the_same_gradients(monkeypatch):
    inputs = draw(2, 20, 5, 3, 16, 2, 2, 16)
    inputs["indices"][:] = torch.arange(2)
    alone = run(inputs)
    lists = readers_of(inputs["indices"], 3)
    monkeypatch.setattr(op, "readers_of", None)
    for name, x in run(inputs, readers=lists).items():
        assert torch.equal(x, alone[name]), name


def test_no_part_of_a_chunk_is_lost():
    draws = torch.Generator().manual_seed(0)
    sizes = ((1, 50, 3, 4), (2, 17, 1, 1), (3, 30, 40, 9), (1, 1, 5, 2), (2, 0, 4, 8))
    drawn = [(S, torch.randint(-1, S, (B, N, R), generator=draws)) for B, N, S, R in sizes]
    everything = torch.arange(8).expand(1, 512, 8)  # few chunks, with as many parts as can be
    for S, indices in (*drawn, (8, everything)):
        B = len(indices)
        got = readers_of(indices, S)
        for c in range(B * S):
            begin, end = got.offsets[c], got.offsets[c + 1]
            read = got.order[begin:end].long()
            b = c // S
            expected = ((indices == c % S) & (torch.arange(B) == b)[:, None, None]).flatten()
            assert torch.equal(read, expected.nonzero()[:, 0]), "all readers, in order"
            early = int(got.parts[c + 1] - got.parts[c])
            rest = int(end - begin) - early * got.size
            assert early >= 0
            assert 0 < rest <= got.size or (rest == 0 and len(read) == 0)
            owned = (got.chunks == c).nonzero()[:, 0]
            assert torch.equal(owned, torch.arange(got.parts[c], got.parts[c + 1]))
        assert (got.chunks[got.parts[-1] :] == B * S).all(), "the others are no parts"


def test_repeats_are_bit_equal():
    inputs = draw(1, 20, 5, 1, 16, 2, 2, 16, dtype=torch.float16)
    first, second = run(inputs), run(inputs)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


def test_keys_and_values_are_read_where_they_lie():
    """Here side by side in one projection, with the landmark's place left out."""
    B, S, L, H, D = 2, 2, 5, 2, 16
    inputs = draw(B, 2, 6, S, L, 2, H, D)
    both = torch.randn(B, S, L + 1, 2, H, D, device=DEVICE)
    k, v = both[:, :, :L].unbind(3)
    assert not k.is_contiguous()
    apart = run(inputs | {"k": k.contiguous(), "v": v.contiguous()})
    assert apart["dk"].any()
    # The others must be copied: strided channels, an odd start, rows of odd size.
    turned = k.transpose(3, 4).contiguous().transpose(3, 4)
    odd_start = torch.empty(k.numel() + 1, device=DEVICE)[1:].view(k.shape).copy_(k)
    odd_rows = torch.empty(B, S, L, H * D + 1, device=DEVICE)[..., 1:].unflatten(-1, (H, D))
    more_chunks = torch.cat([k, k[:, :1]], 1)[:, :S]  # rows are farther apart than S chunks
    for keys in (k, turned, odd_start, odd_rows.copy_(k), more_chunks):
        found = run(inputs | {"k": keys, "v": v})
        for name, x in apart.items():
            assert torch.equal(found[name], x), name


def test_chunks_may_be_one_chunk_repeated():
    from mezzo_drt.ops.grouped_cross_attention.triton.tiles import chunked

    inputs = draw(1, 2, 6, 3, 5, 2, 2, 16)  # one row: of several, no distance is equal
    repeated = inputs["k"][:, :1].expand_as(inputs["k"])
    assert min(chunked(repeated, 16).strides) > 0, "the GPU's copy engine takes no stride of 0"
    apart = run(inputs | {"k": repeated.contiguous()})
    for name, x in run(inputs | {"k": repeated}).items():
        assert torch.equal(x, apart[name]), name


def test_rows_of_one_chunk_are_read_where_they_lie():
    """PyTorch calls such keys contiguous: it ignores the stride of an axis of size 1."""
    inputs = draw(3, 2, 6, 1, 5, 2, 2, 16)
    apart = run(inputs)
    turned = torch.stack(tuple(inputs["k"][:, 0]))[None].transpose(0, 1)
    assert turned.stride(0) != turned.stride(1)
    assert turned.is_contiguous()
    for name, x in run(inputs | {"k": turned}).items():
        assert torch.equal(x, apart[name]), name


def test_the_registered_op_is_sound():
    inputs = draw(1, 2, 3, 2, 4, 2, 1, 16)
    tensors = [x.requires_grad_(x.is_floating_point()) for x in inputs.values()]
    lists = readers_of(inputs["indices"], 2)[:4]
    for readers in ((None,) * 4, lists):
        torch.library.opcheck(op._attention, (*tensors, *readers, True, 0.25))
    out, lse = (x.detach() for x in op._attention(*tensors, *lists, True, 0.25))
    tensors = [x.detach() for x in tensors]
    its = (out, *tensors, lse, *lists, True, 0.25)
    fakes = ("test_schema", "test_faketensor")  # AOTAutograd traces it with the forward
    torch.library.opcheck(op._attention_bwd, its, test_utils=fakes)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.any_shapes
def test_it_compiles_as_one_graph(impl):
    inputs = draw(1, 20, 5, 3, 4, 2, 1, 16)
    inputs["indices"][:] = torch.arange(1, 3)  # chunks that are summed in parts
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"

    def call(**x):
        return grouped_cross_attention(**x, impl=impl, readers=readers_of(x["indices"], 3))

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    dout = torch.ones_like(inputs["q"])
    (out, found), (ref, truth) = (grads(fn, inputs, dout) for fn in (compiled, call))
    assert_close("out", out, ref, rtol=1e-6)
    for name, x in truth.items():
        assert_close(name, found[name], x, rtol=1e-6)


def test_transforms_of_torch_func_get_the_gradients():
    inputs = draw(1, 2, 5, 3, 4, 2, 1, 16)
    q, k, v, indices, weights = inputs.values()

    def loss(*x):
        return grouped_cross_attention(*x[:3], indices, x[3], impl="triton").square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, weights)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, weights)]
    for x, y in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(x, y)
