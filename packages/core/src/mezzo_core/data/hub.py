"""Data sets and tokenizers of the Hugging Face hub."""

import http.client
import os
import re
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError

from mezzo_core.errors import UserError
from mezzo_core.libraries import import_library, library_errors

HUB_PREFIX = "hub:"
_TIMEOUT_SECONDS = 10
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


def hub_name(argument: str, value: str, *, needs_owner: bool = False) -> str:
    """Return the NAME of "hub:NAME" or "hub:NAME:CONFIG" if it can only be found on the hub.

    The hub's libraries prefer a local folder of the same name, and `datasets` takes a name without
    an owner ("json", "text") for a format in which it reads the files of the current folder.

    Args:
        argument: its name in messages.
        value: the name with its prefix.
        needs_owner: whether NAME must be OWNER/NAME.

    Raises:
        UserError: if it has not this form, or there is a file or folder of this name.
    """
    name = value.removeprefix(HUB_PREFIX).partition(":")[0]
    pattern = f"{_PART}/{_PART}" if needs_owner else f"({_PART}/)?{_PART}"
    if not re.fullmatch(pattern, name):
        form = "hub:OWNER/NAME" if needs_owner else "hub:OWNER/NAME or hub:NAME"
        raise UserError(f"{argument} must have the form {form}, a name of the hub, got {value!r}")
    if os.path.lexists(name):
        raise UserError(
            f"{argument} {value!r} is ambiguous: there is a file or folder of this name here. "
            f"Leave out {HUB_PREFIX!r} to read that, or start in another folder"
        )
    return name


def reach_hub(wanted: str) -> None:
    """Check that the hub answers, because its own libraries only give up after half a minute.

    With HF_HUB_OFFLINE=1 those libraries use earlier downloads, and nothing is checked.

    Raises:
        UserError: if the hub does not answer.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
            pass
    except HTTPError:
        pass  # any answer, even an error, shows that the hub is there
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"cannot get {wanted!r}: {endpoint} does not answer ({reason}); "
            "with HF_HUB_OFFLINE=1 what was downloaded before is used"
        ) from error


def load_hub_dataset(source: str, *, split: str | None, streaming: bool) -> Any:
    """Load "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG" with `datasets`.

    Args:
        source: the name, with its prefix.
        split: name of one split, or None for all.
        streaming: read on the fly instead of downloading first.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` when streaming. Without `split`, a dict of
        these by the name of the split.

    Raises:
        UserError: if there is no network, or no such name, configuration or split; or as in
            `hub_name`.
    """
    name = hub_name("source", source, needs_owner=True)
    config = source.removeprefix(HUB_PREFIX).partition(":")[2]
    datasets = import_library("datasets", "train")
    reach_hub(source)
    with library_errors(f"cannot load {source!r} from the hub"):
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


def load_hub_tokenizer(source: str) -> tuple[Any, int, list[int]]:
    """Load "hub:OWNER/NAME" with `transformers`.

    Returns:
        The wrapped tokenizer of the `tokenizers` library, its end token, and the tokens that end
        what the model of that name writes.

    Raises:
        UserError: if the tokenizer cannot be loaded, does not wrap one of the `tokenizers`
            library, or names no end token; or as in `hub_name`.
    """
    name = hub_name("tokenizer", source)
    transformers = import_library("transformers", "hub")
    reach_hub(source)
    with library_errors(f"cannot load {source!r} from the hub"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        stops: Any = None
        with suppress(OSError):  # not every model has this file
            stops = transformers.GenerationConfig.from_pretrained(name).eos_token_id
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{source!r} has no tokenizer.json; give its SentencePiece .model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{source!r} names no token to end a document")
    others = stops if isinstance(stops, list) else [] if stops is None else [stops]
    return backend, tokenizer.eos_token_id, others
