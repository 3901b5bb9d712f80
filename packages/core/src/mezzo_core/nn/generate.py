"""Generation: continues a batch of prompts, one token of every prompt a step.

On a GPU a step is one CUDA graph, captured once in each call and replayed. On a CPU it is eager.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo_core.config_json import check_fields
from mezzo_core.nn.lm import LM

NO_TOKEN = -1
"""The result of sampling from logits that are NaN."""
NO_NUMBERS = "the model's outputs are no numbers: its training diverged, or its weights are damaged"
_COLDEST = torch.finfo(torch.float32).tiny


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
    prefill_tokens: int | None = None,
) -> list[list[int]]:
    """Continue every prompt, and return the new tokens of each.

    The prompts run as one batch. They may differ in length: padding does not influence the results.

    Args:
        model: the model; generation runs on its device and in its dtype.
        prompts: token ids, at least one for each prompt.
        max_new_tokens: the most tokens to add to each prompt, at least 1.
        temperature: 0 takes the most likely token. Otherwise the logits are divided by it and a
            token is sampled.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the fewest tokens whose probabilities sum to p or more (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", 2020). A sum may miss p by a
            millionth of it: float32 is no more exact. With `top_k`, both apply.
        stop_tokens: a prompt stops at the first of these tokens, which is not returned.
        seed: makes sampling repeatable; None draws from torch's global generator.
        prefill_tokens: run this many tokens of the prompts at a time, to bound the memory of long
            prompts; None runs all at once. The results are the same up to rounding.

    Raises:
        ValueError: if an argument is out of range (the message names it), or the model's logits
            are NaN.
        TypeError: if an argument has the wrong type.
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
        prefill_tokens=prefill_tokens,
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
    prefill_tokens: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield one list a step: each prompt's new token, or None once that prompt has stopped.

    The arguments and errors are those of `generate`. Errors about arguments are raised at the call,
    not at the first step. The model is in evaluation mode until the iterator ends or is closed, of
    several until the last one does; then its earlier mode is restored.
    """
    sampler = Sampler(temperature, top_k, top_p)
    _check_prompts(prompts, model.vocab_size)
    if not isinstance(max_new_tokens, Integral) or not 1 <= max_new_tokens < 2**31:
        raise ValueError(f"max_new_tokens must be from 1 to 2^31 - 1, got {max_new_tokens!r}")
    if seed is not None and not (isinstance(seed, Integral) and 0 <= seed < 2**63):
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed!r}")
    if prefill_tokens is not None and not (
        isinstance(prefill_tokens, Integral) and prefill_tokens >= 1
    ):
        raise ValueError(f"prefill_tokens must be at least 1, got {prefill_tokens!r}")
    stops = tuple(stop_tokens)  # an iterator, such as map(...), can be read only once
    for token in stops:
        # A tensor would be equal to no token: prompts would never stop.
        if not isinstance(token, Integral) or not 0 <= int(token) < model.vocab_size:
            raise ValueError(
                f"stop_tokens must hold token ids in [0, {model.vocab_size}), got {token!r}"
            )
    new = _new_tokens(model, prompts, prefill_tokens, max_new_tokens, sampler, seed)
    return _steps(model, new, len(prompts), frozenset(stops))


@dataclass(frozen=True)
class Sampler:
    """Samples tokens from logits. Its fields are arguments of `generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample one token for each row, (B, vocab) to (B,) int64; NO_TOKEN if a logit is NaN."""
        best = logits.argmax(-1)
        largest = logits.gather(-1, best[:, None])  # NaN if any logit of the row is NaN
        tokens = best if self.temperature < _COLDEST else self._draw(logits, largest, generator)
        return tokens.masked_fill(~largest[:, 0].isfinite(), NO_TOKEN)

    def _draw(self, logits: Tensor, largest: Tensor, generator: torch.Generator | None) -> Tensor:
        # Subtracting the largest logit first keeps the division from overflowing.
        logits = (logits.float() - largest.float()) / self.temperature
        if self.top_k is None and self.top_p is None:
            return _sample(logits.softmax(-1), generator)
        # With a stable sort, top_k prefers the first of equal logits, as argmax does.
        logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits[:, min(self.top_k, logits.shape[1]) :] = float("-inf")
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs.masked_fill(before >= self.top_p * (1 - 1e-6), 0)
        rank = _sample(probs, generator)
        return tokens.gather(-1, rank[:, None])[:, 0]


def _sample(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Sample one index for each row, (B, n) to (B,), with the given probabilities.

    Of n exponential variables with rates p_i, the i-th is the smallest with probability p_i.
    `torch.multinomial` uses this too, but it waits for the GPU, which a CUDA graph cannot do.
    """
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any  # tensors that each replay overwrites


class Decoder:
    """Samples one token of every row in each step, overwriting the state.

    The first step runs eagerly. On a GPU the second step is captured as a CUDA graph, and from then
    on a step is one launch. A capture needs a warm-up, in which kernels are compiled and libraries
    loaded. The first step serves as this warm-up: it is a real step, so the state is not copied.
    The graph keeps the autocast settings of the second step. What the model runs before some steps
    (`before_step`) becomes another graph in the same way.
    """

    def __init__(
        self,
        model: LM,
        state: Any,
        tokens: Tensor,
        sampler: Sampler,
        generator: torch.Generator | None = None,
    ) -> None:
        """Take over the state.

        Args:
            model: in evaluation mode.
            state: from `model.reserve`, with room for as many tokens as there will be steps.
            tokens: (B,) int64, the newest token of each row, which is not in the state yet.
            sampler: samples the next tokens.
            generator: a generator on the model's device; None takes torch's global one.
        """
        self.model = model
        self.state = state
        self.tokens = tokens.clone()
        self.sampler = sampler
        self.generator = generator
        self._stream = torch.cuda.Stream(tokens.device) if tokens.is_cuda else None
        # By what is run and the identity of its state; None once it has run eagerly.
        self._graphs: dict[tuple[Callable[[Any], Any], int], _Graph | None] = {}

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Return each row's next token, (B,) int64, in a buffer that the next step overwrites."""
        self.model.before_step(self.state, self._run)
        self._run(Decoder._advance, self)
        return self.tokens

    def _run(self, work: Callable[[Any], Any], state: Any) -> Any:
        """Call work(state): eagerly, at first; from the second call on in a graph, on a GPU."""
        if self._stream is None:
            return work(state)
        key = work, id(state)
        if key not in self._graphs:
            self._graphs[key] = None
            return self._warm_up(work, state, self._stream)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._capture(work, state, self._stream)
        graph.graph.replay()
        return graph.result

    def _warm_up(self, work: Callable[[Any], Any], state: Any, stream: torch.cuda.Stream) -> Any:
        """Run on the stream on which the capture will run."""
        here = torch.cuda.current_stream(stream.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = work(state)
        here.wait_stream(stream)
        return result

    def _capture(self, work: Callable[[Any], Any], state: Any, stream: torch.cuda.Stream) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[stream.device.index]]
        if self.generator is not None:
            generators.append(self.generator)
        # A generator keeps the buffers that its first graph allocates. If they were made in
        # inference mode, every later graph outside of inference mode would fail.
        with torch.inference_mode(False):
            for generator in generators:
                graph.register_generator_state(generator)
        # Autocast frees the weights that it has cast when its context ends, but the graph is used
        # longer. So the cast must be part of the graph.
        casts = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        with casts, torch.cuda.device(stream.device), torch.cuda.graph(graph, stream=stream):
            result = work(state)
        return _Graph(graph, result)

    def _advance(self) -> None:
        # A NO_TOKEN on a GPU is noticed only later; until then any valid token will do.
        logits = self.model.step(self.tokens.clamp(min=0)[:, None], self.state)
        self.tokens.copy_(self.sampler(logits[:, -1], self.generator))


@torch.inference_mode()
def _steps(
    model: LM, new_tokens: Iterator[Tensor], num_rows: int, stop_tokens: frozenset[int]
) -> Iterator[list[int | None]]:
    """Yield the new tokens of the rows that have not stopped, with the model in evaluation mode."""
    running = [True] * num_rows
    with _evaluation(model):
        for new in new_tokens:
            ids = new.tolist()
            if NO_TOKEN in ids:
                raise ValueError(NO_NUMBERS)
            running = [on and i not in stop_tokens for on, i in zip(running, ids, strict=True)]
            if not any(running):
                return
            yield [i if on else None for on, i in zip(running, ids, strict=True)]


@dataclass
class _Held:
    training: list[nn.Module]  # what was in training mode before
    streams: int = 0


_held: dict[LM, _Held] = {}
"""The models that streams have in evaluation mode."""


@contextmanager
def _evaluation(model: LM) -> Iterator[None]:
    """Hold the model in evaluation mode, until the last of those who do ends."""
    held = _held.setdefault(model, _Held([part for part in model.modules() if part.training]))
    held.streams += 1
    model.eval()
    try:
        yield
    finally:
        held.streams -= 1
        if not held.streams:
            del _held[model]
            for part in held.training:
                part.training = True


@torch.inference_mode()
def _new_tokens(
    model: LM,
    prompts: Sequence[Sequence[int]],
    prefill_tokens: int | None,
    max_new_tokens: int,
    sampler: Sampler,
    seed: int | None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,), also of rows that have stopped."""
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))
    tokens, lengths = _pad(prompts, device)
    logits, state = _prefill(model, tokens, lengths, prefill_tokens or tokens.shape[1])
    new = sampler(logits[:, -1], generator)
    yield new
    if max_new_tokens == 1:
        return
    decoder = Decoder(model, model.reserve(state, max_new_tokens - 1), new, sampler, generator)
    del state  # the prompt's own copy
    for _ in range(max_new_tokens - 1):
        yield decoder.step()


def _prefill(model: LM, tokens: Tensor, lengths: Tensor | None, size: int) -> tuple[Tensor, Any]:
    """Run prompts, `size` tokens at a time; return the last logits (B, 1, vocab) and the state.

    `lengths` (B,) has the number of real tokens in each row; None if no row has padding.
    """
    logits, state = None, model.init_state(len(tokens))
    for start in range(0, tokens.shape[1], size):
        segment = tokens[:, start : start + size]
        if lengths is None:
            logits, state = model(segment, state, last_only=True)
            continue
        real = (lengths - start).clamp(0, segment.shape[1])
        found, state = model(segment, state, lengths=real, last_only=True)
        has_tokens = (real > 0)[:, None, None]
        logits = found if logits is None else torch.where(has_tokens, found, logits)
    assert logits is not None  # no prompt is empty
    return logits, state


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
    if len(prompts) == 0:  # an array has no truth value
        raise ValueError("prompts must hold at least one prompt, got none")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Integral):
            raise ValueError(f"prompts must hold a list of token ids for each prompt, got {prompt}")
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}] is empty: give at least one token to continue from")
        for token in prompt:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise ValueError(
                    f"prompts[{i}] must hold token ids in [0, {vocab_size}), got {token!r}"
                )
