"""MQAR's rows are those of the released generator, and hold what the task says."""

import hashlib

import numpy as np
import pytest
from mezzo_core.data.mqar import MQARConfig
from mezzo_core.errors import UserError

GOLDEN = {
    (64, 4): ("dc288e4fec9c7a82", "92cd01c77c2fa53b"),
    (128, 8): ("bca5f7ecd6023831", "89714debf871e6f2"),
    (256, 16): ("106a2274e1a6de21", "3bf66c21b77396e3"),
    (512, 64): ("7457aad1c8916904", "22b471c1e43c263b"),
}
"""First digits of the SHA-256 of inputs and labels of 16 rows, seed 0, by the released code."""


def digest(rows):
    assert rows.dtype == np.int64
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("size", GOLDEN)
def test_a_seed_gives_the_rows_of_the_released_generator(size):
    rows = MQARConfig(seq_len=size[0], num_pairs=size[1]).generate(16, seed=0)
    assert (digest(rows.inputs), digest(rows.labels())) == GOLDEN[size]


def test_the_first_row_is_as_it_was_printed():
    rows = MQARConfig().generate(16, seed=0)
    assert rows.inputs[0, :8].tolist() == [583, 5660, 1962, 6170, 1958, 5628, 3194, 4674]
    asked = np.flatnonzero(rows.labels()[0] != -100)
    assert asked[:5].tolist() == [128, 130, 132, 134, 136]
    assert asked[-1] == 504


@pytest.mark.parametrize(("vocab", "T", "P"), [(8192, 512, 64), (65, 64, 16), (41, 20, 1)])
def test_every_question_has_its_answer_among_the_pairs(vocab, T, P):
    rows = MQARConfig(vocab, T, P).generate(50, seed=3)
    assert rows.inputs.shape == (50, T)
    assert (rows.positions >= 2 * P).all()
    assert (rows.positions < T).all()
    labels = rows.labels()
    for tokens, label in zip(rows.inputs.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(tokens[0 : 2 * P : 2], tokens[1 : 2 * P : 2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == P
        assert all(0 < key < vocab // 2 <= value < vocab for key, value in pairs.items())
        asked = {tokens[t]: label[t] for t in range(T) if label[t] != -100}
        assert asked == pairs
        assert sum(token != 0 for token in tokens) == 3 * P


def test_early_questions_are_likelier():
    rows = MQARConfig(seq_len=256, num_pairs=1).generate(4000, seed=0)
    place = (rows.positions[:, 0] - 2) // 2
    law = np.arange(1, 128) ** -0.99
    expected = law / law.sum()
    found = np.bincount(place, minlength=127) / 4000
    assert abs(found[0] - expected[0]) < 4 * np.sqrt(expected[0] / 4000)
    assert abs(found[:10].sum() - expected[:10].sum()) < 4 * np.sqrt(0.25 / 4000)


def test_another_seed_gives_other_rows_and_the_global_generator_is_left_alone():
    config = MQARConfig(seq_len=64, num_pairs=4)
    before = np.random.get_state()[1].tolist()
    first, again, other = (config.generate(8, seed).inputs for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 129}, r"num_pairs must be at most seq_len / 4 = 128 .* got 129"),
        ({"num_pairs": 0}, "num_pairs must be at least 1, got 0"),
        ({"seq_len": 511}, "seq_len must be even, got 511"),
        ({"vocab_size": 512}, "vocab_size must be above seq_len = 512, got 512"),
        ({"power": 0.0}, r"power must be positive, got 0\.0"),
        ({"power": float("nan")}, "power must be positive, got nan"),
    ],
)
def test_a_size_that_cannot_be_is_named(options, message):
    with pytest.raises(UserError, match=message):
        MQARConfig(**options)


@pytest.mark.parametrize(
    ("num_rows", "seed", "message"),
    [(0, 0, "num_rows must be at least 1, got 0"), (1, -1, "seed must be"), (1, 2**32, "seed")],
)
def test_a_draw_that_cannot_be_is_named(num_rows, seed, message):
    with pytest.raises(UserError, match=message):
        MQARConfig().generate(num_rows, seed)
