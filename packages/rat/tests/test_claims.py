"""Each table and claim of the paper is answered, and each criterion can come out against it."""

import pytest
from mezzo_core.reproduction.criteria import Within
from mezzo_core.reproduction.measurement import Entry, Measurement, entries
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_rat.reproduction import counts
from mezzo_rat.reproduction.claims import LENGTHS, REPRODUCTION, both_phases, positions_that_fit

PUBLISHED = REPRODUCTION.published


def test_training_and_prefilling_are_two_groups_of_one_measurement():
    def numbers(value):
        return Measurement((Entry("RNN", "64", value),), ("64",), "made up")

    tables = {"table6": numbers(3), "table7": numbers(1)}
    run = type("Run", (), {"measured": staticmethod(tables.get)})
    evidence, _ = both_phases(None)
    both = evidence.find(run, None)
    assert both.groups == ["training", "prefilling"]
    assert both.typical("RNN", "64", "prefilling") == 1
    del tables["table7"]
    assert evidence.find(run, None) is None


def test_batches_that_fit_everywhere_say_nothing_about_memory():
    columns = LENGTHS[:3]
    small = entries({"Attention": (1, 2, 4), "RAT(L=16)": (1, 1, 1)}, columns, "B=64")
    large = entries({"Attention": (1, "OOM", "OOM"), "RAT(L=16)": (1, 1, "OOM")}, columns, "B=512")
    found = positions_that_fit(Measurement((*small, *large), columns, "made up"))
    assert found.groups == ["B=512"]
    assert [entry.value for entry in found.entries] == [1, 2]


@pytest.mark.parametrize("replaced", ["RAT(L=16)", "RNN"])
def test_attention_in_the_place_of_a_layer_differs_in_its_flops(monkeypatch, replaced):
    layers = counts.paper_layers(counts.HEAD_DIM)
    wrong = {**layers, replaced: layers["Attention"]}
    monkeypatch.setattr(counts, "paper_layers", lambda head_dim: wrong)
    claim = PUBLISHED.by_id["rat.claim.flops"]
    assert Within(0.01)(claim, counts.flops(claim)).outcome is Outcome.DIFFERS
