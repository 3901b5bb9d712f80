"""A published.toml is read by its rules, and what breaks a rule is named."""

from pathlib import Path

import pytest
from mezzo_core.reproduction.published import load_published

TABLE = """
[paper]
title = "A paper"
authors = ["A", "B"]
[[table]]
id = "t1"
title = "Speeds"
metric = "mixed"
unit = "mixed"
better = "higher"
setting = "somewhere"
columns = ["PPL", "Acc"]
column_better = ["lower", "higher"]
rows = [
  {model = "x", values = [3.00, 50]},
  {model = "y", values = ["OOM", 60], flops = "O(T)"},
  {model = "x/y", kind = "ratio", unit = "x", better = "higher", values = [1.0, 0.8]},
]
"""
CLAIM = """
[[claim]]
id = "c1"
text = "x is good."
quantity = "goodness"
values = [1, 2]
where = "Section 1"
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "published.toml"
    path.write_text(text, encoding="utf-8")
    return load_published(path)


def test_rows_columns_and_directions_are_read(tmp_path):
    published = read(tmp_path, TABLE + CLAIM)
    assert (list(published.by_id), published.authors) == (["t1", "c1"], "A, B")
    table = published.by_id["t1"]
    assert (table.direction("PPL"), table.direction("Acc")) == ("lower", "higher")
    assert str(table.rows[0].values[0]) == "3.00"
    # Without ratios and cells without a number.
    assert (table.column("PPL"), table.column("Acc")) == ({"x": 3.0}, {"x": 50.0, "y": 60.0})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("values = [3.00, 50]", "values = [3.0]", "t1: rows or column_better are not parallel"),
        ('"lower", "higher"]', '"lower"]', "t1: rows or column_better are not parallel"),
        ('metric = "mixed"', 'metrik = "mixed"', "metrik"),
        ('metric = "mixed"', "", "metric"),
        ('id = "c1"', 'id = "t1"', "more than once"),
        ("values = [1, 2]", 'values = [1]\nlabels = ["a", "b"]', "c1: labels or .* not parallel"),
        ("[paper]", "[paper", "line 2"),
    ],
)
def test_a_broken_rule_is_named(tmp_path, old, new, named):
    assert old in TABLE + CLAIM
    with pytest.raises((TypeError, ValueError), match=named):
        read(tmp_path, (TABLE + CLAIM).replace(old, new))
