"""Every setting of a run has a flag, and every place in its configuration a name."""

from dataclasses import dataclass, fields, replace

import pytest
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.flag_table import OWN, PARTS, field_docs, make_flags
from mezzo_core.train.flags import FLAGS, apply_flags, with_flags
from mezzo_core.train.settings import apply_settings, describe_settings

PARTS_OF_PARTS = {"model", "data", "optim", "mixers", "mlp", "stack"}


def test_the_table_of_flags_is_that_of_the_configuration():
    assert tuple(make_flags()) == FLAGS, "python -m mezzo_core.train.flag_table writes it anew"


def value_at(config, place):
    for name in place.split("."):
        config = getattr(config, name)
    return config


def test_every_field_has_a_flag_or_is_a_part_that_has_fields():
    with_flag = {(flag.part, flag.field) for flag in FLAGS} | OWN
    for part, kind in PARTS.items():
        for field in fields(kind):
            assert ((part, field.name) in with_flag) != (field.name in PARTS_OF_PARTS), field.name
    assert len({flag.word for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("part", PARTS)
def test_every_field_is_described(part):
    assert set(field_docs(PARTS[part])) == {field.name for field in fields(PARTS[part])}
    for flag in FLAGS:
        assert 10 < len(flag.help) < 200, flag
        assert flag.help.endswith(".")


CHANGED = {bool: True, int: 2, float: 1e-3, str: "bf16"}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_flag_changes_its_field_alone(tiny, flag):
    value = CHANGED.get(flag.kind, (0.5, 0.5))
    words = {
        "track": "trackio",
        "keep_checkpoints": 5,
        "checkpoint_every": 5,
        "streaming": True,
        "eval_batches": 5,
    }
    value = words.get(flag.name, value)
    if value == value_at(tiny(), flag.path):
        value = not value
    found = apply_flags(tiny(), {flag.name: value})
    assert value_at(found, flag.path) == value
    part = value_at(found, flag.part) if flag.part else found
    before = value_at(tiny(), flag.part) if flag.part else tiny()
    assert replace(part, **{flag.field: value_at(before, flag.field)}) == before
    assert apply_flags(tiny(), {other.name: None for other in FLAGS}) == tiny()


def test_none_is_a_value(tiny):
    flag = next(flag for flag in FLAGS if flag.name == "eval_batches")
    option = flag.parameter().annotation.__metadata__[0]
    found = apply_flags(tiny(), {"eval_batches": option.parser("none")})
    assert (tiny().eval_batches, found.eval_batches) == (2, None)


@dataclass(frozen=True)
class Task:
    def build(self, seq_len, cache_dir, *, rank=0, world_size=1):
        raise NotImplementedError


def test_a_task_takes_no_flags_of_a_text(tiny):
    task = tiny(data=Task())
    assert apply_flags(task, {"lr": 1.0}).data == Task()
    with pytest.raises(UserError, match="the recipe tiny reads no text: --text-column"):
        apply_flags(task, {"text_column": "body"})


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("TrainConfig.seed must be int", "seed (--seed) must be int"),
        ("steps must be from 1", "steps (--steps) must be from 1"),
        ("diverged after 3 steps", "diverged after 3 steps"),
        ("a lower lr than 1 may help", "a lower lr (--lr) than 1 may help"),
        ("vocab_size = 1: --vocab-size 257 fits", "vocab_size = 1: --vocab-size 257 fits"),
        ("no setting is 'lr'", "no setting is 'lr'"),
        ("batch_size = 4, batch_size 5", "batch_size (--batch-size) = 4, batch_size 5"),
    ],
)
def test_a_message_names_the_flag_of_a_field(message, told):
    assert with_flags(message) == told


def hybrid(tiny):
    mixers = (AttentionConfig(head_dim=16), AttentionConfig(head_dim=16, window_size=8)) * 2
    return tiny(model=replace(tiny().model, mixers=mixers))


def test_all_settings_are_shown_with_their_flags(tiny):
    rows = describe_settings(hybrid(tiny))
    shown = {(place, value): flag for place, value, flag in rows}
    assert shown["optim.lr", "0.003"] == "--lr"
    assert shown["optim.betas", "0.9,0.95"] == "--betas"
    assert shown["model.mixers.head_dim", "16"] == "--set"
    assert shown["model.mixers.window_size", "none (0, 2)"] == "--set"
    assert shown["model.mixers.window_size", "8 (1, 3)"] == "--set"
    assert shown["model.mixers", "AttentionConfig"] == ""
    places = {place for place, _, _ in rows}
    assert {flag.path for flag in FLAGS} < places


def test_a_shown_setting_can_be_set_to_what_is_shown(tiny):
    config = hybrid(tiny)
    for place, value, flag in describe_settings(config):
        if flag and "(" not in value:
            assert apply_settings(config, [f"{place}={value}"]) == config, place


def test_a_setting_of_layers_changes_all_that_have_it(tiny):
    found = apply_settings(
        hybrid(tiny), ["model.mixers.head_dim=8", "model.mlp.kind=swiglu", "optim.betas=0.5,0.6"]
    )
    assert [mixer.head_dim for mixer in found.model.mixers] == [8] * 4
    assert [mixer.window_size for mixer in found.model.mixers] == [None, 8, None, 8]
    assert found.model.mlp == MLPConfig("swiglu")
    assert found.optim.betas == (0.5, 0.6)
