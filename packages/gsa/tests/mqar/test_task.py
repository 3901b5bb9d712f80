"""MQAR's rows equal the released generator's, and follow the task's rules."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from mezzo_core.errors import UserError
from mezzo_gsa.mqar.task import MQARConfig

GOLDEN = {
    (64, 4): ("dc288e4fec9c7a82", "92cd01c77c2fa53b"),
    (128, 8): ("bca5f7ecd6023831", "89714debf871e6f2"),
    (256, 16): ("106a2274e1a6de21", "3bf66c21b77396e3"),
    (512, 64): ("7457aad1c8916904", "22b471c1e43c263b"),
}
"""First digits of the SHA-256 of inputs and targets of 16 rows, seed 0, by the released code."""
RANDOM = {
    (64, 4): "0f195a9e490668b4",
    (128, 8): "3b91578f8c1e19ff",
    (256, 16): "7845b8b8194e789b",
    (512, 64): "74618cbcc6bc562b",
}
"""Of the inputs with `random_non_queries`, by the released code after torch.manual_seed(0)."""


def digest(rows):
    assert rows.dtype == np.int64
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("size", GOLDEN)
def test_a_seed_gives_the_rows_of_the_released_generator(size):
    rows = MQARConfig(seq_len=size[0], num_pairs=size[1]).generate(16, seed=0)
    assert (digest(rows.inputs), digest(rows.targets)) == GOLDEN[size]


@pytest.mark.parametrize("size", RANDOM)
def test_random_tokens_are_those_of_the_released_generator(size):
    task = MQARConfig(seq_len=size[0], num_pairs=size[1], random_non_queries=True)
    rows = task.generate(16, seed=0)
    assert (digest(rows.inputs), digest(rows.targets)) == (RANDOM[size], GOLDEN[size][1])
    others = task.generate(16, seed=1)
    same = (rows.inputs == others.inputs)[(rows.targets < 0) & (others.targets < 0)]
    assert same.mean() < 0.01


@pytest.mark.parametrize(("vocab", "T", "P"), [(8192, 512, 64), (65, 64, 16), (41, 20, 1)])
def test_every_question_has_its_answer_among_the_pairs(vocab, T, P):
    rows = MQARConfig(vocab, T, P).generate(50, seed=3)
    assert rows.inputs.shape == (50, T)
    assert (rows.targets[:, : 2 * P] == -100).all()
    assert ((rows.targets != -100).sum(1) == P).all()
    for tokens, label in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        pairs = dict(zip(tokens[0 : 2 * P : 2], tokens[1 : 2 * P : 2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == P
        assert all(0 < key < vocab // 2 <= value < vocab for key, value in pairs.items())
        asked = {tokens[t]: label[t] for t in range(T) if label[t] != -100}
        assert asked == pairs
        assert sum(token != 0 for token in tokens) == 3 * P


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 129}, r"num_pairs must be from 1 to seq_len / 4 = 128 .* got 129"),
        ({"seq_len": 511}, "seq_len must be even, got 511"),
        ({"vocab_size": 512}, "vocab_size must be above seq_len = 512, got 512"),
        ({"power": 0.0}, r"power must be positive and at most 10, got 0\.0"),
        ({"train_pairs": (8, 65)}, "train_pairs must be from 1 to num_pairs = 64, got \\(8, 65\\)"),
    ],
)
def test_a_size_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        MQARConfig(**options)


TINY = MQARConfig(vocab_size=32, seq_len=16, num_pairs=4, train_rows=20, test_rows=5)


def test_test_rows_are_others():
    source = TINY.build(16, None)
    (batch,) = source.validation_batches(5)
    assert np.array_equal(batch.tokens, TINY.parts[1].inputs)
    assert np.array_equal(batch.targets, TINY.parts[1].targets)
    train = source.train_batch(0, 20).tokens.tolist()
    assert not any(row in train for row in batch.tokens.tolist())


def test_rows_to_train_on_may_have_fewer_pairs():
    config = replace(TINY, train_pairs=(2, 4))
    train, test = config.parts
    assert (train.targets != -100).sum(1).tolist() == [2] * 10 + [4] * 10
    assert np.array_equal(test.inputs, TINY.parts[1].inputs), "the test is the task's"
    assert config.build(16, None).num_train_tokens == 20 * 16
    assert replace(config, train_rows=21).build(16, None).num_train_tokens == 21 * 16
    with pytest.raises(UserError, match="train_rows must be at least 2, got 1"):
        replace(config, train_rows=1).build(16, None)


def test_the_fingerprint_tells_what_is_learned_from():
    print_of = lambda **change: replace(TINY, **change).build(16, None).fingerprint  # noqa: E731
    assert print_of() == print_of(seed=5) == print_of(test_rows=7)
    changes = {"train_rows": 21}, {"train_pairs": (2, 4)}, {"random_non_queries": True}
    assert len({print_of(), *(print_of(**change) for change in changes)}) == 4


def test_rows_of_another_length_are_refused():
    with pytest.raises(UserError, match="seq_len must be that of the task, 16, got 32"):
        TINY.build(32, None)
