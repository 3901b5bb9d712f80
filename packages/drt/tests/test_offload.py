"""With the keys and values of chunks in the host's memory, a stack computes the same."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import LMConfig
from mezzo_core.nn.generate import generate
from mezzo_core.testing.laws import LAWS, check_segments, check_step
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig
from mezzo_drt.baselines import LandmarkConfig
from mezzo_drt.memory import host
from mezzo_drt.state import DRTState
from torch.utils._pytree import tree_leaves

C, L, R = 32, 4, 2
DRT = DRTConfig(
    num_layers=4, num_groups=2, chunk_size=L, num_retrieved=R, window_size=7, head_dim=16,
    hidden=40, num_encoder_layers=1, offload=True,
)  # fmt: skip
LANDMARK = LandmarkConfig(
    num_layers=2, head_dim=16, chunk_size=L, local_chunks=1, retrieved_chunks=R, offload=True
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
configs = pytest.mark.parametrize("config", [DRT, LANDMARK], ids=["drt", "landmark"])


def build(device="cpu", config=DRT, **fields):
    torch.manual_seed(0)
    stack = replace(config, **fields).build(C)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    return stack.to(device).eval()


def pair(device="cpu", config=DRT):
    here, there = build(device, config, offload=False), build(device, config)
    there.load_state_dict(here.state_dict())
    return here, there


def decode(stack, x, sizes, steps, lengths=None):
    """Run segments, the first of them with padding, then steps; return outputs and the state."""
    state, outputs = stack.init_state(len(x)), []
    for segment in x[:, : sum(sizes)].split(sizes, 1):
        y, state = stack(segment, state, lengths=lengths)
        if lengths is not None:
            is_padding = torch.arange(y.shape[1], device=y.device) >= lengths[:, None]
            y, lengths = y.masked_fill(is_padding[..., None], 0), None
        outputs.append(y)
    state = stack.reserve(state, steps)
    for token in x[:, sum(sizes) :].split(1, 1):
        stack.before_step(state)
        outputs.append(stack.step(token, state))
    return torch.cat(outputs, 1), state


def parts(state):
    """Return the parts of a state with chunks: those on the host, and those on the device."""
    if isinstance(state, DRTState):
        return state.memory[1:], (state.memory.keys, *state.fetched)
    return state[:2], (state.seen, *state.near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "config",
    [DRT, *(replace(LANDMARK, local_chunks=local) for local in (0, 1, 3))],
    ids=["drt", "landmark-0", "landmark-1", "landmark-3"],
)
@pytest.mark.parametrize(
    ("sizes", "padded"), [([1], False), ([61], True), ([20, 3, 1, 37], True), ([7] * 9, False)]
)
@torch.no_grad()
def test_outputs_are_those_without_offload(device, config, sizes, padded):
    here, there = pair(device, config)
    prompt, lengths = sum(sizes), None
    if padded:  # but the first row
        lengths = torch.tensor([sizes[0], 0, sizes[0] // 2], device=device)
    x = torch.randn(3, prompt + 30, C, device=device)
    wanted, _ = decode(here, x, sizes, 30, lengths)
    found, state = decode(there, x, sizes, 30, lengths)
    if device == "cpu":
        assert torch.equal(found[:, :prompt], wanted[:, :prompt])
    assert_close("segments", found[:, :prompt], wanted[:, :prompt], rtol=1e-5)
    assert_close("steps", found[:, prompt:], wanted[:, prompt:], rtol=1e-5)
    assert_close("full forward", found[:1], here(x[:1])[0], rtol=1e-5)
    for held, place in zip(parts(state), ("cpu", device), strict=True):
        assert {part.device.type for part in held} == {place}


@configs
@pytest.mark.parametrize("offload", [False, True])
@torch.no_grad()
def test_torchs_default_device_may_be_another(config, offload):
    stack, x = build(config=config, offload=offload), torch.randn(3, 40, C)
    wanted, _ = decode(stack, x, [20, 3], 17)
    with torch.device("meta"):  # as after `torch.set_default_device("cuda")`
        found, _ = decode(stack, x, [20, 3], 17)
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("law", [law for law in LAWS if law != "isolated"])
def test_laws_on_a_gpu(law):
    """All but one: on a GPU, attention lets a NaN reach other queries of its row."""
    LAWS[law](build("cuda"))


@pytest.mark.parametrize("device", DEVICES)
@configs
def test_rows_at_any_places_decode_as_alone(device, config, poison_memory):
    stack = build(device, config)
    check_step(stack, (0, 4, 21, 33), 27)
    check_segments(stack, num_tokens=61, splits=(30, 0, 1, 8, 22), batch=3)


@torch.no_grad()
def test_a_segment_fetches_each_chunk_that_it_reads_once_a_group(monkeypatch):
    stack, fetched = build(), []
    rows = host.fetch_rows
    monkeypatch.setattr(
        host, "fetch_rows", lambda *args: fetched.append(args[2].shape[1]) or rows(*args)
    )
    x, state = torch.randn(2, 80 * L, C), stack.init_state(2)
    for segment in x.split(2 * L, 1):
        _, state = stack(segment, state)
    # A segment fetches for its 2 chunks, once a group, and then for the open chunk, once in all.
    assert max(fetched) == 2 * R
    assert len(fetched) == 40 * 3


@torch.no_grad()
def test_steps_fetch_once_a_chunk(monkeypatch):
    stack, fetched = build(), []
    rows = host.fetch_rows
    monkeypatch.setattr(
        host, "fetch_rows", lambda *args: fetched.append(args[2].shape) or rows(*args)
    )
    decode(stack, torch.randn(1, 20 * L, C), [5 * L], 15 * L)
    # The prompt fetches for each group and for the open chunk. The last landmark is to come.
    assert fetched[3:] == [(1, 2 * R)] * 14


@pytest.mark.parametrize(
    ("config", "rtol", "atol"),
    [(DRT, 1e-4, 1e-6), (LANDMARK, 1e-5, 1e-7)],
    ids=["drt", "landmark"],
)
def test_gradients_are_those_without_offload(config, rtol, atol):
    here, there = pair(config=config)
    x, dy = torch.randn(2, 2, 37, C)
    grads = []
    for stack in (here, there):
        leaf, state, outputs = x.clone().requires_grad_(), stack.init_state(2), []
        for segment in leaf.split(6, 1):
            y, state = stack(segment, state)
            outputs.append(y)
        weights = [leaf, *stack.parameters()]
        grads.append(torch.autograd.grad(torch.cat(outputs, 1), weights, dy))
    for found, wanted in zip(*reversed(grads), strict=True):
        assert_close("a gradient", found, wanted, rtol=rtol, atol=atol)


@torch.no_grad()
def test_what_the_device_holds_grows_by_one_vector_a_chunk():
    stack = build()
    size = C * stack.landmark.weight.element_size()
    for chunks in (10, 1000, 250_000):
        device, host = stack.state_bytes(chunks * L), stack.host_state_bytes(chunks * L)
        assert host == chunks * 2 * L * size
        assert stack.state_bytes(2 * chunks * L) - device == chunks * size
    plain = build(offload=False)
    assert plain.host_state_bytes(40) == 0
    _, state = stack(torch.randn(1, 40, C), stack.init_state(1))
    held = sum(leaf.nbytes for leaf in tree_leaves(state) if leaf.is_floating_point())
    assert abs(stack.state_bytes(40) + stack.host_state_bytes(40) - held) <= 8 * 2 * R


@pytest.mark.parametrize("device", DEVICES)
@configs
@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 5}, {"num_rows": 2}])
def test_a_model_generates_the_same(device, config, options):
    prompts = [[1, 2, 3], list(range(12)), list(range(23))]
    answers = []
    for kept in (False, True):
        torch.manual_seed(0)
        lm = LMConfig(
            24, C, init_std=0.5, stack=replace(config, offload=kept), tie_embeddings=False
        ).build()
        answers.append(generate(lm.to(device), prompts, max_new_tokens=22, **options))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_disk", [False, True])
def test_prompts_take_turns_in_rows_whose_chunks_are_offloaded(device, on_disk, tmp_path):
    torch.manual_seed(0)
    config = LMConfig(24, C, init_std=0.5, stack=DRT, tie_embeddings=False)
    lm = config.build().to(device)
    lm.stack.offload_to(tmp_path if on_disk else None)
    prompts = [[1, 2, 3], list(range(12)), list(range(23)), [5, 4], [9] * 9]
    options = {"max_new_tokens": 22, "temperature": 1.0, "stop_tokens": [0, 1]}
    alone = [
        generate(lm, [prompt], seed=[seed], **options)[0] for seed, prompt in enumerate(prompts)
    ]
    assert generate(lm, prompts, num_rows=2, seed=range(5), **options) == alone
    assert len({len(row) for row in alone}) > 1


@pytest.mark.parametrize(
    ("config", "cast", "kept", "rtol"),
    [
        (DRT, "weights", torch.bfloat16, 0.0),
        (DRT, "autocast", torch.bfloat16, 0.0),
        (LANDMARK, "weights", torch.bfloat16, 1e-2),
        (LANDMARK, "autocast", torch.float32, 1e-2),  # as its landmark
    ],
    ids=["drt-weights", "drt-autocast", "landmark-weights", "landmark-autocast"],
)
@torch.no_grad()
def test_bf16_runs_in_segments_and_steps(config, cast, kept, rtol):
    here, there = pair(config=config)
    x = torch.randn(2, 50, C)
    if cast == "weights":
        here, there, x = here.bfloat16(), there.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        wanted, _ = decode(here, x, [20, 9], 21)
        found, state = decode(there, x, [20, 9], 21)
    held = {part.dtype for part in tree_leaves(parts(state)) if part.is_floating_point()}
    assert held == {kept}
    assert found.dtype == wanted.dtype
    assert_close("bf16", found, wanted, rtol=rtol)
