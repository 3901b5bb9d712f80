"""Outside encoders: by their vectors alone chunks are chosen, in every way to run a model."""

from dataclasses import dataclass, replace

import pytest
import torch
from mezzo_core.nn import LMConfig, generate
from mezzo_core.testing.arguments import check_fields
from mezzo_core.testing.numerics import assert_close
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.optim import build_optimizer
from mezzo_drt import DRTConfig, stack
from mezzo_drt.outside import AbstractOutsideEncoder, BagOfTokensConfig
from torch import nn

VOCAB, L, K = 24, 4, 6
RETRIEVE = stack.retrieve


class Ordered(AbstractOutsideEncoder):
    """A user's: it tells chunks apart by the order of their tokens, and has weights of its own."""

    def __init__(self):
        super().__init__()
        self.width = K
        self.table = nn.Embedding(VOCAB, K)
        self.mix = nn.Linear(L * K, K)

    def embed(self, tokens):
        return self.table(tokens)

    def forward(self, chunks):
        return self.mix(chunks.flatten(2)).tanh()

    def load(self):
        with torch.no_grad():
            nn.init.normal_(self.mix.weight, std=0.7, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class OrderedConfig:
    def build(self):
        return Ordered()


STACK = DRTConfig(
    num_layers=4, num_groups=2, chunk_size=L, num_retrieved=2, window_size=8, head_dim=16,
    hidden=64, num_encoder_layers=1, retriever="fixed",
)  # fmt: skip
ENCODERS = {"bag": BagOfTokensConfig(num_vectors=VOCAB, width=32), "ours": OrderedConfig()}
encoders = pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)


def build(encoder, **fields):
    torch.manual_seed(0)
    layers = replace(STACK, outside=encoder, **fields)
    return LMConfig(VOCAB, 32, init_std=0.5, stack=layers, tie_embeddings=False).build().eval()


def test_a_chunk_reads_those_that_have_its_tokens(monkeypatch):
    found = []
    monkeypatch.setattr(
        stack, "retrieve", lambda *x, **y: found.append(RETRIEVE(*x, **y)) or found[-1]
    )
    tokens = torch.arange(6 * L)[None] % VOCAB
    tokens[0, 5 * L :] = tokens[0, L : 2 * L].flip(0)  # in another order
    build(ENCODERS["bag"])(tokens)
    assert len(found) == STACK.num_groups
    for reads in found:
        assert reads.indices[0, 5, 0] == 1
        assert reads.weights[0, 5, 0] > 0.8


@encoders
def test_segments_and_steps_are_the_whole(encoder):
    model = build(encoder)
    tokens = torch.randint(VOCAB, (2, 43))
    with torch.no_grad():
        whole = model(tokens).logits
        first, state = model(tokens[:, :13], model.init_state(2))
        second, state = model(tokens[:, 13:22], state)
        state = model.reserve(state, 21)
        steps = []
        for t in range(22, 43):
            model.before_step(state)
            steps.append(model.step(tokens[:, t : t + 1], state))
    assert_close("logits", torch.cat([first, second, *steps], 1), whole, rtol=1e-5)
    assert (
        model.state_bytes(43)
        == sum(part.nbytes for part in (state.lower[:1], state.memory.keys[:1, : 43 // L]))
        + build(None, retriever="learned").state_bytes(43)
        - (L + 1 + 43 // L) * 32 * 4
    )


@encoders
@torch.no_grad()
def test_repeated_chunks_are_read_alike_in_any_segmentation(encoder):
    """Their vectors are the same, and what is read of them is not."""
    model, draws = build(encoder), torch.Generator().manual_seed(0)
    kinds = torch.randint(VOCAB, (3, L), generator=draws)
    tokens = kinds[torch.randint(3, (2, 15), generator=draws)].flatten(1)
    outputs, state = [], model.init_state(2)
    for segment in tokens[:, :45].split([11, 3, 1, 22, 8], 1):
        y, state = model(segment, state)
        outputs.append(y)
    state = model.reserve(state, 15)
    for t in range(45, 60):
        model.before_step(state)
        outputs.append(model.step(tokens[:, t : t + 1], state))
    assert_close("logits", torch.cat(outputs, 1), model(tokens).logits, rtol=1e-5)


@encoders
def test_packed_documents_are_as_alone(encoder):
    model = build(encoder)
    documents = [torch.randint(VOCAB, (1, n)) for n in (21, 9, 30)]
    borders = torch.tensor([0, 21, 30, 60], dtype=torch.int32)
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), cu_seqlens=borders).logits
        alone = torch.cat([model(each).logits for each in documents], 1)
    assert_close("logits", packed, alone, rtol=1e-5)


@encoders
def test_it_generates_from_prompts_of_several_lengths(encoder):
    model = build(encoder, offload=True)
    prompts = [[1, 2, 3], list(range(23))]
    together = generate(model, prompts, max_new_tokens=18, prefill_tokens=5)
    assert together == [generate(model, [p], max_new_tokens=18)[0] for p in prompts]


@encoders
def test_training_leaves_it_as_it_was(encoder):
    model = build(encoder).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    tokens = torch.randint(VOCAB, (2, 40))
    torch.compile(model.loss, fullgraph=True, backend="eager")(tokens, tokens).backward()
    optimizer.step()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]) == ("outside" in name), name


def test_it_is_in_evaluation_mode_while_the_model_is_trained():
    model = LMConfig(VOCAB, 32, stack=replace(STACK, outside=OrderedConfig())).build()
    assert model.stack.training
    assert not any(part.training for part in model.stack.outside.modules())
    assert not any(part.training for part in model.train().stack.outside.modules())


def test_it_loads_its_weights_after_those_of_a_model_are_drawn():
    assert torch.equal(build(OrderedConfig()).stack.outside.mix.weight, loaded())


def loaded():
    encoder = Ordered()
    encoder.load()
    return encoder.mix.weight


@dataclass(frozen=True)
class Builds:
    """Builds whatever it is given."""

    encoder: object

    def build(self):
        return self.encoder


class Odd(Ordered):
    """An encoder of which one part is wrong."""

    def __init__(self, width=K, embed=None, forward=None):
        super().__init__()
        self.width, self.odd = width, {"embed": embed, "forward": forward}

    def embed(self, tokens):
        return (self.odd["embed"] or super().embed)(tokens)

    def forward(self, chunks):
        return (self.odd["forward"] or super().forward)(chunks)


@pytest.mark.parametrize("method", ["embed", "forward"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: None, TypeError),
        (lambda x: x.long(), TypeError),
        (lambda x: x.tolist(), TypeError),
        (lambda x: x[..., :-1], ValueError),
        (lambda x: x[:1], ValueError),
        (lambda x: x.mean(1), ValueError),
    ],
)
def test_what_an_encoder_returns_is_checked(method, change, error):
    right = getattr(Ordered(), method)
    encoder = Odd(**{method: lambda x: change(right(x))})
    model = build(Builds(encoder))
    with pytest.raises(error, match=f"Odd: what {method} returns must be"):
        model(torch.zeros(2, 9, dtype=torch.int64))


@pytest.mark.parametrize("encoder", [None, 3, nn.Linear(2, 2), *map(Odd, (None, 0, 2.5, True))])
def test_what_is_no_encoder_is_refused(encoder):
    with pytest.raises((TypeError, ValueError), match=r"outside must build an Abs|Odd: width must"):
        replace(STACK, outside=Builds(encoder)).build(32)


def test_fields_replaced_are_refused_by_name():
    tokens = torch.arange(9)[None]
    check_fields(ENCODERS["bag"], lambda bag: bag.build().embed(tokens))
    check_fields(
        replace(STACK, outside=ENCODERS["bag"], num_layers=2, num_groups=1),
        lambda stack: stack.build(32)(torch.ones(1, 9, 64 if stack.outside else 32))[0],
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="outside is for the \"fixed\" retriever, got 'learned'"):
        DRTConfig(outside=BagOfTokensConfig())
    layers = replace(STACK, outside=BagOfTokensConfig(width=8)).build(32)
    with pytest.raises(ValueError, match=r"x must be \(B, T, 32 \+ 8\), got \(1, 5, 32\)"):
        layers(torch.zeros(1, 5, 32))
    with pytest.raises(TypeError, match="DRT: x must be a tensor, got list"):
        layers([[0.0] * 40])
    with pytest.raises(ValueError, match="num_vectors must be"):
        BagOfTokensConfig(num_vectors=0)
