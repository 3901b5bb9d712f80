"""What a GPU runs of decoding is two CUDA graphs: a step, and a landmark."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import LMConfig
from mezzo_core.nn.generate import generate
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map

C, L = 32, 4
CONFIG = DRTConfig(
    num_layers=4, num_groups=2, chunk_size=L, num_retrieved=2, window_size=7, head_dim=16,
    hidden=40, num_encoder_layers=1,
)  # fmt: skip
FORMS = {
    "default": CONFIG,
    "offload": replace(CONFIG, offload=True),
    "as released": replace(CONFIG, projections=False),
    "random": replace(CONFIG, retriever="random"),
    "fixed": replace(CONFIG, retriever="fixed"),
}


@pytest.fixture(params=FORMS)
def stack(request):
    torch.manual_seed(0)
    stack = FORMS[request.param].build(C)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    return stack.eval()


@torch.no_grad()
def test_what_a_graph_holds_looks_at_no_value(stack, monkeypatch):
    """Fake tensors have none, and refuse what needs them, as a capture would."""
    lengths = torch.tensor([3 * L, 17, 2])
    _, state = stack(torch.randn(3, 19, C), stack.init_state(3), lengths=lengths)
    state = stack.reserve(state, 2 * L)
    # Arguments are checked by their values on a CPU, but not in a compiled program.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode() as mode:
        monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        stack._apply(mode.from_tensor)
        fake = tree_map(mode.from_tensor, state)
        assert stack._step_place(torch.empty(3, 1, C), fake)[0].shape == (3, 1, C)
        assert stack._run_landmarks(fake).k.shape == (3, 1, L, C // 16, 16)
        with pytest.raises(DataDependentOutputException):
            stack.before_step(fake)


@torch.no_grad()
def test_a_step_is_one_graph_of_torch_compile(stack):
    state = stack.reserve(stack(torch.randn(3, 19, C), stack.init_state(3))[1], 2)
    x, other = torch.randn(3, 1, C), stack.fork(state)
    for each in (state, other):
        stack.before_step(each)
    compiled = torch.compile(stack.step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, other), stack.step(x, state))


@torch.no_grad()
def test_landmarks_run_as_they_are_told(stack):
    """Also if the next run overwrites their result, as a CUDA graph does."""
    works, results = [], []

    def run(work, state):
        works.append(work)
        for old in results:
            tree_map(lambda t: t.fill_(torch.nan), old)
        results.append(work(state))
        return results[-1]

    x, state = torch.randn(2, 60, C), stack.init_state(2)
    whole, _ = stack(x)
    _, state = stack(x[:, :20], state)
    state, outputs = stack.reserve(state, 40), []
    for t in range(20, 60):
        stack.before_step(state, run)
        outputs.append(stack.step(x[:, t : t + 1], state))
    assert works == [stack._run_landmarks] * 9
    assert_close("outputs", torch.cat(outputs, 1), whole[:, 20:], rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("same", [True, False])
def test_a_gpu_generates_by_two_graphs(form, same, monkeypatch):
    replays, replay = {}, torch.cuda.CUDAGraph.replay

    def counted(graph):
        replays[graph] = replays.get(graph, 0) + 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    torch.manual_seed(0)
    config = LMConfig(24, C, init_std=0.5, stack=FORMS[form], tie_embeddings=False)
    lm = config.build().cuda().eval()
    prompts = [list(range(12))] * 3 if same else [[1, 2, 3], list(range(12)), list(range(23))]
    answers = generate(lm, prompts, max_new_tokens=41)
    # The prompt gives a token, and both graphs are warmed up once. Landmarks are due at every
    # fourth of 40 tokens if the rows are alike; the last is to come.
    steps, landmarks = sorted(replays.values(), reverse=True)
    assert steps == 39
    assert landmarks == 8 if same else landmarks > 8
    with torch.no_grad():
        for prompt, new in zip(prompts, answers, strict=True):
            logits = lm(torch.tensor([[*prompt, *new]], device="cuda")).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
