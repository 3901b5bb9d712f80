"""The paper's file loads, and every table and claim of it has one answer or one reason."""

from mezzo_core.reproduction.flow import kind_of
from mezzo_rat.reproduce import read_published
from mezzo_rat.reproduction import speed
from mezzo_rat.reproduction.limits import CHECKS
from mezzo_rat.reproduction.reasons import NOT_ATTEMPTED
from mezzo_rat.reproduction.tables import CLAIMS, EXACT, SPEED_IDS, TABLES


def test_the_whole_paper_is_there():
    published = read_published()
    assert (len(published.tables), len(published.claims)) == (13, 53)
    assert published.table("rat.table1").column("Val. PPL")["RAT(L=16)"] == 7.67


def test_every_table_and_claim_is_answered_or_given_a_reason_never_both():
    answers = [*TABLES, *CLAIMS, *EXACT, *NOT_ATTEMPTED]
    assert sorted(answers) == sorted(read_published().ids)


def test_every_table_and_claim_about_speed_has_words_for_what_a_gpu_measures():
    assert set(read_published().ids) >= SPEED_IDS
    # The columns of throughput in Tables 1 and 11 are compared like any other column.
    assert {*speed.TABLES, *speed.WORDS, "rat.table1", "rat.table11"} == SPEED_IDS


def test_ids_tell_their_kind():
    published = read_published()
    assert {kind_of(table.id) for table in published.tables} == {"table"}
    assert {kind_of(claim.id) for claim in published.claims} == {"claim"}
    assert {kind_of(id) for id in CHECKS} == {"check"}


def test_tables_that_claims_lean_on_exist():
    published = read_published()
    tables = {table.id for table in published.tables}
    assert {name for claim in published.claims for name in claim.tables} <= tables
