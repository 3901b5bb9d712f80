import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mezzo_core.data import StreamDecoder, load_tokenizer, stop_texts
from mezzo_core.data.continuations import Continuations
from mezzo_core.errors import UserError

KINDS = ("byte", "json", "gpt2", "later", "llama", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 4)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(names, kind, text):
    if kind == "sentencepiece":
        text = text.replace("\0", "")  # ends a string for SentencePiece
    tokenizer = load_tokenizer(names[kind])
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    counts = [tokenizer.token_bytes(token, first=i == 0) for i, token in enumerate(tokens)]
    assert sum(counts) == len(text.encode("utf-8"))
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.eos_token not in tokens
    (batch,) = tokenizer.encode_batch([text])
    assert batch.tolist() == tokens
    assert np.issubdtype(batch.dtype, np.integer)


def test_a_part_of_a_character_counts_all_of_its_bytes(tmp_path):
    """As GPT-2's tokens do: the first here has two of the three bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["</s>", *tokenizers.pre_tokenizers.ByteLevel.alphabet(), "æĹ"]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [("æ", "Ĺ")])
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert list(map(tokenizer.token_bytes, tokenizer.encode("日é"))) == [2, 1, 1, 1]


@pytest.mark.parametrize("text", ["hi hi", "日", "X"])
@pytest.mark.parametrize("adds_space", [False, True])
def test_a_space_that_a_tokenizer_puts_before_a_text_does_not_count(tmp_path, text, adds_space):
    """As RoBERTa's does with `add_prefix_space`: "Ġhi", "Ġæ" with more bytes, and "Ġ" alone."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["</s>", *tokenizers.pre_tokenizers.ByteLevel.alphabet(), "hi", "Ġhi", "Ġæ"]
    merges = [("h", "i"), ("Ġ", "hi"), ("Ġ", "æ")]
    model = tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges)
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    tokens = tokenizer.encode(text)
    counts = [tokenizer.token_bytes(token, first=i == 0) for i, token in enumerate(tokens)]
    assert sum(counts) == len(text.encode("utf-8"))


def test_a_lone_space_counts_where_spaces_at_the_start_are_dropped(tmp_path, train_sentencepiece):
    """As in SentencePiece's usual models."""
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path / "usual", 300, byte_fallback=True))
    tokens = tokenizer.encode("man 日本 X man")
    assert "▁" in [tokenizer.processor.id_to_piece(token) for token in tokens]
    counts = [tokenizer.token_bytes(token, first=i == 0) for i, token in enumerate(tokens)]
    assert sum(counts) == len("man 日本 X man".encode())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 4)
@example(text=" ")
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_character_spoils_none_beside_it(names, kind):
    tokenizer = load_tokenizer(names[kind])
    begun = tokenizer.encode("日本")[:-1]
    decoder = StreamDecoder(tokenizer)
    text = "".join(map(decoder.push, [*begun, *begun, *tokenizer.encode("man")])) + decoder.flush()
    assert text.replace("\ufffd", " ").split() == ["日", "日", "man"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_the_space_after_its_prompt(names, kind):
    tokenizer = load_tokenizer(names[kind])
    prompt, rest = "a single man in possession", " of a good fortune 🙂"
    before = tokenizer.encode(prompt)
    tokens = tokenizer.encode(prompt + rest)
    assert tokens[: len(before)] == before
    decoder = StreamDecoder(tokenizer, before)
    assert "".join(decoder.push(token) for token in tokens[len(before) :]) == rest
    assert decoder.flush() == ""


def test_broken_characters_are_not_held_back_for_ever():
    decoder = StreamDecoder(load_tokenizer("byte"))
    assert "".join(decoder.push(0xFF) for _ in range(100)) == "\ufffd" * 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_may_begin_with_the_first_space(names, kind):
    tokenizer = load_tokenizer(names[kind])
    prompt = tokenizer.encode("It is")
    new = tokenizer.encode("It is a truth")[len(prompt) :]
    for text in (" a", "a tr", " a tr", "truth"):
        stop = stop_texts(tokenizer, [text])
        written = [tokenizer.decode([*prompt, *new[:i]])[len("It is") :] for i in range(len(new))]
        assert [stop(new[:i]) for i in range(len(new))] == [text in each for each in written]
        assert stop(new)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 4)
@given(text=st.text(st.characters(exclude_characters="▁\0", exclude_categories=["Cs"])))
def test_what_follows_a_text_gets_no_space_more(names, kind, text):
    tokenizer = load_tokenizer(names[kind])
    prompt = tokenizer.encode("It is:")
    for rest in (text, "4", "    return 1", "\nman", "🙂"):
        tokens = Continuations(tokenizer).encode(rest)
        assert tokenizer.decode([*prompt, *tokens]) == f"It is:{rest}"
        assert Continuations(tokenizer).decode(tokens) == rest


def test_a_stop_text_needs_no_latin_letters(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    small = tokenizers.Tokenizer(tokenizers.models.BPE({"日": 0, "本": 1, "</s>": 2}, []))
    small.add_special_tokens(["</s>"])
    small.decoder = tokenizers.decoders.Fuse()
    small.save(str(tmp_path / "tokenizer.json"))
    stop = stop_texts(load_tokenizer(str(tmp_path)), ["日本"])
    assert [stop([0, 1][:i]) for i in range(3)] == [False, False, True]


def test_a_space_after_many_special_tokens_is_kept(names):
    tokenizer = load_tokenizer(names["sentencepiece"])
    before, word = tokenizer.encode("a single man"), tokenizer.encode("in")
    for count in (7, 8, 9, 20):
        ends = [tokenizer.eos_token] * count
        assert tokenizer.decode([*before, *ends, *word]) == "a single man in"
        for prompt, rest in ((before, ends + word), (before + ends, word)):
            decoder = StreamDecoder(tokenizer, prompt)
            assert "".join(map(decoder.push, rest)) + decoder.flush() == " in"


def test_a_long_broken_run_is_printed_and_the_text_goes_on():
    decoder = StreamDecoder(load_tokenizer("byte"))
    printed = "".join(decoder.push(token) for token in [0x80] * 500 + list(b" and on"))
    assert printed.endswith("\ufffd and on")
    assert printed.count("\ufffd") == 500


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_those_beyond_the_vocabulary_are_no_text(names, kind):
    tokenizer = load_tokenizer(names[kind])
    text = "a <|endoftext|> b </s> c"
    assert tokenizer.eos_token not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token]) == ""
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode(text), 10**6]) == text
    assert 0 <= tokenizer.eos_token < tokenizer.vocab_size


def test_the_forms_of_one_bpe_agree_and_ignore_template_and_truncation(names, sentences):
    text = sentences[0]
    tokens = load_tokenizer(names["gpt2"]).encode(text)
    assert len(tokens) > 4
    assert load_tokenizer(names["later"]).encode(text) == tokens
    assert load_tokenizer(names["json"]).encode(text) == tokens


def test_identities_differ_between_tokenizers_and_not_between_loads(names):
    once = {kind: load_tokenizer(name).identity for kind, name in names.items()}
    again = {kind: load_tokenizer(name).identity for kind, name in names.items()}
    assert once == again
    assert len({once[kind] for kind in KINDS if kind != "later"}) == 5


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


def test_a_hub_tokenizer_is_its_backend(names, monkeypatch, sentences):
    tokenizers = pytest.importorskip("tokenizers")
    loaded = types.SimpleNamespace(
        eos_token_id=0,
        backend_tokenizer=tokenizers.Tokenizer.from_file(names["json"]),
    )

    def load(name, trust_remote_code):
        assert (name, trust_remote_code) == ("some/name", False)
        return loaded

    stand_in = types.ModuleType("transformers")
    stand_in.AutoTokenizer = types.SimpleNamespace(from_pretrained=load)
    told = types.SimpleNamespace(eos_token_id=[0, 7])
    stand_in.GenerationConfig = types.SimpleNamespace(from_pretrained=lambda name: told)
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = load_tokenizer("hub:some/name")
    assert tokenizer.encode(sentences[0]) == load_tokenizer(names["gpt2"]).encode(sentences[0])
    assert tokenizer.stop_tokens == (0, 7)
    loaded.eos_token_id = 100_000
    with pytest.raises(UserError, match="hub:some/name has no token 100000 to end a document"):
        load_tokenizer("hub:some/name")
    loaded.eos_token_id = 0
    loaded.backend_tokenizer = None
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer("hub:some/name")


def test_a_hub_tokenizer_has_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    for name in ("..", "./gpt2", "/gpt2", "a/b/c", "", "gpt2\n"):
        with pytest.raises(UserError, match="tokenizer must have the form hub:OWNER/NAME or"):
            load_tokenizer(f"hub:{name}")
    with pytest.raises(UserError, match="tokenizer 'hub:gpt2' is ambiguous"):
        load_tokenizer("hub:gpt2")


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'mezzo-core\[hub\]'"):
        load_tokenizer("hub:some/name")
