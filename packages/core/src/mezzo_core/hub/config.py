"""The configuration of a model, as transformers reads and writes it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import PretrainedConfig

from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LMConfig


class MezzoConfig(PretrainedConfig):
    """An `LMConfig` in transformers' config.json.

    The file may name classes of mezzo's own packages. To read models with layers of another
    package, add its name: `MezzoConfig.allowed_packages = ("my_package",)`.
    """

    model_type = "mezzo"
    has_no_defaults_at_init = True
    allowed_packages: ClassVar[Sequence[str]] = ()
    """Packages besides mezzo's own whose classes a configuration may name."""

    def __init__(
        self,
        lm: LMConfig | Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Describe a model.

        Args:
            lm: the model's configuration, or its JSON (`to_json`).
            extra: JSON values that were stored beside the model, such as its tokenizer's name.
            kwargs: the arguments of `PretrainedConfig`.

        Raises:
            UserError: if `lm` is missing or describes no model.
        """
        if lm is None:
            raise UserError('"lm" is missing: this configuration describes no model of mezzo')
        self.lm = to_json(lm) if isinstance(lm, LMConfig) else dict(lm)
        self.extra = dict(extra or {})
        kwargs["tie_word_embeddings"] = self.lm_config.tie_embeddings
        super().__init__(**kwargs)

    @property
    def lm_config(self) -> LMConfig:
        """The model's configuration.

        Raises:
            UserError: if it describes no model, or names a class of a package that is not allowed.
        """
        config = from_json(self.lm, self.allowed_packages)
        if not isinstance(config, LMConfig):
            raise UserError(f'"lm" must describe LMConfig, got {type(config).__name__}')
        return config

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.lm["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.lm["vocab_size"] = size

    @property
    def hidden_size(self) -> int:
        """Width C of the model."""
        return self.lm["d_model"]


@contextmanager
def allowing(packages: Sequence[str]) -> Iterator[None]:
    """Let configurations name classes of these packages too, meanwhile."""
    before = MezzoConfig.allowed_packages
    MezzoConfig.allowed_packages = (*before, *packages)
    try:
        yield
    finally:
        MezzoConfig.allowed_packages = before
