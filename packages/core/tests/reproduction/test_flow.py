"""From ids to a report: what is wanted, what breaks, what is done once, what is written."""

import json
from pathlib import Path

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.papers import Claim, Finding, PaperReport, Published, Status, prepare_folder
from mezzo_core.reproduction.evidence import Once
from mezzo_core.reproduction.flow import (
    find_all,
    guarded,
    kind_of,
    known_ids,
    known_scale,
    report_papers,
    threads,
)

CLAIMS = tuple(Claim(f"p.claim.{name}", "x < y", "order", (), "Section 1") for name in "ab")
PUBLISHED = Published("A paper", "A, B", "", (), CLAIMS)
CHECK = "p.check.equal"


def test_an_id_tells_its_kind():
    ids = ("p.table3b", "p.claim.table1_order", "p.setup.lm", "p.check.limit")
    assert [kind_of(id) for id in ids] == ["table", "claim", "claim", "check"]


def test_no_ids_mean_all_and_a_misspelt_one_is_answered_with_the_nearest():
    assert known_ids(PUBLISHED, [CHECK], None) is None
    assert known_ids(PUBLISHED, [CHECK], []) is None
    assert known_ids(PUBLISHED, [CHECK], [CHECK, "p.claim.a"]) == [CHECK, "p.claim.a"]
    with pytest.raises(UserError, match=r"'p.check.equals'.*p.check.equal"):
        known_ids(PUBLISHED, [CHECK], ["p.check.equals"])


def test_a_misspelt_scale_is_answered_with_the_nearest():
    assert known_scale({"cpu": 1, "smoke": 2}, "smoke") == 2
    with pytest.raises(UserError, match=r"'smok'.*smoke"):
        known_scale({"cpu": 1, "smoke": 2}, "smok")


def test_findings_come_in_the_order_of_the_paper_once_each():
    def find(id):
        return Finding(id, kind_of(id), Status.REPRODUCED, "")

    assert [f.id for f in find_all(PUBLISHED, [CHECK], None, find)] == [*PUBLISHED.ids, CHECK]
    only = find_all(PUBLISHED, [CHECK], [CHECK, "p.claim.b"], find)
    assert [f.id for f in only] == ["p.claim.b", CHECK]
    with pytest.raises(ValueError, match="missing"):
        find_all(PUBLISHED, [CHECK], None, lambda id: find(CHECK))


def test_what_breaks_differs_but_what_the_user_can_mend_stops():
    def broken():
        raise RuntimeError("no such kernel")

    def full_disk():
        raise UserError("the disk is full")

    finding = guarded(CHECK, broken)
    assert (finding.kind, finding.status) == ("check", Status.DIFFERS)
    assert "RuntimeError: no such kernel" in finding.summary
    with pytest.raises(UserError, match="disk"):
        guarded(CHECK, full_disk)


def test_work_is_done_once_whether_it_goes_well_or_not():
    seen, starts = [], []
    once = Once(lambda name, done, of: seen.append((name, done, of)))

    def work(watch):
        starts.append(1)
        watch(1, 2)
        return 7

    def broken(watch):
        starts.append(1)
        raise RuntimeError("no memory")

    assert not once.went_well("well")
    assert [once.get("well", work), once.get("well", work)] == [7, 7]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            once.get("badly", broken)
    assert len(starts) == 2
    assert (once.went_well("well"), once.went_well("badly")) == (True, False)
    assert seen == [("well", 0, 1), ("well", 1, 2), ("badly", 0, 1)]


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    with threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_several_papers_share_one_report_and_keep_folders_of_their_own(tmp_path, capsys):
    def paper(name):
        def reproduce(only: list[str] | None, scale: str, out: Path) -> PaperReport:
            folder = prepare_folder(out, name)
            (folder / "kept.txt").write_text(scale)
            finding = Finding(CLAIMS[0].id, "claim", Status.REPRODUCED, f"found by {name}")
            return PaperReport(name, PUBLISHED, [finding])

        return reproduce

    reports = report_papers([paper("one"), paper("two")], None, "smoke", tmp_path)
    assert [report.name for report in reports] == ["one", "two"]
    content = json.loads((tmp_path / "report.json").read_text())
    assert [each["name"] for each in content["papers"]] == ["one", "two"]
    assert {path.name for path in tmp_path.glob("*/kept.txt")} == {"kept.txt"}
    assert len(list(tmp_path.glob("*/kept.txt"))) == 2
    said = capsys.readouterr().out
    assert "found by one" in said
    assert said.count("report.html") == 1
