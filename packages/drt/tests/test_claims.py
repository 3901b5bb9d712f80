"""Each table and claim of the paper has one answer, and each criterion can come out both ways."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.papers.claims import check_complete
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.testing.claims import check_claims
from mezzo_drt import DRTConfig, counts, equations, layer, stack
from mezzo_drt.claims import (
    ANSWERS,
    BASE,
    DRT1,
    DRT2,
    LANDMARK,
    LONGEST,
    PRINTED,
    REPRODUCTION,
    WINDOW,
    at_length,
    in_gigabytes,
)
from mezzo_drt.criteria import AtLeast, Gap, NearPrinted

PUBLISHED = REPRODUCTION.published
DEEP = "BaseLM +2 layers"


def numbers(columns, groups=("",), **rows):
    """Return a measurement with three seeds, by short names; words are values too."""
    names = {"drt1": DRT1, "drt2": DRT2, "lm": LANDMARK, "base": "BaseLM", "deep": DEEP}
    names |= {"window": WINDOW}
    every = [
        Entry(names.get(name, name), c, v if isinstance(v, str) else v * (1 + s / 1e4), g, s)
        for g in groups
        for name, values in rows.items()
        for c, v in zip(columns, values, strict=True)
        for s in range(3)
    ]
    return Measurement(tuple(every), tuple(columns), "made up")


def costs(drt, landmark):
    """Return inference costs in the columns of Table 3, both prompts alike."""
    columns = PUBLISHED.table("drt.table3").columns[2:]
    return numbers(columns, ("16K", "48K"), base=(2, 3, 2, 3), drt1=drt, lm=landmark)


def with_prompts(short, long):
    kept = [e for e in short.entries if e.group == "16K"]
    return replace(short, entries=(*kept, *(e for e in long.entries if e.group == "48K")))


CHEAP = with_prompts(
    costs((2.5, 4.62, 2.12, 12.24), (321.8, 5.94, 8.32, 96)),
    costs((2.54, 4.86, 2.16, 28.23), (326.2, 8.94, 8.5, 288)),
)
DEAR = with_prompts(
    costs((6, 4.62, 2.12, 12.24), (321.8, 5.94, 8.32, 96)),
    costs((2.54, 4.86, 2.16, 28.23), (326.2, 8.94, 8.5, 288)),
)
HOPS = ("1K", "4K", "64K", "4M")
MEMORY = PUBLISHED.table("drt.table4.memory")
ALL_FOUND = dict.fromkeys(("drt1", "drt2"), (99.0,) * 8)
EXAMPLES = {
    "drt.table2.single_niah": (
        numbers(("4K", "64K"), deep=(12, 3), drt1=(96, 97), lm=(99, 4)),
        numbers(("4K", "64K"), deep=(12, 3), drt1=(96, 97), lm=(99, 40)),
    ),
    "drt.table2.two_hop_niah": (
        numbers(("1K", "4M"), drt1=(44, 36), drt2=(85, 80)),
        numbers(("1K", "4M"), drt1=(44, 36), drt2=(85, 60)),
    ),
    "drt.table3": (CHEAP, DEAR),
    "drt.table4.memory": (
        numbers(MEMORY.columns, window=(20, 20, 20, 20), drt1=(22, 23, 25, 22), drt2=(23,) * 4),
        numbers(MEMORY.columns, window=(20, 20, 20, 20), drt1=(22, 23, 25, 22), drt2=(40,) * 4),
    ),
    "drt.claim.length_generalization": (
        numbers(("16M",), drt1=(96,), drt2=(96,)),
        numbers(("16M",), drt1=(90,), drt2=(90,)),
    ),
    "drt.claim.passkey_16m": (
        numbers(LONGEST, **ALL_FOUND),
        numbers(LONGEST, drt1=(99,) * 7 + (97,), drt2=(97,) + (99,) * 7),
    ),
    "drt.claim.pretrain_64k": (
        numbers(("65536",), drt1=(3,)),
        numbers(("65536",), drt1=("OOM",)),
    ),
    "drt.claim.two_hop": (
        numbers(HOPS, drt1=(41, 33, 38, 34), drt2=(88, 84, 81, 79), lm=(91, 88, 0, 0)),
        numbers(HOPS, drt1=(41, 33, 70, 34), drt2=(48, 84, 81, 79), lm=(91, 88, 0, 0)),
    ),
    "drt.claim.train_time_linear": (
        numbers(("4096", "65536"), drt1=(1, 16)),
        numbers(("4096", "65536"), drt1=(1, 64)),
    ),
}  # fmt: skip
LENGTHS = ("2048", "4096", "16384", "T=256", "T=1024", "T=4096")
FLAT = {BASE: (9.1, 9, 8.9, 2, 1.97, 1.96)}
EXAMPLES["drt.claim.extrapolation"] = (
    numbers(LENGTHS, **FLAT, drt1=(9, 8, 7.9, 2, 1.96, 1.95)),
    numbers(LENGTHS, **FLAT, drt1=(9, 8, 12, 2, 1.96, 2.6)),
)
EQUATIONS = ("relevance_score", "gca_fusion", "gca_head")


def error(size):
    entry = Entry("z", equations.ERROR, size)
    return Measurement((entry,), (equations.ERROR,), "made up", unit=equations.ERROR)


EXAMPLES |= {f"drt.claim.{name}": (error(1e-15), error(1e-9)) for name in EQUATIONS}


def test_the_whole_paper_is_answered_in_its_order():
    assert (len(PUBLISHED.tables), len(PUBLISHED.claims)) == (12, 32)
    check_complete(PUBLISHED, ANSWERS)


def test_every_criterion_can_agree_and_differ():
    check_claims(REPRODUCTION, EXAMPLES)


def judge(name):
    """Return the judgement of a claim that is counted."""
    (answer,) = (each for each in ANSWERS if each.id == f"drt.claim.{name}")
    claim, (evidence,) = PUBLISHED.claim(answer.id), answer.evidence
    return evidence.criterion(claim, evidence.find(None, claim))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relevance_score", "retrieve"),
        ("gca_fusion", "grouped_cross_attention"),
        ("gca_head", "grouped_cross_attention"),
    ],
)
def test_an_equation_that_is_computed_slightly_wrong_differs(monkeypatch, name, function):
    right = getattr(equations, function)

    def wrong(*inputs, **options):
        out = right(*inputs, **options)
        if function == "retrieve":
            return out._replace(weights=out.weights * (1 + 1e-6))
        return out * (1 + 1e-6)

    monkeypatch.setattr(equations, function, wrong)
    assert judge(name).outcome is Outcome.DIFFERS


def test_chunks_chosen_otherwise_differ(monkeypatch):
    right = equations.retrieve
    monkeypatch.setattr(equations, "retrieve", lambda q, *others, **o: right(-q, *others, **o))
    assert judge("relevance_score").outcome is Outcome.DIFFERS


def test_pairs_are_those_of_a_forward(monkeypatch):
    """What the costs are counted from is what the stack does."""
    config = DRTConfig(
        num_layers=4, num_groups=2, chunk_size=4, num_retrieved=3, window_size=9, head_dim=8,
        hidden=8,
    )  # fmt: skip
    found = dict.fromkeys(counts.pairs(config, 4), 0)
    right_retrieve, right_op = stack.retrieve, layer.grouped_cross_attention

    def retrieve(queries, keys, lo, hi, *others, **options):
        # The last chunk's landmark retrieves for a chunk that does not exist.
        found[counts.SCORES] += int((hi - lo).clamp(min=0).sum())
        return right_retrieve(queries, keys, lo, hi, *others, **options)

    def op(q, k, v, indices, *others, **options):
        found[counts.READING] += int((indices >= 0).sum()) * q.shape[2] * k.shape[2]
        return right_op(q, k, v, indices, *others, **options)

    monkeypatch.setattr(stack, "retrieve", retrieve)
    monkeypatch.setattr(layer, "grouped_cross_attention", op)
    with torch.no_grad():
        config.build(16)(torch.randn(1, 32, 16))
    places = 40
    found[counts.WINDOW] = 4 * sum(min(p + 1, 9) for p in range(places))
    assert found == counts.pairs(config, 32)


def test_other_counts_of_retrievals_differ(monkeypatch):
    assert judge("swap_frequency").outcome is Outcome.AGREES
    assert judge("group_map").outcome is Outcome.AGREES
    assert judge("retrieval_vs_landmark").outcome is Outcome.AGREES
    right = counts._small
    monkeypatch.setattr(counts, "_small", lambda N, G, L: right(N, 1, L // 2))
    assert judge("swap_frequency").outcome is Outcome.DIFFERS
    assert judge("group_map").outcome is Outcome.DIFFERS
    assert judge("retrieval_vs_landmark").outcome is Outcome.DIFFERS


def test_memory_without_offloading_grows_otherwise(monkeypatch):
    assert judge("kv_memory_offload").outcome is Outcome.AGREES
    monkeypatch.setattr(counts, "OFFLOADED", counts.PAPER)
    assert judge("kv_memory_offload").outcome is Outcome.DIFFERS


def test_quadratic_reading_is_not_taken_for_linear(monkeypatch):
    right = counts.pairs

    def wrong(config, num_tokens):
        every = replace(config, num_retrieved=10**9)  # each chunk reads all before it
        return right(every, num_tokens)

    monkeypatch.setattr(counts, "pairs", wrong)
    assert judge("complexity_total").outcome is Outcome.DIFFERS
    assert judge("linear_attention_cost").outcome is Outcome.DIFFERS


def test_a_length_of_the_small_models_is_a_column_of_table_1():
    ours = numbers(("2048", "4096"), drt1=(9, 8), drt2=(8, 7))
    column = at_length(ours, "4096")
    assert column.columns == (PRINTED,)
    assert PRINTED in PUBLISHED.table("drt.table1.eval_2k").columns
    assert {e.model: e.value for e in column.entries if e.seed == 0} == {DRT1: 8, DRT2: 7}


def test_peaks_are_read_as_memory():
    entries = (
        Entry(DRT1, "350M, 32K", 9.0, details={"peak_gb": 40.5}),
        Entry(DRT1, "3B, 4K", "OOM"),
    )
    ours = Measurement(
        entries, ("350M, 32K", "3B, 4K"), "made up", unit="tokens/s", better="higher"
    )
    turned = in_gigabytes(ours)
    assert [entry.value for entry in turned.entries] == [40.5, "OOM"]
    assert (turned.unit, turned.better) == ("GB", "lower")


@pytest.mark.parametrize(
    "criterion",
    [NearPrinted(10), AtLeast(95, DRT1, ("16M",)), Gap(DRT1, DRT2, ("4M",), 0)],
    ids=lambda criterion: type(criterion).__name__,
)
def test_what_was_not_measured_is_not_settled(criterion):
    table = PUBLISHED.table("drt.table2.single_niah")
    assert criterion(table, numbers(("1M",), drt1=(50,))).outcome is Outcome.NOT_SETTLED


@pytest.mark.parametrize(
    ("criterion", "inside", "near", "outside"),
    [
        (NearPrinted(10), (97, 98, 99), (88, 90, 89), (60, 61, 62)),
        (AtLeast(95, DRT1, ("4K",)), (97, 98, 99), (92, 96, 94), (60, 61, 62)),
        (Gap(DRT1, "another", ("4K",), 20), (97, 98, 99), (69, 73, 72), (60, 61, 62)),
    ],
    ids=["NearPrinted", "AtLeast", "Gap"],
)
def test_seeds_settle_an_accuracy(criterion, inside, near, outside):
    table = PUBLISHED.table("drt.table2.single_niah")

    def of(*accuracies):
        found = {DRT1: accuracies, "another": (50.0,) * len(accuracies)}
        entries = (Entry(m, "4K", a, seed=s) for m, v in found.items() for s, a in enumerate(v))
        ours = Measurement(tuple(entries), ("4K",), "made up", kind="recall")
        return criterion(table, ours).outcome

    assert of(*inside) is Outcome.AGREES
    assert of(*near) is Outcome.NOT_SETTLED
    assert of(*outside) is Outcome.DIFFERS
    assert {of(inside[0]), of(outside[0])} == {Outcome.NOT_SETTLED}, "one seed"
