"""The best of several trainings: which one it is, what is told of the others, when they end."""

from pathlib import Path

import pytest
import torch
from mezzo_core.bench import sweep
from mezzo_core.bench.sweep import Sweep, best_run
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import DivergenceError

MODEL = LMConfig(vocab_size=8, d_model=8, mixers=(AttentionConfig(head_dim=8),))
RATES = (1e-4, 1e-3, 1e-2, 1.0)


@pytest.fixture
def best(monkeypatch):
    """Run a sweep over RATES whose runs measure what is given; tell what was said, and where."""

    def run(*measured, enough=None, **options):
        lines, folders = [], []

        def measure(config, folder, device, *, resume):
            assert resume
            folders.append(folder)
            found = measured[RATES.index(config.optim.lr)]
            if found is None:
                raise DivergenceError("the loss exploded")
            return {"perplexity": 1.0, "accuracy": found[0], "exact_match": found[-1]}

        monkeypatch.setattr(sweep, "measure_run", measure)
        optims = [OptimConfig(lr, weight_decay=0.0) for lr in RATES[: len(measured)]]
        configs = [TrainConfig("toy", MODEL, optim=optim) for optim in optims]
        toys = Sweep("toy", configs, Path("runs/toy"), enough)
        where = (torch.device("cpu"), lines.append)
        return best_run(toys, *where, swept=("lr",), **options), lines, folders

    return run


def test_the_best_run_comes_first_and_a_diverged_one_last(best):
    found, lines, folders = best([0.5], None, [0.9], [0.7])
    assert (found["lr"], found["accuracy"]) == (1e-2, 0.9)
    others = [(run["lr"], run["accuracy"]) for run in found["others"]]
    assert others == [(1.0, 0.7), (1e-4, 0.5), (1e-3, "diverged")]
    assert lines[:2] == ["toy lr 0.0001: 0.5", "toy lr 0.001: diverged"]
    assert folders[1:3] == [Path("runs/toy_lr0.001"), Path("runs/toy_lr0.01")]
    assert "perplexity" not in found


def test_a_second_measure_decides_between_equal_runs(best):
    found, lines, _ = best([0.5, 0.0], [0.6, 0.0], [0.9, -0.5], by=("exact_match", "accuracy"))
    assert found["lr"] == 1e-3
    assert lines[0] == "toy lr 0.0001: 0.0, 0.5"


def test_one_run_that_is_good_enough_ends_the_sweep(best):
    found, lines, folders = best([0.5], [0.995], [0.999], enough=0.99)
    assert (found["lr"], len(folders)) == (1e-3, 2)
    assert lines[2] == "toy: nothing else is tried, as lr 0.001 solved it"


def test_a_run_without_others_says_so(best):
    assert best([0.5])[0]["others"] is None
    assert best(None)[0]["accuracy"] == "diverged"
