"""Language models with the stack: they learn to retrieve, generate, compile, run in bf16."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import LMConfig
from mezzo_core.nn.generate import generate
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig, upper
from mezzo_drt.ops.grouped_cross_attention import op, readers_of

VOCAB, L = 24, 4
STACK = DRTConfig(
    num_layers=2, chunk_size=L, num_retrieved=2, window_size=8, head_dim=16, hidden=64,
    num_encoder_layers=1,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(std=0.5, **fields):
    torch.manual_seed(0)
    # A tied head would mostly repeat the last token.
    config = LMConfig(VOCAB, 32, init_std=std, stack=STACK, tie_embeddings=False)
    return config.build()


def needles(batch, num_chunks, generator):
    """Return rows of noise with a needle, a chunk "0 a b c", which must be repeated at the end.

    The chunk before the end is "1 1 1 1". Its landmark must retrieve the needle, which is out of
    reach of the windows of two layers.
    """
    tokens = torch.randint(4, VOCAB, (batch, num_chunks * L), generator=generator)
    needle = tokens.new_zeros(batch, L)
    needle[:, 1:] = torch.randint(4, VOCAB, (batch, L - 1), generator=generator)
    where = torch.randint(0, num_chunks - 4, (batch,), generator=generator)
    for row, chunk, values in zip(tokens, where, needle, strict=True):
        row[chunk * L : chunk * L + L] = values
        row[-2 * L :] = torch.cat([values * 0 + 1, values])
    targets = torch.full_like(tokens, -100)
    targets[:, -L:-1] = tokens[:, 1 - L :]
    return tokens, targets


@pytest.mark.parametrize("offload", [False, True])
def test_an_assistant_changes_no_token(offload):
    """Rejected tokens may have completed chunks, and retrieved."""
    config = replace(STACK, offload=offload)
    lm = LMConfig(VOCAB, 32, init_std=0.5, stack=config, tie_embeddings=False).build().double()
    prompts = [[1, 2, 3], list(range(12)), list(range(23))]
    plain = generate(lm, prompts, max_new_tokens=11)
    for assistant in (lm, model().double()):
        assert generate(lm, prompts, max_new_tokens=11, assistant=assistant) == plain


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefill_tokens", [None, 5])
def test_generation_continues_as_the_full_forward_would(device, prefill_tokens):
    lm = model().to(device).eval()
    prompts = [[1, 2, 3], list(range(12)), list(range(23))]
    answers = generate(lm, prompts, max_new_tokens=22, prefill_tokens=prefill_tokens)
    assert len({token for new in answers for token in new}) > 3
    with torch.no_grad():
        for prompt, new in zip(prompts, answers, strict=True):
            tokens = torch.tensor([[*prompt, *new]], device=device)
            logits = lm(tokens).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == new


def test_the_loss_compiles_as_one_graph():
    """Of packed sequences: tests/test_hybrids.py compiles the stack without them."""
    torch.compiler.reset()
    lm = model().eval()
    tokens = torch.randint(VOCAB, (1, 40))
    borders = torch.tensor([0, 9, 9, 40, 40], dtype=torch.int32)
    compiled = torch.compile(lm.loss, fullgraph=True, backend="aot_eager")
    eager = lm.loss(tokens, tokens.roll(-1), borders)
    wanted = torch.autograd.grad(eager, list(lm.parameters()))
    loss = compiled(tokens, tokens.roll(-1), borders)
    found = torch.autograd.grad(loss, list(lm.parameters()))
    assert_close("loss", loss, eager, rtol=1e-5)
    for (name, _), got, grad in zip(lm.named_parameters(), found, wanted, strict=True):
        assert_close(name, got, grad, rtol=1e-4, atol=1e-7)
    training = torch.compile(lm.train().loss, fullgraph=True, backend="eager")
    assert training(tokens, tokens.roll(-1), borders).isfinite(), "with noise too"


def test_packed_rows_share_a_graph_whatever_the_number_of_their_documents():
    torch.compiler.reset()
    torch.manual_seed(0)
    layers, graphs = STACK.build(32).eval(), []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x, borders: layers(x, cu_seqlens=borders)[0], fullgraph=True, backend=keep
    )
    x = torch.randn(1, 30, 32)
    with torch.no_grad():
        for lengths in ([9, 0, 21], [13, 17], [1] * 30):
            borders = torch.tensor([0, *lengths]).cumsum(0)
            torch._dynamo.mark_dynamic(borders, 0)
            assert_close("y", compiled(x, borders), layers(x, cu_seqlens=borders)[0], rtol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("retriever", ["learned", "random", "fixed"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_reads_no_values_so_that_it_never_waits_for_a_gpu(packed, retriever):
    """On the meta device there are none."""
    with torch.device("meta"):
        layers = replace(STACK, num_layers=4, num_groups=2, retriever=retriever).build(32)
        x = torch.empty(1, 40, 32, requires_grad=True)
        borders = torch.empty(4, dtype=torch.int32) if packed else None
    layers(x, cu_seqlens=borders)[0].sum().backward()
    assert all(weight.grad is not None for layer in layers.upper for weight in layer.parameters())


@pytest.mark.parametrize("cast", ["weights", "autocast"])
def test_bf16_runs_in_segments_and_steps(cast):
    lm = model(std=0.1).eval()
    if cast == "weights":
        lm.bfloat16()
    tokens = torch.randint(VOCAB, (2, 30))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        whole = lm(tokens).logits
        _, state = lm(tokens[:, :13], lm.init_state(2))
        state = lm.reserve(lm(tokens[:, 13:17], state).state, 13)
        for t in range(17, 30):
            lm.before_step(state)
            logits = lm.step(tokens[:, t : t + 1], state)
    assert_close("logits", logits[:, 0].float(), whole[:, -1].float(), rtol=5e-2)


def test_a_model_learns_to_retrieve_a_needle():
    lm = model(std=0.05)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        loss = lm.loss(*needles(64, 8, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    lm.eval()
    with torch.no_grad():
        tokens, targets = needles(256, 8, generator)
        hits = lm.score(tokens, targets).hits[:, -L:-1].float().mean()
    assert hits > 0.95  # chance is 0.05


@pytest.mark.gpu
def test_layers_of_a_group_share_the_lists_of_who_reads_a_chunk(monkeypatch):
    calls = []
    listed = lambda *read: calls.append(read) or readers_of(*read)  # noqa: E731
    monkeypatch.setattr(upper, "readers_of", listed)
    monkeypatch.setattr(op, "readers_of", None)
    config = replace(STACK, num_layers=8, num_groups=2)
    layers = config.build(32).cuda()
    x = torch.randn(2, 40, 32, device="cuda", requires_grad=True)
    layers(x)[0].sum().backward()
    assert len(calls) == 2
