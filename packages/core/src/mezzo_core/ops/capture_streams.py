"""Streams on which CUDA graphs are captured.

cuBLAS has a workspace for each stream, and a graph keeps the address of its stream's. Destroying a
graph frees the workspaces of its stream, although another graph may have been captured there (torch
2.13: https://github.com/pytorch/pytorch/issues/193402). That one then writes to memory that belongs
to others. Two such graphs that run at the same time would also disturb each other. So graphs that
do not end together need streams of their own.
"""

from threading import Lock
from weakref import WeakKeyDictionary

import torch

STREAMS = 32
"""How many streams of a GPU torch hands out, in turn: the next one may be in use already."""

# Weak references to streams themselves crash once these are freed
# (https://github.com/pytorch/pytorch/pull/183403).
_streams: "WeakKeyDictionary[object, torch.cuda.Stream]" = WeakKeyDictionary()
_lock = Lock()


def capture_stream(holder: object, device: torch.device | None = None) -> torch.cuda.Stream:
    """Return a stream of a GPU (by default the current one) that no other holder has.

    It is the holder's as long as that lives, which should be as long as the graphs. A holder has
    one stream. Only if all streams are held, two holders share one.
    """
    with _lock:
        held = set(_streams.values())
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(device)
            if stream not in held:
                break
        _streams[holder] = stream
        return stream
