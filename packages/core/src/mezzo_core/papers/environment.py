"""Describes the machine and the software with which a report was made."""

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from mezzo_core.bench import commit


def describe_environment() -> dict[str, str]:
    """Describe this machine and its software in words, for the head of a report.

    A result file has the shorter `mezzo_core.bench.environment` instead.
    """
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit() or f"unknown (mezzo-core {_version('mezzo-core')})",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": _memory(),
        "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.0f} GiB"
