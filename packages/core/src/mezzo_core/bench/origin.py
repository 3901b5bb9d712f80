"""Where a number comes from: the machine, the software, and the commit of the measured code."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

COMMIT_VARIABLE = "MEZZO_COMMIT"
"""Environment variable that names the commit where git cannot: of a tree that was copied to another
machine without its .git."""
_THIS_FILE = Path(__file__)


def origin(device: torch.device) -> dict[str, str | None]:
    """Describe the machine, the software and the commit, for a result file or a report.

    Returns:
        gpu, driver, cuda and ptxas (None on a CPU), cpu (processor and torch's threads), system,
        python, torch, triton, commit (see `commit`) and date (of today, in UTC).
    """
    gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "ptxas": _ptxas() if gpu else None,
        "cpu": f"{_processor()}, {torch.get_num_threads()} threads",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def commit() -> str | None:
    """Return the commit of the checkout that this file is in, such as "0123456789ab".

    "+changes" follows it if a Python file that git tracks was changed. Where git knows no commit,
    it is what MEZZO_COMMIT says, or None. That is so for an installed copy, even inside another
    project's repository: git must track this file.
    """
    if _git("ls-files", "--error-unmatch", _THIS_FILE.name) is None:
        return os.environ.get(COMMIT_VARIABLE) or None
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py")
    return head if head is None or changed == "" else f"{head}+changes"


def _git(*arguments: str) -> str | None:
    """Run git in this file's folder and return its output; None if it fails or is missing."""
    return _output("git", "--no-optional-locks", "-C", str(_THIS_FILE.parent), *arguments)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _ptxas() -> str | None:
    """Return the version of Triton's assembler, and of the newer one that `require_ptxas` takes."""
    if _version("triton") is None:
        return None
    from triton import knobs

    found = (knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None))
    return ", ".join(dict.fromkeys(each.version for each in found if each))


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
