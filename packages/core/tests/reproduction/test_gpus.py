"""The share of a GPU's peak is told where the peak is known; a process calls what it is given."""

import math
from functools import partial

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction import gpus
from mezzo_core.train.config import TrainConfig


def test_the_share_of_the_peak_counts_six_flops_a_weight_where_it_is_known(monkeypatch):
    model = LMConfig(vocab_size=512, d_model=256, mixers=(AttentionConfig(head_dim=32),) * 4)
    config = TrainConfig(name="wide", model=model, seq_len=8)
    with torch.device("meta"):
        weights = model.build().num_parameters()
    gpu = torch.device("cuda", 0)
    for name, flops in (("NVIDIA H200", 989e12), ("Voodoo 2", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        share = gpus.share_of_peak(config, 1e6, gpu)
        assert gpus.has_known_peak(gpu) == (not math.isnan(share)) == (flops is not None)
        assert flops is None or share == pytest.approx(6e8 * weights / flops, rel=0.02)


def test_a_process_calls_a_partial():
    assert gpus.run_processes(1, partial(int, base=2), "101") == {0: 5}
