"""Models that a user shards, by PyTorch's `fully_shard`."""

import pytest
import torch
import torch.distributed as dist
from mezzo_core.errors import UserError
from mezzo_core.nn import (
    LM,
    AttentionConfig,
    LMConfig,
    beam_search,
    generate,
    save_model,
    whole_weights,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONFIG = LMConfig(vocab_size=37, d_model=16, mixers=(AttentionConfig(head_dim=8),) * 2)
TOKENS = torch.arange(18).view(2, 9)


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(mesh, root=lambda lm: lm):
    torch.manual_seed(0)
    lm = CONFIG.build()
    whole = root(lm)
    if mesh is not None:
        for part in (*lm.units(), whole):
            fully_shard(part, mesh=mesh)
    return whole


def loss_and_gradients(lm, loss):
    found = [loss(TOKENS[:, :-1], TOKENS[:, 1:]) for _ in range(2)][-1]
    found.backward()
    grads = [weight.grad for weight in lm.parameters()]
    return [found, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sharded_model_has_the_loss_and_gradients_of_a_whole_one(mesh, compiled):
    whole, sharded = build(None), build(mesh)
    loss = torch.compile(sharded.loss, backend="aot_eager") if compiled else sharded.loss
    wanted = loss_and_gradients(whole, whole.loss)
    torch.testing.assert_close(loss_and_gradients(sharded, loss), wanted)
    sums = [lm.score(TOKENS[:, :-1], TOKENS[:, 1:])[:3] for lm in (sharded, whole)]
    torch.testing.assert_close(*sums)


class Doubled(LM):
    def loss(self, *arguments, **options):
        return 2 * super().loss(*arguments, **options)


def test_the_loss_of_a_subclass_stays_its_own(mesh):
    whole, sharded = (build(m, lambda lm: lm) for m in (None, mesh))
    for lm in (whole, sharded):
        lm.__class__ = type("Doubled", (Doubled, type(lm)), {})
    found = [lm.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item() for lm in (whole, *[sharded] * 3)]
    assert found == pytest.approx([found[0]] * 4)


def test_what_needs_whole_weights_says_where_they_are(mesh, tmp_path):
    sharded, whole = build(mesh), build(None)
    for call in (
        lambda: generate(sharded, [[1, 2]], max_new_tokens=2),
        lambda: generate(whole, [[1, 2]], max_new_tokens=2, assistant=sharded),
        lambda: beam_search(sharded, [[1, 2]], num_beams=2, max_new_tokens=2),
        lambda: save_model(sharded, CONFIG, tmp_path / "model"),
    ):
        with pytest.raises(ValueError, match=r"sharded \(FSDP2\).*whole_weights\(model\)"):
            call()
    weights = whole_weights(sharded)
    save_model(sharded, CONFIG, tmp_path / "model", weights=weights)
    whole.load_state_dict(weights)


def test_a_sharded_model_of_transformers_generates_without_a_cache_alone(mesh):
    hub = pytest.importorskip("mezzo_core.hub")
    model = build(mesh, lambda lm: hub.MezzoForCausalLM.around(lm, hub.MezzoConfig(CONFIG)))
    with pytest.raises(UserError, match=r"on cpu and those of .* \(FSDP2\).* use_cache=False"):
        model.generate(TOKENS, max_new_tokens=2)
    assert model.generate(TOKENS, max_new_tokens=2, use_cache=False).shape == (2, 11)


def test_a_sharded_model_of_transformers_is_saved_by_its_whole_weights(mesh, tmp_path):
    hub = pytest.importorskip("mezzo_core.hub")
    model = build(mesh, lambda lm: hub.MezzoForCausalLM.around(lm, hub.MezzoConfig(CONFIG)))
    with pytest.raises(ValueError, match=r"whole_weights\(model\) returns .* to save_pretrained"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=whole_weights(model))
    saved = hub.MezzoForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(saved.state_dict(), whole_weights(model))
