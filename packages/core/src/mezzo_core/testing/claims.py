"""Checks that every claim of a paper can come out both ways: no criterion that cannot fail."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mezzo_core.papers.criteria import AsPrinted, Criterion, Equal, Every, InOrder, Outcome, Ratio
from mezzo_core.papers.measurement import Entry, Measurement, printed_measurement
from mezzo_core.papers.published import Claim, Table
from mezzo_core.papers.reproduction import Reproduction

Examples = tuple[Measurement, Mapping[str, Sequence[Measurement]]]
"""What meets a criterion, and by a name what may contradict it: one of each list must."""
# A run in which only counts are found.
NO_RUN: Any = SimpleNamespace(results={}, trained=lambda *_: None, measured=lambda _: None)


def check_claims(paper: Reproduction, examples: Mapping[str, Sequence[Measurement]]) -> None:
    """Check that each criterion agrees with what it asks for, and differs from the contrary.

    Args:
        paper: whose answers are checked.
        examples: by id, a measurement that meets a criterion which is the paper's own function, and
            one that contradicts it. A count needs none: the true one must agree, and differ with
            some number changed in each of its rows.

    Raises:
        AssertionError: names every criterion that fails this or has no example.
    """
    published, wrong, used = paper.published, [], set()
    for answer in paper.answers:
        printed = published.by_id[answer.id]
        for evidence in answer.evidence:
            count = evidence.find(NO_RUN, printed)
            for criterion in _parts(evidence.criterion):
                found = _examples(criterion, printed, None if answer.id in examples else count)
                if found is None and answer.id in examples:
                    used.add(answer.id)
                    meets, contrary = examples[answer.id]
                    found = meets, {"its example": [contrary]}
                if problem := _problem(criterion, printed, found):
                    wrong.append(f"{answer.id}: {criterion} {problem}")
    wrong += [f"{id}: an example that is not needed" for id in sorted(set(examples) - used)]
    assert not wrong, "\n".join(wrong)


def _parts(criterion: Criterion) -> list[Criterion]:
    if isinstance(criterion, Every):
        return [part for each in criterion.criteria for part in _parts(each)]
    return [criterion]


def _problem(criterion: Criterion, printed: Table | Claim, examples: Examples | None) -> str:
    """Return what is wrong with a criterion in a few words; empty if nothing is."""
    if examples is None:
        return "has no example"
    meets, contrary = examples
    if (outcome := criterion(printed, meets).outcome) is not Outcome.AGREES:
        return f"is met, and says: {outcome.value}"
    for name, several in contrary.items():
        if Outcome.DIFFERS not in [criterion(printed, each).outcome for each in several]:
            return f"is contradicted by {name}, and does not differ"
    return ""


def _examples(
    criterion: Criterion, printed: Table | Claim, count: Measurement | None
) -> Examples | None:
    """Return the examples of a criterion of core, or of a count; None for other criteria."""
    if isinstance(criterion, AsPrinted):
        return _both_orders(printed_measurement(printed).entries)
    if isinstance(criterion, InOrder):
        names = criterion.names or getattr(printed, "ordering", ())
        places = [(g, c) for g in criterion.groups or ("",) for c in criterion.columns or ("",)]
        return _both_orders([Entry(m, c, i, g) for g, c in places for i, m in enumerate(names, 1)])
    if isinstance(criterion, Ratio):
        below, above, three = criterion.below, criterion.above, []
        for c, (low, high) in criterion.bounds.items():
            inside = low * 1.5 if math.isinf(high) else (low + high) / 2
            for g in criterion.groups or ("",):
                ratios = (Entry(above, c, r, g) for r in (inside, low / 2, high * 2))
                three.append([(Entry(below, c, 1.0, g), ratio) for ratio in ratios])
        meets, *outside = (_measurement(sum(pairs, ())) for pairs in zip(*three, strict=True))
        return meets, {"ratios out of bounds": outside}
    if isinstance(criterion, Equal):
        asked = [e for e in (count or printed_measurement(printed)).entries if e.column != "ours"]
        ours = _measurement(replace(e, column=c) for e in asked for c in ("printed", "ours"))
        return ours, {e.model: [_changed(ours, e, 3)] for e in ours.entries if e.column == "ours"}
    if count is None:
        return None
    changed: dict[str, list[Measurement]] = {}
    for entry in count.entries:
        changed.setdefault(entry.model, []).extend(_changed(count, entry, f) for f in (0.2, 5))
    return count, changed


def _both_orders(entries: Sequence[Entry]) -> Examples:
    """Return the numbers with a little noise over three seeds, and the same turned around."""
    numbers = [(e, float(e.value)) for e in entries if not isinstance(e.value, str)]
    columns = {e.column: [v for o, v in numbers if o.column == e.column] for e, _ in numbers}
    turned = [(e, max(columns[e.column]) + min(columns[e.column]) - v) for e, v in numbers]
    meets, contrary = (
        _measurement(replace(e, seed=s, value=v * (1 + s / 1e4)) for e, v in each for s in range(3))
        for each in (numbers, turned)
    )
    return meets, {"the order turned around": [contrary]}


def _measurement(entries: Iterable[Entry]) -> Measurement:
    found = tuple(entries)
    return Measurement(found, tuple(dict.fromkeys(entry.column for entry in found)), "")


def _changed(ours: Measurement, entry: Entry, factor: float) -> Measurement:
    """Multiply one number by a factor; a zero becomes one."""
    changed = replace(entry, value=float(entry.value) * factor or 1.0)
    return replace(ours, entries=tuple(changed if e is entry else e for e in ours.entries))
