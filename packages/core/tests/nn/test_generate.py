import functools
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.generate import evaluation, generate, stream
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.sampler import NO_TOKEN, Sampler

few = settings(
    max_examples=settings().max_examples // 6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
prompts_strategy = st.lists(
    st.lists(st.integers(0, 36), min_size=1, max_size=7), min_size=1, max_size=4
)


@pytest.fixture(params=["running mean", "attention", "window"])
def any_model(request, config):
    mixers = {
        "running mean": config.mixers,
        "attention": (AttentionConfig(head_dim=8),) * 2,
        "window": (AttentionConfig(head_dim=8, window_size=3),) * 2,
    }[request.param]
    torch.manual_seed(0)
    return replace(config, mixers=mixers).build()


def by_full_forwards(model, prompt, num_tokens):
    """Greedy decoding without a state: what generate must equal."""
    tokens, device = list(prompt), model.embed.weight.device
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens], device=device)).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


# --- one law ----------------------------------------------------------------------------------


@few
@given(prompts=prompts_strategy)
def test_ragged_prompts_generate_what_each_does_alone(any_model, prompts):
    together = generate(any_model, prompts, max_new_tokens=5)
    assert together == [by_full_forwards(any_model, prompt, 5) for prompt in prompts]


@few
@given(prompts=prompts_strategy, prefill_tokens=st.integers(1, 8))
def test_a_prefill_in_segments_generates_the_same(any_model, prompts, prefill_tokens):
    whole = generate(any_model, prompts, max_new_tokens=5)
    parts = generate(any_model, prompts, max_new_tokens=5, prefill_tokens=prefill_tokens)
    assert parts == whole


def test_a_prefill_in_segments_runs_no_more_tokens_at_a_time(model):
    sizes = []
    model.stack.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))
    for assistant in (None, model):
        sizes.clear()
        options = {"max_new_tokens": 1, "prefill_tokens": 4, "assistant": assistant}
        generate(model, [[1] * 11, [2] * 4], **options)
        assert sizes == [4, 4, 3] * (1 if assistant is None else 2)
    sizes.clear()
    generate(model, [[1] * 11, [2] * 4], max_new_tokens=1, prefill_tokens=4, num_rows=1)
    assert sizes == [4, 4, 3, 4]


@few
@given(prompts=prompts_strategy, temperature=st.sampled_from([0.0, 1.3]))
def test_the_stream_is_what_generate_returns(model, prompts, temperature):
    arguments = {"max_new_tokens": 6, "temperature": temperature, "stop_tokens": [3, 5], "seed": 4}
    rows = [[] for _ in prompts]
    for step in stream(model, prompts, **arguments):
        assert any(token is not None for token in step)
        for row, token in zip(rows, step, strict=True):
            row.append(token)
    # Once a prompt has stopped it stays so.
    for row in rows:
        stopped = row.index(None) if None in row else len(row)
        assert all(token is None for token in row[stopped:])
    tokens = [[token for token in row if token is not None] for row in rows]
    assert tokens == generate(model, prompts, **arguments)


def test_a_decoder_draws_from_a_state_that_it_overwrites(any_model):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.inference_mode():
        logits, state = any_model(prompts, any_model.init_state(2))
        first = logits[:, -1].argmax(-1)
        state = any_model.reserve(state, 6)
    places = [t.data_ptr() for block in state for t in block]
    decoder = Decoder(any_model, state, first, Sampler())
    tokens = torch.stack([first, *(decoder.step().clone() for _ in range(6))], 1)
    assert tokens.tolist() == [by_full_forwards(any_model, row.tolist(), 7) for row in prompts]
    assert [t.data_ptr() for block in state for t in block] == places


# --- stopping ---------------------------------------------------------------------------------


@few
@given(prompts=prompts_strategy, stop=st.lists(st.integers(0, 36), max_size=12))
def test_a_prompt_ends_before_its_first_stop_token(model, prompts, stop):
    def cut(tokens):
        ends = [i for i, token in enumerate(tokens) if token in stop]
        return tokens[: ends[0]] if ends else tokens

    whole = generate(model, prompts, max_new_tokens=8)
    assert generate(model, prompts, max_new_tokens=8, stop_tokens=stop) == [cut(t) for t in whole]


def test_nothing_is_computed_once_every_prompt_has_stopped(model):
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    assert generate(model, [[1], [2]], max_new_tokens=50, stop_tokens=range(37)) == [[], []]
    assert len(calls) == 1
    calls.clear()
    assert len(generate(model, [[1], [2, 3]], max_new_tokens=4)[0]) == 4
    assert len(calls) == 4


# --- sampling ---------------------------------------------------------------------------------

DRAWS = 40_000


def frequencies(sampler, logits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sampler(logits.expand(DRAWS, -1), generator)
    return torch.bincount(tokens, minlength=logits.numel()).double() / DRAWS


def assert_drawn_from(found, probs):
    """Five standard errors each; what cannot be drawn was not."""
    assert (found[probs == 0] == 0).all()
    allowed = 5 * (probs * (1 - probs) / DRAWS).sqrt()
    assert ((found - probs).abs() <= allowed + 1e-12).all(), (found, probs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature):
    logits = torch.tensor([1.0, -1.0, 0.3, 2.0, 0.0])
    expected = (logits.double() / temperature).softmax(-1)
    assert_drawn_from(frequencies(Sampler(temperature), logits), expected)


def test_logits_in_bfloat16_are_rounded_no_further():
    logits, noise = torch.randn(4096, 64).bfloat16(), torch.empty(4096, 64).exponential_()
    sampler = Sampler(0.7)
    assert torch.equal(sampler(logits, noise), sampler(logits.float(), noise))


def test_top_k_draws_from_the_k_likeliest_as_they_are():
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7], dtype=torch.float64)
    assert_drawn_from(frequencies(Sampler(1.0, top_k=2), probs.log()), expected)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (1.0, range(4))],
)
def test_top_p_draws_from_the_fewest_tokens_that_hold_p(top_p, kept):
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    expected = torch.zeros(4, dtype=torch.float64)
    expected[list(kept)] = probs[list(kept)].double()
    found = frequencies(Sampler(1.0, top_p=top_p), probs.log())
    assert_drawn_from(found, expected / expected.sum())


@pytest.mark.parametrize("top_p", [0.8, 0.9])  # sums that float32 misses by a rounding
def test_top_p_draws_no_more_tokens_than_hold_p_exactly(top_p):
    probs = torch.tensor([0.1, 0.5, 0.1, 0.3])
    expected = torch.tensor([0.1 * (top_p > 0.8), 0.5, 0.0, 0.3], dtype=torch.float64)
    found = frequencies(Sampler(1.0, top_p=top_p), probs.log())
    assert_drawn_from(found, expected / expected.sum())


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"min_p": 0.75}, [1, 3]),  # of as much as 0.3 in 0.4, but for rounding
        ({"min_p": 0.26}, [1, 2, 3]),
        ({"min_p": 0.5, "top_k": 2}, [1, 3]),
        ({"min_p": 0.5, "top_p": 0.8}, [1, 2, 3]),  # 0.7 of all is too little for top_p
        ({"min_p": 0.6, "top_p": 0.8}, [1, 3]),
    ],
)
def test_min_p_draws_from_tokens_that_are_likely_beside_the_likeliest(limits, kept):
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    expected = torch.zeros(4, dtype=torch.float64)
    expected[kept] = probs[kept].double()
    found = frequencies(Sampler(1.0, **limits), probs.log())
    assert_drawn_from(found, expected / expected.sum())


def test_with_top_k_and_top_p_both_hold():
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    # Of the three that top_k leaves, the first two hold 7/9 of the mass.
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7], dtype=torch.float64)
    assert_drawn_from(frequencies(Sampler(1.0, top_k=3, top_p=0.75), probs.log()), expected)


@few
@given(vocab=st.integers(1, 400), seed=st.integers(0, 99), temperature=st.floats(1e-9, 5))
def test_top_k_of_one_is_greedy_even_among_equals(vocab, seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-1, 2, (1, vocab), generator=generator).float()
    expected = Sampler()(logits)
    assert torch.equal(Sampler(temperature, top_k=1)(logits), expected)
    assert torch.equal(Sampler(temperature, top_k=1, top_p=0.3)(logits), expected)


def test_top_k_of_one_generates_what_greedy_does(model):
    prompts = [[1, 2, 3], [4]]
    greedy = generate(model, prompts, max_new_tokens=8)
    assert generate(model, prompts, max_new_tokens=8, temperature=2.0, top_k=1) == greedy


def test_a_large_top_k_and_a_whole_top_p_change_nothing():
    logits = torch.tensor([1.0, -9.0, 0.3, 2.0])
    expected = logits.double().softmax(-1)
    assert_drawn_from(frequencies(Sampler(1.0, top_k=99, top_p=1.0), logits), expected)


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_the_seed_repeats_the_sample_and_leaves_the_global_generator_alone(model, top_p):
    def sample(seed):
        return generate(
            model, [[1], [2, 3]], max_new_tokens=12, temperature=1.5, top_p=top_p, seed=seed
        )

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sample(7)
    assert torch.equal(torch.get_rng_state(), before)
    assert sample(7) == first
    assert sample(8) != first
    assert sample(None) != sample(None)


# --- what is left behind ----------------------------------------------------------------------


def test_the_mode_of_every_module_comes_back(model):
    model.train()
    model.stack.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    steps = stream(model, [[1, 2]], max_new_tokens=5)
    assert [module.training for module in model.modules()] == modes  # nothing has run yet
    next(steps)
    assert not any(module.training for module in model.modules())
    steps.close()
    assert [module.training for module in model.modules()] == modes
    generate(model, [[1, 2]], max_new_tokens=2)
    assert [module.training for module in model.modules()] == modes


def test_the_mode_comes_back_when_the_last_of_several_streams_ends(model):
    model.train()
    first, second = (stream(model, [[1, 2]], max_new_tokens=3) for _ in range(2))
    next(first)
    next(second)
    first.close()
    assert not any(module.training for module in model.modules())
    assert len(list(second)) == 2
    assert all(module.training for module in model.modules())


def test_a_thread_may_begin_while_the_mode_of_another_s_comes_back(model, monkeypatch):
    def hold():
        with evaluation(model):
            begun.set()
            over.wait()

    def begin_between(part, name, value):
        if name == "training" and value and not other.ident:
            other.start()
            begun.wait(0.1)
        torch.nn.Module.__setattr__(part, name, value)

    model.train()
    other, begun, over = Thread(target=hold), Event(), Event()
    monkeypatch.setattr(type(model.norm), "__setattr__", begin_between)
    with evaluation(model):
        pass
    begun.wait()
    modes = [module.training for module in model.modules()]
    over.set()
    other.join()
    assert not any(modes)
    assert all(module.training for module in model.modules())


def test_the_mode_comes_back_after_an_error(model):
    def fail(*_):
        raise RuntimeError("lost")

    model.train()
    model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        generate(model, [[1]], max_new_tokens=2)
    assert all(module.training for module in model.modules())


def test_steps_keep_no_graph_and_between_them_gradients_are_on(model):
    inside = []
    model.norm.register_forward_hook(lambda *_: inside.append(torch.is_inference_mode_enabled()))
    for _ in stream(model, [[1, 2]], max_new_tokens=3):
        assert not torch.is_inference_mode_enabled()
        assert (2 * model.embed.weight).requires_grad
    assert inside == [True] * 3


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 0.0}, "min_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop_tokens": [37]}, "stop_tokens"),
        ({"stop_tokens": torch.tensor([3])}, "stop_tokens"),
        ({"stop_tokens": ["text"]}, "stop_tokens"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [[1], []]}, r"prompts\[1\]"),
        ({"prompts": [[1], [2, 37]]}, r"prompts\[1\].*37"),
        ({"prompts": [[-1]]}, r"prompts\[0\]"),
        ({"prompts": [[0.5]]}, r"prompts\[0\]"),
        ({"prompts": ["text"]}, r"prompts\[0\]"),
        ({"prompts": [1, 2]}, "prompts"),
        ({"prompts": [[1], None]}, "prompts.*None"),
        ({"prompts": 5}, "prompts.*5"),
        ({"prompts": torch.tensor([[1, 2]])}, r"prompts\[0\]"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": 10**12}, "max_new_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": "0"}, "seed"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_a_bad_argument_is_refused_by_name_at_the_call(model, function, change, name):
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 3, **change}
    with pytest.raises(ValueError, match=name):
        function(model, **arguments)


def test_stop_tokens_of_an_iterator_stop(model):
    first = generate(model, [[1]], max_new_tokens=1)[0]
    assert generate(model, [[1]], max_new_tokens=3, stop_tokens=iter(first)) == [[]]


def test_numbers_may_be_numpy_s(model):
    options = {"max_new_tokens": 4, "seed": 3, "prefill_tokens": 2}
    wanted = generate(model, [[1, 2, 3]], temperature=1.0, **options)
    options = {name: np.int64(value) for name, value in options.items()}
    assert generate(model, [[1, 2, 3]], temperature=np.float64(1.0), **options) == wanted


def test_prompts_and_stop_tokens_may_be_arrays(model):
    prompts = [[1, 2], [3, 4]]
    (first, *_), _ = generate(model, prompts, max_new_tokens=3)
    wanted = generate(model, prompts, max_new_tokens=3, stop_tokens=[first])
    arrays = np.array(prompts), np.array([first])
    assert generate(model, arrays[0], max_new_tokens=3, stop_tokens=arrays[1]) == wanted


# --- a model whose outputs are no numbers -----------------------------------------------------


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7), Sampler(0.7, top_k=2, top_p=0.9)])
def test_no_token_is_drawn_from_what_is_no_number(sampler):
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 0.0], [0.0, 9.0, -inf], [inf, 0.0, 1.0], [-inf, -inf, -inf]]
    assert sampler(torch.tensor(rows)).tolist() == [NO_TOKEN, 1, NO_TOKEN, NO_TOKEN]


def test_a_model_of_no_numbers_says_so_at_the_step_that_shows_it(config):
    torch.manual_seed(0)
    model = replace(config, tie_embeddings=False).build()
    tokens = generate(model, [[1, 2]], max_new_tokens=6)[0]
    with torch.no_grad():  # only the second token that is written leads to NaN
        model.embed.weight[tokens[1]] = float("nan")
    assert tokens[1] not in [1, 2, tokens[0]]
    steps = stream(model, [[1, 2]], max_new_tokens=6)
    assert [next(steps)[0], next(steps)[0]] == tokens[:2]
    with pytest.raises(ValueError, match="the model's outputs are no numbers"):
        next(steps)
    # A row that has ended is asked for nothing.
    ended = generate(model, [[1, 2], [3]], max_new_tokens=6, stop_tokens=[tokens[1]])
    assert (ended[0], len(ended[1])) == (tokens[:1], 6)


def test_a_temperature_too_small_to_divide_by_takes_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(50, 3)
    assert (Sampler(1e-320)(logits) == 1).all()
    assert (Sampler(5e-324, top_k=2, top_p=0.5)(logits) == 1).all()


def test_each_work_becomes_a_graph_of_its_own_after_a_first_call(monkeypatch):
    """The order of calls that a GPU would see."""
    calls = []

    class Graph(NamedTuple):
        name: str
        result: str = "of a graph"

        @property
        def graph(self):
            return SimpleNamespace(replay=lambda: calls.append(("replay", self.name)))

    def warm_up(work, state, stream):
        calls.append(("warm up", f"{work} of {state[0]}"))
        return "eager"

    def capture(self, work, state, stream):
        calls.append(("capture", f"{work} of {state[0]}"))
        return Graph(calls[-1][1])

    monkeypatch.setattr("mezzo_core.nn.graphs._warm_up", warm_up)
    monkeypatch.setattr(Graphs, "_capture", capture)
    runner = Graphs(torch.device("cpu"))
    runner._stream = object()
    first, second = ["one"], ["two"]
    found = [runner.run(*each) for each in (("a", first), ("a", second), ("b", first))]
    assert found == ["eager"] * 3
    assert [runner.run("a", first) for _ in range(2)] == ["of a graph"] * 2
    runner.run("b", first)
    assert calls == [
        *(("warm up", name) for name in ("a of one", "a of two", "b of one")),
        *(("capture", "a of one"), ("replay", "a of one"), ("replay", "a of one")),
        *(("capture", "b of one"), ("replay", "b of one")),
    ]


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_model_of_no_numbers_says_so_too(model):
    model.cuda()
    with torch.no_grad():
        model.embed.weight[5] = float("nan")
    with pytest.raises(ValueError, match="the model's outputs are no numbers"):
        generate(model, [[1, 2]], max_new_tokens=8)


@pytest.mark.gpu
def test_on_a_gpu_ragged_prompts_generate_what_each_does_alone(any_model):
    any_model.cuda()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    together = generate(any_model, prompts, max_new_tokens=12)
    assert together == [generate(any_model, [p], max_new_tokens=12)[0] for p in prompts]
    sampled = generate(any_model, prompts, max_new_tokens=12, temperature=1.0, top_p=0.9, seed=1)
    assert sampled == generate(
        any_model, prompts, max_new_tokens=12, temperature=1.0, top_p=0.9, seed=1
    )


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are captured, and how often each was replayed."""
    replays = {}
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        replays[graph] = replays.get(graph, 0) + 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return replays


@pytest.fixture(params=["no kernel", "kernel"])
def gpu_model(request, config):
    """A head width that the kernel of `decode_attention` does not support, and one that it does."""
    D = {"no kernel": 8, "kernel": 32}[request.param]
    windows = (AttentionConfig(D), AttentionConfig(D, num_kv_heads=1, window_size=5))
    torch.manual_seed(0)
    return replace(config, d_model=2 * D, mixers=(*windows, *config.mixers)).build().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_a_graph_generates_what_full_forwards_do(gpu_model, graphs, batch):
    prompts = [[i % 37, 5, 3 * i % 37][: 1 + i % 3] for i in range(batch)]
    found = generate(gpu_model, prompts, max_new_tokens=40)
    assert list(graphs.values()) == [38]  # the prompt gives a token, the warm-up another
    rows = range(0, batch, 21)
    assert [found[i] for i in rows] == [by_full_forwards(gpu_model, prompts[i], 40) for i in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens_need_no_graph(gpu_model, graphs, num_tokens):
    (found,) = generate(gpu_model, [[1, 2]], max_new_tokens=num_tokens)
    assert found == by_full_forwards(gpu_model, [1, 2], num_tokens)
    assert not graphs


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bfloat16_models_generate_on_a_gpu(gpu_model, batch, temperature):
    gpu_model.bfloat16()
    arguments = {"max_new_tokens": 20, "temperature": temperature, "seed": 3}
    found = generate(gpu_model, [[1, 2, 3]] * batch, **arguments)
    assert [len(row) for row in found] == [20] * batch
    assert found == generate(gpu_model, [[1, 2, 3]] * batch, **arguments)
    if temperature and batch > 1:
        assert len({tuple(row) for row in found}) > batch // 4


@pytest.mark.gpu
def test_a_graph_outlives_the_autocast_block_of_its_capture(gpu_model):
    first = torch.tensor([1, 2], device="cuda")
    autocast = functools.partial(torch.autocast, "cuda", torch.bfloat16)

    def state():
        with torch.inference_mode(), autocast():
            _, prefilled = gpu_model(first[:, None], gpu_model.init_state(2))
            return gpu_model.reserve(prefilled, 12)

    expected, tokens, eager = [], first, state()
    with torch.inference_mode(), autocast():
        for _ in range(12):
            tokens = gpu_model.step(tokens[:, None], eager)[:, -1].argmax(-1)
            expected.append(tokens.tolist())
    decoder, found = Decoder(gpu_model, state(), first, Sampler()), []
    for _ in range(12):
        with autocast():
            found.append(decoder.step().tolist())
        # What the block has freed gets overwritten.
        _ = [torch.full_like(w, torch.nan, dtype=torch.bfloat16) for w in gpu_model.parameters()]
    assert found == expected


@pytest.mark.gpu
def test_sampling_in_a_graph_leaves_random_graphs_outside_inference_mode_possible(model):
    model.cuda()
    for seed in (None, 5):
        generate(model, [[1]], max_new_tokens=5, temperature=1.0, seed=seed)
    graph, noise = torch.cuda.CUDAGraph(), torch.zeros(100, device="cuda")
    with torch.cuda.graph(graph):
        noise.normal_()
    graph.replay()
    first = noise.clone()
    graph.replay()
    assert not torch.equal(noise, first)
    assert noise.std() > 0.5


@pytest.mark.gpu
def test_draws_in_a_graph_come_as_often_as_they_should(model):
    model.cuda()
    with torch.no_grad():
        model.embed.weight.zero_()  # the head too: every token is equally likely
    found = generate(model, [[1]] * 500, max_new_tokens=82, temperature=1.0, seed=0)
    counts = torch.bincount(torch.tensor(found)[:, 2:].flatten(), minlength=37).double() / DRAWS
    assert_drawn_from(counts, torch.full((37,), 1 / 37, dtype=torch.float64))
