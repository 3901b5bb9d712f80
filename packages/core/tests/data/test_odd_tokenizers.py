import itertools
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mezzo_core.data import NO_TARGET, DataConfig, load_tokenizer
from mezzo_core.errors import UserError
from mezzo_core.libraries import library_errors, panics_unprinted


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


def test_the_files_beside_a_tokenizer_name_its_end_and_all_that_stop_a_text(change, tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    tokenizer = change(lambda content: None)
    assert tokenizer.decode([tokenizer.eos_token]) == "a"
    assert tokenizer.stop_tokens == (tokenizer.eos_token, 0, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')  # it is asked first
    tokenizer = change(lambda content: None)
    assert tokenizer.decode([tokenizer.stop_tokens[0]]) == "b"
    assert tokenizer.stop_tokens[1:] == (7,)
    for odd in ('"7"', "[7, true]", "-1", "{}"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {odd}}}')
        with pytest.raises(UserError, match=r'generation_config\.json: "eos_token_id" must be'):
            change(lambda content: None)


def test_special_tokens_above_the_vocabulary_are_no_tokens_of_a_text(change, sentences):
    plain = change(lambda content: None)

    def add(special):
        number = plain.vocab_size
        token = {"id": number, "content": "<pad>", "special": special}
        rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return lambda content: content["added_tokens"].append({**token, **rest})

    padded = change(add(True))
    assert padded.vocab_size == plain.vocab_size
    text = f"{sentences[0]}<pad>"
    assert padded.encode(text) == plain.encode(text)
    assert change(add(False)).vocab_size == plain.vocab_size + 1


def test_what_stands_for_unknown_words_is_a_token_of_a_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(words)
    backend.add_special_tokens(["</s>", "[UNK]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("b") == [2]
    assert tokenizer.vocab_size == 3


def test_a_tokenizers_first_token_is_put_before_a_text_when_asked(change, tmp_path, names):
    assert change(lambda content: None).bos_token is None  # its template begins with the end token

    def begin(content):
        content["post_processor"]["single"][0]["SpecialToken"]["id"] = "a"
        content["post_processor"]["special_tokens"] = {
            "a": {"id": "a", "ids": [content["model"]["vocab"]["a"]], "tokens": ["a"]}
        }

    tokenizer = change(begin)
    bos = tokenizer.bos_token
    assert tokenizer.decode([bos]) == "a"
    assert tokenizer.begin_tokens == ()
    told = load_tokenizer(str(tmp_path), add_bos=True)
    assert told.begin_tokens == (bos,)
    assert told.identity != tokenizer.identity
    assert told.encode("b") == tokenizer.encode("b")
    assert load_tokenizer(names["sentencepiece"], add_bos=True).begin_tokens == (1,)
    with pytest.raises(UserError, match="add_bos: the tokenizer 'byte' has no token"):
        load_tokenizer("byte", add_bos=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_each_document_begins_with_the_first_token_when_asked(tmp_path, names, streaming):
    pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text('{"text": "man"}\n{"text": ""}\n' * 150)
    config = DataConfig(
        source=str(tmp_path / "a.jsonl"),
        tokenizer=names["sentencepiece"],
        add_bos=True,
        streaming=streaming,
        mask_documents=True,
    )
    data = config.build(8, None)
    bos, eos = data.tokenizer.bos_token, data.tokenizer.eos_token
    document = [bos, *data.tokenizer.encode("man"), eos]
    for batch in (data.train_batch(0, 1), next(data.validation_batches(1))):
        text = batch.tokens[0].tolist()
        start = text.index(bos)
        assert text[start : start + len(document)] == document[: 8 - start]
        assert set(text[:start]) <= {eos}
    targets = torch.cat([batch.targets[0] for batch in data.validation_batches(1)])
    texts = targets[targets != NO_TARGET].tolist().count(eos)
    assert data.num_validation_bytes == 3 * texts


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


def test_a_panic_of_the_library_is_one_line(change, capfd):
    class PanicException(BaseException):
        """As pyo3 makes it."""

    with pytest.raises(UserError, match=r"^it failed: first$"), library_errors("it failed"):
        raise PanicException("first\nsecond")
    with pytest.raises(KeyboardInterrupt), library_errors("it failed"):
        raise KeyboardInterrupt
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer"):
        change(lambda content: content["model"].update(continuing_subword_prefix="ééé"))
    assert capfd.readouterr().err == ""
    with panics_unprinted():
        os.write(2, b"a word of another thread")
    assert capfd.readouterr().err == "a word of another thread"


def test_dropout_and_templates_do_not_change_the_tokens(change, names, sentences):
    expected = load_tokenizer(names["json"]).encode(sentences[0])

    def edit(content):
        content["model"]["dropout"] = 0.9
        content["post_processor"]["single"] = content["post_processor"]["single"][:1]

    assert change(edit).encode(sentences[0]) == expected


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


def test_a_tokenizer_that_loses_line_breaks_is_named_in_a_warning(
    tmp_path, names, train_sentencepiece, caplog
):
    lossy = train_sentencepiece(tmp_path / "lossy", 60)
    (tmp_path / "a.txt").write_text("in want of\na wife " * 20)
    config = DataConfig(source=str(tmp_path / "a.txt"), tokenizer=lossy)
    config.build(4, None)
    assert "turns line breaks into spaces" in caplog.text
    caplog.clear()
    for name in names.values():
        replace(config, tokenizer=name).build(4, None)
    assert not caplog.messages


def test_a_sentencepiece_model_without_an_end_is_named(tmp_path, names, train_sentencepiece):
    endless = train_sentencepiece(tmp_path / "endless", 60, eos_id=-1)
    with pytest.raises(UserError, match=r"endless\.model has no </s>"):
        load_tokenizer(endless)
    tokenizer = load_tokenizer(names["sentencepiece"])
    assert tokenizer.decode([tokenizer.vocab_size]) == ""  # a model may have more tokens
    with pytest.raises(UserError, match=r"small\.model cannot encode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "gpt2"])
def test_a_flipped_or_cut_tokenizer_is_refused_in_one_line_or_works(
    names, tmp_path, kind, sentences
):
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
            tokens = tokenizer.encode(sentences[1])
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
