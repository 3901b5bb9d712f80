"""The loop trains, shards, saves and resumes the toy papers without knowing them."""

import signal
from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig, generate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.loop import train
from toys.own_keys import OwnKeysConfig
from toys.retrieval import RetrievalConfig

STACKS = {"block": BlocksConfig((OwnKeysConfig(),) * 2), "stack": RetrievalConfig()}


@pytest.fixture(params=STACKS)
def config(request, tiny):
    model = LMConfig(vocab_size=257, d_model=16, stack=STACKS[request.param])
    return tiny(model=model, seq_len=16, steps=6)


def test_the_log_says_at_once_what_generate_will_refuse(config, tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(replace(config, steps=1), tmp_path / "run", quiet=True)
    assert "generate and eval will refuse this model" in caplog.text
    assert "--allow-package toys" in caplog.text


def test_it_learns(tiny, tmp_path):
    model = LMConfig(vocab_size=257, d_model=16, stack=STACKS["stack"])
    every = {"steps": 250, "eval_every": 250, "checkpoint_every": 250}
    result = train(tiny(model=model, seq_len=10, **every), tmp_path / "run", quiet=True)
    assert result.val_loss < 2.4  # who knows how common each letter is, and no more, gets 2.45


@pytest.mark.slow
def test_sharded_and_killed_in_two_processes_it_goes_on_in_one(
    config, tmp_path, losses_of, train_in_processes
):
    train(config, tmp_path / "whole", quiet=True)
    ended = train_in_processes(replace(config, shard=True), tmp_path / "run", 3, size=2)
    assert [code for code, _ in ended] == [-signal.SIGKILL] * 2, ended
    train(config, tmp_path / "run", quiet=True)
    found, wanted = losses_of(tmp_path / "run"), losses_of(tmp_path / "whole")
    assert len(found) == 6
    assert found == pytest.approx(wanted, rel=1e-5)
    models = [
        load_model(tmp_path / name / "model", allow_packages=("toys",))[0].state_dict()
        for name in ("run", "whole")
    ]
    for name, weight in models[1].items():
        torch.testing.assert_close(models[0][name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_a_cuda_graph_generates_what_the_full_forward_does(config):
    torch.manual_seed(0)
    model = config.model.build().cuda().eval()
    for weight in model.parameters():
        weight.data *= 4
    prompts = [[1, 2, 3], list(range(20, 33))]
    with torch.no_grad():
        for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=17), strict=True):
            logits = model(torch.tensor([[*prompt, *new]], device="cuda")).logits
            assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == new


@pytest.mark.gpu
def test_a_gpu_trains_what_a_cpu_does(config, tmp_path, losses_of):
    for device in ("cpu", "cuda"):
        train(config, tmp_path / device, quiet=True, device=device)
    cpu, gpu = (losses_of(tmp_path / name) for name in ("cpu", "cuda"))
    assert gpu == pytest.approx(cpu, rel=2e-2)
