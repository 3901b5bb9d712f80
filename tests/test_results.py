"""The documents say what the committed results say."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from mezzo_core.testing.traced import untraced

ROOT = Path(__file__).parents[1]
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))
FOLDERS = [*check_results.PACKAGES, ROOT]
WRITTEN = [
    file for folder in FOLDERS for file in (folder / "README.md", folder / "results/notes.md")
]


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_documents_are_generated_from_the_results(folder):
    for path, text in check_results.documents(folder).items():
        assert path.read_text(encoding="utf-8") == text, f"run tools/check_results.py: {path.name}"


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.exists()], ids=named)
def test_every_measured_number_in_prose_is_traced_to_its_result(path):
    folder = path.parent.parent if path.name == "notes.md" else path.parent
    problems = untraced(path.read_text(encoding="utf-8"), check_results.sources(folder))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", check_results.PACKAGES, ids=named)
def test_every_result_stands_in_its_document_and_has_a_figure_there(package):
    (text,) = (t for p, t in check_results.documents(package).items() if p.name == "RESULTS.md")
    results = sorted((package / "results").glob("*/*.json"))
    assert results
    for path in results:
        assert f"{path.parent.name}/{path.name}" in text
    figures = re.findall(r"\]\((results/[^)]*\.png)\)", text)
    assert len(figures) == len(list(check_results.figures(package)))
    for _, path, checksum in check_results.figures(package):
        assert str(path.relative_to(package)) in figures
        advice = f"run tools/check_results.py --figures: {path.name}"
        assert check_results.drawn_from(path) == checksum, advice


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A small workspace of one package with one result, and its checker."""
    package = tmp_path / "packages/p"
    (package / "src/mezzo_p").mkdir(parents=True)
    (package / "src/mezzo_p/published.toml").write_text('[paper]\ntitle = "A paper"\n')
    (package / "results/gpu").mkdir(parents=True)
    origin = {"gpu": "G", "cpu": "C", "torch": "2", "commit": "abc", "date": "2026-01-31"}
    names = {"kind": "speed", "title": "T", "setting": "s", "how": "other hardware", "unit": "ms"}
    entries = [
        {"model": "m", "column": "8", "value": v, "seed": i} for i, v in enumerate((1, 3, 2))
    ]
    result = {**names, **origin, "better": "lower", "columns": ["8"], "models": ["m"]}
    (package / "results/gpu/speed.json").write_text(json.dumps({**result, "entries": entries}))
    for folder, name in ((tmp_path, "p/gpu/speed"), (package, "gpu/speed")):
        table = f"<!-- table {name} -->\n<!-- end of table -->"
        (folder / "README.md").write_text(f"before\n{table}\nafter, in 2 ms<!-- {name}: m -->\n")
    monkeypatch.setitem(check_results.documents.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(check_results.documents.__globals__, "PACKAGES", [package])
    return tmp_path


def test_a_package_has_its_results_and_a_readme_its_tables(workspace):
    package = workspace / "packages/p"
    check_results.draw_figures(package)
    (package / "results/notes.md").write_text("What to know.\n")
    for folder in (workspace, package):
        for path, text in check_results.documents(folder).items():
            path.write_text(text)
        found = check_results.sources(folder)
        readme = (folder / "README.md").read_text()
        assert "| m | 2 |" in readme
        assert readme.startswith("before\n<!-- table ")
        assert untraced(readme, found) == []
        assert untraced(readme.replace("2 ms<", "3 ms<"), found) != []
    results = (package / "RESULTS.md").read_text()
    assert "What to know.\n\n## gpu\n\n### T\n" in results
    assert "| m | 2 |\n\n![T](results/gpu/speed.png)" in results
    assert (package / "results/gpu/speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_changed_result_would_be_noticed(workspace):
    path = workspace / "packages/p/results/gpu/speed.json"
    before = check_results.documents(workspace / "packages/p")
    path.write_text(path.read_text().replace('"value": 2', '"value": 2.5'))
    after = check_results.documents(workspace / "packages/p")
    assert [text != after[path] for path, text in before.items()] == [True, True]


def test_a_figure_of_a_changed_result_is_drawn_again(workspace):
    package = workspace / "packages/p"
    json_file, figure = (package / f"results/gpu/speed.{end}" for end in ("json", "png"))
    check_results.draw_figures(package)
    before = figure.read_bytes()
    check_results.draw_figures(package)
    assert figure.read_bytes() == before
    json_file.write_text(json_file.read_text().replace('"value": 2', '"value": 2.5'))
    ((_, _, checksum),) = check_results.figures(package)
    assert check_results.drawn_from(figure) != checksum
    check_results.draw_figures(package)
    assert check_results.drawn_from(figure) == checksum


def test_every_result_says_where_it_comes_from():
    for package in check_results.PACKAGES:
        for ours in check_results.sources(package).values():
            if ours.origin:
                assert ours.origin["commit"], ours.source
                assert ours.origin["gpu"] or ours.origin["cpu"], ours.source
