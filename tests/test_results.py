"""The tables in the documents say what the committed results say."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))
READMES = [p for p in ROOT.glob("packages/*/README.md") if check_results.START in p.read_text()]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_tables_are_generated_from_the_results(readme):
    text = readme.read_text(encoding="utf-8")
    assert check_results.updated(text, readme.parent / "results") == text


def test_a_changed_result_would_be_noticed(tmp_path):
    readme = READMES[0].read_text(encoding="utf-8")
    for path in (READMES[0].parent / "results").glob("*/*.json*"):
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace("tokens of", "words of"))
    assert check_results.updated(readme, tmp_path) != readme


def test_every_result_says_where_it_comes_from():
    files = list(ROOT.glob("packages/*/results/*/*.json*"))
    assert files
    for path in files:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        for line in lines:
            content = json.loads(line)
            assert content["commit"], path
            assert content["torch"], path
            assert content["date"], path
            assert content["gpu"] or content["cpu"], path
