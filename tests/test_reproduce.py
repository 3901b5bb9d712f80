"""`hatch run reproduce` takes every package's paper, each at a scale that it has."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/reproduce.py")))


def test_every_paper_of_the_workspace_is_reproduced():
    papers = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()} - {"core"}
    assert {paper.__name__ for paper in tool.PAPERS} == {f"mezzo_{p}.reproduce" for p in papers}


@pytest.mark.parametrize(("scale", "used"), [("smoke", "smoke"), ("gpu", "cpu")])
def test_a_paper_without_the_scale_takes_its_usual_one(scale, used):
    paper = SimpleNamespace(SCALES=("cpu", "smoke"), reproduce_paper=lambda only, s, out: s)
    assert tool.at_known_scale(paper)(None, scale, Path()) == used


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--scale", "smoke", "--out", "/dev/null/x"])
    assert tool.main() == 2
    assert "/dev/null/x" in capsys.readouterr().err
