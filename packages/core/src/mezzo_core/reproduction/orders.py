"""Orders that a paper states, against our numbers: this run's, or results measured elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mezzo_core.papers import (
    Claim,
    Experiment,
    Finding,
    Measurement,
    Order,
    Pair,
    Published,
    Status,
    Table,
    compare_column,
    compare_order,
    status_of,
)


def ordering_finding(
    printed: Claim | Table,
    ordering: Sequence[str],
    measurement: Measurement,
    column: str,
    note: str = "",
) -> Finding:
    """Compare an order with one column of a smaller measurement of ours.

    Args:
        printed: the claim or the table that states the order.
        ordering: names of the measurement, best first; what was not measured is passed over.
        measurement: ours.
        column: of it.
        note: said after the verdict.
    """
    ours, better = measurement.samples(column), printed.better or "lower"
    order = compare_order(ordering, ours, better)
    return Finding(
        printed.id,
        "table" if isinstance(printed, Table) else "claim",
        Status.SCALED_DOWN,
        f"at tiny scale {order.verdict.value}{note}; ours, best first: "
        f"{order.ranking(ours, better)}",
        (measurement,),
        order.sentences(),
    )


def speaking_to(id: str, experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments about one table or claim, the paper's own setting last.

    The last one is what a finding ends up saying.
    """
    found = [each for each in experiments if id in each.ids]
    return sorted(found, key=lambda each: each.same_setting)


def with_experiment(
    finding: Finding,
    published: Published,
    experiment: Experiment,
    ordering: Sequence[str] | None = None,
) -> Finding:
    """Let a result measured elsewhere and committed speak first; our own rows stay beside it.

    Args:
        finding: what was found so far.
        published: the paper's numbers.
        experiment: the result.
        ordering: what is compared with each column; by default the order that is printed, column
            by column and group by group for a table.
    """
    ours = experiment.measurement
    order = Order(tuple(_pairs(finding, published, experiment, ordering)))
    status, verdict = Status.SCALED_DOWN, "its columns have no printed order"
    if order.pairs:
        status = status_of(order.verdict, same_setting=experiment.same_setting)
        verdict = order.verdict.value
    return replace(
        finding,
        status=status,
        summary=f"on {ours.device} {verdict} ({ours.setting})",
        measurements=(ours, *finding.measurements),
        details=(*order.sentences(), f"Also: {finding.summary}", *finding.details),
    )


def _pairs(
    finding: Finding,
    published: Published,
    experiment: Experiment,
    ordering: Sequence[str] | None,
) -> Iterator[Pair]:
    """Yield the neighbours of every order that the experiment's columns can answer."""
    measured = experiment.measurement
    for column in measured.columns:
        for group in sorted({row.group for row in measured.rows}):
            if finding.kind == "table" and ordering is None:
                table = published.table(finding.id)
                ours = measured.paired(column, group, {row.model for row in table.rows})
                yield from compare_column(table, column, ours, group).pairs
                continue
            names = ordering or published.claim(finding.id).ordering
            ours = measured.paired(column, group, names)
            if len(ours) > 1:
                yield from compare_order(names, ours, experiment.better).pairs
