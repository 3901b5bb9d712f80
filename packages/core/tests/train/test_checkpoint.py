"""Checkpoints: what is saved is loaded, and what was damaged is not."""

import json
import os

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.optim import build_optimizer
from torch import nn

FILES = ["checkpoint.json", "index.json", "process-0.json", "state/process-0.safetensors"]


def test_what_is_saved_is_what_is_loaded(checkpoints, tiny):
    def trained(seed):
        torch.manual_seed(seed)
        config = tiny()
        model = config.model.build()
        optimizer = build_optimizer(model, config.optim)
        tokens = torch.randint(257, (2, 16))
        model.loss(tokens, tokens).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    checkpoints.save(7, model, optimizer, {"place": 3})
    drawn = torch.rand(3)
    other, other_optimizer = trained(1)
    resumed = checkpoints.load(other, other_optimizer)
    assert resumed == (7, {"place": 3})
    assert torch.equal(torch.rand(3), drawn)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq"):
            saved = optimizer.state[mine][key]
            assert saved.abs().sum() > 0
            assert torch.equal(saved, other_optimizer.state[theirs][key])
        assert other_optimizer.state[theirs]["step"] == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_every_type_and_layout_come_back(checkpoints, dtype):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 5, dtype=dtype)
        model.weight = nn.Parameter(torch.randn(3, 5, dtype=dtype).t())  # not contiguous
        model.register_buffer("scalar", torch.randn((), dtype=torch.float64))
        model.register_buffer("flags", torch.rand(3) > 0.5)
        model.register_buffer("nothing", torch.empty(0, 4))
        model.tied = nn.Linear(3, 5, bias=False)
        model.tied.weight = model.weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(0)
    checkpoints.save(1, model, optimizer, {})
    stored = json.loads((checkpoints.folder / "step-1" / "index.json").read_text())
    assert "model.weight" in stored
    assert "model.tied.weight" not in stored
    other, other_optimizer = build(1)
    checkpoints.load(other, other_optimizer)
    assert other.tied.weight is other.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_shards_are_safetensors_that_anybody_can_read(checkpoints, small):
    from safetensors.torch import load_file

    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    stored = load_file(checkpoints.folder / "step-1" / "state" / "process-0.safetensors")
    assert torch.equal(stored["model.weight"], model.weight)
    assert torch.equal(stored["optim.bias.exp_avg_sq"], optimizer.state[model.bias]["exp_avg_sq"])


def test_only_the_newest_stay(checkpoints, small):
    for step in (9, 10, 11):
        checkpoints.save(step, *small(0), {})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-10", "step-11"]
    assert checkpoints.newest().name == "step-11"


def test_without_a_checkpoint_there_is_nothing_to_load(checkpoints, small):
    assert checkpoints.load(*small(0)) is None
    assert checkpoints.describe_newest() == "there is no checkpoint yet"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["shorten", "remove", "replace by a folder"])
def test_a_checkpoint_with_a_lost_file_is_passed_over(checkpoints, small, name, damage):
    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    path = checkpoints.folder / "step-2" / name
    if damage == "shorten":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
        if damage != "remove":
            path.mkdir()
    assert checkpoints.newest().name == "step-1"
    assert checkpoints.load(model, optimizer).step == 1


@pytest.mark.parametrize("name", FILES)
def test_no_changed_byte_is_accepted(checkpoints, small, name, caplog):
    first, second = small(1), small(2)
    checkpoints.save(1, *first, {})
    checkpoints.save(2, *second, {})
    path = checkpoints.folder / "step-2" / name
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        caplog.clear()
        model, optimizer = small(3)
        steps = checkpoints.load(model, optimizer).step
        if steps == 2:  # a byte that means nothing, as a blank between two numbers of the marker
            assert name == "checkpoint.json"
            wanted, _ = second
        else:
            assert name in caplog.text
            assert "resuming from" in caplog.text
            wanted, _ = first
        assert torch.equal(model.weight, wanted.weight), place
        checkpoints = Checkpoints(checkpoints.folder, checkpoints.world, 2)


def test_only_damaged_checkpoints_are_no_fresh_start(checkpoints, small):
    for step in (1, 2):
        checkpoints.save(step, *small(0), {})
        shard = checkpoints.folder / f"step-{step}" / "state" / "process-0.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"no checkpoint in .*process-0\.safetensors") as error:
        checkpoints.load(*small(0))
    assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(checkpoints, small):
    checkpoints.keep = 1
    checkpoints.save(2, *small(0), {})
    (checkpoints.folder / "step-2").rename(checkpoints.folder / "kept")
    checkpoints.save(4, *small(0), {})
    (checkpoints.folder / "kept").rename(checkpoints.folder / "step-2")
    shard = checkpoints.folder / "step-4" / "state" / "process-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert checkpoints.load(*small(0)).step == 2
    checkpoints.save(3, *small(0), {})
    assert checkpoints.newest().name == "step-3"
    assert Checkpoints(checkpoints.folder, checkpoints.world, 1).load(*small(0)).step == 3
    checkpoints.save(4, *small(0), {})
    assert checkpoints.load(*small(0)).step == 4
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-4"]


def test_a_good_checkpoint_outlives_a_damaged_one_after_it(checkpoints, small):
    for step in (2, 4):
        checkpoints.save(step, *small(0), {})
    shard = checkpoints.folder / "step-4" / "state" / "process-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert checkpoints.load(*small(0)).step == 2
    checkpoints.save(5, *small(0), {})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-2", "step-5"]


def double(small, seed):
    model, optimizer = small(seed)
    for moments in optimizer.state.values():
        moments.update({key: value.double() for key, value in moments.items()})
    return model.double(), optimizer


def larger(small, seed):
    model, optimizer = small(seed)
    model.more = nn.Linear(1, 1, bias=False)
    return model, optimizer


def as_it_is(small, seed):
    return small(seed)


def wider(small, seed):
    return small(seed, width=4)


@pytest.mark.parametrize(
    ("saved", "loaded", "named"),
    [
        (as_it_is, wider, r"has model\.weight as float32 \(2, 3\), not float32 \(2, 4\)"),
        (as_it_is, double, r"has model\.weight as float32 \(2, 3\), not float64"),
        (as_it_is, larger, r"has no model\.more\.weight"),
        (larger, as_it_is, r"has 'model\.more\.weight' besides"),
    ],
)
def test_another_model_is_one_line_that_says_what_differs(checkpoints, small, saved, loaded, named):
    checkpoints.save(1, *saved(small, 0), {})
    checkpoints.save(2, *saved(small, 0), {})
    wanted = f"cannot resume from .*step-2: it holds another model: it .*{named}"
    with pytest.raises(UserError, match=wanted) as error:
        checkpoints.load(*loaded(small, 0))
    assert "\n" not in str(error.value)
