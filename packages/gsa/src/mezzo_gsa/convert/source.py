"""Sources of a Transformer: a folder in the hub's format, the hub, or a training run of ours."""

from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.data import load_tokenizer
from mezzo_core.data.hub import HUB_PREFIX, hub_name, reach_hub
from mezzo_core.errors import UserError
from mezzo_core.inputs import describe_tokenizer
from mezzo_core.libraries import import_library, library_errors
from mezzo_core.nn.checkpoint import find_model, load_model
from mezzo_core.nn.llama import is_llama, load_llama, local_tokenizer
from mezzo_core.nn.lm import LMConfig
from torch import Tensor

FILES = ("*.json", "*.safetensors", "tokenizer.model")
"""The files that are downloaded from the hub; none of them is pickled."""
SEQ_LEN = 2048
"""T of the paper's fine-tuning, for models that do not name a length."""


class Transformer(NamedTuple):
    """A Transformer that was read."""

    folder: Path
    config: LMConfig
    weights: dict[str, Tensor]
    extra: dict[str, Any]
    """Values that commands need besides the model: tokenizer, data, seq_len."""


def read_transformer(
    source: str, tokenizer: str | None = None, *, has_rope: bool = True
) -> Transformer:
    """Read a Transformer.

    Args:
        source: a folder with a Llama or Mistral checkpoint; "hub:NAME", which is downloaded; or a
            training run's folder, or its model/.
        tokenizer: replaces the model's own; see `mezzo_core.data.load_tokenizer`.
        has_rope: see `load_llama`.

    Raises:
        UserError: if the model or its tokenizer is not found or cannot be read.
    """
    folder = download(source) if source.startswith(HUB_PREFIX) else Path(source)
    if not is_llama(folder):
        folder = find_model(folder)
        model, config, extra = load_model(folder)
        if tokenizer is not None:
            extra = {**extra, **describe_tokenizer(tokenizer, config.vocab_size)}
        return Transformer(folder, config, model.state_dict(), extra)
    tokenizer = tokenizer or _tokenizer_of(folder, source)
    config, weights = load_llama(folder, has_rope=has_rope)
    local = local_tokenizer(folder) if tokenizer.startswith(HUB_PREFIX) else tokenizer
    add_bos = local is not None and load_tokenizer(local).bos_token is not None
    described = describe_tokenizer(tokenizer, config.vocab_size, add_bos=add_bos)
    extra = {"name": source, "seq_len": SEQ_LEN, **described}
    return Transformer(folder, config, weights, extra)


def download(source: str) -> Path:
    """Download "hub:NAME" with `huggingface_hub`, or find it among earlier downloads.

    Raises:
        UserError: if the download fails, or the library is not installed; or as in `hub_name`.
    """
    name = hub_name("source", source)
    library = import_library("huggingface_hub", "hub")
    reach_hub(source)
    with library_errors(f"cannot get {source!r} from the hub"):
        folder = library.snapshot_download(name, allow_patterns=list(FILES))
    return Path(folder)


def _tokenizer_of(folder: Path, source: str) -> str:
    if source.startswith(HUB_PREFIX):
        return source  # by this name the tokenizer is found again in any download folder
    if local := local_tokenizer(folder):
        return local
    raise UserError(f"{folder} has no tokenizer.json or tokenizer.model: name one with --tokenizer")
