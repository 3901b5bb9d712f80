"""A result file grows by entries, survives kills, and holds one machine's numbers at one commit."""

import json
from dataclasses import replace
from threading import Thread

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.files import write_whole
from mezzo_core.reproduction import OOM, Cell, Header, Result, origin
from mezzo_core.reproduction import result_file as result_module
from mezzo_core.reproduction.result_file import FAILED, EntryFields
from mezzo_core.testing.arguments import check_fields

MODELS, GROUPS = ("RAT(L=16)", "Attention"), ("B=2", "B=4")
HEADER = Header("speed", "Table 8", "toy", ("64", "128"), MODELS, "ms", groups=GROUPS)
HERE = {**origin(torch.device("cpu")), "commit": "c1", "date": "2026-01-01"}
PLACE = Cell("RAT(L=16)", "64", "B=2")
OTHER = Cell("Attention", "64", "B=2")


def content(path):
    return json.loads(path.read_text())


def test_a_file_has_the_header_the_machine_and_the_entries(tmp_path):
    path = tmp_path / "made" / "table8.json"
    result = Result(path, HEADER, HERE)
    assert not path.exists()
    result.add(PLACE.entry(1.234567, B=2, host_ms=None, steps={"train": [(1, 2.3456789)]}))
    result.add(Cell("Attention", "128", "B=4", 1).entry(OOM))
    found = content(path)
    assert found.pop("entries") == [
        {
            "group": "B=2",
            "model": "RAT(L=16)",
            "column": "64",
            "seed": 0,
            "value": 1.2346,
            "B": 2,
            "steps": {"train": [[1, 2.3457]]},
        },
        {"group": "B=4", "model": "Attention", "column": "128", "seed": 1, "value": "OOM"},
    ]
    assert found == {
        "kind": "speed",
        "title": "Table 8",
        "setting": "toy",
        "how": "scaled down",
        "columns": ["64", "128"],
        "models": ["RAT(L=16)", "Attention"],
        "unit": "ms",
        "better": "lower",
        "groups": ["B=2", "B=4"],
        **HERE,
    }
    assert sum('"model"' in line for line in path.read_text().splitlines()) == 2


def test_two_scripts_at_once_keep_the_entries_of_both(tmp_path):
    first, second = (Result(tmp_path / "a.json", HEADER, HERE) for _ in range(2))
    for seed in range(2):
        first.add(PLACE._replace(seed=seed).entry(1.0))
        second.add(OTHER._replace(seed=seed).entry(2.0))
    models = [entry["model"] for entry in content(tmp_path / "a.json")["entries"]]
    assert models == ["RAT(L=16)", "Attention"] * 2
    assert second.has(PLACE)
    with pytest.raises(ValueError, match="already"):
        first.add(OTHER._replace(seed=1).entry(3.0))


def test_a_script_that_adds_while_another_writes_waits_for_it(tmp_path, monkeypatch):
    first, second = (Result(tmp_path / "a.json", HEADER, HERE) for _ in range(2))
    others = [Thread(target=second.add, args=(PLACE._replace(seed=1).entry(2.0),))]

    def write(path, text):
        if others:
            others[0].start()
            others.pop().join(0.1)  # it would be done by now if it did not wait
        write_whole(path, text)

    monkeypatch.setattr(result_module, "write_whole", write)
    other = others[0]
    first.add(PLACE.entry(1.0))
    other.join()
    assert [entry["seed"] for entry in content(tmp_path / "a.json")["entries"]] == [0, 1]


def test_a_kill_while_the_file_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    result = Result(tmp_path / "a.json", HEADER, HERE)
    result.add(PLACE.entry(1.0))
    before = result.path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mezzo_core.files.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        result.add(PLACE._replace(seed=1).entry(2.0))
    assert result.path.read_text() == before
    monkeypatch.undo()
    result.add(PLACE._replace(seed=1).entry(2.0))
    assert Result(result.path, HEADER, HERE).has(PLACE._replace(seed=1))


@pytest.mark.parametrize("key", ["commit", "gpu", "driver", "ptxas", "cpu", "torch"])
def test_another_commit_or_machine_is_refused(tmp_path, key):
    Result(tmp_path / "a.json", HEADER, HERE).add(PLACE.entry(1.0))
    with pytest.raises(UserError, match=rf"a.json has another {key} \(.*not 'other'.*remove it"):
        Result(tmp_path / "a.json", HEADER, {**HERE, key: "other"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"value": True}, "value must be float"),
        ({"value": "x"}, "value must be one of"),
        ({"value": float("nan")}, "NaN is no JSON number"),
        ({"peak_gb": [1]}, "peak_gb must be float"),
        ({"steps": {"train": [[1, None]]}}, "steps must hold lists of points"),
        ({"column": "65"}, "none of the header's"),
        ({"seed": 1}, "two entries of"),
    ],
)
def test_an_entry_that_is_no_measurement_is_refused(tmp_path, change, words):
    both = (PLACE._replace(seed=seed).entry(2.0, lr=0.1) for seed in range(2))
    Result(tmp_path / "a.json", HEADER, HERE).add(*both)
    found = content(tmp_path / "a.json")
    found["entries"][0] |= change
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=rf"a\.json.*{words}") as error:
        Result(tmp_path / "a.json", HEADER, HERE)
    assert "\n" not in str(error.value)


def test_an_entry_is_added_once_and_is_a_number(tmp_path):
    result = Result(tmp_path / "a.json", HEADER, HERE)
    result.add(PLACE.entry(1.0))
    with pytest.raises(ValueError, match="already"):
        result.add(PLACE.entry(2.0))
    with pytest.raises(ValueError, match="not JSON compliant"):
        result.add(PLACE._replace(seed=1).entry(float("nan")))
    with pytest.raises(ValueError, match="value must be"):
        result.add(PLACE._replace(seed=1).entry("x"))
    assert [entry["value"] for entry in content(result.path)["entries"]] == [1.0]
    assert not result.has(PLACE._replace(seed=1))


@pytest.mark.parametrize(("better", "best"), [("lower", ["64", "128"]), ("higher", ["128", "64"])])
def test_the_best_column_is_that_of_a_seed(tmp_path, better, best):
    result = Result(tmp_path / "a.json", replace(HEADER, better=better), HERE)
    for seed, values in enumerate(((1.0, 2.0), (2.0, 1.0))):
        for column, value in zip(HEADER.columns, values, strict=True):
            result.add(PLACE._replace(column=column, seed=seed).entry(value))
    assert [result.best_column("RAT(L=16)", "B=2", seed) for seed in range(2)] == best


def test_what_failed_may_be_tried_again(tmp_path):
    result = Result(tmp_path / "a.json", HEADER, HERE)
    result.add(PLACE.entry(FAILED, error="no kernel"))
    assert not result.has(PLACE)
    result.add(PLACE.entry(1.0))
    assert [entry["value"] for entry in content(result.path)["entries"]] == [1.0]


def test_each_field_of_a_header_and_an_entry_replaced_is_named_or_right():
    for valid in (HEADER, EntryFields("Attention", "64", 1.0, steps={"train": [[1, 2.0]]})):
        check_fields(valid, lambda _: torch.zeros(()))
