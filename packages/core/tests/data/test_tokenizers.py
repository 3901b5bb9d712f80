import itertools
import json
import os
import random
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.data import StreamDecoder, load_tokenizer
from mezzo_core.data.libraries import library_errors
from mezzo_core.errors import UserError

SENTENCES = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "must be in want of a wife. However little known the feelings or views of such a man may be",
]
KINDS = ("byte", "json", "gpt2", "later", "sentencepiece")


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    """One small tokenizer of each kind, by the name that loads it."""
    tokenizers = pytest.importorskip("tokenizers")
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    names = {"byte": "byte"}
    for kind, vocab, merges in (
        ("gpt2", "encoder.json", "vocab.bpe"),
        ("later", "vocab.json", "merges.txt"),
    ):
        (folder / kind).mkdir()
        bpe.model.save(str(folder / kind))
        (folder / kind / "vocab.json").rename(folder / kind / vocab)
        (folder / kind / "merges.txt").rename(folder / kind / merges)
        names[kind] = str(folder / kind)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    bpe.enable_truncation(4)
    bpe.save(str(folder / "tokenizer.json"))
    names["json"] = str(folder / "tokenizer.json")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "small"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    names["sentencepiece"] = str(folder / "small.model")
    return names


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(names, kind, text):
    if kind == "sentencepiece":
        text = text.replace("\0", "")  # ends a string for SentencePiece
    tokenizer = load_tokenizer(names[kind])
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.eos_token not in tokens
    (batch,) = tokenizer.encode_batch([text])
    assert batch.tolist() == tokens
    assert np.issubdtype(batch.dtype, np.integer)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁\0\ufffd", exclude_categories=["Cs"])))
def test_streamed_text_is_the_text_with_no_half_character(names, kind, text):
    tokenizer = load_tokenizer(names[kind])
    text = text + "wörds 日本 🙂 of a man " * 4
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(token) for token in tokenizer.encode(text)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == text  # it ends with a complete character
    assert decoder.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_character_comes_with_the_flush(names, kind):
    tokenizer = load_tokenizer(names[kind])
    decoder = StreamDecoder(tokenizer)
    tokens = tokenizer.encode("man 🙂")[:-1]
    assert "".join(decoder.push(token) for token in tokens) == "man "
    assert set(decoder.flush()) == {"\ufffd"}
    assert decoder.push(tokenizer.encode("man")[0])[:1] in ("m", "")


def test_a_long_broken_run_is_printed_and_the_text_goes_on():
    decoder = StreamDecoder(load_tokenizer("byte"))
    printed = "".join(decoder.push(token) for token in [0x80] * 500 + list(b" and on"))
    assert printed.endswith("\ufffd and on")
    assert printed.count("\ufffd") == 500


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_no_text(names, kind):
    tokenizer = load_tokenizer(names[kind])
    text = "a <|endoftext|> b </s> c"
    assert tokenizer.eos_token not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token]) == ""
    assert 0 <= tokenizer.eos_token < tokenizer.vocab_size


def test_the_forms_of_one_bpe_agree_and_ignore_template_and_truncation(names):
    text = SENTENCES[0]
    tokens = load_tokenizer(names["gpt2"]).encode(text)
    assert len(tokens) > 4
    assert load_tokenizer(names["later"]).encode(text) == tokens
    assert load_tokenizer(names["json"]).encode(text) == tokens


def test_identities_differ_between_tokenizers_and_not_between_loads(names):
    once = {kind: load_tokenizer(name).identity for kind, name in names.items()}
    again = {kind: load_tokenizer(name).identity for kind, name in names.items()}
    assert once == again
    assert len({once[kind] for kind in KINDS if kind != "later"}) == 4


def test_the_end_token_is_the_one_that_the_configuration_names(names, tmp_path):
    content = Path(names["json"]).read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    token, number = max(json.loads(content)["model"]["vocab"].items())
    assert number != 0
    for named in (token, {"content": token}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert load_tokenizer(str(tmp_path)).eos_token == number
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(UserError, match="has no token <nowhere>"):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def change(names, tmp_path):
    """Load the JSON tokenizer with something in it changed."""
    content = json.loads(Path(names["json"]).read_text("utf-8"))

    def load(edit):
        changed = json.loads(json.dumps(content))
        edit(changed)
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed), "utf-8")
        return load_tokenizer(str(tmp_path))

    return load


@pytest.mark.parametrize(
    "named", [3, True, ["</s>"], {}, {"content": 3}, {"content": None}, "", {"content": ""}, 1.5]
)
def test_an_odd_end_token_in_the_configuration_is_named(change, tmp_path, named):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    with pytest.raises(UserError, match=r'tokenizer_config\.json: "eos_token" must be text'):
        change(lambda content: None)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff"])
def test_a_damaged_configuration_beside_a_tokenizer_is_named(change, tmp_path, text):
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        change(lambda content: None)


def test_a_configuration_may_name_no_end_token(change, tmp_path):
    for content in ("{}", '{"eos_token": null}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert change(lambda content: None).eos_token == 0


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(change, tmp_path, make):
    path = tmp_path / "tokenizer_config.json"
    make(path)
    with pytest.raises(UserError, match=r"tokenizer_config\.json must be a file"):
        change(lambda content: None)
    path = tmp_path / "folder" / "tokenizer.json"
    path.parent.mkdir()
    make(path)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(str(path))
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(str(path.parent))


def set_number(value):
    return lambda content: content["model"]["vocab"].update(a=value)


def set_model(**model):
    """Words or characters, "a" alone of them known."""

    def edit(content):
        content["model"] = model
        content["pre_tokenizer"] = {"type": "Whitespace"}

    return edit


END = "<|endoftext|>"
UNKNOWING = {
    "words": set_model(type="WordLevel", vocab={END: 0, "a": 1}, unk_token="[UNK]"),
    "pieces": set_model(
        type="WordPiece",
        vocab={END: 0, "a": 1},
        unk_token="[UNK]",
        continuing_subword_prefix="##",
        max_input_chars_per_word=9,
    ),
    "unigram": set_model(
        type="Unigram", vocab=[[END, 0.0], ["a", -1.0]], unk_id=None, byte_fallback=False
    ),
    "pairs": set_model(type="BPE", vocab={END: 0, "a": 1}, merges=[]),
    "bytes": lambda content: content["model"].update(
        vocab={token: i for token, i in content["model"]["vocab"].items() if token != "©"},
        merges=[],
    ),
}


@pytest.mark.parametrize("kind", UNKNOWING)
def test_text_without_tokens_is_refused_and_not_dropped(change, tmp_path, kind):
    def edit(content):
        if kind == "bytes":  # without merges, letters alone
            vocab = content["model"]["vocab"]
            content["model"]["vocab"] = {t: i for t, i in vocab.items() if len(t) == 1 or t == END}
        UNKNOWING[kind](content)

    tokenizer = change(edit)
    assert len(tokenizer.encode("a a" if kind != "unigram" else "a")) > 0
    for _ in range(2):
        with pytest.raises(UserError, match=re.escape(str(tmp_path / "tokenizer.json"))) as error:
            tokenizer.encode_batch(["a", "aéa"])
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match=r"tokenizer\.json"):
            tokenizer.encode("aé")


def test_characters_that_a_tokenizer_takes_out_itself_are_fine(change):
    tokenizer = change(set_model(type="BPE", vocab={END: 0, "a": 1}, merges=[]))
    assert tokenizer.encode(" a\n a ") == [1, 1]


@pytest.mark.parametrize("number", [-1, 2**32, "1", 1.5, None, 2**70])
def test_a_token_without_a_proper_number_is_named(change, number):
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        change(set_number(number))


def test_a_sparse_vocabulary_counts_up_to_its_largest_token(change):
    for number in (5000, 2**32 - 1):
        tokenizer = change(set_number(number))
        assert tokenizer.vocab_size == number + 1
        assert tokenizer.encode("a") == [number]
        assert tokenizer.encode_batch(["a"])[0].tolist() == [number]
        assert tokenizer.decode([number]) == "a"


def test_two_tokens_of_one_number_are_refused(change):
    with pytest.raises(UserError, match="gives two tokens the same number"):
        change(set_number(5))


def test_a_panic_of_the_library_is_one_line(change):
    class PanicException(BaseException):
        """As pyo3 makes it."""

    with pytest.raises(UserError, match=r"^it failed: first$"), library_errors("it failed"):
        raise PanicException("first\nsecond")
    with pytest.raises(KeyboardInterrupt), library_errors("it failed"):
        raise KeyboardInterrupt
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        change(lambda content: content["model"].update(continuing_subword_prefix="ééé"))


def test_dropout_and_templates_do_not_change_the_tokens(change, names):
    expected = load_tokenizer(names["json"]).encode(SENTENCES[0])

    def edit(content):
        content["model"]["dropout"] = 0.9
        content["post_processor"]["single"] = content["post_processor"]["single"][:1]

    assert change(edit).encode(SENTENCES[0]) == expected


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("encoder.json", lambda vocab: {**vocab, "a": "x"}),
        ("encoder.json", lambda vocab: {**vocab, "a": -1}),
        ("encoder.json", lambda vocab: {**vocab, "a": 2**32 + 5}),
        ("encoder.json", lambda vocab: {**vocab, "a": True}),
        ("encoder.json", lambda vocab: {**vocab, "a": vocab["b"]}),
        ("encoder.json", lambda vocab: list(vocab)),
        ("encoder.json", lambda vocab: {END: 0, "a": 1}),
        ("encoder.json", lambda vocab: {"a": 1}),
        ("vocab.bpe", lambda text: text + "zz qq\n"),
        ("vocab.bpe", lambda text: text + "one\n"),
        ("vocab.bpe", lambda text: text + "a b c\n"),
        ("vocab.bpe", lambda text: text + "\udcff"),
    ],
)
def test_vocabulary_and_merges_that_disagree_are_named(names, tmp_path, name, edit):
    for path in Path(names["gpt2"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / name).read_text("utf-8")
    changed = json.dumps(edit(json.loads(text))) if name == "encoder.json" else edit(text)
    (tmp_path / name).write_bytes(changed.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=name) as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_sentencepiece_model_without_an_end_is_named(tmp_path, names):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "endless"),
        vocab_size=60,
        model_type="bpe",
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(UserError, match=r"endless\.model has no </s>"):
        load_tokenizer(str(tmp_path / "endless.model"))
    tokenizer = load_tokenizer(names["sentencepiece"])
    assert tokenizer.decode([tokenizer.vocab_size]) == ""  # a model may have more tokens
    with pytest.raises(UserError, match=r"small\.model cannot encode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "gpt2"])
def test_a_flipped_or_cut_tokenizer_is_refused_in_one_line_or_works(names, tmp_path, kind):
    source = Path(names[kind])
    files = list(source.iterdir()) if source.is_dir() else [source]
    refused = []
    for path, (seed, cut) in itertools.product(files, itertools.product(range(12), (False, True))):
        for other in files:
            (tmp_path / other.name).write_bytes(other.read_bytes())
        content = bytearray(path.read_bytes())
        place = random.Random(seed).randrange(len(content))
        content[place] ^= 1 << seed % 8
        (tmp_path / path.name).write_bytes(content[:place] if cut else content)
        try:
            tokenizer = load_tokenizer(str(tmp_path / path.name if source.is_file() else tmp_path))
            tokens = tokenizer.encode(SENTENCES[1])
            assert tokenizer.decode(tokens)
            assert max(tokens) < tokenizer.vocab_size
        except UserError as error:
            refused.append((path.name, str(error)))
    assert len(refused) > 8
    assert all(name in line and "\n" not in line for name, line in refused)


def test_a_name_that_can_be_no_path_is_one_line():
    for name in ("", "~nobody-of-this-name/x", "a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(UserError, match="no tokenizer at"):
            load_tokenizer(name)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "null", "[]", "", "\xff\xfe{"]
)
def test_a_tokenizer_file_of_anything_else_is_one_line(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_what_is_no_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty.model").touch()
    (tmp_path / "broken.model").write_bytes(b"not a model")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("bytes", "no tokenizer at 'bytes'"),
        (str(tmp_path / "folder"), "no tokenizer at"),
        (str(tmp_path / "tokenizer.json"), "is no tokenizer of the tokenizers library"),
        (str(tmp_path / "broken.model"), "is no SentencePiece model"),
        (str(tmp_path / "empty.model"), "no SentencePiece model"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(name)


def test_a_hub_tokenizer_is_its_backend(names, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    loaded = types.SimpleNamespace(
        eos_token_id=0,
        backend_tokenizer=tokenizers.Tokenizer.from_file(names["json"]),
    )
    stand_in = types.ModuleType("transformers")
    stand_in.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: loaded)
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = load_tokenizer("hub:some/name")
    assert tokenizer.encode(SENTENCES[0]) == load_tokenizer(names["gpt2"]).encode(SENTENCES[0])
    loaded.eos_token_id = 100_000
    with pytest.raises(UserError, match="hub:some/name has no token 100000 to end a document"):
        load_tokenizer("hub:some/name")
    loaded.eos_token_id = 0
    loaded.backend_tokenizer = None
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer("hub:some/name")


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'mezzo-core\[hub\]'"):
        load_tokenizer("hub:some/name")
