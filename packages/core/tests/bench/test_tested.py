"""A run's model is tested once, and its values stand in all columns."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from mezzo_core.bench import OOM, Header, Result, origin, tested
from mezzo_core.bench.tested import loss_by_length, train_and_test
from mezzo_core.data import DataConfig
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import TrainConfig

CPU = torch.device("cpu")
LENGTHS = {"T=8": 8, "T=32": 32}
TEST = partial(loss_by_length, lengths=LENGTHS, windows=2)
HEADER = Header(
    kind="training",
    title="Figure 6",
    setting="toy",
    how="scaled down",
    columns=tuple(LENGTHS),
    models=("Attention",),
    unit="nats a token",
    better="lower",
)
CONFIG = TrainConfig(
    name="attention",
    model=LMConfig(vocab_size=257, d_model=16, mixers=(AttentionConfig(head_dim=8),)),
    data=DataConfig(),
    seq_len=16,
    batch_size=2,
    steps=2,
    eval_batches=1,
)


@pytest.fixture
def result(tmp_path):
    return Result(tmp_path / "result.json", HEADER, {**origin(CPU), "commit": "c1"})


def values(result):
    return {(entry["column"], entry["seed"]): entry["value"] for entry in result.entries}


def test_each_run_has_a_value_in_every_column_and_its_details_once(result, tmp_path, monkeypatch):
    train_and_test(result, {"Attention": CONFIG}, (0, 1), TEST, tmp_path / "runs", CPU)
    found = values(result)
    assert list(found) == [("T=8", 0), ("T=32", 0), ("T=8", 1), ("T=32", 1)]
    assert len(set(found.values())) == 4
    assert ["steps" in entry for entry in result.entries] == [True, False] * 2
    monkeypatch.setattr(tested, "outcome", None)  # a further training would fail
    train_and_test(result, {"Attention": CONFIG}, (0, 1), TEST, tmp_path / "runs", CPU)


def test_runs_at_the_same_time_give_the_same_values(result, tmp_path):
    train_and_test(result, {"Attention": CONFIG}, (0, 1), TEST, tmp_path / "runs", CPU, jobs=2)
    alone = Result(tmp_path / "alone.json", HEADER, {**origin(CPU), "commit": "c1"})
    train_and_test(alone, {"Attention": CONFIG}, (0, 1), TEST, tmp_path / "runs", CPU)
    assert values(result) == values(alone)
    assert all("tokens_per_second" not in entry for entry in result.entries)


def test_a_training_that_fails_has_its_word_in_every_column(result, tmp_path, monkeypatch):
    monkeypatch.setattr(tested, "outcome", lambda *_: {"perplexity": OOM})
    train_and_test(result, {"Attention": CONFIG}, (0,), TEST, tmp_path, CPU)
    assert set(values(result).values()) == {OOM}


def test_all_lengths_have_the_same_targets():
    torch.manual_seed(0)
    # A window of one token: the context does not matter, so equal targets give equal losses.
    mixers = (AttentionConfig(head_dim=8, window_size=1),)
    model = replace(CONFIG.model, mixers=mixers).build()
    losses = loss_by_length(model, CONFIG, lengths=LENGTHS, windows=3)
    assert losses["T=8"] == pytest.approx(losses["T=32"], rel=1e-6)
    batches = islice(CONFIG.data.build(32, None).validation_batches(1), 3)
    assert losses["T=32"] == pytest.approx(evaluate(model, batches).loss, rel=1e-6)
    assert losses != loss_by_length(model, CONFIG, lengths=LENGTHS, windows=4)
