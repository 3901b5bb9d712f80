"""A measurement names its machine, its software and the commit of the code, or none."""

import shutil
import subprocess
from importlib import import_module

import pytest
from mezzo_core.reproduction import commit

MODULE = import_module("mezzo_core.reproduction.origin")  # the package's `origin` is the function
AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A project under git, with one commit of a Python file and a result."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.delenv("MEZZO_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("")
    (tmp_path / "result.json").write_text("{}")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


@pytest.fixture
def ask(monkeypatch):
    """Make `commit` ask for the repository of another file than its own."""

    def ask(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        monkeypatch.setattr(MODULE, "_THIS_FILE", path)

    return ask


def test_changed_code_is_told_and_changed_results_are_none(repository, ask, monkeypatch):
    ask(repository / "sub" / "ours.py")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "ours")
    head = commit()
    assert head == git(repository, "rev-parse", "--short=12", "HEAD")
    monkeypatch.setenv("MEZZO_COMMIT", "0123abc")  # which counts where git tells nothing
    (repository / "result.json").unlink()
    (repository / "untracked.py").write_text("")
    assert commit() == head
    (repository / "code.py").write_text("changed")  # of a folder above
    assert commit() == f"{head}+changes"
    git(repository, "add", ".")
    assert commit() == f"{head}+changes"


def test_a_copy_inside_another_repository_does_not_report_its_commit(repository, ask, monkeypatch):
    installed = repository / ".venv/lib/site-packages/mezzo_core/reproduction/origin.py"
    ask(installed)
    assert git(installed.parent, "rev-parse", "HEAD"), "git finds theirs"
    assert commit() is None
    monkeypatch.setenv("MEZZO_COMMIT", "0123abc")
    assert commit() == "0123abc"
