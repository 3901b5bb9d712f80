"""Landmark Attention with its chunks in the host's memory; as DRT too: `../test_offload.py`."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import LMConfig
from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.generate import generate
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.rewinding import Rewinding
from mezzo_core.nn.sampler import Sampler
from mezzo_core.testing.laws import LAWS
from mezzo_drt.baselines import LandmarkConfig
from mezzo_drt.baselines.landmark import offload
from torch import nn

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


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(law):
    LAWS[law](build())


@pytest.mark.gpu
@pytest.mark.parametrize("law", [law for law in LAWS if law != "isolated"])
def test_laws_on_a_gpu(law):
    """All but one: on a GPU, a NaN in a packed sequence can reach the gradients of others."""
    LAWS[law](build("cuda"))


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
def test_an_assistant_changes_no_token(device):
    torch.manual_seed(0)
    lm, assistant = (
        LMConfig(24, C, init_std=0.5, stack=CONFIG).build().to(device) for _ in range(2)
    )
    prompts = [[1, 2, 3], list(range(12))]
    alone = generate(lm, prompts, max_new_tokens=22)
    assert generate(lm, prompts, max_new_tokens=22, assistant=assistant, num_drafted=3) == alone
