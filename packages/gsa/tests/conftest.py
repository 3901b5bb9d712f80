import os
import subprocess
import sys

import pytest


@pytest.fixture
def run_without_interpreter():
    """Return what runs a test file as a script, in a process that compiles its Triton kernels."""

    def run(file, *names):
        environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, file, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    return run
