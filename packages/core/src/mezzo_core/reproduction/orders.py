"""Compares the orders that a paper states with our numbers, of this run or of committed results."""

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
    """Compare a stated order with one column of a smaller measurement of ours.

    Args:
        printed: the claim or the table that states the order.
        ordering: names of models, best first; models that we did not measure are ignored.
        measurement: our measurement.
        column: the column to compare.
        note: text to add after the verdict.
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
    """Return the experiments about one table or claim, those at the paper's own setting last.

    The finding is updated by each of them in turn, so the last one decides its status.
    """
    found = [each for each in experiments if id in each.ids]
    return sorted(found, key=lambda each: each.same_setting)


def with_experiment(
    finding: Finding,
    published: Published,
    experiment: Experiment,
    ordering: Sequence[str] | None = None,
) -> Finding:
    """Update a finding by a committed result, which decides its status and comes first in it.

    The measurements and the summary of the finding so far are kept after it.

    Args:
        finding: the finding so far.
        published: the paper's numbers.
        experiment: the committed result.
        ordering: the order to compare with each column. By default it is the printed order, which
            a table has for each of its columns and groups.
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
    """Yield the compared neighbours of all orders for which the experiment has numbers."""
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
