"""Tables say what was measured, on what, and nothing that was not."""

import math

import pytest
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.tables import format_value, measured_grid

ORIGIN = {"gpu": None, "cpu": "a CPU", "torch": "2.11", "commit": "new", "date": "2026-01-31"}


def grid(*entries, columns=("PPL",), **fields):
    return measured_grid(Measurement(tuple(entries), columns, "a setting", **fields))


def test_several_seeds_are_a_mean_with_its_spread_and_one_is_itself():
    entries = (Entry("a", "PPL", 12.0), Entry("a", "PPL", 13.0, seed=1), Entry("b", "PPL", 14.5))
    found = grid(*entries, kind="training")
    assert found.rows == (("a", "12.5 (2 seeds, spread 1)"), ("b", "14.5"))
    assert found.caption.endswith("seeds: 0, 1")


def test_passes_of_a_speed_are_their_median():
    found = grid(*(Entry("a", "8", v, "B=1", seed) for seed, v in enumerate((1.0, 2.0, 9.0))),
                 columns=("8",), kind="speed", unit="ms")  # fmt: skip
    assert found.rows == (("a (B=1)", "2"),)
    assert found.caption == "Ours (ms): a setting. passes: 3"


def test_a_dash_and_oom_are_explained_once_and_only_if_they_are_there():
    entries = (Entry("a", "x", "OOM"), Entry("a", "y", "OOM"), Entry("b", "x", 1))
    found = grid(*entries, columns=("x", "y"))
    assert found.rows == (("a", "OOM", "OOM"), ("b", "1", "-"))
    assert found.caption == "Ours: a setting; OOM: out of memory; a dash: not measured"
    assert grid(Entry("b", "PPL", 1)).caption == "Ours: a setting"


def test_details_have_columns_with_the_highest_of_the_row():
    steps = {"train": [[1, 9.0]], "val": [[0, math.log(50.0)], [5, 2.0]]}
    a = [
        Entry("a", c, 1.0, details={"peak_gb": p, "host_ms": 0.5}) for c, p in (("x", 1), ("y", 3))
    ]
    b = Entry("b", "x", 2.0, details={"parameters": 1_500_000, "steps": steps})
    found = grid(*a, b, columns=("x", "y"))
    assert found.header == ("", "x", "y", "PPL before", "weights (M)", "peak GB", "host ms")
    assert found.rows[0] == ("a", "1", "1", "-", "-", "3", "0.5")
    assert found.rows[1] == ("b", "2", "-", "50", "1.5", "-", "-")


def test_the_caption_names_the_machine_the_software_the_commits_and_the_file():
    older = Entry("b", "PPL", 1.0, details={"commit": "old"})
    found = grid(Entry("a", "PPL", 1.0), older, origin=ORIGIN, source="cpu/t")
    assert found.caption.endswith(
        ". CPU (a CPU), torch 2.11, commit new, parts at old, 2026-01-31, cpu/t.json"
    )
    assert "GPU 9" in grid(older, origin={**ORIGIN, "gpu": "GPU 9", "driver": "5"}).caption


def test_timings_are_a_row_each():
    timed = Entry("op train (triton)", "B1 T8", 1.23456, details={"ms_p20": 1.0, "ms_p80": 2})
    found = measured_grid(Measurement((timed,), ("B1 T8",), "toy", kind="timings"))
    assert found.rows == (("op train (triton)", "B1 T8", "1.235", "1 to 2", "-", "-", "-"),)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (1234.5, "1,234"),
        (0.30294, "0.3029"),
        (31.594, "31.59"),
        (0.00012345, "0.00012"),
        (100.0, "100"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("OOM", "OOM"),
        (None, "-"),
        (0, "0"),
    ],
)
def test_numbers_have_four_digits(value, text):
    assert format_value(value) == text
