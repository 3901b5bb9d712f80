"""A release, on a copy of what it reads: what it writes, and what it refuses."""

import re
import shutil
import subprocess
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

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
    git(root, "remote", "add", "origin", "git@git.example.org:people/mezzo.git")
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


def test_a_dry_run_says_each_step_and_changes_nothing(tools, tree, capsys):
    before = git(tree, "log", "--all", "--format=%H %D").stdout
    code, shown = said(tools, capsys, tree, "rat", "minor", "--dry-run")
    assert code == 0
    for words in ("mezzo-rat 0.1.0 -> 0.2.0", "build", "its demo", "tag rat-v0.2.0", "git push"):
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
def test_the_siblings_ranges_follow_core(tools, tree, part, new, range_):
    release = tools[0].plan(tree, "core", part)
    tools[0].bump(release)
    assert (
        f'__version__ = "{new}"' in (tree / "packages/core/src/mezzo_core/__init__.py").read_text()
    )
    tools[0].check_ranges(tree)
    pages = [*tree.glob("packages/**/pyproject.toml"), tree / "docs/add_a_mixer.md"]
    ranges = re.findall(
        r'"mezzo-core(?:\[\w+\])?([<>=][^"]*)"', "".join(p.read_text() for p in pages)
    )
    assert len(ranges) >= 9
    assert set(ranges) == {range_}


def test_the_changelog_gets_the_version_and_a_commit_its_tag(tools, tree, monkeypatch, capsys):
    monkeypatch.setattr(tools[0], "try_out", lambda release: None)  # it needs a network and minutes
    assert said(tools, capsys, tree, "rat")[0] == 0  # a first release
    changelog = (tree / "packages/rat/CHANGELOG.md").read_text()
    assert re.search(r"^## 0\.1\.0 \(\d{4}-\d\d-\d\d\)\n\S", changelog, re.M)
    assert "Unreleased" not in changelog
    assert "rat-v0.1.0" in git(tree, "tag", "--points-at", "HEAD").stdout
    names = {path.name for path in (tree / "dist/rat-v0.1.0").iterdir()}
    assert {"mezzo_rat-0.1.0.tar.gz", "mezzo_rat-0.1.0-py3-none-any.whl"} <= names
    assert "mezzo_core-0.1.0-py3-none-any.whl" in names


def test_without_a_package_the_versions_of_all_are_shown(tools, tree, capsys):
    code, shown = said(tools, capsys, tree)
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    names = ["core", "drt", "gsa", "rat", "recurrent_transformer"]
    released = ["yes", "no", "no", "no", "no"]
    expected = [[name, "0.1.0", told] for name, told in zip(names, released, strict=True)]
    assert [row for row in rows if row] == expected


def test_a_demo_that_fails_takes_back_what_was_written(tools, tree, monkeypatch, capsys):
    monkeypatch.setattr(tools[0], "build_wheels", lambda release: tools[0].run(tree, "false"))
    code, shown = said(tools, capsys, tree, "rat", "patch")
    assert code == 2
    assert "error: failed: false" in shown
    assert not git(tree, "status", "--porcelain").stdout
    assert git(tree, "tag").stdout.split() == ["core-v0.1.0"]


def rewrite(name, old, new):
    """Return a change of a file, committed."""

    def change(tree):
        path = tree / name
        path.write_text(re.sub(old, new, path.read_text(), flags=re.DOTALL))
        git(tree, "commit", "--quiet", "--all", "--message", "A change")

    return change


CHANGELOG, PROJECT = "packages/rat/CHANGELOG.md", "packages/rat/pyproject.toml"


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda tree: None, ["rta"], "no package is named 'rta'; did you mean rat, drt?"),
        (lambda tree: None, ["core"], "the tag core-v0.1.0 exists"),
        (lambda tree: (tree / CHANGELOG).write_text("x"), ["rat"], f"changed first: {CHANGELOG}"),
        (rewrite(CHANGELOG, "Unreleased", "0.0.9"), ["rat"], f"{CHANGELOG} has nothing under"),
        (rewrite(CHANGELOG, "Unreleased.*", "Unreleased\n"), ["rat"], f"{CHANGELOG} has nothing"),
        (
            lambda tree: git(tree, "tag", "-d", "core-v0.1.0"),
            ["rat"],
            "release it first, as core-v",
        ),
        (rewrite(PROJECT, "<0.2", "<0.1.0"), ["rat"], "mezzo-core>=0.1,<0.1.0 does not take 0.1.0"),
        (
            lambda tree: git(tree, "remote", "remove", "origin"),
            ["rat"],
            "there is no git remote origin: give --url https://HOST/OWNER/NAME",
        ),
        (
            lambda tree: git(tree, "remote", "set-url", "origin", "/srv/mezzo.git"),
            ["rat"],
            "'/srv/mezzo.git' is no address on the web: give --url",
        ),
        (lambda tree: None, ["rat", "--url", "mezzo"], "'mezzo' is no address on the web"),
    ],
)
def test_what_cannot_be_released_is_refused_in_a_line(tools, tree, capsys, change, words, message):
    change(tree)
    code, shown = said(tools, capsys, tree, *words)
    assert code == 2
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_a_package_on_the_index_links_to_the_repository_at_its_tag(tools, tree):
    git(tree, "remote", "remove", "origin")
    release = tools[0].plan(tree, "core", "patch", "https://git.example.org/people/mezzo/")
    wheel = tools[1].build(tree, "core", tree / "dist", release.repository)[0]
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    address = "https://git.example.org/people/mezzo"
    assert f"Source, {address}" in metadata.get_all("Project-URL")
    targets = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert f"{address}/blob/core-v0.1.0/docs/states.md" in targets
    assert all(target.startswith("https://") for target in targets)


@pytest.mark.parametrize("package", [path.parent.name for path in ROOT.glob("packages/*/src")])
def test_every_link_of_a_readme_is_to_a_file_that_is_there(tools, package):
    text = (ROOT / "packages" / package / "README.md").read_text()
    made = tools[1].absolute_links(text, package, "https://x.org/mezzo", "TAG")
    files = re.findall(r"\(https://x\.org/mezzo/(?:raw|blob)/TAG/([^)]*)\)", made)
    assert files
    assert all((ROOT / name).is_file() for name in files)
    assert not tools[1].LINK.search(made)


@pytest.mark.parametrize(
    "remote",
    [
        "https://x.org/a/b.git",
        "https://x.org/a/b",
        "https://name:secret@x.org/a/b.git",
        "git@x.org:a/b.git",
        "x.org:a/b.git",
        "ssh://git@x.org/a/b",
        "ssh://git@x.org:2222/a/b",
    ],
)
def test_a_remote_has_a_web_address(tools, tree, remote):
    git(tree, "remote", "set-url", "origin", remote)
    assert tools[1].address(tree) == tools[1].address(tree, remote) == "https://x.org/a/b"


@pytest.mark.parametrize("remote", ["/srv/b.git", "../b", "b/c.git", "file:///srv/b.git", ""])
def test_a_folder_has_no_web_address(tools, tree, remote):
    with pytest.raises(ValueError, match="is no address on the web"):
        tools[1].address(tree, remote)


def test_the_ranges_of_this_tree_take_its_packages(tools):
    tools[0].check_ranges(ROOT)
