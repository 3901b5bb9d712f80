"""Checks of the method that need no training: the forms agree, and the limits of the gates.

Each compares numbers in float64 that can differ by rounding only.
"""

from functools import partial

import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers import checks
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement
from torch import Tensor
from torch.nn import functional as F

from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops import GSAState, chunk_gla, chunk_gsa, recurrent_gsa, step_gsa_

T, H, M, D = 75, 2, 6, 8
equality = partial(checks.equality, tolerance=1e-12)


def definition() -> Judgement:
    """The op by chunks equals the paper's recurrence."""
    q, k, v, g = _inputs()
    return equality(
        f"GSA by chunks is the recurrence of section 3.1, T = {T} not a multiple of a chunk",
        chunk_gsa(q, k, v, g).out,
        torch.einsum("bthm,bthmd->bthd", _slot_weights(q, k, g), _memories(v, g)),
    )


def forms_agree() -> Judgement:
    """The forms by chunks, token by token and in place give the same outputs and final states."""
    q, k, v, g = _inputs()
    out, state = chunk_gsa(q, k, v, g)
    slow, after = recurrent_gsa(q, k, v, g)
    memory = GSAState(*(torch.zeros_like(field) for field in state))
    steps = [step_gsa_(q[:, t], k[:, t], v[:, t], g[:, t], None, memory) for t in range(T)]
    return equality(
        "by chunks, token by token, and step by step in place are one function, states included",
        torch.cat([x.flatten() for x in (out, *state, out, *state)]),
        torch.cat([x.flatten() for x in (slow, *after, torch.stack(steps, 1), *memory)]),
    )


def second_pass_is_gla() -> Judgement:
    """With the weights of the slots as queries, the second pass is gated linear attention."""
    q, k, v, g = _inputs()
    return equality(
        "GSA's second pass is gated linear attention with the slots' weights for queries",
        chunk_gsa(q, k, v, g).out,
        chunk_gla(_slot_weights(q, k, g), -torch.expm1(g), v, g).out,
    )


def gates_at_one() -> Judgement:
    """Gates at 1 write nothing: every token reads the initial memory."""
    q, k, v, g = _inputs()
    memory = GSAState(*_normal((1, H, M, D), (1, H, M, D)))
    out, after = chunk_gsa(q, k, v, torch.zeros_like(g), initial_state=memory)
    weights = torch.einsum("bhmd,bthd->bthm", memory.k, q).softmax(-1)
    expected = torch.einsum("bthm,bhmd->bthd", weights, memory.v)
    return equality(
        "with gates at 1 the memory stays, and queries read it by softmax",
        torch.cat([x.flatten() for x in (out, *after)]),
        torch.cat([x.flatten() for x in (expected, *memory)]),
    )


def gates_at_zero() -> Judgement:
    """Gates at 0 keep only the current token: all slots hold it, and the output is its value."""
    q, k, v, g = _inputs()
    return equality(
        "with gates at 0 all slots hold the current token: the output is v",
        chunk_gsa(q, k, v, torch.full_like(g, -50.0)).out,
        v,
    )


def one_slot_a_token() -> Judgement:
    """Without decay and with a slot for each token, the last output is softmax attention."""
    q, k, v, _ = _inputs()
    s = torch.eye(T, dtype=torch.float64)[None, :, None].expand(1, T, H, T)
    weights = torch.einsum("bhd,bshd->bhs", q[:, -1], k).softmax(-1)
    return equality(
        f"with {T} slots, one for each token and none fading, the last output is softmax attention",
        chunk_gsa(q, k, v, None, s).out[:, -1],
        torch.einsum("bhs,bshd->bhd", weights, v),
    )


def _memories(x: Tensor, g: Tensor) -> Tensor:
    """Compute section 3.1's memory after each token, (1, T, H, M, D), without code of our ops."""
    memory, found = torch.zeros(1, H, M, D, dtype=torch.float64), []
    for t in range(T):
        keep = g[:, t, :, :, None].exp()
        memory = keep * memory + (1 - keep) * x[:, t, :, None]
        found.append(memory)
    return torch.stack(found, 1)


def _slot_weights(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return how much each token's query reads each slot, (1, T, H, M)."""
    return torch.einsum("bthmd,bthd->bthm", _memories(k, g), q).softmax(-1)


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v (1, T, H, D) and g (1, T, H, M), with gates like those of the layer."""
    q, k, v, logits = _normal(*((1, T, H, D),) * 3, (1, T, H, M))
    return q, k, v, F.logsigmoid(logits) / 8


def _normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


_HYBRID = LMConfig(64, 64, (GSAConfig(num_heads=4, num_slots=8), AttentionConfig(head_dim=16)))
METHOD = (definition, forms_agree, second_pass_is_gla, gates_at_one, gates_at_zero)
CHECKS = (
    *(Check(f"gsa.check.{each.__name__}", each) for each in (*METHOD, one_slot_a_token)),
    checks.decode_equals_prefill(
        "gsa.check.decode_equals_prefill", _HYBRID, "GSA and attention layers"
    ),
)
