"""Figures show every number that there is, and none that there is not."""

import math

import pytest
from matplotlib.colors import to_hex
from mezzo_core.reproduction.figures import draw_result
from mezzo_core.reproduction.measurement import Entry, Measurement

COLUMNS = ("T=1024", "T=2048", "T=4096")


def speed(group="", columns=COLUMNS, kind="speed", unit="ms", **values):
    entries = [
        Entry(model, column, value, group)
        for model, row in values.items()
        for column, value in zip(columns, row, strict=True)
        if value is not None
    ]
    return Measurement(tuple(entries), columns, "", kind=kind, unit=unit)


def training(*models, seeds=2):
    curve = {"steps": {"train": [[1, 9.0], [2, 8.0]], "val": []}}
    entries = [
        Entry(m, "PPL", 5.0 + s, seed=s, details=curve) for s in range(seeds) for m in models
    ]
    return Measurement(tuple(entries), ("PPL",), "", kind="training", unit="perplexity")


@pytest.fixture
def draw(tmp_path):
    def drawn(ours, *arguments):
        path = tmp_path / "figure.png"
        figure = draw_result(ours, path, *arguments)
        assert path.read_bytes().startswith(b"\x89PNG")
        for axes in figure.axes:
            assert axes.get_xlabel(), "an axis without a label"
            assert axes.get_ylabel() or axes.get_yticklabels(), "an axis without a label"
        return figure

    return drawn


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def colours(figure):
    """Return the colours of the models in all panels."""
    found = {}
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        for line in axes.get_lines():
            name = line.get_label()
            if name.startswith("_"):
                name = names[int(line.get_ydata()[0])]
            found.setdefault(name, set()).add(to_hex(line.get_color()))
    return found


def test_what_is_missing_or_out_of_memory_is_a_gap(draw):
    (axes,) = draw(speed(a=(1.0, None, 40.0), b=(1.0, 2.0, "OOM"))).axes
    assert [math.isnan(y) for y in lines(axes)["a"].get_ydata()] == [False, True, False]
    assert [math.isnan(y) for y in lines(axes)["b"].get_ydata()] == [False, False, True]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("T (tokens)", "ms")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "2K", "4K"]


def test_a_model_has_one_colour_everywhere_and_no_two_share_one(draw):
    names = [f"model {i}" for i in range(40)]
    whole = colours(draw(speed(**dict.fromkeys(names, (1.0, 2.0, 3.0))), names))
    assert all(len(found) == 1 for found in whole.values())
    assert len({colour for found in whole.values() for colour in found}) == len(names)
    part = colours(draw(training(*names[20:25]), names))
    assert len(part) == 5
    assert all(part[name] == whole[name] for name in part)
    turned = colours(draw(speed(**dict.fromkeys(names[::-3], (1.0, 2.0, 3.0))), names))
    assert all(turned[name] == whole[name] for name in turned)


def test_a_training_is_losses_of_the_first_seed_and_a_dot_a_seed(draw):
    curves, dots = draw(training("a", "b")).axes
    assert set(lines(curves)) == {"a", "b"}
    assert (curves.get_xlabel(), dots.get_xlabel()) == ("step", "PPL (perplexity)")
    assert [len(line.get_xdata()) for line in dots.get_lines()] == [2, 2]
    assert [label.get_text() for label in dots.get_yticklabels()] == ["a", "b"]


def test_groups_have_panels(draw):
    entries = (*speed("g", a=(1.0, 2.0, 3.0)).entries, *speed("h", a=(1.0, 2.0, 3.0)).entries)
    grouped = Measurement(entries, COLUMNS, "", kind="speed", unit="ms")
    assert [axes.get_title() for axes in draw(grouped).axes] == ["g", "h"]
