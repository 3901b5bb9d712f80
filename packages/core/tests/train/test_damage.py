"""Every file of a run, damaged: one clear line, or the run as it would have been."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.testing.damage import damages, json_damages
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train


@pytest.fixture(scope="module")
def begun(corpus, tmp_path_factory, train_until):
    """A run of five steps that ended after the fourth, and the weights that the fifth gives."""
    config = TrainConfig(
        name="tiny",
        model=LMConfig(vocab_size=257, d_model=8, mixers=(AttentionConfig(head_dim=8),)),
        data=DataConfig(source=str(corpus)),
        seq_len=16,
        batch_size=2,
        steps=5,
        eval_every=10,
        eval_batches=1,
        checkpoint_every=2,
    )
    out = tmp_path_factory.mktemp("begun") / "run"
    train_until(config, out, 5)
    return out, config, weights_after(config, out)


def weights_after(config, out, damaged="", content=b""):
    """Go on with a copy of a run, in which a file may be another; return the weights at its end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(out, copy)
        if damaged:
            (copy / damaged).write_bytes(content)
        train(config, copy, quiet=True)
        return load_model(copy / "model")[0].state_dict()


def forms_of(name, content):
    """Return damaged forms of a file: some, or with a thorough profile of hypothesis many."""
    rng = random.Random(name)
    forms = [*damages(content, rng)]
    if name.endswith(".json"):
        forms += json_damages(content)
    return rng.sample(forms, min(len(forms), max(2, settings().max_examples // 40)))


def test_a_damaged_file_of_a_run_is_named_or_costs_nothing(begun):
    out, config, expected = begun
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert {"config.json", "log.jsonl", "corpus.json"} <= {str(file) for file in files}
    faults = []
    for file in files:
        content = (out / file).read_bytes()
        for form in forms_of(file.name, content) if content else []:
            told = f"{file}: {form.what}"
            try:
                got = weights_after(config, out, file, form.content)
            except UserError as error:
                if "\n" in str(error):
                    faults.append(f"{told}: {error}")
            except Exception as error:
                faults.append(f"{told}: {type(error).__name__}: {error}")
            else:
                if any(not torch.equal(got[key], value) for key, value in expected.items()):
                    faults.append(f"{told}: other weights")
    assert not faults, "\n".join(faults)
