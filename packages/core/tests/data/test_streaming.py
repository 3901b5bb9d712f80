import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from mezzo_core.data import NO_TARGET, DataConfig, streaming, text_stream
from mezzo_core.data.streaming import StreamedText
from mezzo_core.data.text_stream import TextStream, open_stream, share_stream
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_DOCUMENTS", 8)
    monkeypatch.setattr(text_stream, "VALIDATION_DOCUMENTS", 3)
    monkeypatch.setattr(streaming, "_TOKENIZED_DOCUMENTS", 3)


def rows(shards):
    for shard in shards:
        for i in range(20):
            yield {"text": f"<{shard}:{i}>" + "." * (i * 7 % 11)}


def stream_of(shards, **sharing):
    dataset = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})
    return share_stream("a test", dataset, "text", **sharing)


def texts(files):
    for names in files:
        for name in names:
            yield {"text": name}


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


def test_long_documents_are_held_out_and_shuffled_in_smaller_numbers(monkeypatch):
    monkeypatch.setattr(text_stream, "VALIDATION_CHARACTERS", 6)
    monkeypatch.setattr(streaming, "BLOCK_CHARACTERS", 40)
    data = build(stream_of(["a"]))
    assert data.num_validation_bytes == 5 + 12  # <a:0>, <a:1>.......
    blocks = [texts for _, texts in data._blocks(streaming._Cursor())]
    assert sum(map(len, blocks)) == 18
    sizes = [sum(map(len, block)) for block in blocks]
    assert all(40 <= size < 60 for size in sizes[:-1]), sizes
    documents = documents_of(data, 30, 1)
    assert set(documents[:18]) == {f"<a:{i}>" for i in range(2, 20)}


@pytest.mark.parametrize(("size", "held_out"), [(2, 1), (3, 1), (15, 1), (20, 2), (21, 3)])
def test_of_a_short_text_a_tenth_is_held_out(monkeypatch, size, held_out):
    monkeypatch.setattr(text_stream, "VALIDATION_DOCUMENTS", 20 if size <= 20 else 3)
    made = datasets.IterableDataset.from_list([{"text": f"<{i}>"} for i in range(size)])
    stream = share_stream("a test", made, "text")
    assert stream.validation == [f"<{i}>" for i in range(held_out)]
    documents = documents_of(build(stream), 20, 2)
    assert set(documents[: size - held_out]) == {f"<{i}>" for i in range(held_out, size)}


def test_rows_without_text_are_not_held_out():
    texts = [""] * 5 + ["<0>", "", "<1>", "<2>", "<3>", "", "<4>"]
    made = datasets.IterableDataset.from_list([{"text": text} for text in texts])
    stream = share_stream("a test", made, "text")
    assert stream.validation == ["<0>", "<1>", "<2>"]
    assert set(documents_of(build(stream), 10, 1)[:2]) == {"<3>", "<4>"}


@pytest.mark.parametrize("mask_documents", [False, True])
def test_the_validation_bytes_are_those_of_the_targets(mask_documents):
    data = build(stream_of(["a"]), mask_documents=mask_documents)
    targets = torch.cat([batch.targets.flatten() for batch in data.validation_batches(2)])
    assert data.num_validation_bytes == ((targets >= 0) & (targets < 256)).sum()


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 7, 8, 23, 60])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_resumed_stream_gives_the_same_batches(stop, mask_documents, world_size):
    def build_shard():
        stream = stream_of(["a", "b"], rank=world_size // 2, world_size=world_size)
        return build(stream, mask_documents=mask_documents)

    whole, rows = build_shard(), 2 * world_size
    batches = [whole.train_batch(step, rows) for step in range(stop + 5)]
    first = build_shard()
    for step in range(stop):
        first.train_batch(step, rows)
    state = json.loads(json.dumps(first.state_dict()))
    second = build_shard()
    second.load_state_dict(state)
    for step in range(stop, stop + 5):
        for a, b in zip(batches[step], second.train_batch(step, rows), strict=True):
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


@pytest.mark.parametrize("sizes", [(31,), (1, 1, 20), (2, 0, 3, 12), (4, 9, 7, 5, 8, 9)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("by_file", [False, True])
def test_processes_see_each_document_that_is_not_held_out_once_an_epoch(
    tmp_path, sizes, world_size, by_file
):
    names = [[f"<{file}:{i}>" for i in range(size)] for file, size in enumerate(sizes)]
    for file, documents in enumerate(names):
        lines = [json.dumps({"text": name}) + "\n" for name in documents]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines) or "\n")
    config = DataConfig(source=str(tmp_path), streaming=True)
    expected = [name for documents in names for name in documents][3:]
    seen = []
    for rank in range(world_size):

        def build_shard(rank=rank):
            if not by_file:
                return config.build(8, None, rank=rank, world_size=world_size)
            made = datasets.IterableDataset.from_generator(texts, gen_kwargs={"files": names})
            sharing = {"rank": rank, "world_size": world_size, "by_file": True}
            return build(share_stream("a test", made, "text", **sharing), seq_len=8)

        data = build_shard()
        assert data.reads_shard
        whole_files = set().union(*names[rank::world_size])
        if by_file and len(sizes) % world_size == 0 and not whole_files & set(expected):
            with pytest.raises(UserError, match=r"no training text .* fewer processes"):
                data.train_batch(0, world_size)
            continue
        assert data.train_batch(0, 2 * world_size).tokens.shape == (2, 8)
        documents = documents_of(build_shard(), 70, world_size)
        epoch = documents[: len(set(documents))]
        assert set(documents[len(epoch) : 2 * len(epoch)]) == set(epoch)
        seen += epoch
        if not by_file:  # all processes see the same mixture of the files
            assert sorted(epoch) == sorted(expected[rank::world_size])
    assert sorted(seen) == sorted(expected)


def test_masked_windows_have_a_fixed_number_of_documents_and_lose_no_token():
    words = [chr(97 + i % 26) * (1, 2, 3, 25)[i % 4] for i in range(200)]
    dataset = datasets.IterableDataset.from_list([{"text": word} for word in words])
    data = build(share_stream("", dataset, "text"), seq_len=32, mask_documents=True)
    text = ""
    for step in range(50):
        batch = data.train_batch(step, 2)
        assert batch.tokens.shape == (1, 64)
        assert batch.cu_seqlens.shape == (2 * (32 // 16 + 2) + 1,)
        assert batch.cu_seqlens[-1] == 64
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            part = batch.tokens[0, begin:end]
            assert len(set(part.tolist()) - {256}) <= 1  # one document's letter, or padding
            letters = batch.targets[0, begin:end]
            assert set(letters.tolist()) <= {*part.tolist(), NO_TARGET, 256}
        assert torch.equal(batch.targets == NO_TARGET, batch.tokens == 256)
        text += "".join(map(chr, batch.tokens[0].tolist()))
    documents = [*filter(None, text.split(chr(256)))]
    assert sorted(documents[:197]) == sorted(words[3:])


def test_files_stream_as_they_are_tokenized(tmp_path):
    texts = [f"document {i} " + "x" * i for i in range(30)]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    config = DataConfig(source=str(tmp_path), text_column="body", streaming=True)
    data = config.build(32, None)
    documents = documents_of(data, 40, 1)
    assert set(documents) >= set(texts[3:])
    assert documents != documents_of(replace(config, seed=1).build(32, None), 40, 1)
    (tmp_path / "b.jsonl").write_text('{"body": "fine"}\n{"text": "not"}\n')
    bad = config.build(32, None)
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: no field 'body'"):
        documents_of(bad, 100, 1)
    documents = documents_of(replace(config, skip_bad=True).build(32, None), 80, 1)
    assert set(documents) == {*texts[3:], "fine"}


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


def test_what_a_stream_cannot_do_is_said():
    with pytest.raises(UserError, match="embedded corpus is not streamed"):
        DataConfig(streaming=True).build(8, None)
    data = build(stream_of(["a"], rank=0, world_size=2))
    with pytest.raises(ValueError, match="step 0 is next, got 1"):
        data.train_batch(1, 2)
    with pytest.raises(ValueError, match="multiple of the 2 processes"):
        data.train_batch(0, 3)
    with pytest.raises(UserError, match=r"reads part 0 of 2: .* the same context_parallel"):
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


def test_the_seed_changes_the_order():
    first, second = (documents_of(build(stream_of(["a"]), seed=seed), 12, 1) for seed in (0, 1))
    assert first != second
    assert len(np.unique(first)) == len(first)


def values_in(state, path=()):
    """The place of every value in nested dictionaries, the dictionaries' own among them."""
    for key, value in state.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from values_in(value, (*path, key))


def with_value(state, path, *value):
    """A copy of nested dictionaries in which one value is another, or missing."""
    changed = json.loads(json.dumps(state))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    if value:
        inner[path[-1]] = value[0]
    return changed


@pytest.mark.parametrize("sharing", [{}, {"rank": 1, "world_size": 2}])
def test_a_damaged_state_is_refused_in_one_line(sharing):
    data = build(stream_of(["a", "b"], **sharing))
    for step in range(20):
        data.train_batch(step, 2)
    state = json.loads(json.dumps(data.state_dict()))
    expected = data.train_batch(20, 2).tokens
    paths = list(values_in(state))
    assert len(paths) > 10
    wrong = (None, "x", -1, 1.5, 10**30, [], {"a": 1}, [[[]]])
    damaged = [with_value(state, path) for path in paths]
    damaged += [with_value(state, path, value) for path in paths for value in wrong]
    for changed in (*damaged, {"cursor": {}}, [], [1], None, "x", 3):
        if changed == state:
            continue
        with pytest.raises(UserError, match="place in the stream is damaged") as error:
            data.load_state_dict(changed)
        assert "\n" not in str(error.value)
    data.load_state_dict(state)
    assert torch.equal(data.train_batch(20, 2).tokens, expected)


def test_a_place_that_the_text_has_no_more_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"document {i} " + "x" * i}) + "\n" for i in range(60)]
    path.write_text("".join(lines))
    config = DataConfig(source=str(path), streaming=True)
    data = config.build(32, None)
    for step in range(40):
        data.train_batch(step, 1)
    state = data.state_dict()
    assert state["cursor"]["block"] > 1
    fewer_and_long = [json.dumps({"text": "x" * 999}) + "\n"] * 12
    for changed in (lines[:12], ['{"text": "x"}\n'] * 60, fewer_and_long):
        path.write_text("".join(changed))
        with pytest.raises(UserError, match=r"place in .*a\.jsonl is not there any more"):
            config.build(32, None).load_state_dict(state)


def test_errors_of_a_stream_on_its_way_are_one_line():
    def broken():
        yield from rows(["a"])
        raise ConnectionError("lost\nand more")

    dataset = datasets.IterableDataset.from_generator(broken)
    data = build(share_stream("hub:some/name", dataset, "text"))
    with pytest.raises(UserError, match=r"cannot read hub:some/name: lost$"):
        documents_of(data, 100, 1)


def test_the_fingerprint_of_a_stream_sees_names_sizes_and_both_ends(tmp_path):
    lines = [json.dumps({"text": f"document {i:06} " + "x" * 200}) + "\n" for i in range(2000)]

    def fingerprint(name="a.jsonl", changed=(), folder="one", **options):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        content = list(lines)
        for line in changed:
            content[line] = content[line].replace("xx", "yy")
        path.write_text("".join(content))
        stream = DataConfig(source=str(path), streaming=True, **options).build(8, None)
        return stream.fingerprint

    original = fingerprint()
    assert fingerprint() == fingerprint(folder="two") == original
    assert len({original, fingerprint("b.jsonl"), fingerprint(changed=[0])}) == 3
    assert fingerprint(changed=[-1]) != original
    assert fingerprint(changed=[1000]) == original  # what is not seen, as documented
    lines.append(lines[0])
    assert fingerprint() != original


def test_the_fingerprint_of_a_stream_sees_held_out_documents_and_the_tokenizer():
    class Other(ByteTokenizer):
        identity = "other"

    stream = stream_of(["a"])
    prints = {build(stream).fingerprint, build(stream_of(["b"])).fingerprint}
    prints.add(StreamedText(stream, Other(), seq_len=8, seed=0, mask_documents=False).fingerprint)
    assert len(prints) == 3
    assert {build(stream_of(["a"], rank=r, world_size=2)).fingerprint for r in (0, 1)} < prints


@pytest.mark.parametrize("mask_documents", [False, True])
def test_windows_longer_than_the_held_out_text_are_padded(mask_documents):
    data = build(stream_of(["a"]), seq_len=500, mask_documents=mask_documents)
    (batch,) = data.validation_batches(1)
    assert int((batch.targets != NO_TARGET).sum()) == data.validation.num_targets
