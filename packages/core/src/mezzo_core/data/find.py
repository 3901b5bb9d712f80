"""Finds the files of a corpus: one file, all files of a folder, or those that match a glob."""

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from mimetypes import guess_type
from pathlib import Path

from mezzo_core.errors import UserError
from mezzo_core.files import read_json

FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = (".xz", ".gz", ".zst")
# A folder whose config.json has this type was written by a training run, whose log is no part
# of a corpus.
_RUN = "mezzo_core.train.config:TrainConfig"

logger = logging.getLogger(__name__)


def find_files(source: str) -> list[Path]:
    """Return the corpus files of a path, sorted: the file itself, a folder's files or a glob's.

    In folders and globs, these are left out: empty files; files and folders whose name starts with
    a dot; and folders of training runs. If the source itself is the folder of a run, its log is
    left out. Files of other formats are left out with a warning in the log, and .json files too,
    which are mostly settings, unless the glob has ".json" in its last part. Links are followed,
    except to a parent folder, and each folder and file is found once.

    Raises:
        UserError: if there is no such file, a file's format is not supported, or a part of a folder
            cannot be read.
    """
    path = existing_path(source)
    if path is not None and path.is_file():
        format_of(path)
        if path.stat().st_size == 0:
            raise UserError(f"{source} is empty")
        return [path]
    if path is not None and path.is_dir():
        found = _matching(path, ["**"])
    elif path is None and glob.has_magic(source):
        found = _expand(source)
    else:
        raise UserError(
            f'no file or folder {source!r}; a source is "embedded", a file, a folder or a glob of '
            f'{", ".join(FORMATS)}, or "hub:OWNER/NAME"'
        )
    named_json = path is None and ".json" in Path(source).name
    once: dict[Path, Path] = {}  # a link may give a file a second name
    others: list[str] = []
    for file in sorted(found):
        if file.is_file() and file.stat().st_size > 0:
            form = split_suffix(file)[0]
            if form in FORMATS and (form != ".json" or named_json):
                once.setdefault(file.resolve(), file)
            else:
                others.append(file.name)
        elif file.is_symlink():  # to nothing
            others.append(file.name)
    if not once:
        raise UserError(f"no {', '.join(FORMATS)} file with text in {source!r}")
    if others:
        has_json = any(split_suffix(Path(name))[0] == ".json" for name in others)
        hint = " (a glob that ends in .json reads .json files)" if has_json else ""
        shown = ", ".join(sorted(others)[:5])
        logger.warning("%s: left out %d of its files: %s%s", source, len(others), shown, hint)
    return list(once.values())


def existing_path(name: str) -> Path | None:
    """Return the path that the user named, or None if nothing exists there.

    Raises:
        UserError: if permissions do not allow to look there.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except PermissionError as error:
        raise UserError(f"cannot read {name!r}: {error.strerror}") from error
    except (OSError, RuntimeError, ValueError):  # no such file; no such user; a name with a NUL
        return None
    return path if name else None


def split_suffix(path: Path) -> tuple[str, str]:
    """Return the format and the compression suffix of a name, "" where there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]] or [""]
    if suffixes[-1] in COMPRESSIONS:
        return (suffixes[-2] if len(suffixes) > 1 else ""), suffixes[-1]
    return suffixes[-1], ""


def format_of(path: Path) -> str:
    """Return the format of a corpus file.

    Raises:
        UserError: if the name ends in no supported format.
    """
    form, compression = split_suffix(path)
    if form not in FORMATS or (form == ".parquet" and compression):
        raise UserError(
            f"cannot read {path}: a corpus file ends in {', '.join(FORMATS)}; "
            f"all but .parquet also with {' or '.join(COMPRESSIONS)}"
        )
    return form


def _expand(pattern: str) -> Iterator[Path]:
    """Yield the files that match a glob. A file may come more than once."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    top = existing_path(str(Path(*parts[:first])))
    if top is not None and top.is_dir():
        yield from _matching(top, parts[first:])


def _matching(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the files below a folder whose path matches the patterns, one pattern a path part."""
    head, *rest = patterns
    if head == "**":
        while rest[:1] == ["**"]:
            rest = rest[1:]
        for below in _folders(folder):
            yield from _matching(below, rest or ["*"])
        return
    folders, files = _entries(folder, head)
    if not rest:
        yield from files
        return
    for below in folders:
        yield from _matching(below, rest)


def _folders(top: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it, following links, each folder once."""
    seen = set(top.resolve().parents)  # a link to a parent leaves the corpus, or leads in a circle
    waiting, links = [top], list[Path]()
    while waiting or links:  # links last: a folder is found by its own path before that of a link
        folder = (waiting or links).pop()
        place = folder.resolve()
        if place not in seen:
            seen.add(place)
            yield folder
            for below in _entries(folder, "*")[0]:
                (links if below.is_symlink() else waiting).append(below)


def _entries(folder: Path, pattern: str) -> tuple[list[Path], list[Path]]:
    """Return a folder's subfolders and files that match a pattern and may be text, sorted.

    Raises:
        UserError: if the folder or one of them cannot be read: the model must not silently be
            trained on less than the user named.
    """
    folders: list[Path] = []
    files: list[Path] = []
    where = folder
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not fnmatchcase(entry.name, pattern):
                    continue
                where = folder / entry.name
                if entry.is_symlink() and not _is_of_other_kind(where):
                    entry.stat()  # fails for a broken link or a circle of links
                (folders if entry.is_dir() else files).append(where)
    except OSError as error:
        raise UserError(
            f"cannot read {where}: {error.strerror or error}; nothing is left out silently: "
            "make it readable, or remove it"
        ) from error
    if _is_run(folder):
        files = [file for file in files if file.name not in ("log.jsonl", "log.csv")]
    return sorted(below for below in folders if not _is_run(below)), sorted(files)


def _is_of_other_kind(path: Path) -> bool:
    """Tell whether the suffix is that of a known kind of file, such as a picture, and no text."""
    return split_suffix(path)[0] not in FORMATS and guess_type(path.name)[0] is not None


def _is_run(folder: Path) -> bool:
    config = folder / "config.json"
    try:
        return config.is_file() and read_json(config).get("type") == _RUN
    except (UserError, OSError):  # another program's config.json, or a damaged one: not a known run
        return False
