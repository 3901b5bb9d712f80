"""What READMEs and the site tell a reader to type works as written, from top to bottom of a page.

A page's blocks run in their order, in one folder and with one set of names. Blocks of `python`,
`bash` and `console` run; of a `console` block the output is compared too. Blocks of `sh` and
indented ones hold commands that need a GPU, a network or hours: these are parsed, with their
recipes and ids, but not run.
"""

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
import yaml
from mezzo_core.reproduction.published import load_published

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
READMES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("packages/*/README.md"))
SITE = sorted(ROOT.glob("docs/**/*.md"))  # some are links to files elsewhere
OWN_PAGES = [path for path in SITE if not path.is_symlink()]
PAGES = {str(path.relative_to(ROOT)): path for path in (*READMES, *OWN_PAGES)}
PROGRAMS = {
    name: entry.partition(":")[0]
    for path in ROOT.glob("packages/**/pyproject.toml")
    for name, entry in tomllib.loads(path.read_text())["project"].get("scripts", {}).items()
}
WITH_DEMO = ("rat", "gsa", "recurrent-transformer", "drt")
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENTS = WORKSPACE["tool"]["hatch"]["envs"]
FENCE = re.compile(r"```([\w-]*).*")
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[-+]\d+)?")


WORKFLOWS = {
    str(path.relative_to(ROOT)): yaml.safe_load(path.read_text())
    for path in sorted(ROOT.glob(".github/workflows/*.yml"))
}


class Block(NamedTuple):
    """A block of code; the language of an indented one is empty."""

    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    lines = iter(page.splitlines())
    before = ""
    for line in lines:
        if fence := FENCE.fullmatch(line):
            inside = iter(lambda: next(lines), "```")
            yield Block(fence[1], "\n".join(inside))
        elif line.startswith("    ") and not before:
            inside = [line]
            for line in lines:
                if not line.startswith("    "):
                    break
                inside.append(line)
            yield Block("", "\n".join(part[4:] for part in inside))
        before = line


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a block; those of a console begin with a dollar."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language != "console":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


FOUND = {name: list(blocks(path.read_text(encoding="utf-8"))) for name, path in PAGES.items()}
TYPED = [
    (name, command)
    for name, found in FOUND.items()
    for block in found
    if block.language in ("", "bash", "console", "sh")
    for command in commands(block)
    if command.strip()
] + [
    (name, command)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
    for command in step.get("run", "").splitlines()
]


@pytest.fixture
def application(monkeypatch) -> Callable[[str], typer.Typer]:
    """Give a program's command line, by the program's name."""
    monkeypatch.syspath_prepend(ROOT / "packages/core/tests/smallest/src")

    def find(program: str) -> typer.Typer:
        kept: list[typer.Typer] = []
        main = import_module(PROGRAMS[program]).main
        with monkeypatch.context() as patch:
            patch.setattr(typer.Typer, "__call__", lambda app, **_: kept.append(app))
            with pytest.raises(SystemExit):
                main([])
        return kept[0]

    return find


def words_of(command: str) -> list[str]:
    """Split a command, without the variables before it and the comment behind it."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def check_mezzo(words: list[str], application: Callable[[str], typer.Typer]) -> None:
    """Parse a command of a package, and look up the recipe or the ids that it names."""
    program, command = words[:2]
    group = typer.main.get_command(application(program))
    _, found, rest = group.resolve_command(group.make_context(program, words[1:]), words[1:])
    given = found.make_context(command, list(rest)).params
    package = PROGRAMS[program].removesuffix(".__main__")
    if command == "train" and program != "mezzo-smallest":
        assert words[2] in import_module(f"{package}.recipes").RECIPES
    if command == "reproduce":
        paper = load_published(
            Path(import_module(package).__file__).parent / "reproduction/published.toml"
        )
        known = {each.id for each in (*paper.tables, *paper.claims)}
        assert set(given["ids"] or ()) <= known


def check_python(words: list[str], application: Callable[[str], typer.Typer]) -> None:
    """Look for the file that Python runs, or parse the arguments of the module."""
    if words[0] == "-m":
        module = words[1]
        if module.endswith(".train"):
            program = next(p for p, m in PROGRAMS.items() if m.startswith(module[:-5]))
            check_mezzo([program, "train", *words[2:]], application)
        elif module.startswith("mezzo_$"):  # a package that a release's tag names
            for package in WITH_DEMO:
                check_mezzo([f"mezzo-{package}", *words[2:]], application)
        else:
            assert module == "venv", module
    else:
        assert (ROOT / words[0]).is_file(), words[0]


def check_hatch(words: list[str], application: Callable[[str], typer.Typer]) -> None:
    """Look up hatch's script, environment or tests."""
    command, *rest = words
    if command == "run":
        environment, _, script = rest[0].rpartition(":")
        known = ENVIRONMENTS[environment or "default"]["scripts"]
        assert script in known or script in ("pytest", "python"), script
    else:
        assert command in ("test", "build", "version", "env"), command
        folders = [word for word in rest if word.startswith("packages/")]
        assert all((ROOT / folder).is_dir() for folder in folders), folders


def check_pip(words: list[str], application: Callable[[str], typer.Typer]) -> None:
    """Look up the folder and the extras of each of our packages that pip installs."""
    assert words[0] == "install"
    for word in words[1:]:
        path, _, extras = word.rstrip("]").partition("[")
        name = path.removeprefix("./").replace("mezzo-", "packages/").replace("-", "_")
        if name.startswith("packages/"):
            project = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
            assert not extras or extras in project["optional-dependencies"], word


CHECKS = {
    "hatch": check_hatch,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    # Options of torchrun stand before -m.
    "torchrun": lambda words, app: check_python(words[words.index("-m") :], app),
    "cd": lambda words, app: None,
    "export": lambda words, app: None,
    "git": lambda words, app: None,
    "pre-commit": lambda words, app: None,
}


@pytest.mark.parametrize(("page", "command"), TYPED)
def test_every_command_is_one_that_exists(page, command, application):
    for part in command.split("&&"):
        words = words_of(part)
        if words and words[0] in PROGRAMS:
            check_mezzo(words, application)
        elif words:
            CHECKS[words[0].rpartition("/")[2]](words[1:], application)


def run_command(command: str, capsys) -> str:
    """Run a command of a package in this process; return what it prints."""
    words = words_of(command)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        import_module(PROGRAMS[words[0]]).main(words[1:])
    printed = capsys.readouterr()
    assert not end.value.code, f"{command}\n{printed.out}{printed.err}"
    return printed.out


def pattern(line: str) -> str:
    """Return a line without its numbers, and with one space between words."""
    return " ".join(NUMBER.sub("0", line).split())


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def assert_alike(shown: str, printed: str) -> None:
    """Assert that each shown line was printed, in this order, its numbers up to 2%."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        found = next((other for other in lines if pattern(other) == pattern(line)), None)
        assert found is not None, f"not printed: {line}\n{printed}"
        assert numbers(found) == pytest.approx(numbers(line), rel=0.02)


def run_console(text: str, capsys) -> None:
    """Run each command of a console block, and compare its output with what is shown."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        assert_alike(shown, run_command(command, capsys))


RUN = ("python", "bash", "console")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p, found in FOUND.items() if {b[0] for b in found} & {*RUN}]
)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "packages/core/tests/smallest/src")
    torch.compiler.reset()  # what other tests compiled
    names = {"__name__": "page"}
    for block in FOUND[page]:
        if block.language == "python":
            exec(compile(block.text, f"<{page}>", "exec"), names)
        elif block.language == "console":
            run_console(block.text, capsys)
        elif block.language == "bash":
            for command in commands(block):
                if words_of(command)[:1] and words_of(command)[0] in PROGRAMS:
                    run_command(command, capsys)


def test_workflows_test_what_hatch_does_and_hold_no_secret():
    matrix = WORKFLOWS[".github/workflows/tests.yml"]["jobs"]["tests"]["strategy"]["matrix"]
    (of_hatch,) = ENVIRONMENTS["hatch-test"]["matrix"]
    assert matrix["versions"] == of_hatch["versions"]
    called = {command for page, command in TYPED if page in WORKFLOWS}
    url = '--url "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"'
    built = f'hatch run wheels:build "$GITHUB_REF_NAME" {url}'
    assert {"hatch run docs:build", built} <= called
    for name in WORKFLOWS:
        assert "secrets." not in (ROOT / name).read_text()


def test_blocks_of_each_kind_are_found():
    page = "a\n\n    one\n    two\n\n```python\nx = 1\n```\n\n```sh\nthree\n```\n- b\n    no\n"
    assert list(blocks(page)) == [
        Block("", "one\ntwo"),
        Block("python", "x = 1"),
        Block("sh", "three"),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "mezzo-rat train tiny_rat",
        "mezzo-rat train tiny_rat_l16 --step 3",
        "mezzo-rat reproduce rat.claim.nothing",
        "hatch run docs:nothing",
        "python examples/nothing.py",
        "pip install ./packages/rat[nothing]",
        "torchrun -m mezzo_rat.train nothing",
        "nothing at all",
    ],
)
def test_a_command_that_does_not_exist_is_found(command, application):
    with pytest.raises(Exception):  # noqa: B017, PT011
        test_every_command_is_one_that_exists("page", command, application)


def test_shown_output_must_be_what_is_printed():
    assert_alike("loss 1.01 of run\nend", "start\nloss 1.00 of run\nend")
    for shown in ("loss 2.00 of run", "loss 1.00 of walk", "end\nloss 1.00 of run"):
        with pytest.raises(AssertionError):
            assert_alike(shown, "loss 1.00 of run\nend")


def links(page: Path) -> list[str]:
    """Return the files that a page links, without code and addresses of the web."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)


@pytest.mark.parametrize("page", [*READMES, *SITE], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_links_exist(page):
    """A figure in a page of results needs a link in docs/: tools/check_results.py --figures."""
    for link in links(page):
        assert (page.parent / link).exists(), link


def test_the_sites_menu_has_every_page():
    with (ROOT / "zensical.toml").open("rb") as file:
        menu = tomllib.load(file)["project"]["nav"]
    listed = re.findall(r"'([\w/]+\.md)'", str(menu))
    assert sorted(listed) == [str(path.relative_to(ROOT / "docs")) for path in SITE]


IDENTIFIERS = re.findall(r"^::: (\S+)$", "".join(p.read_text() for p in PAGES.values()), re.M)


def test_what_the_reference_documents_exists_and_every_op_stands_in_it():
    for identifier in IDENTIFIERS:
        module, _, name = identifier.rpartition(".")
        assert getattr(import_module(module), name).__doc__, identifier
    for package in ("mezzo_rat", "mezzo_gsa", "mezzo_recurrent_transformer", "mezzo_drt"):
        ops = import_module(f"{package}.ops")
        public = {n for n, op in vars(ops).items() if callable(op) and not isinstance(op, type)}
        functions = {n for n in public if not n.startswith("_") and n[0].islower()}
        documented = {i.rpartition(".")[2] for i in IDENTIFIERS}
        assert functions <= documented, functions - documented


def test_files_that_a_page_shows_are_as_shown():
    shown = re.findall(
        r'^```\w+ title="(packages/[^"]+)"\n(.*?)^```$',
        (ROOT / "docs/add_a_mixer.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert len(shown) == 3
    for name, text in shown:
        assert (ROOT / name).read_text() == text, name


def test_what_troubleshooting_explains_are_our_messages():
    """A message in the sources with a dot for each value has each heading's words."""
    messages = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                messages.add(re.sub("…+", "…", "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages.add(node.value)
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(headings) >= 20
    missing = [h for h in headings if not any(h.strip("…") in message for message in messages)]
    assert not missing
