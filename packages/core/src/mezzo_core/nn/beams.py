"""Beam search: looks for the continuations that are likeliest as a whole."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from mezzo_core.nn.ends import NO_NUMBERS
from mezzo_core.nn.generate import evaluation
from mezzo_core.nn.generate_arguments import check_count, check_memory, check_prompts, check_stops
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import read_prompts
from mezzo_core.nn.sharded import check_whole


class Beam(NamedTuple):
    """A continuation of a prompt.

    Attributes:
        tokens: the new tokens, without the stop token.
        score: the sum of their log-probabilities, that of the stop token included.
    """

    tokens: list[int]
    score: float


@torch.inference_mode()
def beam_search(
    model: LM,
    prompts: Sequence[Sequence[int]],
    *,
    num_beams: int,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> list[list[Beam]]:
    """Return the likeliest continuations found for each prompt, the best first.

    Each step extends every beam by all tokens and keeps the `num_beams` likeliest results. A beam
    that ends with a stop token is final, but still counts as one of `num_beams`. Scores are sums,
    not divided by lengths.

    Args:
        model: the model; the search runs on its device and in its dtype. FSDP2 must not
            have sharded it.
        prompts: token ids, at least one for each prompt.
        num_beams: how many continuations of each prompt are followed and returned.
        max_new_tokens: the most tokens to add.
        stop_tokens: a continuation ends at the first of these.

    Raises:
        ValueError: if an argument is out of range, the beams need more memory than is free, or the
            model's logits are NaN.
    """
    check_whole(model)
    check_prompts(prompts, model.vocab_size)
    check_count("num_beams", num_beams)
    check_count("max_new_tokens", max_new_tokens)
    stops = check_stops(stop_tokens, model.vocab_size)
    length = max(map(len, prompts)) + max_new_tokens
    check_memory("num_beams", num_beams, model, num_beams * len(prompts), length)
    with evaluation(model):
        logits, state = read_prompts(model, prompts)
        state = model.reserve(state, max_new_tokens)
        live = [[Beam([], 0.0)] for _ in prompts]
        done: list[list[Beam]] = [[] for _ in prompts]
        for count in range(1, max_new_tokens + 1):
            if not logits.amax(-1).isfinite().all():
                raise ValueError(NO_NUMBERS)
            scores = logits.double().log_softmax(-1)
            rows: list[int] = []
            before = 0
            for i, beams in enumerate(live):
                its = scores[before : before + len(beams)]
                live[i], parents, ended = _extend(beams, its, num_beams - len(done[i]), stops)
                done[i] += ended
                rows += [before + parent for parent in parents]
                before += len(beams)
            if not rows or count == max_new_tokens:
                break
            newest = [beam.tokens[-1] for beams in live for beam in beams]
            state = model.select(state, rows)
            model.before_step(state)
            tokens = torch.tensor(newest, device=scores.device)
            logits = model.step(tokens[:, None], state)[:, -1]
    return [
        sorted([*beams, *ended], key=lambda beam: -beam.score)
        for beams, ended in zip(live, done, strict=True)
    ]


def _extend(
    beams: Sequence[Beam], scores: torch.Tensor, count: int, stops: frozenset[int]
) -> tuple[list[Beam], list[int], list[Beam]]:
    """Return the `count` likeliest beams one token longer.

    `scores` (len(beams), vocab) are the log-probabilities of each beam's next token. Returns the
    beams that go on, the index of the beam that each extends, and the beams that have ended.
    """
    if not beams or count < 1:
        return [], [], []
    sums = [[beam.score] for beam in beams]
    totals = scores + torch.tensor(sums, dtype=scores.dtype, device=scores.device)
    best = totals.flatten().topk(min(count, totals.numel()))
    going, parents, ended = [], [], []
    for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        parent, token = divmod(place, totals.shape[1])
        if token in stops:
            ended.append(Beam(beams[parent].tokens, score))
        else:
            going.append(Beam([*beams[parent].tokens, token], score))
            parents.append(parent)
    return going, parents, ended
