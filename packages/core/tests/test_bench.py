"""A measurement names the commit of the code that was measured, or none."""

import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from mezzo_core import bench
from mezzo_core.papers import environment

AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Somebody's project under git, with one commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "-q")
    (tmp_path / "theirs.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    return tmp_path


def copied_to(folder):
    folder.mkdir(parents=True, exist_ok=True)
    spec = spec_from_file_location("copied_bench", shutil.copy(bench.__file__, folder))
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert Path(copy.__file__).parent == folder
    return copy


@pytest.mark.parametrize("ignored", [False, True])
def test_a_wheel_inside_another_repository_does_not_report_its_commit(repository, ignored):
    if ignored:
        (repository / ".gitignore").write_text(".venv/")
    installed = copied_to(repository / ".venv" / "lib" / "site-packages" / "mezzo_core")
    assert git(Path(installed.__file__).parent, "rev-parse", "HEAD"), "git finds theirs"
    assert installed.commit() is None


def test_a_checkout_reports_its_commit(repository):
    checkout = copied_to(repository / "src" / "mezzo_core")
    git(repository, "add", "src")
    git(repository, "commit", "-q", "-m", "ours")
    assert checkout.commit() == git(repository, "rev-parse", "--short=12", "HEAD")
    assert len(checkout.commit()) == 12


def test_without_git_there_is_no_commit(repository, monkeypatch):
    copy = copied_to(repository)
    git(repository, "add", ".")
    assert copy.commit() is not None
    monkeypatch.setenv("PATH", "")
    assert copy.commit() is None


def test_a_folder_outside_of_any_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert copied_to(tmp_path / "site").commit() is None


def test_a_report_names_the_version_where_the_commit_is_unknown(monkeypatch):
    monkeypatch.setattr(environment, "commit", lambda: None)
    monkeypatch.setattr(environment, "_version", lambda package: f"version of {package}")
    described = environment.describe_environment()["commit"]
    assert described == "unknown (mezzo-core version of mezzo-core)"
