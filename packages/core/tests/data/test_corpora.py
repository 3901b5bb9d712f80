import csv
import gzip
import itertools
import json
import lzma
import os
import subprocess
import sys

import pytest
from mezzo_core.data import DataConfig, corpora
from mezzo_core.data.corpora import open_corpus
from mezzo_core.data.embedded import embedded_bytes, embedded_documents
from mezzo_core.errors import UserError


def texts(source, text_column="text"):
    return [piece.text for piece in open_corpus(str(source), text_column).read()]


def test_chapters_join_to_the_whole_text():
    chapters = list(embedded_documents())
    assert "".join(chapters).encode() == lzma.decompress(embedded_bytes())
    assert len(chapters) == 31 + 24 + 61


def test_a_novels_front_matter_is_in_its_first_chapter():
    chapters = list(embedded_documents())
    for first, title in ((0, "NORTHANGER ABBEY"), (31, "Persuasion"), (55, "PRIDE AND PREJUDICE")):
        assert chapters[first].startswith(title)
        assert "chapter 1\n" in chapters[first].lower()
    others = [chapter for i, chapter in enumerate(chapters) if i not in (0, 31, 55)]
    assert all(chapter.lower().startswith("chapter ") for chapter in others)


def test_every_format_gives_the_same_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    documents = ["first\r\n\ndocument, ünïcode\r\n", "second", 'third "quoted"', "x" * 200_000]
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    with lzma.open(tmp_path / "b.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write(lines)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    with pyarrow.CompressedOutputStream(str(tmp_path / "d.jsonl.zst"), "zstd") as file:
        file.write(lines.encode())
    (tmp_path / "e.json").write_text(json.dumps([{"text": text} for text in documents], indent=1))
    (tmp_path / "f.json").write_text(lines, encoding="utf-8")
    with (tmp_path / "g.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(documents)])
    for path in tmp_path.iterdir():
        assert texts(path) == documents
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(documents):
        (folder / f"{i}.txt").write_bytes(text.encode())
    with lzma.open(folder / "9.txt.xz", "wt") as file:
        file.write("fourth")
    (folder / "empty.txt").touch()
    (folder / ".hidden.txt").write_text("no")
    (folder / "notes.md").write_text("no")
    assert texts(folder) == [*documents, "fourth"]
    assert texts(folder / "[01].txt") == documents[:2]
    (tmp_path / "one.json").write_text(json.dumps({"text": documents[0]}, indent=1))
    assert texts(tmp_path / "one.json") == documents[:1]


def test_parquet_gives_its_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one", "two"], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", "body") == ["one", "two"]
    with pytest.raises(UserError, match="no field 'text'; there is 'body', 'n'"):
        texts(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match=r"cannot read .*b\.parquet"):
        texts(tmp_path / "b.parquet")


def test_damaged_parquet_and_columns_that_are_no_text_are_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    for column, message in (
        ([1, 2], "row 1: 'text' must be text, got int"),
        (["a", None], "row 2: 'text' must be text, got NoneType"),
        ([b"a"], "row 1: 'text' must be text, got bytes"),
        ([["a"]], "row 1: 'text' must be text, got list"),
        ([{"a": "b"}], "row 1: 'text' must be text, got dict"),
    ):
        parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(UserError, match=message):
            texts(path)
    expected = [f"document {i}" for i in range(40)]
    parquet.write_table(
        pyarrow.table({"text": expected}), path, write_page_checksum=True, use_dictionary=False
    )
    assert texts(path) == expected
    content = path.read_bytes()
    refused = []
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        try:
            assert texts(path) == expected
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all("a.parquet" in line and "\n" not in line for line in refused)


def test_a_long_text_file_comes_in_pieces_that_join_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "PIECE_CHARACTERS", 10)
    for text in ("a\nbc\ndefghijklmnopqrstuvwxyz\n\nshort\n" * 3, "x" * 35, "123456789\n" * 2, "1"):
        (tmp_path / "a.txt").write_text(text)
        pieces = list(open_corpus(str(tmp_path / "a.txt"), "text").read())
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert max(len(piece.text) for piece in pieces) <= 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "broken', "line 2: not JSON"),
        ('{"body": "no text"}', "line 2: no field 'text'; there is 'body'"),
        ('{"prompt": "a"}', "line 2: no field 'text'; .*; --sft reads prompts with answers"),
        ('{"text": null}', "line 2: 'text' must be text, got NoneType"),
        (r'{"text": "\ud800"}', "line 2: 'text' is not Unicode"),
        ("[1]", "line 2: a JSON object is needed, got list"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"text": ' + "[" * 100_000, "line 2: not JSON"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ('{"text": "a", "n": NaN}', "line 2: not JSON .NaN is no JSON number"),
        ('{"text": true}', "line 2: 'text' must be text, got bool"),
        ('{"a\\nb": 1}', r"line 2: no field 'text'; there is 'a\\nb'"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match="a.jsonl, " + message) as error:
        texts(tmp_path / "a.jsonl")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


BAD_LINES = ('{"text": null}', '{"text": "x", "n": NaN}', '{"body": "x"}', "[]", '{"text": "x')


def test_bad_records_are_left_out_named_and_counted_when_told(tmp_path, monkeypatch, caplog):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": "one"}', *BAD_LINES, '{"text": "two"}']))
    (tmp_path / "b.json").write_text('[{"text": "one"}, {"text": 1}, 3, {"text": "two"}]')
    (tmp_path / "c.csv").write_text("n,text\n1,one\n2\n3,x,y\n4,two\n")
    rows = {"text": ["one", None, "two"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "d.parquet")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_dict(rows)
    )
    for name, first, count in (
        ("a.jsonl", "a.jsonl, line 2: 'text' must be text, got NoneType", "5 of 7"),
        ("b.json", "b.json, record 2: 'text' must be text, got int", "2 of 4"),
        ("c.csv", "c.csv, line 3: 'text' must be text, got NoneType", "2 of 4"),
        ("d.parquet", "d.parquet, row 2: 'text' must be text, got NoneType", "1 of 3"),
        ("hub:some/name", "hub:some/name: 'text' must be text, got NoneType", "1 of 3"),
    ):
        source = name if name.startswith("hub:") else str(tmp_path / name)
        with pytest.raises(UserError, match=first):
            list(open_corpus(source, "text").read())
        caplog.clear()
        corpus = open_corpus(source, "text", skip_bad=True)
        assert [piece.text for piece in corpus.read()] == ["one", "two"]
        assert corpus.identity != open_corpus(source, "text").identity
        named, counted = caplog.messages
        assert first in named
        assert counted == f"{source}: left out {count} records"


def test_a_record_with_many_fields_is_a_short_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({f"field {i}": i for i in range(10_000)}))
    with pytest.raises(UserError, match="no field 'text'; there is 'field 0'") as error:
        texts(tmp_path / "a.jsonl")
    assert len(str(error.value)) < 500


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    (tmp_path / "torn.txt.xz").write_bytes(embedded_bytes()[:1000])
    (tmp_path / "fake.txt.gz").write_bytes(b"plain text")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}' * 99)[:-20])
    (tmp_path / "fake.jsonl.xz").write_bytes(b'{"text": "a"}')
    flipped = bytearray(lzma.compress(b"words " * 99))
    flipped[30] ^= 1
    (tmp_path / "flipped.txt.xz").write_bytes(flipped)
    (tmp_path / "table.tsv").write_text("a,b")
    (tmp_path / "quote.csv").write_text('text\n"open')
    (tmp_path / "more.csv").write_text("text\nyes, but\n")
    (tmp_path / "twice.csv").write_text("text,id,text\nyes,1,\n")
    (tmp_path / "half.txt").write_bytes(b"\xe9")
    (tmp_path / "torn.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "torn.json").write_text('[{"text": "a"}')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("latin.txt", "is not UTF-8 text: .* 0xe9 after 'caf'"),
        ("torn.txt.xz", "cannot read"),
        ("fake.txt.gz", "cannot read"),
        ("torn.jsonl.gz", "cannot read"),
        ("fake.jsonl.xz", "cannot read"),
        ("flipped.txt.xz", "cannot read"),
        ("table.tsv", "a corpus file ends in .txt, .jsonl, .json, .csv, .parquet"),
        ("quote.csv", "line 2: not CSV"),
        ("more.csv", "line 2: more fields than the header has"),
        ("twice.csv", "the header has 'text' twice: rename one"),
        ("half.txt", "0xe9$"),
        ("torn.jsonl.zst", "cannot read"),
        ("torn.json", "not JSON"),
        ("empty.txt", "is empty"),
        ("folder", "no .txt, .jsonl, .json, .csv, .parquet file with text"),
        ("*.parquet", "no .txt, .jsonl, .json, .csv, .parquet file with text"),
        ("missing.txt", "no file or folder"),
    ):
        with pytest.raises(UserError, match=message) as error:
            texts(tmp_path / name)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_an_xz_file_of_several_streams_is_read_whole_or_not_at_all(tmp_path):
    first, second = (lzma.compress(word.encode() * 30_000) for word in ("first ", "second "))
    path, whole = tmp_path / "a.txt.xz", "first " * 30_000 + "second " * 30_000
    for data in (first + second, first + b"\0" * 8 + second + b"\0" * 4):
        path.write_bytes(data)
        assert texts(path) == [whole]
    for data in (first + b"??" + second[2:], first + second[:-9], first + second + b"rest"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot read"):
            texts(path)


def test_identity_follows_content_and_column(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    identity = open_corpus(str(path), "text").identity
    assert open_corpus(str(path), "text").identity == identity
    assert open_corpus(str(path), "body").identity != identity
    path.write_text("three")
    assert open_corpus(str(path), "text").identity != identity


def test_identity_sees_a_change_that_leaves_size_and_time(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    stat = path.stat()
    identity = open_corpus(str(path), "text").identity
    path.write_text("two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_corpus(str(path), "text").identity != identity


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9", "http://a b", "nonsense", "http://[", ""]
)
def test_a_misspelt_name_or_endpoint_without_a_network_is_one_line(monkeypatch, endpoint):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("hub:nobody/nothing", "hub:nobody/nothing::"):
        with pytest.raises(UserError, match="does not answer") as error:
            open_corpus(name, "text")
        assert "\n" not in str(error.value)


NO_NAMES = [
    "json", "text", "pandas", "", ".", "..", "a/..", "./a", "../a", "a/b/c", "/a", "a/", "a b/c",
    "~/a", "hf://a/b", "a\n/b", "a/b\n", "é/a", ":json", "json:a/b",
]  # fmt: skip


def test_a_hub_name_that_names_no_data_set_of_an_owner_is_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("read"))
    (tmp_path / "a.jsonl").write_text('{"text": "of the current folder"}')
    for name, streaming in itertools.product(NO_NAMES, (False, True)):
        with pytest.raises(UserError, match=r"source must have the form hub:OWNER/NAME") as error:
            DataConfig(source=f"hub:{name}", streaming=streaming).build(8, None)
        assert "\n" not in str(error.value)


def test_a_hub_name_that_is_also_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "name").mkdir(parents=True)
    for field in ("source", "tokenizer"):
        with pytest.raises(UserError, match=rf"{field} 'hub:some/name' is ambiguous"):
            DataConfig(**{field: "hub:some/name"}).build(8, None)


def test_errors_of_hub_rows_are_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    class Broken:
        _fingerprint = "x"

        def __iter__(self):
            yield {"text": "fine"}
            raise ConnectionError("lost\nand more")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: Broken())
    with pytest.raises(UserError, match=r"cannot read hub:some/name: lost$"):
        texts("hub:some/name")


def test_a_hub_data_set_is_read_by_its_column(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"body": ["one", "two"]})

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts("hub:some/name:config", "body") == ["one", "two"]
    assert asked == [(("some/name", "config"), {"split": "train", "streaming": False})]
    with pytest.raises(UserError, match="no field 'text'; there is 'body'"):
        texts("hub:some/name")


def test_one_process_trains_on_text_files_without_the_datasets_library_and_fsdp(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n{"text": "other words"}\n')
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "import torch.nn.attention.flex_attention\n"
        "brought = set(sys.modules)  # by torch itself: since 2.14 sympy too\n"
        "import mezzo_core.train.loop\n"
        "from mezzo_core.data import DataConfig\n"
        f"DataConfig(source={str(tmp_path / 'a.jsonl')!r}).build(4, None).train_batch(0, 1)\n"
        "slow = {'pyarrow', 'transformers', 'tokenizers', 'torch.distributed.fsdp', 'sympy'}\n"
        "assert not slow & (set(sys.modules) - brought)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_change_in_the_middle_is_seen_if_its_time_was_set_back(tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"a" * 300_000)
    before, times = open_corpus(str(path), "text").identity, path.stat()
    with path.open("r+b") as file:
        file.seek(150_000)
        file.write(b"b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_corpus(str(path), "text").identity != before
