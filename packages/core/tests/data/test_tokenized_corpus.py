import itertools
import json
import logging
import os
import pickle
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from functools import partial

import filelock
import numpy as np
import pytest
from mezzo_core.data import tokenized_corpus
from mezzo_core.data.corpora import Corpus, Piece
from mezzo_core.data.stored_tokens import StoredTokens
from mezzo_core.data.tokenized_corpus import token_store, tokenize_corpus
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError
from mezzo_core.testing.damage import damages, json_damages

TEXTS = ["first", "", "zweites: ü", "third" * 20]


def corpus_of(texts, identity="one"):
    return Corpus("a test", identity, lambda: (Piece(text, True) for text in texts))


def fail():
    raise AssertionError("read again")
    yield


def whole(tokens):
    """Return all tokens of an array or a file as a list."""
    return tokens[np.arange(len(tokens))].tolist()


def test_runs_share_the_folder_that_the_user_names(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for told in (str(tmp_path / "here"), "~/here"):
        monkeypatch.setenv("MEZZO_TOKENS", told)
        assert token_store() == tmp_path / "here"
    monkeypatch.delenv("MEZZO_TOKENS")
    for told in (str(tmp_path), "~"):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert token_store() == tmp_path / "mezzo" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert token_store() == tmp_path / ".cache" / "mezzo" / "tokens"
    monkeypatch.setenv("MEZZO_TOKENS", "~nobody-here/x")
    with pytest.raises(UserError, match="~nobody-here/x has no home folder"):
        token_store()


def test_stored_tokens_are_those_of_the_tokenizer_that_asks(tmp_path):
    other = ByteTokenizer()
    other.identity, other.eos_token = "another", 7
    for tokenizer in (ByteTokenizer(), other):
        stored, made = (tokenize_corpus(corpus_of(TEXTS), tokenizer, f) for f in (tmp_path, None))
        assert whole(stored.tokens) == whole(made.tokens)


def test_a_document_of_several_pieces_begins_once():
    tokenizer = ByteTokenizer()
    tokenizer.begin_tokens = (0,)
    pieces = [Piece("ab", False), Piece("cd", True), Piece("e", True)]
    tokens = tokenize_corpus(
        Corpus("a test", "pieces", lambda: iter(pieces)), tokenizer, None
    ).tokens
    assert tokens.tolist() == [0, *b"abcd", 256, 0, *b"e", 256]


def test_a_user_without_a_home_is_one_line(monkeypatch):
    """As in a container whose process has the number of no known user."""

    def unknown(number):
        raise KeyError(f"uid not found: {number}")

    for name in ("MEZZO_TOKENS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UserError, match=r"has no home folder; .*MEZZO_TOKENS"):
        token_store()


class WideTokenizer(ByteTokenizer):
    """Bytes, in a vocabulary that needs 32 bits."""

    vocab_size = 100_000
    identity = "wide"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WideTokenizer()])
@pytest.mark.parametrize("cached", [False, True])
def test_each_document_is_followed_by_the_end_token(tmp_path, tokenizer, cached):
    tokenized = tokenize_corpus(corpus_of(TEXTS), tokenizer, tmp_path if cached else None)
    expected = [[*tokenizer.encode(text), 256] for text in TEXTS if text]
    assert whole(tokenized.tokens) == list(itertools.chain(*expected))
    assert tokenized.ends.tolist() == np.cumsum([len(part) for part in expected]).tolist()
    assert tokenized.num_bytes.tolist() == [len(text.encode()) for text in TEXTS if text]
    assert tokenized.tokens.dtype == (np.uint16 if tokenizer.vocab_size == 257 else np.uint32)
    assert isinstance(tokenized.tokens, StoredTokens) == cached


def test_pieces_are_one_document(monkeypatch):
    monkeypatch.setattr(tokenized_corpus, "_BATCH_CHARACTERS", 4)
    pieces = [Piece("abc", False), Piece("defg", False), Piece("", True), Piece("h", True)]
    tokenized = tokenize_corpus(Corpus("", "", lambda: iter(pieces)), ByteTokenizer(), None)
    assert tokenized.tokens.tolist() == [*b"abcdefg", 256, *b"h", 256]
    assert tokenized.num_bytes.tolist() == [7, 1]


class WordTokenizer(ByteTokenizer):
    """A token for each word, so that a text of spaces has none."""

    def encode_batch(self, texts):
        return [np.full(len(text.split()), 1) for text in texts]


def test_the_bytes_of_a_text_without_tokens_are_left_out_with_it():
    tokenized = tokenize_corpus(corpus_of(["a b", " " * 100, "c"]), WordTokenizer(), None)
    assert tokenized.ends.tolist() == [3, 5]
    assert tokenized.num_bytes.tolist() == [3, 1]


def test_the_cache_is_read_and_not_made_again(tmp_path):
    first = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    again = tokenize_corpus(replace(corpus_of(TEXTS), read=fail), ByteTokenizer(), tmp_path)
    assert whole(first.tokens) == whole(again.tokens)
    assert np.array_equal(first.ends, again.ends)
    with pytest.raises(AssertionError, match="read again"):
        tokenize_corpus(replace(corpus_of(TEXTS, "two"), read=fail), ByteTokenizer(), tmp_path)
    with pytest.raises(AssertionError, match="read again"):
        tokenize_corpus(replace(corpus_of(TEXTS), read=fail), WideTokenizer(), tmp_path)


def test_an_error_half_way_leaves_nothing(tmp_path):
    def read():
        yield Piece("some text", True)
        raise UserError("broken line")

    with pytest.raises(UserError, match="broken line"):
        tokenize_corpus(Corpus("", "one", read), ByteTokenizer(), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path).ends) == 3


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mezzo_core.data import tokenized_corpus\n"
        "from mezzo_core.data.corpora import Corpus, Piece\n"
        "from mezzo_core.data.tokenizers import ByteTokenizer\n"
        "tokenized_corpus._BATCH_PIECES = 1\n"
        "def read():\n"
        "    yield Piece('half of it', True)\n"
        "    yield Piece('more', True)\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
        "corpus = Corpus('', 'one', read)\n"
        f"tokenized_corpus.tokenize_corpus(corpus, ByteTokenizer(), Path({str(tmp_path)!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        assert [path for path in tmp_path.iterdir() if path.suffix == ".partial"]
        os.kill(process.pid, signal.SIGKILL)
    tokenized = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    assert len(tokenized.ends) == 3
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]


def test_of_two_at_once_one_reads_and_both_have_it(tmp_path):
    reads = []

    def read():
        reads.append(threading.get_ident())
        time.sleep(0.2)
        yield Piece("some text", True)

    found = []

    def work():
        found.append(
            whole(tokenize_corpus(Corpus("", "one", read), ByteTokenizer(), tmp_path).tokens)
        )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1
    assert found == [[*b"some text", 256]] * 3


def test_no_text_and_no_room_are_said(tmp_path):
    for cache_dir in (None, tmp_path):
        with pytest.raises(UserError, match="no text in a test"):
            tokenize_corpus(corpus_of(["", ""]), ByteTokenizer(), cache_dir)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot keep tokens in"):
        tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path / "file")


def test_a_file_system_without_locks_is_one_line(monkeypatch, tmp_path):
    """As filelock reports one that has no flock, before its version with a fallback."""

    def acquire(self, *_, **__):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with pytest.raises(UserError, match=r"support flock; .*MEZZO_TOKENS"):
        tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)


def cached_folder(cache_dir):
    (folder,) = (path for path in cache_dir.iterdir() if path.is_dir())
    return folder


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def other_array(path, array):
    np.save(path.open("wb"), array, allow_pickle=True)


MARKER = {"tokens": "0", "documents": "0"}
DAMAGES = {
    "a flipped token": lambda folder: flip(folder / "tokens.npy", -3),
    "a flipped end": lambda folder: flip(folder / "documents.npy", 128),
    "a flipped size": lambda folder: flip(folder / "documents.npy", -8),
    "cut tokens": lambda folder: os.truncate(folder / "tokens.npy", 140),
    "no header": lambda folder: os.truncate(folder / "tokens.npy", 20),
    "no tokens": lambda folder: (folder / "tokens.npy").unlink(),
    "a folder as tokens": lambda folder: (
        (folder / "tokens.npy").unlink(),
        (folder / "tokens.npy").mkdir(),
    ),
    "a pipe as documents": lambda folder: (
        (folder / "documents.npy").unlink(),
        os.mkfifo(folder / "documents.npy"),
    ),
    "other dtype": lambda folder: other_array(folder / "tokens.npy", np.zeros(90, np.float64)),
    "other shape": lambda folder: other_array(folder / "documents.npy", np.ones((3, 2), np.int64)),
    "no dimension": lambda folder: other_array(folder / "documents.npy", np.int64(3)),
    "no document": lambda folder: other_array(folder / "documents.npy", np.ones((2, 0), np.int64)),
    "falling ends": lambda folder: other_array(
        folder / "documents.npy", np.load(folder / "documents.npy")[:, ::-1]
    ),
    "a pickle": lambda folder: other_array(folder / "documents.npy", np.array([{}])),
    "a bare pickle": lambda folder: (folder / "tokens.npy").write_bytes(pickle.dumps([1])),
    "huge header": lambda folder: (folder / "documents.npy").write_bytes(
        (folder / "documents.npy").read_bytes().replace(b"(2, 3)", b"(2, 3000000000000000)")
    ),
    "a pipe as marker": lambda folder: (
        (folder / "packed.json").unlink(),
        os.mkfifo(folder / "packed.json"),
    ),
    "no marker": lambda folder: (folder / "packed.json").unlink(),
    "a torn marker": lambda folder: os.truncate(folder / "packed.json", 9),
    "a deep marker": lambda folder: (folder / "packed.json").write_text("[" * 100_000),
    "a list as marker": lambda folder: (folder / "packed.json").write_text("[1]"),
    "another marker": lambda folder: (folder / "packed.json").write_text(json.dumps(MARKER)),
    "numbers in the marker": lambda folder: (folder / "packed.json").write_text(
        '{"tokens": 1, "documents": [2]}'
    ),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file as folder": lambda folder: (shutil.rmtree(folder), folder.touch()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_tokenized_again_and_said(tmp_path, caplog, damage):
    first = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    expected = whole(first.tokens), first.ends.tolist(), first.num_bytes.tolist()
    DAMAGES[damage](cached_folder(tmp_path))
    with caplog.at_level(logging.WARNING):
        again = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    assert (whole(again.tokens), again.ends.tolist(), again.num_bytes.tolist()) == expected
    assert again.checksums == first.checksums
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is damaged" in line
    assert "\n" not in line
    tokenize_corpus(replace(corpus_of(TEXTS), read=fail), ByteTokenizer(), tmp_path)


@pytest.mark.parametrize("name", ["tokens.npy", "documents.npy", "packed.json"])
def test_a_damaged_file_of_a_cache_is_made_anew_or_without_effect(tmp_path, name):
    def made():
        found = tokenize_corpus(corpus_of(["a", "bc"]), ByteTokenizer(), tmp_path)
        return whole(found.tokens), found.ends.tolist(), found.num_bytes.tolist(), found.checksums

    expected, path = made(), cached_folder(tmp_path) / name
    content, rng = path.read_bytes(), random.Random(name)
    bits = {*range(0, len(content), 4), *range(len(content) - 8, len(content))}
    forms = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in bits]
    forms += [form.content for form in damages(content, rng)]
    if name == "packed.json":
        forms += [form.content for form in json_damages(content)]
    for form in forms:
        path.write_bytes(form)
        assert made() == expected


def test_tokens_beyond_the_vocabulary_are_not_taken_from_a_cache(tmp_path):
    tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    folder = cached_folder(tmp_path)
    tokens = np.load(folder / "tokens.npy")
    tokens[0] = 300
    other_array(folder / "tokens.npy", tokens)
    marker = json.loads((folder / "packed.json").read_text())
    marker["tokens"] = f"{zlib.crc32(tokens.data):08x}"  # a consistent forgery
    (folder / "packed.json").write_text(json.dumps(marker))
    assert max(whole(tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path).tokens)) == 256


@pytest.mark.parametrize("change", ["overwritten", "cut", "removed", "made anew"])
def test_what_others_do_to_tokens_in_use_is_said_or_has_no_effect(tmp_path, change):
    """A map of the file would give other tokens in silence, or end the process where it is cut."""
    tokens = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path).tokens
    before, path = whole(tokens), cached_folder(tmp_path) / "tokens.npy"
    if change in ("overwritten", "cut"):
        path.write_bytes(path.read_bytes()[:-4] + b"\1\0\1\0" * (change == "overwritten"))
        os.utime(path, (1, 1))  # the clock of some file systems is slow
        for read in (lambda: tokens[np.array([0])], lambda: tokens.read(0, 3)):
            with pytest.raises(UserError, match=r"another program changed .*tokens\.npy"):
                read()
        again = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path).tokens
        assert whole(again) == before
    else:
        shutil.rmtree(path.parent)
        if change == "made anew":
            tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
        assert whole(tokens) == before


def test_the_tokens_of_another_user_are_not_used(tmp_path, monkeypatch, caplog):
    made = partial(tokenize_corpus, corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    first, answers = made(), [False, True]
    monkeypatch.setattr("mezzo_core.data.stored_tokens.is_foreign", lambda _: answers.pop())
    with caplog.at_level(logging.WARNING):
        assert whole(made().tokens) == whole(first.tokens)
    assert "tokens.npy cannot be read (it belongs to another user)" in caplog.text
    monkeypatch.setattr("mezzo_core.data.tokenized_corpus.is_foreign", lambda _: True)
    with pytest.raises(UserError, match=r"packed-\w+ belongs to another user.*MEZZO_TOKENS"):
        made()


def test_a_damaged_cache_whose_corpus_is_gone_is_one_line(tmp_path):
    def gone():
        raise UserError("cannot read a.txt")
        yield

    tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    flip(cached_folder(tmp_path) / "tokens.npy", -3)
    with pytest.raises(UserError, match=r"cannot read a\.txt"):
        tokenize_corpus(replace(corpus_of(TEXTS), read=gone), ByteTokenizer(), tmp_path)


def test_checksums_are_the_same_in_memory_on_disk_and_without_checking(tmp_path):
    memory = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), None)
    written = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    found = tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path, check=False)
    assert memory.checksums == written.checksums == found.checksums
    for texts in (["firsu", *TEXTS[1:]], TEXTS[1:], ["", "firstzweites: ü", TEXTS[3]]):
        assert (
            tokenize_corpus(corpus_of(texts), ByteTokenizer(), None).checksums != memory.checksums
        )


@pytest.mark.parametrize("kind", ["folder", "lock", "cache", "partial"])
def test_a_planted_link_leads_nothing_elsewhere(tmp_path, kind):
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), cache)
    folder = cached_folder(cache)
    planted = {
        "folder": folder,
        "lock": folder.with_suffix(".lock"),
        "cache": cache,
        "partial": folder.with_suffix(f".{socket.gethostname()}.0.partial"),
    }[kind]
    shutil.rmtree(folder)
    if kind == "cache":
        shutil.rmtree(cache)
    planted.unlink(missing_ok=True)
    planted.symlink_to(elsewhere / "mine" if kind == "lock" else elsewhere)
    if kind in ("lock", "cache"):
        with pytest.raises(UserError, match="is a link"):
            tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), cache)
    else:
        assert len(tokenize_corpus(corpus_of(TEXTS), ByteTokenizer(), cache).ends) == 3
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert (elsewhere / "mine").read_text() == "mine"


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    code = (
        "import resource, signal\n"
        "from pathlib import Path\n"
        "from mezzo_core.data.corpora import Corpus, Piece\n"
        "from mezzo_core.data.tokenized_corpus import tokenize_corpus\n"
        "from mezzo_core.data.tokenizers import ByteTokenizer\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "corpus = Corpus('', 'one', lambda: iter([Piece('x' * 200_000, True)]))\n"
        f"tokenize_corpus(corpus, ByteTokenizer(), Path({str(tmp_path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "UserError: cannot keep tokens in" in done.stderr
    assert "File too large; the environment variable MEZZO_TOKENS" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
