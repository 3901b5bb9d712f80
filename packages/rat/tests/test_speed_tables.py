"""The speed tables, rehearsed on a CPU: what is written, kept, measured again and refused."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core import layer_bench
from mezzo_core.bench import Timing
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import Attention, AttentionConfig
from mezzo_core.papers import Measurement, ResultRow, load_experiments
from mezzo_core.papers.cells import Result, add_cell
from mezzo_rat import reproduce as reproduce_module
from mezzo_rat.bench import Layer
from mezzo_rat.reproduce import read_published, reproduce
from mezzo_rat.reproduction import scale as scales
from mezzo_rat.reproduction import speed
from mezzo_rat.reproduction.gpu import decode, layers, throughput
from mezzo_rat.reproduction.gpu.result_files import result_files
from mezzo_rat.reproduction.gpu.shapes import DRY, FULL, Selection, paper_layers
from mezzo_rat.reproduction.gpu.tables import measure_tables

ROOT = Path(__file__).parents[3]
PUBLISHED = read_published()
NAMES = ("fig5", "table1", "table11", "table6", "table7", "table8")
ORIGIN = {"gpu": None, "cpu": "a CPU", "torch": "2", "triton": "3", "commit": "c1", "date": "d"}
command = SimpleNamespace(**runpy.run_path(str(ROOT / "packages/rat/benchmarks/speed_tables.py")))
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))


def run(folder, selection=None, commit="c1", scale=DRY, say=lambda line: None):
    measure_tables(scale, folder, PUBLISHED, selection or Selection(), say=say, commit=commit)


def content(folder, name):
    return json.loads((folder / f"speed_{name}.json").read_text())


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert command.main(["--dry-run", "--out", str(folder), "--commit", "c1"]) == 0
    return folder


def test_a_rehearsal_writes_experiments_that_a_report_reads(rehearsal):
    experiments = {each.source: each for each in load_experiments(rehearsal.parent)}
    assert set(experiments) == {f"speed_{name}.json" for name in NAMES}
    for name, table in result_files(DRY).items():
        experiment = experiments[f"speed_{name}.json"]
        assert experiment.ids == table.ids
        assert not experiment.same_setting
        assert experiment.measurement.commit == "c1"
        for row in experiment.measurement.rows:
            assert "-" not in row.values or row.values.count("-") == len(row.values)
            assert len(row.runs) == DRY.passes or "OOM" in row.values
    drawn = {path.stem for path in rehearsal.glob("*.png")}
    assert drawn == {"speed_table6", "speed_table7", "speed_table8", "speed_fig5"}


def test_tables_1_and_11_are_the_shortest_and_longest_context_of_figure_5(rehearsal):
    cells = {(c["model"], c["column"]): c["values"] for c in content(rehearsal, "fig5")["cells"]}
    for name, column in (("table1", "T=32"), ("table11", "T=48")):
        for cell in content(rehearsal, name)["cells"]:
            assert cell["values"] == cells[cell["model"], column]
            assert len(cell["decode_ms"]) == 3


def test_a_batch_that_does_not_fit_is_out_of_memory(rehearsal):
    cells = content(rehearsal, "table8")["cells"]
    full = {(c["group"], c["model"]) for c in cells if c["values"] == "OOM"}
    assert full == {("B=512", "Attention")}
    groups = {row["group"] for row in content(rehearsal, "table8")["rows"] if "/" in row["model"]}
    assert groups == {"B=2"}


def test_ratios_are_those_of_the_rows(rehearsal):
    rows = content(rehearsal, "table6")["rows"]
    by_model = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row["values"])
    first = zip(by_model["Attention"][0], by_model["RAT(L=16)"][0], strict=True)
    assert by_model["Attention/RAT(L=16)"][0] == pytest.approx([a / b for a, b in first], rel=1e-4)


def test_a_readme_shows_the_rehearsed_tables(rehearsal):
    text = f"{check_results.START}{check_results.END}"
    shown = check_results.updated(text, rehearsal.parent)
    assert "| Attention, B=512 | OOM | OOM |" in shown
    assert shown.count("rehearsal") == len(NAMES)


def test_a_second_run_measures_nothing_and_another_commit_only_what_it_is_asked(tmp_path):
    lines = []
    part = Selection(only=("table7",), lengths=(64,), models=("RNN", "Attention"))
    run(tmp_path, part, say=lines.append)
    assert len(lines) == 2
    run(tmp_path, part, say=lines.append)
    assert len(lines) == 2
    run(tmp_path, replace(part, models=("RNN",)), commit="c2", say=lines.append)
    assert len(lines) == 3
    assert {c["model"]: c["commit"] for c in content(tmp_path, "table7")["cells"]} == {
        "RNN": "c2",
        "Attention": "c1",
    }


def test_without_a_commit_nothing_counts_as_measured(tmp_path):
    table = result_files(DRY)["table6"]
    result = Result(table, tmp_path, {**ORIGIN, "commit": None})
    result.add(("", "RNN", "64"), [1.0, 2.0, 3.0])
    assert not result.has(("", "RNN", "64"))


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path):
    folder, lines = tmp_path / "cpu", []

    def killed(line):
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    part = Selection(only=("table6",), models=("RNN", "Attention"))
    with pytest.raises(KeyboardInterrupt):
        run(folder, part, say=killed)
    assert len(content(folder, "table6")["cells"]) == 3
    load_experiments(tmp_path)
    run(folder, part, say=lines.append)
    assert len(lines) == len(content(folder, "table6")["cells"]) == 4


def test_results_of_another_machine_are_not_mixed_in(tmp_path):
    table = result_files(DRY)["table6"]
    Result(table, tmp_path, ORIGIN).add(("", "RNN", "64"), [1.0])
    with pytest.raises(UserError, match="measured on a CPU, this is NVIDIA H200"):
        Result(table, tmp_path, {**ORIGIN, "gpu": "NVIDIA H200"})
    (tmp_path / "speed_table6.json").write_text("{}")
    with pytest.raises(UserError, match="no result of a speed table"):
        Result(table, tmp_path, ORIGIN)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "tabel6"], "tabel6.*table6"),
        (["--models", "RAT(L=17)"], r"RAT\(L=17\).*RAT\(L=16\)"),
        (["--lengths", "65"], "length 65, only 32, 48, 64, 128"),
    ],
)
def test_what_the_tables_do_not_have_is_refused_in_one_line(tmp_path, capsys, words, named):
    assert command.main(["--dry-run", "--out", str(tmp_path / "out"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)
    assert not (tmp_path / "out").exists()


def test_the_papers_sizes_need_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        run(tmp_path, scale=FULL)
    with pytest.raises(UserError, match="CUDA"):
        reproduce(["rat.table6"], "gpu", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_decodes_wrongly_is_not_timed(tmp_path, monkeypatch):
    right = Attention.step
    monkeypatch.setattr(Attention, "step", lambda self, x, state: 1.1 * right(self, x, state))
    with pytest.raises(UserError, match="Attention: the output in decoding is wrong"):
        run(tmp_path, Selection(only=("table6",), models=("Attention",)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_output_is_refused_and_the_references_own_error_is_not(factor):
    layer = Layer(AttentionConfig(head_dim=8).build(16), 16)
    exact = torch.randn(2, 8, 16)
    low = exact * 1.01
    layer_bench._compare(layer, "the output", exact * 1.02, exact, low)
    with pytest.raises(UserError, match="the output is wrong"):
        layer_bench._compare(layer, "the output", exact * factor, exact, low)


def test_a_cell_that_runs_out_of_memory_is_kept_as_such(tmp_path):
    def work():
        raise torch.OutOfMemoryError

    result = Result(result_files(DRY)["table6"], tmp_path, ORIGIN)
    add_cell(result, ("", "Attention", "64"), work, lambda line: None)
    assert content(tmp_path, "table6")["cells"][0]["values"] == "OOM"


def test_every_step_is_timed_at_the_position_of_its_column(monkeypatch):
    seen = []
    filled = []

    def measure(step, device, before, **_):
        for _ in range(2):
            before()
            step()
            seen.append(filled[0].lengths.unique().tolist())
        return Timing(1.0, 1.0, 1.0, None)

    def fill(state, position):
        filled.append(state)
        decode.rewind(state, position)

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "fill", fill)
    layer = layers.build_layer(paper_layers(8)["RAT(L=16)"], DRY).bfloat16()
    values, _ = decode.time_step(layer, 2, 64, DRY)
    assert values == [1.0] * DRY.passes
    assert seen == [[65]] * 2 * DRY.passes


def test_a_model_that_does_not_fit_is_tried_with_fewer_sequences(monkeypatch):
    tried = []

    def time_generation(model, batch, context, scale):
        tried.append(batch)
        if batch > 8:
            raise torch.OutOfMemoryError
        return [1.0], {}

    monkeypatch.setattr(throughput, "time_generation", time_generation)
    throughput._measure(replace(DRY, max_batch=32), "rnn", 32, set())
    assert tried == [32, 24, 16, 8]


def measured(values, columns=("4096", "65536"), groups=("",)):
    rows = [
        ResultRow(model, (numbers,), group) for group in groups for model, numbers in values.items()
    ]
    return Measurement(columns, tuple(rows), "a setting", device="NVIDIA H200")


def test_sentences_about_speed_state_what_was_measured():
    ours = measured({"RAT(L=16)": (2.0, 4.0), "Attention": (1.0, 16.0), "RNN": (1.0, 1.5)})
    assert speed.speedup()(ours).endswith("Attention: 0.50 at T = 4096, 4.00 at T = 65536")
    assert speed.speedup(longest=True)(ours).endswith("Attention: 4.00 at T = 65536")
    assert "slower than Attention at T = 4096;" in speed.slower_where(ours)
    assert "RNN 1.50" in speed.growth_from_32k(replace(ours, columns=("32768", "262144")))
    full = measured({"RAT(L=16)": (2.0, 4.0), "Attention": (1.0, "OOM")}, groups=("B=64",))
    assert speed.out_of_memory(full) == "out of memory: Attention from B=64, T = 65536"
    assert speed.speedup()(full).endswith(": 0.50 at B=64, T = 4096")
    tokens = measured({"RAT(L=16)-SWA": (8.0,), "Attention": (2.0,)}, columns=("T=4096",))
    assert speed.throughput("RAT(L=16)-SWA")(tokens).endswith("RAT(L=16)-SWA 4.00 at T = 4096")


def test_a_table_says_where_its_printed_order_holds():
    ours = measured({"RNN": (1.0, 1.0), "RAT(L=16)": (3.0, 2.0), "Attention": (2.0, 3.0)})
    ours = replace(ours, rows=tuple(replace(row, runs=row.runs * 3) for row in ours.rows))
    said, details = speed.table_words(PUBLISHED.table("rat.table6"), ours)
    assert said.startswith("the order holds in 2 columns; ")
    wrong = replace(ours, columns=("65536", "4096"))
    said, details = speed.table_words(PUBLISHED.table("rat.table6"), wrong)
    assert said.startswith("the order does not hold in 2 columns; ")
    assert any(line.startswith("T = 65536, RAT(L=16) before Attention") for line in details)


def test_a_reproduction_at_the_gpus_scale_measures_only_what_it_is_asked(tmp_path, monkeypatch):
    rehearsal = replace(scales.SMOKE, name="gpu", speed=replace(DRY, lengths=(64,)))
    monkeypatch.setitem(scales.SCALES, "gpu", rehearsal)
    monkeypatch.setattr(reproduce_module, "results_folder", lambda: tmp_path / "none")
    ids = ["rat.table7", "rat.claim.train_speedups", "rat.claim.rnn_slows", "rat.table9"]
    found = {finding.id: finding for finding in reproduce(ids, "gpu", tmp_path / "out")}
    assert {id: finding.status.value for id, finding in found.items()} == {
        "rat.table7": "scaled down",
        "rat.claim.train_speedups": "scaled down",
        "rat.claim.rnn_slows": "scaled down",
        "rat.table9": "not attempted",
    }
    assert len(found["rat.claim.train_speedups"].measurements) == 2
    assert not (tmp_path / "out/runs").exists()
    report = json.loads((tmp_path / "out/report.json").read_text())["papers"][0]
    assert {Path(figure).stem for figure in report["figures"]} == {
        "costs",
        "speed_table6",
        "speed_table7",
    }


@pytest.mark.gpu
def test_all_tables_run_on_a_gpu(tmp_path):
    small = replace(
        DRY, device="cuda", d_model=256, head_dim=64, tokens=2048, lengths=(512, 1024, 2048)
    )
    run(tmp_path, scale=small)
    for name in NAMES:
        cells = content(tmp_path, name)["cells"]
        assert all(cell["values"] == "OOM" or min(cell["values"]) > 0 for cell in cells)
    assert all(cell["peak_gb"] > 0 for cell in content(tmp_path, "table6")["cells"])
