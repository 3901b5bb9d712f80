"""What the README tells a reader to type works as written."""

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]
READMES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *ROOT.glob("packages/*/*.md"))
}
MEZZO_COMMANDS = {
    name: [
        line
        for block in blocks("bash", text)
        for line in block.splitlines()
        if line.startswith("mezzo-")
    ]
    for name, text in READMES.items()
}


@pytest.mark.parametrize("code", blocks("python", "".join(READMES.values())))
def test_python_examples_run(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("readme", [name for name, found in MEZZO_COMMANDS.items() if found])
def test_commands_run_in_the_order_given(tmp_path, monkeypatch, readme):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # what other tests compiled
    for command in MEZZO_COMMANDS[readme]:
        name, *words = shlex.split(command)
        (installed,) = entry_points(group="console_scripts", name=name)
        with pytest.raises(SystemExit) as end:
            installed.load()(words)
        assert end.value.code == 0, command


def test_there_are_commands_to_run():
    assert len(MEZZO_COMMANDS["README.md"]) >= 3
    assert len(MEZZO_COMMANDS["packages/gsa/README.md"]) >= 3


def test_the_two_commands_are_the_workspaces_own():
    first, second = (line for line in COMMANDS if "hatch " in line)
    assert first.endswith("&& hatch run reproduce")
    assert second.endswith("&& hatch test")
    assert second.split("&& ")[1] in (ROOT / ".ci/run").read_text()
    workspace = (ROOT / "pyproject.toml").read_text()
    assert 'reproduce = "python tools/reproduce.py {args}"' in workspace


def test_files_and_folders_that_it_names_exist():
    for name in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / name).exists(), name
