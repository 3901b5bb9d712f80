"""The models whose speed is measured are the paper's."""

import pytest
import torch
from mezzo_gsa.reproduction import speed

MODELS = speed.TRAINING | speed.SLOTS


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_papers_size_and_one_keeps_its_states(name):
    config = speed.configure(name, MODELS[name], speed.FULL)
    with torch.device("meta"):
        model = config.build()
    assert 1.25e9 < model.num_parameters() < 1.45e9
    assert len(model.stack.blocks) == 24
    kept = [mixer for mixer in config.mixers if getattr(mixer, "keep_states", False)]
    assert len(kept) == (24 if name == "GSA w/o recomp." else 0)
