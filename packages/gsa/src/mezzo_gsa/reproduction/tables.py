"""The function that answers each table and claim; `reasons` has those that are not attempted.

Together they have every table and claim exactly once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from mezzo_core.papers import Claim, Experiment, Finding, Published, Status, Table
from mezzo_core.reproduction import flow
from mezzo_core.reproduction.evidence import Trainings
from mezzo_core.reproduction.flow import guarded, kind_of
from mezzo_core.reproduction.orders import ordering_finding

from mezzo_gsa.reproduction import limits, sizes
from mezzo_gsa.reproduction.reasons import NOT_ATTEMPTED
from mezzo_gsa.reproduction.results import with_results
from mezzo_gsa.reproduction.scale import ABC, CONSTANT

GATES = ("GSA", CONSTANT, ABC)
"""The order of section 4.1.3: gates that depend on the token, constant gates, no gates."""
EXACT: Mapping[str, Callable[[Claim], Finding]] = {
    "gsa.claim.state_size": sizes.state_size,
    "gsa.claim.state_details": sizes.state_details,
    "gsa.claim.gate_params": sizes.gate_params,
    "gsa.claim.damping": sizes.damping,
    "gsa.setup.lm": sizes.setup_lm,
    "gsa.setup.t2r": sizes.setup_t2r,
}
TRAINED = ("gsa.table2", "gsa.claim.ablation_gating")
"""The table and the claim that the tiny trainings answer."""


def find_all(
    published: Published,
    trainings: Trainings,
    only: Collection[str] | None,
    experiments: Sequence[Experiment],
) -> list[Finding]:
    """Return a finding for each table, claim and check (of `only`), in the paper's order."""

    def answer(id: str) -> Finding:
        finding = guarded(id, partial(find, id, published, trainings))
        return with_results(finding, published, experiments)

    return flow.find_all(published, limits.CHECKS, only, answer)


def find(id: str, published: Published, trainings: Trainings) -> Finding:
    """Return the finding for one table, claim or check."""
    if id in limits.CHECKS:
        return limits.CHECKS[id]()
    if id in EXACT:
        return EXACT[id](published.claim(id))
    if id in NOT_ATTEMPTED:
        return Finding(id, kind_of(id), Status.NOT_ATTEMPTED, NOT_ATTEMPTED[id])
    is_table = kind_of(id) == "table"
    return gating(published.table(id) if is_table else published.claim(id), trainings)


def gating(printed: Claim | Table, trainings: Trainings) -> Finding:
    """Compare the gating mechanisms, which are three of the nine rows of Table 2."""
    note = " (three of nine rows)" if isinstance(printed, Table) else ""
    return ordering_finding(printed, GATES, trainings.perplexity(GATES), "Val. PPL", note)
