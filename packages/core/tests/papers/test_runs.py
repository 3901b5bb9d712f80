"""Result files that grow run by run: read back, kept apart by origin, written whole."""

import json

import pytest
from mezzo_core.errors import UserError
from mezzo_core.papers.runs import read_runs, write_result

ORIGIN = {"gpu": "NVIDIA H200", "torch": "2.13", "triton": "3.7", "setting": "small", "commit": "a"}
RUNS = [{"model": "x", "seed": 0, "loss": 2.0}, {"model": "x", "seed": 1, "loss": 3.0}]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "new/result.json"
    write_result(file, {**ORIGIN, "runs": RUNS})
    return file


def test_what_was_written_is_read_by_model_and_seed(path):
    assert read_runs(path, ORIGIN) == {("x", 0): RUNS[0], ("x", 1): RUNS[1]}
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_new_file_holds_no_runs_and_its_folder_is_made(tmp_path):
    assert read_runs(tmp_path / "made/result.json", ORIGIN) == {}
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("key", ["gpu", "torch", "triton", "setting"])
def test_runs_of_another_origin_are_not_mixed_in(path, key):
    with pytest.raises(UserError, match=f"result.json holds runs of another {key}"):
        read_runs(path, {**ORIGIN, key: "other"})


def test_the_caller_says_what_runs_share(path):
    other = {**ORIGIN, "commit": "b"}
    assert len(read_runs(path, other)) == 2
    with pytest.raises(UserError, match="another commit"):
        read_runs(path, other, same=("commit",))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}', json.dumps({"runs": RUNS})])
def test_what_is_no_result_is_named(path, text):
    path.write_text(text)
    with pytest.raises(UserError, match=r"result\.json: no result of this benchmark"):
        read_runs(path, ORIGIN)


def test_content_that_is_no_json_leaves_the_old_file(path):
    before = path.read_text()
    with pytest.raises(TypeError):
        write_result(path, {"runs": object()})
    assert path.read_text() == before


def test_a_figure_is_drawn_beside_the_file(path):
    write_result(path, {}, lambda figure: figure.write_text("drawn"))
    assert (path.parent / "result.png").read_text() == "drawn"


def test_a_folder_that_cannot_be_is_named(path):
    with pytest.raises(UserError, match="cannot be made"):
        read_runs(path / "below/result.json", ORIGIN)
    with pytest.raises(UserError, match="cannot be written"):
        write_result(path / "below/result.json", {})
