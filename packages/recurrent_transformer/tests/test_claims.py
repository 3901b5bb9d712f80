"""Each table and claim of the paper has one answer, and each criterion can come out both ways."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
from mezzo_core.nn.norm import RMSNorm
from mezzo_core.papers.claims import check_complete
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.growth import Growth
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.testing.claims import check_claims
from mezzo_recurrent_transformer import (
    RecurrentBlock,
    TransformerBlock,
    counts,
    schedule,
    theory,
)
from mezzo_recurrent_transformer.claims import (
    ANSWERS,
    NORMALIZED,
    RAW,
    REPRODUCTION,
    RT,
    XFMR,
    in_nats,
)
from mezzo_recurrent_transformer.criteria import BestColumn, BetterAtBest, Trains, by_layers
from mezzo_recurrent_transformer.speed import EAGER, GRAPH, NAIVE
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

PUBLISHED = REPRODUCTION.published


def numbers(columns, better="lower", **rows):
    """Return a measurement with three seeds, by short names; words are values too."""
    names = {"eager": EAGER, "graph": GRAPH, "normalized": NORMALIZED, "raw": RAW}
    names |= {f"rt{n}": f"Recurrent Transformer, {n} layers" for n in (6, 12)}
    names |= {f"xfmr{n}": f"Transformer, {n} layers" for n in (6, 12, 24)}
    every = [
        Entry(names.get(name, name), c, v if isinstance(v, str) else v * (1 + s / 1e4), seed=s)
        for name, values in rows.items()
        for c, v in zip(columns, values, strict=True)
        for s in range(3)
    ]
    return Measurement(tuple(every), tuple(columns), "made up", better=better)


def error(size):
    entry = Entry("z", theory.ERROR, size)
    return Measurement((entry,), (theory.ERROR,), "made up", unit=theory.ERROR)


CE, SPEED, T = ("Val CE",), ("tokens/s",), ("512", "2048")
BATCHES = tuple(f"B={2**i}" for i in range(5, 12))
GRAPHS = (38.85, 42.28, 48.95, 61.39, 81.73, 134.09, 240.83)
RATES = ("1e-3", "3e-3", "1e-2")
FASTER = numbers(SPEED, "higher", rt12=(42,), xfmr12=(132,), rt6=(49,), xfmr6=(153,))
SLOWER = numbers(SPEED, "higher", rt12=(142,), xfmr12=(132,), rt6=(149,), xfmr6=(133,))
EXAMPLES = {
    "rt.table1": (
        numbers(CE, xfmr6=(5,), xfmr12=(4,), rt12=(2,), rt6=(1,)),
        numbers(CE, xfmr6=(5,), xfmr12=(4,), rt12=(6,), rt6=(1,)),
    ),
    "rt.table4": (
        numbers(CE, xfmr6=(5,), xfmr12=(4,), rt12=(1,), rt6=(2,)),
        numbers(CE, xfmr6=(3,), xfmr12=(4,), rt12=(1,), rt6=(2,)),
    ),
    "rt.throughput": (FASTER, SLOWER),
    "rt.claim.throughput_12": (FASTER, SLOWER),
    "rt.claim.throughput_6": (FASTER, SLOWER),
    "rt.table2": (
        numbers(BATCHES, eager=(277,) * 7, graph=GRAPHS),
        numbers(BATCHES, eager=(277,) * 7, graph=(100,) * 7),
    ),
    "rt.claim.cuda_graphs_flat": (
        numbers(BATCHES, eager=(277, 279, 279, 276, 277, 275, 300)),
        numbers(BATCHES, eager=(277, 279, 279, 276, 277, 310, 320)),
    ),
    "rt.claim.latency_scaling": (
        numbers(T, naive=(1, 16), graph=(1, 4.5)),
        numbers(T, naive=(1, 4), graph=(1, 9)),
    ),
    "rt.claim.rmsnorm_lr": (
        numbers(RATES, normalized=(3, 2, 4)),
        numbers(RATES, normalized=(3, "diverged", 4)),
    ),
    "rt.claim.no_rmsnorm_lr": (
        numbers(RATES, normalized=(3, 2, 4), raw=(5, 6, "diverged")),
        numbers(RATES, normalized=(3, 2, 4), raw=(5, 1, "diverged")),
    ),
}
EXACT = (
    *("layer_update", "rms_definition", "simulate_transformer", "simulate_single_layer"),
    *("simulation_maps", "rnn_form", "stability_setup", "stability_gradient"),
    "stability_direct_term",
)
EXAMPLES |= {f"rt.claim.{name}": (error(1e-15), error(1e-9)) for name in EXACT}


def test_the_whole_paper_is_answered_in_its_order():
    assert (len(PUBLISHED.tables), len(PUBLISHED.claims)) == (11, 43)
    check_complete(PUBLISHED, ANSWERS)


def test_every_criterion_can_agree_and_differ():
    check_claims(REPRODUCTION, EXAMPLES)


def test_a_printed_model_is_told_apart_by_its_layers():
    table = by_layers(PUBLISHED.table("rt.table1"))
    assert table.columns == ("Val CE",)
    assert table.column("Val CE") == {
        "Transformer, 6 layers": 2.917,
        "Transformer, 12 layers": 2.896,
        "Transformer, 24 layers": 2.892,
        "Recurrent Transformer, 12 layers": 2.867,
        "Recurrent Transformer, 6 layers": 2.86,
    }


def test_perplexities_are_read_as_cross_entropies():
    ours = numbers(("Val. PPL",), rt12=(math.e,), xfmr12=("OOM",))
    turned = in_nats(ours)
    assert (turned.columns, turned.unit) == (CE, "nats")
    assert turned.entries[0].value == pytest.approx(1)
    assert turned.entries[-1].value == "OOM"


def test_a_growth_without_enough_lengths_is_not_settled():
    claim = PUBLISHED.claim("rt.claim.latency_scaling")
    one = numbers(("512",), naive=(1,), graph=(1,))
    assert Growth({NAIVE: (1.5, 2.5)}, T)(claim, one).outcome is Outcome.NOT_SETTLED


@pytest.mark.parametrize("lost", TASKS)
def test_the_claim_about_the_synthetic_tasks_reads_each_of_them(lost):
    claim = PUBLISHED.claim("rt.claim.synthetic_results")
    (answer,) = [answer for answer in ANSWERS if answer.id == claim.id]
    (evidence,) = answer.evidence

    def outcome(better):
        entries = [
            Entry(model, task, value, seed=seed, group=group)
            for group in ("exact match", "token accuracy")
            for task in TASKS
            for model, value in ((RT, 0.5), (XFMR, 0.4 if better(task) else 0.6))
            for seed in range(3)
        ]
        made = Measurement(tuple(entries), tuple(TASKS), "made up", better="higher")
        return evidence.criterion(claim, made).outcome

    assert outcome(lambda task: True) is Outcome.AGREES
    assert outcome(lambda task: task != lost) is Outcome.DIFFERS


def test_a_rate_is_best_only_if_the_seeds_settle_it():
    claim = PUBLISHED.claim("rt.claim.rmsnorm_lr")
    criterion = BestColumn(NORMALIZED, "3e-3")
    noisy = numbers(RATES, normalized=(3, 2.999, 4))
    entries = [replace(e, value=e.value + (-1) ** e.seed / 10) for e in noisy.entries[:3]]
    noisy = replace(noisy, entries=(*entries, *noisy.entries[3:]))
    assert criterion(claim, noisy).outcome is Outcome.NOT_SETTLED
    only_one = numbers(RATES, normalized=("OOM", "OOM", "OOM"))
    assert criterion(claim, only_one).outcome is Outcome.DIFFERS
    missing = BetterAtBest(NORMALIZED, RAW)(claim, noisy)
    assert missing.outcome is Outcome.NOT_SETTLED


def scaled_output(kind):
    """Return a forward whose output is wrong by a millionth."""
    right = kind.forward

    def wrong(module, *inputs, **options):
        out = right(module, *inputs, **options)
        return (out[0] * (1 + 1e-6), *out[1:]) if isinstance(out, tuple) else out * (1 + 1e-6)

    return wrong


@pytest.mark.parametrize("name", EXACT)
def test_a_theorem_about_a_layer_that_is_slightly_wrong_differs(monkeypatch, name):
    (answer,) = (each for each in ANSWERS if each.id == f"rt.claim.{name}")
    claim, (evidence,) = PUBLISHED.claim(answer.id), answer.evidence
    count, criterion = getattr(theory, name), evidence.criterion
    assert criterion(claim, count(claim)).outcome is Outcome.AGREES
    kinds = {"rms_definition": RMSNorm, "stability_direct_term": TransformerBlock}
    kind = kinds.get(name, RecurrentBlock)
    monkeypatch.setattr(kind, "forward", scaled_output(kind))
    assert criterion(claim, count(claim)).outcome is Outcome.DIFFERS


def test_a_schedule_with_another_tile_differs(monkeypatch):
    right = schedule.tiles

    def wrong(num_tokens):
        for tile in right(num_tokens):
            yield tile._replace(queries=tile.queries[:8])

    claim = PUBLISHED.claim("rt.claim.tile_size")
    monkeypatch.setattr(counts, "tiles", wrong)
    (answer,) = (each for each in ANSWERS if each.id == claim.id)
    judged = answer.evidence[0].criterion(claim, counts.tile_size(claim))
    assert judged.outcome is Outcome.DIFFERS


def test_the_naive_evaluation_is_not_taken_for_the_tiled_one(monkeypatch):
    every = [schedule.Tile(range(t), range(t, t + 1)) for t in range(1, 2**14)]
    monkeypatch.setattr(counts, "tiles", lambda num_tokens: every[: num_tokens - 1])
    for name in ("hbm_traffic", "arithmetic_intensity", "cache_locality"):
        (answer,) = (each for each in ANSWERS if each.id == f"rt.claim.{name}")
        claim = PUBLISHED.claim(answer.id)
        found = getattr(counts, name)(claim)
        assert answer.evidence[0].criterion(claim, found).outcome is Outcome.DIFFERS


@pytest.mark.parametrize("done", [RATES[:1], RATES[::2]], ids=str)
def test_rates_that_are_not_all_measured_settle_nothing(done):
    ours = replace(numbers(done, normalized=(3, 3.2, 3.4)[: len(done)]), columns=RATES)
    for criterion in (BestColumn(NORMALIZED, "3e-3"), Trains(NORMALIZED)):
        assert criterion(PUBLISHED.claim("rt.claim.rmsnorm_lr"), ours).outcome is (
            Outcome.NOT_SETTLED
        )


@pytest.mark.parametrize(
    ("criterion", "agreeing", "contrary"),
    [
        (Trains(NORMALIZED), (3, 2, 4), (3, 2, "diverged")),
        (BestColumn(NORMALIZED, "3e-3"), ("diverged", 2, "diverged"), (3, "diverged", 4)),
    ],
    ids=["Trains", "BestColumn"],
)
def test_whether_a_model_trains_is_not_settled_by_one_seed(criterion, agreeing, contrary):
    claim = PUBLISHED.claim("rt.claim.rmsnorm_lr")
    for values, outcome in ((agreeing, Outcome.AGREES), (contrary, Outcome.DIFFERS)):
        ours = numbers(RATES, normalized=values)
        one = replace(ours, entries=tuple(e for e in ours.entries if e.seed == 0))
        assert criterion(claim, ours).outcome is outcome
        assert criterion(claim, one).outcome is Outcome.NOT_SETTLED


@pytest.mark.parametrize("k", [1, 2, 5])
def test_stirling_numbers_count_permutations_by_their_cycles(k):
    found = [0] * (k + 1)
    for permutation in permutations(range(k)):
        cycles, left = 0, set(range(k))
        while left:
            place, cycles = left.pop(), cycles + 1
            while (place := permutation[place]) in left:
                left.remove(place)
        found[cycles] += 1
    assert theory.cycle_counts(k) == found
