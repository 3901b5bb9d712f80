"""Full runs of experiments/train_small.py train what its docstring says."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from mezzo_core.reproduction import Options
from mezzo_rat.recipes import small as small_size

SCRIPTS = Path(__file__).parents[1] / "experiments"
small = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "train_small.py")))
FULL = Options(Path("out"), (), torch.device("cuda"), dry_run=False, data="texts")


def test_full_small_runs_are_as_the_docstring_says():
    recipe = small_size()
    for T in (1024, 2048, 4096):
        for config in small.configure(small.IN_CONTEXTS, T, FULL).values():
            assert (config.seq_len, config.batch_size * T) == (T, 8192)
            assert (config.steps, config.eval_batches) == (3000, None)
            assert (config.optim, config.data.source) == (recipe.optim, "texts")
            with torch.device("meta"):
                assert 40e6 < config.model.build().num_parameters() < 42e6
    long = small.configure(small.IN_LONG, 4096, FULL, rope_base=500_000.0)
    assert long["Attention"].model.mixers[0].rope_base == 500_000
    nope = small.configure(small.IN_POSITIONS, 1024, FULL)
    assert nope["RAT(L=16)-SWA NoPE"].model.mixers[0].rope is None
