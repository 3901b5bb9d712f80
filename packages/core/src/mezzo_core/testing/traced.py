"""Finds numbers in a README that no result file says.

A measured number stands before a comment that says where it comes from, with at most its unit in
between:

    trains 9.7 times<!-- nvidia-h200/speed_table6: Attention / RAT(L=16) at 262144 --> as fast
    takes 0.30 ms<!-- nvidia-h200/speed_table8: RAT(L=16) at 4096, B=512 -->
    peaks at 19.1 GB<!-- nvidia-h200/speed_table6: peak_gb of RAT(L=16) -->
    an op of 0.25 ms<!-- nvidia-h200/bench: gsa op forward (triton) at B8 T2048 -->
    the paper's 7.6 points<!-- rat.table1: RAT(L=16) at Val. PPL -->

So a comment is `SOURCE: [DETAIL of] MODEL [/ MODEL] [at COLUMN[, GROUP]]`. Two models mean their
ratio; a detail (the highest of the entries) stands in place of the value.
"""

import math
import re
from collections.abc import Iterator, Mapping

from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Value

NUMBER = r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?"
REFERENCE = re.compile(rf"({NUMBER})([^<\d]{{0,40}}?)\s*<!-- (\S+: .*?) -->", re.DOTALL)
# What is no prose: blocks of code, code in a line, addresses, generated tables, other comments.
NO_PROSE = re.compile(
    r"```.*?```|^ {4}.*?$|`[^`\n]*`|\]\([^)]*\)|<!-- table .*?<!-- end of table -->|<!--.*?-->",
    re.DOTALL | re.MULTILINE,
)
TRACED = "\N{CHECK MARK}"
UNITS = (
    r"(?:[x\u00d7](?!\w|\s?\d)|%|per ?cent|(?:times|ms|[µu]s|s|seconds?|minutes?|hours?|[GM]i?B|"
    r"TFLOPS|TFLOP/s|(?:(?:thousand|million|billion) )?tokens(?:/s| a second| per second))\b)"
)
# A number with a unit, or before others that share one: "1.02, 1.09 and 1.38 times".
MEASURED = re.compile(rf"{NUMBER}(?=(?:(?:,| and| to| or|-)+ ?(?:{NUMBER}|{TRACED}))*[ -]?{UNITS})")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*[|*-])")
SCORES = re.compile(r"perplexit|\bPPL\b|accurac|\brecalls?\b", re.IGNORECASE)


def untraced(text: str, sources: Mapping[str, Measurement]) -> list[str]:
    """Return a line for each measured number that has no reference, or another value than its own.

    Measured numbers are those with a unit of time, memory, speed or proportion, fractions in
    sentences about perplexity or accuracy, and cells of tables that are numbers alone.

    Args:
        text: Markdown.
        sources: results and printed tables, by the names that references use.
    """
    problems: list[str] = []

    def check(match: re.Match[str]) -> str:
        number, unit, reference = match.groups()
        problems.extend(
            f"{number}: {reference}: {why}" for why in _wrong(number, reference, sources)
        )
        return TRACED + unit

    prose = NO_PROSE.sub("", REFERENCE.sub(check, text))
    for sentence in SENTENCE_END.split(prose):
        found = {match[0] for match in MEASURED.finditer(sentence)}
        if SCORES.search(sentence):
            found |= {n for n in re.findall(NUMBER, sentence) if "." in n}
        if sentence.startswith("|"):
            found |= set(re.findall(rf"(?<=\|)\s*({NUMBER})\s*(?=\|)", sentence))
        problems += [f"{number}: no reference: {sentence.strip()}" for number in sorted(found)]
    return problems


def _wrong(number: str, reference: str, sources: Mapping[str, Measurement]) -> Iterator[str]:
    """Yield why a number is not what its reference says, if it is not."""
    try:
        value = evaluate(reference, sources)
    except ValueError as error:
        yield str(error)
        return
    if abs(value - float(number.replace(",", ""))) > 0.5000001 * last_digit(number):
        yield f"is {value:.6g}"


def last_digit(number: str) -> float:
    """Return what one in the last digit of a written number means.

    Zeros at the end of a whole number are digits only up to the second digit: 339,000 is in
    thousands, 1,000 in hundreds.
    """
    if "." in number:
        return 10.0 ** -len(number.split(".")[1])
    digits = number.replace(",", "")
    return 10.0 ** (len(digits) - max(len(digits.rstrip("0")), min(2, len(digits))))


def evaluate(reference: str, sources: Mapping[str, Measurement]) -> float:
    """Return the number that a reference names.

    Raises:
        ValueError: if there is none.
    """
    source, _, rest = reference.partition(": ")
    if source not in sources:
        raise ValueError(f"nothing is named {source}")
    rows, _, place = " ".join(rest.split()).rpartition(" at ") if " at " in rest else (rest, "", "")
    column, _, group = place.partition(", ")
    detail, of, names = rows.partition(" of ")
    if not of or not detail.isidentifier():
        detail, names = "", rows
    numbers = []
    for name in names.split(" / "):
        value = _value(sources[source], name, column, group, detail)
        if value is None or isinstance(value, str):
            raise ValueError(f"no number, but {value or 'nothing'}")
        numbers.append(float(value))
    first, *others = numbers
    return first / math.prod(others)


def _value(ours: Measurement, model: str, column: str, group: str, detail: str) -> Value | None:
    groups = [g for g, name in ours.rows if name == model and group in ("", g)]
    columns = [column] if column else ours.columns
    if detail:
        cells = [entry for g in groups for c in columns for entry in ours.cell(model, c, g)]
        return max((e.details[detail] for e in cells if detail in e.details), default=None)
    if len(groups) != 1 or len(columns) != 1:
        raise ValueError(
            f"no single number: {model} in {len(groups)} groups, {len(columns)} columns"
        )
    return ours.typical(model, columns[0], groups[0])
