"""Builds models on the meta device, where weights take no memory."""

import itertools
import math
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mezzo_core.errors import UserError
from mezzo_core.libraries import first_line
from mezzo_core.nn.lm import LM, LMConfig


def on_meta(config: Any, *sizes: int) -> Any:
    """Call `config.build(*sizes)` on the meta device."""
    with torch.device("meta"):
        return config.build(*sizes)


def build_on_meta(config: LMConfig, where: str | Path, *, num_weights: int | None = None) -> LM:
    """Build a model from a file's configuration, on the meta device.

    Args:
        config: of the model.
        where: the beginning of an error's message.
        num_weights: how many tensors the saved model has. A few bytes of JSON can ask for 10^9
            layers, which would take hours: building stops once the model has far more parts.

    Raises:
        UserError: if its parts do not fit together, are too large or are too many.
    """
    most = math.inf if num_weights is None else 100 + 10 * num_weights  # usual: 2.5 parts a weight
    parts, thread = itertools.count(1), get_ident()

    def count(*_: object) -> None:  # called for every module and parameter of the process
        if get_ident() == thread and next(parts) > most:
            raise ValueError(f"it has far more layers than its file of {num_weights} weights")

    try:
        with ExitStack() as stack, torch.device("meta"):
            for register in (
                register_module_module_registration_hook,
                register_module_parameter_registration_hook,
            ):
                stack.callback(register(count).remove)
            return config.build()
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise UserError(f"{where}: this model cannot be built: {first_line(error)}") from error
