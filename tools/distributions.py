"""Build the sdist and the wheel of a release, with a README whose links hold on the package index.

    python tools/distributions.py rat-v0.2.0 --url https://HOST/OWNER/NAME [--out FOLDER]

A README links to files of the repository, which the index does not have: here such a link becomes
an address in the repository on the web, at the release's tag. This needs hatchling alone.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def build(root: Path, tag: str, repository: str, out: Path) -> None:
    """Build the package of a tree that a tag names, such as "rat-v0.2.0".

    Raises:
        ValueError: if the tag has another version than the package.
        subprocess.CalledProcessError: if hatchling fails.
    """
    package, _, version = tag.partition("-v")
    with TemporaryDirectory() as folder:
        copy = Path(folder, package)
        left_out = shutil.ignore_patterns("__pycache__", "dist", "runs", "reports")
        shutil.copytree(root / "packages" / package, copy, ignore=left_out)
        if version != (there := hatchling(copy, "version").strip()):
            raise ValueError(f"the version of {package} is {there}, not that of {tag}")
        readme = copy / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(absolute_links(text, package, repository, tag), encoding="utf-8")
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as project:
            changes = f"{repository}/blob/{tag}/packages/{package}/CHANGELOG.md"
            project.write(f'\n[project.urls]\nSource = "{repository}"\nChangelog = "{changes}"\n')
        hatchling(copy, "build", "-t", "sdist", "-t", "wheel", "-d", str(out.resolve()))


def absolute_links(text: str, package: str, repository: str, tag: str) -> str:
    """Make a README's links to files addresses in the repository at a tag."""

    def absolute(link: re.Match[str]) -> str:
        image, words, target = link.groups()
        path = normpath(PurePosixPath("packages", package, target))
        return f"{image}{words}({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, text)


def hatchling(folder: Path, *words: str) -> str:
    """Run hatchling in a package's folder; return what it prints."""
    command = [sys.executable, "-m", "hatchling", *words]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("tag")
    parser.add_argument("--url", required=True, help="the repository on the web")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    told = parser.parse_args()
    build(ROOT, told.tag, told.url.rstrip("/"), told.out)
