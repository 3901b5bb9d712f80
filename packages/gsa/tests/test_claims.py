"""The claims: a criterion, the names of models, and the results that are used."""

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement, read_results
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_gsa.recipes import ABLATION, PAPER_NAMES
from mezzo_gsa.reproduction.claims import BETWEEN, GATES, GLA, GSA, REPRODUCTION, RETNET, XFMR

PUBLISHED = REPRODUCTION.published


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ({}, Outcome.AGREES),
        ({GLA: 0.999}, Outcome.AGREES),  # both solve it
        ({XFMR: 0.9}, Outcome.DIFFERS),
        ({GSA: 0.9, RETNET: 0.95}, Outcome.DIFFERS),
    ],
)
def test_recall_is_effective_if_attention_solves_it_and_gsa_is_at_least_as_good(found, outcome):
    claim = PUBLISHED.by_id["gsa.claim.mqar"]
    values = {XFMR: 0.999, GSA: 0.9935, GLA: 0.5, RETNET: 0.5} | found
    runs = [Entry(m, "x", v * (1 + i / 1e4), seed=i) for m, v in values.items() for i in range(3)]
    ours = Measurement(tuple(runs), ("x",), "a setting", better="higher", kind="recall")
    assert REPRODUCTION.answers[claim.id][0].criterion(claim, ours).outcome is outcome


def test_names_of_models_are_those_of_the_papers_rows():
    names = {row.model for row in PUBLISHED.by_id["gsa.table1"].rows}
    assert set(PAPER_NAMES.values()) == names - {"Mamba"}
    printed = {row.model: row.values[0] for row in PUBLISHED.by_id["gsa.table2"].rows}
    assert set(ABLATION.values()) == set(printed)
    for id, order in (("ablation_gating", GATES), ("ablation_softmax", BETWEEN)):
        claim = PUBLISHED.by_id[f"gsa.claim.{id}"]
        assert [printed[name] for name in order] == list(claim.values)


def test_every_committed_result_answers_a_claim():
    found = {each.id: each for each in REPRODUCTION.committed()}
    used = {ours.source for finding in found.values() for ours in finding.measurements}
    # The paper says nothing of a library, or of other ways to decode.
    ours = {"nvidia-h200/fla_training", "nvidia-h200/decoding"}
    results = read_results(REPRODUCTION.results_folder)
    assert used - {""} == {n for n, each in results.items() if each.kind != "timings"} - ours
