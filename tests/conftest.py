"""Settings of the tests across packages."""

import pytest
from mezzo_core.reproduction import Timing

TIMING = [f"mezzo_core.reproduction.{name}" for name in ("timing", "generation_speed")]
"""The modules that call `measure`."""


def call_once(fn, device, *, before=lambda: None, **how_often):
    """Stand for `measure`, which has tests of its own: what is timed runs once."""
    before()
    fn()
    return Timing(1.0, 1.0, 1.0)


@pytest.fixture
def timed_once(monkeypatch):
    """Let all that is timed run once."""
    for module in TIMING:
        monkeypatch.setattr(f"{module}.measure", call_once)
