"""Ctrl-C and SIGTERM: the step is finished and saved before a run ends."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher that ends its processes mostly kills those that are left after thirty seconds.
_PATIENCE_SECONDS = 20.0


class StoppedError(KeyboardInterrupt):
    """A run was asked to end, by Ctrl-C or SIGTERM, and has; the message says where it stands.

    Attributes:
        exit_code: what a command then exits with: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, number: int, message: str) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name} {message}")
        self.exit_code = 128 + number


class StopRequest:
    """Whether a run was asked to end. Until `defer` is called, a request ends it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.is_urgent = False
        self.is_watched = False
        self.is_noticed = threading.Event()
        self._defers = self._again_is_urgent = False

    @property
    def is_made(self) -> bool:
        """Whether the run was asked to end."""
        return self.signal is not None

    def defer(self, *, again_is_urgent: bool) -> None:
        """Let the run end itself from now on.

        Args:
            again_is_urgent: whether a second request ends it at once. Of several processes none
                may: torchrun passes on the Ctrl-C that each has got already, and kills those that
                take too long.
        """
        self._defers, self._again_is_urgent = True, again_is_urgent

    def error(self, message: str) -> StoppedError:
        """Return what ends the run."""
        return StoppedError(self.signal or signal.SIGTERM, message)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Take a signal."""
        is_second = self.is_made
        self.signal = self.signal or number
        if not self._defers or (is_second and self._again_is_urgent):
            self.is_urgent = True
            raise self.error("before training began: nothing was changed")


@contextmanager
def watch_signals() -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request, and restore what they did before.

    Only a program's main thread can; in another one, signals keep doing what they do. A signal
    that is ignored, as Ctrl-C is for a job in the background, stays so.
    """
    request = StopRequest()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                before[number] = signal.signal(number, request.handle)
    request.is_watched = bool(before)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def say_when_stuck(request: StopRequest, message: Callable[[], str]) -> Iterator[None]:
    """Write a line if the run was asked to end and does not come to it.

    A process that waits for one that was lost may wait for ever, in a call that Python cannot
    interrupt; then its launcher kills it without a word. So another thread says it.

    Args:
        request: its `is_noticed` is set when the run is about to end.
        message: what to say, asked for when it is needed.
    """
    if not request.is_watched:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while (number := os.read(reading, 1)[0]) not in (0, *_SIGNALS):
            pass
        if number and not request.is_noticed.wait(_PATIENCE_SECONDS):
            sys.stderr.write(f"{message()}\n")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        request.is_noticed.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)
