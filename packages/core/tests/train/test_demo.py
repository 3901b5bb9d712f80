"""The demo: two short trainings, a sample, both losses, and nothing left behind."""

import os
from dataclasses import replace

import pytest
from mezzo_core import cli
from mezzo_core.data import DataConfig
from mezzo_core.train.demo import PROMPT
from mezzo_core.train.loop import train


@pytest.fixture
def demo(tiny, tmp_path, monkeypatch, run_command):
    """Run a package's demo where a user has a home and a current folder, both empty."""
    for folder in ("home", "here", "tmp"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("MEZZO_TOKENS", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    recipe = tiny(data=DataConfig(), eval_batches=1)
    recipes = {name: lambda name=name: replace(recipe, name=name) for name in ("ours", "theirs")}
    plan = cli.Demo("ours", "theirs", steps=2, batch_size=2)

    def run(*arguments, code=0):
        found, out, err = run_command("demo", *arguments, recipes=lambda: recipes, demo=plan)
        assert found == code, err
        return err if code else out

    return run


def test_the_demo_shows_a_sample_both_losses_and_what_is_next(demo, tmp_path):
    shown = demo()
    sample, table = shown.split("┏")
    assert PROMPT in sample
    rows = [line.split() for line in table.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["ours", "theirs"]
    for row in rows:
        assert 4 < float(row[5]) < 6  # of 257 tokens, hardly trained
    assert "mezzo-toy train ours --data YOUR_TEXT.txt --out runs/mine" in table
    kept = [
        path for path in tmp_path.rglob("*") if path.is_file() and "matplotlib" not in str(path)
    ]
    assert kept == []
    assert "MEZZO_TOKENS" not in os.environ


def test_the_demo_keeps_its_runs_if_it_is_told_where(demo, tmp_path):
    assert f"Both runs are in {tmp_path / 'kept'}" in demo("--out", tmp_path / "kept", "--steps", 1)
    for name in ("ours", "theirs"):
        assert (tmp_path / "kept" / name / "model" / "config.json").is_file()


def test_the_demo_removes_no_run_that_is_not_its_own(demo, tiny, tmp_path):
    kept = train(tiny(name="ours", steps=1), tmp_path / "kept" / "ours", quiet=True).out
    before = (kept / "log.jsonl").read_text()
    assert "another configuration" in demo("--out", tmp_path / "kept", code=2)
    assert (kept / "log.jsonl").read_text() == before
