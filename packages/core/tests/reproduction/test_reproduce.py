"""A reproduction answers what is asked, says what it lacks, and writes one report."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.data import DataConfig
from mezzo_core.errors import FailedRunError, UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction import Header, Result, origin, training
from mezzo_core.reproduction.beside import beside_printed, in_recipes
from mezzo_core.reproduction.claims import (
    Run,
    check_complete,
    counted,
    find,
    measured,
    result,
    timed,
    trained,
)
from mezzo_core.reproduction.criteria import Order, Within
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_core.reproduction.published import Claim
from mezzo_core.reproduction.reproduce import Reproduction, Scale, reproduce_papers
from mezzo_core.reproduction.tiny import SMOKE
from mezzo_core.train.config import TrainConfig

PUBLISHED = """
[paper]
authors = ["A"]
title = "A paper"
[[table]]
id = "p.table1"
title = "Perplexities"
metric = "perplexity"
unit = "ppl"
better = "lower"
setting = "large"
columns = ["Val. PPL"]
rows = [{model = "Attention", values = [7.5]}, {model = "Window", values = [8.5]}]
[[claim]]
id = "p.claim.speed"
needs = "needs a GPU"
text = "Window is faster."
quantity = "speed"
values = []
where = "1"
ordering = ["Window", "Attention"]
[[claim]]
id = "p.claim.layers"
text = "It has 2 layers on 9 GPUs."
quantity = "setup"
values = [2, 9]
labels = ["layers", "GPUs"]
where = "2"
"""
SPEED = Header(
    "speed", "Speed", "on a GPU", ("8",), ("Window", "Attention"), "ms", how="other hardware"
)
NOTHING = Run({}, lambda name: None)


def layers(number):
    return counted(lambda claim: beside_printed(claim, {"layers": number}, "a recipe"), Within())


def time_layers(sizes, folder, say):
    say("timing")
    entries = [Entry("Window", "8", v, seed=i) for i, v in enumerate((9.0, 9.1, 9.2))]
    entries += [replace(e, model="Attention", value=1.0) for e in entries]
    return Measurement(tuple(entries), ("8",), f"at {sizes}", kind="speed", unit="ms")


def timer(work):
    """Stand for the speeds of a paper: one, which this measures."""
    return SimpleNamespace(makers=("speed",), measure=lambda name, *how: work(*how))


@pytest.fixture
def paper(tmp_path):
    """A paper of one table and two claims, with a committed result."""
    package = tmp_path / "package"
    module = package / "src/mezzo_p/reproduction/claims.py"
    module.parent.mkdir(parents=True)
    module.with_name("published.toml").write_text(PUBLISHED)
    speed = Result(package / "results/gpu/speed.json", SPEED, origin(torch.device("cpu")))
    speed.add(*(Entry("Window", "8", v, seed=i) for i, v in enumerate((1.0, 1.1))))
    speed.add(*(Entry("Attention", "8", v, seed=i) for i, v in enumerate((2.0, 2.2))))
    text = tmp_path / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(("half", "of", "the", "notes"), k=3000)))
    mixers = {
        "Attention": AttentionConfig(head_dim=8),
        "Window": AttentionConfig(head_dim=8, window_size=8),
    }
    models = {
        name: TrainConfig(
            name=name.lower(),
            model=LMConfig(vocab_size=257, d_model=16, mixers=(mixer,)),
            data=DataConfig(source=str(text)),
        )
        for name, mixer in mixers.items()
    }
    return Reproduction(
        name="p",
        module=str(module),
        answers={
            "p.table1": [trained(Order(("Attention", "Window")), note="tiny")],
            "p.claim.speed": [result("gpu/speed", Order()), measured("speed", Order())],
            "p.claim.layers": [layers(2)],
        },
        models=models,
        scales={
            "small": Scale(replace(SMOKE, test_lengths=(64, 128)), threads=1),
            "timed": Scale(SMOKE, sizes="full size"),
            "gpu": Scale(SMOKE, sizes="full size", needs_gpu=True),
        },
        speeds=timer(time_layers),
    )


def answered(paper, **evidence):
    """Return the paper with other evidence, by the last part of an id."""
    ids = {id.rpartition(".")[2]: id for id in paper.answers}
    return replace(paper, answers=paper.answers | {ids[n]: [each] for n, each in evidence.items()})


def reproduce(paper, *how):
    return list(reproduce_papers([paper], *how)[0].findings)


def test_everything_is_answered_and_reported(paper, tmp_path, capsys):
    before = torch.get_num_threads()
    table, speed, setup = reproduce(paper, None, "small", tmp_path / "out")
    assert torch.get_num_threads() == before
    assert (table.how, table.outcome) == (How.SCALED_DOWN, Outcome.NOT_SETTLED)
    assert table.summary.startswith("this run: ")
    assert table.summary.endswith("; tiny")
    assert (speed.how, speed.outcome) == (How.OTHER_HARDWARE, Outcome.AGREES)
    assert speed.summary.startswith("gpu/speed: ")
    assert (setup.how, setup.outcome) == (How.PAPER, Outcome.AGREES)
    assert "left out: GPUs" in setup.measurements[0].setting
    assert paper.committed()[1:] == [speed, setup]
    content = json.loads((tmp_path / "out/report.json").read_text())
    ids = ["p.table1", "p.claim.speed", "p.claim.layers"]
    assert [f["id"] for f in content["papers"][0]["findings"]] == ids
    assert content["origin"]["torch"] == torch.__version__
    assert (tmp_path / "out/p/figures/trainings.png").exists()
    assert (tmp_path / "out/p/runs/attention/model").exists()
    assert capsys.readouterr().out.count("report.html") == 1


def test_what_this_run_measured_stands_beside_a_result_nearer_to_the_paper(paper, tmp_path):
    (speed,) = reproduce(paper, ["p.claim.speed"], "timed", tmp_path / "out")
    assert (speed.how, speed.outcome) == (How.OTHER_HARDWARE, Outcome.AGREES)
    assert [ours.setting for ours in speed.measurements] == ["on a GPU", "at full size"]
    assert [words.partition(":")[0] for words in speed.here] == ["differs"]
    assert not any("this run" in line for line in speed.details)
    assert (tmp_path / "out/p/figures/speed.png").exists()


def test_a_setting_nearer_to_the_paper_decides_whatever_comes_first(paper):
    claim = paper.published.by_id["p.claim.speed"]
    smaller = time_layers(1, None, print)
    nearer = replace(smaller, how=How.OTHER_HARDWARE, source="gpu/speed", better="higher")
    run = Run({"gpu/speed": nearer}, lambda name: smaller)
    found = find(claim, timed("gpu/", "speed", Order()), run)
    assert (found.how, found.outcome) == (How.OTHER_HARDWARE, Outcome.AGREES)


def test_quality_decides_before_a_speed_that_is_nearer_to_the_paper(paper):
    claim = paper.published.by_id["p.claim.speed"]
    speed = time_layers(1, None, print)
    quality = replace(speed, kind="training", how=How.SCALED_DOWN, better="higher")
    run = Run({"s": replace(speed, how=How.PAPER), "q": quality}, NOTHING.measured)
    found = find(claim, [result("s", Order()), result("q", Order())], run)
    assert (found.how, found.outcome) == (How.SCALED_DOWN, Outcome.AGREES)
    assert [words.partition(":")[0] for words in found.here] == ["agrees", "differs"]


def test_a_part_alone_may_differ_but_cannot_agree_and_a_changed_criterion_says_so(paper):
    claim = paper.published.by_id["p.claim.speed"]
    for seen, whole, part in (
        (2.0, Outcome.AGREES, Outcome.NOT_SETTLED),
        (0.5, Outcome.DIFFERS, Outcome.DIFFERS),
    ):
        entries = [Entry("Window", "8", 1.0, seed=i) for i in range(2)]
        entries += [Entry("Attention", "8", seen, seed=i) for i in range(2)]
        ours = Measurement(tuple(entries), ("8",), "")
        assert find(claim, [counted(lambda _, x=ours: x, Order())], NOTHING).outcome is whole
        only = counted(lambda _, x=ours: x, Order(), part="one column", changed="before: agrees")
        found = find(claim, [only], NOTHING)
        assert found.outcome is part
        assert "this is one column alone; criterion changed: before: agrees" in found.summary


@pytest.mark.parametrize("error", [RuntimeError("no kernel\nhere"), FailedRunError("is wrong")])
def test_what_breaks_settles_nothing_and_hides_nothing(paper, tmp_path, error):
    def broken(*_):
        raise error

    told = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    bad = answered(paper, layers=result("gpu/speed", broken))
    beside = [result("gpu/speed", Order()), counted(broken, Within())]
    bad = replace(bad, answers=bad.answers | {"p.claim.speed": beside})
    speed, setup = reproduce(bad, ["p.claim.speed", "p.claim.layers"], "small", tmp_path / "out")
    assert (speed.how, speed.outcome) == (How.OTHER_HARDWARE, Outcome.AGREES)
    assert speed.details[-1] == f"beside it: {told}"
    assert (setup.how, setup.outcome) == (How.SCALED_DOWN, Outcome.NOT_SETTLED)
    assert setup.summary == told


def test_what_the_user_can_mend_stops(paper, tmp_path):
    def full_disk(claim):
        raise UserError("the disk is full")

    bad = answered(paper, layers=counted(full_disk, Within()))
    with pytest.raises(UserError, match="disk"):
        reproduce(bad, ["p.claim.layers"], "small", tmp_path / "out")


def test_a_speed_that_fails_is_told_by_each_claim_and_not_measured_again(paper, tmp_path):
    starts = []

    def broken(*_):
        starts.append(1)
        raise RuntimeError("no kernel")

    bad = answered(paper, table1=measured("speed", Order()), speed=measured("speed", Order()))
    bad = replace(bad, speeds=timer(broken))
    found = reproduce(bad, ["p.table1", "p.claim.speed"], "timed", tmp_path / "out")
    assert [each.summary for each in found] == ["failed: RuntimeError: no kernel"] * 2
    assert len(starts) == 1


def test_a_training_that_fails_takes_no_other_with_it(paper, tmp_path, monkeypatch):
    honest = training.measure_run

    def run(config, *where):
        if config.name == "attention":
            raise RuntimeError("no kernel")
        return honest(config, *where)

    monkeypatch.setattr(training, "measure_run", run)
    bad = answered(paper, speed=trained(Order(("Window",)), "Window"))
    table, speed, setup = reproduce(bad, None, "small", tmp_path / "out")
    assert table.summary == "failed: RuntimeError: no kernel"
    assert table.outcome is Outcome.NOT_SETTLED
    assert speed.summary.startswith("this run: ")
    assert setup.outcome is Outcome.AGREES


@pytest.mark.parametrize(
    ("only", "scale", "message"),
    [
        (["p.claim.layer"], "small", r"'p.claim.layer'.*p.claim.layers"),
        (None, "smal", r"'smal'.*small"),
        (None, "gpu", "needs a CUDA GPU"),
    ],
)
def test_what_is_not_there_is_one_line(paper, tmp_path, monkeypatch, only, scale, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message) as raised:
        reproduce(paper, only, scale, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_answer_left_out_invented_or_out_of_order_is_refused(paper):
    published, answers = paper.published, paper.answers
    check_complete(published, answers)
    check_complete(published, {id: answers[id] for id in ("p.table1", "p.claim.layers")})
    for wrong in (
        {id: answers[id] for id in ("p.table1", "p.claim.speed")},
        answers | {"p.claim.layers": []},
        answers | {"p.claim.other": answers["p.table1"]},
        dict(reversed(answers.items())),
    ):
        with pytest.raises(ValueError, match=r"in this order|nor says what it needs"):
            check_complete(published, wrong)


def test_several_papers_share_one_report(paper, tmp_path, capsys):
    out = tmp_path / "q[/b]:smile:"
    both = [paper, replace(paper, name="q")]
    reports = reproduce_papers(both, ["p.claim.layers"], "other", out)
    assert [report.name for report in reports] == ["p", "q"]
    content = json.loads((out / "report.json").read_text())
    assert [each["name"] for each in content["papers"]] == ["p", "q"]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"p", "q"}
    assert capsys.readouterr().out.count(f"Report: {out / 'report.html'}") == 1


def test_a_recipe_with_another_value_differs_and_names_it():
    labels = ("layers", "width", "tokens", "beta", "weights", "GPUs")
    paths = ("model.mixers", "one: model.d_model", "steps * batch_size * 2 + 1", "optim.betas.1")
    paths = (*paths, "built.embed.weight", "")
    claim = Claim("c", "", "", (1, 16, 13, 0.9, 11, 8), "", labels=labels, recipe="one", ours=paths)
    model = LMConfig(vocab_size=11, d_model=16, mixers=(AttentionConfig(head_dim=8),))
    right = TrainConfig(name="one", model=model, data=DataConfig(), steps=3, batch_size=2)
    right = replace(right, optim=replace(right.optim, betas=(0.8, 0.9)))
    for recipe, wrong in (
        (right, ()),
        (replace(right, steps=4), ("tokens: printed 13, ours 17",)),
        (replace(right, model=replace(model, d_model=24)), ("width: printed 16, ours 24",)),
    ):
        evidence = in_recipes({"one": lambda recipe=recipe: recipe})
        ours = evidence.find(None, claim)
        assert ours.setting == "recipes one; left out: GPUs"
        assert evidence.criterion(claim, ours).details == wrong
