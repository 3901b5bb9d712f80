"""Layers of different packages in one model: trained, packed, compiled, decoded, saved."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import (
    AttentionConfig,
    BlocksConfig,
    LMConfig,
    MixerBlockConfig,
    MLPConfig,
    generate,
)
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import check_packed
from mezzo_core.testing.programs import check_programs
from mezzo_core.testing.states import check_handled
from mezzo_drt import DRTConfig
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.retnet import RetNetConfig
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

SWA = AttentionConfig(head_dim=8, window_size=5)
GSA = GSAConfig(num_heads=2, num_slots=4)
RAT = RATConfig(chunk_size=4, head_dim=8)
MIXERS = {
    "gsa-rat": (GSA, RATConfig(chunk_size=4, head_dim=8, rope=None), SWA),
    "gsa-family": (
        GSAConfig(num_heads=2, num_kv_heads=1, num_slots=4, gate="constant"),
        ABCConfig(num_heads=2, num_slots=4),
        GLAConfig(num_heads=2),
        HGRN2Config(head_dim=8, lower_bound=0.5),
        RetNetConfig(num_heads=2),
        SWA,
    ),
    "all": (
        LinearRNNConfig(),
        RATConfig(chunk_size=3, head_dim=8),
        RATReversedConfig(chunk_size=4, head_dim=8),
        AttentionConfig(head_dim=8, num_kv_heads=1),
        SWA,
    ),
}
STACKS = {
    "blocks": BlocksConfig(
        (*(MixerBlockConfig(mixer) for mixer in (RAT, GSA, SWA)), RecurrentBlockConfig(head_dim=8))
    ),
    "drt": DRTConfig(
        num_layers=4, chunk_size=3, num_retrieved=2, window_size=5, head_dim=8, hidden=24,
        num_encoder_layers=1, lower=(RAT, GSA),
    ),
}  # fmt: skip
CONFIGS = {
    **{name: LMConfig(vocab_size=17, d_model=16, mixers=mixers) for name, mixers in MIXERS.items()},
    **{name: LMConfig(vocab_size=17, d_model=16, stack=stack) for name, stack in STACKS.items()},
}


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    return config.build().eval()  # in training, DRT explores by noise


def test_a_hybrid_decodes_what_it_computes_in_full(model):
    tokens = torch.randint(17, (2, 23))
    whole = model(tokens).logits
    state = model.init_state(2)
    parts = []
    for segment in tokens.split([2, 7, 1, 13], dim=1):
        logits, state = model(segment, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIGS[name] for name in CONFIGS if name != "drt"])
@torch.no_grad()
def test_a_step_beyond_the_room_moves_no_layer(model):
    """Only some layers lack the room: a recurrent state has it for ever, a chunk's end for long."""
    tokens = torch.ones(2, 1, dtype=torch.int64)
    for room in (3, 4):
        state = model.reserve(model.init_state(2), room)
        for _ in range(room):
            model.step(tokens, state)
        before = [part.clone() for part in tree_leaves(state)]
        with pytest.raises(ValueError, match="reserve more"):
            model.step(tokens, state)
        assert all(map(torch.equal, before, tree_leaves(state)))


@torch.no_grad()
def test_no_layer_of_a_drt_moves_where_a_lower_one_lacks_room():
    stack = replace(STACKS["drt"], lower=(RAT, AttentionConfig(head_dim=8)))
    model = LMConfig(vocab_size=17, d_model=16, stack=stack).build().eval()
    tokens = torch.ones(2, 1, dtype=torch.int64)
    state = model.reserve(model.init_state(2), 6)
    for _ in range(7):  # and two landmarks: a place for a third is the seventh token's
        model.before_step(state)
        model.step(tokens, state)
    model.before_step(state)
    before = [part.clone() for part in tree_leaves(state)]
    with pytest.raises(ValueError, match="reserve more"):
        model.step(tokens, state)
    for now, old in zip(tree_leaves(state), before, strict=True):
        torch.testing.assert_close(now, old, rtol=0, atol=0, equal_nan=True)


def test_prompts_of_different_lengths_continue_as_each_alone(model):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5, 5, 5]]
    together = generate(model, prompts, max_new_tokens=12)
    alone = [generate(model, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    assert together == alone


def test_prompts_that_take_turns_continue_as_each_alone(model):
    model = model.double()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5, 5, 5], [1] * 6, [2, 9], [4], [7, 8, 9]]
    options = {"max_new_tokens": 12, "temperature": 1.0, "stop_tokens": range(3)}
    alone = [
        generate(model, [prompt], seed=[seed], **options)[0] for seed, prompt in enumerate(prompts)
    ]
    assert generate(model, prompts, num_rows=2, seed=range(7), **options) == alone
    assert len({len(row) for row in alone}) > 2


def test_states_of_a_hybrid_are_handled_as_those_of_its_layers(model):
    check_handled(model.stack)
    check_programs(model.stack, programs=1)


def test_an_assistant_changes_no_token_of_a_hybrid(model, config):
    model = model.double()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5, 5, 5]]
    plain = generate(model, prompts, max_new_tokens=10)
    torch.manual_seed(1)
    for assistant in (model, config.build().double()):
        helped = generate(model, prompts, max_new_tokens=10, assistant=assistant, num_drafted=3)
        assert helped == plain


def test_a_hybrid_learns_to_repeat(model):
    tokens = torch.arange(40).remainder(5).expand(4, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    losses = []
    for _ in range(200):  # most need 40; slots take longer to part
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.05 * losses[0]:
            break
    assert losses[-1] < 0.2 * losses[0]
    assert generate(model, [[0, 1, 2]], max_new_tokens=4) == [[3, 4, 0, 1]]


@pytest.mark.parametrize("config", STACKS.values(), ids=STACKS)
def test_packed_sequences_are_as_each_alone(config):
    torch.manual_seed(0)
    check_packed(config.build(16).eval(), (13, 1, 0, 9))


@pytest.mark.parametrize("name", STACKS)
def test_units_compile_to_the_same_loss_and_gradients(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CONFIGS[name].build().eval()
    tokens = torch.randint(17, (2, 20))
    weights = list(model.parameters())

    def results():
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        return loss.detach(), torch.autograd.grad(loss, weights)

    loss, grads = results()
    graphs = CompileCounterWithBackend("aot_eager")
    for unit in model.units():
        unit.compile(backend=graphs)
    compiled_loss, compiled_grads = results()
    assert graphs.frame_count >= len(set(map(type, model.units())))
    assert_close("loss", compiled_loss, loss, rtol=1e-5)
    for (name, _), got, wanted in zip(model.named_parameters(), compiled_grads, grads, strict=True):
        assert_close(name, got, wanted, rtol=1e-4, atol=1e-6)


def test_a_hybrid_is_saved_and_loaded_by_its_config(model, config, tmp_path):
    save_model(model, config, tmp_path / "model", {})
    loaded, loaded_config, _ = load_model(tmp_path / "model", device=torch.device("cpu"))
    assert loaded_config == config
    tokens = torch.randint(17, (1, 9))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 32])
def test_on_a_gpu_a_hybrid_generates_what_full_forwards_do(head_dim):
    """Heads of a width that no kernel takes, and of one that all take."""
    mixers = (
        LinearRNNConfig(),
        RATConfig(chunk_size=3, head_dim=head_dim),
        RATReversedConfig(chunk_size=4, head_dim=head_dim),
        GSAConfig(num_heads=2, num_slots=head_dim),
        AttentionConfig(head_dim=head_dim, window_size=5),
    )
    torch.manual_seed(0)
    config = LMConfig(vocab_size=17, d_model=2 * head_dim, mixers=mixers, mlp=MLPConfig())
    model = config.build().cuda()
    prompts = [[1, 2, 3, 4, 5, 6, 7], [3]]
    for prompt, found in zip(prompts, generate(model, prompts, max_new_tokens=30), strict=True):
        tokens = list(prompt)
        for _ in found:
            with torch.no_grad():
                logits = model(torch.tensor([tokens], device="cuda")).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert found == tokens[len(prompt) :]
