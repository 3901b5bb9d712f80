"""Whether a thread's launches are watched, which `launch` asks and `replay` says."""

import threading
from typing import Any


class _Thread(threading.local):
    recorder: Any = None
    """The `replay.Recorder` of what the thread runs now, if there is one."""


thread = _Thread()
