"""Release a package: `hatch run release rat minor`.

    python tools/release.py [PACKAGE [major | minor | patch]] [--dry-run] [--url ADDRESS]

The version rises by the part that is named, and the siblings' ranges follow it; without a part the
version stays, for a first release. The changelog's part "Unreleased" becomes the version's. The
wheel must run in a clean environment, where pip fetches what it needs; then all is committed and
tagged, but not pushed. `--dry-run` checks the same and says each step, and changes nothing.
Links in READMEs lead to the remote `origin`, or to `--url`. Without a package the versions of all
are shown.
"""

import argparse
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from distributions import address, build, hatchling, version
from hatchling.version.scheme.standard import StandardScheme
from mezzo_core.console import show, show_table
from mezzo_core.errors import UserError, nearest
from packaging.specifiers import SpecifierSet
from rich.console import Console

ROOT = Path(__file__).parents[1]
RANGE = re.compile(r'"mezzo-([\w-]+)(\[[\w,]+\])?([<>=][^"]*)"')
UNRELEASED = re.compile(r"^## Unreleased\n(?P<changes>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Release:
    """What is released: a package's folder in packages/ of a tree, and its versions."""

    root: Path
    package: str
    old: str
    new: str
    repository: str
    """Its address on the web."""

    @property
    def folder(self) -> Path:
        """The package's folder."""
        return self.root / "packages" / self.package

    @property
    def name(self) -> str:
        """The name on the index."""
        return f"mezzo-{self.package.replace('_', '-')}"

    @property
    def tag(self) -> str:
        """The tag of the version."""
        return f"{self.package}-v{self.new}"

    @property
    def built(self) -> Path:
        """The folder of the built wheels."""
        return self.root / "dist" / self.tag

    @property
    def range(self) -> str:
        """The versions that siblings take: those that break nothing, by semantic versioning."""
        major, minor, _ = map(int, self.new.split("."))
        return f">={major}.{minor},<{major + 1 if major else f'0.{minor + 1}'}"


def plan(root: Path, package: str, part: str | None, url: str | None = None) -> Release:
    """Check that a package can be released from a tree as it is; return the release.

    Raises:
        UserError: if the package is unknown, the tree has uncommitted changes, the tag exists, the
            changelog has nothing unreleased, a range does not take the sibling of this tree, or a
            sibling that the package needs is not released.
        ValueError: if neither `url` nor the remote `origin` is an address that READMEs can link to.
    """
    known = packages(root)
    if package not in known:
        raise UserError(f"no package is named {package!r}{nearest(package, known)}")
    old = version(root / "packages" / package)
    new = StandardScheme(str(root), {}).update(part, old, {}) if part else old
    release = Release(root, package, old, new, address(root, url))
    if changed := [line[3:] for line in git(root, "status", "--porcelain").splitlines()]:
        raise UserError(f"commit what has changed first: {', '.join(changed)}")
    tags = git(root, "tag").split()
    if release.tag in tags:
        raise UserError(f"the tag {release.tag} exists: name the part of the version that rises")
    found = UNRELEASED.search((release.folder / "CHANGELOG.md").read_text(encoding="utf-8"))
    if found is None or not found["changes"].strip():
        raise UserError(f"packages/{package}/CHANGELOG.md has nothing under '## Unreleased'")
    for sibling in siblings(release):
        needed = f"{sibling}-v{version(root / 'packages' / sibling)}"
        if needed not in tags:
            raise UserError(f"{release.name} needs {sibling}: release it first, as {needed}")
    check_ranges(root)
    return release


def packages(root: Path) -> list[str]:
    """Return the folders of packages/ in a tree."""
    return sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))


def show_versions(root: Path) -> None:
    """Print the version of each package in a tree, and whether it has been released."""
    tags = git(root, "tag").split()
    rows = []
    for package in packages(root):
        there = version(root / "packages" / package)
        rows.append((package, there, "yes" if f"{package}-v{there}" in tags else "no"))
    show_table(("package", "version", "released"), rows)


def siblings(release: Release) -> set[str]:
    """Return the packages that a package needs."""
    ranges = RANGE.findall((release.folder / "pyproject.toml").read_text(encoding="utf-8"))
    return {name.replace("-", "_") for name, *_ in ranges}


def bump(release: Release) -> None:
    """Write the new version, the ranges that follow it, and the changelog."""
    if release.new != release.old:
        hatchling(release.folder, "version", release.new)
    move_ranges(release)
    changelog = release.folder / "CHANGELOG.md"
    today = datetime.now(timezone.utc).date().isoformat()
    text = changelog.read_text(encoding="utf-8")
    text = UNRELEASED.sub(rf"## {release.new} ({today})\n\g<changes>", text, count=1)
    changelog.write_text(text, encoding="utf-8")


def move_ranges(release: Release) -> None:
    """Write the release's range wherever a package, or a page of docs/, names it."""

    def moved(found: re.Match[str]) -> str:
        name, extras, _ = found.groups()
        same = f"mezzo-{name}" == release.name
        return f'"mezzo-{name}{extras or ""}{release.range}"' if same else found[0]

    root = release.root
    for path in (*root.glob("packages/**/pyproject.toml"), *root.glob("docs/*.md")):
        if not path.is_symlink():
            text = path.read_text(encoding="utf-8")
            path.write_text(RANGE.sub(moved, text), encoding="utf-8")


def check_ranges(root: Path) -> None:
    """Check that every range of a sibling takes the sibling's version in this tree.

    Raises:
        UserError: if one does not.
    """
    versions = {path.parent.name: version(path.parent) for path in root.glob("packages/*/src")}
    for path in sorted(root.glob("packages/**/pyproject.toml")):
        for name, _, allowed in RANGE.findall(path.read_text(encoding="utf-8")):
            there = versions[name.replace("-", "_")]
            if there not in SpecifierSet(allowed):
                where = path.relative_to(root)
                raise UserError(f"{where}: mezzo-{name}{allowed} does not take {there}")


def build_wheels(release: Release) -> None:
    """Build the package's sdist and wheel, and the wheels of the siblings that it needs."""
    for package in (release.package, *siblings(release)):
        build(release.root, package, release.built, release.repository)


def try_out(release: Release) -> None:
    """Run the package's demo where nothing but its wheel, and what it needs, is installed.

    Core has no demo: there the smallest package of a paper trains, which its tests have.
    """
    wheels = {path.name.partition("-")[0]: str(path) for path in release.built.glob("*.whl")}
    module = f"mezzo_{release.package}"
    needed = [f"{wheels.pop(module)}[train]", *wheels.values()]
    words = [module, "demo"]
    if release.package == "core":
        needed.append(str(release.folder / "tests/smallest"))
        words = ["mezzo_smallest", "train", "tiny", "--out", "run"]
    with TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        run(folder, python, "-m", "pip", "install", "--quiet", *needed)
        run(folder, python, "-I", "-m", *words)


def record(release: Release) -> None:
    """Commit what was written, and tag it."""
    title = f"{release.name} {release.new}"
    git(release.root, "commit", "--all", "--message", title)
    git(release.root, "tag", "--annotate", release.tag, "--message", title)


def carry_out(release: Release, dry_run: bool) -> None:
    """Release the package, and say each step; in a dry run, say the steps alone.

    Raises:
        UserError: if a step fails; what was written is then taken back.
    """
    steps: dict[str, Callable[[Release], None]] = {
        f"build its sdist and wheel in {release.built}": build_wheels,
        "install the wheel in a clean environment, and run its demo": try_out,
        f"commit, and tag {release.tag}": record,
    }
    since = "" if release.new == release.old else f"{release.old} -> "
    show(f"{release.name} {since}{release.new}: write version, ranges and changelog")
    if not dry_run:
        bump(release)
    written = git(release.root, "diff", "--name-only").split()
    try:
        for words, step in steps.items():
            show(words)
            if not dry_run:
                step(release)
    except BaseException:
        git(release.root, "restore", *written)
        raise
    show(f"what remains to do, and publishes it: git push origin HEAD {release.tag}")


def git(root: Path, *words: str) -> str:
    """Run git in a tree; return what it prints.

    Raises:
        UserError: if it fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def run(folder: str, *command: str) -> None:
    """Run a command in a folder, and show what it prints.

    Raises:
        UserError: if it fails.
    """
    if subprocess.run(command, cwd=folder, check=False).returncode:
        raise UserError(f"failed: {' '.join(command)}")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Release what is asked for; return 0, or 2 when the user can mend what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", nargs="?", metavar="PACKAGE", help="a folder of packages/")
    parser.add_argument("part", nargs="?", choices=("major", "minor", "patch"))
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    parser.add_argument("--url", help="the repository on the web; default: the remote origin's")
    asked = parser.parse_args(arguments)
    try:
        if asked.package is None:
            show_versions(root)
        else:
            carry_out(plan(root, asked.package, asked.part, asked.url), asked.dry_run)
    except ValueError as error:
        show(f"error: {error}", Console(stderr=True), style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
