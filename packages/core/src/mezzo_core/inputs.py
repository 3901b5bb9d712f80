"""Reads and checks the inputs of commands before any work: prompts, tokenizers and data."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.config_json import from_json, to_json
from mezzo_core.data.answers import AnswersConfig
from mezzo_core.data.batches import BatchSource, TextData
from mezzo_core.data.config import DataConfig
from mezzo_core.data.corpora import read_lines
from mezzo_core.data.find import existing_path, find_files, format_of
from mezzo_core.data.hub import HUB_PREFIX
from mezzo_core.data.mixture import MixtureConfig
from mezzo_core.data.texts import TextConfig, absolute_tokenizer, change_texts, name_texts, texts_of
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.nn.checkpoint import CONFIG, count_weights, describe_model, find_model
from mezzo_core.nn.on_meta import build_on_meta
from mezzo_core.train.config import TrainConfig

Value = TypeVar("Value")

_OPTIONS = {"tokenizer": "--tokenizer", "seq_len": "--seq-len"}
"""The options that supply an entry of "extra" if a model lacks it, as imported ones do."""


def read_prompts(given: Sequence[str] | None, file: Path | None = None) -> list[str]:
    """Return the given prompts and those of the file; without any, the text on standard input.

    Each line of the file that is not blank is a prompt. A BOM on standard input is dropped.

    Raises:
        UserError: if a text is not UTF-8, or the file has no prompt.
    """
    if file is not None:
        lines = [line.removesuffix("\n").removesuffix("\r") for _, line in read_lines(file)]
        if not lines:
            raise UserError(f"{file}: there is no prompt")
        given = [*(given or ()), *lines]
    try:
        read = sys.stdin.read() if sys.stdin and not given else ""
    except UnicodeDecodeError as error:
        raise UserError(f"the text on standard input is not UTF-8 ({error.reason})") from None
    texts = list(given or [read.removeprefix("\ufeff").removesuffix("\n")])
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # Python turned invalid bytes of an argument into surrogates
            raise UserError(f"the prompt is not UTF-8 text: {text!r}") from None
    return texts


def fitting_tokenizer(
    name: str, vocab_size: int, identity: object = None, *, add_bos: bool = False
) -> Tokenizer:
    """Load a tokenizer (`load_tokenizer`) for a model with a vocabulary of `vocab_size`.

    Raises:
        UserError: if it cannot be loaded, has more tokens than the vocabulary, or has another
            `identity` than the one that the model was trained with (None: not known).
    """
    tokenizer = load_tokenizer(name, add_bos=add_bos)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer {name!r} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocabulary of {vocab_size}"
        )
    if identity not in (None, tokenizer.identity):
        raise UserError(f"the tokenizer {name!r} is not the one that the model was trained with")
    return tokenizer


def told(extra: Mapping[str, Any], name: str, kind: type[Value], folder: Path) -> Value:
    """Return an entry of "extra" in a model's config.json, such as "tokenizer".

    Raises:
        UserError: if there is no such entry, or it has another type.
    """
    if name not in extra and name in _OPTIONS:
        raise UserError(f"{folder}/config.json tells no {name}: give {_OPTIONS[name]}")
    value = extra.get(name)
    if type(value) is not kind:
        words = {str: "a text", int: "a whole number", dict: "an object"}
        raise UserError(
            f'{folder}/config.json: "{name}" of "extra" must be {words[kind]}, got {value!r:.60}'
        )
    return value


def told_tokenizer(
    extra: Mapping[str, Any], folder: Path, vocab_size: int, name: str | None = None
) -> Tokenizer:
    """Load the tokenizer that a model's config.json names, or from `name` if it has moved.

    Raises:
        UserError: if config.json names none, or as `fitting_tokenizer` does.
    """
    known = name or told(extra, "tokenizer", str, folder)
    identity = extra.get("tokenizer_identity")
    return fitting_tokenizer(known, vocab_size, identity, add_bos=_adds_bos(extra))


def describe_tokenizer(tokenizer: str, vocab_size: int, *, add_bos: bool = False) -> dict[str, Any]:
    """Return the entries of "extra" that describe a tokenizer (`load_tokenizer`), by absolute path.

    The fingerprint of the text is None: with other tokens, nobody knows what training held out.

    Raises:
        UserError: as `fitting_tokenizer`; a tokenizer on the hub is not loaded.
    """
    identity = None
    if not tokenizer.startswith(HUB_PREFIX):
        # Raises an error now rather than at first use.
        identity = fitting_tokenizer(tokenizer, vocab_size, add_bos=add_bos).identity
    tokenizer = absolute_tokenizer(tokenizer)
    return {
        "tokenizer": tokenizer,
        "tokenizer_identity": identity,
        "fingerprint": None,
        "data": to_json(DataConfig(tokenizer=tokenizer, add_bos=add_bos)),
    }


def _adds_bos(extra: Mapping[str, Any]) -> bool:
    data = extra.get("data")
    if isinstance(data, dict) and isinstance(data.get("texts"), list):  # a mixture: all are alike
        data = next(iter(data["texts"]), None)
    elif isinstance(data, dict) and isinstance(data.get("text"), dict):  # examples with answers
        data = data["text"]
    return isinstance(data, dict) and data.get("add_bos") is True


def open_told_data(
    extra: Mapping[str, Any],
    folder: Path,
    vocab_size: int,
    source: str | None = None,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    allow_packages: Sequence[str] = (),
    *,
    answers: bool = False,
    text_column: str | None = None,
    skip_bad: bool | None = None,
    whole: bool = False,
) -> tuple[str, BatchSource]:
    """Open the text or the task that a model was trained on, as its config.json describes it.

    Args:
        extra: the entry "extra" of config.json.
        folder: the model's, for messages.
        vocab_size: the model's.
        source: another text to read instead. One of a mixture's texts keeps its settings.
        tokenizer: where the model's tokenizer is now, if it has moved.
        seq_len: tokens a row; None: as in training.
        allow_packages: packages besides mezzo's own that may have defined the task.
        answers: whether `source` holds prompts with answers (see `AnswersConfig`).
        text_column: the field of the text; None: as in training.
        skip_bad: whether to leave out records without text; None: as in training.
        whole: hold out all of the text.

    Returns:
        The name of what is read, for the report, and the source of its batches.

    Raises:
        UserError: if config.json describes no data, the tokens are not the model's, the text has
            changed since the training, an option of texts is given for a task, or `whole` is for a
            stream.
    """
    if "data" not in extra:  # an imported model's
        known = tokenizer or told(extra, "tokenizer", str, folder)
        extra = {**extra, **describe_tokenizer(known, vocab_size)}
    described = told(extra, "data", dict, folder)
    try:
        config = from_json(described, allow_packages)
    except UserError as error:
        raise UserError(f'{folder}/config.json, "data": {error}') from error
    length = seq_len or told(extra, "seq_len", int, folder)
    if isinstance(config, TextConfig):
        if source:
            texts = texts_of(config)
            config = next((text for text in texts if text.source == source), texts[0])
            if whole and not source.startswith(HUB_PREFIX):
                config = replace(config, streaming=False)
        if answers:
            usual: dict[str, Any] = {"text_column": DataConfig.text_column, "streaming": False}
            config = AnswersConfig(replace(texts_of(config)[0], **usual))
        if whole and any(text.streaming for text in texts_of(config)):
            raise UserError(f"{folder}: its data is a stream, which cannot be held out as a whole")
        options: dict[str, Any] = {
            "source": source,
            "tokenizer": tokenizer,
            "text_column": text_column,
            "skip_bad": skip_bad,
            "validation_fraction": 1.0 if whole else None,
        }
        changes = {name: value for name, value in options.items() if value is not None}
        if source or whole:
            changes["validation_source"] = None
        config = change_texts(config, **changes)
        held_out = {**extra, "fingerprint": None} if source or whole else extra
        if not source:
            _find_texts(config, folder)
        if text_column is not None:
            check_has_fields(config)
        text = _open_text(config, length, vocab_size, held_out)
        return " + ".join(t.validation_source or t.source for t in texts_of(config)), text
    try:
        of_texts = source or tokenizer or text_column or skip_bad or whole
        rows = None if of_texts else config.build(length, None)
    except (AttributeError, TypeError):  # it is no configuration of data
        rows = None
    if not isinstance(rows, BatchSource):
        raise UserError(f'{folder}/config.json: "data" must be of DataConfig, got {config!r:.60}')
    return type(config).__name__, rows


def check_has_fields(config: TextConfig) -> None:
    """Refuse a `text_column` other than the default if no text has fields.

    Raises:
        UserError: if it is another one, and all texts are .txt files or the novels, or one cannot
            be found.
    """
    texts = texts_of(config)
    if texts[0].text_column == DataConfig.text_column:  # all have the same text_column
        return
    sources = {text.source for text in texts} | {text.validation_source for text in texts}
    for source in sources - {None, "embedded"}:
        assert source is not None
        if source.startswith(HUB_PREFIX) or {*map(format_of, find_files(source))} != {".txt"}:
            return
    raise UserError(f"--text-column names a field, and {name_texts(config)} has none: leave it out")


def _find_texts(config: TextConfig, folder: Path) -> None:
    """Check that the files of the training are still there."""
    texts = texts_of(config)
    for text in texts:
        flag = "--sft" if isinstance(config, AnswersConfig) else "--data"
        told = f"{flag} with --all" if text.validation_source else flag
        advice = f"{told} can tell where {(text.validation_source or text.source)!r} is now"
        if len(texts) > 1:
            advice = "put it back, or measure one text alone by --data"
        for name in filter(None, (text.source, text.validation_source)):
            is_file = name != "embedded" and not name.startswith(HUB_PREFIX)
            if is_file and existing_path(name) is None and not has_magic(name):
                raise UserError(
                    f"{folder}: no file or folder {name!r}, which its training read: {advice}"
                )


def _open_text(
    config: TextConfig, seq_len: int, vocab_size: int, told: Mapping[str, Any]
) -> BatchSource:
    """Open a text; its tokenizer and fingerprint must be those of "extra", if it has them."""
    first, identity = texts_of(config)[0], told.get("tokenizer_identity")
    fitting_tokenizer(first.tokenizer, vocab_size, identity, add_bos=first.add_bos)
    rows = config.build(seq_len, None)
    if told.get("fingerprint") not in (None, rows.fingerprint):
        raise UserError(
            f"{name_texts(config)} is not the text that the model was trained on: it has changed, "
            "and what was held out is not known. Restore it, or give a text by --data"
        )
    if isinstance(rows, TextData) and rows.validation.num_targets == 0:
        raise UserError(
            f"{name_texts(config)}: what is held out has no target: give more text, or measure all "
            "of it (--all)"
        )
    return rows


def start_from(
    config: TrainConfig,
    run: Path,
    tokenizer: str | None = None,
    *,
    allow_packages: Sequence[str] = (),
) -> TrainConfig:
    """Return the configuration that trains an existing model further.

    Args:
        config: the recipe; its model and tokenizer are replaced.
        run: folder of a run or of a model.
        tokenizer: where the model's tokenizer is now, if it has moved.
        allow_packages: as in `load_model`.

    Raises:
        UserError: if the folder holds no model, or one that cannot be built, or the model's
            tokenizer is not where it was, or `tokenizer` is another one.
    """
    folder = find_model(run)
    model, extra = describe_model(folder, allow_packages=allow_packages)
    build_on_meta(model, folder / CONFIG, num_weights=count_weights(folder))
    data = config.data
    if "tokenizer" in extra and isinstance(data, TextConfig):
        told_tokenizer(extra, folder, model.vocab_size, tokenizer)  # it is there, and the model's
        known = tokenizer or told(extra, "tokenizer", str, folder)
        data = change_texts(data, tokenizer=known, add_bos=_adds_bos(extra))
    return replace(config, model=model, data=data, init_from=str(folder.resolve()))


def choose_texts(config: TextConfig, given: Sequence[str]) -> TextConfig:
    """Return a configuration for other texts, with the settings of `config`'s first text.

    `given` is one source, or several, each as "WEIGHT:SOURCE".

    Raises:
        UserError: if a weight is missing or no number, or `config` has a text to validate on and
            there are several sources.
    """
    first = texts_of(config)[0]
    if len(given) == 1:
        _refuse_weight(given[0])
        return replace(first, source=given[0])
    if first.validation_source is not None:
        raise UserError(f"--validation-data goes with one --data, got {len(given)}")
    weights, sources = [], []
    for text in given:
        weight, _, source = text.partition(":")
        try:
            weights.append(float(source and weight))
        except ValueError:
            raise UserError(
                f"--data, given {len(given)} times, must be WEIGHT:TEXT each, such as "
                f"0.7:words.txt, got {text!r}"
            ) from None
        sources.append(source)
    texts = tuple(replace(first, source=source) for source in sources)
    return MixtureConfig(texts, tuple(weights), first.seed)


def _refuse_weight(text: str) -> None:
    """Refuse "0.7:words.txt" as the one text of a training, if no file has this name."""
    if re.match(r"[\d.]+:", text) and not Path(text).exists():
        raise UserError(f"--data {text}: a single text has no weight; give its name alone")
