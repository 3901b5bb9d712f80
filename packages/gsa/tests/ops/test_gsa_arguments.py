"""Wrong arguments of gated slot attention's ops are refused by name."""

import pytest
import torch
from mezzo_gsa.ops.gsa import GSAState, chunk_gsa, chunk_gsa_projected, recurrent_gsa

OPS = (chunk_gsa, recurrent_gsa)
B, T, HQ, H, K, V, M = 2, 4, 4, 2, 3, 5, 6


def good(**change):
    """Return arguments that fit, but for a change."""
    inputs = {
        "q": torch.ones(B, T, HQ, K),
        "k": torch.ones(B, T, H, K),
        "v": torch.ones(B, T, H, V),
        "g": -torch.ones(B, T, H, M),
    }
    return {**inputs, **change}


def state(*k_shape, V=V, **new):
    return GSAState(torch.zeros(k_shape, **new), torch.zeros(*k_shape[:3], V, **new))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"between": "tanh"}, ValueError, r"between must be one of .*'softmax'.*, got 'tanh'"),
        ({"g": None}, ValueError, "g or s must be given, got neither"),
        ({"q": torch.ones(B, T, K)}, ValueError, r"q must be \(B, T, HQ, K\), HQ, K"),
        ({"q": torch.ones(B, T, HQ, K).int()}, TypeError, "q must be floating-point .* got int32"),
        ({"s": torch.ones(B, T, H, M).bool()}, TypeError, "s must be floating-point"),
        ({"v": torch.ones(B, T, H, V).double()}, TypeError, "must have one floating dtype"),
        ({"k": torch.ones(B, 5, H, K)}, ValueError, r"k must be \(2, 4, H, 3\)"),
        ({"v": torch.ones(B, T, V)}, ValueError, r"v must be \(2, 4, 2, V\)"),
        ({"k": torch.ones(B, T, H, K, device="meta")}, ValueError, "k is on meta, q on cpu"),
        ({"k": torch.ones(B, T, H, 4)}, ValueError, r"k must be \(2, 4, H, 3\)"),
        ({"k": torch.ones(B, T, 3, K)}, ValueError, r"v must be \(2, 4, 3, V\)"),
        ({"q": torch.ones(B, T, 0, K)}, ValueError, "HQ, K at least 1"),
        ({"k": torch.ones(B, T, 0, K)}, ValueError, "H at least 1"),
        ({"v": torch.ones(B, T, 4, V)}, ValueError, r"v must be \(2, 4, 2, V\), V at"),
        ({"g": torch.ones(B, T, 4, M)}, ValueError, r"g must be \(2, 4, 2, M\), M at"),
        ({"g": torch.ones(B, T, H, 0)}, ValueError, "M at least 1"),
        ({"v": torch.ones(B, T, H, 0)}, ValueError, "V at least 1"),
        ({"s": torch.ones(B, T, H, 7)}, ValueError, r"s must be \(2, 4, 2, 6\), got"),
        ({"initial_state": state(1, H, M, K)}, ValueError, r"initial_state\.k must be \(2, 2"),
        ({"initial_state": state(B, H, M, K, V=4)}, ValueError, r"initial_state\.v must be"),
        ({"initial_state": state(B, H, M, K, device="meta")}, ValueError, "on cpu, got .* on meta"),
        ({"initial_state": state(B, H, M, K, dtype=torch.int64)}, TypeError, "initial_state"),
        ({"initial_state": (torch.ones(1),) * 2}, TypeError, "must be a GSAState, got tuple"),
        ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens packs .* got B = 2"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens must be int32 or int64"),
    ],
)  # fmt: skip
@pytest.mark.any_shapes
def test_bad_arguments_are_named(op, change, error, message):
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        op(**good(**change))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("borders", [[0, 2, 3], [1, 2, 4], [0, 3, 2, 4]])
def test_borders_that_do_not_hold_all_tokens_are_refused(op, borders):
    inputs = {name: x[:1] for name, x in good().items()}
    with pytest.raises(ValueError, match=f"{op.__name__}: cu_seqlens must .*end at T = 4, got"):
        op(**inputs, cu_seqlens=torch.tensor(borders))


@pytest.mark.parametrize("op", OPS)
def test_a_packed_state_has_a_row_for_each_sequence(op):
    inputs = {name: x[:1] for name, x in good().items()}
    borders = torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match=r"initial_state\.k must be \(2, 2, 6, 3\)"):
        op(**inputs, cu_seqlens=borders, initial_state=state(1, H, M, K))


@pytest.mark.any_shapes
def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"chunk_gsa: impl must be one of .*, got 'cuda'"):
        chunk_gsa(**good(), impl="cuda")


@pytest.mark.parametrize("op", [chunk_gsa, chunk_gsa_projected])
def test_triton_needs_a_gpu_where_kernels_are_not_interpreted(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    heads = {"num_heads": 1, "num_kv_heads": 1, "num_slots": 2}
    inputs = good() if op is chunk_gsa else {"x": torch.ones(1, 3, 8), **heads}
    with pytest.raises(ValueError, match=f"{op.__name__}: .*needs CUDA tensors, got .* on cpu"):
        op(**inputs, impl="triton")
    op(**inputs)  # auto takes the reference


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "torch.float64; supported: float32, bfloat16, float16"),
        ({"T": 0}, "no rows, or rows of no tokens"),
        ({"M": 129}, "M = 129, K = 3, V = 5; supported: M up to 128, K and V up to 512"),
        ({"K": 513}, "M = 6, K = 513, V = 5; supported: M up to 128"),
        ({"V": 513}, "M = 6, K = 3, V = 513; supported: M up to 128"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_and_done_by_the_reference(
    changes, message, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    size = {"T": T, "K": K, "V": V, "M": M, "dtype": torch.float32, **changes}
    inputs = {
        name: torch.zeros(1, size["T"], 1, size[width], dtype=size["dtype"])
        for name, width in (("q", "K"), ("k", "K"), ("v", "V"), ("g", "M"))
    }
    with pytest.raises(ValueError, match=f'chunk_gsa: impl="triton" does not support {message}'):
        chunk_gsa(**inputs, impl="triton")
    assert chunk_gsa(**inputs).out.shape == inputs["v"].shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(1, 33)}, ValueError, r"x must be \(B, T, W\) with W = \(4 \+ 2 · 2\) D"),
        ({"x": torch.ones(1, 3, 29)}, ValueError, r"x must be .* D \+ 2 · 6, got \(1, 3, 29\)"),
        ({"x": torch.ones(1, 3, 12)}, ValueError, r"x must be \(B, T, W\)"),
        ({"x": torch.ones(1, 3, 28).int()}, TypeError, "x must be floating-point .* got int32"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must be \(B, T, W\)"),
        ({"num_kv_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads = 3"),
        ({"num_heads": 0}, ValueError, "num_heads must be 1 or more, got 0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be 1 or more, got -1"),
        ({"num_slots": 0}, ValueError, "num_slots must be 1 or more, got 0"),
        ({"damping": 0.0}, ValueError, "damping must be positive and finite, got 0.0"),
        ({"between": "tanh"}, ValueError, "between must be one of"),
        ({"initial_state": state(1, H, M, 3, V=2)}, ValueError, r"initial_state\.k must be"),
        ({"cu_seqlens": torch.tensor([0, 3], dtype=torch.int16)}, TypeError, "cu_seqlens must be"),
    ],
)
@pytest.mark.any_shapes
def test_bad_projections_are_named(change, error, message):
    heads = {"num_heads": HQ, "num_kv_heads": H, "num_slots": M}
    with pytest.raises(error, match=f"chunk_gsa_projected: .*{message}"):
        chunk_gsa_projected(**{"x": torch.ones(1, 3, 28), **heads, **change})
