"""What the README promises beside its blocks of code, which tests/test_documents.py runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_two_commands_are_the_workspaces_own():
    commands = re.findall(r"^pip install .*hatch.*$", README, re.MULTILINE)
    first, second = commands
    assert first.endswith("&& hatch run reproduce")
    assert second.endswith("&& hatch test")
    assert second.split("&& ")[1] in (ROOT / ".ci/run").read_text()
    workspace = (ROOT / "pyproject.toml").read_text()
    assert 'reproduce = "python tools/reproduce.py {args}"' in workspace
