"""The synthetic tasks' rows are those of MAD's released generators, and hold what the task says."""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.testing.arguments import check_fields
from mezzo_recurrent_transformer.synthetic.task import Draws
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

NO = -100
RECALL = "199f431a51cec247"
NOISY = "9676b6dcf2c315f5"
COMPRESSED = "666df50ebe37fa8b"
GOLDEN = {
    ("in-context-recall", False): (RECALL, "f925a1545d85e8d7", "1 14 2 9 6 13 5 15 3 14"),
    ("in-context-recall", True): (RECALL, "467591c5141e4ae6", "1 14 2 9 6 13 5 15 3 14"),
    ("noisy-in-context-recall", False): (NOISY, "1e8bb1cd086cd4fd", "1 9 6 15 3 12 25 19 5 13"),
    ("noisy-in-context-recall", True): (NOISY, "d0ff7c8f65dc6c4b", "1 9 6 15 3 12 25 19 5 13"),
    ("fuzzy-in-context-recall", False): (
        "465875cca2304f86",
        "9f60032ffdeb26bc",
        "15 15 15 15 15 15 15 2 4 8",
    ),
    ("fuzzy-in-context-recall", True): (
        "b42f41f88de567bf",
        "6164312f6f711777",
        "15 15 15 15 15 15 15 6 1 0",
    ),
    ("selective-copying", False): ("2ce80d03b58916e2", "77dcfe7f3cf19615", ""),
    ("selective-copying", True): ("2ce80d03b58916e2", "77dcfe7f3cf19615", ""),
    ("memorization", False): (
        "8488c67de546c279",
        "ff15e49e3567fdcf",
        "115 255 4 255 77 255 19 255 37 255",
    ),
    ("compression", False): (COMPRESSED, COMPRESSED, "10 3 11 4 3 11 9 10 14 5"),
}
"""First digits of the SHA-256 of inputs and targets of 64 rows, and the first tokens of the first
row, by MAD's released code, training or test rows drawn first."""
SMALL = [
    replace(TASKS["in-context-recall"], seq_len=16, train_rows=20, test_rows=6),
    replace(TASKS["noisy-in-context-recall"], seq_len=16, train_rows=20, test_rows=6),
    replace(TASKS["fuzzy-in-context-recall"], seq_len=24, train_rows=20, test_rows=6),
    replace(TASKS["selective-copying"], seq_len=16, num_words=4, train_rows=20, test_rows=6),
    replace(TASKS["memorization"], vocab_size=12, seq_len=8, train_rows=20, test_rows=6),
    replace(TASKS["compression"], seq_len=8, train_rows=20, test_rows=6),
    replace(TASKS["copying"], seq_len=16, min_letters=2, max_letters=5, train_rows=20, test_rows=6),
]


def digest(rows):
    assert rows.dtype == np.int64
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:16]


def drawn(name, *, is_test, num_rows=64, **changes):
    rows = replace(TASKS[name], **changes).draw(num_rows, Draws.start(), is_test=is_test)
    return [list(zip(*row, strict=True)) for row in zip(*map(np.ndarray.tolist, rows), strict=True)]


def test_rows_are_those_of_the_released_generators():
    for (name, is_test), (inputs, targets, first) in GOLDEN.items():
        rows = TASKS[name].draw(64, Draws.start(), is_test=is_test)
        assert (digest(rows.inputs), digest(rows.targets)) == (inputs, targets), name
        told = " ".join(map(str, rows.inputs[0, : len(first.split())]))
        assert told == first, name


def test_the_map_to_memorize_is_mads():
    value_of = TASKS["memorization"].value_of()
    first = dict(list(value_of.items())[:5])
    assert first == {120: 175, 0: 239, 101: 249, 119: 185, 114: 174}
    assert len(value_of) == len(set(value_of.values())) == 127


@pytest.mark.parametrize("name", ["in-context-recall", "noisy-in-context-recall"])
def test_recall_asks_for_the_values_of_keys_seen_before(name):
    task = TASKS[name]
    first_noise = task.vocab_size - task.num_noise
    num_noise = 0
    for row in drawn(name, is_test=True):
        tokens, targets = zip(*row, strict=True)
        values = {}
        for i in range(0, len(tokens), 2):
            key, value = tokens[i], [*tokens, targets[-1]][i + 1]
            if key >= first_noise:
                num_noise += 1
                assert value >= first_noise
                assert targets[i] == NO
            elif key in values:
                assert targets[i] == value == values[key]
            else:
                values[key] = value
                assert targets[i] == NO
                assert key < first_noise // 2 <= value < first_noise
        assert set(targets[1::2]) == {NO}
        assert targets[-1] != NO
    share = num_noise / (64 * 62)  # one of 63 pairs is spared
    assert share == pytest.approx(task.noise_share, abs=0.03)
    assert (share > 0) == (name != "in-context-recall")


def test_the_probe_of_fuzzy_recall_is_shown_before_it_is_asked_for_in_all_but_a_few_rows():
    known, asked = 0, Counter()
    for row in drawn("fuzzy-in-context-recall", is_test=True, num_rows=300):
        tokens, targets = map(list, zip(*row, strict=True))
        answer = [target for target in targets if target != NO]
        assert answer
        asked[len(answer)] += 1
        tokens.append(targets[-1])
        first = next(i for i, token in enumerate(tokens) if token != 15)
        assert 15 not in tokens[first:]
        assert all(t in (NO, tokens[i + 1]) for i, t in enumerate(targets))
        assert all(7 <= t < 15 for t in answer)
        length = next(n for n in (1, 2, 3) if tokens[-n - 1] < 7)
        probe = tokens[-length - 3 :]
        assert len(set(probe)) == len(probe)
        text = [tokens[i : i + len(probe)] for i in range(len(tokens) - len(probe))]
        known += probe in text
    assert 0.95 * 300 < known <= 300
    assert sum(count * n for count, n in asked.items()) / 300 == pytest.approx(4.6, abs=0.4)


def test_training_rows_of_recall_ask_for_every_next_token():
    for name in ("in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"):
        for row in drawn(name, is_test=False, num_rows=8):
            tokens, targets = zip(*row, strict=True)
            assert tokens[1:] == targets[:-1]


def test_selective_copying_asks_for_the_words_in_their_order():
    for row in drawn("selective-copying", is_test=True):
        tokens, targets = zip(*row, strict=True)
        words = [token for token in tokens if token < 14]
        assert tokens[-17] == 15
        assert tokens[-18] < 14, "a word is the last thing before the bar"
        assert set(tokens[-16:]) == {14}
        assert [*targets] == [NO] * 240 + words
        assert len(words) == 16


def test_memorization_has_one_map_for_training_and_the_test():
    task = TASKS["memorization"]
    value_of = task.value_of()
    train, test = task.build(32, None)._train, task.build(32, None)._test
    assert not np.array_equal(train.inputs, test.inputs[:256])
    for rows in (train, test):
        assert (rows.inputs[:, 1::2] == 255).all()
        assert (rows.targets[:, ::2] == NO).all()
        expected = np.vectorize(value_of.get)(rows.inputs[:, ::2])
        assert (rows.targets[:, 1::2] == expected).all()


@pytest.mark.parametrize("is_test", [False, True])
def test_copying_asks_for_each_whole_string_and_the_dot(is_test):
    lengths = Counter()
    for row in drawn("copying", is_test=is_test):
        tokens, targets = zip(*row, strict=True)
        starts = [i for i, token in enumerate(tokens) if token == 26]
        assert len(starts) == 1 or not is_test
        for start in starts:
            rest = tokens[start + 1 :]
            string = rest[: rest.index(27)] if 27 in rest else rest
            length = len(string)
            asked = targets[start : start + 2 * length + 2]
            whole = (*tokens, None)[start : start + 2 * length + 3][-1] in (28, None)
            if 27 in rest and start + 2 * length + 2 <= len(tokens) and whole:
                assert asked == (NO,) * (length + 1) + (*string, 28)
                lengths[length] += 1
            else:
                assert set(targets[start:]) == {NO}
        if is_test:
            assert set(tokens[2 * length + 3 :]) == {29}
            assert set(targets[2 * length + 2 :]) == {NO}
    assert {5, 20} <= set(lengths) <= set(range(5, 21))


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_a_task_is_a_source_of_its_rows(task):
    source = task.build(task.num_tokens, None)
    batch = source.train_batch(0, 20)
    assert batch.tokens.shape == batch.targets.shape == (20, task.num_tokens)
    assert source.vocab_size == task.vocab_size
    tests = list(source.validation_batches(4))
    assert [len(each.tokens) for each in tests] == [4, 4]
    assert (tests[1].targets[2:] == NO).all()
    assert (torch.cat([each.targets for each in tests])[:6] != NO).any(1).all()
    tokens = torch.cat([batch.tokens, *(each.tokens for each in tests)])
    assert 0 <= tokens.min() <= tokens.max() < task.vocab_size
    other = replace(task, seed=1).build(task.num_tokens, None)
    assert other.fingerprint == source.fingerprint
    assert not torch.equal(other.train_batch(0, 20).tokens, batch.tokens)
    assert torch.equal(other.train_batch(0, 20).tokens.sort(0)[0], batch.tokens.sort(0)[0])
    first = [part.tolist() for part in (*source._train, *source._test)]
    draws = Draws.start()
    again = [*task.draw(20, draws, is_test=False), *task.draw(6, draws, is_test=True)]
    assert first == [part.tolist() for part in again], "the test goes on where training ends"


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_the_global_generator_is_left_alone(task):
    before = np.random.get_state()[1].tolist()
    task.draw(4, Draws.start(), is_test=True)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_a_task_survives_json(task):
    assert from_json(to_json(task)) == task


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_each_field_replaced_is_named_or_gives_rows(task):
    def tokens(config):
        rows = replace(config, train_rows=2, test_rows=1).draw(2, Draws.start(), is_test=False)
        return torch.from_numpy(rows.inputs).float()

    check_fields(task, tokens)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("in-context-recall", {"seq_len": 127}, "seq_len must be even and at least 4, got 127"),
        ("in-context-recall", {"vocab_size": 1}, "num_noise must be from 0 to vocab_size - 2"),
        ("in-context-recall", {"noise_share": 0.5}, "noise_share must be above 0 .* 0 without"),
        ("noisy-in-context-recall", {"noise_share": 0.0}, "noise_share must be above 0"),
        ("fuzzy-in-context-recall", {"vocab_size": 6}, "vocab_size must be at least 7, got 6"),
        ("selective-copying", {"num_words": 128}, r"from 1 to \(seq_len - 1\) / 2 = 127, got 128"),
        ("memorization", {"seq_len": 31}, "seq_len must be even"),
        ("compression", {"vocab_size": 1}, "vocab_size must be at least 2, got 1"),
        ("copying", {"max_letters": 110}, "max_letters must be from 1 to seq_len / 2 - 1 = 109"),
        ("copying", {"min_letters": 21}, "min_letters must be from 1 to max_letters = 20, got 21"),
        ("copying", {"test_rows": 0}, "test_rows must be at least 1, got 0"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_name(name, changes, message):
    with pytest.raises(UserError, match=message):
        replace(TASKS[name], **changes)


def test_a_row_of_another_length_is_refused():
    with pytest.raises(UserError, match="seq_len must be that of the rows, 127, got 128"):
        TASKS["in-context-recall"].build(128, None)
