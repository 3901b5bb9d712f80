"""The environment of the oldest versions has the oldest that the packages allow."""

import re
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
NEEDED = [*CORE["dependencies"], *CORE["optional-dependencies"]["train"]]
FLOORS = dict(line.split(">=") for line in NEEDED if ";" not in line)


@pytest.mark.parametrize("name", FLOORS)
def test_the_oldest_environment_has_the_floor_of_each_dependency(name):
    assert re.fullmatch(rf"{re.escape(FLOORS[name])}(\.0)*", OLDEST[name])


def test_every_environment_has_what_the_packages_need():
    base = {re.split(r"[><=;]", line)[0] for line in GROUPS["base"]}
    assert set(FLOORS) <= base
    for group in ("dev", "oldest", "newest"):
        assert {"include-group": "base"} in GROUPS[group]
