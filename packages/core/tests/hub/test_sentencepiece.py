"""SentencePiece models that are exported: the same tokens for every text, or one clear line."""

import itertools
import random
import struct

import pytest
import sentencepiece
from mezzo_core.data.embedded import embedded_documents
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.errors import UserError
from mezzo_core.hub.tokenizer import to_transformers

CHAPTER = next(embedded_documents())
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
"""How Llama's tokenizer was trained."""


def trained(folder, **options):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CHAPTER.split("\n")),
        model_prefix=str(folder / "model"),
        vocab_size=500,
        minloglevel=2,
        **options,
    )
    return load_tokenizer(str(folder / "model.model"), add_bos=True)


def with_pieces(folder, names, score):
    """Add pieces to a model's file, which is a protobuf message: what follows it is added."""
    added = b""
    for name in map(str.encode, names):
        piece = b"\x0a" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", score)
        added += b"\x0a" + bytes([len(piece)]) + piece
    path = folder / "added.model"
    path.write_bytes((folder / "model.model").read_bytes() + added)
    return load_tokenizer(str(path))


def texts():
    """Yield pieces of prose, and letters of all kinds side by side, spaces and names of tokens."""
    draw = random.Random(0)
    odd = [
        "  ",
        "\n\n",
        "\t",
        "é",
        "e\u0301",
        "日本",
        "🙂",
        "<s>",
        "</s>",
        "<0x0A>",
        "▁",
        "Miss",
        "\ufeff",
    ]
    for _ in range(300):
        start = draw.randrange(len(CHAPTER))
        yield CHAPTER[start : start + draw.randrange(200)]
        yield "".join(draw.choice([*odd, draw.choice(CHAPTER)]) for _ in range(20))


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"split_digits": True}])
def test_a_model_as_llamas_gives_the_same_tokens_and_texts(tmp_path, options):
    mine = trained(tmp_path, **LLAMA | options)
    theirs = to_transformers(mine)
    for text in texts():
        tokens = mine.encode(text)
        assert theirs(text).input_ids == [mine.bos_token, *tokens], text
        assert theirs.decode(tokens) == mine.decode(tokens)
    assert theirs.eos_token_id == mine.eos_token
    theirs.save_pretrained(tmp_path / "out")
    back = load_tokenizer(str(tmp_path / "out"))
    assert back.encode(CHAPTER) == mine.encode(CHAPTER)


def test_spaces_whose_pieces_are_equally_good_give_the_same_tokens(tmp_path):
    """Mistral's pieces of 2 to 14 and of 16 spaces have one score."""
    lengths = [2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11]  # in the order of its file
    trained(tmp_path, **LLAMA)
    mine = with_pieces(tmp_path, ["▁" * length for length in lengths], -1e9)
    theirs = to_transformers(mine)
    draw = random.Random(0)
    spaces = [" " * count for count in range(200)]
    mixed = [
        "".join(draw.choice([*spaces[:40], "it", "\n", "é"]) for _ in range(9)) for _ in spaces
    ]
    for text in [*spaces, *mixed]:
        assert theirs(text).input_ids == mine.encode(text), text


def test_equally_good_pieces_that_share_a_letter_are_refused(tmp_path):
    """SentencePiece merges the left one, a list of merges the first."""
    processor = trained(tmp_path, **LLAMA).processor
    known = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    letters = [piece for piece in known if piece.isalpha() and len(piece) == 1]
    a, b, c = next(
        (a, b, c)
        for a, b, c in itertools.permutations(letters, 3)
        if not {a + b, c + a, c + a + b} & {*known} and known.index(a) < known.index(c)
    )
    with pytest.raises(UserError, match=rf"'\\n{c}{a}{b}', a text of 4 char"):
        to_transformers(with_pieces(tmp_path, [a + b, c + a], -1e9))


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"user_defined_symbols": ["<x>"]},
        {"model_type": "unigram"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_model_of_another_kind_is_one_line(tmp_path, options):
    tokenizer = trained(tmp_path, **LLAMA | options)
    told = (
        r"model\.model cannot be written as a tokenizer\.json: .*, a text of \d+ characters, would"
    )
    with pytest.raises(UserError, match=told):
        to_transformers(tokenizer)
