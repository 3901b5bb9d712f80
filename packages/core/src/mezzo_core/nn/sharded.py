"""Models of whose weights each process holds a part (FSDP2).

One process does not import FSDP, which is slow to import.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def entry(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a method for which FSDP2 gathers a model's weights, as it does for `forward`.

    Of a model that is not sharded it is a method like others.
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
    vars(model)[name] = MethodType(method, model)  # what is registered, and replaced
    register_fsdp_forward_method(model, name)
    registered: Callable[..., Result] = vars(model).pop(name)
    return registered


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


def lacks_weights(model: nn.Module) -> bool:
    """Tell whether other processes hold parts of any of the model's weights."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(weight, DTensor) for weight in model.parameters())


def check_whole(model: nn.Module) -> None:
    """Check that this process holds all weights, as decoding and saving need them.

    Raises:
        ValueError: if it holds a part of them.
    """
    if lacks_weights(model):
        raise ValueError(
            "the model is sharded (FSDP2), and this needs it whole: the first process may give "
            "what mezzo_core.nn.whole_weights(model) returns to save_model, or to save_pretrained "
            "as its state_dict, or load it into a model that is not sharded"
        )
