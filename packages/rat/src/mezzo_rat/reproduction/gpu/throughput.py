"""Figure 5 and Tables 1 and 11: the most tokens a second that a 1.3B model generates."""

from functools import partial
from statistics import fmean
from typing import Any

import torch
from mezzo_core.bench import captured, measure
from mezzo_core.layer_bench import Layer, check_layer
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.nn.lm import LM
from mezzo_core.papers.cells import Result, Say, Timed, add_cell

from mezzo_rat.recipes import PAPER_NAMES, recipe
from mezzo_rat.reproduction.gpu.decode import fill, rewind, tensors
from mezzo_rat.reproduction.gpu.shapes import MODELS, Selection, SpeedShapes

BATCH_STEP = 8
"""Batches are multiples of this. A prefill takes 1, 2, 4 or 8 rows, which divide them."""
MARGIN = 0.88
"""Share of the memory that states may take; the rest is for activations and a prefill."""


def measure_throughput(
    shapes: SpeedShapes,
    selection: Selection,
    results: dict[int, list[tuple[Result, str]]],
    say: Say,
) -> None:
    """Measure every model at every context.

    Args:
        shapes: the sizes.
        selection: which contexts and models.
        results: for each context, the results that have a cell of it, each with the column. The
            first result tells which cells were measured before.
        say: called with a line about each cell.

    Raises:
        UserError: if a layer computes wrong results; its model is not timed.
    """
    checked: set[MixerConfig] = set()
    for context in filter(selection.length, shapes.contexts):
        for architecture in MODELS:
            model = PAPER_NAMES[architecture]
            (first, column), *views = results[context]
            if not selection.model(model) or first.has(("", model, column)):
                continue
            work = partial(_measure, shapes, architecture, context, checked)
            add_cell(first, ("", model, column), work, say)
            for view, name in views:
                cell = first.cells["", model, column]
                details = {
                    k: cell[k] for k in ("B", "prefill_ms", "decode_ms", "with_prompt") if k in cell
                }
                view.add(("", model, name), cell["values"], **details)


def _measure(
    shapes: SpeedShapes, architecture: str, context: int, checked: set[MixerConfig]
) -> Timed:
    config = recipe(shapes.contexts[context], architecture).model
    for mixer in set(config.mixers) - checked:
        with torch.device(shapes.device):
            layer = Layer(mixer.build(config.d_model), config.d_model)
        check_layer(layer)
        checked.add(mixer)
    torch.manual_seed(0)
    with torch.device(shapes.device):
        model = config.build().bfloat16().eval()
    batch = largest_batch(model, context, shapes)
    while True:
        try:
            return time_generation(model, batch, context, shapes)
        except torch.OutOfMemoryError:
            if batch == BATCH_STEP:
                raise
        # Not in the except block, where the exception would keep the failed run's tensors alive.
        batch = max(BATCH_STEP, batch * 7 // 8 // BATCH_STEP * BATCH_STEP)


def largest_batch(model: LM, context: int, shapes: SpeedShapes) -> int:
    """Return the largest batch whose state fits, by the model's `state_bytes`."""
    fits = int(MARGIN * shapes.free_memory() / model.state_bytes(context))
    return max(BATCH_STEP, min(fits, shapes.max_batch) // BATCH_STEP * BATCH_STEP)


@torch.no_grad()
def time_generation(model: LM, batch: int, context: int, shapes: SpeedShapes) -> Timed:
    """Return tokens a second for each pass: the new tokens over the time of their steps.

    The time of the prompts is in the details, and `with_prompt` includes it. The paper must have
    left it out without saying so: otherwise the RNN's 130,000 tokens a second after prompts of
    15,360 would mean 2 million prompt tokens a second. That is five times what an H100's peak
    allows a model of 1.3B weights.

    The prefill is timed for a few rows, together with copying their state into that of all rows,
    and is multiplied by the number of such groups. Greedy steps are timed at the first, the middle
    and the last position, as the time of a step grows linearly with the position.
    """
    device = torch.device(shapes.device)
    prompt = context - shapes.new_tokens
    rows = min(BATCH_STEP, 2 ** max(0, (shapes.prefill_tokens // prompt).bit_length() - 1))
    state = model.reserve(model.init_state(batch), context)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    prompts = torch.randint(model.vocab_size, (rows, prompt), device=device)

    def prefill() -> None:
        output = model(prompts, model.init_state(rows), last_only=True)
        join(model.reserve(output.state, shapes.new_tokens), state)

    def step() -> None:
        tokens.copy_(model.step(tokens, state).argmax(-1))

    replay = captured(step, device)
    fill(state, prompt)
    values, details = [], {}
    for _ in range(shapes.passes):
        prefill_ms = measure(prefill, device, seconds=0.0, warmup=1, least=2).ms * batch / rows
        decode_ms = []
        for position in (prompt, prompt + shapes.new_tokens // 2, context - 1):
            back = partial(rewind, state, position)
            decode_ms.append(
                measure(replay, device, seconds=shapes.seconds, warmup=1, before=back).ms
            )
        new, steps_ms = batch * shapes.new_tokens, shapes.new_tokens * fmean(decode_ms)
        values.append(new / steps_ms * 1e3)
        details = {
            "B": batch,
            "prefill_ms": prefill_ms,
            "decode_ms": decode_ms,
            "with_prompt": new / (prefill_ms + steps_ms) * 1e3,
        }
    return values, details


def join(rows: Any, state: Any) -> None:
    """Copy the state of a few rows into the first rows of the whole batch's state."""
    for few, field in zip(tensors(rows), tensors(state), strict=True):
        field[: len(few)].copy_(few)
