"""A wrong argument of the public op gives one line that names it, or a right result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_core.testing.arguments import Call, check_arguments, find_fault, replacements
from mezzo_recurrent_transformer.ops import LayerWeights, Past, recurrent_layers

n, B, T, H, D, F = 2, 2, 6, 2, 4, 6
C = H * D


def problem(rows=B, **more):
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draws) * 0.3

    square = [normal(n, C, C) for _ in range(4)]
    norms = [1 + normal(n, C) for _ in range(4)]
    weights = LayerWeights(*square, normal(n, F, C), normal(n, C, F), *norms)
    form = {"num_heads": H, "residual_scale": 0.7, "norm": "rms", "eps": 1e-5}
    form |= {"persistent_norm": True, "alibi_slopes": torch.tensor([0.5, 0.1])}
    return {"x": normal(rows, T, C), "weights": weights, **form, **more}


def past():
    draws = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, n, B, 4, H, D, generator=draws)
    return Past(k, v, torch.tensor([4, 1]))


def definition(**arguments):
    return recurrent_layers(**arguments | {"impl": "reference"}).z


CALLS = [
    Call(recurrent_layers, arguments, frozenset({"alibi_slopes", *optional}), truth)
    for arguments, optional, truth in [
        (lambda: problem(block_size=2, impl="auto"), (), definition),
        (lambda: problem(past=past()), ("past",), definition),
        # Without a past, lengths is refused.
        (lambda: problem(past=past(), lengths=torch.tensor([T, 3])), ("lengths",), None),
        (lambda: problem(rows=1, cu_seqlens=torch.tensor([0, 2, T])), ("cu_seqlens",), definition),
    ]
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.any_shapes
def test_each_argument_replaced_is_named_or_right(call):
    check_arguments(call)


@given(data=st.data())
@pytest.mark.any_shapes
def test_several_arguments_replaced_are_named_or_right(data):
    call = data.draw(st.sampled_from(CALLS))
    choices = {name: replacements(value) for name, value in call.arguments().items()}
    names = data.draw(st.sets(st.sampled_from([n for n in choices if choices[n]]), min_size=1))
    replaced = {name: data.draw(st.sampled_from(choices[name])) for name in sorted(names)}
    assert find_fault(call, replaced) is None


def weights(**changes):
    return problem()["weights"]._replace(**changes)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"x must be \(B, T, C\), C at least 1, got", {"x": torch.ones(T, C)}),
        (ValueError, "num_heads must divide C = 8, got 3", {"num_heads": 3}),
        (ValueError, "norm must be one of", {"norm": "batch"}),
        (ValueError, "eps must be positive", {"eps": 0.0}),
        (TypeError, "persistent_norm must be a bool", {"persistent_norm": 1}),
        (ValueError, "block_size must be 1 or more", {"block_size": 0}),
        (TypeError, "weights must be LayerWeights, got tuple", {"weights": tuple(weights())}),
        (
            ValueError,
            r"weights.wq must be \(n, 8, 8\), n at least 1, got \(0, 8, 8\)",
            {"weights": weights(wq=torch.ones(0, 8, 8))},
        ),
        (
            ValueError,
            r"weights.wk must be \(2, 8, 8\)",
            {"weights": weights(wk=torch.ones(2, 8, 6))},
        ),
        (
            ValueError,
            r"weights.down must be \(2, 8, 6\)",
            {"weights": weights(down=torch.ones(2, 6, 8))},
        ),
        (
            TypeError,
            "wo, up and down must have one floating dtype",
            {"weights": weights(wo=torch.ones(2, 8, 8).half())},
        ),
        (ValueError, "weights.n2 must not be None", {"weights": weights(n2=None)}),
        (ValueError, "weights.n1 must be None", {"norm": "none"}),
        (ValueError, r"alibi_slopes must be \(2,\)", {"alibi_slopes": torch.ones(3)}),
        (
            ValueError,
            "alibi_slopes has no gradient",
            {"alibi_slopes": torch.ones(2).requires_grad_()},
        ),
        (ValueError, "a past needs block_size 1, got 2", {"past": past(), "block_size": 2}),
        (
            ValueError,
            r"past.v must be \(2, 2, 4, 2, 4\)",
            {"past": past()._replace(v=torch.ones(2))},
        ),
        (
            TypeError,
            "past.lengths must be int64",
            {"past": past()._replace(lengths=torch.ones(2))},
        ),
        (ValueError, "past.lengths", {"past": past()._replace(lengths=torch.tensor([4, 5]))}),
        (ValueError, "past.lengths", {"past": past()._replace(lengths=torch.tensor([-1, 2]))}),
        (ValueError, "lengths needs a past", {"lengths": torch.tensor([T, 3])}),
        (
            ValueError,
            "lengths must be from 0 to T = 6",
            {"past": past(), "lengths": torch.tensor([7, 3])},
        ),
        (ValueError, "cu_seqlens packs", {"past": past(), "cu_seqlens": torch.tensor([0, T])}),
        (
            ValueError,
            "cu_seqlens packs sequences into one row",
            {"cu_seqlens": torch.tensor([0, T])},
        ),
        (ValueError, "impl must be one of.*'fast'", {"impl": "fast"}),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(error, message, changes):
    with pytest.raises(error, match=message):
        recurrent_layers(**problem() | changes)


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("borders", [[0, 5], [1, 6], [0, 4, 3, 6], [0, 7, 6]])
def test_bad_borders_are_refused(borders, impl):
    with pytest.raises(ValueError, match="start at 0, never decrease and end at T = 6"):
        recurrent_layers(**problem(rows=1, cu_seqlens=torch.tensor(borders), impl=impl))


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stream", [torch.float32, torch.float64])
def test_weights_may_be_in_another_dtype_than_the_stream(impl, dtype, stream):
    given = problem()
    expected = recurrent_layers(**given).z
    others = LayerWeights(*(w.to(dtype) for w in given["weights"]))
    x = given["x"].to(stream).requires_grad_()
    z = recurrent_layers(**given | {"x": x, "weights": others, "impl": impl}).z
    assert z.dtype == stream
    assert torch.allclose(z.float(), expected, atol=0.05)
    z.sum().backward()
    assert x.grad.dtype == stream


def test_kernels_take_no_stream_of_float64(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = problem()
    with pytest.raises(ValueError, match='impl="triton" does not support float64'):
        recurrent_layers(**given | {"x": given["x"].double(), "impl": "triton"})


def test_shapes_are_told_without_memory():
    with torch.device("meta"):
        k = torch.empty(n, B, 4, H, D)
        seen = torch.empty(B, dtype=torch.int64)
    given = problem()
    given = {name: given[name].to("meta") for name in ("x", "alibi_slopes")} | {
        "weights": LayerWeights(*(w.to("meta") for w in given["weights"])),
        "past": Past(k, k, seen),
    }
    z, after = recurrent_layers(**given, num_heads=H)
    assert z.shape == (B, T, C)
    assert after.k.shape == (n, B, 4 + T, H, D)
