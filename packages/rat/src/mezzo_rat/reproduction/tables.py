"""Which table and claim is answered by what; together with `reasons`, all of them, each once."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mezzo_core.errors import UserError
from mezzo_core.papers import (
    Claim,
    Experiment,
    Finding,
    Kind,
    Order,
    Pair,
    Published,
    Status,
    Table,
    check_complete,
    compare_column,
    compare_order,
    status_of,
)

from mezzo_rat.reproduction import flops, limits, memory, perplexity, setup, speed
from mezzo_rat.reproduction.evidence import Evidence
from mezzo_rat.reproduction.gpu.layouts import IDS
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
"""What the speed tables answer at the scale that measures them."""
ORDERINGS = {"rat.claim.ppl_between": perplexity.BETWEEN}


def find_all(
    published: Published,
    evidence: Evidence,
    only: Collection[str] | None,
    experiments: Sequence[Experiment],
) -> list[Finding]:
    """Return one finding a table, claim and check (of `only`), in the order of the paper."""
    checks = tuple(limits.CHECKS)
    findings = []
    for id in (*published.ids, *checks):
        if only is None or id in only:
            finding = guarded(id, partial(find, id, published, evidence))
            findings.append(with_experiments(finding, published, experiments))
    check_complete(published, findings, None if only is None else set(only))
    return findings


def find(id: str, published: Published, evidence: Evidence) -> Finding:
    """Do what one table, claim or check takes."""
    if id in limits.CHECKS:
        return limits.CHECKS[id]()
    if id in EXACT:
        return EXACT[id](published)
    if evidence.scale.speed is not None and id in SPEED_IDS:
        # The speed tables of this run answer, as experiments.
        return Finding(id, kind_of(id), Status.NOT_ATTEMPTED, "this run measured nothing for it")
    if id in NOT_ATTEMPTED:
        return Finding(id, kind_of(id), Status.NOT_ATTEMPTED, NOT_ATTEMPTED[id])
    if id in TABLES:
        return TABLES[id](evidence, published.table(id))
    return CLAIMS[id](evidence, published.claim(id))


def guarded(id: str, work: Callable[[], Finding]) -> Finding:
    """Turn a check that breaks into "differs": the others still run, and the report says so.

    What the user can mend (a full disk, say) still stops the reproduction.
    """
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        summary = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(id, kind_of(id), Status.DIFFERS, summary)


def kind_of(id: str) -> Kind:
    """Return "table", "claim" or "check"."""
    if id in limits.CHECKS:
        return "check"
    return "table" if id.startswith("rat.table") else "claim"


def with_experiments(
    finding: Finding, published: Published, experiments: Sequence[Experiment]
) -> Finding:
    """Let results measured elsewhere and committed speak first; our own rows stay beside them."""
    # The paper's own setting comes last, so that it is what the finding ends up saying.
    for experiment in sorted(experiments, key=lambda each: each.same_setting):
        if finding.id not in experiment.ids:
            continue
        if finding.id in speed.TABLES or finding.id in speed.WORDS:
            finding = speed.with_result(finding, published, experiment)
            continue
        ours = experiment.measurement
        order = Order(tuple(_pairs(finding.id, published, experiment)))
        status = Status.SCALED_DOWN
        verdict = "its columns have no printed order"
        if order.pairs:
            status = status_of(order.verdict, same_setting=experiment.same_setting)
            verdict = order.verdict.value
        finding = replace(
            finding,
            status=status,
            summary=f"on {ours.device} {verdict} ({ours.setting})",
            measurements=(ours, *finding.measurements),
            details=(*order.sentences(), f"Also: {finding.summary}", *finding.details),
        )
    return finding


def _pairs(id: str, published: Published, experiment: Experiment) -> Iterator[Pair]:
    """Yield the neighbours of every printed order that the experiment's columns can answer."""
    measured = experiment.measurement
    for column in measured.columns:
        for group in sorted({row.group for row in measured.rows}):
            ours = measured.samples(column, group)
            if kind_of(id) == "table":
                yield from compare_column(published.table(id), column, ours, group).pairs
                continue
            ordering = ORDERINGS.get(id) or published.claim(id).ordering
            if len(set(ordering) & set(ours)) > 1:
                yield from compare_order(ordering, ours, experiment.better).pairs
