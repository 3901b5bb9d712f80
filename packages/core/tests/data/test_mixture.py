"""Texts mixed by weights: their shares of the training, and the validation part of all of them."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.data import NO_TARGET, DataConfig, MixtureConfig
from mezzo_core.data.mixture import BLOCK_ROWS
from mezzo_core.errors import UserError

TEXT = DataConfig(validation_fraction=0.3)


@pytest.fixture
def mixture(tmp_path):
    """Mix documents of letters, of digits and of marks."""
    texts = []
    for name, word, length in (
        ("letters", "abcdefg", 25),
        ("digits", "12345", 1),
        ("marks", "+-", 5),
    ):
        path = tmp_path / f"{name}.jsonl"
        lines = (json.dumps({"text": (word * 9)[i : i + length]}) for i in range(9))
        path.write_text("\n".join(lines))
        texts.append(replace(TEXT, source=str(path)))
    return MixtureConfig(tuple(texts), (3, 0.5, 1.5))


def masked(config):
    return replace(config, texts=tuple(replace(t, mask_documents=True) for t in config.texts))


def kinds(rows):
    """Count the rows by the text that they are of; END, 256, is in all texts."""
    words = ("".join(map(chr, row)).replace("Ā", "") for row in rows.tolist())
    return Counter("a" if w.isalpha() else "1" if w.isdigit() else "+" for w in words)


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_each_text_has_its_share_of_every_block_of_rows(mixture):
    data = mixture.build(4, None)
    for block in range(2):  # in batches that end within, at, and beyond a block
        batches = [data.train_batch(2 * block + i, BLOCK_ROWS // 2).tokens for i in range(2)]
        assert kinds(torch.cat(batches)) == {"a": 6000, "1": 1000, "+": 3000}
    assert kinds(data.train_batch(0, 3 * BLOCK_ROWS).tokens)["a"] == 18_000
    seeded = replace(mixture, seed=1).build(4, None)
    batches = [data.train_batch(0, 400), data.train_batch(25, 400), seeded.train_batch(0, 400)]
    drawn = ["".join(next(iter(kinds(row[None]))) for row in batch.tokens) for batch in batches]
    assert len(set(drawn)) == 3
    assert all(abs(rows.count("a") - 240) < 40 for rows in drawn)  # four standard deviations


@pytest.mark.parametrize("mask_documents", [False, True])
def test_each_text_keeps_its_order_and_its_epochs(mixture, mask_documents):
    mixture = masked(mixture) if mask_documents else mixture
    data, alone = mixture.build(5, None), [text.build(5, None) for text in mixture.texts]
    batch = data.train_batch(33, 300)  # over the border of a block
    taken = kinds(data.train_batch(0, 33 * 300).tokens.view(-1, 5))
    for i in range(300):
        row = batch.part(i, 300)
        kind = max(kinds(row.tokens))
        wanted = alone["a1+".index(kind)].train_batch(taken[kind], 1)
        taken[kind] += 1
        assert same(row[:2], wanted[:2])
        if mask_documents:
            assert torch.equal(row.cu_seqlens.unique(), wanted.cu_seqlens.unique())
    if mask_documents:  # as many borders as the text of the shortest documents may need
        most = max(len(text.train_batch(0, 1).cu_seqlens) for text in alone)
        assert len(row.cu_seqlens) == most > len(alone[0].train_batch(0, 1).cu_seqlens)
    assert taken["1"] * 5 > alone[1].num_train_tokens  # more than an epoch


def test_the_step_alone_determines_the_batch_of_a_resumed_run(mixture):
    whole, resumed = mixture.build(4, None), mixture.build(4, None)
    for step in range(2495, 2505):  # over the border of a block
        whole.train_batch(step, 4)
    resumed.load_state_dict(whole.state_dict())
    assert whole.state_dict() == {}
    assert same(resumed.train_batch(2504, 4), whole.train_batch(2504, 4))
    parts = [mixture.build(4, None, rank=rank, world_size=2) for rank in range(2)]
    rows = [part.train_batch(7, 4).part(rank, 2).tokens for rank, part in enumerate(parts)]
    assert torch.equal(torch.cat(rows), whole.train_batch(7, 4).tokens)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_all_that_the_texts_hold_out_is_validated_once_and_spread_evenly(mixture, mask_documents):
    mixture = masked(mixture) if mask_documents else mixture
    data, alone = mixture.build(3, None), [text.build(3, None) for text in mixture.texts]
    wanted = [b for text in alone for b in text.validation_batches(1)]
    found = [batch.part(i, 7) for batch in data.validation_batches(7) for i in range(7)]
    found, padding = found[: len(wanted)], found[len(wanted) :]
    assert all(bool((row.targets == NO_TARGET).all()) for row in padding)
    assert sorted(str(row[:2]) for row in found) == sorted(str(row[:2]) for row in wanted)
    first = kinds(torch.cat([row.tokens for row in found[:3]]))
    assert not first["1"], "a text of few windows does not begin"
    half = kinds(torch.cat([row.tokens for row in found[: len(found) // 2]]))
    every = kinds(torch.cat([row.tokens for row in found]))
    assert all(abs(half[kind] - every[kind] / 2) <= 1 for kind in "a1+")
    assert data.num_validation_bytes == sum(text.num_validation_bytes for text in alone)
    assert data.validation.num_targets == sum(text.validation.num_targets for text in alone)
    assert (data.num_train_tokens, data.vocab_size, data.seq_len) == (None, 257, 3)


def test_a_mixture_is_stored_and_known_again(mixture, tmp_path):
    assert from_json(json.loads(json.dumps(to_json(mixture)))) == mixture
    fingerprint = mixture.build(4, None).fingerprint
    assert mixture.build(5, tmp_path / "tokens").fingerprint == fingerprint
    (tmp_path / "marks.jsonl").write_text('{"text": "+-*/"}\n' * 9)
    assert mixture.build(4, None).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": (1, 0.0)}, r"weights\[1\] .* must be above 0 and below 2\^63, got 0"),
        ({"weights": (-1, 1)}, r"weights\[0\] .* must be above 0 and below 2\^63, got -1"),
        (
            {"weights": (1, float("nan"))},
            r"weights\[1\] .* must be above 0 and below 2\^63, got nan",
        ),
        (
            {"weights": (1, float("inf"))},
            r"weights\[1\] .* must be above 0 and below 2\^63, got inf",
        ),
        (
            {"weights": (1, 1e-9)},
            r"weights\[1\] .* must be at least 1 / 10000 of their sum, got 1e-09",
        ),
        ({"weights": (1,)}, "weights must be as many as the texts, at least one, got 1 for 2"),
        ({"texts": (), "weights": ()}, "weights must be as many as the texts, at least one, got 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"texts": (TEXT, "words")}, r"texts\[1\] must be DataConfig, got 'words'"),
        (
            {"tokenizer": "x.json"},
            r"texts\[1\].tokenizer must be texts\[0\]'s 'byte', got 'x.json'",
        ),
        ({"add_bos": True}, r"texts\[1\].add_bos must be texts\[0\]'s False, got True"),
        ({"mask_documents": True}, r"texts\[1\].mask_documents must be texts\[0\]'s False"),
        ({"streaming": True}, r"texts\[1\].streaming \(--streaming\) must be False: a stream"),
    ],
)
def test_texts_and_weights_that_do_not_fit_are_one_line(changes, words):
    fields = {k: v for k, v in changes.items() if k in ("texts", "weights", "seed")}
    other = {k: v for k, v in changes.items() if k not in fields}
    given = {"texts": (TEXT, replace(TEXT, **other)), "weights": (1, 1), **fields}
    with pytest.raises(UserError, match=words) as error:
        MixtureConfig(**given)
    assert "\n" not in str(error.value)


def test_a_text_that_is_too_short_to_train_on_is_named(mixture, tmp_path):
    (tmp_path / "digits.jsonl").write_text('{"text": "1"}\n{"text": "2"}')
    data = mixture.build(4, None)
    assert data.validation.num_targets
    with pytest.raises(UserError, match=r"texts\[1\], '.*digits.jsonl': the training part has 2"):
        data.check_training(1)
    held_out = replace(mixture.texts[1], validation_fraction=1.0)
    texts = (mixture.texts[0], held_out, mixture.texts[2])
    assert replace(mixture, texts=texts).build(4, None).num_train_tokens == 0


def test_steps_and_batches_that_are_none_are_refused(mixture):
    data = mixture.build(4, None)
    with pytest.raises(ValueError, match="step must be 0 or more, got -1"):
        data.train_batch(-1, 4)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on"):
        data.train_batch(0, 0)
