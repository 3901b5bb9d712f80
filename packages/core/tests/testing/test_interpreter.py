import inspect
import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def product_kernel(p_a, p_b, p_out, BT: tl.constexpr, PRECISION: tl.constexpr = "ieee"):
    places = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)
    b_a, b_b = tl.load(p_a + places), tl.load(p_b + places)
    b_out = tl.load(p_out + places)
    tl.store(p_out + places, tl.dot(b_a, b_b, b_out, input_precision=PRECISION))


@triton.jit
def cast_kernel(p_x, p_out, BT: tl.constexpr):
    places = tl.arange(0, BT)
    tl.store(p_out + places, tl.load(p_x + places).to(p_out.dtype.element_ty))


def cast(x, dtype):
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    cast_kernel[(1,)](x, out, x.numel())
    return out


def special_values(device):
    exponents = torch.arange(-126, 128, device=device).float().exp2()
    eighths = torch.arange(8, device=device) / 2**10  # of a unit in the last place
    values = torch.outer(exponents, torch.cat([1 + eighths, 2 - eighths[1:]])).flatten()
    values = torch.cat([values, torch.tensor([0.0, float("inf")], device=device)])
    return torch.cat([values, -values, values.new_full((8192 - 2 * len(values),), float("nan"))])


def test_products_of_bfloat16_are_sums_of_exact_products(device):
    a, b, c = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    a, b = a.bfloat16(), b.bfloat16()
    out = c.clone()
    product_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out, a.float() @ b.float() + c, rtol=1e-5, atol=1e-5)


def test_products_in_tf32_cut_the_last_bits_off(device):
    x = 1 + torch.arange(1, 33, device=device) * 2.0**-13  # TF32 has ten bits behind the point
    whole, cut = torch.diag(x), torch.diag(1 + (x - 1).mul(2**10).floor() / 2**10)
    for precision, expected in (("tf32", cut @ cut), ("ieee", whole @ whole)):
        out = torch.zeros_like(whole)
        product_kernel[(1,)](whole, whole, out, 32, precision)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


def test_casts_to_bfloat16_round_to_nearest_and_ties_to_even(device):
    values = special_values(device)
    expected = values.bfloat16()
    assert expected.isnan().any()
    assert expected.isinf().sum() > 2, "the largest numbers round to infinity"
    torch.testing.assert_close(
        cast(values, torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True
    )


def test_casts_from_bfloat16_are_exact(device):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    values = bits.view(torch.bfloat16)
    torch.testing.assert_close(
        cast(values, torch.float32), values.float(), rtol=0, atol=0, equal_nan=True
    )


@triton.jit
def masked_kernel(p_x, p_out, size, number, BT: tl.constexpr):
    places = tl.arange(0, BT)
    wanted = (places < size) & (tl.program_id(0) + 7 == number)
    tl.store(p_out + places, tl.load(p_x + places, mask=wanted, other=-1.0), mask=wanted)


def test_a_comparison_of_two_numbers_masks_a_block(device):
    x, untouched = torch.arange(8.0, device=device), torch.full((8,), 5.0, device=device)
    for number, expected in ((7, [0, 1, 2, 5, 5, 5, 5, 5]), (8, [5] * 8)):
        out = untouched.clone()
        masked_kernel[(1,)](x, out, 3, number, 8)
        assert out.tolist() == expected


@triton.jit
def extremes_kernel(p_x, p_out, BT: tl.constexpr):
    o = tl.arange(0, BT)
    x = tl.load(p_x + o)
    tl.store(p_out + o, tl.maximum(x, 0.0))
    tl.store(p_out + BT + o, tl.minimum(x, 0.0))
    tl.store(p_out + 2 * BT + o, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))


def test_a_maximum_is_not_a_number_only_where_that_is_asked_for(device):
    x = torch.tensor([-1.0, float("nan"), 2.0, float("-inf")], device=device)
    out = x.new_empty(3, 4)
    extremes_kernel[(1,)](x, out, 4)
    assert out[0].tolist() == [0, 0, 2, 0]
    assert out[1].tolist() == [-1, 0, 0, float("-inf")]
    assert out[2].isnan().tolist() == [False, True, False, False]


@triton.jit
def doubled(x):
    return x * 2


@triton.jit
def doubling_kernel(p_x, times):
    x = tl.load(p_x)
    for _ in range(times):
        x = doubled(x)
    tl.store(p_x, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_the_language_is_patched_once_for_all_launches_and_their_calls(monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patches = interpreter._patch_builtin, []
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *x: (patches.append(x), patch(*x)))
    patched = inspect.getclosurevars(interpreter._patch_lang).nonlocals["patched"]
    patched.discard(doubling_kernel.fn.__module__)
    needed = []
    for times in (1, 10):
        x = torch.ones(1)
        doubling_kernel[(1,)](x, times)
        assert x == 2**times
        needed.append(len(patches))
    assert needed[0] == needed[1] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_a_type_of_blocks_is_made_once_and_never_taken_for_another():
    kept = tl.block_type(tl.float32, [4, 2])
    assert tl.block_type(tl.float32, tl.tuple([tl.constexpr(4), 2])) is kept
    others = (tl.float32, [2, 4]), (tl.float32, [4, 2, 1]), (tl.int32, [4, 2])
    pointers = (tl.pointer_type(tl.float32), [4, 2]), (tl.pointer_type(tl.float16), [4, 2])
    types = [kept, *(tl.block_type(*each) for each in (*others, *pointers))]
    assert len({(str(each), str(each.scalar), each.numel) for each in types}) == len(types)
    for shape, error in (([4.0, 2], TypeError), ([4, 3], ValueError), ([], TypeError)):
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(tl.float32, shape)


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"]
OPERATORS = [f"__{name}__" for name in (*BINARY, *(f"r{name}" for name in BINARY))]
OPERATORS += ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_does_what_tritons_does(name):
    """Each pair of types comes twice, with other numbers: what is done to the second is known."""
    semantic = pytest.importorskip("triton.runtime.interpreter").interpreter_semantic
    ours = getattr(tl.tensor, name)
    kept = inspect.getclosurevars(ours).nonlocals
    tritons = kept["operator"]
    types = (tl.int1, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    numbers = [True, 0, 1, -1, 2**31, 2**40, 2**70, 1.0, 0.5, 0.0, -0.0, float("nan"), 1e300]

    def tensors(number):
        shaped = [semantic.full(shape, number, tl.int32) for shape in ([], [4], [2, 4], [2, 1])]
        blocks = [semantic.cast(x, kind) for x in shaped for kind in types]
        address = semantic.builder.get_uint64(64 * number)
        pointers = [tl.pointer_type(kind) for kind in (tl.float32, tl.int64) * 2]
        return blocks + [semantic.tensor(address, kind) for kind in pointers]

    def outcome(operator, *arguments, **semantic):
        try:
            x = operator(*arguments, **semantic)
        except Exception as error:
            return type(error), str(error)
        return x.type, str(x.dtype), x.handle.data.tolist(), x.handle.data.dtype, x.handle.dtype

    for first, second in ((1, 3), (3, 2)):
        # Of two tensors, Python calls the operator of the left one.
        others = numbers if name.startswith("__r") else [*tensors(second), *numbers]
        for pair in itertools.product(tensors(first), others):
            found, expected = outcome(ours, *pair), outcome(tritons, *pair, _semantic=semantic)
            assert repr(found) == repr(expected), [str(x) for x in pair]
    if not triton.__version__.startswith(
        "3.4"
    ):  # whose operators then bring semantics of their own
        assert any(kept["known"].values()), "something was known"
