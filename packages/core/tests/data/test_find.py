import json
import os

import pytest
from mezzo_core.data.find import find_files
from mezzo_core.errors import UserError

RUN = {"type": "mezzo_core.train.config:TrainConfig", "name": "tiny"}


@pytest.fixture
def folder(tmp_path):
    """Three texts at three depths."""
    for name in ("a.txt", "part/b.txt", "part/deep/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(folder, pattern=""):
    source = str(folder / pattern) if pattern else str(folder)
    return [str(path.relative_to(folder)) for path in find_files(source)]


def test_a_folder_and_each_glob_give_their_files(folder):
    everything = ["a.txt", "part/b.txt", "part/deep/c.txt"]
    assert names(folder) == names(folder, "**") == names(folder, "**/*.txt") == everything
    assert names(folder, "**/**/[a-c].txt") == everything
    assert names(folder, "*/**/*") == everything[1:]
    assert names(folder, "*/*") == ["part/b.txt"]
    assert names(folder, "p?rt/deep/*.txt") == ["part/deep/c.txt"]
    assert names(folder, "*.txt") == ["a.txt"]


def test_a_glob_is_relative_to_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert [str(path) for path in find_files("**/b.*")] == ["part/b.txt"]
    assert [str(path) for path in find_files("./*.txt")] == ["a.txt"]


def test_what_is_left_out_of_a_folder_is_said(folder, caplog):
    for name in ("b.jsonl.zst", "c.json", "d.csv.gz", "part/notes.md", "e.bz2", ".hidden"):
        (folder / name).write_text("words")
    (folder / "empty.pdf").touch()
    (folder / "gone.png").symlink_to("nowhere")
    names(folder, "*.jsonl.zst")
    assert not caplog.messages
    expected = ["a.txt", "b.jsonl.zst", "d.csv.gz", "part/b.txt", "part/deep/c.txt"]
    assert names(folder) == expected
    (line,) = caplog.messages
    assert "left out 4 of its files: c.json, e.bz2, gone.png, notes.md (a glob" in line
    assert names(folder, "*.json") == names(folder, "c.json") == ["c.json"]
    names(folder, "part/*")
    assert caplog.messages[-1].endswith("left out 1 of its files: notes.md")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "**/deep/**/*.txt"])
def test_links_in_circles_end_and_every_file_is_found_once(folder, pattern):
    expected = names(folder, pattern)
    for i, where in enumerate((folder, folder / "part", folder / "part" / "deep")):
        for j, target in enumerate((folder, folder / "part", folder.parent, where)):
            (where / f"loop{i}{j}").symlink_to(target)
    (folder / "part" / "deep" / "d.txt").symlink_to(folder / "part" / "deep" / "c.txt")
    assert names(folder, pattern) == expected != []


def test_a_linked_folder_elsewhere_is_part_of_the_corpus(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "d.txt").write_text("d")
    (folder / "part" / "linked").symlink_to(elsewhere)
    assert "part/linked/d.txt" in names(folder)


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl", "*/*", "*/*/*"])
def test_what_a_run_wrote_is_no_corpus(tmp_path, pattern):
    lines = '{"text": "words"}\n'
    for name in ("x", "part/y", "runs/first/log", "runs/first/sub/z", "runs/alike/w"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    everything = names(tmp_path, pattern)
    (tmp_path / "runs" / "first" / "config.json").write_text(json.dumps(RUN))
    (tmp_path / "runs" / "alike" / "config.json").write_text('{"type": "something else"}')
    (tmp_path / "part" / "config.json").write_text("damaged")
    expected = [name for name in everything if not name.startswith("runs/first")]
    if expected:
        assert names(tmp_path, pattern) == expected
    assert pattern == "*/*" or len(expected) < len(everything)


def test_the_source_itself_may_be_a_run_whose_log_is_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RUN))
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "log.csv").write_text("step,loss\n1,2.0\n")
    (tmp_path / "mine.txt").write_text("words")
    assert names(tmp_path) == ["mine.txt"]


def test_hidden_folders_are_passed_over_but_not_as_the_source(tmp_path):
    for name in (".cache/a.txt", "part/.hidden/b.txt", "part/.c.txt", "part/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("words")
    assert names(tmp_path) == names(tmp_path, "**/*.txt") == ["part/d.txt"]
    assert names(tmp_path / ".cache") == ["a.txt"]
    assert names(tmp_path, ".cache/*.txt") == [".cache/a.txt"]


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "part/*/*.txt"])
def test_a_part_that_cannot_be_read_is_named_and_refused(folder, monkeypatch, pattern):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"cannot read .*part/deep: Permission denied"):
        names(folder, pattern)
    assert names(folder, "*.txt") == ["a.txt"]  # no need to look there


@pytest.mark.parametrize("target", ["nowhere", "part2"])
def test_a_link_that_leads_nowhere_is_named_and_refused(folder, target):
    (folder / "corpus.2020").symlink_to(target)  # which may be a folder's
    with pytest.raises(UserError, match=r"cannot read .*corpus.2020"):
        names(folder, "*/*.txt")
    (folder / "corpus.2020").unlink()
    (folder / "part2").symlink_to(target)
    with pytest.raises(UserError, match=r"cannot read .*part2") as error:
        names(folder)
    assert "\n" not in str(error.value)
    assert names(folder, "*.txt") == ["a.txt"]  # it could not be one of these
    (folder / "part2").rename(folder / ".part2")
    assert names(folder)[0] == "a.txt"


@pytest.mark.parametrize(
    "source", ["", "~nobody-of-this-name/x", "~nobody-of-this-name/*", "a\0b", "x" * 5000, "\ud800"]
)
def test_what_can_be_no_path_is_one_line(source):
    with pytest.raises(UserError, match=r"no file or folder|no \.txt, \.jsonl, .* file"):
        find_files(source)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="no file or folder"):
        find_files(str(tmp_path / "pipe.txt"))
    with pytest.raises(UserError, match="file with text"):
        find_files(str(tmp_path))
