"""Build a text of source code and manuals from the packages of packages.txt.

    python packages/core/experiments/corpus/build.py --out corpus
    mezzo-rat train small_rat_l16 --data corpus --tokenizer gpt2/

pip downloads the wheels, which are pinned by version and checksum, and runs nothing of them. Of
their files, those that people wrote become documents, but for near copies of others. They are in
the order of their checksums, so each part of the text is a sample of the whole. Writes
text_000.jsonl.xz and so on, and packages.json: each package's licence, documents and bytes. The
same packages give the same files, if xz is of the same version. It takes some minutes, and 2 GB of
disk meanwhile.
"""

import argparse
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from functools import partial
from hashlib import blake2b, sha256
from heapq import nsmallest
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZipFile

PACKAGES = Path(__file__).with_name("packages.txt")
PLATFORM = ("--python-version", "3.12", "--platform", "macosx_14_0_arm64")
"""The same one everywhere; its wheels have no libraries for GPUs."""
SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".rst", ".md", ".txt", ".c", ".h", ".cc", ".cpp", ".hpp")
SMALLEST, LARGEST = 200, 2**19
"""Bytes of a file that becomes a document: most larger files are tables, or a program's."""
GENERATED = re.compile(r"generated (by|from|code|file)|auto-?generated|do not (edit|modify)", re.I)
HEAD = 2000
"""A file says within so many characters that it is generated."""
SHARD = 2**27
"""Bytes of JSON in one file, before xz makes them fewer."""
RUN, SKETCH = 5, 16
"""Lines of a run, and runs that stand for a text."""


class Document(NamedTuple):
    """A file of a wheel. Documents are sorted by their checksums."""

    checksum: bytes
    wheel: int
    name: str


def main() -> int:
    """Download and build; return 0, or pip's exit code if it fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the text, a new one")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="a requirements file")
    told = parser.parse_args()
    if told.out.exists():
        parser.error(f"--out must be a new folder, but {told.out} exists")
    told.out.mkdir(parents=True)
    with TemporaryDirectory(dir=told.out) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        pip += ["--only-binary=:all:", *PLATFORM, f"--dest={wheels}", f"-r{told.packages}"]
        code = subprocess.run(pip).returncode
        if code == 0:
            build([ZipFile(path) for path in sorted(Path(wheels).glob("*.whl"))], told.out)
    return code


def build(wheels: Sequence[ZipFile], out: Path) -> None:
    """Write the documents of the wheels, and what each package gave."""
    documents = sorted(find_documents(wheels))
    with ThreadPoolExecutor() as pool:  # xz lets other threads run
        list(pool.map(partial(write_shard, out), count(), shards(records(wheels, documents))))
    told = []
    for i, wheel in enumerate(wheels):
        sizes = [wheel.getinfo(each.name).file_size for each in documents if each.wheel == i]
        told.append({**about(wheel), "documents": len(sizes), "bytes": sum(sizes)})
    content = json.dumps(told, indent=1, ensure_ascii=False)
    (out / "packages.json").write_text(f"{content}\n", encoding="utf-8")


def find_documents(wheels: Sequence[ZipFile]) -> Iterator[Document]:
    """Yield the files that become documents. In a near copy, half of the runs are known."""
    seen: set[bytes] = set()
    for number, wheel in enumerate(wheels):
        for info in wheel.infolist():
            if not info.filename.endswith(SUFFIXES) or not SMALLEST <= info.file_size <= LARGEST:
                continue
            try:
                text = wheel.read(info).decode()
            except UnicodeDecodeError:
                continue
            if is_written(text) and 2 * len(seen & (runs := sketch(text))) < len(runs):
                seen |= runs
                yield Document(sha256(text.encode()).digest(), number, info.filename)


def sketch(text: str) -> set[bytes]:
    """Return the smallest checksums of runs of lines: similar texts share most of them.

    Broder, "On the resemblance and containment of documents", 1997.
    """
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    runs = {"\n".join(lines[i : i + RUN]) for i in range(max(1, len(lines) - RUN + 1))}
    return set(nsmallest(SKETCH, (blake2b(run.encode(), digest_size=8).digest() for run in runs)))


def is_written(text: str) -> bool:
    """Tell whether people wrote a text: it is not generated, not minified and no table."""
    letters, digits = (sum(map(kind, text)) for kind in (str.isalpha, str.isdigit))
    return (
        not GENERATED.search(text[:HEAD])
        and max(map(len, text.splitlines())) <= 1000
        and letters >= 0.4 * len(text)
        and digits <= 0.2 * len(text)
    )


def records(wheels: Sequence[ZipFile], documents: Iterable[Document]) -> Iterator[bytes]:
    """Yield each document as a line of JSON."""
    for _, wheel, name in documents:
        record = {"text": wheels[wheel].read(name).decode(), "file": name}
        yield json.dumps(record, ensure_ascii=False).encode() + b"\n"


def shards(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines to parts of at most SHARD bytes."""
    part = bytearray()
    for line in lines:
        if len(part) + len(line) > SHARD:
            yield bytes(part)
            part.clear()
        part += line
    yield bytes(part)


def write_shard(out: Path, number: int, content: bytes) -> None:
    """Write one file of the text."""
    (out / f"text_{number:03}.jsonl.xz").write_bytes(lzma.compress(content))


def about(wheel: ZipFile) -> dict[str, str]:
    """Return the name, the version and the licence of a wheel's package."""
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    told = message_from_bytes(wheel.read(name))
    classes = [c.split(" :: ")[-1] for c in told.get_all("Classifier", []) if "License ::" in c]
    lines = str(told["License"] or "not named").splitlines()
    licence = told["License-Expression"] or ", ".join(classes) or lines[0]
    return {"package": told["Name"], "version": told["Version"], "licence": licence}


if __name__ == "__main__":
    sys.exit(main())
