"""Several measurements side by side, each in a process of its own."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import torch

from mezzo_core.bench.script import say

Name = TypeVar("Name")
Found = TypeVar("Found")
_place: tuple[Path, torch.device]
"""Of this process, if it is one of several."""


def side_by_side(
    calls: Mapping[Name, Callable[[Path, torch.device], Found]],
    folder: Path,
    device: torch.device,
    jobs: int,
) -> Iterator[tuple[Name, Found]]:
    """Yield the name of each call and what it returns, in the order in which they end.

    For what is too small to fill a GPU, or where there are several. Speeds say nothing then.

    Args:
        calls: by name, such as a model and its seed. They take a scratch folder and a device. Of
            several processes each gets its calls from this one, so calls and what they return can
            be pickled.
        folder: scratch. One process uses it as it is, each of several a folder in it.
        device: where to measure. Several processes share out all GPUs, and the host's threads:
            with all threads for each, they would wait for each other.
        jobs: the number of processes, at most; 1 calls one after another in this one. If a call of
            several fails, its name and error are told at once; the first error is raised after all
            the others have ended.
    """
    if jobs == 1:
        for name, call in calls.items():
            yield name, call(folder, device)
        return
    context, jobs = multiprocessing.get_context("spawn"), min(jobs, max(len(calls), 1))
    places = context.Queue()
    for i in range(jobs):
        chosen = device
        if device.type == "cuda":
            chosen = torch.device("cuda", i % torch.cuda.device_count())
        places.put((folder / f"job_{i}", chosen))
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, context, _begin, (places, threads)) as pool:
        running = {pool.submit(_call, call): name for name, call in calls.items()}
        failure: BaseException | None = None
        try:
            for done in as_completed(running):
                name, error = running[done], done.exception()
                if error is None:
                    yield name, done.result()
                else:
                    failure = failure or error
                    say(f"{_words(name)}: failed, the others go on: {error!r}")
        finally:
            pool.shutdown(cancel_futures=True)
    if failure is not None:
        raise failure


def _begin(places: Any, threads: int) -> None:
    """Take a place and some threads for this process."""
    global _place
    _place = places.get()
    torch.set_num_threads(threads)
    if _place[1].type == "cuda":
        torch.cuda.set_device(_place[1])


def _call(call: Callable[[Path, torch.device], Found]) -> Found:
    return call(*_place)


def _words(name: object) -> str:
    return ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
