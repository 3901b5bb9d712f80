"""Processes that share a sequence compute what one does, with layers of every package."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import ForkedScript
from mezzo_core.config_json import to_json
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, BlocksConfig, LMConfig
from mezzo_core.train.context import Chain, share_sequence
from mezzo_drt import DRTConfig
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig
from mezzo_gsa.mamba import MambaConfig
from mezzo_gsa.retnet import RetNetConfig
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig
from mezzo_recurrent_transformer.stack import RecurrentStackConfig

CHILD = Path(__file__).parent / "children" / "share_sequences.py"
SIZE = 3
"""Processes, so that one of them both receives and sends."""
MIXERS = {
    "attention": AttentionConfig(head_dim=8, num_kv_heads=1, qk_norm="rms"),
    "window": AttentionConfig(head_dim=8, window_size=5),
    "rat": RATConfig(chunk_size=5, head_dim=8),  # parts end inside a chunk
    "rat-reversed": RATReversedConfig(chunk_size=4, head_dim=8),
    "linear-rnn": LinearRNNConfig(),
    "gsa": GSAConfig(num_heads=2, num_slots=4),
    "gsa-constant": GSAConfig(num_heads=2, num_kv_heads=1, num_slots=4, gate="constant"),
    "abc": ABCConfig(num_heads=2, num_slots=4),
    "gla": GLAConfig(num_heads=2),
    "hgrn2": HGRN2Config(head_dim=8, lower_bound=0.5),
    "retnet": RetNetConfig(num_heads=2),
    "mamba": MambaConfig(),
}
STACKS = {
    "hgrn2-stack": HGRN2StackConfig(2, HGRN2Config(head_dim=8)),
    "drt": DRTConfig(2, chunk_size=3, num_retrieved=2, window_size=5, head_dim=8, hidden=24),
    "recurrent-blocks": BlocksConfig((RecurrentBlockConfig(head_dim=8),) * 2),
    "recurrent-stack": RecurrentStackConfig(2, RecurrentBlockConfig(head_dim=8)),
}
MODELS = {
    **{name: LMConfig(17, 16, (mixer,) * 2) for name, mixer in MIXERS.items()},
    **{name: LMConfig(17, 16, stack=stack) for name, stack in STACKS.items()},
    "frozen-below": LMConfig(17, 16, (MIXERS["gsa"],) * 3, tie_embeddings=False),
}
GROWING = {"attention", "rat", "drt", "recurrent-blocks", "recurrent-stack"}
"""The models whose states grow with the tokens."""


def in_processes(models, size, device, folder):
    """Return what each of the processes says of each model."""
    path = folder / "models.json"
    path.write_text(json.dumps({name: to_json(config) for name, config in models.items()}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        ForkedScript(
            CHILD,
            *(str(path), device),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    ended = [child.communicate(timeout=120) for child in children]
    return [json.loads(out.splitlines()[-1]) if out else pytest.fail(err) for out, err in ended]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the processes says of each model, on the CPU."""
    return in_processes(MODELS, SIZE, "cpu", tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("name", MODELS)
def test_processes_that_share_sequences_find_the_gradients_that_one_does(found, name):
    for told in found:
        assert told[name]["float32"] < 1e-5
        assert told[name]["float64"] < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_what_is_sent_grows_with_the_tokens_only_where_the_state_does(found, name):
    for rank, told in enumerate(found):
        short, long = told[name]["bytes"]
        if rank == SIZE - 1:
            assert short == long == 0
        elif name in GROWING:
            assert short < long
        else:
            assert 0 < short == long


@pytest.fixture
def one_of_two(monkeypatch):
    """Let this process seem to be the first of two."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)


@pytest.mark.usefixtures("one_of_two")
def test_memory_on_the_host_is_not_sent():
    stack = replace(STACKS["drt"], offload=True).build(16)
    with pytest.raises(UserError, match="DRT keeps a part of its state in the host's memory"):
        share_sequence(stack, (0, 4, 8))


@pytest.mark.usefixtures("one_of_two")
def test_a_sequence_that_is_shared_begins_with_no_state_of_the_caller():
    model = MODELS["gsa"].build()
    states, tokens = model.init_state(1), torch.zeros(1, 8, dtype=torch.int64)
    share_sequence(model.stack, (0, 4, 8))
    with pytest.raises(ValueError, match="state must be None where processes share"):
        model(tokens, states)
    with pytest.raises(ValueError, match="cu_seqlens and lengths must be None where"):
        model(tokens, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="part of a shared sequence, 4 tokens, got"):
        model(tokens)
    with pytest.raises(ValueError, match="borders must be those of 2 parts"):
        share_sequence(model.stack, (0, 2, 4, 8))


@pytest.mark.usefixtures("one_of_two")
def test_states_of_other_shapes_than_were_told_are_not_sent(monkeypatch):
    """The receiver would take them for those that it knows."""
    monkeypatch.setattr(dist, "send_object_list", lambda *_, **__: None)
    chain = Chain(None)
    for _ in range(2):
        chain.tell_forms(1, "key", [((2, 3), torch.float32)])
    with pytest.raises(ValueError, match="must have the same shapes to be sent"):
        chain.tell_forms(1, "key", [((2, 4), torch.float32)])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_that_share_sequences_find_the_gradients_that_one_does(tmp_path):
    """With heads of widths that kernels take."""
    mixers = {
        "attention": AttentionConfig(head_dim=64),
        "window": AttentionConfig(head_dim=64, window_size=5),
        "rat": RATConfig(chunk_size=16, head_dim=64),
        "gsa": GSAConfig(num_heads=2, num_slots=64),
        "gla": GLAConfig(num_heads=2),
        "mamba": MambaConfig(),
    }
    models = {name: LMConfig(17, 128, (mixer,) * 2) for name, mixer in mixers.items()}
    for told in in_processes(models, 2, "cuda", tmp_path):
        for name in models:
            assert told[name]["float32"] < 1e-3, name
            assert told[name]["float64"] < 1e-10, name
