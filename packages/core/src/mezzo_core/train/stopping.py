"""Ctrl-C, SIGTERM and SIGHUP: a run finishes its step and saves it before it ends."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HANGUP = getattr(signal, "SIGHUP", None)  # of a closed terminal; Windows has none
_SIGNALS = tuple(filter(None, (signal.SIGINT, signal.SIGTERM, _HANGUP)))
# Most launchers that end their processes kill those that are still running after thirty seconds.
_PATIENCE_SECONDS = 20.0


class StoppedError(KeyboardInterrupt):
    """A run was ended by Ctrl-C, SIGTERM or SIGHUP; the message says where it can be resumed.

    Attributes:
        exit_code: the exit code for a command: 130 after Ctrl-C, 143 after SIGTERM, 129 after
            SIGHUP.
    """

    def __init__(self, number: int, message: str) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name} {message}")
        self.exit_code = 128 + number


class StopRequest:
    """A request to end the run. Before `defer` is called, a request ends the run at once."""

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
        """From now on only record a request, so that the run can end itself after its step.

        Args:
            again_is_urgent: whether a second request ends the run at once. This must be False for
                several processes: each gets Ctrl-C twice, from the terminal and from torchrun.
                torchrun also kills processes that take too long.
        """
        self._defers, self._again_is_urgent = True, again_is_urgent

    def error(self, message: str) -> StoppedError:
        """Return the exception that ends the run."""
        return StoppedError(self.signal or signal.SIGTERM, message)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        # A shell that ends sends SIGHUP twice.
        is_second = self.is_made and number != _HANGUP
        self.signal = self.signal or number
        if not self._defers or (is_second and self._again_is_urgent):
            self.is_urgent = True
            raise self.error("before training began: nothing was changed")


@contextmanager
def watch_signals() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request, and restore their handlers at the end.

    Python allows this in the main thread only; in another thread the handlers stay as they are. A
    signal that is ignored, as SIGHUP is by nohup, stays ignored.
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
    """Write a line if the run was asked to end but cannot.

    A process that waits for a lost process may wait for ever, in a call that Python cannot
    interrupt, until its launcher kills it without any message. So a second thread writes one.

    Args:
        request: its `is_noticed` is set when the run is about to end.
        message: returns the line to write; called only when it is needed.
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
