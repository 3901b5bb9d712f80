"""Each table and claim of the paper has one answer, and each criterion can come out both ways."""

from types import SimpleNamespace

import pytest
from mezzo_core.papers.claims import check_complete
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.measurement import Entry, How, Measurement, entries, read_results
from mezzo_core.testing.claims import check_claims
from mezzo_rat import counts
from mezzo_rat.claims import (
    ANSWERS,
    LENGTHS,
    REPRODUCTION,
    both_phases,
    positions_that_fit,
    throughput,
)
from mezzo_rat.trainings import CONTEXTS, IN_PLACE_OF, TOKEN_ROPE, at_printed_contexts

PUBLISHED = REPRODUCTION.published


def numbers(columns, better="lower", **models):
    """Return a measurement of the models' numbers (names with _ for what Python refuses)."""
    names = {"rat": "RAT(L=16)", "hybrid": "RAT(L=16)-SWA", "window": "Attention-SWA"}
    names |= {"rat64": "RAT(L=64)", "rat128": "RAT(L=128)", "token_rope": TOKEN_ROPE}
    names |= {"hybrid_nope": "RAT(L=16)-SWA NoPE"}
    rows = {names.get(name, name): values for name, values in models.items()}
    every = [
        Entry(model, column, value * (1 + seed / 1e4), seed=seed)
        for model, values in rows.items()
        for column, value in zip(columns, values, strict=True)
        for seed in range(3)
    ]
    return Measurement(tuple(every), tuple(columns), "made up", better=better)


ENDS = ("T=1024", "T=4096")
TESTED = ("T=512", "T=1024", "T=2048", "T=4096")
HOURS = ("Hours on one GPU for 15B tokens",)
EXAMPLES = {
    "rat.claim.train_speedups": (
        numbers(LENGTHS, Attention=(1, 2, 4, 8, 16, 32, 64), rat=(1, 1, 1, 1, 1, 1, 1)),
        numbers(LENGTHS, Attention=(1, 2, 4, 8, 9, 8, 7), rat=(1, 1, 1, 1, 1, 1, 1)),
    ),
    "rat.claim.16k_throughput": (
        numbers(("T=4096", "T=16384"), Attention=(1, 1), hybrid=(4, 12)),
        numbers(("T=4096", "T=16384"), Attention=(1, 1), hybrid=(12, 4)),
    ),
    "rat.claim.rnn_slows": (
        numbers(("32768", "262144"), RNN=(1.0, 1.2)),
        numbers(("32768", "262144"), RNN=(1.0, 1.05)),
    ),
    "rat.claim.ablation_rope": (
        numbers(ENDS, rat64=(20, 20), token_rope=(20.5, 21)),
        numbers(ENDS, rat64=(20, 20), token_rope=(21, 20.5)),
    ),
    "rat.claim.context_growth": (
        numbers(ENDS, RNN=(20, 22), Attention=(20, 19), rat64=(20, 20), rat128=(20, 20.2)),
        numbers(ENDS, RNN=(20, 20), Attention=(20, 22), rat64=(20, 21), rat128=(20, 21)),
    ),
    "rat.claim.fig6_rnn": (
        numbers(TESTED, RNN=(2.0, 2.0, 2.01, 2.01)),
        numbers(TESTED, RNN=(2.0, 2.0, 2.1, 2.1)),
    ),
    "rat.claim.fig6_rope": (
        numbers(TESTED, hybrid=(2.0, 2.0, 2.3, 2.3), window=(2.0, 2.0, 2.3, 2.3)),
        numbers(TESTED, hybrid=(2.0, 2.0, 2.1, 2.1), window=(2.0, 2.0, 2.1, 2.1)),
    ),
    "rat.claim.fig6_nope": (
        numbers(TESTED, hybrid_nope=(2.0, 2.0, 2.1, 2.1)),
        numbers(TESTED, hybrid_nope=(2.0, 2.0, 2.1, 2.3)),
    ),
    "rat.claim.train_time_200m": (numbers(HOURS, RNN=(21,), rat=(50,)), numbers(HOURS, RNN=(11,))),
}


def test_the_whole_paper_is_answered_in_its_order():
    assert (len(PUBLISHED.tables), len(PUBLISHED.claims)) == (13, 53)
    check_complete(PUBLISHED, ANSWERS)
    assert PUBLISHED.table("rat.table1").column("Val. PPL")["RAT(L=16)"] == 7.67


def test_every_criterion_can_agree_and_differ():
    check_claims(REPRODUCTION, EXAMPLES)


def test_tables_that_claims_lean_on_exist():
    tables = {table.id for table in PUBLISHED.tables}
    assert {name for claim in PUBLISHED.claims for name in claim.tables} <= tables


def test_an_answer_names_results_that_are_there():
    results = read_results(REPRODUCTION.results_folder)
    names = ("speed_table6", "speed_table7", "speed_table8", "speed_fig5", "train_six")
    assert {f"nvidia-h200/{name}" for name in (*names, "train_200m")} <= set(results)
    assert {results[f"nvidia-h200/{name}"].how for name in names[:4]} == {How.OTHER_HARDWARE}


def test_training_and_prefilling_are_two_groups_of_one_measurement():
    tables = {"table6": numbers(("64",), RNN=(3,)), "table7": numbers(("64",), RNN=(1,))}
    both = both_phases(tables.get)
    assert both.groups == ["training", "prefilling"]
    assert both.typical("RNN", "64", "prefilling") == pytest.approx(1, rel=1e-3)
    assert both_phases({"table6": tables["table6"]}.get) is None


def test_table_9_is_read_under_its_own_contexts():
    ours = numbers(tuple(IN_PLACE_OF), RNN=(3, 2, 1))
    found = at_printed_contexts(SimpleNamespace(results={CONTEXTS: ours}), None)
    assert found.columns == PUBLISHED.table("rat.table9").columns
    assert found.typical("RNN", "T=32768") == ours.typical("RNN", "T=4096")
    assert at_printed_contexts(SimpleNamespace(results={}), None) is None


def test_tables_1_and_11_are_the_first_and_last_context_of_figure_5():
    ours = numbers(("T=4096", "T=8192", "T=16384"), "higher", RNN=(3, 2, 1)).entries
    look = {"fig5": Measurement(ours, ("T=4096", "T=8192", "T=16384"), "made up")}.get
    for context, value in ((0, 3), (-1, 1)):
        column = throughput(context)(look)
        assert column.columns == ("Throughput",)
        assert column.typical("RNN", "Throughput") == pytest.approx(value, rel=1e-3)


def test_batches_that_fit_everywhere_say_nothing_about_memory():
    columns = ("4096", "8192", "16384")
    small = entries({"Attention": (1, 2, 4), "RAT(L=16)": (1, 1, 1)}, columns, "B=64")
    large = entries({"Attention": (1, "OOM", "OOM"), "RAT(L=16)": (1, 1, "OOM")}, columns, "B=512")
    found = positions_that_fit({"table8": Measurement((*small, *large), columns, "made up")}.get)
    assert found.groups == ["B=512"]
    assert [entry.value for entry in found.entries] == [1, 2]
    assert positions_that_fit({}.get) is None


def test_attention_in_the_place_of_rat_differs_in_its_flops(monkeypatch):
    layers = counts.paper_layers(counts.HEAD_DIM)
    wrong = {**layers, "RAT(L=16)": layers["Attention"]}
    monkeypatch.setattr(counts, "paper_layers", lambda head_dim: wrong)
    claim = PUBLISHED.claim("rat.claim.flops")
    assert counts.grows_as_claimed(claim, counts.flops(claim)).outcome is Outcome.DIFFERS
