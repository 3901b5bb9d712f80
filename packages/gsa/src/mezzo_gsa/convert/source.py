"""Where a Transformer comes from: a folder of the hub's kind, the hub itself, or a run of ours."""

from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig
from mezzo_core.data.hub import HUB_PREFIX, reach_hub
from mezzo_core.errors import UserError
from mezzo_core.inputs import fitting_tokenizer
from mezzo_core.libraries import import_library
from mezzo_core.nn.checkpoint import find_model, load_model
from mezzo_core.nn.lm import LMConfig
from torch import Tensor

from mezzo_gsa.convert.llama import is_llama, load_llama

FILES = ("*.json", "*.safetensors", "tokenizer.model")
"""What is fetched from the hub: nothing that is pickled."""
SEQ_LEN = 2048
"""T of the paper's fine-tuning, for models that say nothing of a length."""


class Transformer(NamedTuple):
    """A Transformer, read."""

    folder: Path
    config: LMConfig
    weights: dict[str, Tensor]
    extra: dict[str, Any]
    """What a command needs beside the model: tokenizer, data, seq_len."""


def read_transformer(
    source: str, tokenizer: str | None = None, *, has_rope: bool = True
) -> Transformer:
    """Read a Transformer.

    Args:
        source: a folder with a Llama or Mistral checkpoint; "hub:NAME", which is downloaded; or a
            training run's folder, or its model/.
        tokenizer: in place of the model's own; see `mezzo_core.data.load_tokenizer`.
        has_rope: see `load_llama`.

    Raises:
        UserError: if there is no such model, it cannot be read, nothing says its tokenizer, or that
            cannot be read.
    """
    folder = download(source) if source.startswith(HUB_PREFIX) else Path(source)
    if not is_llama(folder):
        folder = find_model(folder)
        model, config, extra = load_model(folder)
        if tokenizer is not None:
            extra = {**extra, **_described(tokenizer, config.vocab_size)}
        return Transformer(folder, config, model.state_dict(), extra)
    tokenizer = tokenizer or _tokenizer_of(folder, source)
    config, weights = load_llama(folder, has_rope=has_rope)
    extra = {"name": source, "seq_len": SEQ_LEN, **_described(tokenizer, config.vocab_size)}
    return Transformer(folder, config, weights, extra)


def download(source: str) -> Path:
    """Fetch "hub:NAME" with `huggingface_hub`, or find it among earlier downloads.

    Raises:
        UserError: if it cannot be had, or the library is not installed.
    """
    library = import_library("huggingface_hub", "hub")
    reach_hub(source)
    name = source.removeprefix(HUB_PREFIX)
    try:
        return Path(library.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # the library and the hub raise errors of every kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot get {source!r} from the hub: {reason}") from error


def _tokenizer_of(folder: Path, source: str) -> str:
    if source.startswith(HUB_PREFIX):
        return source  # the tokenizer is found again by name, wherever downloads are kept
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    if (folder / "tokenizer.model").is_file():
        return str(folder / "tokenizer.model")
    raise UserError(f"{folder} has no tokenizer.json or tokenizer.model: name one with --tokenizer")


def _described(tokenizer: str, vocab_size: int) -> dict[str, Any]:
    """Name the tokenizer for whoever reads the new model, from wherever that is."""
    if not tokenizer.startswith(HUB_PREFIX):
        fitting_tokenizer(tokenizer, vocab_size)  # a bad one is found now, not in use
    if tokenizer != "byte" and not tokenizer.startswith(HUB_PREFIX):
        tokenizer = str(Path(tokenizer).expanduser().resolve())
    return {"tokenizer": tokenizer, "data": to_json(DataConfig(tokenizer=tokenizer))}
