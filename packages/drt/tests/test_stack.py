"""The stack computes what the paper defines, written here once more as plain loops."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.positions import apply_rope, rope_angles
from mezzo_core.testing.laws import check_packed, check_segments, check_step
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig
from torch import nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

C, L, R, W, D = 12, 4, 2, 7, 6
CONFIG = DRTConfig(
    num_layers=4, num_groups=2, chunk_size=L, num_retrieved=R, window_size=W, head_dim=D,
    hidden=20, num_encoder_layers=2,
)  # fmt: skip
FORMS = {
    "default": CONFIG,
    "one group": replace(CONFIG, num_groups=1),
    "as released": replace(CONFIG, projections=False),
    "text": replace(CONFIG, residual="text"),
    "softmax, three heads": replace(CONFIG, softmax1=False, head_dim=4),
    "fixed": replace(CONFIG, retriever="fixed"),
}


def build(config, dtype=torch.float64):
    torch.manual_seed(0)
    stack = config.build(C)
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        elif isinstance(module, nn.RMSNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.2)
    return stack.to(dtype).eval()


def define(stack, x):
    """Return the stack's outputs for one sequence x (T, C), place by place."""
    config, D = stack.config, stack.config.head_dim
    H = C // D
    stream = []
    for t, token in enumerate(x):
        stream.append(token)
        if t % L == L - 1:
            stream.append(stack.landmark.weight[0])
    P, M = len(stream), L + 1
    N = P // M  # complete chunks

    def window(attention, z):
        q, k, v = (
            [w(row).view(H, D) for row in z] for w in (attention.wq, attention.wk, attention.wv)
        )
        rows = []
        for i in range(P):
            heads = []
            for head in range(H):
                seen = range(max(0, i - W + 1), i + 1)
                slope = 2 ** (-8 * (head + 1) / H)
                s = [q[i][head] @ k[j][head] / D**0.5 - slope * (i - j) for j in seen]
                p = torch.stack(s).softmax(0)
                heads.append(sum(w * v[j][head] for w, j in zip(p, seen, strict=True)))
            rows.append(attention.wo(torch.cat(heads)))
        return rows

    for block in stack.lower:
        mixed = window(block.mixer, [block.mixer_norm(row) for row in stream])
        stream = [h + m for h, m in zip(stream, mixed, strict=True)]
        stream = [h + block.mlp(block.mlp_norm(h)) for h in stream]

    keys, k, v = [], [], []
    for n in range(N):
        lower = torch.stack(stream[n * M : n * M + M])
        c = stack.encoder.input_norm(lower)
        for layer in stack.encoder.layers:
            z = layer.attention_norm(c)
            q_, k_, v_ = (w(z).view(1, M, H, D) for w in (layer.wq, layer.wk, layer.wv))
            angles = rope_angles(torch.arange(M), D, 10_000.0, dtype=z.dtype)
            q_, k_ = apply_rope(q_, *angles), apply_rope(k_, *angles)
            p = (torch.einsum("bthd,bshd->bhts", q_, k_) / D**0.5).softmax(-1)
            c = c + layer.wo(torch.einsum("bhts,bshd->bthd", p, v_).flatten(2)[0])
            c = c + layer.mlp(layer.mlp_norm(c))
        c = stack.encoder.norm(c)
        k.append(stack.encoder.wk(c[:L]).view(L, H, D))
        v.append(stack.encoder.wv(c[:L]).view(L, H, D))
        keys.append(
            rms_norm(lower[:L].mean(0), (C,), eps=1e-6)
            if config.retriever == "fixed"
            else stack.encoder.wl(c[L])
            if config.projections
            else c[L]
        )

    size = len(stack.upper) // config.num_groups
    for i, layer in enumerate(stack.upper):
        if i % size == 0:
            reads = {0: []}  # for each chunk, the chunks that it reads and their weights
            for n in range(N):
                h = stream[n * M + L]
                query = keys[n] if config.retriever == "fixed" else stack.queries[i // size](h)
                r = {j: float(query @ keys[j]) / math.sqrt(C) for j in range(n)}
                best = sorted(r, key=r.__getitem__, reverse=True)[:R]
                total = sum(math.exp(r[j]) for j in best)
                reads[n + 1] = [(j, math.exp(r[j]) / total) for j in best]
        mixed = window(layer.attention, [layer.attention_norm(row) for row in stream])
        after = []
        for place, (h, m) in enumerate(zip(stream, mixed, strict=True)):
            u = h + m
            q = layer.wq(layer.cross_norm(u)).view(H, D)
            read = torch.zeros(H, D, dtype=u.dtype)
            for j, w in reads[place // M]:
                e = torch.einsum("hd,lhd->hl", q, k[j]).div(D**0.5).exp()
                p = e / (e.sum(-1, keepdim=True) + config.softmax1)
                read += w * torch.einsum("hl,lhd->hd", p, v[j])
            o = layer.wo(read.flatten())
            base = u if config.residual == "released" else u + o
            after.append(base + layer.mlp(layer.mlp_norm(u + o)))
        stream = after
    return torch.stack([row for place, row in enumerate(stream) if place % M < L])


@pytest.mark.parametrize("form", FORMS)
def test_the_stack_is_what_the_paper_defines(form):
    stack = build(FORMS[form])
    x = torch.randn(1, 7 * L + 2, C, dtype=torch.float64)
    with torch.no_grad():
        assert_close("outputs", stack(x)[0][0], define(stack, x[0]), rtol=1e-10)


def test_norms_have_the_epsilon_that_is_told_but_for_those_within_the_encoder():
    stack = build(replace(CONFIG, projections=False, num_encoder_layers=1, norm_eps=0.25))
    assert len(stack.encoder.layers) == 1
    for name, norm in stack.named_modules():
        if isinstance(norm, nn.RMSNorm):
            is_within = name.startswith("encoder.") and name != "encoder.input_norm"
            assert norm.eps == (1e-6 if is_within else 0.25), name


def test_a_token_reads_far_beyond_the_window_but_not_before_the_third_chunk():
    """Otherwise a stack without retrieval could pass."""
    stack = build(CONFIG)
    x = torch.randn(1, 40 * L, C, dtype=torch.float64, requires_grad=True)
    y, _ = stack(x)
    # Each of four layers reaches W - 1 places back, so far less than 30 chunks.
    (dx,) = torch.autograd.grad(y[0, -1].sum(), x)
    assert (dx[0, : 30 * L] != 0).any()
    # Without any window, what comes from another chunk was read.
    alone = build(replace(CONFIG, window_size=1))
    for chunk in range(4):
        y, _ = alone(x[:, : (chunk + 1) * L])
        (dx,) = torch.autograd.grad(y[0, -1].sum(), x)
        assert bool((dx[0, : chunk * L] != 0).any()) == (chunk >= 2)


@pytest.mark.parametrize("form", ["default", "as released"])
def test_gradients_reach_every_weight_and_are_finite(form):
    stack = build(FORMS[form]).train()
    x = torch.randn(2, 8 * L + 1, C, dtype=torch.float64, requires_grad=True)
    y, _ = stack(x)
    y.square().sum().backward()
    for name, weight in stack.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert (weight.grad != 0).any(), name
    assert x.grad.isfinite().all()


def test_gradients_are_those_of_finite_differences():
    stack = build(replace(CONFIG, num_layers=2, num_groups=1, num_encoder_layers=1))
    x = 0.5 * torch.randn(1, 4 * L, C, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stack(x)[0], x, fast_mode=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_units_that_are_computed_twice_have_the_same_gradients(reentrant):
    stack = build(CONFIG)
    x = torch.randn(2, 5 * L + 1, C, dtype=torch.float64)

    def again(forward, *tensors, **named):
        return checkpoint(partial(forward, **named), *tensors, use_reentrant=reentrant)

    def gradients():
        stack.zero_grad()
        inputs = x.clone().requires_grad_()
        stack(inputs)[0].square().sum().backward()
        return [inputs.grad, *(weight.grad for weight in stack.parameters())]

    inside = {weight for unit in stack.units() for weight in unit.parameters()}
    outside = {name for name, weight in stack.named_parameters() if weight not in inside}
    assert {name.split(".")[0] for name in outside} == {"landmark", "queries"}
    wanted = gradients()
    for unit in stack.units():
        unit.forward = partial(again, unit.forward)
    torch.testing.assert_close(gradients(), wanted)


def test_gradients_of_each_row_may_be_taken_by_vmap():
    stack, x = build(CONFIG), torch.randn(3, 5 * L, C, dtype=torch.float64)
    weights = dict(stack.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(stack, weights, (row[None],))[0].square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i, row in enumerate(x):
        alone = torch.autograd.grad(loss(weights, row), weights.values())
        for name, gradient in zip(weights, alone, strict=True):
            assert_close(name, found[name][i], gradient, rtol=1e-10)


def test_fixed_keys_are_not_trained_by_the_retrieval():
    encoder = DRTConfig(num_layers=2, head_dim=4, retriever="fixed").build(8).encoder
    memory = encoder(torch.randn(1, 2, 5, 8, requires_grad=True))
    assert [part.requires_grad for part in memory] == [False, True, True]


def test_only_training_with_noise_explores():
    x = torch.randn(1, 30 * L, C, dtype=torch.float64)
    with torch.no_grad():
        for noise, training in ((True, True), (True, False), (False, True)):
            stack = build(replace(CONFIG, gumbel_noise=noise)).train(training)
            torch.manual_seed(1)
            first, second = stack(x)[0], stack(x)[0]
            assert torch.equal(first, second) != (noise and training)
            torch.manual_seed(1)
            assert torch.equal(stack(x)[0], first), "a seed repeats a run"


def test_random_and_fixed_retrievers_are_trained_by_their_own_rules():
    x = torch.randn(1, 9 * L, C, dtype=torch.float64)
    fixed = build(FORMS["fixed"])
    assert fixed.encoder.wl is None
    assert len(fixed.queries) == 0
    random = build(replace(CONFIG, retriever="random"))
    y, state = random(x, random.init_state(1))
    assert not torch.equal(*state.indices[0]), "each group chooses other chunks"
    y.square().sum().backward()
    assert (random.encoder.wl.weight.grad != 0).any()


@pytest.mark.parametrize("splits", [(37,), (5, 1, 0, 20, 11), (4, 4, 8, 21), (3,) * 12 + (1,)])
def test_every_segmentation_of_many_chunks_is_the_whole(splits):
    check_segments(build(CONFIG, torch.float32), num_tokens=37, splits=splits, batch=3)


@pytest.mark.parametrize("prompts", [(0, 4, 8, 9), (30, 31, 32, 33), (1,), (12,), (11, 11)])
def test_rows_decode_across_many_chunks_as_alone(prompts):
    check_step(build(CONFIG, torch.float32), prompts, 27)


@pytest.mark.parametrize("lengths", [(17, 33, 4, 5), (1,) * 20, (0, 0, 40), (4, 8, 16, 0)])
def test_packed_documents_read_nothing_of_each_other(lengths):
    check_packed(build(CONFIG, torch.float32), lengths)


def test_rows_with_landmarks_to_come_go_on_by_forward():
    """A step leaves the landmark to `before_step`; a forward must run it, in some rows or all."""
    stack = build(CONFIG, torch.float32)
    x = torch.randn(2, 5 * L, C)
    with torch.no_grad():
        whole, _ = stack(x)
        lengths = torch.tensor([2 * L - 1, 2 * L - 2])
        _, state = stack(x[:, : 2 * L], stack.init_state(2), lengths=lengths)
        state = stack.reserve(state, 1)
        rows = torch.arange(2)
        stack.before_step(state)
        stack.step(x[rows, lengths][:, None], state)
        assert (state.num_places() % (L + 1)).tolist() == [L, L - 1]
        with pytest.raises(ValueError, match="call before_step first"):
            stack.step(x[:, :1], state)
        rest = torch.stack([x[b, n + 1 : n + 1 + L + 2] for b, n in enumerate(lengths)])
        y, _ = stack(rest, state)
        for b, n in enumerate(lengths + 1):
            assert_close(f"row {b}", y[b], whole[b, n : n + L + 2], rtol=1e-5)


def test_steps_beyond_the_room_are_refused():
    stack = build(CONFIG, torch.float32)
    with torch.no_grad():
        state = stack.reserve(stack.init_state(1), 2 * L)
        for _ in range(2 * L):
            stack.before_step(state)
            stack.step(torch.randn(1, 1, C), state)
        with pytest.raises(ValueError, match="call before_step first"):
            stack.step(torch.randn(1, 1, C), state)
        for _ in range(L):
            stack.before_step(state)
            stack.step(torch.randn(1, 1, C), state)
        with pytest.raises(ValueError, match="room for 2 chunks"):
            stack.before_step(state)


@pytest.mark.parametrize("window", [W, 100])
def test_a_row_without_room_keeps_its_chunks_when_another_row_stores_one(window):
    stack = build(replace(CONFIG, window_size=window), torch.float32)
    x, lengths = torch.randn(2, 2 * L, C), torch.tensor([2 * L, L + 1])
    with torch.no_grad():
        _, state = stack(x, stack.init_state(2), lengths=lengths)
        state = stack.reserve(state, L - 1)
        kept = [part[0].clone() for part in state.memory]
        for t in range(L - 1):
            stack.before_step(state)
            stack.step(x[:, t : t + 1], state)
        stack.before_step(state)
    assert all(map(torch.equal, kept, (part[0] for part in state.memory)))


@pytest.mark.parametrize("d_model", [0, -C, "12"])
def test_a_width_that_is_none_is_refused(d_model):
    with pytest.raises((ValueError, TypeError), match="DRT: d_model must be"):
        CONFIG.build(d_model)


def test_groups_must_divide_the_upper_half():
    with pytest.raises(ValueError, match="num_groups must divide its half, got 12 and 4"):
        DRTConfig(num_layers=12, num_groups=4)


def test_the_window_caches_never_exceed_the_window():
    stack = build(CONFIG, torch.float32)
    with torch.no_grad():
        _, state = stack(torch.randn(1, 50, C), stack.init_state(1))
        state = stack.reserve(state, 50)
    assert {cache.k.shape[1] for cache in state.caches} == {W}


@pytest.mark.parametrize(("projections", "millions"), [(False, 146), (True, 147)])
def test_the_papers_128m_model_has_its_number_of_weights(projections, millions):
    """146M with embeddings and encoder, where landmarks are compared without projections."""
    with torch.device("meta"):
        model = LMConfig(50_265, 768, stack=DRTConfig(projections=projections)).build()
    assert round(model.num_parameters() / 1e6) == millions


@pytest.mark.parametrize(("fields", "T"), [({}, 1280), ({"num_retrieved": 9}, 128), ({}, 16)])
def test_flops_are_those_that_torch_counts(fields, T):
    """Torch's counter misses the products of attention, and counts masked ones in the op.

    It also counts the weighted sum of the chunks, which `flops_per_token` leaves out.
    """
    config = replace(CONFIG, chunk_size=16, num_layers=4, num_groups=2, hidden=40, **fields)
    stack, (C, L, R) = config.build(48), (48, 16, config.num_retrieved)
    N = T // L
    places = T + N
    attention = AttentionConfig(D, window_size=W, rope_base=None, alibi="olmo").build(C)
    weights = 2 * sum(weight.numel() for weight in attention.parameters())
    unseen = config.num_layers * (attention.flops_per_token(places) - weights) * places
    unseen += config.num_encoder_layers * 4 * C * (L + 1) * places
    read = [min(R, max(n - 1, 0)) for n in range(N)]
    masked = 2 * 4 * C * L * (L + 1) * sum(R - r for r in read)
    masked += 2 * 2 * C * sum(N - n for n in range(N))
    weighed = 2 * 2 * C * R * places
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        stack(torch.randn(1, T, C))
    products = counter.get_total_flops() + unseen - masked - weighed
    assert stack.flops_per_token(T) * T == pytest.approx(products, rel=1e-9)


def test_flops_of_a_chunk_that_is_open_are_those_of_its_tokens():
    stack = replace(CONFIG, chunk_size=16, num_retrieved=2).build(C)
    told = [stack.flops_per_token(T) * T for T in range(47, 50)]
    before, landmark, after = told[0], told[1] - told[0], told[2] - told[1]
    assert before > landmark > after > 0


@torch.inference_mode()
def test_a_state_of_another_dtype_goes_on_step_by_step():
    x = torch.randn(2, 3 * L + 2, C)
    for first, then in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        _, state = build(CONFIG, first)(x[:, :L].to(first), build(CONFIG, first).init_state(2))
        stack = build(CONFIG, then)
        expected, _ = stack(x[:, L:].to(then), state)
        state = stack.reserve(state, 2 * L + 2)
        for t in range(2 * L + 2):
            stack.before_step(state)
            y = stack.step(x[:, L + t, None].to(then), state)
            assert y.dtype == then
            torch.testing.assert_close(y[:, 0], expected[:, t], rtol=0.1, atol=0.1)
