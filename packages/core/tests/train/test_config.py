import math
import reprlib
from dataclasses import fields

import pytest
from mezzo_core.config_json import from_json, to_json
from mezzo_core.errors import UserError
from mezzo_core.train.config import OptimConfig, TrainConfig, Training
from mezzo_core.train.recipes import AbstractHyperparameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", -1e-3),
        ("lr", math.nan),
        ("min_lr", -1e-9),
        ("min_lr", 1.0),
        ("warmup_fraction", 1.5),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("weight_decay", -0.1),
        ("clip", 0.0),
        ("lr", "1e-3"),
        ("lr", True),
        ("lr", None),
        pytest.param("lr", 10**400, id="lr-of-400-digits"),
        ("min_lr", "0"),
        ("warmup_fraction", None),
        ("weight_decay", math.inf),
        ("betas", 0.9),
        ("betas", ("0.9", 0.9)),
    ],
)
def test_an_impossible_optimizer_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"^(\w+\.)?{field}(\[\d\])? (must|is too)") as error:
        OptimConfig(**{field: value})
    assert "got " in str(error.value) or str(value)[:20] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", " "),
        ("seq_len", 0),
        ("batch_size", 0),
        ("micro_batch_size", 3),
        ("micro_batch_size", 0),
        ("steps", 0),
        ("seed", -1),
        ("eval_every", 0),
        ("eval_batches", 0),
        ("stop_at_accuracy", 1.5),
        ("stop_at_accuracy", math.nan),
        ("stop_at_accuracy", "0.9"),
        ("checkpoint_every", 0),
        ("keep_checkpoints", 0),
        ("precision", "fp8"),
        ("track", "paper"),
        ("steps", True),
        ("steps", "3"),
        ("steps", 1.5),
        ("steps", math.inf),
        ("steps", 2**31),
        ("batch_size", None),
        ("eval_batches", 0.5),
        ("micro_batch_size", 2.0),
        ("seed", 2**64),
        ("seed", 0.0),
        ("name", 3),
        ("name", None),
        ("model", None),
        ("data", "words.txt"),
        ("optim", 1e-3),
        ("compile", "no"),
        ("shard", "auto"),
        ("activation_checkpointing", 1),
        ("precision", []),
        ("init_from", 7),
    ],
)
def test_an_impossible_run_is_refused_by_name(tiny, field, value):
    with pytest.raises(UserError, match=rf"^(\w+\.)?{field}(\[\d\])? (must|is too)") as error:
        tiny(**{field: value})
    assert reprlib.repr(value) in str(error.value)


def test_a_configuration_survives_json(tiny):
    config = tiny(optim=OptimConfig(clip=2.0, betas=(0.9, 0.98)))
    assert from_json(to_json(config)) == config


def test_hyperparameters_set_all_that_a_training_has(tiny):
    """What two architectures share may be any of it."""
    config = tiny(seed=3, stop_at_accuracy=0.5, keep_checkpoints=7, track="tensorboard")
    training = {field.name: getattr(config, field.name) for field in fields(Training)}
    shared = AbstractHyperparameters(vocab_size=17, d_model=8, **training)
    assert shared.run(config.name, config.model) == config
    assert {field.name for field in fields(TrainConfig)} == {*training, "name", "model"}
    with pytest.raises(UserError, match="steps must be"):
        AbstractHyperparameters(vocab_size=17, d_model=8, **{**training, "steps": 0})
