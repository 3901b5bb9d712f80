"""The paper's tables and claims: what answers each, and by which criterion.

Criteria say what the paper says. "About X" is within a quarter of X. Where the paper has a
difference of cross-entropies at its own size, a smaller model can only answer which one is lower.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mezzo_core.nn.on_meta import on_meta
from mezzo_core.positions import alibi_slopes
from mezzo_core.reproduction.beside import in_recipes
from mezzo_core.reproduction.claims import Evidence, by_tests, result, timed, trained
from mezzo_core.reproduction.criteria import (
    Bound,
    Criterion,
    Every,
    Of,
    Order,
    about,
    change,
    ratio,
)
from mezzo_core.reproduction.measurement import Entry, Measurement, at_best
from mezzo_core.reproduction.outcomes import Judgement
from mezzo_core.reproduction.published import Claim, Table
from mezzo_core.reproduction.reproduce import Reproduction, Scale
from mezzo_core.reproduction.tiny import SMOKE, Budget
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.optim import build_optimizer
from torch import nn

from mezzo_recurrent_transformer.recipes import PAPER_NAMES, RECIPES, with_layers
from mezzo_recurrent_transformer.reproduction import speed
from mezzo_recurrent_transformer.reproduction.speed import EAGER, GRAPH, NAIVE
from mezzo_recurrent_transformer.reproduction.synthetic import SweepConfig
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

CE = "Val CE"
XFMR, RT = PAPER_NAMES.values()
NORMALIZED, RAW = "with RMSNorm", "without RMSNorm"
"""The models of the ablation: persistent pairs from normalized or from raw outputs."""
SMALL, RATES, SYNTHETIC = (f"nvidia-h100/{n}" for n in ("train_small", "train_rates", "synthetic"))
COMPRESSION = "compression"
"""The synthetic task whose rows are hardly ever right as a whole, so that single letters count."""

_SIZE = "a smaller size: the order alone"
shown = partial(by_tests, "rt.claim", "packages/recurrent_transformer/tests")
"""Answers claims by tests of this package, see `by_tests`."""
speeds = partial(timed, "nvidia-h200/speed_")
"""Answers from the speeds of this run and the committed ones."""


def in_nats(ours: Measurement) -> Measurement:
    """Look at perplexities as cross-entropies, each model's at its best learning rate."""

    def turned(entry: Entry) -> Entry:
        value = entry.value
        return replace(entry, value=value if isinstance(value, str) else math.log(value))

    best = at_best(ours, CE)
    return replace(best, entries=tuple(map(turned, best.entries)), unit="nats")


def small(criterion: Criterion) -> Evidence:
    """Answer from the small trainings, by cross-entropy."""
    return result(SMALL, criterion, in_nats, note=_SIZE)


def gain_of_graphs(printed: Table | Claim, ours: Measurement) -> Judgement:
    """Judge whether graphs are as much faster as in Table 2, at each batch."""
    assert isinstance(printed, Table)
    cells = [tuple(map(float, row.values)) for row in printed.rows]
    bounds = {f"B={B:.0f}": about(without / graph) for B, without, graph in cells}
    what = "the speed of Algorithm 1 with CUDA Graphs over that without"
    return ratio(EAGER, GRAPH, bounds, what=what)(printed, ours)


def slower(layers: int) -> Criterion:
    """Return the criterion that a recurrent model trains as much slower as the claim says."""

    def judge(printed: Table | Claim, ours: Measurement) -> Judgement:
        assert isinstance(printed, Claim)
        recurrent, transformer = map(float, printed.values)
        bounds = about(transformer / recurrent)
        models = with_layers(XFMR, layers), with_layers(RT, layers)
        return ratio(*models, bounds, good="lower")(printed, ours)

    return judge


def at_rates(model: str, best: str, *others: str) -> Order | Every:
    """Return the criterion that a model is better at one rate than at each of the others."""
    return Every(*(Order((Of(model, best), Of(model, other))) for other in others))


def epsilon(config: TrainConfig) -> float:
    """Return the epsilon of a recipe's optimizer."""
    return float(build_optimizer(nn.Linear(1, 1), config.optim).defaults["eps"])


def largest_bias(config: TrainConfig) -> float:
    """Return the maximum ALiBi bias of a recipe: the exponent of the smallest slope."""
    stack = on_meta(config.model).stack
    layer = stack.blocks[0].config
    return -math.log2(float(alibi_slopes(stack.d_model // layer.head_dim, layer.alibi)[-1]))


def _settings(**rounded: float) -> list[Evidence]:
    """Answer by the recipes, the sweep over the synthetic tasks, or one of its runs.

    The paper prints "about 6b" and "about 3b" tokens; our steps have 6.55b and 3.28b.
    """
    sweep = SweepConfig()
    recipes: dict[str, Callable[[], Any]] = {
        **RECIPES,
        "sweep": lambda: sweep,
        "synthetic": lambda: sweep.run("recurrent", TASKS["copying"], 1e-3, 0.0, 0),
    }
    return [in_recipes(recipes, rounded, epsilon=epsilon, bias=largest_bias)]


# As a power of T from 1.5 to 2.5, and from 0.75 to 1.25, where both fit into memory.
_GROWTH = Every(
    change(NAIVE, "512", "1024", (2**1.5, 2**2.5)), change(GRAPH, "512", "1024", (2**0.75, 2**1.25))
)
_FLAT = Every(*(change(EAGER, "B=32", f"B={2**i}", (1 / 1.1, 1.1)) for i in range(6, 11)))
_SYNTHETIC = Every(
    Order((RT, XFMR), tuple(t for t in TASKS if t != COMPRESSION), groups=("exact match",)),
    Order((RT, XFMR), (COMPRESSION,), groups=("token accuracy",)),
)
_NORMALIZED = Every(
    Bound(Of(NORMALIZED), (0.0, math.inf), what=f"{NORMALIZED} trains"),
    at_rates(NORMALIZED, "3e-3", "1e-3", "1e-2"),
)
_RAW = Every(
    at_rates(RAW, "1e-3", "3e-3", "1e-2"), Order((Of(NORMALIZED, "3e-3"), Of(RAW, "1e-3")))
)

ANSWERS = {
    "rt.table1": [small(Order())],
    "rt.table2": speeds("graphs", gain_of_graphs),
    "rt.table4": [small(Order())],
    "rt.throughput": speeds("throughput", Order()),
    **shown("complexity", "hbm_traffic", "arithmetic_intensity", "attention_flops"),
    **shown("complexity", "tile_intensity", "tile_example"),
    **shown("schedule", "tile_size"),
    "rt.claim.latency_scaling": speeds("length", _GROWTH),
    **shown("recipes", "kv_cache_30", note="the cache alone; for the loss see rt.table1"),
    **shown("recipes", "kv_cache_sqrt"),
    "rt.claim.delta_ce_12": [small(Order((with_layers(RT, 12), with_layers(XFMR, 12))))],
    "rt.claim.delta_ce_6": [
        small(Order((with_layers(RT, 6), with_layers(XFMR, 6)))),
        trained(Order((RT, XFMR)), RT, XFMR, note="two tiny layers: the order alone"),
    ],
    "rt.claim.throughput_12": speeds("throughput", slower(12)),
    "rt.claim.throughput_6": speeds("throughput", slower(6)),
    **shown("theory", "layer_update", "rms_definition", "simulate_transformer"),
    **shown("theory", "simulate_single_layer", "simulation_maps", "rnn_form", "stability_setup"),
    **shown("theory", "stability_gradient", "stability_condition", "stability_direct_term"),
    "rt.claim.rmsnorm_lr": [result(RATES, _NORMALIZED)],
    "rt.claim.no_rmsnorm_lr": [result(RATES, _RAW)],
    **shown("complexity", "mlp_batch"),
    "rt.claim.cuda_graphs_flat": speeds("graphs", _FLAT),
    **shown("complexity", "kernel_launches", "cache_locality"),
    "rt.claim.synthetic_results": [result(SYNTHETIC, _SYNTHETIC)],
    "rt.claim.hyper_300m": _settings(),
    "rt.claim.hyper_300m_training": _settings(tokens=0.1),
    "rt.claim.hyper_optimizer": _settings(),
    "rt.claim.hyper_150m": _settings(tokens=0.1),
    **shown("recipes", "width_scaling"),
    "rt.claim.hyper_synthetic": _settings(),
    "rt.claim.hyper_synthetic_optimizer": _settings(),
}

# A recurrent layer is a loop over tokens on a CPU: short sequences, many of them at once.
_CPU = Budget(steps=100, batch_size=32, seq_len=64, eval_batches=10)
REPRODUCTION = Reproduction(
    name="recurrent-transformer",
    module=__file__,
    answers=ANSWERS,
    models={name: RECIPES[f"tiny_{recipe}"]() for recipe, name in PAPER_NAMES.items()},
    lead="rt.claim.delta_ce_6",
    scales={
        "cpu": Scale(_CPU),
        "smoke": Scale(SMOKE, threads=1),
        "gpu": Scale(_CPU, speed.FULL, needs_gpu=True),
    },
    speeds=speed.SPEEDS,
    notes=(
        "Both have the same data, schedule and learning rate, which was chosen by trying both. Two "
        "layers and 64 bytes of context leave recurrence little to do: so small a model says "
        "nothing about the paper's.",
    ),
)
