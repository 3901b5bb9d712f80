"""Models of recurrent layers generate as they compute, from a cache as small as the paper says."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig
from mezzo_core.nn.attention import KVCache
from mezzo_core.nn.generate import generate
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer import (
    RecurrentBlockConfig,
    RecurrentStackConfig,
    TransformerBlockConfig,
    scaled,
)
from mezzo_recurrent_transformer.stack import RecurrentStack
from torch.utils._pytree import tree_leaves

C, VOCAB = 16, 37
BLOCK = RecurrentBlockConfig(head_dim=8, hidden=24)
STACKS = {
    "stack": RecurrentStackConfig(3, BLOCK),
    "plain stack": BlocksConfig(tuple(scaled(BLOCK, 2, "residual"))),
    "released scaling": RecurrentStackConfig(2, BLOCK, "init"),
    "layer norm": RecurrentStackConfig(2, RecurrentBlockConfig(8, 24, "layer", alibi=None)),
    "transformer": BlocksConfig(tuple(scaled(TransformerBlockConfig(8, 24), 2, "residual"))),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=STACKS)
def model(request):
    torch.manual_seed(0)
    stack = STACKS[request.param]
    # A tied head would mostly repeat the last token.
    return LMConfig(VOCAB, C, init_std=0.5, stack=stack, tie_embeddings=False).build().eval()


def test_an_assistant_changes_no_token(model):
    torch.manual_seed(1)
    small = LMConfig(VOCAB, C, init_std=0.5, stack=RecurrentStackConfig(1, BLOCK)).build()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    plain = generate(model, prompts, max_new_tokens=8)
    for assistant in (model, small):
        assert generate(model, prompts, max_new_tokens=8, assistant=assistant) == plain


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefill_tokens", [None, 4])
def test_generation_continues_as_the_full_forward_would(model, device, prefill_tokens):
    model.to(device)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], list(range(20))]
    answers = generate(model, prompts, max_new_tokens=9, prefill_tokens=prefill_tokens)
    with torch.no_grad():
        for prompt, new in zip(prompts, answers, strict=True):
            tokens = torch.tensor([[*prompt, *new]], device=device)
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == new
    assert len({token for new in answers for token in new}) > 3, "they repeat one token"


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_equals_the_forward(model, device):
    stack = model.to(device).stack
    x = torch.randn(2, 18, C, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        whole, _ = stack(x)
        state = stack.reserve(stack.init_state(2), 18)
        for t in range(18):
            stack.before_step(state)
            y = stack.step(x[:, t : t + 1], state)
            assert torch.allclose(y[:, 0], whole[:, t], rtol=1e-4, atol=1e-5), t


@torch.no_grad()
def test_steps_go_on_in_the_room_that_a_forward_leaves():
    """A stack's forward gives each layer lengths of its own: each layer's step adds one to them."""
    stack = STACKS["stack"].build(C)
    x = torch.randn(2, 7, C)
    _, state = stack(x[:, :5], stack.reserve(stack.init_state(2), 7))
    for t in (5, 6):
        assert_close(
            f"y[{t}]", stack.step(x[:, t : t + 1], state), stack(x)[0][:, t, None], rtol=1e-5
        )


@torch.no_grad()
def test_steps_go_on_in_a_cache_of_another_dtype(model):
    stack, x = model.bfloat16().stack, torch.randn(2, 1, C).bfloat16()
    state = stack.reserve(stack.init_state(2), 1)
    wide = tuple(KVCache(k.float(), v.float(), lengths.clone()) for k, v, lengths in state)
    found = stack.step(x, wide)
    assert found.dtype == torch.bfloat16
    assert_close("y", found, stack.step(x, state), rtol=1e-2)


def test_blocks_of_tokens_do_not_decode():
    """Their tokens also attend to temporary pairs, which no cache holds."""
    block = RecurrentBlockConfig(head_dim=8, hidden=24, block_size=4).build(C)
    stack = RecurrentStackConfig(2, replace(BLOCK, block_size=4)).build(C)
    x, keeps_none = torch.zeros(1, 1, C), "block_size 4 keeps no state: it reads whole sequences"
    mixed = BlocksConfig((BLOCK, replace(BLOCK, block_size=4))).build(C)
    for part in (block, mixed):
        state = part.reserve(part.init_state(1), 2)
        with torch.no_grad(), pytest.raises(ValueError, match=keeps_none):
            part.step(x, state)
        assert not any(leaf.any() for leaf in tree_leaves(state)), "no layer has moved"
    for part in (block, stack):
        part(x)
        with pytest.raises(ValueError, match=keeps_none):
            part(x, part.init_state(1))


@torch.no_grad()
def test_a_state_whose_layers_do_not_hold_the_same_tokens_is_refused(model):
    """A `RecurrentStack` runs all layers at once; a layer of a plain stack sees its own state."""
    stack, x = model.stack, torch.randn(2, 6, C)
    *others, last = stack.reserve(stack(x, stack.init_state(2))[1], 1)
    cut = [
        KVCache(last.k[:, 2:], last.v[:, 2:], last.lengths),
        last._replace(lengths=last.lengths + 2),
    ]
    if isinstance(stack, RecurrentStack):
        cut.append(last._replace(lengths=last.lengths - 1))
    for bad in cut:
        before = [part.clone() for part in tree_leaves([*others, bad])]
        for call in (stack, stack.step):
            with pytest.raises(ValueError, match=r"state(\[\d\])?\.(k|lengths) must be"):
                call(x[:, :1], (*others, bad))
        assert all(map(torch.equal, before, tree_leaves([*others, bad])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_told_are_those_of_the_cache(model, dtype):
    stack = model.to(dtype).stack
    with torch.no_grad():
        _, state = stack(torch.zeros(1, 13, C, dtype=dtype), stack.init_state(1))
    held = sum(t.nbytes for t in tree_leaves(state) if t.is_floating_point())
    assert stack.state_bytes(13) == held
