"""Runs scripts in processes of their own that start fast."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

FORKS = multiprocessing.get_context("forkserver")
# All that a training imports takes seconds: one process imports it for all its forks.
FORKS.set_forkserver_preload(
    ["mezzo_core.train.loop", "torch._dynamo", "matplotlib.backends.backend_agg"]
)


class ForkedScript:
    """A script in a process of its own, with one thread; used like `subprocess.Popen`.

    The process is forked from one that has only imported what a training needs.
    """

    def __init__(self, path: Path, *words: str, environment: Mapping[str, str]) -> None:
        streams = [FORKS.Pipe(duplex=False) for _ in range(2)]
        ends = [end for _, end in streams]
        self._process = FORKS.Process(target=_run, args=(path, words, dict(environment), *ends))
        self._process.start()
        for end in ends:
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(read.fileno())) for read, _ in streams)
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        """The exit code; minus the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr, a pipe's fill at most.

        A process that runs for longer than `timeout` seconds is killed.
        """
        self._process.join(timeout)
        self.kill()
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()


def _run(path: Path, words: Sequence[str], environment: dict[str, str], *ends: Connection) -> None:
    """Run a script in this process, whose stdout and stderr end where `ends` do."""
    torch.set_num_threads(1)
    os.environ.clear()  # what the process that this one was forked from had, maybe long ago
    os.environ.update(environment)
    for stream, end in enumerate(ends, start=1):
        os.dup2(end.fileno(), stream)
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")
