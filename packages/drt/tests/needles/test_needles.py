"""Needles: rows hold what the task says, at any length, and come whole or in pieces."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate_segments
from mezzo_core.nn.lm_output import LMOutput, Score
from mezzo_core.testing.arguments import check_fields
from mezzo_drt.needles import HopsConfig, PasskeyConfig, Words
from mezzo_drt.needles.haystack import Haystack, Row

NO = -100
T, L = 511, 64
TASKS = {
    "passkey": PasskeyConfig(test_rows=3),
    "2-hop": HopsConfig(test_rows=3),
}


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return TASKS[request.param]


@pytest.fixture(scope="module")
def data(task):
    return task.build(T, None)


def whole(row, num_tokens=T):
    return row.tokens(0, num_tokens + 1).tolist()


def find(tokens, wanted):
    """Return the places where `wanted` begins."""
    n = len(wanted)
    return [i for i in range(len(tokens) - n + 1) if tokens[i : i + n] == wanted]


def test_a_haystack_is_its_ranges_over_and_over():
    tokens = np.arange(20, dtype=np.uint16)
    hay = Haystack(tokens, np.array([[2, 5], [5, 6], [10, 13]]))
    once = [2, 3, 4, 5, 10, 11, 12]
    assert hay.num_tokens == 7
    assert hay.read(0, 16).tolist() == (once * 3)[:16]
    assert hay.read(5 + 7 * 9, 4).tolist() == [11, 12, 2, 3]
    assert hay.read(0, 1).dtype == np.int64
    assert len(hay.read(3, 0)) == 0


def test_a_row_reads_as_its_parts_between_text():
    """Checked against a row that is written out by hand, from every place to every other."""
    hay = Haystack(np.arange(100), np.array([[0, 100]]))
    parts = ((0, np.array([-1, -2])), (4, np.array([-3])), (5, np.array([-4, -5])))
    row = Row(hay, 98, parts, range(5, 7))
    expected = [-1, -2, 98, 99, -3, -4, -5, 0, 1, 2]
    for begin in range(10):
        for end in range(begin, 11):
            assert row.tokens(begin, end).tolist() == expected[begin:end], (begin, end)
    inputs, targets = row.segment(3, 9)
    assert inputs.tolist() == expected[3:9]
    assert targets.tolist() == [NO, -4, -5, NO, NO, NO]


def test_a_passkey_row_says_the_key_and_asks_for_it():
    data = TASKS["passkey"].build(T, None)
    places = []
    for index in range(40):
        tokens = whole(data.row(index, is_test=True))
        asked = list(b"\nWhat is the passkey? The passkey is ")
        (first,) = find(tokens, asked)
        answer = first + len(asked)
        key = tokens[answer : answer + 10]
        assert 256 not in key
        (needle,) = find(tokens, [*b"\nThe passkey is: ", *key, *b".\n"])
        assert needle + 29 <= first
        places.append(needle / (first - 29))
        assert (answer - len(" is ")) % L == 0, "a landmark falls right before the cue"
        inputs, targets = data.row(index, is_test=True).segment(0, T)
        assert targets[answer - 1 : answer + 9].tolist() == key
        assert (np.delete(targets, range(answer - 1, answer + 9)) == NO).all()
        assert inputs.tolist() == tokens[:-1]
    assert max(places) <= 1
    assert np.mean(places) == pytest.approx(0.5, abs=0.15)
    assert np.std(places) == pytest.approx(12**-0.5, abs=0.08)


def test_a_path_of_two_hops_can_be_followed_through_the_text():
    data = TASKS["2-hop"].build(T, None)
    orders = set()
    for index in range(20):
        row = data.row(index, is_test=False)
        tokens = whole(row)
        said = {}
        for place in find(tokens, list(b"\nDEF ")):
            a, arrow = tuple(tokens[place + 5 : place + 10]), tokens[place + 10 : place + 12]
            if arrow == list(b"->"):
                said[a] = tuple(tokens[place + 12 : place + 17])
                assert tokens[place + 17] == ord("\n")
        assert len(said) == 4
        assert len({*said, *said.values()}) == 6
        (question,) = find(tokens, list(b"\nThe path from "))
        start = tuple(tokens[question + 15 : question + 20])
        assert tokens[question + 20 : question + 25] == list(b" is: ")
        assert (question + 20) % L == 0, "a landmark falls right before the cue"
        middle, end = said[start], said[said[start]]
        assert tokens[question + 25 : question + 37] == [*middle, *b", ", *end]
        assert row.answer == range(question + 25, question + 37)
        orders.add(list(said).index(start) < list(said).index(middle))
    assert orders == {False, True}, "needles stand in any order"


def test_more_hops_and_more_noise_are_more_needles():
    config = HopsConfig(num_hops=3, num_noise=2, name_tokens=4)
    tokens = whole(config.build(1000, None).row(0, is_test=False), 1000)
    assert config.name == "3-hop"
    assert len(find(tokens, list(b"\nDEF "))) == 9


def test_half_of_all_names_are_drawn_in_no_time_and_no_two_are_alike():
    """One draw of 126 names out of 256 tokens is never all different."""
    config = HopsConfig(num_noise=41, name_tokens=1)
    count, size = config.names_needed
    words = Words(config.build(2000, None).tokenizer, np.random.default_rng(0))
    names = [words.names(count, size) for _ in range(300)]
    assert all(len({int(name[0]) for name in drawn}) == count == 126 for drawn in names)
    shares = np.bincount(np.ravel(names), minlength=257) / 300
    assert shares[words.tokenizer.eos_token] == 0
    assert np.delete(shares, words.tokenizer.eos_token) == pytest.approx(126 / 256, abs=0.15)


@pytest.mark.parametrize(("depth", "gap"), [(0.0, 0), (1.0, 386), (0.5, 193)])
def test_a_depth_places_the_needle(depth, gap):
    """Of 415 tokens before the question 29 are the needle: 386 are text."""
    data = replace(TASKS["passkey"], depth=depth).build(T, None)
    for index in range(5):
        (needle,) = find(whole(data.row(index, is_test=True)), list(b"\nThe passkey is: "))
        asked = find(whole(data.row(index, is_test=True)), list(b"\nWhat is the passkey?"))
        assert (asked, needle) == ([415], gap)


def test_text_without_its_needles_is_the_corpus(data):
    row = data.row(0, is_test=True)
    tokens = whole(row)
    for place, part in reversed(row.parts):
        assert tokens[place : place + len(part)] == part.tolist()
        del tokens[place : place + len(part)]
    assert tokens == row.text.read(row.start, len(tokens)).tolist()


def test_rows_depend_on_seed_part_and_index_alone(task, data):
    again = task.build(T, None)
    other = replace(task, seed=1).build(T, None)
    rows = [whole(data.row(i, is_test=test)) for i in range(3) for test in (False, True)]
    assert len(set(map(tuple, rows))) == 6
    assert rows == [whole(again.row(i, is_test=test)) for i in range(3) for test in (False, True)]
    assert whole(other.row(0, is_test=False)) != rows[0]
    batch = data.train_batch(1, 2)
    assert batch.tokens.tolist() == [whole(data.row(i, is_test=False))[:-1] for i in (2, 3)]
    assert data.fingerprint == again.fingerprint == other.fingerprint


def test_tasks_of_one_text_are_told_apart():
    assert len({task.build(T, None).fingerprint for task in TASKS.values()}) == len(TASKS)


def test_a_needle_may_be_right_before_the_question():
    data = PasskeyConfig(key_tokens=12).build(2 * 64 + 4 + 12 - 1, None)  # 64 tokens of text
    places = {data.row(index, is_test=False).parts[0][0] for index in range(600)}
    assert places == set(range(65))


def test_training_and_test_rows_are_of_different_text(data):
    train, test = (data.row(0, is_test=each).text for each in (False, True))
    assert train.num_tokens > 10 * test.num_tokens
    sample = test.read(1000, 200).tolist()
    text = train.read(0, train.num_tokens).astype(np.uint16).tobytes()
    assert np.array(sample, np.uint16).tobytes() not in text


@pytest.mark.parametrize("size", [1, 64, 100, 511, 600])
def test_segments_joined_are_the_whole_rows(data, size):
    batches = list(data.validation_batches(2))
    assert [batch.tokens.shape for batch in batches] == [(2, T), (2, T)]
    assert (batches[1].targets[1] == NO).all(), "padding completes the last batch"
    assert all((batch.targets[0] != NO).any() for batch in batches)
    for batch, segments in zip(batches, data.test_segments(size, 2), strict=True):
        parts = list(segments)
        assert all(part.tokens.shape[1] == size for part in parts[:-1])
        assert torch.equal(torch.cat([part.tokens for part in parts], 1), batch.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts], 1), batch.targets)


def test_a_row_of_16_million_tokens_is_never_in_memory(task):
    num_tokens = 2**24
    data = task.build(num_tokens, None)
    (segments, *_) = data.test_segments(2**16)
    tracemalloc.start()
    asked, last = 0, None
    for batch in segments:
        asked, last = asked + int((batch.targets != NO).sum()), batch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert asked == len(data.row(0, is_test=True).answer)
    assert (last.targets != NO).any(), "the question is in the last segment"
    assert peak < 16 * 2**20, "some arrays of a segment, not the row's 128 MiB"


def test_a_task_survives_json(task):
    assert from_json(to_json(task)) == task


def test_each_field_replaced_is_named_or_gives_rows(task):
    def tokens(config):
        return config.build(T, None).train_batch(0, 1).tokens.float()

    check_fields(task, tokens)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: PasskeyConfig(depth=1.5), "depth must be from 0 to 1, got 1.5"),
        (lambda: PasskeyConfig(key_tokens=0), "key_tokens must be from 1 to 1000, got 0"),
        (lambda: HopsConfig(num_hops=0), "num_hops must be from 1 to 1000, got 0"),
        (lambda: HopsConfig(test_rows=0), "test_rows must be at least 1, got 0"),
        (lambda: PasskeyConfig(text=DataConfig(streaming=True)), "text must be tokenized before"),
        (
            lambda: HopsConfig(text=DataConfig(mask_documents=True)),
            "text must be .* read across its documents .mask_documents=False.",
        ),
        (lambda: PasskeyConfig().build(511.5, None), "seq_len must be an int, got 511.5"),
        (lambda: HopsConfig().build("511", None), "seq_len must be an int, got '511'"),
        (lambda: PasskeyConfig().build(76, None), "seq_len must be at least 77 .* got 76"),
        (
            lambda: HopsConfig(num_noise=99, name_tokens=1).build(T, None),
            "give too few names of 1 tokens, 600 are needed",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused_by_name(task, message):
    with pytest.raises(UserError, match=message):
        task()


def test_the_shortest_row_has_no_text_before_the_question():
    """31 tokens of needle and 33 of question fill the first chunk."""
    row = PasskeyConfig(key_tokens=12).build(64 + 4 + 12 - 1, None).row(0, is_test=False)
    assert [place for place, _ in row.parts] == [0, 31, 64]
    assert row.answer == range(68, 80)


class Answerer(torch.nn.Module):
    """Stands for a model: guesses each token that is asked for from all tokens up to its place."""

    def __init__(self, guess):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.guess = guess

    def init_state(self, batch):
        return torch.zeros(batch, 0, dtype=torch.int64)

    def forward(self, tokens, state, last_only):
        return LMOutput(tokens, torch.cat([state, tokens], 1))

    def score(self, tokens, targets, borders, state):
        seen = torch.cat([state, tokens], 1)
        hits = torch.zeros_like(targets, dtype=torch.bool)
        for row, t in (targets != NO).nonzero().tolist():
            text = seen[row, : state.shape[1] + t + 1].numpy().astype("<u2").tobytes()
            hits[row, t] = self.guess(text) == targets[row, t]
        return Score(torch.zeros(()), (targets != NO).sum(), hits, seen)


def wide(words):
    return np.frombuffer(words, np.uint8).astype("<u2").tobytes()


def after(text, words, tokens=None):
    """Return what follows the last place of the words, and begins with these tokens."""
    place = text.rindex(wide(words) + (b"" if tokens is None else tokens))
    found = text[place + 2 * len(words) :]
    return found if tokens is None else found[len(tokens) :]


def passkey(text):
    said = len(after(text, b"What is the passkey? The passkey is ")) // 2
    return np.frombuffer(after(text, b"\nThe passkey is: "), "<u2")[said]


def path(text):
    asked = after(text, b"\nThe path from ")
    said = len(asked) // 2 - 10
    names = [asked[:10]]
    for _ in range(2):
        names.append(after(text, b"\nDEF ", names[-1] + wide(b"->"))[:10])
    return np.frombuffer(names[1] + wide(b", ") + names[2], "<u2")[said]


@pytest.mark.parametrize("num_tokens", [2**10, 2**14, 2**20])
def test_who_reads_the_text_answers_and_who_guesses_does_not(task, num_tokens):
    data = replace(task, test_rows=2).build(num_tokens, None)
    read = passkey if isinstance(task, PasskeyConfig) else path
    draw = np.random.default_rng(0)

    def asked(guess):
        return evaluate_segments(Answerer(guess), data.test_segments(2**14))

    right = asked(read)
    assert (right.exact_match, right.accuracy) == (1, 1)
    assert asked(lambda text: draw.integers(256)).exact_match == 0
    assert right.tokens == 2 * len(data.row(0, is_test=True).answer)
