"""What the command `train` does: a recipe with other settings, trained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezzo_core.config_json import from_json
from mezzo_core.console import show
from mezzo_core.data import AnswersConfig
from mezzo_core.data.texts import TextConfig, change_texts, texts_of
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.inputs import check_has_fields, choose_texts, start_from
from mezzo_core.nn.on_meta import build_on_meta
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import launched_place
from mezzo_core.train.flags import FLAGS, apply_flags, with_flags
from mezzo_core.train.loop import train
from mezzo_core.train.settings import apply_settings

if TYPE_CHECKING:
    import torch

    from mezzo_core.nn.lm import LM


def configure(
    config: TrainConfig,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    data: Sequence[str],
    validation_data: str | None,
    sft: str | None,
    init_from: Path | None,
    out: Path | None,
    allow_packages: Sequence[str] = (),
) -> TrainConfig:
    """Return a recipe's configuration with what the command line changes.

    A run that is in `out` goes on without the model that it began from, which may be gone.

    Raises:
        UserError: if a value cannot be, or the model's parts do not fit together.
    """
    try:
        if init_from is not None:
            begun = None
            if out is not None and not init_from.exists():
                begun = _begun(config, init_from, out, allow_packages)
            config = begun or start_from(
                config, init_from, flags["tokenizer"], allow_packages=allow_packages
            )
        given = config.model
        _refuse_twice(flags, settings)
        config = apply_settings(apply_flags(config, flags), settings)
        config = _choose_texts(config, data, validation_data)
        if sft is not None:
            config = _choose_answers(config, sft, data)
        if flags.get("text_column") is not None and isinstance(config.data, TextConfig):
            check_has_fields(config.data)
        if flags.get("validation_fraction") is not None:
            _check_holds_out(config)
        built = build_on_meta(config.model, config.name)  # says what does not fit before any work
        if init_from is not None and _shapes(built) != _shapes(build_on_meta(given, init_from)):
            raise UserError("the model of --init-from keeps its shape: leave out what changes it")
        return config
    except ValueError as error:
        raise UserError(with_flags(str(error), flags)) from error


def _check_holds_out(config: TrainConfig) -> None:
    """Refuse --validation-fraction where the run would ignore it."""
    texts = texts_of(config.data) if isinstance(config.data, TextConfig) else ()
    if any(text.validation_source is not None for text in texts):
        raise UserError("--validation-fraction goes without --validation-data")
    if any(text.streaming for text in texts):
        raise UserError("a stream holds out its first documents: leave out --validation-fraction")


def _shapes(model: "LM") -> "dict[str, torch.Size]":
    return {name: weight.shape for name, weight in model.state_dict().items()}


def _refuse_twice(flags: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Refuse a setting that is given both by its flag and by --set."""
    told = {setting.partition("=")[0] for setting in settings}
    for flag in FLAGS:
        if flags.get(flag.name) is not None and flag.path in told:
            raise UserError(f"{flag.word} and --set {flag.path} name one setting: give one of them")


def _begun(
    config: TrainConfig, init_from: Path, out: Path, allow_packages: Sequence[str]
) -> TrainConfig | None:
    """Return the recipe's configuration with the model of the run in a folder.

    None if no run is there, or it began from another model.
    """
    path = out / "config.json"
    begun = from_json(read_json(path), allow_packages) if path.is_file() else None
    if not isinstance(begun, TrainConfig) or begun.init_from is None:
        return None
    if init_from.resolve() not in (Path(begun.init_from), Path(begun.init_from).parent):
        return None
    data = config.data
    if isinstance(data, TextConfig) and isinstance(begun.data, TextConfig):
        text = texts_of(begun.data)[0]
        data = change_texts(data, tokenizer=text.tokenizer, add_bos=text.add_bos)
    return replace(config, model=begun.model, data=data, init_from=begun.init_from)


def _choose_texts(
    config: TrainConfig, data: Sequence[str], validation_data: str | None
) -> TrainConfig:
    if not data and validation_data is None:
        return config
    if not isinstance(config.data, TextConfig):
        raise UserError(f"the recipe {config.name} reads no text: --data does not fit")
    texts = config.data
    if validation_data is not None:
        texts = change_texts(texts, validation_source=validation_data)
    return replace(config, data=choose_texts(texts, data) if data else texts)


def _choose_answers(config: TrainConfig, sft: str, data: Sequence[str]) -> TrainConfig:
    if data:
        raise UserError("--sft takes the place of --data: give one of them")
    if not isinstance(config.data, TextConfig):
        raise UserError(f"the recipe {config.name} reads no text: --sft does not fit")
    text = replace(texts_of(config.data)[0], source=sft)
    return replace(config, data=AnswersConfig(text))


def run_recipe(config: TrainConfig, out: Path, fresh: bool, new_data: bool, quiet: bool) -> None:
    """Train, and say how it ended.

    Raises:
        UserError: as `train` does, with the flags of the fields that are named.
        StoppedError: as `train` does.
    """
    try:
        result = train(config, out, resume=not fresh, new_data=new_data, quiet=quiet)
    except UserError as error:
        raise UserError(with_flags(str(error))) from error
    is_first = launched_place().rank == 0  # only one of torchrun's processes prints results
    if is_first and result.val_perplexity is not None:
        limited = config.eval_batches is not None and result.val_tokens is not None
        on = f" on {result.val_tokens:,} tokens" if limited else ""
        show(
            f"{config.name}: validation perplexity {result.val_perplexity:.3f}{on} after "
            f"{result.steps} steps; the model is in {result.out / 'model'}"
        )
