"""Folders that transformers reads: writes one from a run's model, and reads one into a run."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from mezzo_core.config_json import from_json, to_json
from mezzo_core.data.texts import TextConfig, change_texts, texts_of
from mezzo_core.data.tokenizer_files import load_tokenizer
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.hub.config import MezzoConfig, allowing
from mezzo_core.hub.model import MezzoForCausalLM
from mezzo_core.hub.tokenizer import to_transformers
from mezzo_core.inputs import describe_tokenizer, told_tokenizer
from mezzo_core.libraries import library_errors
from mezzo_core.nn.checkpoint import find_model, load_model, save_model
from mezzo_core.nn.llama import KINDS as LLAMA_KINDS
from mezzo_core.nn.llama import load_llama, local_tokenizer
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.on_meta import build_on_meta
from mezzo_core.nn.published import CONFIG, WHOLE, Layout, Read

SEQ_LEN = 2048
"""The row length that `eval` and `train` take for a model that does not say its own."""


def export_model(
    run: str | Path,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    allow_packages: Sequence[str] = (),
    layout: Layout | None = None,
) -> list[str]:
    """Write a run's model, its tokenizer and its generation settings for `from_pretrained`.

    Args:
        run: folder of a run or of a model.
        out: a new folder, or an empty one.
        tokenizer: where the model's tokenizer is now, if it has moved.
        allow_packages: packages besides mezzo's own whose layers the model may have.
        layout: another library's, in which the model is written; None: as one of mezzo.

    Returns:
        The names of the files that were written.

    Raises:
        UserError: if `run` holds no model, its tokenizer is not found or cannot be written, its
            weights are of several dtypes, `out` is not empty or cannot be written, or the layout
            has no such model.
    """
    folder, out = find_model(run), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} must be a new folder or an empty one")
    lm, config, extra = load_model(folder, allow_packages=allow_packages)
    dtypes = sorted({str(weight.dtype) for weight in lm.parameters()})
    if len(dtypes) > 1:  # transformers reads all weights in one
        raise UserError(f"{folder}: the weights must have one dtype, got {', '.join(dtypes)}")
    has_text = "tokenizer" in extra or tokenizer is not None
    kept = told_tokenizer(extra, folder, lm.vocab_size, tokenizer) if has_text else None
    written = None if kept is None else to_transformers(kept)
    special = _special(kept, written)
    if layout is None:
        with allowing(allow_packages):
            ours = MezzoForCausalLM.around(lm, MezzoConfig(config, extra, **special))
        save: Callable[[Path], Any] = ours.save_pretrained
    else:
        save = _saved_as_theirs(*layout.write(config, lm.state_dict()), special)
    with library_errors(f"cannot write {out}"), _all_or_nothing(out):
        save(out)
        for weights in out.glob("*.safetensors"):  # the library lets only the owner read them
            shutil.copymode(out / CONFIG, weights)
        GenerationConfig(**special).save_pretrained(out)
        if written is not None:
            written.save_pretrained(out)
    return sorted(path.name for path in out.iterdir())


def import_model(
    folder: str | Path,
    run: str | Path,
    *,
    allow_packages: Sequence[str] = (),
    layouts: Sequence[Layout] = (),
) -> None:
    """Read a model that transformers has written, and save it as RUN/model.

    One of ours may have been trained further: by `Trainer`, or with adapters that were merged.

    Args:
        folder: what `export_model` or a model's `save_pretrained` wrote: a model of mezzo, or a
            Llama, Mistral, Qwen2 or Qwen3, which becomes a plain model of softmax attention.
        run: the folder of the run, which must not have a model yet.
        allow_packages: packages besides mezzo's own whose layers the model may have.
        layouts: other libraries', whose models are read too.

    Raises:
        UserError: if `folder` holds no model of mezzo or a damaged one, or `run` holds a model.
    """
    folder, out = Path(folder), Path(run) / "model"
    if out.exists():
        raise UserError(f"{out} is there already: import into another folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: it has no config.json")
    kind = read_json(folder / "config.json").get("model_type")
    if kind == MezzoConfig.model_type:
        _import_ours(folder, out, allow_packages)
        return
    readers: dict[str, Read] = dict.fromkeys(LLAMA_KINDS, load_llama)
    for layout in layouts:
        readers |= dict.fromkeys(layout.kinds, layout.read)
    if kind not in readers:
        known = ", ".join([MezzoConfig.model_type, *readers])
        hint = " (a run of mezzo needs no import)" if kind is None else ""
        raise UserError(
            f'{folder}/config.json: "model_type" must be one of {known}, got {kind!r}{hint}'
        )
    _import_published(folder, out, *readers[kind](folder))


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Empty the folder if a file cannot be written, so that the user can try again."""
    try:
        yield
    except BaseException:
        for path in out.glob("*"):
            path.unlink()
        raise


def _import_ours(folder: Path, out: Path, allow_packages: Sequence[str]) -> None:
    with allowing(allow_packages), library_errors(f"{folder} cannot be read"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        config = model.config.lm_config
    save_model(model.lm, config, out, _told(model.config.extra, folder, config.vocab_size))


def _import_published(
    folder: Path, out: Path, config: LMConfig, weights: Mapping[str, Tensor]
) -> None:
    extra: dict[str, Any] = {"name": str(folder), "step": 0, "seq_len": SEQ_LEN}
    name = local_tokenizer(folder)
    if name is not None:
        add_bos = load_tokenizer(name).bos_token is not None
        extra |= describe_tokenizer(name, config.vocab_size, add_bos=add_bos)
    save_model(build_on_meta(config, folder), config, out, extra, weights=weights)


def _saved_as_theirs(
    values: dict[str, Any], weights: dict[str, Tensor], special: dict[str, Any]
) -> Callable[[Path], None]:
    def save(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        (out / CONFIG).write_text(json.dumps({**values, **special, "dtype": dtype}, indent=2))
        save_file(weights, out / WHOLE, metadata={"format": "pt"})

    return save


def _special(
    tokenizer: Tokenizer | None, written: PreTrainedTokenizerFast | None
) -> dict[str, Any]:
    """Return the tokens that `generate` must know, of our tokenizer and of what is written."""
    if tokenizer is None or written is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    stops = list(tokenizer.stop_tokens)
    return {
        "bos_token_id": tokenizer.bos_token,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": written.pad_token_id,
    }


def _told(extra: dict[str, Any], folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return `extra`; if the tokenizer that it names is gone, it names the folder's instead."""
    if "tokenizer" not in extra:
        return extra
    try:
        told_tokenizer(extra, folder, vocab_size)
        return extra
    except UserError:
        if not (folder / "tokenizer.json").is_file():
            return extra
    data = from_json(extra["data"]) if "data" in extra else None
    if not isinstance(data, TextConfig):
        return {**extra, **describe_tokenizer(str(folder), vocab_size)}
    told = describe_tokenizer(str(folder), vocab_size, add_bos=texts_of(data)[0].add_bos)
    return {**extra, **told, "data": to_json(change_texts(data, tokenizer=told["tokenizer"]))}
