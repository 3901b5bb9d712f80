"""The head's loss in parts equals that of all logits, its gradients too."""

import math

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.ops.linear_cross_entropy import NO_TARGET, chunked, linear_cross_entropy
from mezzo_core.testing.numerics import assert_close

from .impls import DEVICE, NO_TRITON

IMPLS = ["auto", pytest.param("triton", marks=NO_TRITON)]
SIZES = [(1, 3, 2), (37, 8, 61), (64, 16, 5000)]


def inputs(N, C, V, dtype=torch.float32, ignored=3):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[1 : 1 + ignored] = NO_TARGET
    x, w = (tensor.to(DEVICE, dtype).requires_grad_() for tensor in (x, w))
    return x, w, targets.to(DEVICE)


def run(x, w, targets, **options):
    loss, hits = linear_cross_entropy(x, w, targets, **options)
    return loss, hits, *torch.autograd.grad(3 * loss, (x, w))


@pytest.fixture
def few_rows(monkeypatch):
    """Compute few rows at a time, as with a large vocabulary."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 20_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("impl", IMPLS)
def test_in_parts_equals_the_reference(impl, sizes, dtype, few_rows):
    x, w, targets = inputs(*sizes, dtype=dtype)
    found = run(x, w, targets, impl=impl)
    exact = run(*(tensor.detach().double().requires_grad_() for tensor in (x, w)), targets)
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name, got, wanted in zip(
        ("loss", "dx", "dW"), found[::2] + found[3:], exact[::2] + exact[3:], strict=True
    ):
        assert_close(name, got, wanted, rtol=rtol)
    assert found[0].dtype == torch.float32
    assert [grad.dtype for grad in found[2:]] == [dtype] * 2


@pytest.mark.parametrize("impl", IMPLS)
def test_targets_may_lie_apart(impl):
    x, w, targets = inputs(*SIZES[1])
    apart = torch.stack([targets, torch.full_like(targets, -7)], 1)[:, 0]
    for found, wanted in zip(
        run(x, w, apart, impl=impl), run(x, w, targets, impl=impl), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("sizes", SIZES)
def test_float64_is_exact(sizes, few_rows):
    x, w, targets = inputs(*sizes, dtype=torch.float64)
    found, wanted = run(x, w, targets), run(x, w, targets, impl="reference")
    assert torch.equal(found[1], wanted[1])
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_reference_is_torch_s_own():
    x, w, targets = inputs(20, 8, 30)
    loss, hits = linear_cross_entropy(x, w, targets, impl="reference")
    logits = x @ w.T
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="sum"))
    assert torch.equal(hits, logits.argmax(-1) == targets)


@pytest.mark.parametrize("block", [4096, 1])  # equal logits in two lanes of a program, or in one
@pytest.mark.parametrize("impl", IMPLS)
def test_hits_are_of_targets_that_count_and_ties_go_to_the_first(impl, block, monkeypatch):
    if impl == "triton":
        from mezzo_core.ops.linear_cross_entropy.triton import cross_entropy

        monkeypatch.setattr(cross_entropy, "BLOCK", block)
    x = torch.ones(4, 1, device=DEVICE)
    w = torch.tensor([[1.0], [5.0], [5.0]], device=DEVICE)
    targets = torch.tensor([1, 2, 0, NO_TARGET], device=DEVICE)
    hits = linear_cross_entropy(x, w, targets, impl=impl).hits
    assert hits.tolist() == [True, False, False, False]
    rows = linear_cross_entropy(x.view(2, 2, 1), w, targets.view(2, 2), impl=impl)
    assert rows.hits.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_no_number_stays_in_its_row_and_counts_only_with_a_target(impl):
    x, w, targets = inputs(6, 4, 9, ignored=1)
    clean = run(x, w, targets, impl=impl)
    spoiled = x.detach().clone()
    spoiled[1] = math.nan  # row 1 has no target
    found = run(spoiled.requires_grad_(), w, targets, impl=impl)
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2], clean[2])
    with torch.no_grad():
        spoiled[0] = math.nan
    assert linear_cross_entropy(spoiled, w, targets, impl=impl).loss.isnan()


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits_stay_finite(impl):
    x, w, targets = inputs(5, 4, 30)
    loss = linear_cross_entropy(1e4 * x, w, targets, impl=impl).loss
    assert_close(
        "loss", loss, linear_cross_entropy(1e4 * x, w, targets, impl="reference").loss, rtol=1e-5
    )


def test_rows_of_any_shape_and_none():
    x, w, targets = inputs(12, 4, 9)
    whole = linear_cross_entropy(x, w, targets)
    found = linear_cross_entropy(x.view(3, 4, 4), w, targets.view(3, 4))
    assert found.loss == whole.loss
    assert torch.equal(found.hits.flatten(), whole.hits)
    assert run(x[:0], w, targets[:0])[0] == 0
    nothing = run(x, w, torch.full_like(targets, NO_TARGET))
    assert [part.count_nonzero() for part in nothing] == [0] * 4


def test_shapes_are_told_without_memory():
    given = [tensor.detach().to("meta") for tensor in inputs(12, 4, 9)]
    assert linear_cross_entropy(*given).hits.shape == (12,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_multiplies_in_bf16_and_keeps_the_weight_s_gradient_wide(dtype):
    x, w, targets = inputs(37, 8, 61)
    wanted = run(x, w, targets)
    x = x.to(dtype)  # a model may end in a product, whose outputs have autocast's dtype
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(x, w, targets)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert_close("loss", loss, wanted[0], rtol=1e-2)
    assert_close("dW", 3 * dw, wanted[3], rtol=2e-2)
    assert (dx.dtype, dw.dtype) == (dtype, torch.float32)


def test_autocast_leaves_float64_as_it_is():
    x, w, targets = inputs(37, 8, 61, dtype=torch.float64)
    wanted = run(x, w, targets)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = run(x, w, targets)
    assert all(map(torch.equal, found, wanted))


def test_the_weight_s_gradient_is_summed_in_float32(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)  # a row at a time
    x, w, targets = inputs(1000, 4, 7, dtype=torch.bfloat16)
    exact = run(*(tensor.detach().double().requires_grad_() for tensor in (x, w)), targets)
    assert_close("dW", run(x, w, targets)[3], exact[3], rtol=1e-2)


def test_gradients_are_those_of_finite_differences():
    x, w, targets = inputs(7, 3, 11, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets).loss, (x, w))


@pytest.mark.any_shapes
def test_torch_func_and_one_graph_give_the_same():
    x, w, targets = inputs(7, 3, 11)
    wanted = torch.autograd.grad(linear_cross_entropy(x, w, targets).loss, (x, w))
    for found in (
        torch.func.grad(lambda x, w: linear_cross_entropy(x, w, targets).loss, (0, 1))(x, w),
        torch.autograd.grad(
            torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)(
                x, w, targets
            ).loss,
            (x, w),
        ),
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_gradient_is_refused_rather_than_zero(frozen):
    x, w, targets = inputs(7, 3, 11)
    w.requires_grad_(not frozen)
    (dx,) = torch.autograd.grad(
        linear_cross_entropy(x, w, targets).loss, x, create_graph=True, retain_graph=True
    )
    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.autograd.grad(dx.sum() + x.sum(), x)
    slope = torch.func.grad(lambda x: linear_cross_entropy(x, w, targets).loss)
    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(lambda x: slope(x).sum())(x.detach())


@pytest.mark.parametrize("impl", IMPLS)
def test_the_registered_op_is_sound(impl):
    x, w, targets = inputs(7, 3, 11)
    op = torch.ops.mezzo.linear_cross_entropy
    torch.library.opcheck(
        op, (x, w, targets, x[:0].clone(), NO_TARGET, x.dtype, True, impl == "triton")
    )


def test_the_registered_op_is_sound_under_autocast():
    x, w, targets = inputs(7, 3, 11)
    op = torch.ops.mezzo.linear_cross_entropy
    torch.library.opcheck(
        op, (x, w, targets, x[:0].clone(), NO_TARGET, torch.bfloat16, True, False)
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_target_of_the_vocabulary_may_be_the_one_that_does_not_count(impl):
    rows, targets = torch.eye(5, device=DEVICE), torch.arange(5, device=DEVICE)
    found = linear_cross_entropy(rows, rows, targets, ignore_index=2, impl=impl)
    assert found.hits.tolist() == [True, True, False, True, True]
    targets[2] = 99  # beyond the vocabulary
    again = linear_cross_entropy(rows, rows, targets, ignore_index=99, impl=impl)
    assert torch.equal(again.loss, found.loss)
    assert torch.equal(again.hits, found.hits)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_one_of_the_gradients_may_be_wanted_alone(name):
    x, w, targets = inputs(7, 3, 11)
    both = dict(zip(("x", "weight"), run(x, w, targets)[2:], strict=True))
    given = {"x": x.detach(), "weight": w.detach()}
    given[name].requires_grad_()
    (3 * linear_cross_entropy(**given, targets=targets).loss).backward()
    assert torch.equal(given[name].grad, both[name])


@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=NO_TRITON)])
def test_columns_of_padding_have_no_gradient(use_triton, monkeypatch):
    if use_triton:
        from mezzo_core.ops.linear_cross_entropy.triton import cross_entropy

        monkeypatch.setattr(cross_entropy, "BLOCK", 4)
    logits, targets = torch.randn(3, 16, device=DEVICE), torch.tensor([2, 0, 7], device=DEVICE)
    expected = logits[:, :8].softmax(1) - F.one_hot(targets, 8)
    losses, hits = torch.zeros(3, device=DEVICE), torch.zeros(3, dtype=bool, device=DEVICE)
    chunked._cross_entropy_(
        logits, 8, targets, NO_TARGET, losses, hits, differentiable=True, use_triton=use_triton
    )
    torch.testing.assert_close(logits, F.pad(expected, (0, 8)))


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    x, w, targets = inputs(7, 3, 11)
    kept = []
    forward = chunked.linear_cross_entropy_fwd
    monkeypatch.setattr(
        chunked,
        "linear_cross_entropy_fwd",
        lambda *a, **k: kept.append(forward(*a, **k)) or kept[0],
    )
    with torch.no_grad():
        linear_cross_entropy(x, w, targets)
    assert [kept[0].dx.numel(), kept[0].dweight.numel()] == [0, 0]


@pytest.mark.gpu
def test_memory_holds_few_logits():
    x, w, targets = inputs(16_384, 64, 50_257, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, targets).loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * chunked.CHUNK_BYTES  # all: 1.6 GB


@pytest.mark.parametrize(
    ("V", "target", "message"),
    [
        (61, 61, r"targets must be in \[0, 61\) or .*, got 61"),
        (61, -1, r"targets must be in \[0, 61\) or .*, got -1"),
        (0, 5, r"weight must be \(V, 8\), V at least 1, got \(0, 8\)"),
    ],
)
def test_a_target_beyond_the_vocabulary_is_named_and_an_empty_vocabulary(V, target, message):
    x, w, targets = (tensor.cpu() for tensor in inputs(37, 8, 61))
    targets[5] = target
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, w[:V], targets)


@NO_TRITON
def test_the_kernel_writes_nothing_beyond_the_row_of_a_wrong_target():
    from mezzo_core.ops.linear_cross_entropy.triton.cross_entropy import cross_entropy_

    room, targets = torch.randn(4, 9, device=DEVICE), torch.tensor([-1, 9], device=DEVICE)
    before, losses, hits = room.clone(), room.new_zeros(2), targets.new_zeros(2, dtype=torch.bool)
    cross_entropy_(room[1:3], 9, targets, NO_TARGET, losses, hits, differentiable=True)
    assert torch.equal(room[::3], before[::3])
    assert losses.isnan().all()
