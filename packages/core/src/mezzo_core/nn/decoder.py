"""Decoding: one token of every row a step, in one CUDA graph on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_core.nn.lm import LM
from mezzo_core.nn.sampler import LogitRules, Noise, Sampler


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
        generator: Noise = None,
        rules: LogitRules | None = None,
    ) -> None:
        """Take over the state.

        Args:
            model: in evaluation mode.
            state: from `model.reserve`, with room for as many tokens as there will be steps.
            tokens: (B,) int64, the newest token of each row, which is not in the state yet.
            sampler: samples the next tokens.
            generator: on the model's device, one or one for each row; None takes torch's global
                one. Or what they drew, in a buffer that the caller fills before each step.
            rules: change the logits, and note the tokens.
        """
        self.model = model
        self.state = state
        self.tokens = tokens.clone()
        self.sampler = sampler
        self.generator = generator
        self.rules = rules
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
        if isinstance(self.generator, torch.Generator):
            generators.append(self.generator)
        elif isinstance(self.generator, Sequence):
            generators.extend(self.generator)
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
        logits = self.model.step(self.tokens.clamp(min=0)[:, None], self.state)[:, -1]
        if self.rules is not None:
            logits = self.rules(logits)
        self.tokens.copy_(self.sampler(logits, self.generator))
        if self.rules is not None:
            self.rules.note_(self.tokens)
