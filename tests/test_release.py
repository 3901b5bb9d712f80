"""A release, on a copy of what it reads: what it writes, and what it refuses."""

import re
import shutil
import subprocess
from email import message_from_string
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
WRITTEN = ("pyproject.toml", "CHANGELOG.md", "README.md", "src/*/__init__.py", "tests/**/*.toml")
COPIED = [
    *(path for name in WRITTEN for path in ROOT.glob(f"packages/*/{name}")),
    *ROOT.glob("packages/*/LICENSE"),
    *ROOT.glob("docs/add_a_mixer.md"),
]


@pytest.fixture
def tools(monkeypatch):
    """Give the tool, and what builds."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import distributions
    import release

    return release, distributions


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make a repository of the files that a release reads, with core's first release."""
    root = tmp_path / "tree"
    for path in COPIED:
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@example.org")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "All")
    git(root, "tag", "core-v0.1.0")
    return root


def git(root, *words):
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)


def said(tools, capsys, root, *words):
    """Return a release's exit code and what it prints."""
    code = tools[0].main(words, root)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_dry_run_shows_what_would_be_written_and_changes_nothing(tools, tree, capsys):
    before = git(tree, "log", "--all", "--format=%H %D").stdout
    code, shown = said(tools, capsys, tree, "rat", "minor", "--dry-run")
    assert code == 0
    for words in ('-__version__ = "0.1.0"', '+__version__ = "0.2.0"', "+## 0.2.0 (", "rat-v0.2.0"):
        assert words in shown
    assert git(tree, "log", "--all", "--format=%H %D").stdout == before
    assert not git(tree, "status", "--porcelain").stdout


@pytest.mark.parametrize(
    ("part", "new", "range_"),
    [
        ("minor", "0.2.0", ">=0.2,<0.3"),
        ("patch", "0.1.1", ">=0.1,<0.2"),
        ("major", "1.0.0", ">=1.0,<2"),
    ],
)
def test_the_siblings_ranges_follow_core(tools, tree, capsys, part, new, range_):
    assert said(tools, capsys, tree, "core", part)[0] == 0
    assert (
        f'__version__ = "{new}"' in (tree / "packages/core/src/mezzo_core/__init__.py").read_text()
    )
    pages = [*tree.glob("packages/**/pyproject.toml"), tree / "docs/add_a_mixer.md"]
    ranges = re.findall(
        r'"mezzo-core(?:\[\w+\])?([<>=][^"]*)"', "".join(p.read_text() for p in pages)
    )
    assert len(ranges) >= 9
    assert set(ranges) == {range_}
    assert f"core-v{new}" in git(tree, "tag", "--points-at", "HEAD").stdout


def test_the_changelog_gets_the_version_and_a_commit_its_tag(tools, tree, capsys):
    assert said(tools, capsys, tree, "rat")[0] == 0  # a first release
    changelog = (tree / "packages/rat/CHANGELOG.md").read_text()
    assert re.search(r"^## 0\.1\.0 \(\d{4}-\d\d-\d\d\)\n\S", changelog, re.M)
    assert "Unreleased" not in changelog
    assert "rat-v0.1.0" in git(tree, "tag", "--points-at", "HEAD").stdout
    assert not git(tree, "status", "--porcelain").stdout


def test_without_a_package_the_versions_of_all_are_shown(tools, tree, capsys):
    code, shown = said(tools, capsys, tree)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    names = ["core", "drt", "gsa", "rat", "recurrent_transformer"]
    released = ["yes", "no", "no", "no", "no"]
    expected = [[name, "0.1.0", told] for name, told in zip(names, released, strict=True)]
    assert [row for row in rows if row] == expected


def rewrite(name, old, new):
    """Return a change of a file, committed."""

    def change(tree):
        path = tree / name
        path.write_text(re.sub(old, new, path.read_text(), flags=re.DOTALL))
        git(tree, "commit", "--quiet", "--all", "--message", "A change")

    return change


CHANGELOG = "packages/rat/CHANGELOG.md"


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda tree: None, ["core"], "the tag core-v0.1.0 exists"),
        (lambda tree: (tree / CHANGELOG).write_text("x"), ["rat"], f"changed first: {CHANGELOG}"),
        (rewrite(CHANGELOG, "Unreleased", "0.0.9"), ["rat"], f"{CHANGELOG} has nothing under"),
        (rewrite(CHANGELOG, "Unreleased.*", "Unreleased\n"), ["rat"], f"{CHANGELOG} has nothing"),
        (
            lambda tree: git(tree, "tag", "-d", "core-v0.1.0"),
            ["rat", "minor"],
            "release it first, as core-v",
        ),
    ],
)
def test_what_cannot_be_released_is_refused_in_a_line(tools, tree, capsys, change, words, message):
    change(tree)
    before = git(tree, "diff").stdout
    code, shown = said(tools, capsys, tree, *words)
    assert code == 2
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert git(tree, "diff").stdout == before


@pytest.mark.parametrize("words", [["rta"], ["rat", "mayor"]])
def test_a_package_or_part_that_is_none_is_refused_with_those_that_are(tools, tree, capsys, words):
    with pytest.raises(SystemExit) as stop:
        tools[0].main(words, tree)
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert f"invalid choice: '{words[-1]}'" in shown
    assert ("minor" if "rat" in words else "recurrent_transformer") in shown


def test_a_package_on_the_index_links_to_the_repository_at_its_tag(tools, tree):
    address = "https://git.example.org/people/mezzo"
    tools[1].build(tree, "core-v0.1.0", address, tree / "dist")
    names = {path.name for path in (tree / "dist").iterdir()}
    assert names == {"mezzo_core-0.1.0.tar.gz", "mezzo_core-0.1.0-py3-none-any.whl"}
    with ZipFile(tree / "dist/mezzo_core-0.1.0-py3-none-any.whl") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    assert f"Source, {address}" in metadata.get_all("Project-URL")
    targets = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert f"{address}/blob/core-v0.1.0/docs/states.md" in targets
    assert all(target.startswith("https://") for target in targets)


def test_a_tag_of_another_version_builds_nothing(tools, tree):
    with pytest.raises(ValueError, match=r"the version of core is 0\.1\.0, not that of core-v0\.2"):
        tools[1].build(tree, "core-v0.2.0", "https://x.org/mezzo", tree / "dist")
    assert not (tree / "dist").exists()


@pytest.mark.parametrize("package", [path.parent.name for path in ROOT.glob("packages/*/src")])
def test_every_link_of_a_readme_is_to_a_file_that_is_there(tools, package):
    text = (ROOT / "packages" / package / "README.md").read_text()
    made = tools[1].absolute_links(text, package, "https://x.org/mezzo", "TAG")
    files = re.findall(r"\(https://x\.org/mezzo/(?:raw|blob)/TAG/([^)]*)\)", made)
    assert files
    assert all((ROOT / name).is_file() for name in files)
    assert not tools[1].LINK.search(made)


@pytest.mark.parametrize("path", [*ROOT.glob("packages/**/pyproject.toml")], ids=str)
def test_the_ranges_of_this_tree_take_its_packages(tools, path):
    for name, _, allowed in tools[0].RANGE.findall(path.read_text()):
        package = import_module(f"mezzo_{name.replace('-', '_')}")
        assert package.__version__ in SpecifierSet(allowed)
