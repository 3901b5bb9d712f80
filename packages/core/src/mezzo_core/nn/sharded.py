"""Models of whose weights each process holds a part (FSDP2).

One process does not import FSDP, which is slow to import.
"""

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class entry(Generic[Arguments, Result]):  # noqa: N801 (a decorator)
    """A method for which FSDP2 gathers a model's weights, as it does for `forward`.

    Of a model that is not sharded it is a method like others.
    """

    def __init__(self, method: Callable[Concatenate[Any, Arguments], Result]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: Any, owner: type | None = None) -> Callable[Arguments, Result]:
        if model is None:
            return self._method  # type: ignore[return-value]
        bound = self._method.__get__(model, owner)
        if has_parts(model):
            from torch.distributed.fsdp import register_fsdp_forward_method

            vars(model)[self._name] = bound  # what is registered, and replaced
            register_fsdp_forward_method(model, self._name)
            return vars(model)[self._name]
        return bound


def has_parts(model: nn.Module) -> bool:
    """Tell whether the processes each hold a part of the model: whether FSDP2 has sharded it."""
    if not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Gather the `state_dict` of a sharded model, on the CPU; every process must call this.

    Returns:
        It, whole, in the first process; nothing in the others.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def check_whole(model: nn.Module) -> None:
    """Check that this process holds all weights, as decoding and saving need them.

    Raises:
        ValueError: if it holds a part of them.
    """
    if any(map(has_parts, model.modules())):
        raise ValueError(
            "the model is sharded (FSDP2), and this needs it whole: the first process may give "
            "what mezzo_core.nn.whole_weights(model) returns to save_model, or load it into a "
            "model that is not sharded"
        )
