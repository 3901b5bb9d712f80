"""Work in several processes, one on each GPU, and the share of a GPU's peak."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mezzo_core.nn.on_meta import on_meta
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World
from mezzo_core.train.peaks import peak_flops, peak_speed

Found = TypeVar("Found")


def run_processes(count: int, work: Callable[..., Found], *arguments: Any) -> dict[int, Found]:
    """Call `work` in new processes, as torchrun does; return what each returns, by its rank.

    Raises:
        torch.OutOfMemoryError: if one has no room on its GPU.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if one fails otherwise.
    """
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="mezzo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        found: dict[int, Found] = elastic_launch(launch, _call)(work, *arguments)
    except ChildFailedError as error:
        if "OutOfMemoryError" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
    return found


def _call(work: Callable[..., Found], *arguments: Any) -> Found:
    """Call what may be a `partial`: the launcher asks for a name."""
    return work(*arguments)


def share_of_peak(config: TrainConfig, tokens_per_second: float, device: torch.device) -> float:
    """Return the % of a GPU's peak at 3 times the forward's FLOPs; NaN if the peak is not known."""
    peak = peak_speed(config, on_meta(config.model), World(device))
    return 100 * tokens_per_second / (peak or math.nan)


def has_known_peak(device: torch.device) -> bool:
    """Tell whether a device is a GPU whose peak is known here."""
    return device.type == "cuda" and peak_flops(torch.cuda.get_device_name(device)) is not None
