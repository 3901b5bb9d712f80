"""Grouped cross-attention: what it computes, by the reference and by the kernels."""

import math

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_drt.ops import grouped_cross_attention
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
impls = pytest.mark.parametrize("impl", ["reference", "triton"])
softmaxes = pytest.mark.parametrize("softmax1", [True, False])


def draw(B=2, N=3, M=5, S=4, L=6, R=3, H=2, D=16, *, dtype=torch.float32, seed=0):
    """Draw tensors; indices have gaps, and chunks that are read twice."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draws).to(DEVICE, dtype)

    inputs = {"q": normal(B, N, M, H, D), "k": normal(B, S, L, H, D), "v": normal(B, S, L, H, D)}
    inputs["indices"] = torch.randint(-1, S, (B, N, R), generator=draws).to(DEVICE)
    return inputs | {"weights": normal(B, N, R)}


def gradients(inputs, impl, **form):
    """Return the output and all gradients by name, where the output's own gradient is sin(q)."""
    call = lambda **x: grouped_cross_attention(**x, impl=impl, **form)  # noqa: E731
    out, found = grads(call, inputs, inputs["q"].sin())
    return {"out": out, **{f"d{name}": x for name, x in found.items()}}


def assert_same(found, expected, rtol=1e-5):
    for name, x in expected.items():
        assert_close(name, found[name], x, rtol=rtol)


def by_loops(q, k, v, indices, weights, softmax1, scale):
    """Compute it query by query, from exponentials."""
    out = torch.zeros_like(q)
    for b, n, m, h in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:-1])).tolist():
        for j, w in zip(indices[b, n].tolist(), weights[b, n], strict=True):
            if j >= 0:
                e = torch.stack([(scale * q[b, n, m, h].dot(key)).exp() for key in k[b, j, :, h]])
                total = e.sum() + (1 if softmax1 else 0)
                out[b, n, m, h] += w * (e / total) @ v[b, j, :, h]
    return out


@softmaxes
def test_reference_is_the_loop(softmax1):
    inputs = draw(dtype=torch.float64)
    assert (inputs["indices"] == -1).any()
    out = grouped_cross_attention(**inputs, softmax1=softmax1, scale=0.3, impl="reference")
    expected = by_loops(*(x.cpu() for x in inputs.values()), softmax1, 0.3)
    assert_close("out", out.cpu(), expected, rtol=1e-12)


@softmaxes
def test_gradients_of_the_reference_are_exact(softmax1):
    inputs = draw(B=1, N=2, M=2, S=2, L=3, H=1, D=2, dtype=torch.float64)
    indices = torch.tensor([[[0, 0, -1], [1, 0, 1]]], device=DEVICE)
    q, k, v, w = (inputs[name].requires_grad_() for name in ("q", "k", "v", "weights"))
    call = lambda q, k, v, w: grouped_cross_attention(  # noqa: E731
        q, k, v, indices, w, softmax1=softmax1, impl="reference"
    )
    assert torch.autograd.gradcheck(call, (q, k, v, w))


@impls
def test_one_chunk_is_read_by_plain_attention(impl):
    inputs = draw(N=4, S=4, R=1)
    inputs["indices"] = torch.arange(4, device=DEVICE).flip(0).expand(2, 4)[..., None].contiguous()
    inputs["weights"] = torch.ones(2, 4, 1, device=DEVICE)
    q, k, v = (inputs[name].transpose(2, 3) for name in "qkv")
    expected = scaled_dot_product_attention(q, k.flip(1), v.flip(1)).transpose(2, 3)
    out = grouped_cross_attention(**inputs, softmax1=False, impl=impl)
    assert_close("out", out, expected, rtol=1e-5)


@impls
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_the_scale_may_be_zero_or_negative(impl, scale):
    inputs = draw()
    out = grouped_cross_attention(**inputs, scale=scale, impl=impl)
    turned = inputs | {"q": inputs["q"] * scale}
    expected = grouped_cross_attention(**turned, scale=1.0, impl="reference")
    assert_close("out", out, expected, rtol=1e-5)


@impls
def test_softmax1_is_a_key_and_value_of_zeros(impl):
    inputs = draw()
    found = gradients(inputs, impl, softmax1=True)
    padded = {
        name: torch.nn.functional.pad(inputs[name], (0, 0, 0, 0, 0, 1)) for name in ("k", "v")
    }
    expected = gradients(inputs | padded, impl, softmax1=False)
    expected |= {name: expected[name][:, :, :-1] for name in ("dk", "dv")}
    assert_same(found, expected)


@impls
def test_all_chunks_weighted_by_their_sums_are_dense_attention(impl):
    inputs = draw(N=3, M=1, S=4, H=1, R=4)
    q, k, v = (inputs[name] for name in "qkv")
    inputs["indices"] = torch.arange(4, device=DEVICE).expand(2, 3, 4).contiguous()
    logits = torch.einsum("bnmhd,bslhd->bnsl", q, k) / math.sqrt(16)
    inputs["weights"] = logits.logsumexp(-1).softmax(-1)
    out = grouped_cross_attention(**inputs, softmax1=False, impl=impl)
    flat = (x.reshape(2, 1, -1, 16) for x in (q, k, v))
    expected = scaled_dot_product_attention(*flat).reshape(q.shape)
    assert_close("out", out, expected, rtol=1e-5)


@impls
def test_order_of_the_retrieved_chunks_does_not_matter(impl):
    inputs, order = draw(R=5), [3, 1, 4, 0, 2]
    shuffled = inputs | {name: inputs[name][..., order] for name in ("indices", "weights")}
    found, expected = gradients(shuffled, impl), gradients(inputs, impl)
    expected["dweights"] = expected["dweights"][..., order]
    assert_same(found, expected)


@impls
@pytest.mark.parametrize("unread", [0, 3])
def test_chunks_that_are_not_read_may_be_nan(impl, unread):
    """An index of -1 reads nothing, not even the first or the last chunk."""
    inputs = draw()
    inputs["indices"][inputs["indices"] == unread] = -1
    gaps = inputs["indices"] == -1
    assert gaps.any()
    assert not gaps.all()
    expected = gradients(inputs, impl)
    inputs["k"][:, unread], inputs["v"][:, unread] = NAN, NAN
    inputs["weights"] = inputs["weights"].masked_fill(gaps, NAN)
    found = gradients(inputs, impl)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
    for name in ("dk", "dv"):
        assert not found[name][:, unread].any()
    assert not found["dweights"][gaps].any()


@impls
def test_a_chunk_without_retrieved_chunks_gets_zeros(impl):
    inputs = draw()
    inputs["indices"][:, 0] = -1
    found = gradients(inputs, impl)
    assert not found["out"][:, 0].any()
    assert not found["dq"][:, 0].any()
    assert found["out"][:, 1:].any()


@impls
@pytest.mark.parametrize(
    "sizes", [{"N": 0}, {"S": 0}, {"R": 0}, {"M": 0}, {"B": 0}, {"N": 0, "S": 0}], ids=str
)
def test_no_chunks_no_places_and_no_tokens_are_fine(sizes, impl):
    inputs = draw(**{**sizes, "S": max(1, sizes.get("S", 4))})
    if sizes.get("S") == 0:
        inputs |= {name: inputs[name][:, :0] for name in ("k", "v")}
        inputs["indices"].fill_(-1)
    found = gradients(inputs, impl)
    for name, x in found.items():
        assert not x.any(), name
        assert x.shape == inputs[name.removeprefix("d") if name != "out" else "q"].shape


@impls
def test_a_row_of_a_batch_is_computed_as_if_alone(impl):
    inputs = draw(B=3, M=9)
    both, alone = (
        gradients(x, impl) for x in (inputs, {name: x[1:2] for name, x in inputs.items()})
    )
    for name, x in alone.items():
        # Products of the reference are batched, which may change their last bits.
        assert_close(name, both[name][1:2], x, rtol=1e-6)


@pytest.mark.any_shapes
@pytest.mark.parametrize("gradients", [False, True])
def test_the_reference_converts_only_what_is_read_but_for_gradients(gradients):
    """Chunks are in bf16. Converting all of them is slow, but gradients are summed in float32."""
    inputs = draw(S=40, dtype=torch.bfloat16)
    inputs["indices"] %= 2
    k = inputs["k"].requires_grad_(gradients)

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **kwargs or {})
            if op is torch.ops.aten._to_copy.default:
                converted.append(out.numel())
            return out

    converted = []
    with Sizes():
        out = grouped_cross_attention(**inputs, impl="reference")
    assert (max(converted) == k.numel()) == gradients
    if gradients:
        (found,) = torch.autograd.grad(out.sum(), k)
        high = inputs | {name: inputs[name].float() for name in "qkv"}
        (wanted,) = torch.autograd.grad(
            grouped_cross_attention(**high, impl="reference").bfloat16().sum(), high["k"]
        )
        assert torch.equal(found, wanted.bfloat16())


@pytest.mark.any_shapes
def test_under_autocast_the_reference_keeps_its_precision():
    inputs = draw()
    expected = grouped_cross_attention(**inputs, impl="reference")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = grouped_cross_attention(**inputs, impl="reference")
    assert torch.equal(out, expected)


@pytest.mark.any_shapes
def test_indices_whose_values_cannot_be_read_are_taken_as_they_are():
    inputs = draw(B=3)

    def row(**x):
        x = {name: part[None] for name, part in x.items()}
        return grouped_cross_attention(**x, impl="reference")[0]

    expected = grouped_cross_attention(**inputs, impl="reference")
    found = torch.vmap(lambda x: row(**x))(inputs)
    assert_close("each row by vmap", found, expected, rtol=1e-6)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in inputs.items()}
        assert grouped_cross_attention(**fake, impl="reference").shape == expected.shape
