"""The command lines of all packages: what they answer without torch, and tables of recipes."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from mezzo_core import __version__ as CORE
from mezzo_core.config_json import from_json, to_json
from mezzo_core.recipe_table import FILE, make_table, read_table
from mezzo_rat import __version__ as RAT

ROOT = Path(__file__).parents[1]
PAPERS = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__main__.py"))
RUN = """
import sys
from {package}.__main__ import main
for words in {lines!r}:
    try:
        main(words)
    except SystemExit as end:
        heavy = {{"torch", "numpy", "pyarrow", "matplotlib"}} & {{*sys.modules}}
        print("\\ncode", end.code, "imported", sorted(heavy), flush=True)
"""
OWN = {"mezzo_gsa": ["convert", "mqar"], "mezzo_recurrent_transformer": ["synthetic"]}


def answer(package, *lines):
    """Run commands in a process of their own; return what they print, after each its code."""
    code = RUN.format(package=package, lines=list(lines))
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    done = subprocess.run(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT
    )
    return done.stdout


@pytest.mark.parametrize("package", PAPERS)
def test_help_is_answered_without_torch(package):
    shown = answer(package, ["--help"])
    assert "code 0 imported []" in shown
    commands = re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)
    assert {"train", "generate", "eval", "recipes", "show", *OWN.get(package, ())} <= {*commands}
    assert "│ --version " in shown
    of_commands = answer(package, *([command, "--help"] for command in commands))
    assert of_commands.count("code 0 imported []") == len(commands), of_commands


ANSWERS = [
    (["--version"], f"mezzo-rat {RAT}, mezzo-core {CORE}, torch "),
    (["recipes", "1p3b"], "1p3b_16k_rat_swa"),
    (["trian"], "No such command 'trian'"),
    (["train", "--help"], "The highest learning rate"),
    (["train", "tiny_rat_l16", "--steos", "3"], "--steos"),
    (["train", "tiny_rat_l16", "--lr", "fast"], "Invalid value for '--lr'"),
    (["reproduce", "--help"], "cpu (the default), smoke"),
    (["train", "tiny_rat_l61"], "did you mean tiny_rat_l64, tiny_rat_l16"),
    (["show", "tiny_rat_l61"], "did you mean tiny_rat_l64, tiny_rat_l16"),
    (["generate", "runs/x", "--tempature", "1"], "--tempature"),
    (["recipes", "huge"], "no recipe's name has 'huge' in it"),
]


@pytest.fixture(scope="module")
def answers():
    """What one process prints for each of these words, and what it has imported until then."""
    shown = answer("mezzo_rat", *(words for words, _ in ANSWERS))
    parts = re.findall(r"(.*?)^code \d (imported .*?)$", shown, re.DOTALL | re.MULTILINE)
    return {" ".join(words): part for (words, _), part in zip(ANSWERS, parts, strict=True)}


@pytest.mark.parametrize(("words", "said"), ANSWERS)
def test_what_needs_no_model_is_answered_without_torch(answers, words, said):
    shown, imported = answers[" ".join(words)]
    assert said in shown
    assert imported == "imported []"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mezzo-rat tra", ["train"]),
        ("mezzo-rat train tiny_rat", ["tiny_rat_l64", "tiny_rat_l16", "tiny_rat_swa"]),
        ("mezzo-rat show tiny_att", ["tiny_attention", "tiny_attention_swa"]),
    ],
)
def test_a_shell_completes_commands_and_recipes(words, offered):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "mezzo_rat"],
        env={**os.environ, "_MEZZO_RAT_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout.split() == offered, done.stderr


@pytest.mark.parametrize("package", PAPERS)
def test_every_recipe_bears_its_name_and_its_model_comes_back_from_a_file(package):
    for name, recipe in import_module(f"{package}.recipes").RECIPES.items():
        config = recipe()
        assert config.name == name
        assert from_json(to_json(config.model)) == config.model, name


@pytest.mark.parametrize("package", PAPERS)
def test_the_table_of_recipes_is_that_of_the_recipes(package):
    module = import_module(f"{package}.recipes")
    found = read_table(Path(module.__file__).with_name(FILE))
    assert found == make_table(module.RECIPES, module.SUMMARIES), (
        f"python -m mezzo_core.recipe_table {package} writes it anew"
    )
    assert all(row.what for row in found)


@pytest.mark.parametrize("package", PAPERS)
def test_lazy_names_are_those_that_type_checkers_see(package):
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    (checked,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in checked for alias in node.names}
    assert sorted(seen) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name, place in seen.items():
        assert getattr(module, name) is getattr(import_module(place), name)
    assert module.ops is import_module(f"{package}.ops")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(module, "Nothing")  # noqa: B009 (the name is what is tested)
