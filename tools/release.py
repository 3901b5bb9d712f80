"""Release a package: `hatch run release rat minor`.

    python tools/release.py [PACKAGE [major | minor | patch]] [--dry-run]

The version rises by the part that is named, and the siblings' ranges follow it; without a part the
version stays, for a first release. The changelog's part "Unreleased" becomes the version's. All is
committed and tagged, but not pushed: the tag builds, tries and publishes the package (wheels.yml).
`--dry-run` shows what would be committed. Without a package the versions of all are shown.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from distributions import hatchling
from mezzo_core.console import complain, show, show_table
from mezzo_core.errors import UserError

ROOT = Path(__file__).parents[1]
RANGE = re.compile(r'"mezzo-([\w-]+)((?:\[[\w,]+\])?)([<>=][^"]*)"')
UNRELEASED = re.compile(r"^## Unreleased\n(?P<changes>\s*\S.*?)(?=^## |\Z)", re.M | re.S)


def release(root: Path, package: str, part: str | None, dry_run: bool) -> None:
    """Write a release into a tree, check it, commit and tag it; a dry run only shows it.

    Raises:
        UserError: if the tree has uncommitted changes, the tag exists, the changelog has nothing
            unreleased, or a sibling that the package needs is not released. Nothing is changed.
    """
    folder, tags = root / "packages" / package, git(root, "tag").split()
    if changed := [line[3:] for line in git(root, "status", "--porcelain").splitlines()]:
        raise UserError(f"commit what has changed first: {', '.join(changed)}")
    try:
        if part:
            hatchling(folder, "version", part)
        tag = tag_of(folder)
        version = tag.partition("-v")[2]
        if tag in tags:
            raise UserError(f"the tag {tag} exists: name the part of the version that rises")
        changelog = folder / "CHANGELOG.md"
        heading = f"## {version} ({datetime.now(timezone.utc).date()})\n"
        text, found = UNRELEASED.subn(rf"{heading}\g<changes>", changelog.read_text("utf-8"), 1)
        if not found:
            raise UserError(f"packages/{package}/CHANGELOG.md has nothing under '## Unreleased'")
        changelog.write_text(text, encoding="utf-8")
        for sibling, *_ in RANGE.findall((folder / "pyproject.toml").read_text("utf-8")):
            if (needed := tag_of(folder.with_name(sibling.replace("-", "_")))) not in tags:
                raise UserError(f"{package} needs {sibling}: release it first, as {needed}")
        move_ranges(root, package.replace("_", "-"), version)
        show(git(root, "diff"))
        if not dry_run:
            title = f"mezzo-{package.replace('_', '-')} {version}"
            git(root, "commit", "--all", "--message", title)
            git(root, "tag", "--annotate", tag, "--message", title)
        show(f"what remains to do, and publishes it: git push origin HEAD {tag}")
    finally:  # what a dry run or a failed one has written
        git(root, "restore", ".")


def move_ranges(root: Path, name: str, version: str) -> None:
    """Write a package's range, by semantic versioning, wherever a package or a page names it."""
    major, minor, _ = map(int, version.split("."))
    allowed = f">={major}.{minor},<{major + 1 if major else f'0.{minor + 1}'}"

    def moved(found: re.Match[str]) -> str:
        return f'"mezzo-{name}{found[2]}{allowed}"' if found[1] == name else found[0]

    for path in (*root.glob("packages/**/pyproject.toml"), *root.glob("docs/*.md")):
        if not path.is_symlink():
            path.write_text(RANGE.sub(moved, path.read_text("utf-8")), encoding="utf-8")


def tag_of(folder: Path) -> str:
    """Return the tag that a package's version has or will have."""
    return f"{folder.name}-v{hatchling(folder, 'version').strip()}"


def git(root: Path, *words: str) -> str:
    """Run git in a tree; return what it prints.

    Raises:
        UserError: if it fails.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Release what is asked for; return 0, or 2 when the user can mend what went wrong."""
    folders = {path.parent.name: path.parent for path in sorted(root.glob("packages/*/src"))}
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("package", nargs="?", metavar="PACKAGE", choices=folders)
    parser.add_argument("part", nargs="?", choices=("major", "minor", "patch"))
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    asked = parser.parse_args(arguments)
    try:
        if asked.package is None:
            tags, every = git(root, "tag").split(), map(tag_of, folders.values())
            told = [(*tag.split("-v"), "yes" if tag in tags else "no") for tag in every]
            show_table(("package", "version", "released"), told)
        else:
            release(root, asked.package, asked.part, asked.dry_run)
    except UserError as error:
        complain(f"error: {error}", style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
