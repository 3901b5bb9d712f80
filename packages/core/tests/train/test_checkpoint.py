"""Checkpoints: complete or not there, whatever happens while they are written."""

import json
import logging
import os
import pickle
import zlib
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mezzo_core.errors import UserError
from mezzo_core.train.checkpoint import Checkpoints
from mezzo_core.train.distributed import World
from mezzo_core.train.loop import train
from mezzo_core.train.optim import build_optimizer
from torch import nn

FILES = ["checkpoint.json", "index.json", "process-0.json", "state/process-0.safetensors"]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", World(torch.device("cpu")), keep=2)


def small(seed, width=3):
    """A model of two tensors and its optimizer after one step, so that no moment is zero."""
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return model, optimizer


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


def test_what_is_saved_is_what_is_loaded(checkpoints, tiny):
    def trained(seed):
        torch.manual_seed(seed)
        config = tiny()
        model = config.model.build()
        optimizer = build_optimizer(model, config.optim)
        tokens = torch.randint(257, (2, 16))
        model.loss(tokens, tokens).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    checkpoints.save(7, model, optimizer, {"place": 3})
    drawn = torch.rand(3)
    other, other_optimizer = trained(1)
    resumed = checkpoints.load(other, other_optimizer)
    assert resumed == (7, {"place": 3})
    assert torch.equal(torch.rand(3), drawn)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq"):
            saved = optimizer.state[mine][key]
            assert saved.abs().sum() > 0
            assert torch.equal(saved, other_optimizer.state[theirs][key])
        assert other_optimizer.state[theirs]["step"] == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_every_type_and_layout_come_back(checkpoints, dtype):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 5, dtype=dtype)
        model.weight = nn.Parameter(torch.randn(3, 5, dtype=dtype).t())  # not contiguous
        model.register_buffer("scalar", torch.randn((), dtype=torch.float64))
        model.register_buffer("flags", torch.rand(3) > 0.5)
        model.register_buffer("nothing", torch.empty(0, 4))
        model.tied = nn.Linear(3, 5, bias=False)
        model.tied.weight = model.weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(0)
    checkpoints.save(1, model, optimizer, {})
    stored = json.loads((checkpoints.folder / "step-1" / "index.json").read_text())
    assert "model.weight" in stored and "model.tied.weight" not in stored
    other, other_optimizer = build(1)
    checkpoints.load(other, other_optimizer)
    assert other.tied.weight is other.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_shards_are_safetensors_that_anybody_can_read(checkpoints):
    from safetensors.torch import load_file

    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    stored = load_file(checkpoints.folder / "step-1" / "state" / "process-0.safetensors")
    assert torch.equal(stored["model.weight"], model.weight)
    assert torch.equal(stored["optim.bias.exp_avg_sq"], optimizer.state[model.bias]["exp_avg_sq"])


def test_only_the_newest_stay(checkpoints):
    for step in (9, 10, 11):
        checkpoints.save(step, *small(0), {})
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-10", "step-11"]
    assert checkpoints.newest().name == "step-11"


def test_without_a_checkpoint_there_is_nothing_to_load(checkpoints):
    assert checkpoints.load(*small(0)) is None
    assert checkpoints.describe_newest() == "there is no checkpoint yet"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["shorten", "remove", "replace by a folder"])
def test_a_checkpoint_with_a_lost_file_is_passed_over(checkpoints, name, damage):
    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    path = checkpoints.folder / "step-2" / name
    if damage == "shorten":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
        if damage != "remove":
            path.mkdir()
    assert checkpoints.newest().name == "step-1"
    assert checkpoints.load(model, optimizer).step == 1


@pytest.mark.parametrize("name", FILES)
def test_no_changed_byte_is_accepted(checkpoints, name, caplog):
    first, second = small(1), small(2)
    checkpoints.save(1, *first, {})
    checkpoints.save(2, *second, {})
    path = checkpoints.folder / "step-2" / name
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        caplog.clear()
        model, optimizer = small(3)
        steps = checkpoints.load(model, optimizer).step
        if steps == 2:  # a byte that means nothing, as a blank between two numbers of the marker
            assert name == "checkpoint.json"
            wanted, _ = second
        else:
            assert name in caplog.text and "resuming from" in caplog.text
            wanted, _ = first
        assert torch.equal(model.weight, wanted.weight), place
        checkpoints = Checkpoints(checkpoints.folder, checkpoints.world, 2)


def test_only_damaged_checkpoints_are_no_fresh_start(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, *small(0), {})
        shard = checkpoints.folder / f"step-{step}" / "state" / "process-0.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"no checkpoint in .*process-0\.safetensors") as error:
        checkpoints.load(*small(0))
    assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(checkpoints):
    checkpoints.keep = 1
    checkpoints.save(2, *small(0), {})
    (checkpoints.folder / "step-2").rename(checkpoints.folder / "kept")
    checkpoints.save(4, *small(0), {})
    (checkpoints.folder / "kept").rename(checkpoints.folder / "step-2")
    shard = checkpoints.folder / "step-4" / "state" / "process-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert checkpoints.load(*small(0)).step == 2
    checkpoints.save(3, *small(0), {})
    assert checkpoints.newest().name == "step-3"
    assert Checkpoints(checkpoints.folder, checkpoints.world, 1).load(*small(0)).step == 3
    checkpoints.save(4, *small(0), {})
    assert checkpoints.load(*small(0)).step == 4
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-4"]


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
def test_a_marker_that_no_save_writes_is_damage(checkpoints, damage):
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
def test_what_a_process_never_writes_is_damage(checkpoints, damage):
    model, optimizer = small(0)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.save(2, model, optimizer, {})
    newest = checkpoints.folder / "step-2"
    change = PROCESSES[damage]
    edit_json(
        newest / "process-0.json", lambda p: None if isinstance(c := change(p), dict) else c
    )
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
def test_an_index_that_leaves_a_weight_undefined_is_refused(checkpoints, damage):
    checkpoints.save(1, *small(0), {})
    folder = checkpoints.folder / "step-1"

    def change(index):
        index["model.weight"]["pieces"] = PIECES[damage](index["model.weight"]["pieces"])

    edit_json(folder / "index.json", change)
    sign(folder)
    with pytest.raises(UserError, match=r"model\.weight") as error:
        checkpoints.load(*small(0))
    assert "\n" not in str(error.value)


def test_two_pieces_are_one_weight(checkpoints):
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


def test_a_crafted_checkpoint_cannot_run_code(checkpoints, tmp_path):
    folder, attacked = checkpoints.folder / "step-1", tmp_path / "attacked"
    for name in FILES[1:]:
        checkpoints.save(1, *small(0), {})
        (folder / name).write_bytes(pickle.dumps(Attack(attacked)))
        sign(folder)
        with pytest.raises(UserError, match=name):
            checkpoints.load(*small(0))
        assert not attacked.exists()
    pickle.loads(pickle.dumps(Attack(attacked)))
    assert attacked.exists()  # the attack is one


def test_a_checkpoint_of_the_older_format_is_refused_and_runs_nothing(checkpoints, tmp_path):
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
    with pytest.raises(UserError, match="written by an older version.*remove it.*--fresh"):
        checkpoints.load(model, optimizer)
    assert not attacked.exists()


def double(seed):
    model, optimizer = small(seed)
    for moments in optimizer.state.values():
        moments.update({key: value.double() for key, value in moments.items()})
    return model.double(), optimizer


def larger(seed):
    model, optimizer = small(seed)
    model.more = nn.Linear(1, 1, bias=False)
    return model, optimizer


@pytest.mark.parametrize(
    ("saved", "loaded", "named"),
    [
        (small, partial(small, width=4), r"has model\.weight as float32 \(2, 3\), not float32 \(2, 4"),
        (small, double, r"has model\.weight as float32 \(2, 3\), not float64"),
        (small, larger, r"has no model\.more\.weight"),
        (larger, small, r"has 'model\.more\.weight' besides"),
    ],
)
def test_another_model_is_one_line_that_says_what_differs(checkpoints, saved, loaded, named):
    checkpoints.save(1, *saved(0), {})
    checkpoints.save(2, *saved(0), {})
    wanted = f"cannot resume from .*step-2: it holds another model: it .*{named}"
    with pytest.raises(UserError, match=wanted) as error:
        checkpoints.load(*loaded(0))
    assert "\n" not in str(error.value)


def test_names_in_an_index_reach_no_terminal_raw(checkpoints):
    checkpoints.save(1, *small(0), {})
    folder = checkpoints.folder / "step-1"
    edit_json(folder / "index.json", lambda i: i.update({"\x1b[2J\n" * 9999: i["model.weight"]}))
    sign(folder)
    with pytest.raises(UserError) as error:
        checkpoints.load(*small(0))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_a_stream_is_resumed_by_as_many_processes(checkpoints):
    checkpoints.save(1, *small(0), {"read": 5})
    wider = Checkpoints(checkpoints.folder, World(torch.device("cpu")), 2)
    assert wider.load(*small(0)).data == {"read": 5}
