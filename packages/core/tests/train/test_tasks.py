"""A task trains in the loop that text does, and is scored by its accuracy."""

from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
from mezzo_core.data import NO_TARGET, Rows, RowsData
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.inputs import open_told_data
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.ops.linear_cross_entropy import linear_cross_entropy
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.loop import train
from toys.echo import EchoConfig


@pytest.fixture
def echo(tiny):
    model = LMConfig(vocab_size=8, d_model=32, mixers=(AttentionConfig(head_dim=16),) * 2)
    return lambda **changes: tiny(
        **{"model": model, "data": EchoConfig(), "seq_len": 12, **changes}
    )


def test_a_task_is_learned_and_its_accuracy_logged(echo, tmp_path, rows_of):
    optim = OptimConfig(lr=1e-2)
    config = echo(batch_size=32, steps=150, eval_every=50, checkpoint_every=150, optim=optim)
    result = train(config, tmp_path / "run", quiet=True)
    accuracies = [row["val_accuracy"] for row in rows_of(tmp_path / "run", "val_loss")]
    assert accuracies[-1] == result.val_accuracy > 0.5  # chance is 0.125
    assert {row["val_tokens"] for row in rows_of(tmp_path / "run", "val_loss")} == {2 * 32 * 6}


def test_a_trained_task_is_evaluated_by_the_command(echo, tmp_path, rows_of):
    result = train(echo(), tmp_path / "run", quiet=True)
    model, _, extra = load_model(tmp_path / "run" / "model")
    name, rows = open_told_data(extra, tmp_path, model.vocab_size, allow_packages=("toys",))
    assert name == "EchoConfig"
    found = evaluate(model, islice(rows.validation_batches(4), 2))
    assert (found.loss, found.accuracy) == (result.val_loss, result.val_accuracy)
    assert rows_of(tmp_path / "run", "val_loss")[-1]["val_exact_match"] == found.exact_match
    with pytest.raises(UserError, match="must be of DataConfig"):
        open_told_data(extra, tmp_path, 8, source="words.txt", allow_packages=("toys",))
    with pytest.raises(UserError, match="must be of DataConfig"):
        open_told_data(extra, tmp_path, 8, allow_packages=("toys",), whole=True)


def test_the_head_reads_few_other_tokens_where_few_are_learned(echo, tmp_path, monkeypatch):
    sizes = []

    def spy(x, weight, targets):
        sizes.append((targets.numel(), int((targets != NO_TARGET).sum())))
        return linear_cross_entropy(x, weight, targets)

    monkeypatch.setattr("mezzo_core.nn.lm.linear_cross_entropy", spy)
    train(echo(batch_size=8, micro_batch_size=4, steps=1), tmp_path / "run", quiet=True)
    assert sizes[:2] == [(24, 24)] * 2  # of the 48 tokens of a micro batch


def test_a_run_on_a_task_goes_on_to_the_bit(echo, assert_goes_on):
    assert_goes_on(echo())


@dataclass(frozen=True)
class RareConfig:
    """A task that asks for something in every other row alone."""

    def build(self, seq_len, cache_dir, *, rank=0, world_size=1):
        tokens = np.random.default_rng(0).integers(8, size=(8, seq_len))
        targets = np.full_like(tokens, NO_TARGET)
        targets[::2, -1] = tokens[::2, 0]
        return RowsData("rare", *[Rows(tokens, targets)] * 2, vocab_size=8, seed=0)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_batch_without_targets_has_loss_zero(echo, tmp_path, losses_of, cuda_graph):
    """It is no divergence. With CUDA graphs the targets are counted on the device."""
    config = echo(data=RareConfig(), batch_size=1, steps=8, cuda_graph=cuda_graph)
    train(config, tmp_path / "run", quiet=True, device="cpu")
    losses = losses_of(tmp_path / "run")
    assert len(losses) == 8
    assert losses.count(0.0) == 4


def test_two_processes_share_its_batches(echo, tmp_path, losses_of, train_in_processes):
    train(echo(), tmp_path / "one", quiet=True)
    ended = train_in_processes(echo(), tmp_path / "two", size=2)
    assert [code for code, _ in ended] == [0, 0], ended
    found, wanted = losses_of(tmp_path / "two"), losses_of(tmp_path / "one")
    assert found == pytest.approx(wanted, rel=1e-5)


def test_tokens_beyond_the_model_s_vocabulary_are_refused(echo, tmp_path):
    with pytest.raises(UserError, match=r"EchoConfig\(vocab_size=9\) has 9 tokens, more than"):
        train(echo(data=EchoConfig(9)), tmp_path / "run", quiet=True)


def test_another_task_in_the_folder_of_a_run_is_refused(echo, tmp_path):
    train(echo(), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="another configuration"):
        train(echo(data=EchoConfig(7)), tmp_path / "run", quiet=True)
