import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from mezzo_core.data import packing
from mezzo_core.data.corpora import Corpus, Piece
from mezzo_core.data.packing import pack_corpus
from mezzo_core.data.tokenizers import ByteTokenizer
from mezzo_core.errors import UserError

TEXTS = ["first", "", "zweites: ü", "third" * 20]


def corpus_of(texts, identity="one"):
    return Corpus("a test", identity, lambda: (Piece(text, True) for text in texts))


class WideTokenizer(ByteTokenizer):
    """Bytes, in a vocabulary that needs 32 bits."""

    vocab_size = 100_000
    identity = "wide"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WideTokenizer()])
@pytest.mark.parametrize("cached", [False, True])
def test_each_document_is_followed_by_the_end_token(tmp_path, tokenizer, cached):
    packed = pack_corpus(corpus_of(TEXTS), tokenizer, tmp_path if cached else None)
    expected = [[*tokenizer.encode(text), 256] for text in TEXTS if text]
    assert packed.tokens.tolist() == list(itertools.chain(*expected))
    assert packed.ends.tolist() == np.cumsum([len(part) for part in expected]).tolist()
    assert packed.num_bytes.tolist() == [len(text.encode()) for text in TEXTS if text]
    assert packed.tokens.dtype == (np.uint16 if tokenizer.vocab_size == 257 else np.uint32)
    assert isinstance(packed.tokens, np.memmap) == cached


def test_pieces_are_one_document(monkeypatch):
    monkeypatch.setattr(packing, "_BATCH_CHARACTERS", 4)
    pieces = [Piece("abc", False), Piece("defg", False), Piece("", True), Piece("h", True)]
    packed = pack_corpus(Corpus("", "", lambda: iter(pieces)), ByteTokenizer(), None)
    assert packed.tokens.tolist() == [*b"abcdefg", 256, *b"h", 256]
    assert packed.num_bytes.tolist() == [7, 1]


def test_the_cache_is_read_and_not_made_again(tmp_path):
    def fail():
        raise AssertionError("read again")
        yield

    first = pack_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    again = pack_corpus(replace(corpus_of(TEXTS), read=fail), ByteTokenizer(), tmp_path)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.ends, again.ends)
    with pytest.raises(AssertionError, match="read again"):
        pack_corpus(replace(corpus_of(TEXTS, "two"), read=fail), ByteTokenizer(), tmp_path)
    with pytest.raises(AssertionError, match="read again"):
        pack_corpus(replace(corpus_of(TEXTS), read=fail), WideTokenizer(), tmp_path)


def test_an_error_half_way_leaves_nothing(tmp_path):
    def read():
        yield Piece("some text", True)
        raise UserError("broken line")

    with pytest.raises(UserError, match="broken line"):
        pack_corpus(Corpus("", "one", read), ByteTokenizer(), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(pack_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path).ends) == 3


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mezzo_core.data import packing\n"
        "from mezzo_core.data.corpora import Corpus, Piece\n"
        "from mezzo_core.data.tokenizers import ByteTokenizer\n"
        "packing._BATCH_PIECES = 1\n"
        "def read():\n"
        "    yield Piece('half of it', True)\n"
        "    yield Piece('more', True)\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
        f"packing.pack_corpus(Corpus('', 'one', read), ByteTokenizer(), Path({str(tmp_path)!r}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        assert [path for path in tmp_path.iterdir() if path.suffix == ".partial"]
        os.kill(process.pid, signal.SIGKILL)
    packed = pack_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path)
    assert len(packed.ends) == 3
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
            pack_corpus(Corpus("", "one", read), ByteTokenizer(), tmp_path).tokens.tolist()
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
            pack_corpus(corpus_of(["", ""]), ByteTokenizer(), cache_dir)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot keep packed tokens in"):
        pack_corpus(corpus_of(TEXTS), ByteTokenizer(), tmp_path / "file")
