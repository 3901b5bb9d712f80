"""The whole repository passes ruff and mypy, and keeps its house rules."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("tools/*.py")])
IMPORT = re.compile(r"^\s*(from|import) (mezzo_[\w.]+)", re.M)


@pytest.mark.parametrize("arguments", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]])
def test_the_repository_passes(arguments):
    command = [sys.executable, "-m", *arguments]
    if arguments[0] == "ruff":
        command.append(".")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_source_files_are_short():
    limits = {path: 600 if "triton" in "".join(path.parts[-2:]) else 400 for path in SOURCES}
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert lengths, "no sources found"
    assert not {p.name: n for p, n in lengths.items() if n > limits[p]}


def test_what_commands_print_goes_through_one_file_that_takes_no_markup():
    assert not [p for p in SOURCES if p.name != "console.py" and ".print(" in p.read_text()]


def test_kernels_are_launched_by_the_function_that_does_it_fast():
    assert not [p for p in SOURCES if "triton" in str(p) and re.search(r"_kernel\[", p.read_text())]


def test_references_fit_on_one_screen_and_import_no_triton():
    references = [path for path in SOURCES if path.name == "reference.py"]
    assert len(references) >= 4
    for path in references:
        text = path.read_text()
        assert len(text.splitlines()) <= 100, path
        assert "import triton" not in text, path


def test_papers_build_on_core_and_public_ops_of_other_papers_and_never_on_their_models():
    """A paper whose ops are imported is declared as a dependency, by range."""
    for path in (path for path in SOURCES if "packages" in path.parts):
        folder = ROOT / "packages" / path.relative_to(ROOT).parts[1]
        needs = (folder / "pyproject.toml").read_text()
        for words, module in IMPORT.findall(path.read_text()):
            package = module.partition(".")[0]
            if package not in ("mezzo_core", f"mezzo_{folder.name}"):
                assert (words, module) == ("from", f"{package}.ops"), path
                assert f'"{package.replace("_", "-")}>=' in needs, path


def test_nothing_listens_to_torchs_trace():
    """Else torch.compile writes every graph down, and a failed test shows an empty line of each."""
    handlers = logging.getLogger("torch.__trace").handlers
    assert all(type(handler).__module__.startswith("torch.") for handler in handlers)
