"""Models in lm-eval: measures its tasks with states, so that no context is read twice.

The choices of a question have the same context. The model reads it once, and then reads each choice
from the state after it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from mezzo_core.data.stream_decoder import StreamDecoder
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn.generate import stream
from mezzo_core.nn.kept_graphs import keep_graphs
from mezzo_core.nn.lm import LM
from mezzo_core.ops.precision import accumulation_dtype

_MAX_NEW_TOKENS = 256
"""New tokens in a task that sets no limit: lm-eval's own default."""
_RESAMPLES = 1000
"""Bootstrap samples, for the error of a measure that is no mean, such as perplexity."""
_SAMPLING = {"until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "min_p"}
Item = TypeVar("Item")
Tokens = tuple[int, ...]


class MezzoEvalLM(TemplateLM):
    """A language model and its tokenizer, as lm-eval calls them."""

    def __init__(
        self,
        lm: LM,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        segment_tokens: int = 2048,
    ) -> None:
        """Take a model, on its device and in its dtype.

        Args:
            lm: the model.
            tokenizer: its tokenizer.
            batch_size: sequences at a time.
            max_length: the most tokens before one that is predicted. A longer context loses its
                beginning, and long texts are read in windows. None reads everything.
            segment_tokens: tokens of a row at a time, for bounded memory.
        """
        super().__init__()
        self.lm = lm.eval()
        self.tokens = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length
        self.segment_tokens = segment_tokens
        self._device = next(lm.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.tokens.eos_token

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is read after: its first token, or a document's end."""
        return next(iter(self.tokens.begin_tokens), self.eot_token_id)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, after those that every document of the model begins with."""
        begin = () if add_special_tokens is False else self.tokens.begin_tokens
        return [*begin, *self.tokens.encode(string)]

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the likeliest.

        Args:
            requests: what lm-eval asked for, the context's tokens (of which a context of spaces
                alone has none) and the continuation's.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # The last token of the context predicts the continuation's first, so it is read with it.
        members: dict[Tokens, list[tuple[int, Tokens]]] = {}
        for i, (_asked, context, continuation) in enumerate(requests):
            if continuation:
                context = context or [self.prefix_token_id]
                tokens = self._newest((*context, *continuation), len(continuation))
                border = len(tokens) - len(continuation) - 1
                members.setdefault(tokens[:border], []).append((i, tokens[border:]))
        longest_first = sorted(members, key=lambda shared: (-len(shared), shared))
        for batch in _parts(longest_first, self.batch_size):
            state = self._read(batch)
            # A turn scores one continuation of each context, the shortest first: its rows are those
            # of the state, and have about the same lengths.
            turns = [sorted(members[shared], key=lambda one: len(one[1])) for shared in batch]
            for turn in range(max(map(len, turns))):
                rows = [row for row, its in enumerate(turns) if turn < len(its)]
                own = state if len(rows) == len(batch) else self.lm.select(state, rows)
                part = [turns[row][turn] for row in rows]
                scores = self._score(own, [tokens for _, tokens in part])
                for (i, _tokens), score in zip(part, scores, strict=True):
                    found[i] = score
        for (asked, _context, _continuation), score in zip(requests, found, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, score)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            length = self.max_length or len(tokens) + 1
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[i] += score
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings, which is cut off."""
        found = [""] * len(requests)
        alike: dict[str, list[tuple[int, Tokens]]] = {}
        for i, request in enumerate(requests):
            text, settings = request.args
            alike.setdefault(json.dumps(settings, sort_keys=True), []).append(
                (i, tuple(self.tok_encode(text)) or (self.prefix_token_id,))
            )
        for settings, prompts in alike.items():
            asked = dict(normalize_gen_kwargs(json.loads(settings), _MAX_NEW_TOKENS))
            if unknown := sorted(asked.keys() - _SAMPLING):
                raise UserError(
                    f"the task generates with {', '.join(unknown)}, which is not supported; "
                    f"supported are {', '.join(sorted(_SAMPLING))}"
                )
            prompts.sort(key=lambda prompt: -len(prompt[1]))
            with keep_graphs(self.lm):
                for group in _parts(prompts, self.batch_size):
                    texts = self._continue([tokens for _, tokens in group], asked)
                    for (i, _tokens), text in zip(group, texts, strict=True):
                        found[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _newest(self, tokens: Tokens, num_predicted: int) -> Tokens:
        """Return the tokens to read, without the first ones if they are more than max_length."""
        if self.max_length is None:
            return tokens
        if num_predicted > self.max_length:
            raise UserError(
                f"a continuation of {num_predicted} tokens is longer than max_length = "
                f"{self.max_length} (--seq-len)"
            )
        return tokens[-self.max_length - 1 :]

    def _read(self, rows: Sequence[Tokens]) -> Any:
        """Return the state after these tokens, of which there may be none."""
        state = self.lm.init_state(len(rows))
        for tokens, lengths in self._segments(rows):
            _, state = self.lm(tokens, state, lengths=lengths, last_only=True)
        return state

    def _score(self, state: Any, rows: Sequence[Tokens]) -> list[tuple[float, bool]]:
        """Score all tokens of each row but its first, which the state has not seen."""
        totals = torch.zeros(len(rows), dtype=torch.float64)
        greedy = torch.ones(len(rows), dtype=torch.bool)
        inputs = [row[:-1] for row in rows]
        targets = self._segments([row[1:] for row in rows])
        for (tokens, lengths), (wanted, _) in zip(self._segments(inputs), targets, strict=True):
            logits, state = self.lm(tokens, state, lengths=lengths)
            logits = logits.to(accumulation_dtype(logits.dtype))
            scores = logits.log_softmax(-1).gather(-1, wanted[:, :, None])[:, :, 0]
            places = torch.arange(tokens.shape[1], device=lengths.device)
            is_real = places < lengths[:, None]
            is_best = (logits.argmax(-1) == wanted) | ~is_real
            totals += torch.where(is_real, scores, 0).sum(1, dtype=torch.float64).cpu()
            greedy &= is_best.all(1).cpu()
        return list(zip(totals.tolist(), greedy.tolist(), strict=True))

    def _segments(self, rows: Sequence[Tokens]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows, padded on the right, in segments; and each row's tokens of a segment."""
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        for start in range(0, longest, self.segment_tokens):
            segment = padded[:, start : start + self.segment_tokens].to(self._device)
            yield segment, (lengths - start).clamp(0, segment.shape[1])

    def _continue(self, prompts: Sequence[Tokens], asked: dict[str, Any]) -> list[str]:
        num_new, until = asked["max_gen_toks"], [stop for stop in asked["until"] if stop]
        if self.max_length is not None:
            room = self.max_length - num_new
            if room < 1:
                raise UserError(
                    f"max_length must leave room for a prompt and {num_new} new tokens, "
                    f"got {self.max_length}"
                )
            prompts = [prompt[-room:] for prompt in prompts]
        decoders = [StreamDecoder(self.tokens, prompt) for prompt in prompts]
        texts, running = [""] * len(prompts), set(range(len(prompts)))
        steps = stream(
            self.lm,
            prompts,
            max_new_tokens=num_new,
            temperature=asked.get("temperature", 1.0) if asked["do_sample"] else 0.0,
            top_k=asked.get("top_k"),
            top_p=asked.get("top_p"),
            min_p=asked.get("min_p"),
            stop_tokens=[t for t in self.tokens.stop_tokens if t < self.lm.vocab_size],
            seed=0,
        )
        for step in steps:
            for i in sorted(running):
                texts[i] += decoders[i].push(step[i])
                if step[i] is None or any(stop in texts[i] for stop in until):
                    running.remove(i)
            if not running:
                break
        whole = [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)]
        return [_cut(text, until) for text in whole]


def evaluate_tasks(
    model: MezzoEvalLM,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Measure a model on tasks of lm-eval, and return its results.

    Args:
        model: the model.
        tasks: names of tasks or groups, at least one.
        folder: with .yaml files of tasks, which take the place of lm-eval's own.
        num_fewshot: examples before each question; None for what each task says.
        limit: questions a task; None for all.

    Raises:
        UserError: if a task is not there, or asks for what is not supported.
    """
    manager = TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
    for task in tasks:
        if task not in manager.all_tasks:
            raise UserError(f"there is no task {task!r}{nearest(task, manager.all_tasks)}")
    # lm-eval would fork for its error bars, and a fork of a process with torch's threads can hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    return simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
    )


def _cut(text: str, until: Iterable[str]) -> str:
    """Return the text before the first of the stop strings."""
    for stop in until:
        text = text.partition(stop)[0]
    return text


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
