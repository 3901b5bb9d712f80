"""The paper's file loads, and every table and claim of it has one answer or one reason."""

from mezzo_core.reproduction.flow import kind_of
from mezzo_gsa.recipes import ABLATION, PAPER_NAMES
from mezzo_gsa.reproduce import read_published
from mezzo_gsa.reproduction.limits import CHECKS
from mezzo_gsa.reproduction.reasons import NOT_ATTEMPTED
from mezzo_gsa.reproduction.results import ORDERINGS, WORDS, whole_column
from mezzo_gsa.reproduction.tables import EXACT, TRAINED

PUBLISHED = read_published()


def test_the_whole_paper_is_there():
    assert (len(PUBLISHED.tables), len(PUBLISHED.claims)) == (5, 26)
    assert PUBLISHED.table("gsa.table1").column("Wiki. ppl", "1.3B")["GSA"] == 16.7
    assert PUBLISHED.table("gsa.table2").column("PPL", "reference") == {"GSA w/ 64 slots": 13.51}


def test_every_table_and_claim_is_answered_or_given_a_reason_never_both():
    assert sorted([*EXACT, *TRAINED, *NOT_ATTEMPTED]) == sorted(PUBLISHED.ids)


def test_ids_tell_their_kind():
    assert {kind_of(table.id) for table in PUBLISHED.tables} == {"table"}
    assert {kind_of(claim.id) for claim in PUBLISHED.claims} == {"claim"}
    assert {kind_of(id) for id in CHECKS} == {"check"}


def test_tables_that_claims_lean_on_exist():
    tables = {table.id for table in PUBLISHED.tables}
    assert {name for claim in PUBLISHED.claims for name in claim.tables} <= tables


def test_architectures_have_the_names_of_the_papers_rows():
    names = {row.model for row in PUBLISHED.table("gsa.table1").rows}
    assert set(PAPER_NAMES.values()) == names - {"Mamba"}
    rows = {row.model for row in PUBLISHED.table("gsa.table2").rows}
    assert set(ABLATION.values()) == rows == set(whole_column(PUBLISHED))


def test_the_orders_of_the_ablation_are_those_of_table_2():
    printed = {row.model: row.values[0] for row in PUBLISHED.table("gsa.table2").rows}
    assert whole_column(PUBLISHED)[0] == "w/ 128 slots"
    for id, ordering in ORDERINGS.items():
        values = [printed[name] for name in ordering]
        assert values == sorted(values)
        assert values == list(PUBLISHED.claim(id).values)


def test_words_belong_to_claims_that_need_a_gpu():
    assert set(WORDS) <= set(NOT_ATTEMPTED)
