"""Crafted checkpoints: files that no save writes are refused in one line, and run nothing."""

import json
import os
import pickle
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mezzo_core.errors import UserError

FILES = ["index.json", "process-0.json", "state/process-0.safetensors"]


def edit_json(path, change):
    found = json.loads(path.read_text())
    changed = change(found)
    path.write_text(json.dumps(found if changed is None else changed))


def sign(folder):
    """Make the marker agree with the other files, as somebody who crafts a checkpoint would."""

    def renew(marker):
        for name, record in marker["files"].items():
            content = (folder / name).read_bytes()
            record["bytes"] = len(content)
            if "crc32" in record:
                record["crc32"] = zlib.crc32(content)

    edit_json(folder / "checkpoint.json", renew)


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


MARKERS = {
    "no object": lambda m: [m],
    "no files": lambda m: m.pop("files") and None,
    "files is a list": lambda m: m.update(files=list(m["files"])),
    "a size is a word": lambda m: m["files"]["index.json"].update(bytes="12"),
    "a size is missing": lambda m: m["files"]["process-0.json"].pop("bytes") and None,
    "a record is a number": lambda m: m["files"].update({"index.json": 12}),
    "no checksum": lambda m: m["files"]["index.json"].pop("crc32") and None,
    "a name leaves": lambda m: m["files"].update({"../x": m["files"].pop("index.json")}),
    "an absolute name": lambda m: m["files"].update({"/etc/x": m["files"].pop("index.json")}),
    "one file more": lambda m: m["files"].update({"../x": {"bytes": 1}}),
    "another step": lambda m: m.update(step=3),
    "a step that is a word": lambda m: m.update(step="2"),
    "no step": lambda m: m.pop("step") and None,
    "no processes": lambda m: m.update(processes=0, files={"index.json": m["files"]["index.json"]}),
    "-1 processes": lambda m: m.update(processes=-1),
    "a word of processes": lambda m: m.update(processes="1"),
    "many processes": lambda m: m.update(processes=10**18),
}


@pytest.mark.parametrize("damage", MARKERS)
def test_a_marker_that_no_save_writes_is_damage(checkpoints, small, damage):
    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    edit_json(checkpoints.folder / "step-2" / "checkpoint.json", MARKERS[damage])
    assert checkpoints.load(model, optimizer).step == 1


PROCESSES = {
    "no object": lambda p: [p],
    "no random state": lambda p: p.pop("rng") and None,
    "no state of the CPU": lambda p: p.update(rng={}),
    "a list of states": lambda p: p.update(rng=[p["rng"]]),
    "a number": lambda p: p["rng"].update(cpu=12),
    "no base64": lambda p: p["rng"].update(cpu="***"),
    "letters beyond ASCII": lambda p: p["rng"].update(cpu="\u00e9" * 8),
    "an empty state": lambda p: p["rng"].update(cpu=""),
    "a short state": lambda p: p["rng"].update(cpu=p["rng"]["cpu"][:400]),
    "a state that is none": lambda p: p["rng"].update(cpu="/" * len(p["rng"]["cpu"])),
    "no position": lambda p: p.pop("data"),
    "a position that is a list": lambda p: p.update(data=[1]),
}


@pytest.mark.parametrize("damage", PROCESSES)
def test_what_a_process_never_writes_is_damage(checkpoints, small, damage):
    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    newest = checkpoints.folder / "step-2"
    change = PROCESSES[damage]
    edit_json(newest / "process-0.json", lambda p: None if isinstance(c := change(p), dict) else c)
    sign(newest)
    assert checkpoints.load(model, optimizer).step == 1


def halve(piece):
    return {**piece, "length": piece["length"] // 2}


PIECES = {
    "none": lambda pieces: [],
    "half of one": lambda pieces: [halve(pieces[0])],
    "one twice": lambda pieces: pieces * 2,
    "overlapping": lambda pieces: [halve(pieces[0]), *pieces],
    "nothing at all": lambda pieces: [{**pieces[0], "length": 0}, *pieces],
    "before the start": lambda pieces: [{**pieces[0], "start": -1}],
    "of a fraction": lambda pieces: [{**pieces[0], "length": 6.0}],
    "too long": lambda pieces: [{**pieces[0], "length": 10**30}],
    "of another process": lambda pieces: [{**pieces[0], "process": 1}],
    "of process -1": lambda pieces: [{**pieces[0], "process": -1}],
    "of no process": lambda pieces: [{"start": 0, "length": 6, "crc32": 0}],
    "another sum": lambda pieces: [{**pieces[0], "crc32": 1}],
    "a word": lambda pieces: "pieces",
}


@pytest.mark.parametrize("damage", PIECES)
def test_an_index_that_leaves_a_weight_undefined_is_refused(checkpoints, small, damage):
    checkpoints.save(1, *small(0), {})
    folder = checkpoints.folder / "step-1"

    def change(index):
        index["model.weight"]["pieces"] = PIECES[damage](index["model.weight"]["pieces"])

    edit_json(folder / "index.json", change)
    sign(folder)
    with pytest.raises(UserError, match=r"model\.weight") as error:
        checkpoints.load(*small(0))
    assert "\n" not in str(error.value)


def test_two_pieces_are_one_weight(checkpoints, small):
    """An index may cut a weight as it likes; only this makes the refusals above meaningful."""
    from safetensors.torch import load_file, save_file

    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    folder = checkpoints.folder / "step-1"
    shard = folder / "state" / "process-0.safetensors"
    stored = load_file(shard)
    weight = stored["model.weight"].flatten().clone()
    halves = {"process-0": weight[:2].clone(), "process-1": weight[2:].clone()}
    for name, part in halves.items():
        rest = stored if name == "process-0" else {}
        save_file({**rest, "model.weight": part}, folder / "state" / f"{name}.safetensors")

    def cut(index):
        index["model.weight"]["pieces"] = [
            {
                "process": i,
                "start": 2 * i,
                "length": part.numel(),
                "crc32": zlib.crc32(part.numpy().tobytes()),
            }
            for i, part in reversed(list(enumerate(halves.values())))
        ]

    def add(marker):
        marker["processes"] = 2
        marker["files"]["process-1.json"] = dict(marker["files"]["process-0.json"])
        marker["files"]["state/process-1.safetensors"] = {"bytes": 0}

    (folder / "process-1.json").write_text((folder / "process-0.json").read_text())
    edit_json(folder / "index.json", cut)
    edit_json(folder / "checkpoint.json", add)
    sign(folder)
    other, other_optimizer = small(1)
    assert not torch.equal(other.weight, model.weight)
    checkpoints.load(other, other_optimizer)
    assert torch.equal(other.weight, model.weight)


def test_a_crafted_checkpoint_cannot_run_code(checkpoints, small, tmp_path):
    folder, attacked = checkpoints.folder / "step-1", tmp_path / "attacked"
    for name in FILES:
        checkpoints.save(1, *small(0), {})
        (folder / name).write_bytes(pickle.dumps(Attack(attacked)))
        sign(folder)
        with pytest.raises(UserError, match=name):
            checkpoints.load(*small(0))
        assert not attacked.exists()
    pickle.loads(pickle.dumps(Attack(attacked)))
    assert attacked.exists()  # the attack is one


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_the_older_format_is_refused_and_runs_nothing(checkpoints, small, tmp_path):
    """The older format had a pickled index; one that calls a weight bytes ran what they hold."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    model, optimizer = small(0)
    folder, attacked = checkpoints.folder / "step-1", tmp_path / "attacked"
    names = [f"optim.{n}.{m}" for n in ("weight", "bias") for m in ("exp_avg", "exp_avg_sq")]
    tensors = {name: torch.zeros(2) for name in [*names, "model.weight", "model.bias"]}
    dcp.save(tensors, checkpoint_id=folder / "state", no_dist=True)
    bomb, index = folder / "state" / "bomb", folder / "state" / ".metadata"
    torch.save(Attack(attacked), bomb)
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata = {name: BytesStorageMetadata() for name in tensors}
    info = _StorageInfo("bomb", 0, bomb.stat().st_size)
    metadata.storage_data = {MetadataIndex(name): info for name in tensors}
    index.write_bytes(pickle.dumps(metadata))
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    marker = {"step": 1, "processes": 1, "files": sizes}
    (folder / "checkpoint.json").write_text(json.dumps(marker))
    with pytest.raises(UserError, match=r"written by an older version.*remove it.*--fresh"):
        checkpoints.load(model, optimizer)
    assert not attacked.exists()


def test_names_in_an_index_reach_no_terminal_raw(checkpoints, small):
    checkpoints.save(1, *small(0), {})
    folder = checkpoints.folder / "step-1"
    edit_json(folder / "index.json", lambda i: i.update({"\x1b[2J\n" * 9999: i["model.weight"]}))
    sign(folder)
    with pytest.raises(UserError) as error:
        checkpoints.load(*small(0))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
