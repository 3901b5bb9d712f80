import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.data import NO_TARGET, DataConfig
from mezzo_core.data.batches import Windows
from mezzo_core.data.corpora import open_corpus
from mezzo_core.data.tokenized_corpus import Checksums, TokenizedCorpus, tokenize_corpus
from mezzo_core.data.tokenized_text import TokenizedText, split_documents
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError

END = 1000  # of the numbered corpora: every other token is unique
LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=12)


class Numbers(ByteTokenizer):
    """Stands for a tokenizer whose tokens are numbers below END."""

    vocab_size = END + 1
    eos_token = END

    def decode(self, tokens):
        """A byte for each number."""
        return "." * sum(token < END for token in tokens)


class OtherBytes(ByteTokenizer):
    """The same tokens under another name."""

    identity = "other"


def numbered(lengths, seq_len=4, mask_documents=False, seed=0, fraction=0.3):
    """A corpus whose tokens are 0, 1, 2, ..., in documents of these lengths, each ended."""
    tokens, ends, first = [], [], 0
    for length in lengths:
        tokens += [*range(first, first + length), END]
        first += length
        ends.append(len(tokens))
    tokenized = TokenizedCorpus(
        np.array(tokens, np.uint16), np.array(ends), np.array(lengths), Checksums("0", "0")
    )
    return TokenizedText(
        tokenized,
        Numbers(),
        seq_len=seq_len,
        validation_fraction=fraction,
        seed=seed,
        mask_documents=mask_documents,
    )


def targets_of(batches):
    return Counter(
        token
        for batch in batches
        for token in batch.targets.flatten().tolist()
        if token != NO_TARGET
    )


@settings(max_examples=settings().max_examples // 4)
@given(
    lengths=LENGTHS, seq_len=st.integers(1, 7), batch_size=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_every_token_is_in_one_part_and_predicted_once(lengths, seq_len, batch_size, seed):
    lengths = [*lengths, 30]
    data = numbered(lengths, seq_len, seed=seed)
    windows = -(-(data.num_train_tokens - 1) // seq_len)
    epoch = targets_of(data.train_batch(step, 1) for step in range(windows))
    held_out = targets_of(data.validation_batches(batch_size))
    del epoch[END]
    ended = held_out.pop(END)
    assert set(epoch.values()) <= {1}
    assert set(held_out.values()) == {1}
    assert not set(epoch) & set(held_out)
    everything = set(range(sum(lengths)))
    left_out = everything - set(epoch) - set(held_out)
    assert len(left_out) == 1  # the very first token, which no token is before
    assert sum(held_out.values()) + ended == data.validation.num_targets
    assert sum(held_out.values()) == data.num_validation_bytes
    assert data.num_train_tokens + data.validation.num_targets == sum(lengths) + len(lengths)


@settings(max_examples=settings().max_examples // 4)
@given(lengths=LENGTHS, seq_len=st.integers(1, 7), batch_size=st.integers(1, 5))
def test_epochs_have_each_window_once_and_differ(lengths, seq_len, batch_size):
    data = numbered([*lengths, 40], seq_len)
    count = -(-(data.num_train_tokens - 1) // seq_len)
    drawn = []
    for step in range(-(-3 * count // batch_size)):
        drawn += [tuple(row) for row in data.train_batch(step, batch_size).tokens.tolist()]
    epochs = [drawn[i * count : (i + 1) * count] for i in range(3)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert count < 8 or len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_depends_on_seed_and_step_alone():
    one, other = numbered([9] * 20), numbered([9] * 20)
    for step in (5, 0, 100, 5):
        other.train_batch(step + 1, 4)
        assert torch.equal(one.train_batch(step, 4).tokens, other.train_batch(step, 4).tokens)
    assert not torch.equal(one.train_batch(0, 4).tokens, one.train_batch(1, 4).tokens)
    seeded = numbered([9] * 20, seed=1)
    assert not torch.equal(one.train_batch(0, 4).tokens, seeded.train_batch(0, 4).tokens)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_targets_are_the_next_tokens(mask_documents):
    data = numbered([9] * 20, seq_len=6, mask_documents=mask_documents)
    for batch in (data.train_batch(3, 4), *data.validation_batches(4)):
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        tokens, targets = batch.tokens.view(4, 6), batch.targets.view(4, 6)
        follows = (targets[:, :-1] == tokens[:, 1:]) | (targets[:, :-1] == NO_TARGET)
        assert bool(follows.all())
        number = (tokens != END) & (targets != END) & (targets != NO_TARGET)
        assert bool((targets[number] == tokens[number] + 1).all())
        assert bool(number.any())


@settings(max_examples=settings().max_examples // 4)
@given(lengths=LENGTHS, seq_len=st.integers(1, 9), batch_size=st.integers(1, 4))
def test_masked_documents_end_where_the_end_token_is(lengths, seq_len, batch_size):
    data = numbered([*lengths, 40], seq_len, mask_documents=True)
    sizes = set()
    for batch in [data.train_batch(step, batch_size) for step in range(4)]:
        sizes.add(len(batch.cu_seqlens))
        total = batch_size * seq_len
        assert batch.tokens.shape == batch.targets.shape == (1, total)
        is_end = batch.tokens.view(batch_size, seq_len) == END
        is_end[:, 1:] &= ~is_end[:, :-1].clone()  # a second one in a row is padding
        ends = is_end.flatten().nonzero().flatten() + 1
        rows = torch.arange(0, total + 1, seq_len)
        expected = sorted({*ends.tolist(), *rows.tolist()})
        assert batch.cu_seqlens.dtype == torch.int32
        assert torch.unique(batch.cu_seqlens).tolist() == expected
        assert batch.cu_seqlens.tolist() == sorted(batch.cu_seqlens.tolist())
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == total
        assert torch.equal(batch.targets == NO_TARGET, batch.tokens == END)
    assert len(sizes) == 1


def test_the_borders_have_no_more_slots_than_the_fullest_windows_need():
    data = numbered([1, 1, 1, 9] * 20, seq_len=8, mask_documents=True)
    windows = (data.num_train_tokens - 1) // 8
    batches = [data.train_batch(step, 1) for step in range(windows)]
    assert max(len(torch.unique(batch.cu_seqlens)) for batch in batches) == len(
        batches[0].cu_seqlens
    )


@pytest.mark.parametrize("mask_documents", [False, True])
def test_masking_drops_the_first_token_of_each_document_only(mask_documents):
    data = numbered([7] * 30, mask_documents=mask_documents)
    held_out = targets_of(data.validation_batches(3))
    assert sum(held_out.values()) == data.validation.num_targets
    documents = held_out.pop(END)
    assert sum(held_out.values()) == documents * (6 if mask_documents else 7)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_validation_batches_are_of_one_shape_and_the_same_again(mask_documents):
    data = numbered([7] * 30, seq_len=5, mask_documents=mask_documents)
    once, again = (list(data.validation_batches(4)) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.targets, b.targets)
        assert a.tokens.shape == once[0].tokens.shape
        assert not mask_documents or a.cu_seqlens.shape == once[0].cu_seqlens.shape
    assert bool((once[-1].targets == NO_TARGET).any())
    assert once[0].tokens[0, 0] == END


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_parts_join_to_the_batch(mask_documents, count):
    data = numbered([3, 9, 2] * 20, seq_len=8, mask_documents=mask_documents)
    batch = data.train_batch(0, 6)
    parts = [batch.part(i, count) for i in range(count)]
    axis = 1 if mask_documents else 0
    assert torch.equal(torch.cat([part.tokens for part in parts], axis), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], axis), batch.targets)
    if mask_documents:
        size = 48 // count
        borders = torch.cat([part.cu_seqlens + i * size for i, part in enumerate(parts)])
        assert torch.equal(torch.unique(borders), torch.unique(batch.cu_seqlens))
        assert len({len(part.cu_seqlens) for part in parts}) == 1
        assert all(part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == size for part in parts)
    for wrong in (5, 7, 24):
        with pytest.raises(ValueError, match="count must divide"):
            [batch.part(i, wrong) for i in range(wrong)]


@settings(max_examples=settings().max_examples // 4)
@given(lengths=LENGTHS, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_the_split_keeps_documents_whole_and_has_both_sides(lengths, fraction, seed):
    ends = np.cumsum(lengths)
    train, held_out = split_documents(ends, fraction, seed)
    assert len(train)
    assert len(held_out)
    both = sorted([*train.tolist(), *held_out.tolist()])
    assert both == np.stack([ends - lengths, ends], axis=1).tolist()
    size = int((held_out[:, 1] - held_out[:, 0]).sum())
    assert size <= max(fraction * ends[-1], min(lengths))


def test_the_split_follows_the_seed():
    ends = np.arange(1, 101) * 10
    draws = {split_documents(ends, 0.1, seed)[1].tobytes() for seed in (0, 0, 1, 2)}
    assert len(draws) == 3


def test_a_single_document_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    config = DataConfig(source=str(tmp_path / "a.txt"), validation_fraction=0.2)
    data = config.build(5, None)
    assert (data.num_train_tokens, data.validation.num_targets) == (81, 20)
    assert data.num_validation_bytes == 19  # and an end


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("kind", ["json", "llama", "sentencepiece"])
def test_the_end_of_a_book_has_bytes_of_its_own(names, tmp_path, kind, mask_documents):
    text = "a single man in possession of a good fortune " * 40 + "1, 22, 日本; " * 60
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(str(tmp_path / "a.txt"), names[kind], mask_documents=mask_documents)
    data = replace(config, validation_fraction=0.2).build(5, None)
    targets = [batch.targets for batch in data.validation_batches(2)]
    targets = torch.cat([part[part != NO_TARGET] for part in targets]).tolist()
    end = data.tokenizer.decode(targets)
    whole = end.lstrip("\ufffd")  # the bytes of a character that the training part begins
    assert text.endswith(whole)
    num_bytes = len(whole.encode("utf-8")) + len(end) - len(whole)
    assert num_bytes > 100
    assert data.num_validation_bytes - num_bytes in (0, 1)  # a space, which decoding drops


def test_the_first_token_of_an_end_has_its_space(names, tmp_path):
    (tmp_path / "a.txt").write_text("a single man in possession of a good fortune " * 9)
    config, found = DataConfig(str(tmp_path / "a.txt"), names["sentencepiece"]), set()
    for fraction in (0.5, 0.52, 0.54, 0.56):
        text = replace(config, validation_fraction=fraction)
        whole, masked = (replace(text, mask_documents=on).build(5, None) for on in (False, True))
        first = next(whole.validation_batches(1)).targets[0, 0]
        missing = whole.num_validation_bytes - masked.num_validation_bytes
        found.add(missing - len(whole.tokenizer.decode([int(first)])))
    assert found == {0, 1}, "a space, which decoding drops"


def test_a_part_of_a_text_that_is_not_kept_counts_by_its_share(tmp_path):
    """A tokenizer of words alone: its tokens have no spaces, the text has many."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "word": 2}, unk_token="[UNK]")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("    word" * 100)
    config = DataConfig(str(tmp_path / "a.txt"), str(tmp_path), validation_fraction=0.2)
    assert config.build(5, None).num_validation_bytes == pytest.approx(8 * 20, abs=8)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_of_its_own_is_the_validation_part(tmp_path, streaming):
    pytest.importorskip("datasets")
    for name in ("train", "other"):
        texts = [f"<{name} {i}>" for i in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts))
    config = DataConfig(source=str(tmp_path / "train.jsonl"), streaming=streaming)
    other = str(tmp_path / "other.jsonl")
    data = replace(config, validation_source=other).build(9, None)
    held_out = torch.cat([batch.targets.flatten() for batch in data.validation_batches(2)])
    text = "".join(f"<other {i}>" for i in range(9))
    assert data.tokenizer.decode(held_out[held_out != NO_TARGET].tolist()) == text
    assert data.num_validation_bytes == len(text)
    trained = torch.cat([data.train_batch(step, 1).tokens[0] for step in range(10)]).tolist()
    assert trained.count(ord("<")) == 9  # an epoch has 10 windows
    assert data.fingerprint != config.build(9, None).fingerprint
    (tmp_path / "other.jsonl").write_text('{"text": "<new>"}')
    assert data.fingerprint != replace(config, validation_source=other).build(9, None).fingerprint


def test_stored_tokens_that_were_damaged_are_made_again(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    config, store = DataConfig(str(tmp_path / "a.txt"), validation_fraction=0.2), tmp_path / "store"
    epoch = config.build(5, store).train_batch(0, 16)
    (path,) = store.glob("*/tokens.npy")
    path.write_bytes(path.read_bytes().replace(b"5\0", b"6\0"))
    assert torch.equal(config.build(5, store).train_batch(0, 16).tokens, epoch.tokens)


def test_records_without_text_are_left_out_if_that_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n{"body": "x"}\n{"text": "98765"}')
    config = DataConfig(str(tmp_path / "a.jsonl"), skip_bad=True, validation_fraction=0.4)
    assert config.build(3, None).num_train_tokens == 11


@pytest.mark.parametrize("mask_documents", [False, True])
def test_no_text_has_no_windows(mask_documents):
    none = np.empty((0, 2), np.int64)
    windows = Windows(np.arange(5), none, seq_len=1, pad=0, mask_documents=mask_documents)
    assert (windows.num_tokens, windows.num_targets) == (0, 0)
    assert (windows.num_complete, windows.num_padded) == (0, 0)


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("lengths", [[9], [3, 1, 5]])
def test_all_of_a_text_can_be_held_out(lengths, mask_documents):
    data = numbered(lengths, 4, mask_documents, fraction=1.0)
    targets = targets_of(data.validation_batches(2))
    firsts = set(np.cumsum([0, *lengths[:-1]])) if mask_documents else set()
    assert set(targets) - {END} == set(range(9)) - firsts
    assert set(targets.values()) <= {1, len(lengths)}
    assert data.num_validation_bytes == 9 - len(firsts)
    assert data.num_train_tokens == 0
    with pytest.raises(ValueError, match="nothing to train on"):
        data.train_batch(0, 1)


@settings(max_examples=settings().max_examples // 4)
@given(lengths=LENGTHS, seq_len=st.integers(1, 7), mask_documents=st.booleans())
def test_the_validation_bytes_are_those_of_the_targets(lengths, seq_len, mask_documents):
    data = numbered([*lengths, 9], seq_len, mask_documents)
    targets = targets_of(data.validation_batches(3))
    del targets[END]
    assert data.num_validation_bytes == sum(targets.values())


@pytest.mark.parametrize(
    "texts", [["plain"] * 20, ["äöü" * 3, "中文字"] * 10, ["\U0001f600"] * 20, ["one" * 30]]
)
def test_the_validation_bytes_of_masked_documents_count_parts_of_characters(tmp_path, texts):
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = DataConfig(source=str(tmp_path / "a.jsonl"), validation_fraction=0.3)
    data = replace(config, mask_documents=True).build(5, None)
    targets = targets_of(data.validation_batches(2))
    del targets[data.tokenizer.eos_token]
    assert data.num_validation_bytes == sum(targets.values())


def test_the_default_data_trains_and_is_the_same_from_the_cache(tmp_path):
    memory, cached = (DataConfig().build(64, cache_dir) for cache_dir in (None, tmp_path))
    assert torch.equal(memory.train_batch(7, 4).tokens, cached.train_batch(7, 4).tokens)
    share = memory.validation.num_targets / (
        memory.num_train_tokens + memory.validation.num_targets
    )
    assert 0.045 < share <= 0.05
    first = next(memory.validation_batches(1)).targets[0].tolist()
    assert "chapter" in memory.tokenizer.decode(first).lower()


def test_documents_shorter_than_the_context_share_a_window(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = DataConfig(source=str(tmp_path / "a.jsonl")).build(100, None)
    text = data.tokenizer.decode(data.train_batch(0, 1).tokens[0].tolist())
    assert text.count("document") > 5


def test_too_little_text_and_bad_settings_are_said(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    data = DataConfig(source=str(tmp_path / "a.txt")).build(64, None)
    assert data.validation.num_targets, "what is held out can be measured"
    with pytest.raises(UserError, match="fewer than one window of 65"):
        data.check_training(1)
    for fraction in (0.0, 1.1, -1.0, float("nan")):
        with pytest.raises(UserError, match="validation_fraction must be above 0, to 1"):
            DataConfig(validation_fraction=fraction)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("seed", [True, "1", 2**70, 2**63, -1, 1.0, None]),
        ("validation_fraction", ["0.1", True, None, float("inf"), [0.1], 10**400]),
        ("source", [3, None, "", b"x"]),
        ("tokenizer", [3, None, ""]),
        ("text_column", [3, None, ""]),
        ("streaming", ["yes", 1, None]),
        ("mask_documents", ["yes", 0, None]),
        ("skip_bad", ["yes", 0, None]),
        ("validation_source", [3, "", b"x"]),
    ],
)
def test_a_setting_of_another_type_is_named(field, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^(\w+\.)?{field}(\[\d\])? (must|is too)") as error:
            DataConfig(**{field: value})
        assert len(str(error.value)) < 200
    for seq_len in (True, "8", 2.0, 0, 2**31, None):
        with pytest.raises(UserError, match="seq_len must be from 1"):
            DataConfig().build(seq_len, None)


@pytest.mark.parametrize("batch_size", [0, -1, True, 1.0, "1", None])
def test_a_batch_of_no_windows_is_refused_at_once(batch_size):
    data = numbered([9] * 20)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on"):
        data.validation_batches(batch_size)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 on"):
        data.train_batch(0, batch_size)


def test_a_step_or_part_that_is_none_is_refused():
    data = numbered([9] * 20)
    with pytest.raises(ValueError, match="step must be 0 or more"):
        data.train_batch(-1, 2)
    batch = data.train_batch(0, 2)
    for index, count in ((0, 0), (2, 2), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="index must be from 0 to below count"):
            batch.part(index, count)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_windows_longer_than_the_validation_part_are_padded(mask_documents):
    data = numbered([9] * 100, seq_len=400, mask_documents=mask_documents, fraction=0.1)
    batches = list(data.validation_batches(3))
    assert [int((batch.targets != NO_TARGET).sum()) for batch in batches] == [
        data.validation.num_targets
    ]


def test_the_fingerprint_follows_content_and_tokenizer_not_times_or_the_cache(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 10)
    config = DataConfig(source=str(path))
    original = config.build(5, None).fingerprint
    for cache_dir in (tmp_path / "cache", tmp_path / "cache", None):
        for rank in (0, 1):
            assert config.build(5, cache_dir, rank=rank).fingerprint == original
    os.utime(path, (1, 1))
    assert config.build(5, tmp_path / "cache").fingerprint == original
    path.rename(tmp_path / "moved.txt")
    moved = DataConfig(source=str(tmp_path / "moved.txt"))
    assert moved.build(5, tmp_path / "cache").fingerprint == original
    (tmp_path / "moved.txt").write_text("0123456789" * 9 + "0123456780")
    assert moved.build(5, tmp_path / "cache").fingerprint != original
    (tmp_path / "moved.txt").write_text("0123456789" * 10)
    assert moved.build(5, tmp_path / "cache").fingerprint == original
    tokenized = tokenize_corpus(open_corpus(moved.source, "text"), OtherBytes(), None)
    options = {"seq_len": 5, "validation_fraction": 0.1, "seed": 0, "mask_documents": False}
    assert TokenizedText(tokenized, OtherBytes(), **options).fingerprint != original


def test_a_tokenized_corpus_has_no_state():
    data = numbered([9] * 20)
    assert data.state_dict() == {}
    assert not data.reads_shard
    data.load_state_dict({})
    for state in ({"cursor": {}}, [], None, "x"):
        with pytest.raises(UserError, match=r"streaming=True \(--streaming\)"):
            data.load_state_dict(state)
