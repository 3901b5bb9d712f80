"""Decoding that handles states: assistants, common beginnings, several continuations, rules."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from mezzo_core.data import stop_texts
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.nn import assisted, keep_graphs, kept_graphs
from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.generate import generate, stream
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.rewinding import Rewinding
from torch.utils._pytree import tree_leaves

from .kinds import build

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("assistant", ["window", "block", "stack"])
def test_an_assistant_changes_no_token(any_model, config, assistant):
    """Neither another model, which is often wrong, nor the model itself, which never is."""
    plain = generate(any_model, PROMPTS, max_new_tokens=9)
    other = build(config, assistant, seed=1)
    helpers = (other, 1), (other, 3), (any_model, 4), (other.rewinding(2), 3)
    for helper, num_drafted in helpers:
        helped = generate(
            any_model, PROMPTS, max_new_tokens=9, assistant=helper, num_drafted=num_drafted
        )
        assert helped == plain


def test_what_a_model_keeps_to_go_back_takes_no_part(config, monkeypatch):
    """Neither the model's nor the assistant's: a CUDA graph would not count on the host."""
    model, other = (build(config, "running mean", seed=i) for i in range(2))
    plain = generate(model, PROMPTS, max_new_tokens=9)
    monkeypatch.setattr(Rewinding, "forward", None)
    options = {"max_new_tokens": 9, "assistant": other.rewinding(2)}
    assert generate(model.rewinding(2), PROMPTS, **options) == plain


def test_a_check_may_read_more_places_than_it_has_tokens(any_model, config, monkeypatch):
    """As in a CUDA graph, which always reads the largest number of tokens."""
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(assisted._Target, "in_graphs", always, raising=False)
    plain = generate(any_model, PROMPTS, max_new_tokens=20)
    for helper in (build(config, "attention", seed=1), any_model):
        options = {"assistant": helper, "num_drafted": 4}
        assert generate(any_model, PROMPTS, max_new_tokens=20, **options) == plain


@pytest.mark.parametrize(("kind", "reads_again"), [("running mean", True), ("attention", False)])
def test_what_is_certain_is_read_again_unless_only_counts_change(config, kind, reads_again):
    model, calls = build(config, kind), []

    def note(_, inputs, given, output):
        calls.append((inputs[0].shape[1], *(given["lengths"].tolist() if calls else ())))

    model.stack.blocks[0].mixer.register_forward_hook(note, with_kwargs=True)
    generate(model, [[1, 2]], max_new_tokens=12, assistant=build(config, kind, seed=1))
    prompt, *checks = calls
    assert prompt == (2,)
    assert len(checks) % (1 + reads_again) == 0
    for size, length in checks[:: 1 + reads_again]:
        assert size == length > 1, "the newest token, and one that is proposed"
    if reads_again:
        assert all(certain < size for size, certain in checks[1::2])


def test_an_assistant_has_room_for_rows_that_wait_for_others(config):
    """A row that is done may have m tokens too many, and a check reads m + 1 more."""
    model = build(config, "attention")
    helper = copy.deepcopy(model)
    with torch.no_grad():
        helper.embed.weight[20:].neg_()  # it is right in rows without these tokens
    options = {"max_new_tokens": 8, "logit_bias": dict.fromkeys(range(20), 5.0)}
    plain = generate(model, PROMPTS, **options)
    for num_drafted in (4, 6):
        options |= {"assistant": helper, "num_drafted": num_drafted}
        assert generate(model, [[1, 2, 3], [30, 31], [4]], **options)[::2] == plain[:2]


@pytest.mark.parametrize("seed", [3, [4, 5, 4]])
def test_an_assistant_changes_no_sampled_token(any_model, config, seed):
    """Each token is sampled by the same random numbers as without the assistant."""
    options = {"max_new_tokens": 20, "temperature": 1.3, "top_p": 0.9, "seed": seed}
    plain = generate(any_model, PROMPTS, **options)
    other = build(config, "attention", seed=1)
    for helper, num_drafted in ((other, 3), (any_model, 4)):
        helped = generate(any_model, PROMPTS, assistant=helper, num_drafted=num_drafted, **options)
        assert helped == plain


def test_the_rows_of_an_assistant_do_not_run_far_ahead(model, config, monkeypatch):
    """If one row's proposals are right and another's wrong: random numbers are kept in between."""
    spans, draw = [], assisted._Noise.draw
    monkeypatch.setattr(
        assisted._Noise,
        "draw",
        lambda self, end: (spans.append(end - self.places.min().item()), draw(self, end))[1],
    )
    monkeypatch.setattr(assisted, "_LEAD", 3)
    # Tokens of the vocabulary's halves do not mix: the assistant knows one half alone.
    helper = copy.deepcopy(model)
    with torch.no_grad():
        helper.embed.weight[20:].neg_()
    options = {"max_new_tokens": 40, "temperature": 0.7, "seed": 0}
    prompts = [[1, 2], [30, 31], [25], [3]]
    plain = generate(model, prompts, **options)
    assert generate(model, prompts, assistant=helper, num_drafted=2, **options) == plain
    assert 3 + 3 < max(spans) <= 3 + 2 * 3, "some rows wait for others"


def test_fewer_tokens_are_proposed_where_few_are_right(model, config, monkeypatch):
    """1.5 times as many as were accepted; an assistant that is always right proposes the most."""
    counts, propose = [], assisted._Draft.propose
    monkeypatch.setattr(
        assisted._Draft,
        "propose",
        lambda self, count: (counts.append(count), propose(self, count))[1],
    )
    generate(model, [[1, 2]], max_new_tokens=40, assistant=model, num_drafted=6)
    assert counts == [6] * 6
    wrong = copy.deepcopy(model)
    wrong.head = copy.deepcopy(model.head)  # no longer tied to the embedding
    with torch.no_grad():
        wrong.head.weight.neg_()
    counts.clear()
    generate(model, [[1, 2]], max_new_tokens=40, assistant=wrong, num_drafted=6)
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (6, 2)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 0}], ids=str)
def test_an_assistant_that_is_right_spares_forwards(model, options, monkeypatch):
    checks, look_ahead = [], type(model.stack).look_ahead
    monkeypatch.setattr(
        type(model.stack), "look_ahead", lambda *given: (checks.append(1), look_ahead(*given))[1]
    )
    generate(model, [[1, 2]], max_new_tokens=13, assistant=model, num_drafted=5, **options)
    assert len(checks) == 2, "each takes 6 tokens"


def test_an_assistant_ends_rows_where_they_end_without_it(model, config):
    other = build(config, "attention", seed=1)
    plain = generate(model, PROMPTS, max_new_tokens=9, stop_tokens=range(12), logit_bias={20: 0.5})
    helped = generate(
        model, PROMPTS, max_new_tokens=9, stop_tokens=range(12), logit_bias={20: 0.5},
        assistant=other,
    )  # fmt: skip
    assert helped == plain


@pytest.mark.parametrize("rows", [1, 3])
def test_a_common_beginning_is_read_once(any_model, rows):
    beginning = [7, 7, 2]
    with torch.no_grad():
        tokens = torch.tensor([beginning] * rows)
        _, state = any_model(tokens, any_model.init_state(rows))
    whole = generate(any_model, [[*beginning, *prompt] for prompt in PROMPTS], max_new_tokens=6)
    for _ in range(2):  # the state stays as it is
        assert generate(any_model, PROMPTS, max_new_tokens=6, state=state) == whole


def test_samples_of_one_prompt_are_those_of_a_batch_of_copies(any_model):
    options = {"max_new_tokens": 8, "temperature": 1.5, "seed": 3}
    copies = generate(any_model, [p for p in PROMPTS for _ in range(3)], **options)
    samples = generate(any_model, PROMPTS, num_samples=3, **options)
    assert samples == copies
    assert len({tuple(row) for row in samples[:3]}) > 1


def test_a_row_with_a_seed_draws_what_it_draws_alone(any_model):
    options = {"max_new_tokens": 8, "temperature": 1.5}
    together = generate(any_model, PROMPTS, seed=[5, 6, 5], **options)
    alone = [
        generate(any_model, [prompt], seed=[seed], **options)[0]
        for prompt, seed in zip(PROMPTS, (5, 6, 5), strict=True)
    ]
    assert together == alone


def test_a_bias_forbids_and_forces_tokens(model):
    free = generate(model, PROMPTS, max_new_tokens=8)
    forbidden = {free[0][0], free[1][0]}
    bias = {token: float("-inf") for token in forbidden}
    found = generate(model, PROMPTS, max_new_tokens=8, logit_bias=bias)
    assert not forbidden & set(itertools.chain(*found))
    assert generate(model, PROMPTS, max_new_tokens=3, logit_bias={9: 1e4}) == [[9, 9, 9]] * 3


def test_a_penalty_keeps_rows_from_repeating_their_tokens(model):
    found = generate(model, PROMPTS, max_new_tokens=8, repetition_penalty=1e6)
    for prompt, new in zip(PROMPTS, found, strict=True):
        positive = [token for token in new if token in prompt]
        assert not positive
        assert len(set(new)) == len(new)


def test_the_penalty_is_that_of_its_paper(model):
    (first,) = generate(model, [[1, 2, 3]], max_new_tokens=1, repetition_penalty=1.3)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    for token in (1, 2, 3):
        logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
    assert first == [int(logits.argmax())]


def test_rows_end_where_a_function_says_so(model):
    plain = generate(model, PROMPTS, max_new_tokens=9)
    found = generate(model, PROMPTS, max_new_tokens=9, stop=lambda tokens: len(tokens) == 4)
    assert found == [row[:4] for row in plain]


def test_a_text_is_found_however_it_is_cut_into_tokens():
    stop = stop_texts(ByteTokenizer(), ["zz", "é"])
    assert not stop([*b"z z", 256])
    assert not stop([*b"zz", *b"." * 30])
    assert stop([*b"z", 256, 300, *b"z"])
    assert stop([*b"." * 30, *"é".encode()])
    assert not stop("é".encode()[:1])
    for texts in ([], [""], "zz"):
        with pytest.raises(ValueError, match="a text to stop at"):
            stop_texts(ByteTokenizer(), texts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "x"}, "state must have 1 row or 3, as the prompts, got 0"),
        ({"num_samples": 0}, "num_samples must be from 1"),
        ({"num_samples": True}, "num_samples must be from 1"),
        ({"num_rows": 0}, "num_rows must be from 1"),
        ({"num_drafted": 0}, "num_drafted must be from 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-45}, "above 0 and finite in float32, got 1e-45"),
        ({"logit_bias": dict.fromkeys(range(37), -float("inf"))}, "logit_bias must leave a token"),
        ({"logit_bias": {99: 1.0}}, "logit_bias must hold token ids"),
        ({"stop_tokens": 3}, "stop_tokens must be a list of token ids, got 3"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be finite in float32 or -inf"),
        ({"logit_bias": {1: -1e39}}, "finite in float32 or -inf, got -1e[+]39 for 1"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got list"),
        ({"seed": [1, 2]}, "seed must be one number or 3, one a row, got 2"),
        ({"seed": [1, 2, None]}, "seed must be from 0"),
        ({"stop": 3}, "stop must be a function"),
        ({"assistant": 3}, "assistant must be an LM, got int"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_a_bad_argument_is_refused_by_name_at_the_call(model, function, change, words):
    with pytest.raises(ValueError, match=words):
        function(model, PROMPTS, max_new_tokens=3, **change)


def test_an_assistant_refuses_what_it_cannot_do(model, config):
    for change in (
        {"repetition_penalty": 1.1},
        {"num_samples": 2},
        {"state": model.init_state(1)},
        {"num_rows": 2},
    ):
        with pytest.raises(ValueError, match="assistant goes without repetition_penalty"):
            generate(model, PROMPTS, max_new_tokens=3, assistant=model, **change)
    other = replace(config, vocab_size=38).build()
    with pytest.raises(ValueError, match="assistant must have the vocabulary of the model, 37"):
        generate(model, PROMPTS, max_new_tokens=3, assistant=other)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_on_a_gpu_an_assistant_changes_no_token(any_model, config, temperature):
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
    plain = generate(any_model.cuda(), PROMPTS, **options)
    other = build(config, "attention", seed=1).cuda()
    assert generate(any_model, PROMPTS, assistant=other, num_drafted=3, **options) == plain


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "graphs"), [("running mean", 2), ("attention", 1)])
def test_on_a_gpu_checks_are_graphs_where_states_keep_their_size(config, kind, graphs, monkeypatch):
    """One graph for the model's check, and one for a token of the assistant."""
    model, other = build(config, kind).cuda(), build(config, "running mean", seed=1).cuda()
    plain = generate(model, PROMPTS, max_new_tokens=100)
    captures, capture = [], torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda graph, *args, **kwargs: (captures.append(1), capture(graph, *args, **kwargs))[1],
    )
    assert generate(model, PROMPTS, max_new_tokens=100, assistant=other) == plain
    assert len(captures) == graphs


@pytest.mark.gpu
@pytest.mark.filterwarnings("always")
def test_on_a_gpu_the_host_waits_once_a_round(config, monkeypatch):
    model = build(config, "running mean").cuda()
    other = build(config, "running mean", seed=1).cuda()
    rounds, propose = [], assisted._Draft.propose
    monkeypatch.setattr(
        assisted._Draft, "propose", lambda *given: (rounds.append(1), propose(*given))[1]
    )
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as found:
            generate(model, [[1, 2, 3]], max_new_tokens=100, assistant=other)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    waits = sum("synchronizing" in str(each.message) for each in found)
    assert len(rounds) > 20
    assert len(rounds) <= waits < len(rounds) + 15, "a few are of the prompts"


OTHERS = [[7, 3, 1], [2], [6, 5, 4, 4, 5, 9, 8]]
WAYS = (
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.9, "seed": [4, 5, 6]},
    {"repetition_penalty": 1.5, "logit_bias": {3: 1.0}},
)


@pytest.mark.parametrize("helped", [False, True])
def test_calls_that_share_graphs_give_what_they_do_alone(any_model, config, helped):
    ways = [{**way, "max_new_tokens": 5} for way in (WAYS[1:3] if helped else WAYS)]
    if helped:
        small = build(config, "window", seed=1)
        ways = [{**way, "assistant": small, "num_drafted": 2} for way in ways]
    calls = [(prompts, way) for prompts in (PROMPTS, OTHERS) for way in ways]
    alone = [generate(any_model, prompts, **way) for prompts, way in calls]
    with keep_graphs(any_model):
        assert [generate(any_model, prompts, **way) for prompts, way in calls] == alone


def test_calls_share_graphs_if_they_are_alike(config, monkeypatch):
    model = build(config, "running mean")
    number = lambda: sum(map(len, kept_graphs._idle[model].values()))  # noqa: E731

    def generate_all(**options):
        for prompts in (PROMPTS, OTHERS, [[1], [2], [3]]):
            generate(model, prompts, **{"max_new_tokens": 3, **options})

    with keep_graphs(model), keep_graphs(model):
        generate_all()
        generate_all(max_new_tokens=7)
        assert number() == 1
        generate_all(temperature=0.5)
        assert number() == 2
        next(stream(model, PROMPTS, max_new_tokens=4))  # and is left
        assert number() == 2
        streams = [stream(model, prompts, max_new_tokens=4) for prompts in (PROMPTS, OTHERS)]
        steps = list(zip(*streams, strict=True))
        assert number() == 3, "two at a time have buffers of their own"
        for prompts, rows in zip((PROMPTS, OTHERS), zip(*steps, strict=True), strict=True):
            assert list(map(list, zip(*rows, strict=True))) == generate(
                model, prompts, max_new_tokens=4
            )
        generate_all(assistant=model.rewinding(2))
        assert number() == 4
        before = model.embed.weight
        model.embed.weight = torch.nn.Parameter(before.detach().clone())
        generate_all()
        assert number() == 5, "a graph reads the weights that were there"
        monkeypatch.setattr(kept_graphs, "product_settings", lambda: "others")
        generate_all()
        assert number() == 6, "a graph has the precision that was set"
    assert model not in kept_graphs._idle


def test_calls_that_share_graphs_share_what_these_read(config, monkeypatch):
    """Also where a tensor that no graph reads has grown since: the older state of a window."""
    model, places, run = build(config, "window").rewinding(2), {}, Graphs.run

    def watched(self, work, owner):
        if isinstance(owner, Decoder):
            now = [x.data_ptr() for x in tree_leaves(owner.state.state)]
            assert places.setdefault(id(owner), now) == now
        return run(self, work, owner)

    monkeypatch.setattr(Graphs, "run", watched)
    with keep_graphs(model):
        for prompts in ([[1], [2, 3]], [[4], [5, 6]]):
            generate(model, prompts, max_new_tokens=8)
    assert len(places) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("helped", [False, True])
def test_on_a_gpu_the_next_call_captures_nothing(config, helped, monkeypatch):
    model, captures, capture = build(config, "running mean").cuda(), [], Graphs._capture
    monkeypatch.setattr(
        Graphs, "_capture", lambda *given: (captures.append(given), capture(*given))[1]
    )
    way = {"max_new_tokens": 12, "temperature": 0.9, "seed": 1}
    if helped:
        way |= {"assistant": build(config, "running mean", seed=1).cuda()}
    alone = [generate(model, prompts, **way) for prompts in (PROMPTS, OTHERS)]
    numbers = [len(captures)]
    with keep_graphs(model):
        for _ in range(2):
            assert [generate(model, prompts, **way) for prompts in (PROMPTS, OTHERS)] == alone
            numbers.append(len(captures))
    assert numbers[0] > numbers[1] - numbers[0] > 0
    assert numbers[2] == numbers[1]
