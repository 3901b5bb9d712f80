"""Several processes train the model that one would, and read each other's checkpoints."""

import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import Batch
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, BlocksConfig, LMConfig, MixerBlockConfig, MLPConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train import context
from mezzo_core.train.build import is_sharded, micro_batches
from mezzo_core.train.context import part_borders, sequence_part, share_sequence
from mezzo_core.train.distributed import World, join_world
from mezzo_core.train.loop import train


def assert_same_run(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=2e-6)
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert row["lr"] == wanted["lr"]


def assert_same_model(out, expected):
    weights, wanted = (load_model(run / "model")[0].state_dict() for run in (out, expected))
    assert weights.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(weights[name], wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_train_what_one_does(tiny, tmp_path, rows_of, train_in_processes):
    config = tiny(steps=10)
    one = train(config, tmp_path / "one", quiet=True)
    ended = train_in_processes(config, tmp_path / "two", size=2)
    assert [code for code, _ in ended] == [0, 0], ended
    assert_same_run(rows_of(tmp_path / "two"), rows_of(tmp_path / "one"))
    assert_same_model(tmp_path / "two", tmp_path / "one")
    found = rows_of(tmp_path / "two", "val_loss")[-1]
    assert found["val_loss"] == pytest.approx(one.val_loss, rel=2e-6)
    assert found["val_tokens"] == rows_of(tmp_path / "one", "val_loss")[-1]["val_tokens"]


@pytest.mark.slow
def test_packed_documents_and_micro_batches_are_shared_by_sharded_models_too(
    tiny, tmp_path, rows_of, train_in_processes
):
    corpus = tmp_path / "documents.jsonl"
    lines = [f'{{"text": "note {i} of {i * i} and {i % 7}"}}' for i in range(400)]
    corpus.write_text("\n".join(lines))
    data = tiny().data.__class__(source=str(corpus), mask_documents=True)
    config = tiny(data=data, micro_batch_size=1, steps=3, shard=True)
    train(config, tmp_path / "one", quiet=True)
    twice = [tmp_path / "two", tmp_path / "again"]
    ended = train_in_processes(config, os.pathsep.join(map(str, twice)), size=2)
    assert [code for code, _ in ended] == [0, 0], ended
    for out in twice:
        assert_same_run(rows_of(out), rows_of(tmp_path / "one"))


@pytest.mark.slow
def test_checkpoints_go_from_one_to_two_to_one_process(tiny, tmp_path, rows_of, train_in_processes):
    """By way of two copies and of a sharded model, each killed."""
    config = tiny(steps=8)
    train(config, tmp_path / "whole", quiet=True)
    out = tmp_path / "passed"
    (code, _), *_ = train_in_processes(config, out, 3, size=1)
    assert code == -signal.SIGKILL
    for step, shard in ((5, False), (7, True)):
        ended = train_in_processes(replace(config, shard=shard), out, step, size=2)
        assert [code for code, _ in ended] == [-signal.SIGKILL] * 2
        files = (out / "checkpoints").glob(f"step-{step - 1}/process-*")
        assert sorted(path.name for path in files) == ["process-0.json", "process-1.json"]
    train(config, out, quiet=True)
    assert_same_run(rows_of(out), rows_of(tmp_path / "whole"))
    assert_same_model(out, tmp_path / "whole")


@pytest.mark.slow
def test_a_lost_process_ends_the_others_with_one_line(tiny, tmp_path, train_in_processes):
    lost, left = reversed(train_in_processes(tiny(), tmp_path / "run", 3, 1, size=2))
    assert lost[0] == -signal.SIGKILL
    assert left[0] == 2, left[1]
    message = [line for line in left[1].splitlines() if line.startswith("UserError")]
    assert len(message) == 1
    assert "step-2" in message[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "stages", "parts"), [(1, "blocks", 3), (2, "blocks", 3), (2, "stack", 2)]
)
def test_gradients_are_exchanged_once_after_the_last_micro_batch(
    tiny, answers_of_processes, shared, stages, parts
):
    """Also where the two processes share each sequence, block by block or all blocks at once."""
    config = tiny(
        compile=stages == "blocks", activation_checkpointing=True, context_parallel=shared
    )
    answers, _ = answers_of_processes("exchange", config, stages, size=2)
    for found in answers:
        assert max(part["error"] for part in found.values()) < 1e-6
        assert found["False"]["exchanges"] == [0, 1]
        assert found["True"]["exchanges"] == [0, parts]  # of blocks, and of what is around them


def test_shares_must_be_whole(tiny):
    cpu = torch.device("cpu")
    assert micro_batches(tiny(), World(cpu, 0, 4)) == 1
    assert micro_batches(tiny(micro_batch_size=1), World(cpu, 0, 2)) == 2
    with pytest.raises(UserError, match="batch_size = 4 must be a multiple of the 3 processes"):
        micro_batches(tiny(), World(cpu, 0, 3))
    assert micro_batches(tiny(), World(cpu, 0, 8, context=2)) == 1
    with pytest.raises(UserError, match="multiple of the 6 processes / context_parallel = 2"):
        micro_batches(tiny(), World(cpu, 0, 6, context=2))
    with pytest.raises(UserError, match="micro_batch_size = 4 must divide"):
        micro_batches(tiny(micro_batch_size=4), World(cpu, 0, 2))


def test_models_are_sharded_where_a_copy_takes_most_of_the_memory(tiny, monkeypatch):
    properties = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    model = tiny().model.build()
    cpu, gpus = World(torch.device("cpu"), 0, 2), World(torch.device("cuda", 0), 0, 2)
    monkeypatch.setattr(World, "each", lambda world, action: [action()] * world.size)
    copy = 16 * model.num_parameters()
    for memory, wanted in ((2 * copy, False), (2 * copy - 1, True)):
        properties.total_memory = memory
        assert is_sharded(tiny(), model, gpus) == wanted
        assert not is_sharded(tiny(), model, cpu)
        assert not is_sharded(tiny(shard=True), model, World(torch.device("cuda", 0)))
        assert is_sharded(tiny(shard=True), model, gpus)
        assert not is_sharded(tiny(shard=False), model, gpus)


def test_alone_nothing_is_joined():
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.is_first) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        values = torch.tensor([math.pi])
        assert world.sum(values) is values


def test_what_fails_in_the_first_process_is_raised():
    def fail():
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        World(torch.device("cpu")).first_only(fail)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be a whole number 1 or more, got 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE must be"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be a whole number from 0 to 1, got '2'"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK must be"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1.5"}, "LOCAL_RANK must be"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "cannot reach the 1 others .*MASTER_ADDR"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "cannot reach the 1 others",
        ),
    ],
)
def test_an_impossible_place_among_processes_is_named(monkeypatch, changes, named):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named) as error, join_world("cpu"):
        pass
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("device", ["cdua", "mps", "cpu:1", "cuda:99", "meta", 1.5, []])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(UserError) as error:
        choose_device(device, None)
    assert "train" not in str(error.value)  # generate and eval say it too


@pytest.mark.slow
def test_processes_that_share_sequences_train_what_one_does(
    tiny, tmp_path, rows_of, train_in_processes
):
    """Two of them, then two groups of two with parts of the weights, from the same checkpoint.

    States of different layers have different shapes.
    """
    mixers = (AttentionConfig(head_dim=16), AttentionConfig(head_dim=16, window_size=5))
    config = tiny(steps=6, model=replace(tiny().model, mixers=mixers))
    one = train(config, tmp_path / "one", quiet=True)
    out = tmp_path / "shared"
    ended = train_in_processes(replace(config, context_parallel=2), out, 3, size=2)
    assert [code for code, _ in ended] == [-signal.SIGKILL] * 2, ended
    changed = {"context_parallel": 2, "shard": True, "micro_batch_size": 1}
    ended = train_in_processes(replace(config, **changed), out, size=4)
    assert [code for code, _ in ended] == [0] * 4, ended
    assert_same_run(rows_of(out), rows_of(tmp_path / "one"))
    assert_same_model(out, tmp_path / "one")
    found = rows_of(out, "val_loss")[-1]
    assert found["val_loss"] == pytest.approx(one.val_loss, rel=2e-6)
    assert found["val_accuracy"] == pytest.approx(one.val_accuracy)
    assert found["val_tokens"] == rows_of(tmp_path / "one", "val_loss")[-1]["val_tokens"]


def test_sequences_that_cannot_be_shared_are_refused(tiny):
    for wrong in (0, 33):
        with pytest.raises(UserError, match="context_parallel must be from 1 to seq_len = 32"):
            tiny(context_parallel=wrong)
    needed = r"context_parallel = 2 must divide the number of processes, 1: .* with torchrun"
    with pytest.raises(UserError, match=needed), join_world("cpu", 2):
        pass
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(UserError, match=r"a sequence of 8 tokens cannot be divided by .* = 9"):
        part_borders(tiny().model.build(), 8, 9)
    for whole in (7, 9):
        with pytest.raises(UserError, match=f"rows must have the {whole} tokens .* got 8"):
            sequence_part(Batch(tokens, tokens), (0, 5, whole), 0)
    borders = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(UserError, match="packed documents cannot be shared by processes"):
        sequence_part(Batch(tokens, tokens, borders), (0, 5, 8), 0)


def test_a_shared_stack_refuses_what_is_no_part_of_a_sequence(tiny, monkeypatch):
    monkeypatch.setattr(context, "Chain", lambda _: SimpleNamespace(rank=0, size=2))
    stack, x = tiny().model.build().stack, torch.zeros(1, 5, 32)
    with pytest.raises(ValueError, match=r"borders must be those of 2 parts, got \(0, 8\)"):
        share_sequence(stack, (0, 8))
    with monkeypatch.context() as patch:
        patch.setattr(stack, "host_state_bytes", lambda num_tokens: num_tokens)
        with pytest.raises(UserError, match="Stack keeps a part of its state in the host's memory"):
            share_sequence(stack, (0, 5, 8))
    given = {"lengths": torch.tensor([5]), "cu_seqlens": torch.tensor([0, 5])}
    state = stack.init_state(1)
    share_sequence(stack, (0, 5, 8))
    for name, value in given.items():
        with pytest.raises(ValueError, match="cu_seqlens and lengths must be None where processes"):
            stack(x, **{name: value})
    with pytest.raises(ValueError, match="state must be None where processes share a sequence"):
        stack(x, state)
    with pytest.raises(ValueError, match=r"this process's part .* 5 tokens, got \(1, 3, 32\)"):
        stack(x[:, :3])


def test_parts_of_a_sequence_take_the_same_work(tiny):
    """Half of the keys that all tokens see are those of the first T / sqrt 2.

    Where attention has as many FLOPs as all else, it takes twice as long: x + 2 x^2 = 3 / 2.
    """
    stack = BlocksConfig((MixerBlockConfig(AttentionConfig(head_dim=16), MLPConfig(hidden=1)),))
    model = LMConfig(vocab_size=1, d_model=32, stack=stack).build()
    assert part_borders(model, 2**20, 2) == (0, pytest.approx(2**20 / 2**0.5, rel=1e-2), 2**20)
    model = LMConfig(1, 32, mixers=(AttentionConfig(head_dim=16),)).build()
    assert model.flops_per_token(388) == 2 * model.flops_per_token(1)
    assert part_borders(model, 388, 2)[1] == pytest.approx(388 * (13**0.5 - 1) / 4, abs=1)
    window = replace(tiny().model, mixers=(AttentionConfig(head_dim=16, window_size=1),)).build()
    assert part_borders(window, 48, 3) == (0, 16, 32, 48)
    assert part_borders(window, 3, 3) == (0, 1, 2, 3)
    assert part_borders(model, 5, 5) == (0, 1, 2, 3, 4, 5)
    assert all(border % 128 == 0 for border in part_borders(model, 2**16, 4))
