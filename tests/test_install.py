"""Each package builds a wheel that works on its own: no checkout, nothing that it does not say."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("core", "rat"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        done = subprocess.run(
            command, cwd=ROOT / "packages" / name, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return {wheel.name.split("-")[0]: wheel for wheel in folder.glob("*.whl")}


def unpack(folder: Path, *wheels: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def run(code: str, site: Path, blocked: tuple[str, ...] = ()) -> str:
    """Run code where mezzo comes from `site` alone and `blocked` packages cannot be imported."""
    guard = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", guard + code],
        env=env,
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = ("datasets", "transformers", "safetensors", "tokenizers", "typer", "rich", "matplotlib")


def test_core_alone_gives_ops_and_layers_with_torch_only(wheels, tmp_path):
    unpack(tmp_path, wheels["mezzo_core"])
    code = """
import torch, mezzo_core
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.ops.linear_scan import linear_scan
mixers = (AttentionConfig(head_dim=8),)
model = LMConfig(vocab_size=11, d_model=16, mixers=mixers, mlp=MLPConfig()).build()
assert model(torch.zeros(1, 5, dtype=torch.int64)).logits.shape == (1, 5, 11)
print(mezzo_core.__file__)
"""
    assert run(code, tmp_path, (*HEAVY, "mezzo_rat")).startswith(str(tmp_path))


def test_rat_works_with_only_core_beside_it(wheels, tmp_path):
    unpack(tmp_path, wheels["mezzo_core"], wheels["mezzo_rat"])
    code = """
import torch, mezzo_rat
y, _ = mezzo_rat.RATConfig(chunk_size=4, head_dim=8).build(16)(torch.randn(1, 10, 16))
assert y.shape == (1, 10, 16)
print(mezzo_rat.__file__)
"""
    assert run(code, tmp_path, HEAVY).startswith(str(tmp_path))


def test_the_wheels_hold_what_the_commands_need(wheels):
    names = {name: zipfile.ZipFile(path).namelist() for name, path in wheels.items()}
    assert any(name.endswith("austen.txt.xz") for name in names["mezzo_core"])
    assert "mezzo_rat/published.toml" in names["mezzo_rat"]
    assert any(name.endswith("entry_points.txt") for name in names["mezzo_rat"])
    for listing in names.values():
        assert any(name.endswith("LICENSE") for name in listing)
        assert any(name.endswith("py.typed") for name in listing)
        assert not any("/tests/" in name or "/results/" in name for name in listing)


def test_the_commands_say_what_is_missing_when_only_the_layers_are_installed(wheels, tmp_path):
    unpack(tmp_path, wheels["mezzo_core"], wheels["mezzo_rat"])
    code = """
try:
    from mezzo_rat.__main__ import main
    main(["--help"])
except SystemExit as stop:
    print(stop.code)
"""
    message = run(code, tmp_path, ("typer",))
    assert "pip install 'mezzo-rat[train]'" in message


def test_versions_agree_with_the_code(wheels):
    for name in ("mezzo_core", "mezzo_rat"):
        version = wheels[name].name.split("-")[1]
        assert f"## {version}" in (ROOT / f"packages/{name[6:]}/CHANGELOG.md").read_text()
