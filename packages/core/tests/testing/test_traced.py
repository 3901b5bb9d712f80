"""A number in a README that no result says, or says otherwise, is found."""

import pytest
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.testing.traced import evaluate, last_digit, untraced


def cell(model, column, *values, group="", **details):
    return [Entry(model, column, v, group, seed, details) for seed, v in enumerate(values)]


SPEED = Measurement(
    (
        *cell("a / w, of b", "8", 2.0, 9.7, 30.0, peak_gb=19.06),
        *cell("RAT(L=16)", "8", 0.97, 1.0, 1.1, peak_gb=3.0),
        *cell("RAT(L=16)", "16", 2.0, peak_gb=4.0),
        *cell("x", "8", 338_836, group="g"),
        *cell("x", "8", 5, group="h"),
        *cell("y", "16", "OOM"),
    ),
    ("8", "16"),
    "",
    kind="speed",
)
PPL = Measurement(tuple(cell("GSA, apart", "Val. PPL", 29.4, 30.4)), ("Val. PPL",), "")
SOURCES = {"gpu/speed": SPEED, "gpu/train": PPL}


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("gpu/speed: RAT(L=16) at 8", 1.0),
        ("gpu/speed: RAT(L=16) at 16 / RAT(L=16) at 8", None),
        ("gpu/speed: RAT(L=16) / RAT(L=16) at 8", 1.0),
        ("gpu/speed: x / RAT(L=16) at 8", None),
        ("gpu/speed: x at 8, h", 5.0),
        ("gpu/speed: peak_gb of RAT(L=16)", 4.0),
        ("gpu/speed: peak_gb of RAT(L=16) at 8", 3.0),
        ("gpu/train: GSA, apart", 29.9),
        ("gpu/train: GSA, apart at Val. PPL", 29.9),
        ("gpu/other: x", None),
        ("gpu/speed: none at 8", None),
        ("gpu/speed: RAT(L=16)", None),
        ("gpu/speed: x at 8", None),
        ("gpu/speed: y at 16", None),
        ("gpu/speed: host_ms of RAT(L=16)", None),
    ],
)
def test_a_reference_is_a_number_of_its_source_or_nothing(reference, value):
    if value is None:
        with pytest.raises(ValueError, match="no"):
            evaluate(reference, SOURCES)
    else:
        assert evaluate(reference, SOURCES) == pytest.approx(value)


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        ("9.7", 0.1),
        ("9.70", 0.01),
        ("7", 1),
        ("5,937", 1),
        ("339,000", 1000),
        ("1,000", 100),
        ("10", 1),
        ("100", 10),
        ("0.0305", 0.0001),
    ],
)
def test_zeros_at_the_end_of_a_whole_number_are_digits_up_to_the_second(number, unit):
    assert last_digit(number) == pytest.approx(unit)


TRACED = [
    "trains 9.7 times<!-- gpu/speed: x / RAT(L=16) at 8, g --> as fast",
    "takes 1.0 ms<!-- gpu/speed: RAT(L=16) at 8 -->",
    "takes 1.0 <!-- gpu/speed: RAT(L=16) at 8 --> ms",
    "trains at 339,000 tokens a second<!-- gpu/speed: x at 8, g -->",
    "peaks at 4.0 GB<!-- gpu/speed: peak_gb of RAT(L=16) -->, not more",
    "a perplexity\nof 29.9<!-- gpu/train: GSA, apart -->",
    "| a | 1.0<!-- gpu/speed: RAT(L=16) at 8 --> |",
    "1.0<!-- gpu/speed: RAT(L=16) at 8 --> and 2.0 ms<!-- gpu/speed: RAT(L=16) at 16 -->",
]


@pytest.mark.parametrize("text", TRACED[1:])
def test_a_number_as_its_result_says_is_traced(text):
    assert untraced(text, SOURCES) == []


@pytest.mark.parametrize("text", TRACED)
def test_another_number_or_a_lost_reference_is_found(text):
    number = next(word for word in ("9.7", "1.0", "339,000", "4.0", "29.9") if word in text)
    other = {"9.7": "9.8", "1.0": "1.1", "339,000": "338,000", "4.0": "4.1", "29.9": "29.8"}
    (problem,) = untraced(text.replace(number, other[number]), SOURCES)
    assert problem.startswith(f"{other[number]}: gpu/")
    lost = text[: text.index("<!--")].rstrip() + text[text.index("-->") + 3 :]
    assert any(problem.startswith(f"{number}: no reference") for problem in untraced(lost, SOURCES))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It is 1.02, 1.09 and 13 times as fast.", ["1.02", "1.09", "13"]),
        ("From 1.04 to 10.6 times, 8x and 3× more.", ["1.04", "10.6", "3", "8"]),  # noqa: RUF001
        ("18% slower, 12 per cent, 3.5 s, 2 hours", ["12", "18", "2", "3.5"]),
        ("2.5 million tokens a second, 64 tokens/s", ["2.5", "64"]),
        ("Its PPL is 36.5, theirs 33. It recalls 0.98.", ["0.98", "36.5"]),
        ("| a | 7.61 | 8 |", ["7.61", "8"]),
        ("a 40-ms step and 19.1 GiB", ["19.1", "40"]),
    ],
)
def test_numbers_that_look_measured_need_a_reference(text, numbers):
    assert sorted(problem.split(":")[0] for problem in untraced(text, {})) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "RAT(L=16) at T = 262144 and C = 2048, head dimensions of 32, 64 and 128, 66 tables.",
        "Python 3.10 to 3.13, torch 2.11.0, PyTorch>=2.8, mezzo 0.1: see Table 6.",
        "```\nsleep 5 s\n```\n    indented 5 ms\nuse `--wait 5 ms` or [this](a/5%20ms.md)",
        "<!-- table gpu/speed -->\n| a | 7 |\n5 ms\n<!-- end of table -->",
        "64 x 64 tiles; layers 3 to 5",
    ],
)
def test_settings_versions_code_and_generated_tables_need_none(text):
    assert untraced(text, {}) == []
