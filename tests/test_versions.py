"""Versions: each package says its own, and the oldest environment has the oldest allowed."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
OLDEST = dict(line.split(";")[0].split("==") for line in GROUPS["oldest"] if isinstance(line, str))
CORE = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
EXTRAS = CORE["optional-dependencies"]
NEEDED = [*CORE["dependencies"], *EXTRAS["train"], *EXTRAS["hub"]]
PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))
FLOORS = dict(line.split(">=") for line in NEEDED if ";" not in line)


@pytest.mark.parametrize("name", FLOORS)
def test_the_oldest_environment_has_the_floor_of_each_dependency(name):
    assert re.fullmatch(rf"{re.escape(FLOORS[name])}(\.0)*", OLDEST[name])


def test_every_environment_has_what_the_packages_need():
    base = {re.split(r"[><=;]", line)[0] for line in GROUPS["base"]}
    assert set(FLOORS) <= base
    for group in ("dev", "oldest", "newest"):
        assert {"include-group": "base"} in GROUPS[group]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_a_package_has_the_version_of_its_wheel_and_is_typed(project):
    named = tomllib.loads(project.read_text())["project"]["name"]
    package = importlib.import_module(named.replace("-", "_"))
    command = [sys.executable, "-m", "hatchling", "version"]
    done = subprocess.run(command, cwd=project.parent, capture_output=True, text=True, check=True)
    assert package.__version__ == done.stdout.strip()
    assert (Path(package.__file__).parent / "py.typed").is_file()
