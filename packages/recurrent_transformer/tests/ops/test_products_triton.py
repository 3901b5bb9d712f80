"""The Triton kernels of products for few rows against PyTorch: in the interpreter, or on a GPU."""

import itertools
from math import ceil

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_recurrent_transformer.ops.recurrent_layers import LayerWeights, eager, recurrent_layers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import products

from .comparison import BFLOAT, DEVICE, FLOAT, HALF, NAN, RTOL, each_dtype, normal

NAMES = ["product", "product_partial", "product_gelu", "product_gelu_bwd"]
RMS = Form(2, 0.5, "rms", 1e-3, True, 1)

# (m, s, B, K) and N: ragged K and N, several parts of K, one row, and two tiles of rows.
SHAPES = [
    ((1, 1, 1, 16), 16),
    ((2, 3, 2, 300), 80),
    ((3, 1, 5, 1024), 64),
    ((1, 2, 35, 128), 48),
]
each_shape = pytest.mark.parametrize(("shape", "N"), SHAPES, ids=str)
each_name = pytest.mark.parametrize("name", NAMES)


def steps(x):
    """Return x as some steps of a tile; the tile's other steps are NaN."""
    m, s, *rest = x.shape
    return x.new_full((m, s + 3, *rest), NAN)[:, 2 : 2 + s].copy_(x)


def weight_of(x, N, transposed):
    """Return weights in memory that is NaN elsewhere."""
    m, K = x.shape[0], x.shape[-1]
    size = (K, N) if transposed else (N, K)
    memory = x.new_full((m, size[0] + 2, size[1] + 16), NAN)
    weight = memory[:, : size[0], : size[1]]
    weight.copy_(normal(m, *size, dtype=x.dtype, seed=1) * K**-0.5)
    return weight.mT if transposed else weight


def values_around(x):
    """Count the values in the memory behind the view x that are not NaN."""
    return (~x.new_empty(0).set_(x.untyped_storage()).isnan()).sum()


def run(module, name, x, weight, u):
    """Return all that a function writes, by name."""
    out = steps(torch.full_like(u, NAN))
    if name == "product":
        module.product(x, weight, out)
        return {"out": out, "returned": module.product(x, weight)}
    if name == "product_partial":
        # The second call may write one part into `out`, and then returns None.
        sums = module.product_partial(x, weight, out)
        again = out if sums is None else sums.sum(0)
        return {"sum": module.product_partial(x, weight).sum(0), "again": again}
    if name == "product_gelu":
        module.product_gelu(x, weight, out, None, RMS)
        return {"out": out}
    module.product_gelu_bwd(x, weight, u, out)
    return {"du": out, "u": u}


@each_dtype
@each_shape
@each_name
@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "weight.mT"])
@pytest.mark.parametrize("few", [True, False], ids=["kernel", "cuBLAS"])
def test_products_equal_eager(name, shape, N, transposed, few, dtype, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (dtype,) if few else ())
    x = steps(normal(*shape, dtype=dtype, seed=0))
    weight = weight_of(x, N, transposed)
    u = steps(normal(*shape[:3], N, dtype=dtype, seed=2))
    truth = run(eager, name, x.float(), weight.float(), u.to(FLOAT, copy=True))
    low = run(eager, name, x, weight, u.clone())
    found = run(products, name, x, weight, u)
    for key, wanted in truth.items():
        # A float32 output must be exact, even of inputs in 16 bits.
        exact = found[key].dtype == FLOAT
        rtol = RTOL[found[key].dtype]
        assert_close(key, found[key], wanted, rtol=rtol, low=None if exact else low[key])
        if key in ("out", "du", "u"):
            assert values_around(found[key]) == wanted.numel(), f"{name} wrote outside of {key}"


def test_parts_of_whole_blocks_that_do_not_divide_evenly_end_with_the_sum(monkeypatch):
    """Two programs share three blocks of K: the second has one."""
    monkeypatch.setattr(products, "DTYPES", (FLOAT,))
    x = steps(normal(1, 1, 2, 384, dtype=FLOAT, seed=0))
    weight = weight_of(x, 16, False)
    sums = products.product_partial(x, weight)
    assert len(sums) == 2
    assert_close("sum", sums.sum(0), x @ weight[:, None].mT, rtol=1e-5)


@each_dtype
@each_shape
@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
@pytest.mark.parametrize("few", [True, False], ids=["kernel", "cuBLAS"])
def test_products_of_normalized_sums_equal_eager(shape, N, norm, few, dtype, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (dtype,) if few else ())
    monkeypatch.setattr(products, "WIDE_RANGE", (FLOAT, BFLOAT))
    form = RMS._replace(norm=norm)
    x, rows = (normal(*shape[:3], width, dtype=dtype, seed=width) for width in (shape[3], N))
    x, base = steps(x), steps(rows.float() * 3)
    weight, after = weight_of(x, N, False), weight_of(rows, 40, False)
    scales = None if norm == "none" else normal(shape[0], N, dtype=FLOAT, seed=4)

    def call(module, x, dtype):
        h, out, g = (
            steps(torch.full((*shape[:3], width), NAN, dtype=wanted, device=DEVICE))
            for width, wanted in ((N, FLOAT), (N, dtype), (40, dtype))
        )
        weights = weight.to(dtype), after.to(dtype)
        squares = module.product_add(x.to(dtype), weights[0], base, 0.5, scales, form, h, out)
        module.product_gelu(out, weights[1], g, squares, form)
        return {"h": h, "gelu": g}, out, squares

    truth, *_ = call(eager, x, FLOAT)
    low, *_ = call(eager, x, dtype)
    found, out, squares = call(products, x, dtype)
    assert squares is not None or not (few and norm == "rms" and dtype != HALF)
    for key, wanted in truth.items():
        exact = dtype == FLOAT
        assert_close(key, found[key], wanted, rtol=RTOL[dtype], low=None if exact else low[key])
    for x_out in (found["h"], found["gelu"], out):
        assert values_around(x_out) == x_out.numel(), "wrote outside of an output"

    x[-1, -1, -1, 0] = NAN
    healthy = torch.ones(shape[:3], dtype=torch.bool, device=DEVICE)
    healthy[-1, -1, -1] = False
    for key, poisoned in call(products, x, dtype)[0].items():
        assert torch.equal(poisoned[healthy], found[key][healthy])
        assert poisoned[~healthy].isnan().all()


def test_rows_beyond_float16_are_normalized_before_they_are_rounded():
    x, base = normal(1, 1, 2, 16, dtype=HALF), torch.full((1, 1, 2, 16), 1e5, device=DEVICE)
    weight, scales = normal(1, 16, 16, dtype=HALF, seed=1), torch.ones(1, 16, device=DEVICE)
    h, out, g = base.clone(), torch.empty_like(x), torch.empty_like(x)
    squares = products.product_add(x, weight, base, 0.5, scales, RMS, h, out)
    products.product_gelu(out, weight, g, squares, RMS)
    ones = torch.ones_like(x) @ weight[:, None].mT  # 1e5 is far more than the product
    assert_close("gelu", g, torch.nn.functional.gelu(ones), rtol=5e-3)


@each_name
def test_a_nan_stays_in_its_row_and_layer(name, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (FLOAT,))
    x, u = (normal(2, 2, 3, 200, dtype=FLOAT, seed=seed) for seed in (0, 2))
    weight = weight_of(x, 200, transposed=False)
    poisoned = x.clone()
    poisoned[1, 1, 0, 150] = NAN
    clean = run(products, name, x, weight, u.clone())
    found = run(products, name, poisoned, weight, u.clone())
    healthy = torch.ones(2, 2, 3, dtype=torch.bool, device=DEVICE)
    healthy[1, 1, 0] = False
    for key, wanted in clean.items():
        assert torch.equal(found[key][healthy], wanted[healthy])
        assert found[key][~healthy].isnan().all() or key == "u"


@pytest.mark.parametrize("persistent_norm", [True, False])
def test_layers_with_these_products_equal_eager_with_all_gradients(persistent_norm, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (FLOAT,))
    monkeypatch.setattr(products, "WIDE_RANGE", (FLOAT,))
    n, B, T, C, F = 2, 2, 3, 32, 160
    sizes = dict.fromkeys(("wq", "wk", "wv", "wo"), (n, C, C))
    sizes |= {"up": (n, F, C), "down": (n, C, F)}
    sizes |= dict.fromkeys(("n1", "n2", "q_norm", "k_norm"), (n, C))
    inputs = {
        name: normal(*size, dtype=FLOAT, seed=i) * size[-1] ** -0.5
        for i, (name, size) in enumerate(sizes.items())
    }
    inputs["x"] = normal(B, T, C, dtype=FLOAT, seed=20)
    pull = normal(B, T, C, dtype=FLOAT, seed=21)

    def layers(impl):
        def call(x, **weights):
            given = x, LayerWeights(**weights)
            options = {"num_heads": 2, "persistent_norm": persistent_norm, "impl": impl}
            return recurrent_layers(*given, **options).z

        z, found = grads(call, inputs, pull)
        return found | {"z": z}

    truth = layers("eager")
    for name, found in layers("triton").items():
        assert_close(name, found, truth[name], rtol=1e-5)


def test_settings_fill_the_gpu_where_they_can_and_fit_in_its_shared_memory():
    widths = (1024, 1408, 2048, 4096, 8192)
    for m, R, N, K in itertools.product((1, 2, 5, 12), (1, 16, 33, 128), widths, widths):
        for partial in (True, False):
            s = products._settings(m, R, N, K, partial)
            programs = m * ceil(R / s.BM) * ceil(N / s.BN) * s.P
            assert programs >= 64, (m, R, N, K, s)
            assert (s.BM + s.BN) * s.BK * 2 * s.num_stages <= 227 * 1024
            assert s.P == 1 or partial
