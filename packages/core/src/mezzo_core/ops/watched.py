"""The recorder of a thread's launches: `replay` sets it, and `launch` tells it of each launch."""

import threading
from typing import Any


class _Thread(threading.local):
    recorder: Any = None
    """The `replay.Recorder` that watches this thread now, if any."""


thread = _Thread()
