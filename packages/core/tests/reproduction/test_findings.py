"""What a reproduction says never exceeds what was measured."""

import pytest
import torch
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.papers import Claim, Experiment, Finding, Measurement, Published, ResultRow, Status
from mezzo_core.papers.published import Row, Table
from mezzo_core.reproduction.checks import compare_setup, decode_equals_prefill, equality
from mezzo_core.reproduction.orders import ordering_finding, speaking_to, with_experiment
from mezzo_core.reproduction.speed import listed, ratios, with_words

ROWS = (Row("a", (1.0,), group="g"), Row("b", (2.0,), group="g"), Row("c", (3.0,)))
TABLE = Table("p.table1", "T", "ppl", "ppl", "lower", "", ("PPL",), ROWS)
CLAIM = Claim(
    "p.claim.order", "a < b", "order", (1e9, 3, 32), "1", "setup", ("tokens", "layers", "GPUs"),
    ordering=("a", "b"),
)  # fmt: skip
PUBLISHED = Published("A paper", "A", "", (TABLE,), (CLAIM,))


def measured(group="", **values):
    rows = tuple(ResultRow(m, tuple((v,) for v in runs), group) for m, runs in values.items())
    return Measurement(("PPL",), rows, "a setting", device="a GPU")


def experiment(ours, same_setting=True, ids=("p.table1", "p.claim.order")):
    return Experiment(ids, same_setting, "lower", ours, "file.json")


def test_an_equality_holds_within_its_tolerance_only():
    x = torch.ones(3, dtype=torch.float64)
    assert equality("p.check.x", "", x * (1 + 1e-7), x).status is Status.REPRODUCED
    assert equality("p.check.x", "", x * (1 + 1e-7), x, 1e-8).status is Status.DIFFERS
    assert equality("p.check.x", "", x * torch.nan, x).status is Status.DIFFERS


def test_a_model_that_decodes_something_else_differs(monkeypatch):
    config = LMConfig(vocab_size=11, d_model=16, mixers=(AttentionConfig(head_dim=8),))
    assert decode_equals_prefill("p.check.d", config, "attention").status is Status.REPRODUCED
    step = torch.nn.Module.__call__
    monkeypatch.setattr(
        "mezzo_core.nn.lm.LM.step", lambda self, x, state: step(self, x).logits.roll(1, -1)
    )
    assert decode_equals_prefill("p.check.d", config, "attention").status is Status.DIFFERS


def test_settings_are_compared_to_the_printed_precision_and_what_we_lack_is_named():
    ours = {"tokens": 1.003e9, "layers": 3}
    good = compare_setup(CLAIM, ours, "a recipe", {"tokens": 0.01})
    assert good.status is Status.REPRODUCED
    assert "left out: GPUs" in good.summary
    bad = compare_setup(CLAIM, ours, "a recipe", {})
    assert bad.status is Status.DIFFERS
    assert "differ in tokens" in bad.summary


@pytest.mark.parametrize("printed", [CLAIM, TABLE])
def test_a_smaller_measurement_is_scaled_down_whatever_its_order(printed):
    for a, b, verdict in (((1, 1.1), (2, 2.1), "holds"), ((2, 2.1), (1, 1.1), "does not hold")):
        finding = ordering_finding(printed, ("a", "b"), measured(a=a, b=b), "PPL")
        assert finding.status is Status.SCALED_DOWN
        assert f"the order {verdict}" in finding.summary
        assert finding.kind == ("table" if printed is TABLE else "claim")


def test_a_committed_result_is_compared_by_group_unless_an_order_is_given():
    blank = Finding("p.table1", "table", Status.NOT_ATTEMPTED, "too large")
    grouped = experiment(measured("g", a=(1, 1.1), b=(2, 2.1), c=(0, 0.1)))
    assert with_experiment(blank, PUBLISHED, grouped).status is Status.REPRODUCED
    plain = experiment(measured(a=(1, 1.1), b=(2, 2.1), c=(0, 0.1)))
    assert "no printed order" in with_experiment(blank, PUBLISHED, plain).summary
    whole = with_experiment(blank, PUBLISHED, plain, ("a", "b", "c"))
    assert whole.status is Status.DIFFERS
    assert "Also: too large" in whole.details


def test_a_model_with_fewer_seeds_leaves_an_order_to_those_it_has():
    rows = tuple(
        ResultRow(model, tuple((v,) for v in runs), "g", tuple(range(len(runs))))
        for model, runs in {"a": (1, 1.1), "b": (2,)}.items()
    )
    ours = Measurement(("PPL",), rows, "a setting", device="a GPU")
    for id, kind in (("p.table1", "table"), ("p.claim.order", "claim")):
        blank = Finding(id, kind, Status.NOT_ATTEMPTED, "too large")
        found = with_experiment(blank, PUBLISHED, experiment(ours))
        assert "a before b: not settled (gap +1, spread 0)" in found.details


def test_the_papers_own_setting_speaks_last():
    own, smaller = experiment(measured(), True), experiment(measured(), False)
    other = experiment(measured(), ids=("p.table9",))
    assert speaking_to("p.table1", [own, other, smaller]) == [smaller, own]


def test_speeds_are_ratios_of_means_where_both_were_measured():
    ours = Measurement(
        ("512", "1024"),
        (ResultRow("a", ((1.0, 4.0), (3.0, 4.0))), ResultRow("b", ((1.0, "OOM"),))),
        "a setting",
    )
    assert ratios(ours, "a", "b") == {("", "512"): 4.0}
    assert listed(ratios(ours, "a", "b")) == "4.00 at T = 512"
    assert listed(ratios(ours, "a", "b"), "new tokens") == "4.00 at new tokens = 512"
    assert listed({}) == "not measured"


def test_words_of_a_speed_keep_what_was_found_before():
    result = experiment(measured(a=(1,)))
    blank = Finding("p.claim.order", "claim", Status.NOT_ATTEMPTED, "too large")
    first = with_words(blank, result, "a is fast")
    assert first.status is Status.SCALED_DOWN
    assert first.summary == "on a GPU a is fast (a setting)"
    assert first.details == ()
    second = with_words(first, result, "a is slow")
    assert second.details == (f"Also: {first.summary}",)
    assert len(second.measurements) == 2
