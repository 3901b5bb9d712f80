"""How the next tokens are chosen from logits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo_core.config_json import check_fields

NO_TOKEN = -1
"""The result of sampling from logits that are NaN."""
_COLDEST = torch.finfo(torch.float32).tiny

Generators = torch.Generator | Sequence[torch.Generator] | None
"""Sources of random numbers: one generator, one for each row, or None for torch's global one."""
Noise = Generators | Tensor
"""What samples a token: generators, or numbers already drawn (`draw_`), float32 (B, vocab)."""


@dataclass(frozen=True)
class Sampler:
    """Samples tokens from logits. Its fields are arguments of `generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            p = getattr(self, name)
            if p is not None and not 0 < p <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {p}")

    def __call__(self, logits: Tensor, noise: Noise = None) -> Tensor:
        """Sample one token for each row, (B, vocab) to (B,) int64; NO_TOKEN if a logit is NaN."""
        best = logits.argmax(-1)
        largest = logits.gather(-1, best[:, None])  # NaN if any logit of the row is NaN
        tokens = best if self.temperature < _COLDEST else self._draw(logits, largest, noise)
        return tokens.masked_fill(~largest[:, 0].isfinite(), NO_TOKEN)

    def _draw(self, logits: Tensor, largest: Tensor, noise: Noise) -> Tensor:
        # Subtracting the largest logit first keeps the division from overflowing.
        logits = (logits.float() - largest.float()) / self.temperature
        tokens = None
        if self.top_k is None and self.top_p is None:
            probs = logits.softmax(-1)
        else:
            # With a stable sort, top_k prefers the first of equal logits, as argmax does.
            logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
            if self.top_k is not None:
                logits[:, min(self.top_k, logits.shape[1]) :] = float("-inf")
            probs = logits.softmax(-1)
            if self.top_p is not None and self.top_p < 1:
                before = probs.cumsum(-1) - probs
                probs = probs.masked_fill(before >= self.top_p * (1 - 1e-6), 0)
        if self.min_p is not None:
            probs = probs.masked_fill(logits < math.log(self.min_p) - 1e-6, 0)
        chosen = _sample(probs, noise)
        return chosen if tokens is None else tokens.gather(-1, chosen[:, None])[:, 0]


class LogitRules:
    """Applies a repetition penalty and a bias to logits, before a token is chosen.

    For tokens that a row already has, positive logits are divided by the penalty and negative ones
    multiplied (Keskar et al., "CTRL", 2019). Then the bias of single tokens is added.
    """

    def __init__(
        self, tokens: Sequence[Sequence[int]], penalty: float, bias: Mapping[int, float],
        vocab_size: int, device: torch.device,
    ) -> None:  # fmt: skip
        """Take the tokens of each row so far; a penalty of 1 and no bias change nothing."""
        self.penalty = penalty
        self.seen = self.bias = None
        if penalty != 1:
            self.seen = torch.zeros(len(tokens), vocab_size, dtype=torch.bool)
            for row, its in zip(self.seen, tokens, strict=True):
                row[torch.tensor([int(token) for token in its])] = True
            self.seen = self.seen.to(device)
        if bias:
            values = torch.zeros(vocab_size)
            for token, value in bias.items():
                values[token] = value
            self.bias = values.to(device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Change logits (B, vocab); without a penalty also (B, T, vocab)."""
        if self.seen is not None:
            less = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
            logits = torch.where(self.seen, less, logits)
        return logits if self.bias is None else logits + self.bias

    def note_(self, tokens: Tensor) -> None:
        """Count one more token (B,) of each row as seen."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens.clamp(min=0)[:, None], True)

    def put_rows_(self, rows: Sequence[int], other: "LogitRules") -> None:
        """Replace some rows by those of `other`, which has the same penalty and bias."""
        if self.seen is not None and other.seen is not None:
            self.seen[rows] = other.seen


def row_generators(seed: int | Sequence[int] | None, device: torch.device) -> Generators:
    """Return a generator for the seed, or one for each row's seed."""
    if seed is None:
        return None
    if isinstance(seed, Sequence):
        return [torch.Generator(device).manual_seed(int(its)) for its in seed]
    return torch.Generator(device).manual_seed(int(seed))


def draw_(waits: Tensor, generator: Generators) -> Tensor:
    """Fill `waits`, float32 (B, vocab), with exponential variables for `_sample`; return it."""
    if isinstance(generator, Sequence):
        for row, its in zip(waits, generator, strict=True):
            row.exponential_(generator=its)
        return waits
    return waits.exponential_(generator=generator)


def _sample(probs: Tensor, noise: Noise) -> Tensor:
    """Sample one index for each row, (B, n) to (B,), by probabilities of any sum.

    Of n exponential variables with rates p_i, the i-th is the smallest with probability p_i.
    `torch.multinomial` uses this too, but it waits for the GPU, which a CUDA graph cannot do.
    """
    waits = noise if isinstance(noise, Tensor) else draw_(torch.empty_like(probs), noise)
    return (probs / waits).argmax(-1)
