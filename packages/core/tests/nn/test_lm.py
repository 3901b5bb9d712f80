from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.block import MixerBlockConfig
from mezzo_core.nn.generate import generate
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

few = settings(
    max_examples=settings().max_examples // 6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def tokens_of(*shape, seed=1, vocab=37):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def run_in_segments(model, tokens, splits):
    state = model.init_state(tokens.shape[0])
    outputs = []
    for segment in tokens.split(splits, dim=1):
        logits, state = model(segment, state)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def weights_expected(config, mixer_weights, mlp_weights):
    block = mixer_weights + mlp_weights + 2 * config.d_model
    matrices = 1 if config.tie_embeddings else 2
    return (
        len(config.mixers) * block
        + config.d_model
        + (matrices * config.vocab_size * config.d_model)
    )


# --- counting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("kind", "matrices"), [("gelu", 2), ("swiglu", 3)])
def test_parameters_are_those_of_the_formula(config, tie, kind, matrices):
    config = replace(config, tie_embeddings=tie, mlp=MLPConfig(kind, hidden=24))
    model, C = config.build(), config.d_model
    expected = weights_expected(config, 2 * C * C + 2 * C, matrices * C * 24)
    assert model.num_parameters() == expected
    assert model.num_parameters(embeddings=False) == expected - (1 if tie else 2) * 37 * C


def test_a_model_of_1300_million_is_counted_without_memory():
    config = LMConfig(vocab_size=32_000, d_model=2048, mixers=(AttentionConfig(head_dim=128),) * 24)
    with torch.device("meta"):
        model = config.build()
    assert all(weight.is_meta for weight in model.parameters())
    C = config.d_model
    assert model.num_parameters() == weights_expected(config, 4 * C * C, 8 * C * C)
    assert 1.2e9 < model.num_parameters() < 1.4e9


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_flops_are_those_that_torch_counts(config, kind):
    model = replace(config, mlp=MLPConfig(kind)).build()
    tokens = tokens_of(3, 7)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    assert counter.get_total_flops() == 21 * model.flops_per_token(7)


def test_state_bytes_are_those_of_the_state(model):
    _, state = model(tokens_of(1, 9), model.init_state(1))
    assert model.state_bytes(9) == sum(t.nbytes for block in state for t in block)


def test_the_default_width_of_the_mlp_is_that_of_its_kind():
    assert MLPConfig("gelu").hidden_width(2048) == 8192
    assert MLPConfig("swiglu").hidden_width(2048) == 5632
    assert MLPConfig("swiglu").hidden_width(96) == 256  # 8C / 3 is exactly a multiple
    assert MLPConfig("swiglu", hidden=10).hidden_width(2048) == 10


# --- one law ----------------------------------------------------------------------------------


@few
@given(splits=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_segments_through_the_state_equal_the_whole(model, splits):
    tokens = tokens_of(2, sum(splits))
    with torch.no_grad():
        whole = model(tokens).logits
        assert_close("segments", run_in_segments(model, tokens, splits), whole, rtol=1e-5)
        steps = run_in_segments(model, tokens, [1] * sum(splits))
        assert_close("steps", steps, whole, rtol=1e-5)


@few
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
def test_packed_sequences_equal_each_alone(model, lengths):
    tokens = tokens_of(1, sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        packed = model(tokens, cu_seqlens=cu_seqlens).logits
        alone = [model(part).logits for part in tokens.split(lengths, dim=1) if part.numel()]
    assert_close("packed", packed, torch.cat(alone, dim=1), rtol=1e-5)


def test_a_change_leaves_the_past_bit_equal(model):
    tokens = tokens_of(2, 10)
    other = tokens.clone()
    other[:, 6] = (other[:, 6] + 1) % 37
    before, after = model(tokens).logits, model(other).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


@few
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_last_only_gives_the_last_real_token_of_each_row(model, lengths):
    tokens = tokens_of(len(lengths), max(lengths))
    real = torch.tensor(lengths)
    with torch.no_grad():
        state = model.init_state(len(lengths))
        full = model(tokens, state, lengths=real).logits
        last = model(tokens, state, lengths=real, last_only=True).logits
    expected = torch.stack([row[n - 1] for row, n in zip(full, lengths, strict=True)])[:, None]
    assert_close("last", last, expected, rtol=1e-5)


def test_last_only_without_lengths_is_the_last_position(model):
    tokens = tokens_of(2, 5)
    last, whole = model(tokens, last_only=True), model(tokens)
    assert_close("last", last.logits, whole.logits[:, -1:], rtol=1e-5)
    assert last.state is whole.state is None


def test_a_block_is_two_residual_lines(model):
    block = model.stack.blocks[0]
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    y, _ = block(x)
    x = x + block.mixer(F.rms_norm(x, (16,), eps=1e-6))[0]
    up, down = block.mlp.up.weight, block.mlp.down.weight
    hidden = F.rms_norm(x, (16,), eps=1e-6) @ up.T
    gelu = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    assert_close("block", y, x + gelu @ down.T, rtol=1e-5)


def test_swiglu_is_its_formula():
    mlp = MLPConfig("swiglu", hidden=24).build(16)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down.weight.T
    assert_close("swiglu", mlp(x), expected, rtol=1e-5)


# --- loss and gradients -----------------------------------------------------------------------


def test_the_loss_is_the_mean_surprise_at_the_targets_that_count(model):
    tokens, targets = tokens_of(2, 6), tokens_of(2, 6, seed=2)
    targets[0, 3:] = -100
    surprises = [
        -F.log_softmax(model(tokens).logits[b, t].double(), dim=-1)[targets[b, t]]
        for b in range(2)
        for t in range(6)
        if targets[b, t] != -100
    ]
    total = torch.stack(surprises).sum()
    assert len(surprises) == 9
    torch.testing.assert_close(model.loss(tokens, targets).double(), total / 9)
    torch.testing.assert_close(model.loss(tokens, targets, reduction="sum").double(), total)


def test_the_loss_at_places_is_that_of_their_targets_with_all_gradients(model):
    tokens, targets = tokens_of(2, 6), tokens_of(2, 6, seed=2)
    places = torch.tensor([1, 4, 5, 9])
    only = torch.full_like(targets, -100)
    only.view(-1)[places] = targets.view(-1)[places]
    for reduction in ("mean", "sum"):
        wanted = model.loss(tokens, only, reduction=reduction)
        found = model.loss(tokens, targets, places=places, reduction=reduction)
        torch.testing.assert_close(found, wanted)
        wanted_grads = grads_of(model, wanted)
        for name, grad in grads_of(model, found).items():
            assert_close(name, grad, wanted_grads[name], rtol=1e-5, atol=1e-7)
    assert model.loss(tokens, targets, places=places[:0]) == 0


def test_places_that_are_none_are_named(model):
    tokens = tokens_of(2, 6)
    for wrong in ([1], torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises((TypeError, ValueError), match="places must be"):
            model.loss(tokens, tokens, places=wrong)


def test_the_loss_of_packed_sequences_is_that_of_each_alone(model):
    tokens, targets = tokens_of(1, 9), tokens_of(1, 9, seed=2)
    packed = model.loss(tokens, targets, torch.tensor([0, 4, 9, 9]), reduction="sum")
    alone = sum(
        model.loss(tokens[:, part], targets[:, part], reduction="sum")
        for part in (slice(0, 4), slice(4, 9))
    )
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_the_scores_of_segments_add_up_to_the_whole_with_all_gradients(model, size):
    tokens, targets = torch.randint(37, (2, 2, 11))
    targets[0, 3:5] = -100
    whole, parts, state = model.score(tokens, targets), [], model.init_state(2)
    for segment, its_targets in zip(tokens.split(size, 1), targets.split(size, 1), strict=True):
        parts.append(model.score(segment, its_targets, state=state))
        state = parts[-1].state
    loss = sum(part.loss for part in parts)
    torch.testing.assert_close(loss, whole.loss)
    assert sum(part.targets for part in parts) == whole.targets == 20
    assert torch.equal(torch.cat([part.hits for part in parts], 1), whole.hits)
    weights = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, weights),
        torch.autograd.grad(whole.loss, weights),
        rtol=1e-4,
        atol=1e-5,
    )


def test_padding_has_no_targets(model):
    tokens, targets = torch.randint(37, (2, 3, 5))
    lengths = torch.tensor([5, 2, 0])
    score = model.score(tokens, targets, state=model.init_state(3), lengths=lengths)
    rows = [model.score(tokens[i : i + 1, :n], targets[i : i + 1, :n]) for i, n in ((0, 5), (1, 2))]
    torch.testing.assert_close(score.loss, sum(row.loss for row in rows))
    assert score.targets == 7


def test_hits_are_the_targets_of_largest_logit(model):
    tokens = torch.randint(37, (2, 9))
    best = model(tokens).logits.argmax(-1)
    targets = best.clone()
    targets[0, :4], targets[1, 0] = -100, (best[1, 0] + 1) % 37
    score = model.score(tokens, targets)
    assert torch.equal(score.hits, best == targets)
    assert (score.hits.sum(), score.targets) == (13, 14)


def test_a_head_that_does_more_is_asked_for_its_logits(model):
    tokens, targets = torch.randint(37, (2, 2, 9))
    plain = model.loss(tokens, targets)
    model.head.register_forward_hook(lambda *call: 2 * call[-1])
    logits = model(tokens).logits.flatten(0, 1)
    torch.testing.assert_close(
        model.loss(tokens, targets), torch.nn.functional.cross_entropy(logits, targets.flatten())
    )
    assert model.loss(tokens, targets) != plain


def test_a_wrapped_embedding_and_head_are_known_by_their_model(model):
    """As an adapter wraps them."""
    tokens = tokens_of(2, 5)
    logits, tied = model(tokens).logits, model.head.weight is model.embed.weight
    model.embed, model.head = torch.nn.Sequential(model.embed), torch.nn.Sequential(model.head)
    assert torch.equal(model(tokens).logits, logits)
    assert model.loss(tokens, tokens).isfinite()
    assert len(generate(model, [[1, 2]], max_new_tokens=3)[0]) == 3
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 37\)"):
        model(tokens + 37)
    whole, rest = model.num_parameters(), model.num_parameters(embeddings=False)
    assert whole - rest == (1 if tied else 2) * 37 * model.stack.d_model
    assert model.flops_per_token(5) == model.stack.flops_per_token(5) + 2 * 37 * model.stack.d_model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("tie", [True, False])
def test_weights_that_are_loaded_or_made_anew_stay_tied(config, tie, assign):
    config = replace(config, tie_embeddings=tie)
    source = config.build()
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    assert (model.head.weight is model.embed.weight) == tie
    outer = torch.nn.ModuleList([deepcopy(model)])  # as a wrapper loads its parts
    outer.load_state_dict({f"0.{k}": w for k, w in source.state_dict().items()}, assign=assign)
    assert (outer[0].head.weight is outer[0].embed.weight) == tie
    tokens = tokens_of(1, 5)
    assert torch.equal(outer[0](tokens).logits, source(tokens).logits)


def test_a_head_that_was_untied_stays_so(config):
    model = config.build()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    model.load_state_dict(config.build().state_dict(), assign=True)
    model.to(torch.float64)
    assert model.head.weight is not model.embed.weight


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_hook_on_the_head_s_backward_is_called(model, register):
    """Users register such hooks to watch or change the gradients of every module."""
    calls = []
    getattr(model.head, register)(lambda *call: calls.append(call[0]))
    model.loss(tokens_of(2, 5), tokens_of(2, 5)).backward()
    assert calls == [model.head]


def test_a_batch_without_targets_has_loss_zero_and_no_gradient(model):
    tokens = tokens_of(2, 5)
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(weight.grad.abs().max() == 0 for weight in model.parameters())


@pytest.mark.parametrize("tie", [True, False])
def test_gradient_reaches_every_parameter(config, tie):
    torch.manual_seed(0)
    model = replace(config, tie_embeddings=tie, mlp=MLPConfig("swiglu", hidden=24)).build()
    model.loss(tokens_of(4, 12), tokens_of(4, 12, seed=2)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.norm() > 0, name


def test_a_tied_head_is_the_embedding(config):
    tied, untied = config.build(), replace(config, tie_embeddings=False).build()
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


# --- precision --------------------------------------------------------------------------------


def test_under_autocast_the_residual_and_the_loss_stay_float32(model):
    seen = {}

    def note(name):
        return lambda _, inputs, output: seen.update({name: (inputs[0].dtype, output)})

    model.norm.register_forward_hook(note("final norm"))
    model.stack.blocks[0].mlp.register_forward_hook(note("mlp"))
    tokens, targets = tokens_of(2, 8), tokens_of(2, 8, seed=2)
    reference = model.loss(tokens, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).logits.dtype == torch.bfloat16
        loss = model.loss(tokens, targets)
    assert seen["final norm"][0] == torch.float32
    assert seen["mlp"][1].dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference, rtol=2e-2, atol=0)


def test_a_model_cast_to_bfloat16_runs_in_it(model):
    model.bfloat16()
    assert model(tokens_of(2, 8), model.init_state(2)).logits.dtype == torch.bfloat16
    assert model.loss(tokens_of(2, 8), tokens_of(2, 8)).dtype == torch.float32


def test_the_norm_of_bfloat16_is_computed_in_float32(model):
    norm = model.norm.bfloat16()
    x = (30 * torch.randn(5, 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), exact.bfloat16())


# --- torch.compile ----------------------------------------------------------------------------


def call_plain(model):
    return model(tokens_of(2, 7))


def call_ragged(model):
    return model(tokens_of(2, 7), model.init_state(2), lengths=torch.tensor([7, 3]), last_only=True)


def call_packed(model):
    return model(tokens_of(1, 9), cu_seqlens=torch.tensor([0, 4, 4, 9]))


@pytest.mark.parametrize("call", [call_plain, call_ragged, call_packed])
def test_the_model_compiles_as_one_graph(model, call):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, out = call(model), call(compiled)
    assert_close("logits", out.logits, expected.logits, rtol=1e-5)
    for block, expected_block in zip(out.state or (), expected.state or (), strict=True):
        for tensor, expected_tensor in zip(block, expected_block, strict=True):
            assert_close("state", tensor.float(), expected_tensor.float(), rtol=1e-5)


def grads_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_compiles_as_one_graph_with_its_gradients(config, packed):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = replace(config, mixers=(AttentionConfig(head_dim=8),)).build()
    tokens, targets = tokens_of(1, 9), tokens_of(1, 9, seed=2)
    targets[0, 2] = -100
    cu_seqlens = torch.tensor([0, 4, 9]) if packed else None
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    for places in (None, torch.tensor([0, 3, 8])):
        expected = model.loss(tokens, targets, cu_seqlens, places)
        loss = compiled(tokens, targets, cu_seqlens, places)
        torch.testing.assert_close(loss, expected)
        expected_grads, compiled_grads = grads_of(model, expected), grads_of(model, loss)
        for name, grad in compiled_grads.items():
            assert_close(name, grad, expected_grads[name], rtol=1e-5, atol=1e-7)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"mixers": (1,)}, r"mixers\[0\] must be MixerConfig, got 1"),
        ({"mixers": (MLPConfig,)}, "mixers"),
        ({"d_model": "64"}, "d_model must be int, got '64'"),
        ({"d_model": 10**12}, "d_model"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(config, change, name):
    """More values are in tests/test_arguments.py."""
    with pytest.raises(ValueError, match=name):
        replace(config, **change)


def test_what_builds_no_mixer_is_no_layer(config):
    with pytest.raises(TypeError, match="MLPConfig builds no mixer"):
        replace(config, mixers=(*config.mixers[:1], MLPConfig())).build()
    narrow = SimpleNamespace(build=lambda d_model: config.mixers[0].build(d_model // 2))
    with pytest.raises(ValueError, match="builds a mixer of d_model"):
        MixerBlockConfig(narrow).build(config.d_model)


@pytest.mark.parametrize("token", [-1, 37, 2**40])
def test_a_token_beyond_the_vocabulary_is_named(model, token):
    tokens = tokens_of(2, 5)
    tokens[1, 3] = token
    words = rf"tokens must be in \[0, 37\), got {token}"
    with pytest.raises(ValueError, match=words):
        model(tokens)
    with pytest.raises(ValueError, match=words):
        model.loss(tokens, tokens_of(2, 5))
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model.step(tokens[:, 3:4], model.reserve(model.init_state(2), 1))


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_give_no_logits_and_no_loss(model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    assert model(tokens).logits.shape == (*shape, 37)
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss == 0
    assert all((weight.grad == 0).all() for weight in model.parameters())


def test_the_last_token_of_none_is_refused(model):
    with pytest.raises(ValueError, match="last_only"):
        model(torch.zeros(2, 0, dtype=torch.int64), model.init_state(2), last_only=True)


def test_lists_are_refused_by_name(model):
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match="tokens must be an int64 tensor, got list"):
        model([[1, 2]])
    with torch.no_grad(), pytest.raises(TypeError, match="tokens must be an int64 tensor"):
        model.step([[1]], model.init_state(1))
    with pytest.raises(TypeError, match="targets must be an int64 tensor, got list"):
        model.loss(tokens, [[1, 2]])


def test_bad_tensors_are_refused_by_name(model):
    tokens = tokens_of(2, 5)
    with pytest.raises(ValueError, match="tokens"):
        model(tokens[0])
    with pytest.raises(ValueError, match="tokens"):
        model(tokens.int())
    with pytest.raises(ValueError, match="state"):
        model(tokens, model.init_state(2)[:1])
    with pytest.raises(ValueError, match="lengths"):
        model(tokens, lengths=torch.tensor([5, 5]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(tokens, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="targets"):
        model.loss(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="reduction"):
        model.loss(tokens, tokens, reduction="none")


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_compiled_loss_on_a_gpu_is_the_eager_one(config):
    torch.compiler.reset()
    torch.manual_seed(0)
    config = replace(config, mixers=(AttentionConfig(head_dim=16),) * 2, d_model=64, init_std=0.1)
    model = config.build().cuda()
    tokens, targets = tokens_of(4, 128).cuda(), tokens_of(4, 128, seed=2).cuda()
    expected = model.loss(tokens, targets)
    expected_grads = grads_of(model, expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.compile(model.loss, fullgraph=True)(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for name, grad in grads_of(model, loss).items():
        assert grad.dtype == torch.float32
        assert_close(name, grad, expected_grads[name], rtol=5e-2)
