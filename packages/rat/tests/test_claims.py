"""The claims read the speed tables: which measurements they join, and which they leave out."""

from mezzo_core.reproduction.measurement import Entry, Measurement, entries
from mezzo_rat.reproduction.claims import LENGTHS, both_phases, positions_that_fit


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
