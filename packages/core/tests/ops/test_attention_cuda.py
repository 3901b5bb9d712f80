"""Attention on a GPU; and the block masks of flex_attention, which any machine can check."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.ops.attention import attention, flash4
from mezzo_core.ops.attention.flex import (
    _block_mask,
    attention_flex,
    interval_blocks,
    make_block_mask,
    make_position_mask,
    owners,
    position_blocks,
    transposed_blocks,
)
from mezzo_core.ops.attention.request import Request, visible_keys
from mezzo_core.positions import alibi_slopes
from mezzo_core.testing import assert_close, grads

from .attention_inputs import borders, problem


@pytest.mark.parametrize(
    ("T", "S", "causal", "window_size", "lengths"),
    [
        (128, 128, True, None, None),
        (300, 300, True, None, None),
        (300, 300, True, 1, None),
        (513, 513, True, 200, None),
        (640, 640, True, 300, [5, 625, 10]),
        (300, 300, True, None, [0, 130, 1, 0, 169, 0]),
        (300, 300, False, None, [100, 200]),
        (300, 500, False, None, None),
        (500, 300, False, 50, None),
        (700, 300, False, 50, None),
    ],
)
def test_block_masks_skip_only_what_no_query_sees(T, S, causal, window_size, lengths):
    cu_seqlens = None if lengths is None else borders(lengths)
    q, k = torch.zeros(1, T, 1, 1), torch.zeros(1, S, 1, 1)
    request = Request(
        q, k, k, causal, window_size, None, 1.0, cu_seqlens, None, None, return_lse=False
    )
    visible = visible_keys(request)[0]
    mask = make_block_mask(T, S, q.device, causal, window_size, cu_seqlens)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    assert torch.equal(mask.mask_mod(None, None, i, j).expand(T, S), visible)
    some_seen = as_dense(mask.kv_num_blocks, mask.kv_indices)
    all_seen = as_dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    for row in range(some_seen.shape[0]):
        for column in range(some_seen.shape[1]):
            block = visible[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            assert not (some_seen[row, column] and all_seen[row, column])
            assert some_seen[row, column] or all_seen[row, column] or not block.any()
            assert not all_seen[row, column] or block.all()
    # The backward goes through the same blocks, key by key.
    assert torch.equal(as_dense(mask.q_num_blocks, mask.q_indices).T, some_seen)
    assert torch.equal(as_dense(mask.full_q_num_blocks, mask.full_q_indices).T, all_seen)
    # And it does skip: blocks beyond the diagonal are never listed.
    if causal:
        assert not (some_seen | all_seen).triu(1).any()


def test_a_mask_that_is_kept_serves_the_same_calls_alone(monkeypatch):
    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    first = (9, 9, True, None, None)
    others = [(9, 9, True, 4, None), (9, 9, False, 4, None), (8, 9, False, 4, None)]
    for T, S, causal, window_size, lengths in ((*first[:4], [4, 5]), first, *others):
        q, k = torch.zeros(1, T, 1, 1), torch.zeros(1, S, 1, 1)
        cu_seqlens = None if lengths is None else borders(lengths)
        request = Request(q, k, k, causal, window_size, None, 1.0, cu_seqlens, None, None, False)
        mask, again = (_block_mask(request, cached=True) for _ in range(2))
        i, j = torch.arange(T)[:, None], torch.arange(S)
        assert mask.seq_lengths == (T, S)
        assert torch.equal(mask.mask_mod(None, None, i, j).expand(T, S), visible_keys(request)[0])
        assert (again is mask) == (lengths is None)
    stream.cuda_stream = 2
    other = _block_mask(request, cached=True)
    assert other is not mask, "which is not yet computed on this stream"


@pytest.mark.parametrize("window_size", [None, 1, 200])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [640, 600])
def test_block_masks_of_positions_skip_only_what_no_query_sees(causal, window_size, S):
    places = at_positions(300, S)
    q, k = torch.zeros(2, 300, 1, 1), torch.zeros(2, S, 1, 1)
    options = (causal, window_size, None, 1.0, None)
    visible = visible_keys(Request(q, k, k, *options, **places, return_lse=False))
    mask, _ = make_position_mask(*places.values(), causal, window_size)
    i, j = torch.arange(300)[:, None], torch.arange(S)
    listed = fully = 0
    for b in range(2):
        assert torch.equal(mask.mask_mod(b, None, i, j).expand(300, S), visible[b])
        part, full = (
            as_dense(counts[b, None], indices[b, None])
            for counts, indices in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        )
        listed, fully = listed + int((part | full).sum()), fully + int(full.sum())
        assert torch.equal(as_dense(mask.q_num_blocks[b, None], mask.q_indices[b, None]).T, part)
        by_key = as_dense(mask.full_q_num_blocks[b, None], mask.full_q_indices[b, None])
        assert torch.equal(by_key.T, full)
        assert not (part & full).any()
        for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
            block = visible[b, 128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            assert part[row, column] or full[row, column] or not block.any()
            assert not full[row, column] or (block.all() and block.shape[1] == 128)
    assert listed < 2 * 3 * 5 or not causal, "some blocks are skipped"
    assert fully > 0 or window_size is not None, "some blocks need no mask"


def at_positions(T, S, device="cpu"):
    """Positions of two rows that continue from a full ring and from one with empty slots."""
    old = S - T
    ring = torch.arange(old, device=device)
    first = torch.tensor([[1000], [old - 40]], device=device)
    newest = first - 1
    kept = torch.stack([newest[0] - (newest[0] - ring) % old, ring.where(ring < old - 40, -1)])
    q_positions = first + torch.arange(T, device=device)
    return {"q_positions": q_positions, "k_positions": torch.cat([kept, q_positions], 1)}


def as_dense(counts, indices):
    dense = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        columns = indices[0, 0, row, :count]
        assert columns.unique().numel() == count, "a block listed twice would be counted twice"
        dense[row, columns.long()] = True
    return dense


def test_registered_ops_pass_opcheck():
    first = torch.tensor([0] * 130 + [130] * 170)
    torch.library.opcheck(interval_blocks, (first, torch.arange(300), 300))
    torch.library.opcheck(
        transposed_blocks, (torch.tensor([[1, 2]]), torch.tensor([[[2, 0, 0], [1, 2, 0]]]).int())
    )
    torch.library.opcheck(owners, (borders([3, 0, 4]), 7))
    places = tuple(at_positions(130, 200).values())
    for causal, window_size in ((True, 50), (False, None)):
        torch.library.opcheck(position_blocks, (*places, causal, window_size))


@pytest.mark.parametrize(
    ("options", "lse"),
    [
        ({"window_size": 30}, False),
        ({"alibi_slopes": alibi_slopes(4)}, True),
        ({"cu_seqlens": borders([0, 130, 1, 69])}, True),
        ({"alibi_slopes": alibi_slopes(4), "window_size": 90, **at_positions(200, 330)}, True),
    ],
)
def test_flex_traces_into_one_graph_and_equals_the_reference(options, lse):
    # Traced but not compiled, it runs anywhere: densely, and forward only.
    is_placed = "q_positions" in options
    x, _ = problem(B=2 if is_placed else 1, T=200, S=330 if is_placed else 200, H=2, D=16)
    fields = ("window_size", "alibi_slopes", "cu_seqlens", "q_positions", "k_positions")

    def run(q, k, v):
        window_size, slopes, cu_seqlens, *places = map(options.get, fields)
        # Positions that the graph computes: the mask must not read them there.
        places = [None if x is None else x + 0 for x in places]
        return attention_flex(
            Request(q, k, v, True, window_size, slopes, 16**-0.5, cu_seqlens, *places, lse)
        )

    with torch.no_grad():
        got = torch.compile(run, fullgraph=True, backend="eager")(**x)
        ref = attention(**x, **options, return_lse=lse, impl="reference")
    assert_close("out", got.out, ref.out, rtol=1e-5)
    if lse:
        assert_close("lse", got.lse, ref.lse, rtol=1e-5)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
CUDA_OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": 100},
    "alibi": {"alibi_slopes": "press"},
    "alibi window": {"alibi_slopes": "olmo", "window_size": 300},
    "packed": {"cu_seqlens": [0, 130, 1, 0, 389]},
    "packed window": {"cu_seqlens": [500, 20], "window_size": 64},
}


def on_cuda(options):
    """Fill in the tensors of a row of CUDA_OPTIONS."""
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = alibi_slopes(4, options["alibi_slopes"], device="cuda")
    if "cu_seqlens" in options:
        options["cu_seqlens"] = borders(options["cu_seqlens"], device="cuda")
    return options


def check_on_cuda(function, options, dtype, *, B=2, H=2, T=520, S=None, D=64):
    """Output, lse and gradients within both bounds of `assert_close`."""
    batch = 1 if "cu_seqlens" in options else B
    inputs, dout = problem(B=batch, T=T, S=S, H=H, D=D, dtype=dtype, device="cuda")
    dlse = torch.randn(batch, T, 4, device="cuda") if options.get("return_lse") else None

    def run(fn, cast):
        wide = {name: x.to(cast) for name, x in inputs.items()}
        return grads(lambda **x: fn(**x, **options), wide, (dout.to(cast), dlse))

    got = run(function, dtype)
    ref = run(lambda **x: attention(**x, impl="reference"), torch.float32)
    low = run(lambda **x: attention(**x, impl="reference"), dtype)
    lows = {} if dtype == torch.float32 else {"low": low[0].out}
    assert_close("out", got[0].out, ref[0].out, rtol=TOLERANCE[dtype], **lows)
    if dlse is not None:
        assert got[0].lse.dtype == torch.float32
        assert_close("lse", got[0].lse, ref[0].lse, rtol=max(TOLERANCE[dtype] / 5, 1e-5))
    for name in inputs:
        lows = {} if dtype == torch.float32 else {"low": low[1][name]}
        assert_close(
            f"d{name}", got[1][name], ref[1][name], rtol=TOLERANCE[dtype], atol=1e-6, **lows
        )


@pytest.fixture
def fresh_compiler():
    """Every row compiles kernels of its own, and the compiler gives up after eight."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUDA_OPTIONS)
@pytest.mark.parametrize("impl", ["sdpa", "flex"])
def test_cuda_backends_equal_the_reference(impl, name, dtype, fresh_compiler):
    check_on_cuda(lambda **x: attention(**x, impl=impl), on_cuda(CUDA_OPTIONS[name]), dtype)


@pytest.mark.gpu
def test_cuda_sdpa_takes_more_rows_than_a_grid_has():
    x, _ = problem(B=65_536, T=2, HQ=1)
    x = {name: t.cuda().bfloat16().requires_grad_() for name, t in x.items()}
    out = attention(**x, impl="sdpa").out
    last = attention(**{name: t[-9:] for name, t in x.items()}, impl="sdpa").out
    assert_close("out", out[-9:], last, rtol=5e-3)
    out.sum().backward()  # the weights of a value sum up to one for each query
    dv = x["v"].grad.sum(1)
    assert_close("dv", dv, torch.full_like(dv, 2.0), rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "alibi window"])
def test_cuda_positions_equal_the_reference(name, dtype, fresh_compiler):
    options = on_cuda(CUDA_OPTIONS[name]) | at_positions(520, 700, "cuda")
    check_on_cuda(lambda **x: attention(**x, impl="flex"), options, dtype, S=700)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "alibi window"])
def test_cuda_float16_equals_the_reference(name, fresh_compiler):
    check_on_cuda(attention, on_cuda(CUDA_OPTIONS[name]), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "alibi window", "packed"])
def test_cuda_lse_and_its_gradient_equal_the_reference(name, dtype, fresh_compiler):
    options = on_cuda(CUDA_OPTIONS[name]) | {"return_lse": True}
    check_on_cuda(lambda **x: attention(**x, impl="flex"), options, dtype)


def flash(**x):
    return attention(**x, impl="flash")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CUDA_OPTIONS)
def test_flash_attn_equals_the_reference(name, dtype):
    if not (flash4.INSTALLED and "alibi" not in name):
        pytest.importorskip("flash_attn.flash_attn_interface")
    check_on_cuda(flash, on_cuda(CUDA_OPTIONS[name]), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not flash4.INSTALLED, reason="needs flash-attn-4")
@pytest.mark.parametrize("name", ["causal", "window", "packed window"])
def test_flash_attn_4_has_an_lse_compiles_and_repeats_to_the_bit(name, fresh_compiler):
    options = on_cuda(CUDA_OPTIONS[name]) | {"return_lse": True}
    check_on_cuda(flash, options, torch.bfloat16)
    inputs, dout = problem(B=1, T=1500, H=2, D=64, dtype=torch.bfloat16, device="cuda")
    if "cu_seqlens" in options:
        options["cu_seqlens"] = borders([900, 0, 600], device="cuda")
    del options["return_lse"]
    runs = (attention, flash, torch.compile(attention, fullgraph=True))
    wanted, *others = (grads(partial(run, **options), inputs, (dout, None)) for run in runs)
    for out, found in others:
        assert torch.equal(out.out, wanted[0].out)
        assert all(torch.equal(found[name], wanted[1][name]) for name in found)
    if name == "causal":
        places = (inputs["q"], inputs["k"], inputs["v"], None, 0.125, True, None)
        torch.library.opcheck(flash4._flash_attention_4, places)


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "H"), [(16, 2), (32, 2), (128, 4), (128, 1), (256, 2)])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_cuda_widths_and_groups_equal_the_reference(name, D, H, fresh_compiler):
    check_on_cuda(attention, on_cuda(CUDA_OPTIONS[name]), torch.bfloat16, H=H, D=D)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 63, 127, 128, 1000])
def test_cuda_lengths_equal_the_reference(T, fresh_compiler):
    # Many rows, so that at T = 2 too the error in norm is a mean over enough rounding errors.
    check_on_cuda(attention, {"window_size": 50}, torch.bfloat16, B=32, T=T)
    check_on_cuda(attention, {}, torch.bfloat16, B=32, T=T)
    # ALiBi at widths for which flex has no kernel, and at lengths for which it has none.
    check_on_cuda(attention, on_cuda(CUDA_OPTIONS["alibi"]), torch.bfloat16, B=32, T=T, D=8)


@pytest.mark.gpu
@pytest.mark.any_shapes
@pytest.mark.parametrize(
    ("name", "lse"),
    [("causal", False), ("window", False), ("alibi", False), ("packed", False), ("window", True)],
)
def test_cuda_attention_compiles_into_one_graph(name, lse, fresh_compiler):
    options = on_cuda(CUDA_OPTIONS[name]) | {"return_lse": lse}
    check_on_cuda(torch.compile(attention, fullgraph=True), options, torch.bfloat16)


@pytest.mark.gpu
def test_cuda_decoding_under_a_mask_equals_the_reference():
    for dtype, rtol in TOLERANCE.items():
        inputs, _ = problem(T=1, S=300, H=2, D=64, dtype=dtype, device="cuda")
        where = {
            "q_positions": torch.tensor([[299], [40]], device="cuda"),
            "k_positions": torch.arange(300, device="cuda") - torch.tensor([[0], [259]]).cuda(),
        }
        ref = attention(**{n: x.float() for n, x in inputs.items()}, **where, impl="reference")
        assert_close("out", attention(**inputs, **where).out, ref.out, rtol=rtol)


@pytest.mark.gpu
def test_cuda_queries_that_see_nothing_get_zero(fresh_compiler):
    inputs, dout = problem(T=400, S=200, D=64, dtype=torch.bfloat16, device="cuda")
    for impl in ("auto", "flex", "sdpa", "reference"):
        out, gradients = grads(
            lambda i=impl, **x: attention(**x, causal=False, window_size=50, impl=i).out,
            inputs,
            dout,
        )
        assert torch.equal(out[:, 249:], torch.zeros_like(out[:, 249:])), impl
        assert all(gradient.isfinite().all() for gradient in gradients.values()), impl


@pytest.mark.gpu
def test_a_mask_made_in_inference_mode_serves_training(fresh_compiler):
    inputs, dout = problem(T=384, D=64, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        attention(**inputs, window_size=77)
    grads(lambda **x: attention(**x, window_size=77).out, inputs, dout)


@pytest.mark.gpu
@pytest.mark.any_shapes
@pytest.mark.parametrize("num_heads", [10, 12, 22])
def test_slopes_computed_in_the_graph_compile(num_heads):
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, 300, num_heads, 32, device="cuda").unbind(0)

    def attend(q, k, v):
        return attention(q, k, v, alibi_slopes=2 * alibi_slopes(num_heads, device="cuda")).out

    out = torch.compile(attend, fullgraph=True)(q, k, v)
    assert_close("out", out, attend(q, k, v), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"window_size": 9}, {"cu_seqlens": [0, 100, 150]}])
@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa", "flex"])
def test_cuda_a_lost_key_reaches_the_queries_that_see_it_alone(impl, options, dtype):
    inputs, _ = problem(B=1, T=150, D=64, dtype=dtype, device="cuda")
    packed = "cu_seqlens" in options
    call = {"cu_seqlens": borders([100, 50], "cuda")} if packed else options
    clean = attention(**inputs, **call, impl=impl).out
    others = [*range(70), *range(100 if packed else 79, 150)]
    for bad in (float("nan"), float("inf"), torch.finfo(dtype).max / 4):
        k = inputs["k"].clone()
        k[0, 70, -1] = bad
        out = attention(**{**inputs, "k": k}, **call, impl=impl).out
        assert torch.equal(out[:, others], clean[:, others]), bad
