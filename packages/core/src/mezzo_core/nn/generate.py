"""Text from a model: a batch of prompts in, new tokens out, one step at a time."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from mezzo_core.nn.lm import LM


def generate(
    model: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
) -> list[list[int]]:
    """Continue every prompt, and return the new tokens of each.

    The prompts may differ in length: they run as one batch, and none sees another's padding.

    Args:
        model: where the prompts run; its own device and dtype are used.
        prompts: token ids, at least one a prompt.
        max_new_tokens: the most tokens to add to each prompt, at least 1.
        temperature: 0 takes the likeliest token; above, logits are divided by it and sampled.
        top_k: sample among the k likeliest tokens only.
        top_p: sample among the fewest tokens whose probabilities sum to p or more (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", 2020). With `top_k`, both hold.
        stop_tokens: a prompt ends at the first of these; it is not returned.
        seed: makes sampling repeatable; None draws from torch's global generator.

    Raises:
        ValueError: if an argument is out of range; the message names it.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=stop_tokens,
        seed=seed,
    ):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    model: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield one list a step: each prompt's new token, or None once that prompt has stopped.

    Arguments and errors are `generate`'s, and the errors come at the call, not at the first step.
    The model is in evaluation mode until the iterator ends or is closed; its mode then returns.
    """
    sampler = Sampler(temperature, top_k, top_p)
    _check_prompts(prompts, model.vocab_size)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    for token in stop_tokens:
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"stop_tokens must be in [0, {model.vocab_size}), got {token}")
    return _steps(model, prompts, max_new_tokens, sampler, frozenset(stop_tokens), seed)


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn from logits; the fields are arguments of `generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one token a row: (B, vocab) to (B,) int64."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float()
        # The largest becomes 0 before the division, which can then not overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        # A stable sort keeps exactly k of equal logits, the first ones, as argmax does.
        logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits[:, self.top_k :] = float("-inf")
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(before >= self.top_p, 0)
        rank = torch.multinomial(probs, 1, generator=generator)
        return tokens.gather(-1, rank)[:, 0]


@torch.inference_mode()
def _steps(
    model: LM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampler: Sampler,
    stop_tokens: frozenset[int],
    seed: int | None,
) -> Iterator[list[int | None]]:
    device = model.embed.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    tokens, lengths = _pad(prompts, device)
    running = [True] * len(prompts)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        logits, state = model(
            tokens, model.init_state(len(prompts)), lengths=lengths, last_only=True
        )
        for step in range(max_new_tokens):
            new = sampler(logits[:, -1], generator)
            ids = new.tolist()
            running = [on and i not in stop_tokens for on, i in zip(running, ids, strict=True)]
            if not any(running):
                return
            yield [i if on else None for on, i in zip(running, ids, strict=True)]
            if step + 1 < max_new_tokens:
                logits, state = model(new[:, None], state)
    finally:
        for module in training:
            module.training = True


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the prompts (B, T), padded on the right, and their lengths (None if all are T)."""
    sizes = [len(prompt) for prompt in prompts]
    longest = max(sizes)
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    if min(sizes) == longest:
        return tokens, None
    return tokens, torch.tensor(sizes, dtype=torch.int64, device=device)


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}] is empty: give at least one token to continue from")
        for token in prompt:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise ValueError(
                    f"prompts[{i}] must hold token ids in [0, {vocab_size}), got {token!r}"
                )
