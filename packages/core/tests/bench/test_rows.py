"""Rows of speeds: each is said and written as soon as it is measured."""

import json

import pytest
import torch
from mezzo_core.bench import Row, Timing, origin, run

CPU = torch.device("cpu")
ROW = Row("rat layer train", "triton", {"B": 2, "T": 8}, Timing(2.0, 1.0, 3.0, 0.5, 1.25))


def test_a_row_has_its_kind_and_its_origin():
    where = origin(CPU)
    assert ROW.to_json(where) == {
        "kind": "layer",
        "name": "rat layer train",
        "impl": "triton",
        "shape": {"B": 2, "T": 8},
        "ms": 2.0,
        "ms_p20": 1.0,
        "ms_p80": 3.0,
        "host_ms": 0.5,
        "peak_gb": 1.25,
        **where,
    }


def test_rows_are_said_and_written_one_at_a_time(tmp_path):
    out, said = tmp_path / "cpu/bench.jsonl", []

    def rows():
        yield ROW
        assert len(said) == len(out.read_text().splitlines()) == 1
        yield Row("attention op forward", "sdpa", {"B": 2}, Timing(1.0, 1.0, 1.0))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(rows(), CPU, out, said.append)
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == ["layer", "op"]
    assert "2.000 ms (1.000 to 3.000), host 0.500 ms, peak 1.25 GB" in said[0]
    assert said[1].endswith("1.000 ms (1.000 to 1.000)")


def test_without_a_file_rows_are_returned():
    (row,) = run([ROW], CPU, None, lambda line: None)
    assert row == ROW.to_json(origin(CPU))
