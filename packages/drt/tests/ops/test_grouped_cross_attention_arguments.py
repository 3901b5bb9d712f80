"""A bad argument of the public op is refused in one line that names it."""

import pytest
import torch
from mezzo_core.testing.arguments import Call, check_arguments
from mezzo_drt.ops import grouped_cross_attention, readers_of

B, N, M, S, L, R, H, D = 2, 3, 5, 4, 4, 2, 2, 16


def problem(**changes):
    draws = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draws)

    tensors = {"q": normal(B, N, M, H, D), "k": normal(B, S, L, H, D), "v": normal(B, S, L, H, D)}
    indices = torch.randint(-1, 2, (B, N, R), generator=draws)
    form = {"softmax1": True, "scale": 0.2, "impl": "auto"}
    return {**tensors, "indices": indices, "weights": normal(B, N, R), **form, **changes}


def definition(**arguments):
    return grouped_cross_attention(**arguments | {"impl": "reference"})


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")


@pytest.mark.parametrize("impl", ["auto", pytest.param("triton", marks=interpreted)])
@pytest.mark.any_shapes
def test_each_argument_replaced_is_named_or_right(impl):
    call = Call(
        grouped_cross_attention, lambda: problem(impl=impl), frozenset({"scale"}), definition
    )
    check_arguments(call)


@pytest.mark.any_shapes
def test_each_argument_of_readers_of_replaced_is_named_or_right():
    check_arguments(Call(readers_of, lambda: {"indices": problem()["indices"], "S": S}))


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (
            ValueError,
            r"q must be \(B, N, M, H, D\), H, D at least 1, got \(3, 5\)",
            {"q": torch.ones(3, 5)},
        ),
        (
            ValueError,
            r"k must be \(2, S, L, 2, 16\), L at least 1, got \(2, 4, 4, 2, 8\)",
            {"k": torch.ones(B, S, L, H, 8)},
        ),
        (
            ValueError,
            "L at least 1, got",
            {"k": torch.ones(B, S, 0, H, D), "v": torch.ones(B, S, 0, H, D)},
        ),
        (
            TypeError,
            "q, k and v must have one floating dtype",
            {"v": torch.ones(B, S, L, H, D).half()},
        ),
        (
            ValueError,
            "indices must be from -1 to S - 1 = 3, got 4",
            {"indices": torch.full((B, N, R), 4)},
        ),
        (
            ValueError,
            "indices must be from -1 to S - 1 = 3, got -2",
            {"indices": torch.full((B, N, R), -2)},
        ),
        (TypeError, "softmax1 must be a bool", {"softmax1": 1}),
        (TypeError, "readers must come from readers_of, got tuple", {"readers": ()}),
        (
            ValueError,
            "readers must be of these indices, 12 reads of 8 chunks, got 12 of 6",
            {"readers": readers_of(torch.zeros(B, N, R, dtype=torch.int64), 3)},
        ),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(error, message, changes):
    with pytest.raises(error, match=message):
        grouped_cross_attention(**problem(**changes))


@pytest.mark.parametrize(
    ("message", "tensors"),
    [
        ("torch.float64; supported", {n: torch.ones(1, 1, 4, 1, 16).double() for n in "qkv"}),
        ("D = 24; supported: 16, 32, 64", {n: torch.ones(1, 1, 4, 1, 24) for n in "qkv"}),
        ("L = 130 keys; supported: up to 128", {n: torch.ones(1, 1, 130, 1, 16) for n in "qkv"}),
    ],
)
def test_an_explicit_choice_says_what_is_supported(message, tensors, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # or CPU tensors would be what is not supported
    read = {"indices": torch.zeros(1, 1, 1, dtype=torch.int64), "weights": torch.ones(1, 1, 1)}
    with pytest.raises(ValueError, match=message):
        grouped_cross_attention(**tensors, **read, impl="triton")
    assert grouped_cross_attention(**tensors, **read).isfinite().all()
