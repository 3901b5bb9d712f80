"""Result files are read as measurements, and a file that is none is named."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import settings
from mezzo_core.errors import UserError
from mezzo_core.reproduction.measurement import Entry, How, Measurement, at_best, read_results
from mezzo_core.reproduction.tables import measured_grid
from mezzo_core.testing.damage import damages, json_damages

ORIGIN = {"gpu": "a GPU", "cpu": "a CPU", "torch": "2.11.0", "commit": "abc", "date": "2026-01-31"}
RESULT = {
    "kind": "training",
    "title": "Table 1",
    "setting": "small",
    "how": "scaled down",
    "columns": ["PPL"],
    "models": ["y", "x"],
    "groups": [],
    "unit": "perplexity",
    "better": "lower",
    **ORIGIN,
    "entries": [
        {"model": "x", "column": "PPL", "seed": 1, "value": 2.0, "parameters": 5, "lr": 0.1},
        {"model": "y", "column": "PPL", "seed": 0, "value": 5.0},
        {"model": "x", "column": "PPL", "seed": 0, "value": 1.0},
    ],
}


def write(tmp_path, name, text):
    path = tmp_path / "nvidia-h200" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_result_is_read_in_the_order_of_its_header(tmp_path):
    write(tmp_path, "table1.json", json.dumps(RESULT))
    (ours,) = read_results(tmp_path).values()
    assert ours.source == "nvidia-h200/table1"
    assert ours.machine == "nvidia-h200"
    assert (ours.title, ours.how, ours.kind) == ("Table 1", How.SCALED_DOWN, "training")
    assert ours.rows == [("", "y"), ("", "x")]
    assert ours.by_seed("x", "PPL") == {0: 1.0, 1: 2.0}
    assert ours.cell("x", "PPL")[1].details == {"parameters": 5, "lr": 0.1}
    assert ours.seeds == [0, 1]
    assert ours.origin["driver"] is None


def test_a_damaged_result_is_named_or_shown(tmp_path):
    rng, name, content = random.Random(0), "a.json", json.dumps(RESULT).encode()
    forms = [*damages(content, rng), *json_damages(content)]
    faults = []
    for form in rng.sample(forms, min(len(forms), 3 * settings().max_examples)):
        write(tmp_path, name, "")
        (tmp_path / "nvidia-h200" / name).write_bytes(form.content)
        try:
            for ours in read_results(tmp_path).values():
                measured_grid(ours)
        except UserError as error:
            if "\n" in str(error):
                faults.append(f"{form.what}: {error}")
        except Exception as error:
            faults.append(f"{form.what}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("key", [key for key in RESULT if key != "groups"])
def test_a_result_without_what_it_depends_on_is_refused(tmp_path, key):
    write(tmp_path, "bad.json", json.dumps({k: v for k, v in RESULT.items() if k != key}))
    with pytest.raises(UserError, match=rf"bad\.json.*{key}"):
        read_results(tmp_path)


def several(*values, kind="training"):
    found = tuple(Entry("m", "c", value, seed=seed) for seed, value in enumerate(values))
    return Measurement(found, ("c",), "", kind=kind)


def test_the_typical_value_is_a_mean_over_seeds_a_median_over_passes_or_a_word():
    assert several(1.0, 2.0, 6.0).typical("m", "c") == 3.0
    assert several(1.0, 2.0, 6.0, kind="speed").typical("m", "c") == 2.0
    assert several(1.0, 2.0, 6.0).spread("m", "c") == 5.0
    assert (several(3).typical("m", "c"), several(3).spread("m", "c")) == (3, None)
    ours = several(1.0, "OOM", 6.0)
    assert (ours.typical("m", "c"), ours.spread("m", "c"), ours.by_seed("m", "c")) == (
        "OOM",
        None,
        {},
    )
    assert ours.typical("m", "other") is None


def test_a_detail_that_a_seed_lacks_is_no_number():
    def peaks(*runs):
        return Measurement(runs, ("c",), "").by_seed("m", "c", detail="peak_gb")

    first, second = (Entry("m", "c", 1.0, seed=seed, details={"peak_gb": 2.0}) for seed in (0, 1))
    assert peaks(first, second) == {0: 2.0, 1: 2.0}
    assert peaks(first, replace(second, details={})) == {}


def test_each_group_has_a_best_rate_of_its_own_and_higher_may_be_better():
    values = {"g": (3.0, 2.0), "h": (4.0, 5.0)}
    tried = (Entry("x", r, v, g) for g, row in values.items() for r, v in zip("ab", row))  # noqa: B905
    ours = at_best(Measurement(tuple(tried), ("a", "b"), "", better="higher"), "best")
    assert [ours.by_seed("x", "best", group) for group in values] == [{0: 3.0}, {0: 5.0}]


def test_each_model_is_read_at_the_rate_that_its_first_seed_chose_without_that_seed():
    tried = (
        *(Entry("x", rate, value) for rate, value in (("1e-3", 3.0), ("3e-3", 2.0), ("1e-2", 2.5))),
        *(Entry("y", rate, value) for rate, value in (("1e-3", 4.0), ("3e-3", "diverged"))),
        *(Entry("x", "3e-3", 2.2, seed=1), Entry("x", "1e-3", 1.0, seed=1)),
        Entry("z", "1e-3", "diverged"),
    )
    ours = at_best(Measurement(tried, ("1e-3", "3e-3", "1e-2"), "toy", kind="training"), "PPL")
    assert ours.columns == ("PPL",)
    assert ours.by_seed("x", "PPL") == {1: 2.2}
    assert ours.by_seed("y", "PPL") == {0: 4.0}, "there is no other"
    assert ours.cell("z", "PPL") == []
    assert "at the rate of 1e-3, 3e-3, 1e-2 that is its best with seed 0" in ours.setting
