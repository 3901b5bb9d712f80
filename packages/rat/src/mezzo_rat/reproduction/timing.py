"""Speeds on this machine: layers as in Tables 6 to 8, and generation of models as in Table 1."""

import time
from collections.abc import Callable
from itertools import product

import torch
from mezzo_core.bench import measure
from mezzo_core.nn.generate import generate
from mezzo_core.papers import Measurement, ResultRow

from mezzo_rat.bench import Layer, check_against_steps, mixers
from mezzo_rat.recipes import RECIPES
from mezzo_rat.reproduction.scale import RECIPES_OF_MODELS, Scale

HEAD_DIM = 32
CPU = torch.device("cpu")
PHASES = ("train", "prefill", "decode")
REPEATS = 3


def time_layers(scale: Scale) -> dict[str, Measurement]:
    """Time one layer (norm, mixer with projections, residual) in each of PHASES.

    "train" is forward and backward (Table 6), "prefill" a forward (Table 7), "decode" one token at
    position T (Table 8). Every layer is checked against its recurrent form before it is timed.
    """
    layers = {}
    for name, config in mixers(HEAD_DIM).items():
        torch.manual_seed(0)
        layers[name] = Layer(config.build(scale.timed_width), scale.timed_width)
        check_against_steps(layers[name])
    works = {"train": _train, "prefill": _prefill, "decode": _decode}
    times: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    # Several passes over everything: their spread shows the noise of the machine.
    for _, phase, (name, layer) in product(range(REPEATS), PHASES, layers.items()):
        medians = (
            measure(works[phase](layer, T, scale), CPU, seconds=scale.timed_seconds, warmup=1).ms
            for T in scale.timed_lengths
        )
        times.setdefault((phase, name), []).append(tuple(medians))
    rows = {
        phase: [ResultRow(name, tuple(times[phase, name])) for name in layers] for phase in PHASES
    }
    columns = tuple(str(length) for length in scale.timed_lengths)
    settings = {
        "train": f"forward and backward of one layer, {scale.timed_tokens} tokens a batch",
        "prefill": f"forward of one layer, {scale.timed_tokens} tokens a batch",
        "decode": f"one token at position T through one layer, batch {scale.decode_batch}",
    }
    shared = (
        f"C = {scale.timed_width}, D = {HEAD_DIM}, float32, eager PyTorch, median of "
        f"each of {REPEATS} passes, {torch.get_num_threads()} threads"
    )
    return {
        phase: Measurement(columns, tuple(rows[phase]), f"{settings[phase]}; {shared}", unit="ms")
        for phase in PHASES
    }


def _train(layer: Layer, num_tokens: int, scale: Scale) -> Callable[[], object]:
    shape = (max(1, scale.timed_tokens // num_tokens), num_tokens, scale.timed_width)
    x = torch.randn(shape, requires_grad=True)
    dout = torch.ones(shape)
    return lambda: layer(x).backward(dout)


def _prefill(layer: Layer, num_tokens: int, scale: Scale) -> Callable[[], object]:
    shape = (max(1, scale.timed_tokens // num_tokens), num_tokens, scale.timed_width)
    x = torch.randn(shape)
    return torch.no_grad()(lambda: layer(x))


def _decode(layer: Layer, num_tokens: int, scale: Scale) -> Callable[[], object]:
    with torch.no_grad():
        prompt = torch.randn(scale.decode_batch, num_tokens, scale.timed_width)
        _, state = layer.mixer(prompt, layer.mixer.init_state(scale.decode_batch))
    state = layer.mixer.reserve(state, 1)
    x = torch.randn(scale.decode_batch, 1, scale.timed_width)

    def step() -> torch.Tensor:
        state.lengths.fill_(num_tokens)  # every step decodes the same position
        return x + layer.mixer.step(layer.norm(x), state)

    return torch.no_grad()(step)


def time_generation(scale: Scale) -> Measurement:
    """Measure the tokens a second that each tiny model generates; the better of two batches."""
    prompt_length = 0
    rows = []
    for model_name, recipe in RECIPES_OF_MODELS.items():
        config = RECIPES[recipe]()
        prompt_length = scale.budget.seq_len - scale.new_tokens
        torch.manual_seed(0)
        model = config.model.build()
        prompt = [1] * prompt_length
        best = 0.0
        for batch in (scale.decode_batch, 4 * scale.decode_batch):
            start = time.perf_counter()
            generate(model, [prompt] * batch, max_new_tokens=scale.new_tokens)
            best = max(best, batch * scale.new_tokens / (time.perf_counter() - start))
        rows.append(ResultRow(model_name, ((best,),)))
    return Measurement(
        ("Throughput",),
        tuple(rows),
        f"{scale.new_tokens} tokens after {prompt_length} of prompt, prefill included, the better "
        f"of batch {scale.decode_batch} and {4 * scale.decode_batch}, tiny models, float32",
        unit="tokens a second",
    )
