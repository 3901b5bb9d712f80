"""Build the sdist and the wheel of packages, with READMEs whose links hold on the package index.

    python tools/distributions.py PACKAGE... [--out FOLDER] [--url ADDRESS]

A PACKAGE is a folder of packages/, or a release's tag (`rat-v0.2.0`). A README links to files of
the repository, which the index does not have: here such a link becomes an address on the web, at
the tag of the package's version, of the remote `origin` or of `--url`. This needs hatchling alone.
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
REMOTES = (
    r"https?://(?:[^@/]*@)?([\w.-]+(?::\d+)?)/(.+?)",
    r"ssh://(?:[^@/]*@)?([\w.-]+)(?::\d+)?/(.+?)",
    r"(?:[^@/:]*@)?([\w.-]+):(?!//)(.+?)",
)
"""How git writes a remote that has a web address: its host and its path."""
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def build(root: Path, package: str, out: Path, repository: str) -> list[Path]:
    """Build a package's sdist and wheel in a folder; return their paths.

    Args:
        root: the tree with the package.
        package: its folder in packages/.
        out: where they go.
        repository: its address on the web.
    """
    with TemporaryDirectory() as folder:
        copy = Path(folder, package)
        left_out = shutil.ignore_patterns("__pycache__", "dist", "runs", "reports")
        shutil.copytree(root / "packages" / package, copy, ignore=left_out)
        tag = f"{package}-v{version(copy)}"
        readme = copy / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(absolute_links(text, package, repository, tag), encoding="utf-8")
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as project:
            changes = f"{repository}/blob/{tag}/packages/{package}/CHANGELOG.md"
            project.write(f'\n[project.urls]\nSource = "{repository}"\nChangelog = "{changes}"\n')
        built = Path(folder, "built")
        hatchling(copy, "build", "-t", "sdist", "-t", "wheel", "-d", str(built))
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy2(path, out)) for path in sorted(built.iterdir())]


def absolute_links(text: str, package: str, repository: str, tag: str) -> str:
    """Make a README's links to files addresses in the repository at a tag."""

    def absolute(link: re.Match[str]) -> str:
        image, words, target = link.groups()
        path = normpath(PurePosixPath("packages", package, target))
        return f"{image}{words}({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, text)


def address(root: Path, url: str | None = None) -> str:
    """Return the web address of a repository: a remote's, or that of the remote `origin`.

    Raises:
        ValueError: if it has none; the message says what gives it one.
    """
    asked = "give --url https://HOST/OWNER/NAME, to which links in READMEs lead"
    if url is None:
        command = ["git", "remote", "get-url", "origin"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"there is no git remote origin: {asked}")
        remote = done.stdout.strip()
    else:
        remote = url
    for form in REMOTES:
        if found := re.fullmatch(rf"{form}(?:\.git)?/?", remote):
            return "https://{}/{}".format(*found.groups())
    raise ValueError(f"{remote!r} is no address on the web: {asked}")


def version(folder: Path) -> str:
    """Return a package's version."""
    return hatchling(folder, "version").strip()


def hatchling(folder: Path, *words: str) -> str:
    """Run hatchling in a package's folder; return what it prints."""
    command = [sys.executable, "-m", "hatchling", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} in {folder}: {done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--url", help="the repository on the web; default: the remote origin's")
    arguments = parser.parse_args()
    try:
        repository = address(ROOT, arguments.url)
        for name in arguments.packages:
            package, _, tagged = name.partition("-v")
            if tagged and tagged != (there := version(ROOT / "packages" / package)):
                raise ValueError(f"the version of {package} is {there}, not that of {name}")
            build(ROOT, package, arguments.out, repository)
    except ValueError as error:
        parser.error(str(error))
