"""Where a number comes from: the machine, the software, and the commit of the measured code."""

import functools
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from mezzo_core import __version__

_THIS_FILE = Path(__file__)


def origin(device: torch.device) -> dict[str, str | None]:
    """Describe the machine, the software and the commit, for a result file or a report.

    On a CPU gpu, driver, cuda and ptxas are None. A wheel has a version and no commit.
    """
    gpu = device.type == "cuda"
    triton = next((found.version for found in metadata.distributions(name="triton")), None)
    driver = ("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "driver": _output(*driver) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "ptxas": _ptxas() if gpu and triton else None,
        "cpu": f"{_processor()}, {torch.get_num_threads()} threads",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "mezzo_core": __version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def commit() -> str | None:
    """Return the commit of the checkout that this file is in, such as "0123456789ab".

    "+changes" follows it if a Python file that git tracks was changed. Where git knows no commit,
    it is what the environment variable MEZZO_COMMIT says (for a tree that was copied without its
    .git), or None. That is so for an installed copy, even inside another project's repository: git
    must track this file.
    """
    git = ("git", "--no-optional-locks", "-C", str(_THIS_FILE.parent))
    if _output(*git, "ls-files", "--error-unmatch", _THIS_FILE.name) is None:
        return os.environ.get("MEZZO_COMMIT") or None
    head = _output(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py")
    return head if head is None or changed == "" else f"{head}+changes"


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _ptxas() -> str:
    """Return the version of Triton's assembler, and of the newer one that `require_ptxas` takes.

    It does not change in a process, though torch.compile lets Triton use torch's own from then on.
    """
    from triton import knobs

    found = (knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None))
    return ", ".join(dict.fromkeys(each.version for each in found if each))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
