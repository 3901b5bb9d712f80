"""Each package builds a wheel that works on its own: no checkout, nothing that it does not say."""

import inspect
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mezzo_core.config_json import MARKER

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
PAPERS = [folder.name for folder in FOLDERS if folder.name != "core"]
PRINTED = "reproduction/published.toml"
WITH_CLAIMS = sorted(path.parents[3].name for path in ROOT.glob(f"packages/*/src/*/{PRINTED}"))


def module(paper: str) -> str:
    """Return the name under which a paper's package is imported."""
    return f"mezzo_{paper}"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for package in FOLDERS:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return {wheel.name.split("-")[0]: wheel for wheel in folder.glob("*.whl")}


def unpack(folder: Path, *wheels: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


FORK = """
import json, os, sys, torch
for site, blocked, code in json.load(sys.stdin):
    if os.fork() == 0:
        sys.path.insert(0, site)
        sys.modules.update(dict.fromkeys(blocked))
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{site} failed")
    print("END")
    sys.stdout.flush()
"""
"""Torch is imported once for all parts; after a fork, each is alone."""


def run(*parts: tuple[str, Path, tuple[str, ...]]) -> list[str]:
    """Run code where mezzo comes from a folder alone and the packages named cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        input=json.dumps([(str(site), blocked, code) for code, site, blocked in parts]),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=parts[0][1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [told.strip() for told in done.stdout.split("END\n")[:-1]]


HEAVY = ("datasets", "transformers", "safetensors", "tokenizers", "typer", "rich", "matplotlib")


CORE_ALONE = """
import torch, mezzo_core
from mezzo_core.reproduction import Result, measure
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.ops.attention import attention
mixers = (AttentionConfig(head_dim=8),)
model = LMConfig(vocab_size=11, d_model=16, mixers=mixers, mlp=MLPConfig()).build()
assert model(torch.zeros(1, 5, dtype=torch.int64)).logits.shape == (1, 5, 11)
print(mezzo_core.__file__)
"""


def layers_and_help(wheels, folder, paper):
    """Return what runs with only core and one paper: its code, folder, and what is not there."""
    name = module(paper)
    unpack(folder, wheels["mezzo_core"], wheels[name])
    others = tuple(module(other) for other in PAPERS if other != paper)
    layers = (ROOT / "packages" / paper / "tests/layers.txt").read_text().splitlines()
    code = f"""
import torch, {name}
for layer in {layers}:
    y, _ = eval("{name}." + layer).build(64)(torch.randn(1, 10, 64))
    assert y.shape == (1, 10, 64)
print({name}.__file__)
try:
    from {name}.__main__ import main
    main(["--help"])
except SystemExit as stop:
    print(stop.code)
"""
    return code, folder, (*HEAVY, *others)


def test_with_torch_only_core_and_papers_have_layers_and_commands_say_what_is_missing(
    wheels, tmp_path
):
    """Core alone; then each paper with core."""
    unpack(tmp_path / "core", wheels["mezzo_core"])
    core = CORE_ALONE, tmp_path / "core", (*HEAVY, *map(module, PAPERS))
    papers = (layers_and_help(wheels, tmp_path / paper, paper) for paper in PAPERS)
    first, *told = run(core, *papers)
    assert first.startswith(str(tmp_path / "core"))
    for paper, words in zip(PAPERS, told, strict=True):
        place, message = words.split("\n", 1)
        assert place.startswith(str(tmp_path / paper))
        assert f"pip install '{module(paper).replace('_', '-')}[train]'" in message


def test_the_wheels_hold_what_the_commands_need(wheels):
    names = {name: zipfile.ZipFile(path).namelist() for name, path in wheels.items()}
    assert any(name.endswith("austen.txt.xz") for name in names["mezzo_core"])
    for paper in PAPERS:
        package = module(paper)
        assert (f"{package}/{PRINTED}" in names[package]) == (paper in WITH_CLAIMS)
        assert any(name.endswith("entry_points.txt") for name in names[package])
        results = {name for name in names[package] if "/results/" in name}
        folder = ROOT / "packages" / paper / "results"
        committed = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.json*")}
        assert results == {f"{package}/results/{name}" for name in committed}
    for package, listing in names.items():
        assert f"{package}/{MARKER}" in listing  # so that any saved model may name its classes
        assert any(name.endswith("LICENSE") for name in listing)
        assert any(name.endswith("py.typed") for name in listing)
        assert not any("/tests/" in name for name in listing)


def answers(package):
    """Return what a paper's counts and committed results say: id, how, outcome and summary."""
    from importlib import import_module

    findings = import_module(f"{package}.reproduction.claims").REPRODUCTION.committed()
    return [[each.id, each.how, each.outcome, each.summary] for each in findings]


def test_installed_papers_give_the_answers_of_the_checkout(wheels, tmp_path):
    unpack(tmp_path, *wheels.values())
    names = [module(paper) for paper in WITH_CLAIMS]
    code = f"import json\n{inspect.getsource(answers)}print(json.dumps([*map(answers, {names})]))"
    for paper, installed in zip(WITH_CLAIMS, json.loads(*run((code, tmp_path, ()))), strict=True):
        assert installed == json.loads(json.dumps(answers(module(paper)))), paper
        measured = (ROOT / "packages" / paper / "results/nvidia-h200").exists()
        assert any("nvidia-h200/" in summary for *_, summary in installed) == measured


def test_a_changelog_begins_with_what_is_unreleased_or_with_the_version(wheels):
    for name in ("core", *PAPERS):
        version = wheels[module(name)].name.split("-")[1]
        changelog = (ROOT / f"packages/{name}/CHANGELOG.md").read_text()
        first = next(line for line in changelog.splitlines() if line.startswith("## "))
        assert first == "## Unreleased" or first.startswith(f"## {version} ("), first
