"""Answers from committed results: orders of Table 2, and figures 3a and 4 in words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mezzo_core.papers import Experiment, Finding, Measurement, Published
from mezzo_core.reproduction.orders import speaking_to, with_experiment
from mezzo_core.reproduction.speed import Words, groups, listed, named, ratios, with_words

from mezzo_gsa.recipes import ABLATION

TRANSFORMER, RETNET, GLA, GSA = "Xfmr++", "RetNet", "GLA", "GSA"
KEPT = "GSA w/o recomp."
"""GSA with its states kept for the backward pass."""

_GATES = ("gsa", "gsa_constant_decay", "abc")
_BETWEEN = ("", "_between_relu", "_between_swish", "_between_relu_squared", "_between_none")
_SLOTS = ("gsa_m128", "gsa", "gsa_m32")
ORDERINGS: Mapping[str, Sequence[str]] = {
    "gsa.claim.ablation_gating": tuple(ABLATION[name] for name in _GATES),
    "gsa.claim.ablation_softmax": tuple(ABLATION[f"gsa{name}"] for name in _BETWEEN),
    "gsa.claim.ablation_slots": tuple(ABLATION[name] for name in _SLOTS),
}
"""The orders, best first, of claims whose text uses other names for the rows of Table 2."""


def with_results(
    finding: Finding, published: Published, experiments: Sequence[Experiment]
) -> Finding:
    """Answer from committed results where there are any; this run's rows stay beside them."""
    orderings = {**ORDERINGS, "gsa.table2": whole_column(published)}
    for experiment in speaking_to(finding.id, experiments):
        if finding.id in WORDS:
            finding = with_words(finding, experiment, WORDS[finding.id](experiment.measurement))
        elif finding.id in orderings:
            ordering = orderings[finding.id]
            finding = with_experiment(finding, published, ungrouped(experiment), ordering)
        else:
            finding = with_experiment(finding, published, experiment)
    return finding


def ungrouped(experiment: Experiment) -> Experiment:
    """Return an experiment of Table 2 without its groups; each row is a variant of the first."""
    ours = experiment.measurement
    rows = tuple(replace(row, group="") for row in ours.rows)
    return replace(experiment, measurement=replace(ours, rows=rows))


def whole_column(published: Published) -> tuple[str, ...]:
    """Return the rows of Table 2 best first, across its groups."""
    rows = published.table("gsa.table2").rows
    return tuple(row.model for row in sorted(rows, key=lambda row: float(row.values[0])))


def train_throughput(ours: Measurement) -> str | None:
    """State how fast GSA trains beside the other models, at each length."""
    found = {other: ratios(ours, GSA, other) for other in (GLA, RETNET, TRANSFORMER)}
    parts = [f"{other} {listed(speeds)}" for other, speeds in found.items() if speeds]
    return f"GSA's training throughput over that of {'; '.join(parts)}" if parts else None


def recompute(ours: Measurement) -> str | None:
    """State the cost in memory, or the gain in throughput, of keeping the states."""
    what = "memory" if ours.unit == "GiB" else "training throughput"
    found = ratios(ours, KEPT, GSA)
    said = f"{what} with the states kept over that with them computed again: {listed(found)}"
    return said if found else None


def inference(ours: Measurement) -> str | None:
    """State how long the other models take to generate, over GSA's time."""
    found = {other: ratios(ours, other, GSA) for other in (GLA, RETNET, TRANSFORMER)}
    parts = [f"{other} {listed(times, 'new tokens')}" for other, times in found.items() if times]
    return f"time to generate over that of GSA: {'; '.join(parts)}" if parts else None


def slot_throughput(ours: Measurement) -> str:
    """State the throughput at each number of slots, over that at 64."""
    parts = (
        f"{slots} slots {listed(ratios(ours, f'{slots} slots', '64 slots'))}" for slots in (32, 128)
    )
    return f"training throughput over that with 64 slots: {'; '.join(parts)}"


def recall(ours: Measurement) -> str:
    """List the accuracy of every model at each width, best first."""
    said = []
    for group in groups(ours):
        for column in ours.columns:
            means = {m: sum(runs) / len(runs) for m, runs in ours.samples(column, group).items()}
            ranked = sorted(means, key=lambda model: -means[model])
            listing = ", ".join(f"{model} {means[model]:.3f}" for model in ranked)
            said.append(f"at {named(group, column, 'C')} {listing or 'nothing measured'}")
    return f"accuracy {'; '.join(said)}"


WORDS: Mapping[str, Words] = {
    "gsa.claim.mqar": recall,
    "gsa.claim.slot_throughput": slot_throughput,
    "gsa.claim.train_throughput": train_throughput,
    "gsa.claim.recompute": recompute,
    "gsa.claim.inference": inference,
}
"""For each claim without a printed number, the function that words what a measurement says."""
