"""Tables that kernels read at each step, such as RoPE's: made once for a device, and kept."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Options = ParamSpec("Options")
Table = TypeVar("Table", Tensor, tuple[Tensor, Tensor])


def kept(make: Callable[Options, Table]) -> Callable[Options, Table]:
    """Return a function that makes a table at its first call with some options, and keeps it.

    A table is never freed, because captured graphs go on reading it. On a GPU the first call waits
    until it is computed, because the next call may read it on another stream. What is made while a
    graph is captured has no values before the replay, so it is not kept.

    Args:
        make: takes options that can be keys; one of them is `device`, by name.
    """
    tables: dict[Any, Table] = {}

    def compute(*options: Options.args, **named: Options.kwargs) -> Table:
        made = make(*options, **named)
        part = made if isinstance(made, Tensor) else made[0]
        if part.is_cuda:
            torch.cuda.current_stream(part.device).synchronize()
        return made

    @wraps(make)
    def table(*options: Options.args, **named: Options.kwargs) -> Table:
        key = options, tuple(named.items())
        if (found := tables.get(key)) is not None:
            return found
        device: Any = named["device"]
        if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return make(*options, **named)
        # This thread may allocate for graphs that torch.compile makes, which own all such memory.
        with ThreadPoolExecutor(1) as apart:
            made = apart.submit(compute, *options, **named).result()
        return tables.setdefault(key, made)  # another thread may have made it meanwhile

    return table
