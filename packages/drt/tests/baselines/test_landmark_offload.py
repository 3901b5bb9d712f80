"""With its chunks in the host's memory, Landmark Attention computes the same."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import LMConfig
from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.generate import generate
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.rewinding import Rewinding
from mezzo_core.nn.sampler import Sampler
from mezzo_core.testing.laws import LAWS, check_segments, check_step
from mezzo_core.testing.numerics import assert_close
from mezzo_core.testing.poison import poison_memory as poison_memory
from mezzo_drt.baselines import LandmarkConfig
from mezzo_drt.baselines.landmark import offload
from torch import nn
from torch.utils._pytree import tree_leaves

C, D, L, Y, R = 12, 6, 3, 2, 2
H = C // D
CONFIG = LandmarkConfig(
    num_layers=Y, head_dim=D, chunk_size=L, local_chunks=1, retrieved_chunks=R, rope_base=100.0,
    offload=True,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(device="cpu", **fields):
    torch.manual_seed(0)
    stack = replace(CONFIG, **fields).build(C)
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.4)
    nn.init.normal_(stack.landmark)
    return stack.to(device).eval()


def decode(stack, x, sizes, steps, lengths=None):
    """Run segments, the first of them with padding, then steps; return outputs and the state."""
    state, outputs = stack.init_state(len(x)), []
    for segment in x[:, : sum(sizes)].split(sizes, 1):
        y, state = stack(segment, state, lengths=lengths)
        if lengths is not None:
            y = y.masked_fill(
                (torch.arange(y.shape[1], device=y.device) >= lengths[:, None])[..., None], 0
            )
        outputs.append(y)
        lengths = None
    state = stack.reserve(state, steps)
    outputs += [stack.step(token, state) for token in x[:, sum(sizes) :].split(1, 1)]
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(law):
    LAWS[law](build())


@pytest.mark.gpu
@pytest.mark.parametrize("law", [law for law in LAWS if law != "isolated"])
def test_laws_on_a_gpu(law):
    """But one: there a NaN of a packed sequence can reach the gradients of others."""
    LAWS[law](build("cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("local", [0, 1, 3])
@pytest.mark.parametrize("sizes", [[1], [61], [20, 3, 1, 37]])
@torch.no_grad()
def test_outputs_are_those_without_offload(device, local, sizes):
    here, there = (build(device, offload=kept, local_chunks=local) for kept in (False, True))
    x = torch.randn(3, sum(sizes) + 30, C, device=device)
    for lengths in (None, torch.tensor([sizes[0], 0, sizes[0] // 2], device=device)):
        wanted, _ = decode(here, x, sizes, 30, lengths)
        found, state = decode(there, x, sizes, 30, lengths)
        prompt = sum(sizes)
        if device == "cpu":
            assert torch.equal(found[:, :prompt], wanted[:, :prompt])
        assert_close("segments", found[:, :prompt], wanted[:, :prompt], rtol=1e-5)
        assert_close("steps", found[:, prompt:], wanted[:, prompt:], rtol=1e-5)
    assert {part.device.type for part in state[:2]} == {"cpu"}
    assert {part.device.type for part in (state.seen, *state.near)} == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_rows_at_any_places_decode_as_alone(device, poison_memory):
    stack = build(device)
    check_step(stack, (0, 3, 21, 32), 27)
    check_segments(stack, num_tokens=61, splits=(30, 0, 1, 8, 22), batch=3)


@torch.no_grad()
def test_what_the_device_holds_grows_by_one_key_a_chunk_layer_and_head():
    stack, plain = build(), build(offload=False)
    size = stack.landmark.element_size()
    for chunks in (10, 1000, 250_000):
        device, host = (told(chunks * L) for told in (stack.state_bytes, stack.host_state_bytes))
        assert host == plain.state_bytes(chunks * L)
        assert stack.state_bytes(2 * chunks * L) - device == chunks * Y * H * D * size
    assert plain.host_state_bytes(40) == 0
    for count in (1, 40):
        _, state = stack(torch.randn(1, count, C), stack.init_state(1))
        assert sum(part.nbytes for part in state.near) == stack.state_bytes(count)
        assert sum(part.nbytes for part in state[:2]) == stack.host_state_bytes(count)


@torch.no_grad()
def test_a_step_fetches_once_a_layer_what_it_has_chosen(monkeypatch):
    stack, fetched, fetch = build(), [], offload.fetch
    monkeypatch.setattr(offload, "fetch", lambda *args: fetched.append(args[2]) or fetch(*args))
    _, state = stack(torch.randn(1, 20 * L, C), stack.init_state(1))
    assert not fetched  # a segment brings whole layers
    state = stack.reserve(state, 2 * L)
    for t in range(2 * L):
        stack.step(torch.randn(1, 1, C), state)
        count = 2 if t % L == L - 1 else 1  # the landmark chooses with its chunk's last token
        assert [index.shape for index in fetched] == [(1, count, H, R)] * Y
        chunk = 20 + t // L
        for index in fetched:
            assert ((index >= 0) & (index < chunk - 1)).all()  # before the local one
            assert index[0, 0].diff(dim=-1).all()
        fetched.clear()


@torch.no_grad()
def test_the_host_gets_a_chunk_when_it_is_complete():
    stack = build()
    state = stack.reserve(stack.init_state(1), 2 * L)
    for t in range(2 * L):
        stack.step(torch.randn(1, 1, C), state)
        written = (state.k != 0).flatten(3).any(-1).all(1).squeeze(0).tolist()
        assert written == [t + 1 >= L, t + 1 >= 2 * L]


@torch.no_grad()
def test_a_step_beyond_the_room_is_refused():
    stack = build()
    state = stack.reserve(stack.init_state(2), L)
    for _ in range(L):
        stack.step(torch.randn(2, 1, C), state)
    with pytest.raises(ValueError, match="room for 1 chunks"):
        stack.step(torch.randn(2, 1, C), state)


@torch.no_grad()
def test_a_state_whose_parts_disagree_is_refused():
    stack = build()
    _, state = stack(torch.randn(2, 3 * L + 1, C), stack.init_state(2))
    landmarks = state.near._replace(landmarks=state.near.landmarks[:, :, :-1])
    cut = state._replace(k=state.k[:, :, :-1], v=state.v[:, :, :-1], near=landmarks)
    x = torch.randn(2, 1, C)
    for call in (stack, lambda x, bad: stack.reserve(bad, 3), stack.step):
        with pytest.raises(ValueError, match="landmarks must be of 4 chunks"):
            call(x, state._replace(near=landmarks))
        with pytest.raises(ValueError, match=r"state\.seen must be|state has room for 3"):
            call(x, cut)


def test_decoders_are_told_that_a_step_waits(monkeypatch):
    made = []
    monkeypatch.setattr(Graphs, "__init__", lambda self, device, *_: made.append(device.type))
    for kept in (False, True):
        lm = LMConfig(24, C, stack=replace(CONFIG, offload=kept)).build()
        assert lm.stack.step_waits() is Rewinding(lm.stack, 4).step_waits() is kept
        tokens = torch.zeros(1, dtype=torch.int64, device="meta")  # stands for a GPU
        Decoder(lm, lm.init_state(1), tokens, Sampler())
    assert made == ["meta", "cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 5}, {"num_rows": 2}])
def test_a_model_generates_the_same(device, options):
    prompts = [[1, 2, 3], list(range(12)), list(range(23))]
    answers = []
    for kept in (False, True):
        torch.manual_seed(0)
        config = LMConfig(24, C, init_std=0.5, stack=replace(CONFIG, offload=kept))
        lm = config.build().to(device)
        answers.append(generate(lm, prompts, max_new_tokens=22, **options))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", DEVICES)
def test_an_assistant_changes_no_token(device):
    torch.manual_seed(0)
    lm, assistant = (
        LMConfig(24, C, init_std=0.5, stack=CONFIG).build().to(device) for _ in range(2)
    )
    prompts = [[1, 2, 3], list(range(12))]
    alone = generate(lm, prompts, max_new_tokens=22)
    assert generate(lm, prompts, max_new_tokens=22, assistant=assistant, num_drafted=3) == alone


@pytest.mark.parametrize("cast", ["weights", "autocast"])
@torch.no_grad()
def test_bf16_runs_in_segments_and_steps(cast):
    here, there = build(offload=False), build()
    x = torch.randn(2, 50, C)
    if cast == "weights":
        here, there, x = here.bfloat16(), there.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        wanted, _ = decode(here, x, [20, 9], 21)
        found, state = decode(there, x, [20, 9], 21)
    kept = {part.dtype for part in tree_leaves(state) if part.is_floating_point()}
    assert kept == {there.landmark.dtype}
    assert_close("bf16", found.float(), wanted.float(), rtol=1e-2)


@torch.no_grad()
def test_torchs_default_device_may_be_another():
    stack, x = build(), torch.randn(3, 40, C)
    wanted, _ = decode(stack, x, [20, 3], 17)
    with torch.device("meta"):  # as after `torch.set_default_device("cuda")`
        found, _ = decode(stack, x, [20, 3], 17)
    assert torch.equal(found, wanted)
