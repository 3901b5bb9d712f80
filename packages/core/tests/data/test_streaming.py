import json

import numpy as np
import pytest
import torch
from mezzo_core.data import NO_TARGET, DataConfig, streaming
from mezzo_core.data.streaming import StreamedText, TextStream, open_stream, share_stream
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_DOCUMENTS", 8)
    monkeypatch.setattr(streaming, "VALIDATION_DOCUMENTS", 3)
    monkeypatch.setattr(streaming, "_TOKENIZED_DOCUMENTS", 3)


def rows(shards):
    for shard in shards:
        for i in range(20):
            yield {"text": f"<{shard}:{i}>" + "." * (i * 7 % 11)}


def stream_of(shards, **sharing):
    dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})
    return share_stream("a test", dataset, "text", **sharing)


def build(stream, seq_len=16, mask_documents=False, seed=0):
    return StreamedText(
        stream, ByteTokenizer(), seq_len=seq_len, seed=seed, mask_documents=mask_documents
    )


def documents_of(data, batches, batch_size):
    """The documents that are whole in so many batches."""
    tokens = [data.train_batch(step, batch_size).tokens.flatten() for step in range(batches)]
    text = "".join(chr(t) if t < 256 else "\n" for t in torch.cat(tokens).tolist())
    return [line.strip(".") for line in text.split("\n")[:-1]]


def test_an_epoch_has_every_document_but_the_held_out_ones_once():
    data = build(stream_of(["a", "b"]))
    documents = documents_of(data, 40, 2)
    held_out = ["<a:0>", "<a:1>", "<a:2>"]
    expected = {row["text"].strip(".") for row in rows(["a", "b"])} - set(held_out)
    assert set(documents[: len(expected)]) == expected
    assert documents[: len(expected)] != sorted(documents[: len(expected)])
    assert set(documents[len(expected) : 2 * len(expected)]) == expected
    assert documents[: len(expected)] != documents[len(expected) : 2 * len(expected)]
    targets = torch.cat([batch.targets.flatten() for batch in data.validation_batches(2)])
    text = data.tokenizer.decode(targets[targets != NO_TARGET].tolist())
    assert text == "".join(row["text"] for row in list(rows(["a"]))[:3])
    assert data.num_validation_bytes == len(text.encode())
    assert data.num_train_tokens is None


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 7, 8, 23, 60])
def test_a_resumed_stream_gives_the_same_batches(stop, mask_documents):
    whole = build(stream_of(["a", "b"]), mask_documents=mask_documents)
    batches = [whole.train_batch(step, 2) for step in range(stop + 5)]
    first = build(stream_of(["a", "b"]), mask_documents=mask_documents)
    for step in range(stop):
        first.train_batch(step, 2)
    state = json.loads(json.dumps(first.state_dict()))
    second = build(stream_of(["a", "b"]), mask_documents=mask_documents)
    second.load_state_dict(state)
    for step in range(stop, stop + 5):
        for a, b in zip(batches[step], second.train_batch(step, 2), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_taking_the_state_changes_nothing_and_it_can_be_loaded_into_a_running_stream():
    data = build(stream_of(["a"]))
    other = build(stream_of(["a"]))
    for step in range(9):
        data.state_dict()
        assert torch.equal(data.train_batch(step, 1).tokens, other.train_batch(step, 1).tokens)
    state = data.state_dict()
    ninth = data.train_batch(9, 1)
    for step in range(10, 40):
        data.train_batch(step, 1)
    data.load_state_dict(state)
    assert torch.equal(data.train_batch(9, 1).tokens, ninth.tokens)


@pytest.mark.parametrize("shards", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_processes_share_the_documents(shards):
    seen = []
    for rank in range(2):
        data = build(stream_of(shards, rank=rank, world_size=2), seq_len=8)
        assert data.train_batch(0, 4).tokens.shape == (2, 8)
        data = build(stream_of(shards, rank=rank, world_size=2), seq_len=8)
        seen.append(set(documents_of(data, 100, 4)))
        assert data.reads_shard
    assert not seen[0] & seen[1]
    everything = {row["text"].strip(".") for row in rows(shards)}
    held_out = {"<a:0>", "<a:1>", "<a:2>"}
    assert not held_out & (seen[0] | seen[1])
    assert len(everything - held_out - seen[0] - seen[1]) <= 3  # skipped once more


def test_masked_windows_have_a_fixed_number_of_documents():
    def tiny():
        for i in range(200):
            yield {"text": chr(97 + i % 26) * (1 + i % 3)}

    dataset = datasets.IterableDataset.from_generator(tiny)
    data = build(share_stream("", dataset, "text"), seq_len=32, mask_documents=True)
    seen = 0
    for step in range(12):
        batch = data.train_batch(step, 2)
        assert batch.tokens.shape == (1, 64)
        assert batch.cu_seqlens.shape == (2 * (32 // 16 + 2) + 1,)
        assert batch.cu_seqlens[-1] == 64
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            part = batch.tokens[0, begin:end]
            assert len(set(part.tolist()) - {256}) <= 1  # one document's letter, or padding
            letters = batch.targets[0, begin:end]
            assert set(letters.tolist()) <= {*part.tolist(), NO_TARGET, 256}
        seen += int((batch.targets != NO_TARGET).sum())
        assert bool((batch.targets == NO_TARGET).any())
    assert seen > 0


def test_files_stream_as_they_are_packed(tmp_path):
    texts = [f"document {i} " + "x" * i for i in range(30)]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    config = DataConfig(source=str(tmp_path), text_column="body", streaming=True)
    data = config.build(32, None)
    documents = documents_of(data, 40, 1)
    assert set(documents) >= set(texts[3:])
    (tmp_path / "b.jsonl").write_text('{"body": "fine"}\n{"text": "not"}\n')
    bad = config.build(32, None)
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: no field 'body'"):
        documents_of(bad, 100, 1)


def test_a_hub_stream_takes_its_validation_split(monkeypatch):
    def split(shards):
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})

    splits = {"train": split(["a"]), "validation": split(["v"])}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: splits)
    stream = open_stream("hub:some/name", "text")
    assert [text[:3] for text in stream.validation] == ["<v:"] * 3
    assert "<a:0>" in documents_of(build(stream), 30, 1)
    del splits["validation"]
    stream = open_stream("hub:some/name", "text")
    assert [text[:3] for text in stream.validation] == ["<a:"] * 3
    del splits["train"]
    with pytest.raises(UserError, match='no split "train"'):
        open_stream("hub:some/name", "text")


def test_what_a_stream_cannot_do_is_said(monkeypatch):
    with pytest.raises(UserError, match="embedded corpus is not streamed"):
        DataConfig(streaming=True).build(8, None)
    data = build(stream_of(["a"], rank=0, world_size=2))
    with pytest.raises(ValueError, match="step 0 is next, got 1"):
        data.train_batch(1, 2)
    with pytest.raises(ValueError, match="multiple of the 2 processes"):
        data.train_batch(0, 3)
    with pytest.raises(UserError, match="is process 0 of 2"):
        data.load_state_dict(build(stream_of(["a"])).state_dict())
    with pytest.raises(UserError, match="streaming=False"):
        data.load_state_dict({})
    short = TextStream(
        "a test",
        datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": ["a"]}).take(0),
        ["x"],
        "text",
    )
    with pytest.raises(UserError, match="no training text in a test"):
        build(short).train_batch(0, 1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match="does not answer"):
        DataConfig(source="hub:some/name", streaming=True).build(8, None)


def test_the_seed_changes_the_order():
    first, second = (documents_of(build(stream_of(["a"]), seed=seed), 12, 1) for seed in (0, 1))
    assert first != second
    assert len(np.unique(first)) == len(first)
