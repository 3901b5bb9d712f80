"""Tables and claims about perplexity and loss, from tiny trainings; always SCALED_DOWN."""

from mezzo_core.papers import (
    Claim,
    Finding,
    Measurement,
    Status,
    Table,
    compare_column,
    compare_order,
)
from mezzo_core.reproduction.orders import ordering_finding

from mezzo_rat.reproduction.evidence import Evidence

BETWEEN = ("Attention", "RAT(L=16)", "RAT(L=64)", "RNN")
HYBRIDS = ("RAT(L=16)-SWA", "Attention-SWA")


def table1(evidence: Evidence, table: Table) -> Finding:
    """Compare the perplexity and speed of the tiny models; downstream tasks are left out."""
    perplexity, generation = evidence.trainings.perplexity(), evidence.generation
    details, verdicts = [], []
    for column, ours in (("Val. PPL", perplexity), ("Throughput", generation)):
        samples = ours.samples(column)
        order = compare_column(table, column, samples)
        ranking = order.ranking(samples, table.direction(column))
        verdicts.append(f"{column}: {order.verdict.value} (ours, best first: {ranking})")
        details += [f"{column}, {sentence}" for sentence in order.sentences()]
    return Finding(
        table.id,
        "table",
        Status.SCALED_DOWN,
        "tiny models on a CPU, two of eight columns; " + "; ".join(verdicts),
        (perplexity, generation),
        tuple(details),
    )


def ppl_200m(evidence: Evidence, claim: Claim) -> Finding:
    """Check the order: attention, then RAT with growing chunks, then the RNN."""
    note = " (without L = 256, half of the tiny context)"
    return ordering_finding(
        claim, claim.ordering, evidence.trainings.perplexity(BETWEEN), "Val. PPL", note
    )


def ppl_between(evidence: Evidence, claim: Claim) -> Finding:
    """Check that RAT is between attention and the RNN, and that larger chunks are worse."""
    return ordering_finding(claim, BETWEEN, evidence.trainings.perplexity(BETWEEN), "Val. PPL")


def chunk16_matches(evidence: Evidence, claim: Claim) -> Finding:
    """Check that RAT(L=16) comes nearer to attention than RAT(L=64)."""
    measurement = evidence.trainings.perplexity(("Attention", "RAT(L=16)", "RAT(L=64)"))
    ours = measurement.samples("Val. PPL")
    gaps = {
        model: [abs(a - b) for a, b in zip(ours[model], ours["Attention"], strict=True)]
        for model in ("RAT(L=16)", "RAT(L=64)")
    }
    order = compare_order(("RAT(L=16)", "RAT(L=64)"), gaps, "lower")
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        f"that L = 16 is nearer to attention than L = 64: at tiny scale {order.verdict.value}",
        (measurement,),
        tuple(f"distance to attention, {sentence}" for sentence in order.sentences()),
    )


def fig6_rnn(evidence: Evidence, claim: Claim) -> Finding:
    """Check that the RNN's loss is steady over test lengths, and the highest at the training's."""
    measurement = evidence.trainings.loss_by_length(("RNN", *HYBRIDS))
    trained, longest = _trained_and_longest(evidence)
    order = compare_order((HYBRIDS[0], "RNN"), measurement.samples(trained), "lower")
    other = compare_order((HYBRIDS[1], "RNN"), measurement.samples(trained), "lower")
    change = _changes(measurement, trained, longest)["RNN"]
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        f"the RNN's loss changes by {change:+.3f} from {trained} to {longest}; that it is the "
        f"highest at {trained}: {order.verdict.value} against {HYBRIDS[0]}, "
        f"{other.verdict.value} against {HYBRIDS[1]}",
        (measurement,),
        (*order.sentences(), *other.sentences()),
    )


def fig6_rope(evidence: Evidence, claim: Claim) -> Finding:
    """Check that with RoPE both hybrids get worse at longer tests, attention more than RAT."""
    measurement = evidence.trainings.loss_by_length(HYBRIDS)
    trained, longest = _trained_and_longest(evidence)
    changes = _changes(measurement, trained, longest)
    order = compare_order(HYBRIDS, measurement.samples(longest), "lower")
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        f"from {trained} to {longest} the loss changes by "
        + ", ".join(f"{change:+.3f} ({model})" for model, change in changes.items())
        + f"; at {longest} {order.verdict.value}",
        (measurement,),
        order.sentences(),
    )


def _trained_and_longest(evidence: Evidence) -> tuple[str, str]:
    """Return two columns: the longest test length up to the training length, and the longest."""
    lengths = evidence.trainings.budget.test_lengths
    seen = [length for length in lengths if length <= evidence.trainings.runs[0].seq_len]
    return f"T={max(seen)}", f"T={max(lengths)}"


def _changes(measurement: Measurement, first: str, last: str) -> dict[str, float]:
    before, after = measurement.samples(first), measurement.samples(last)
    return {
        model: (sum(after[model]) - sum(before[model])) / len(before[model]) for model in before
    }
