"""Tables and claims about speed, from layers and models timed on this machine or on a GPU.

Speeds depend on the machine, so on other hardware than the paper's their status is SCALED_DOWN.
"""

from collections.abc import Callable, Mapping

from mezzo_core.papers import (
    Claim,
    Experiment,
    Finding,
    Measurement,
    Published,
    Status,
    Table,
    Verdict,
    compare_column,
    compare_order,
)
from mezzo_core.reproduction.speed import Words, groups, listed, named, ratios, with_words

from mezzo_rat.reproduction.evidence import Evidence

RAT, HYBRID, ATTENTION = "RAT(L=16)", "RAT(L=16)-SWA", "Attention"


def layer_table(phase: str, group: str = "") -> Callable[[Evidence, Table], Finding]:
    """Return a function that compares a table of layer times with ours at common lengths."""

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
        details.append(speedup()(measurement))
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


def from_layers(phase: str) -> Callable[[Evidence, Claim], Finding]:
    """Return a function that answers a claim about layers from small ones timed on this CPU."""

    def answer(evidence: Evidence, claim: Claim) -> Finding:
        measurement = evidence.layers[phase]
        summary = f"on this CPU {WORDS[claim.id](measurement)}"
        return Finding(claim.id, "claim", Status.SCALED_DOWN, summary, (measurement,))

    return answer


def from_generation(evidence: Evidence, claim: Claim) -> Finding:
    """Answer a claim about throughput from the tiny models on this CPU."""
    summary = f"tiny models on this CPU: {WORDS[claim.id](evidence.generation)}"
    return Finding(claim.id, "claim", Status.SCALED_DOWN, summary, (evidence.generation,))


def with_result(finding: Finding, published: Published, experiment: Experiment) -> Finding:
    """Answer from a committed speed result; the finding's earlier answer stays beside it."""
    ours = experiment.measurement
    if finding.kind == "table":
        return with_words(finding, experiment, *table_words(published.table(finding.id), ours))
    return with_words(finding, experiment, WORDS[finding.id](ours))


def table_words(table: Table, ours: Measurement) -> tuple[str, tuple[str, ...]]:
    """Return in how many columns the printed order of models holds, and the pairs that differ."""
    verdicts: dict[Verdict, int] = {}
    details = []
    for group in groups(ours):
        for column in ours.columns:
            order = compare_column(table, column, ours.samples(column, group), group)
            if not order.pairs:
                continue
            verdicts[order.verdict] = verdicts.get(order.verdict, 0) + 1
            details += [
                f"{named(group, column)}, {sentence}"
                for pair, sentence in zip(order.pairs, order.sentences(), strict=True)
                if pair.verdict is not Verdict.HOLDS
            ]
    counted = ", ".join(f"{verdict.value} in {n} columns" for verdict, n in verdicts.items())
    return f"{counted or 'no column is compared'}; {speedup()(ours)}", tuple(details)


def speedup(
    slow: str = ATTENTION, fast: str = RAT, *, longest: bool = False
) -> Callable[[Measurement], str]:
    """Return a function that states the speed of `fast` over that of `slow`, by length."""

    def say(ours: Measurement) -> str:
        found = ratios(ours, slow, fast)
        if longest:
            found = dict(list(found.items())[-1:])
        return f"the speed of {fast} over that of {slow}: {listed(found)}"

    return say


def throughput(*models: str) -> Words:
    """Return a function that states the models' generation throughput over attention's."""

    def say(ours: Measurement) -> str:
        parts = (f"{model} {listed(ratios(ours, model, ATTENTION))}" for model in models)
        return f"generated tokens a second over those of {ATTENTION}: {'; '.join(parts)}"

    return say


def slower_where(ours: Measurement) -> str:
    """Name the lengths at which RAT(L=16) is slower than attention."""
    found = ratios(ours, ATTENTION, RAT)
    slower = [named(*key) for key, ratio in found.items() if ratio < 1]
    said = f"{RAT} is slower than {ATTENTION} at {', '.join(slower) or 'no length'}"
    return f"{said}; {speedup()(ours)}"


def growth_from_32k(ours: Measurement) -> str:
    """State by how much each layer slows down beyond 32K tokens, at the same tokens a batch."""
    columns = [column for column in ours.columns if int(column) >= 32_768]
    if len(columns) < 2:
        return "nothing was measured beyond 32K tokens"
    first, last = ours.samples(columns[0]), ours.samples(columns[-1])
    parts = (
        f"{model} {sum(last[model]) / sum(first[model]):.2f}"
        for model in first
        if model in last and "/" not in model
    )
    said = f"from T = {columns[0]} to {columns[-1]} times grow by a factor of {', '.join(parts)}"
    return f"{said}; {speedup()(ours)}"


def out_of_memory(ours: Measurement) -> str:
    """Name the first position at which each layer's batch no longer fits this GPU."""
    parts = []
    for row in ours.rows:
        full = [c for c, v in zip(ours.columns, row.values, strict=True) if v == "OOM"]
        if full:
            parts.append(f"{row.model} from {named(row.group, full[0])}")
    return f"out of memory: {'; '.join(parts) or 'nothing'}"


TABLES = ("rat.table6", "rat.table7", "rat.table8")
WORDS: Mapping[str, Words] = {
    "rat.claim.headline_train": speedup(),
    "rat.claim.headline_gen": speedup(),
    "rat.claim.headline_throughput": throughput(RAT, HYBRID),
    "rat.claim.train_speedups": speedup(),
    "rat.claim.speedup_200k": speedup(longest=True),
    "rat.claim.short_slower": slower_where,
    "rat.claim.rnn_slows": growth_from_32k,
    "rat.claim.gen_speedups": speedup(),
    "rat.claim.gen_l64": speedup(RAT, "RAT(L=64)"),
    "rat.claim.oom": out_of_memory,
    "rat.claim.throughput_rat": throughput(RAT),
    "rat.claim.throughput_hybrid": throughput(HYBRID),
    "rat.claim.16k_throughput": throughput(HYBRID),
}
"""For each claim about speed, the function that words what a measurement says about it."""
