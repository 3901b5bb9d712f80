"""Tables and claims about speed, from small layers on this machine: always scaled down."""

from collections.abc import Callable

from mezzo_core.papers import (
    Claim,
    Finding,
    Measurement,
    Status,
    Table,
    compare_column,
    compare_order,
)

from mezzo_rat.reproduction.evidence import Evidence

RAT = "RAT(L=16)"


def layer_table(phase: str, group: str = "") -> Callable[[Evidence, Table], Finding]:
    """Compare a table of layer times with ours at the lengths that both have."""

    def compare(evidence: Evidence, table: Table) -> Finding:
        measurement = evidence.layers[phase]
        common = [column for column in measurement.columns if column in table.columns]
        details = []
        verdicts = []
        for column in common:
            ours = measurement.samples(column)
            order = compare_column(table, column, ours, group)
            ranking = order.ranking(ours, "lower")
            verdicts.append(f"at T = {column} {order.verdict.value} (ours, best first: {ranking})")
            details += [f"T = {column}, {sentence}" for sentence in order.sentences()]
        details.append("Attention / RAT(L=16): " + _ratios_in_words(measurement))
        compared = "; ".join(verdicts) or "no length in common with the paper"
        return Finding(
            table.id,
            "table",
            Status.SCALED_DOWN,
            f"small layers on a CPU; {compared}",
            (measurement,),
            tuple(details),
        )

    return compare


def speedup(phase: str) -> Callable[[Evidence, Claim], Finding]:
    """State how many times as fast as attention RAT(L=16) is, by length."""

    def compare(evidence: Evidence, claim: Claim) -> Finding:
        measurement = evidence.layers[phase]
        ratios = list(_ratios(measurement).values())
        grows = "grows" if ratios == sorted(ratios) else "does not grow steadily"
        return Finding(
            claim.id,
            "claim",
            Status.SCALED_DOWN,
            f"on this CPU the speedup of RAT(L=16) over attention {grows} with T: "
            + _ratios_in_words(measurement),
            (measurement,),
        )

    return compare


def short_slower(evidence: Evidence, claim: Claim) -> Finding:
    """Compare attention and RAT(L=16) in training at the longest of our lengths up to 4096."""
    measurement = evidence.layers["train"]
    column = measurement.columns[-1]
    order = compare_order(claim.ordering, measurement.samples(column), "lower")
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        f"on this CPU, training at T = {column}: {order.verdict.value}; the paper's "
        "reason, few chunks for a GPU's kernel, is not at work here",
        (measurement, evidence.layers["prefill"]),
        order.sentences(),
    )


def gen_l64(evidence: Evidence, claim: Claim) -> Finding:
    """State how many times as fast as RAT(L=16) RAT(L=64) decodes, by length."""
    measurement = evidence.layers["decode"]
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        "on this CPU RAT(L=64) decodes, against RAT(L=16): "
        + _ratios_in_words(measurement, RAT, "RAT(L=64)"),
        (measurement,),
    )


def throughput(*models: str) -> Callable[[Evidence, Claim], Finding]:
    """State how many times as many tokens a second as attention these tiny models generate."""

    def compare(evidence: Evidence, claim: Claim) -> Finding:
        ours = evidence.generation.samples("Throughput")
        words = ", ".join(f"{m} {ours[m][0] / ours['Attention'][0]:.2f} times" for m in models)
        return Finding(
            claim.id,
            "claim",
            Status.SCALED_DOWN,
            f"tiny models on this CPU generate, against attention: {words}",
            (evidence.generation,),
        )

    return compare


def _ratios(measurement: Measurement, slow: str = "Attention", fast: str = RAT) -> dict[str, float]:
    found = {}
    for column in measurement.columns:
        ours = measurement.samples(column)
        found[column] = sum(ours[slow]) / sum(ours[fast])
    return found


def _ratios_in_words(measurement: Measurement, slow: str = "Attention", fast: str = RAT) -> str:
    ratios = _ratios(measurement, slow, fast)
    return ", ".join(f"{ratio:.2f} times at T = {column}" for column, ratio in ratios.items())
