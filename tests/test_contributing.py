"""What CONTRIBUTING says of a new paper is true: each template, in the model that it names."""

import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a mixer")[1].split("## ")[0]
ROWS = re.findall(r"^\| (\w+) \| .* \| `(packages/.*\.py)` \| `(LMConfig\(.*\))` \|$", TABLE, re.M)


def test_there_is_a_template_of_each_size():
    assert [size for size, _, _ in ROWS] == ["mixer", "block", "stack"]


@pytest.mark.parametrize(("size", "template", "model"), ROWS)
def test_a_template_makes_the_model_that_its_row_writes(size, template, model):
    module = import_module(f"toys.{Path(template).stem}")
    own = [value for value in vars(module).values() if is_dataclass(value)]
    (config,) = (cls for cls in own if cls.__module__ == module.__name__)
    code = model.replace("LMConfig(", "LMConfig(vocab_size=37, d_model=8, ").replace("12", "2")
    built = eval(code, {"LMConfig": LMConfig, "BlocksConfig": BlocksConfig, "YourConfig": config})
    tokens = torch.randint(37, (2, 9))
    loss = built.build().loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.isfinite()


def test_files_that_it_names_exist():
    for name in re.findall(r"`((?:packages|tools|tests)/[\w/.]+\.py)`", TABLE):
        assert (ROOT / name).exists(), name
