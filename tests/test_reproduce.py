"""`hatch run reproduce` takes every package's paper."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/reproduce.py")))


def test_every_paper_of_the_workspace_is_reproduced():
    folders = {path.parents[2].name for path in ROOT.glob("packages/*/src/*/published.toml")}
    assert {paper.name.replace("-", "_") for paper in tool.papers()} == folders


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--scale", "smoke", "--out", "/dev/null/x"])
    assert tool.main() == 2
    assert "/dev/null/x" in capsys.readouterr().err
