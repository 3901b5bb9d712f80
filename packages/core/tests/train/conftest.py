import json
import os
import random
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import ForkedScript
from mezzo_core.config_json import to_json
from mezzo_core.data import DataConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.distributed import World
from mezzo_core.train.loop import train
from torch import nn

WORDS = ("half", "of", "the", "notes", "stand", "between", "a", "rest", "and", "song")
CHILDREN = Path(__file__).parent / "children"


class StoppedError(Exception):
    """Stands for whatever ends a process in the middle."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few thousand words in which a next letter can be learned."""
    chosen = random.Random(0).choices(WORDS, k=4000)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(chosen), encoding="utf-8")
    return path


@pytest.fixture
def tiny(corpus):
    """A configuration that trains in a fraction of a second; keywords change it."""
    config = TrainConfig(
        name="tiny",
        model=LMConfig(vocab_size=257, d_model=32, mixers=(AttentionConfig(head_dim=16),) * 2),
        data=DataConfig(source=str(corpus)),
        seq_len=32,
        batch_size=4,
        steps=6,
        eval_every=3,
        eval_batches=2,
        checkpoint_every=2,
    )
    return lambda **changes: replace(config, **changes)


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / "config.json").touch()  # as a run has
    return Checkpoints(tmp_path / "checkpoints", World(torch.device("cpu")), keep=2)


@pytest.fixture
def small():
    """Build a model of two tensors and its optimizer after one step, so that no moment is zero."""

    def build(seed=0, width=3):
        torch.manual_seed(seed)
        model = nn.Linear(width, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, width)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    return build


@pytest.fixture
def rows_of():
    """Read a run's log: its training rows, or its evaluations."""

    def read(out, key="loss"):
        lines = (Path(out) / "log.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if key in row]

    return read


@pytest.fixture
def losses_of(rows_of):
    """Read the losses of a run's log."""
    return lambda out: [row["loss"] for row in rows_of(out)]


@pytest.fixture(scope="session")
def train_until():
    """Train to the end of a step, and stop there as a process that ends in the middle."""

    def run(config, out, step, *, on_step=lambda row: None, **options):
        def stop(row):
            on_step(row)
            if row["step"] == step:
                raise StoppedError

        with pytest.raises(StoppedError):
            train(config, out, quiet=True, on_step=stop, **options)

    return run


@pytest.fixture
def assert_goes_on(tmp_path, train_until):
    """Assert that a run that stops in the middle goes on to the weights of one that does not."""

    def check(config):
        train(config, tmp_path / "whole", quiet=True)
        train_until(config, tmp_path / "stopped", 3)
        train(config, tmp_path / "stopped", quiet=True)
        whole, found = (
            load_model(tmp_path / name / "model")[0].state_dict() for name in ("whole", "stopped")
        )
        assert all(found[name].equal(weight) for name, weight in whole.items())

    return check


@pytest.fixture
def start_child(tmp_path):
    """Start children/NAME.py on a configuration, as one of `size` processes."""
    started = []

    def start(name, config, out, *arguments, rank=0, size=1, port=0):
        path = tmp_path / f"config-{len(started)}.json"
        path.write_text(json.dumps(to_json(config)))
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        words = (str(path), str(out), *map(str, arguments))
        started.append(ForkedScript(CHILDREN / f"{name}.py", *words, environment=environment))
        return started[-1]

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def start_children(start_child):
    """Start children/NAME.py in each of `size` processes, as torchrun does."""

    def start(name, config, out, *arguments, size):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [
            start_child(name, config, out, *arguments, rank=rank, size=size, port=port)
            for rank in range(size)
        ]

    return start


@pytest.fixture
def answers_of_processes(start_children):
    """Return what children/NAME.py says in each of `size` processes, and their stderr."""

    def run(name, config, out, *arguments, size):
        children = start_children(name, config, out, *arguments, size=size)
        ended = [child.communicate(timeout=120) for child in children]
        # The answer is the last line: gloo may write others before it.
        lines = [out.splitlines()[-1] for out, error in ended if out or pytest.fail(error)]
        return [json.loads(line) for line in lines], [error for _, error in ended]

    return run


@pytest.fixture
def train_in_processes(start_children):
    """Train in `size` processes; return each one's exit code and stderr."""

    def run(config, out, *arguments, size):
        children = start_children("train", config, out, *arguments, size=size)
        errors = [child.communicate(timeout=120)[1] for child in children]
        return [(child.returncode, error) for child, error in zip(children, errors, strict=True)]

    return run
