"""The function that answers each table and claim; `reasons` has those that are not attempted.

Together they have every table and claim exactly once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from mezzo_core.papers import Claim, Experiment, Finding, Published, Status, Table
from mezzo_core.reproduction import flow
from mezzo_core.reproduction.flow import guarded, kind_of
from mezzo_core.reproduction.orders import speaking_to, with_experiment

from mezzo_rat.reproduction import flops, limits, memory, perplexity, setup, speed
from mezzo_rat.reproduction.evidence import Evidence
from mezzo_rat.reproduction.gpu.result_files import IDS
from mezzo_rat.reproduction.reasons import NOT_ATTEMPTED

TABLES: Mapping[str, Callable[[Evidence, Table], Finding]] = {
    "rat.table1": perplexity.table1,
    "rat.table6": speed.layer_table("train"),
    "rat.table7": speed.layer_table("prefill"),
    "rat.table8": speed.layer_table("decode", group="B=64"),
}
CLAIMS: Mapping[str, Callable[[Evidence, Claim], Finding]] = {
    "rat.claim.ppl_200m": perplexity.ppl_200m,
    "rat.claim.ppl_between": perplexity.ppl_between,
    "rat.claim.chunk16_matches": perplexity.chunk16_matches,
    "rat.claim.headline_train": speed.from_layers("train"),
    "rat.claim.headline_gen": speed.from_layers("decode"),
    "rat.claim.headline_throughput": speed.from_generation,
    "rat.claim.train_speedups": speed.from_layers("train"),
    "rat.claim.short_slower": speed.short_slower,
    "rat.claim.gen_speedups": speed.from_layers("decode"),
    "rat.claim.gen_l64": speed.from_layers("decode"),
    "rat.claim.throughput_rat": speed.from_generation,
    "rat.claim.fig6_rnn": perplexity.fig6_rnn,
    "rat.claim.fig6_rope": perplexity.fig6_rope,
}
EXACT: Mapping[str, Callable[[Published], Finding]] = {
    "rat.claim.flops": lambda p: flops.flops_growth(p.claim("rat.claim.flops")),
    "rat.claim.reversed_chunks": lambda p: flops.reversed_chunks(
        p.claim("rat.claim.reversed_chunks")
    ),
    "rat.claim.oom": lambda p: memory.out_of_memory(
        p.claim("rat.claim.oom"), p.table("rat.table8")
    ),
    "rat.setup.200m": lambda p: setup.setup_200m(p.claim("rat.setup.200m")),
    "rat.setup.1p3b": lambda p: setup.setup_1p3b(p.claim("rat.setup.1p3b")),
}
SPEED_IDS = frozenset(id for ids in IDS.values() for id in ids)
"""The tables and claims that the speed tables answer, at the scale that measures them."""
ORDERINGS = {"rat.claim.ppl_between": perplexity.BETWEEN}


def find_all(
    published: Published,
    evidence: Evidence,
    only: Collection[str] | None,
    experiments: Sequence[Experiment],
) -> list[Finding]:
    """Return a finding for each table, claim and check (of `only`), in the paper's order."""

    def answer(id: str) -> Finding:
        finding = guarded(id, partial(find, id, published, evidence))
        return with_experiments(finding, published, experiments)

    return flow.find_all(published, limits.CHECKS, only, answer)


def find(id: str, published: Published, evidence: Evidence) -> Finding:
    """Return the finding for one table, claim or check."""
    if id in limits.CHECKS:
        return limits.CHECKS[id]()
    if id in EXACT:
        return EXACT[id](published)
    if evidence.scale.speed is not None and id in SPEED_IDS:
        # This run measured the speed tables; `with_experiments` adds their answers.
        return Finding(id, kind_of(id), Status.NOT_ATTEMPTED, "this run measured nothing for it")
    if id in NOT_ATTEMPTED:
        return Finding(id, kind_of(id), Status.NOT_ATTEMPTED, NOT_ATTEMPTED[id])
    if id in TABLES:
        return TABLES[id](evidence, published.table(id))
    return CLAIMS[id](evidence, published.claim(id))


def with_experiments(
    finding: Finding, published: Published, experiments: Sequence[Experiment]
) -> Finding:
    """Answer from committed results where there are any; this run's rows stay beside them."""
    for experiment in speaking_to(finding.id, experiments):
        if finding.id in speed.TABLES or finding.id in speed.WORDS:
            finding = speed.with_result(finding, published, experiment)
        else:
            ordering = ORDERINGS.get(finding.id)
            finding = with_experiment(finding, published, experiment, ordering)
    return finding
