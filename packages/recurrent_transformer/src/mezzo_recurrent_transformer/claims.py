"""The paper's tables and claims: what answers each, by which criterion, or what it would need.

Criteria say what the paper says. "About X" is within a quarter of X. Where the paper has a
difference of cross-entropies at its own size, a smaller model can only answer which one is lower.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mezzo_core.papers.beside import in_recipes
from mezzo_core.papers.claims import Answer, Evidence, Run, counted, result, trained
from mezzo_core.papers.criteria import (
    AsPrinted,
    Criterion,
    Equal,
    Every,
    InOrder,
    Judgement,
    Ratio,
    about,
)
from mezzo_core.papers.growth import Growth, Steady, Within
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.papers.published import Claim, Table
from mezzo_core.papers.reproduction import Reproduction, Scale
from mezzo_core.papers.trainings import SMOKE, Budget

from mezzo_recurrent_transformer import counts, settings, speed, theory
from mezzo_recurrent_transformer.criteria import (
    BestColumn,
    BetterAtBest,
    ByLayers,
    Trains,
    with_layers,
)
from mezzo_recurrent_transformer.recipes import PAPER_NAMES, RECIPES
from mezzo_recurrent_transformer.speed import EAGER, GRAPH, NAIVE
from mezzo_recurrent_transformer.synthetic.sweep import SweepConfig
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

CE = "Val CE"
XFMR, RT = PAPER_NAMES.values()
RT6, RT12, XFMR6, XFMR12 = (with_layers(model, n) for model in (RT, XFMR) for n in (6, 12))
NORMALIZED, RAW = "with RMSNorm", "without RMSNorm"
"""The models of the ablation: persistent pairs from normalized or from raw outputs."""
RATE_NAMES = {"1e-3": 1e-3, "3e-3": 3e-3, "1e-2": 1e-2}
H200 = "nvidia-h200"
SMALL, RATES = (f"{H200}/{name}" for name in ("train_small", "train_rates"))
SYNTHETIC = "nvidia-h100/synthetic"
EXACT, TOKENS = "exact match", "token accuracy"
COMPRESSION = "compression"
"""A synthetic task whose rows are hardly ever right as a whole: its letters count."""

_SCRIPTS = "python packages/recurrent_transformer/experiments"
_SPEED = f"needs a GPU: {_SCRIPTS}/speed.py"
_SMALL = f"needs a GPU: {_SCRIPTS}/train_small.py"
_300M = "needs the 300M models trained on 6.6B tokens of C4 (recipes 300m_...)"
_150M = "needs the 150M models trained on 3.3B tokens of C4 (recipes 150m_...)"
_TASKS = "and the six downstream data sets"
_SETUP = "says how the authors measured, on what they had: nothing to measure"


def timed(name: str, criterion: Criterion) -> tuple[Evidence, Evidence]:
    """Answer from the speed that this run measures, and from the committed one."""
    return (
        Evidence(lambda run, printed: run.measured(name), criterion),
        result(f"{H200}/speed_{name}", criterion),
    )


def cross_entropy(name: str, criterion: Criterion, note: str = "") -> Evidence:
    """Answer from the cross-entropies of a committed result, which has perplexities."""

    def find(run: Run, printed: Table | Claim) -> Measurement | None:
        ours = run.results.get(name)
        return None if ours is None else in_nats(ours)

    return Evidence(find, criterion, note)


def in_nats(ours: Measurement) -> Measurement:
    """Return perplexities as cross-entropies, in one column as the paper calls it."""

    def turned(entry: Entry) -> Entry:
        value = entry.value
        return replace(entry, column=CE, value=value if isinstance(value, str) else math.log(value))

    return replace(ours, entries=tuple(map(turned, ours.entries)), columns=(CE,), unit="nats")


def gain_of_graphs(printed: Table | Claim, ours: Measurement) -> Judgement:
    """Judge whether graphs are as much faster as in Table 2, at each batch."""
    assert isinstance(printed, Table)
    cells = [tuple(map(float, row.values)) for row in printed.rows]
    bounds = {f"B={B:.0f}": about(without / graph) for B, without, graph in cells}
    what = "the speed of Algorithm 1 with CUDA Graphs over that without"
    return Ratio(EAGER, GRAPH, bounds, what=what)(printed, ours)


def slower(layers: int) -> Criterion:
    """Return the criterion that a recurrent model trains as much slower as the claim says."""
    ours, other = (with_layers(model, layers) for model in (RT, XFMR))

    def judge(printed: Table | Claim, found: Measurement) -> Judgement:
        assert isinstance(printed, Claim)
        recurrent, transformer = map(float, printed.values)
        bounds = {"tokens/s": about(transformer / recurrent)}
        what = "tokens a second of the Transformer over the Recurrent Transformer's"
        return Ratio(other, ours, bounds, what=what)(printed, found)

    return judge


def needs(what: str, *names: str) -> Iterator[Answer]:
    """Yield the answers of tables and claims that need what this repository does not have."""
    return (Answer(f"rt.{name}", otherwise=what) for name in names)


def exact(name: str, count: Callable[[Claim], Measurement], bound: float = 1e-10) -> Answer:
    """Return the answer of a theorem: errors in float64 that can only be rounding."""
    return Answer(f"rt.claim.{name}", counted(count, Within(bound)))


def _settings(**rounded: float) -> Evidence:
    """Answer by the recipes, the sweep over the synthetic tasks, or one of its runs.

    The paper prints "about 6b" and "about 3b" tokens; our steps have 6.55b and 3.28b.
    """
    sweep = SweepConfig()
    recipes: dict[str, Callable[[], Any]] = {
        **RECIPES,
        "sweep": lambda: sweep,
        "synthetic": lambda: sweep.run("recurrent", TASKS["copying"], 1e-3, 0.0, 0),
    }
    further = {"epsilon": settings.epsilon, "bias": settings.largest_bias}
    return in_recipes(recipes, rounded, **further)


_SIZE = " (a smaller size: the order alone)"
# 12 layers hold 2 x 12 x 1408 numbers a token, 6 hold 2 x 6 x 2048: "approximately 30%" less.
_CACHE = Ratio("6 layers", "12 layers", {"MB": (1 - about(0.3)[1], 1 - about(0.3)[0])})
_LENGTHS = ("512", "1024", "2048", "4096")
_GROWTH = Growth({NAIVE: (1.5, 2.5), GRAPH: (0.75, 1.25)}, _LENGTHS)
_FLAT = tuple(f"B={2**i}" for i in range(5, 11))
_SYNTHETIC = Every(
    (
        InOrder((RT, XFMR), columns=tuple(t for t in TASKS if t != COMPRESSION), groups=(EXACT,)),
        InOrder((RT, XFMR), columns=(COMPRESSION,), groups=(TOKENS,)),
    )
)

ANSWERS = (
    Answer("rt.table1", cross_entropy(SMALL, ByLayers(AsPrinted()), _SIZE), otherwise=_300M),
    Answer("rt.table2", *timed("graphs", gain_of_graphs), otherwise=_SPEED),
    *needs(f"{_300M} {_TASKS}", "table3"),
    Answer("rt.table4", cross_entropy(SMALL, ByLayers(AsPrinted()), _SIZE), otherwise=_150M),
    *needs(f"{_150M} {_TASKS}", "table5", "table6"),
    *needs(f"{_150M} once more at batch 256", "table7"),
    *needs(f"{_150M} once more at batch 256, {_TASKS}", "table8", "table9"),
    *needs(f"{_300M} {_TASKS}", "table10"),
    Answer("rt.throughput", *timed("throughput", ByLayers(AsPrinted())), otherwise=_SPEED),
    Answer("rt.claim.hbm_traffic", counted(counts.hbm_traffic, Steady())),
    Answer("rt.claim.arithmetic_intensity", counted(counts.arithmetic_intensity, Steady())),
    Answer("rt.claim.attention_flops", counted(counts.attention_flops, Steady())),
    Answer("rt.claim.tile_intensity", counted(counts.tile_intensity, Steady(1 + 1e-9))),
    Answer("rt.claim.tile_example", counted(counts.tile_example, Equal())),
    Answer("rt.claim.tile_size", counted(counts.tile_size, Equal())),
    Answer("rt.claim.latency_scaling", *timed("length", _GROWTH), otherwise=_SPEED),
    Answer(
        "rt.claim.kv_cache_30",
        counted(settings.kv_cache_30, _CACHE, " (the cache alone; for the loss see rt.table1)"),
    ),
    Answer("rt.claim.kv_cache_sqrt", counted(settings.kv_cache_sqrt, Equal(settings.SCALED))),
    Answer(
        "rt.claim.delta_ce_12",
        cross_entropy(SMALL, InOrder((RT12, XFMR12)), _SIZE),
        otherwise=f"{_300M}; {_SMALL}",
    ),
    Answer(
        "rt.claim.delta_ce_6",
        cross_entropy(SMALL, InOrder((RT6, XFMR6)), _SIZE),
        trained(InOrder((RT, XFMR)), RT, XFMR, note=" (two tiny layers: the order alone)"),
        otherwise=_300M,
    ),
    *needs(_300M, "claim.24_layers"),
    Answer("rt.claim.throughput_12", *timed("throughput", slower(12)), otherwise=_SPEED),
    Answer("rt.claim.throughput_6", *timed("throughput", slower(6)), otherwise=_SPEED),
    exact("layer_update", theory.layer_update),
    exact("rms_definition", theory.rms_definition),
    exact("simulate_transformer", theory.simulate_transformer),
    exact("simulate_single_layer", theory.simulate_single_layer),
    exact("simulation_maps", theory.simulation_maps),
    exact("rnn_form", theory.rnn_form),
    exact("stability_setup", theory.stability_setup),
    exact("stability_gradient", theory.stability_gradient),
    Answer(
        "rt.claim.stability_condition",
        counted(theory.stability_condition, theory.does_not_explode),
    ),
    exact("stability_direct_term", theory.stability_direct_term),
    Answer(
        "rt.claim.rmsnorm_lr",
        result(RATES, Every((Trains(NORMALIZED), BestColumn(NORMALIZED, "3e-3")))),
        otherwise=_SMALL,
    ),
    Answer(
        "rt.claim.no_rmsnorm_lr",
        result(RATES, Every((BestColumn(RAW, "1e-3"), BetterAtBest(NORMALIZED, RAW)))),
        otherwise=_SMALL,
    ),
    Answer("rt.claim.mlp_batch", counted(counts.mlp_batch, Steady())),
    *needs("is a judgement of the authors, of which no number is printed", "claim.batch_512"),
    *needs(f"{_150M} at several batches", "claim.critical_batch"),
    Answer(
        "rt.claim.cuda_graphs_flat",
        *timed("graphs", Steady(1.1, (EAGER,), _FLAT)),
        otherwise=_SPEED,
    ),
    Answer("rt.claim.kernel_launches", counted(counts.kernel_launches, Steady())),
    Answer("rt.claim.cache_locality", counted(counts.cache_locality, Steady())),
    *needs(_SETUP, "claim.measurement", "claim.implementation"),
    Answer(
        "rt.claim.synthetic_results",
        result(SYNTHETIC, _SYNTHETIC),
        otherwise="needs the synthetic tasks with their sweep on a GPU",
    ),
    *needs(f"{_300M} {_TASKS}", "claim.downstream_noise"),
    Answer("rt.claim.hyper_300m", _settings()),
    Answer("rt.claim.hyper_300m_training", _settings(tokens=0.1)),
    Answer("rt.claim.hyper_optimizer", _settings()),
    Answer("rt.claim.hyper_150m", _settings(tokens=0.1)),
    Answer("rt.claim.width_scaling", counted(settings.width_scaling, Equal(settings.SCALED))),
    Answer("rt.claim.hyper_synthetic", _settings()),
    Answer("rt.claim.hyper_synthetic_optimizer", _settings()),
)

# A recurrent layer is a loop over tokens on a CPU: short sequences, many of them at once.
_CPU = Budget(steps=100, batch_size=32, seq_len=64, eval_batches=10)
REPRODUCTION = Reproduction(
    name="recurrent-transformer",
    module=__file__,
    answers=ANSWERS,
    models={name: RECIPES[f"tiny_{recipe}"]() for recipe, name in PAPER_NAMES.items()},
    sample=RT,
    scales={
        "cpu": Scale(_CPU, sample_tokens=300),
        "smoke": Scale(SMOKE, sample_tokens=20, threads=1),
        "gpu": Scale(_CPU, speed.FULL, needs_gpu=True),
    },
    measurers=speed.MEASURERS,
    notes=(
        "Both have the same data, schedule and learning rate, which was chosen by trying both. Two "
        "layers and 64 bytes of context leave recurrence little to do: so small a model says "
        "nothing about the paper's.",
    ),
)
