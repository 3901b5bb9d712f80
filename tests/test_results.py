"""The documents say what the committed results say."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from mezzo_core.reproduction.markdown import write_numbers

ROOT = Path(__file__).parents[1]
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))
WRITTEN = [
    path
    for f in check_results.FOLDERS
    for path in (f / "README.md", f / "results/notes.md", *check_results.site_pages(f))
]
# What is no prose: blocks of code, code in a line, addresses, numbers that are written.
NO_PROSE = re.compile(
    r"```.*?```|^ {4}.*?$|`[^`\n]*`|\]\([^)]*\)|[\d.,]+<!--.*?-->", re.DOTALL | re.MULTILINE
)
MEASURED = re.compile(
    r"\d[ -]?(?:x(?!\w| ?\d)|%|(?:times|ms|s|seconds|minutes|hours|[GM]i?B|tokens a second)\b)"
    r"|(?:perplexity|accuracy) (?:of|is) \d"
)


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", check_results.FOLDERS, ids=named)
def test_documents_are_generated_from_the_results_and_the_claims(folder):
    """RESULTS.md has the status of every table and claim: a change of one is seen here."""
    for path, text in check_results.documents(folder).items():
        assert path.read_text(encoding="utf-8") == text, f"run tools/check_results.py: {path.name}"


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.exists()], ids=named)
def test_no_measured_number_stands_in_prose(path):
    text = NO_PROSE.sub("", path.read_text(encoding="utf-8"))
    assert [match[0] for match in MEASURED.finditer(text)] == []


@pytest.mark.parametrize("text", ["9.3 times", "58%", "4 GB", "2x as fast", "a perplexity of 19.5"])
def test_a_measured_number_in_prose_would_be_found(text):
    assert MEASURED.search(NO_PROSE.sub("", text))
    assert not MEASURED.search(NO_PROSE.sub("", "RAT(L=16), T = 4,096, 2 x 12, 9.3<!-- a: b --> s"))


@pytest.mark.parametrize("package", check_results.FOLDERS[:-1], ids=named)
def test_every_result_stands_in_its_document(package):
    text = (package / "RESULTS.md").read_text(encoding="utf-8")
    results = sorted((package / "results").glob("*/*.json"))
    assert results
    for path in results:
        assert f"{path.parent.name}/{path.name}" in text


@pytest.mark.parametrize("package", check_results.PACKAGES, ids=named)
def test_every_result_of_a_paper_has_a_figure(package):
    text = (package / "RESULTS.md").read_text(encoding="utf-8")
    figures = re.findall(r"\]\((results/[^)]*\.png)\)", text)
    assert len(figures) == len(list(check_results.figures(package)))
    for _, path, checksum in check_results.figures(package):
        assert str(path.relative_to(package)) in figures
        advice = f"run tools/check_results.py --figures: {path.name}"
        assert check_results.drawn_from(path) == checksum, advice


def test_a_changed_result_changes_the_numbers_and_the_status():
    (package,) = (path for path in check_results.PACKAGES if path.name == "rat")
    readme = (package / "README.md").read_text(encoding="utf-8")
    found = check_results.sources(package)
    assert write_numbers(readme, found) == readme
    found["nvidia-h200/speed_table6"] = found["nvidia-h200/speed_table7"]
    assert write_numbers(readme, found) != readme


def test_every_result_says_its_commit():
    for package in check_results.PACKAGES:
        for ours in check_results.sources(package).values():
            assert ours.origin["commit"], ours.source


@pytest.mark.parametrize("package", check_results.PACKAGES, ids=named)
def test_the_tests_that_answer_claims_are_there(package):
    text = (package / "RESULTS.md").read_text(encoding="utf-8")
    for file, test in re.findall(r"shown by the test (\S+?)::(\w+)", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
