"""Models that FSDP2 has sharded: each process holds a part of the weights.

A single process never imports FSDP, which takes long.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeGuard, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def entry(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Decorate a method so that FSDP2 gathers the weights for it, as for `forward`.

    On a model that is not sharded it is an ordinary method.
    """

    @wraps(method)
    def call(model: Any, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not has_parts(model):
            return method(model, *arguments, **options)
        return _registered(model, method)(*arguments, **options)

    return call


@_disable_dynamo  # torch.compiler.disable, which would import the compiler here
def _registered(model: Any, method: Callable[..., Result]) -> Callable[..., Result]:
    from torch.distributed.fsdp import register_fsdp_forward_method

    name = method.__name__
    vars(model)[name] = MethodType(method, model)  # FSDP2 replaces it by its own
    register_fsdp_forward_method(model, name)
    registered: Callable[..., Result] = vars(model).pop(name)
    return registered


def has_parts(model: nn.Module) -> bool:
    """Tell whether FSDP2 has sharded the model."""
    if not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Gather the `state_dict` of a sharded model on the CPU; every process must call this.

    Returns:
        The whole `state_dict` in the first process, an empty dict in the others.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def is_part(value: Tensor) -> "TypeGuard[DTensor]":
    """Tell whether the processes each hold a part of the tensor."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def lacks_weights(model: nn.Module) -> bool:
    """Tell whether other processes hold parts of any of the model's weights."""
    return any(is_part(weight) for weight in model.parameters())


def check_whole(model: nn.Module) -> None:
    """Raise a ValueError if this process holds only a part of the weights."""
    if lacks_weights(model):
        raise ValueError(
            "the model is sharded (FSDP2), and this needs it whole: the first process may give "
            "what mezzo_core.nn.whole_weights(model) returns to save_model, or to save_pretrained "
            "as its state_dict, or load it into a model that is not sharded"
        )
