"""The Triton kernels of single rows against PyTorch: here in the interpreter, or on a GPU."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import eager
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import rows

from .comparison import BFLOAT, DEVICE, FLOAT, HALF, NAN, RTOL, each_dtype

NORMS = ["rms", "layer", "none"]

# (m, S, B, C), heads, layout in memory; widths that are no power of two, up to that of 22 heads.
SHAPES = [
    ((1, 1, 1, 16), 1, "whole"),
    ((2, 3, 2, 48), 3, "steps"),
    ((3, 2, 2, 128), 16, "beside"),
    ((2, 4, 3, 64), 4, "batch first"),
    ((1, 2, 1, 1408), 22, "beside"),
]
each_shape = pytest.mark.parametrize(("shape", "H", "layout"), SHAPES, ids=str)
each_norm = pytest.mark.parametrize("norm", NORMS)


def form_of(norm, H=1):
    return Form(H, 0.5, norm, 1e-3, True, 1)


def place(x, layout):
    """Return x as a view of a larger memory, laid out as the algorithm's are; the rest is NaN."""
    m, S, B, C = x.shape
    if layout == "whole":
        return x.clone()
    if layout == "steps":  # some steps of a tile
        view = x.new_full((m, S + 2, B, C), NAN)[:, 1 : 1 + S]
    elif layout == "beside":  # one of three projections
        view = x.new_full((m, S, B, 3 * C), NAN)[..., C : 2 * C]
    else:  # a tile of (layers, B, T, C)
        view = x.new_full((m, B, S + 5, C), NAN)[:, :, 2 : 2 + S].transpose(1, 2)
    return view.copy_(x)


def whole(x):
    """Return the memory behind the view x."""
    return x.new_empty(0).set_(x.untyped_storage())


class Draw:
    """Random tensors from one seed, in one dtype unless another is given."""

    def __init__(self, dtype):
        self.generator = torch.Generator().manual_seed(3)
        self.dtype = dtype

    def __call__(self, *shape, dtype=None):
        drawn = torch.randn(shape, generator=self.generator).to(DEVICE)
        return drawn.to(self.dtype if dtype is None else dtype)


def check(name, inputs, outputs, layout, *, write_over=None):
    """Compare the function `name` of `rows` and `eager`, in memory that is NaN elsewhere.

    Args:
        name: of the function.
        inputs: a function that orders tensors and outputs as arguments, and the tensors.
        outputs: a tensor of the shape and dtype of each output, by name.
        layout: of all tensors of four axes.
        write_over: the index of the input that also receives the output.
    """
    arguments, tensors = inputs

    def placed(x):
        return place(x, layout) if x.ndim == 4 else x.clone()

    def run(module, tensors, outputs):
        if write_over is not None:
            outputs = dict.fromkeys(outputs, tensors[write_over])
        getattr(module, name)(*arguments(*tensors, **outputs))
        return outputs

    def blank(x, wide):
        return torch.full_like(x, NAN, dtype=FLOAT if wide else x.dtype)

    ours = {n: placed(blank(x, False)) for n, x in outputs.items()}
    ours = run(rows, [placed(x) for x in tensors], ours)
    ref = run(
        eager,
        [x.to(FLOAT, copy=True) for x in tensors],
        {n: blank(x, True) for n, x in outputs.items()},
    )
    low = run(eager, [x.clone() for x in tensors], {n: blank(x, False) for n, x in outputs.items()})
    for n, truth in ref.items():
        # A float32 output must be exact, even of inputs in 16 bits.
        yardstick = None if ours[n].dtype == FLOAT else low[n]
        assert_close(f"{name}: {n}", ours[n], truth, rtol=RTOL[ours[n].dtype], low=yardstick)
        numbers = (~whole(ours[n]).isnan()).sum().item()
        assert numbers == truth.numel(), f"{name} wrote outside of {n}"


@each_dtype
@each_norm
@each_shape
def test_normed_equals_eager(shape, H, layout, norm, dtype):
    draw, form = Draw(dtype), form_of(norm)
    x, weight = draw(*shape), draw(shape[0], shape[-1], dtype=FLOAT)

    def arguments(x, weight, out):
        return x, None if norm == "none" else weight, form, out

    check("normed", (arguments, [x, weight]), {"out": x}, layout)


@each_dtype
@each_norm
@each_shape
@pytest.mark.parametrize("form_of_call", ["in the steps", "of a layer's inputs", "in place"])
def test_normed_bwd_equals_eager(shape, H, layout, norm, dtype, form_of_call):
    draw, form = Draw(dtype), form_of(norm)
    dy, x, weight = draw(*shape), draw(*shape), draw(shape[0], shape[-1], dtype=FLOAT)
    base = draw(*shape, dtype=FLOAT)

    def arguments(dy, x, weight, base, dx=None, scaled=None):
        return dy, x, weight, form, None if form_of_call == "in place" else base, 0.3, dx, scaled

    outputs = {
        "in the steps": {"dx": base, "scaled": x},
        "of a layer's inputs": {"dx": base},
        "in place": {"scaled": dy},
    }
    over = 0 if form_of_call == "in place" else None
    inputs = (arguments, [dy, x, weight, base])
    check("normed_bwd", inputs, outputs[form_of_call], layout, write_over=over)


@each_dtype
@each_norm
@each_shape
def test_normed_bwd_of_partial_sums_equals_eager(shape, H, layout, norm, dtype):
    draw, form = Draw(dtype), form_of(norm)
    partial, x = draw(3, *shape, dtype=FLOAT), draw(*shape)
    weight, base = draw(shape[0], shape[-1], dtype=FLOAT), draw(*shape, dtype=FLOAT)

    def arguments(partial, x, weight, base, dy, dx, scaled):
        return dy, x, weight, form, base, 0.3, dx, scaled, partial

    outputs = {"dy": x, "dx": base.to(dtype), "scaled": x}
    check("normed_bwd", (arguments, [partial, x, weight, base]), outputs, layout)


@each_dtype
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [(shape, layout) for shape, _, layout in SHAPES]
    + [((2, 40, 3, 1024), "steps"), ((2, 300, 1, 32), "beside")],
    ids=str,
)
def test_add_norm_weight_grad_equals_eager(shape, layout, norm, dtype, monkeypatch):
    monkeypatch.setattr(rows, "PROGRAMS", 8)  # so that a program has several tiles of rows
    draw, form = Draw(dtype), form_of(norm)
    dy, x = draw(*shape), draw(*shape)
    total = draw(shape[0], shape[-1], dtype=FLOAT)

    def arguments(dy, x, total, out):
        return dy, x, form, total

    check("add_norm_weight_grad", (arguments, [dy, x, total]), {"out": x}, layout, write_over=2)


@each_dtype
@each_norm
@each_shape
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("wide", [True, False], ids=["h in float32", "h as x"])
def test_add_normed_equals_eager(shape, H, layout, norm, dtype, wide, P):
    draw, form = Draw(dtype), form_of(norm)
    x, weight = draw(*shape), draw(shape[0], shape[-1], dtype=FLOAT)
    y = draw(P, *shape, dtype=dtype if P == 1 else FLOAT)

    def arguments(x, y, weight, h, out):
        return x, y, 0.3, None if norm == "none" else weight, form, h, out

    outputs = {"h": x.float() if wide else x, "out": x}
    check("add_normed", (arguments, [x, y, weight]), outputs, layout)


@each_norm
@pytest.mark.parametrize("module", [rows, eager], ids=["triton", "eager"])
def test_the_norm_after_an_addition_is_that_of_h_as_it_was_rounded(module, norm):
    draw, form = Draw(torch.bfloat16), form_of(norm)
    x, y, weight = draw(1, 2, 2, 48), draw(1, 2, 2, 48), draw(1, 48, dtype=FLOAT)
    h, out, wanted = (torch.empty_like(x) for _ in range(3))
    module.add_normed(x, y[None], 0.3, weight, form, h, out)
    module.normed(h, weight, form, wanted)
    assert torch.equal(out, wanted)


@each_dtype
@each_norm
@each_shape
def test_split_pair_equals_eager(shape, H, layout, norm, dtype):
    draw, form = Draw(dtype), form_of(norm)
    *rest, C = shape
    kv, weight = draw(*rest, 2 * C), draw(shape[0], C, dtype=FLOAT)

    def arguments(kv, weight, k, v):
        return kv, weight, form, k, v

    outputs = {"k": kv[..., :C].contiguous(), "v": kv[..., C:].contiguous()}
    check("split_pair", (arguments, [kv, weight]), outputs, layout)


@each_dtype
@each_shape
@pytest.mark.parametrize("write_over", [None, 0], ids=["apart", "in place"])
def test_gelu_equals_eager(shape, H, layout, dtype, write_over):
    u = 3 * Draw(dtype)(*shape)
    inputs = (lambda u, out: (u, out), [u])
    check("gelu", inputs, {"out": u}, layout, write_over=write_over)


@each_dtype
@each_shape
def test_gelu_bwd_equals_eager(shape, H, layout, dtype):
    draw = Draw(dtype)
    u, dg = 3 * draw(*shape), draw(*shape)
    inputs = (lambda u, dg, out: (u, dg, out), [u, dg])
    check("gelu_bwd", inputs, {"out": u}, layout)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
def test_gelu_of_each_number_of_16_bits_is_right_to_its_last_bit(dtype):
    every = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    u = every[every.abs() <= 6].view(1, 1, 1, -1).to(DEVICE)
    exact, ulp = u.double(), torch.finfo(dtype).eps
    below = torch.special.ndtr(exact)
    out, du, g = torch.empty_like(u), torch.empty_like(u), u.clone()
    rows.gelu(u, out)
    rows.gelu_bwd(g, torch.ones_like(u), du)
    slope = below + exact * torch.exp(-0.5 * exact**2) / (2 * torch.pi) ** 0.5
    least = torch.finfo(dtype).smallest_normal  # below it the last bit is larger
    for found, right, off in ((out, exact * below, 0), (g, exact * below, 0), (du, slope, 1e-5)):
        error = (found.double() - right).abs()
        assert (error <= 0.51 * ulp * right.abs() + off + least * ulp).all()


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
def test_gelu_of_large_numbers_and_of_nan(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([8.0, 100.0, largest, -100.0, -largest, NAN], dtype=dtype, device=DEVICE)
    u = values.view(1, 1, 1, -1)
    out, du = torch.empty_like(u), torch.empty_like(u)
    rows.gelu(u, out)
    rows.gelu_bwd(u.clone(), torch.ones_like(u), du)
    assert out.flatten().tolist()[:5] == [8.0, 100.0, largest, 0.0, 0.0]
    assert du.flatten().tolist()[:5] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert out[..., 5].isnan()
    assert du[..., 5].isnan()


@each_dtype
@each_shape
def test_head_products_equal_eager(shape, H, layout, dtype):
    draw = Draw(dtype)
    a, b = draw(*shape), draw(*shape)
    out = a.new_empty(*shape[:-1], H, dtype=FLOAT)
    check("head_products", (lambda a, b, out: (a, b, out), [a, b]), {"out": out}, layout)


@each_norm
def test_a_nan_stays_in_its_row(norm):
    draw, form = Draw(FLOAT), form_of(norm, H=3)
    x, y, kv = draw(2, 3, 2, 48), draw(2, 3, 2, 48), draw(2, 3, 2, 96)
    weight = draw(2, 48)

    def run(x, y, kv):
        C = [torch.empty_like(x) for _ in range(8)]
        delta = x.new_empty(2, 3, 2, 3)
        rows.normed(x, weight, form, C[0])
        rows.normed_bwd(y, x, weight, form, y, 0.5, C[1], C[2])
        rows.add_normed(x, y[None], 0.5, weight, form, C[3], C[4])
        rows.split_pair(kv, weight, form, C[5], C[6])
        rows.gelu_bwd(x.clone(), y, C[7])
        rows.head_products(x, y, delta)
        return [*C, delta]

    def poisoned(x):
        x = x.clone()
        x[1, 2, 0, -1] = NAN
        return x

    healthy = torch.ones(2, 3, 2, dtype=torch.bool, device=DEVICE)
    healthy[1, 2, 0] = False
    clean, found = run(x, y, kv), run(poisoned(x), poisoned(y), poisoned(kv))
    for expected, got in zip(clean, found, strict=True):
        assert torch.equal(expected[healthy], got[healthy])
        assert got[1, 2, 0].isnan().any() or got is found[6]  # the NaN of a pair is in its key
