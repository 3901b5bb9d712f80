"""Chunks in files of a folder; a host or a disk that is full is an error, and harms no state."""

import errno
import math
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn import load_state, save_state
from mezzo_core.testing.laws import LAWS
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig
from mezzo_drt.memory import host
from mezzo_drt.memory.chunks import Memory

C, L = 12, 4
CONFIG = DRTConfig(
    num_layers=2, chunk_size=L, num_retrieved=2, window_size=5, head_dim=6, hidden=20,
    num_encoder_layers=1, offload=True,
)  # fmt: skip


@pytest.fixture
def stack():
    torch.manual_seed(0)
    stack = CONFIG.build(C)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return stack.eval()


def run(stack, x, state=None):
    state = stack.init_state(len(x)) if state is None else state
    outputs = []
    for segment in x.split(L, 1):
        y, state = stack(segment, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def mapped(folder):
    """Return the bytes of each file of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return [int(end, 16) - int(begin, 16) for begin, end in places]


@pytest.mark.parametrize("law", LAWS)
def test_laws_with_files(stack, law, tmp_path):
    stack.offload_to(tmp_path)
    LAWS[law](stack)


@torch.no_grad()
def test_files_hold_the_chunks_and_go_with_the_state(stack, tmp_path):
    x = torch.randn(2, 50 * L, C)
    stack.offload_to(tmp_path)
    y, state = run(stack, x)
    assert_close("outputs", y, stack(x)[0], rtol=1e-5)
    assert [*tmp_path.iterdir()] == [], "files without names outlive nothing"
    (size,) = mapped(tmp_path)
    assert size >= state.memory.k.nbytes + state.memory.v.nbytes, "keys and values in one"
    del state
    assert mapped(tmp_path) == []


@torch.no_grad()
def test_a_fork_shares_chunks_until_one_of_the_two_needs_a_file_of_its_own(stack, tmp_path):
    x, other = torch.randn(2, 1, 60 * L, C)
    other[:, : 48 * L] = x[:, : 48 * L]
    stack.offload_to(tmp_path)
    _, state = run(stack, x[:, : 48 * L])
    fork = stack.fork(state)
    assert fork.memory.k.data_ptr() == state.memory.k.data_ptr()
    assert len(mapped(tmp_path)) == 1
    for part, of in ((x, state), (other, fork)):
        y = run(stack, part[:, 48 * L :], of)[0]
        assert_close("after the fork", y, stack(part)[0][:, 48 * L :], rtol=1e-5)
    chosen = stack.select(state, [0, 0])
    assert chosen.memory.k.data_ptr() != state.memory.k.data_ptr()
    assert len(mapped(tmp_path)) == 2
    newest = run(stack, x[:, :L], state)[1]
    for of in (state, newest):  # the newest state takes the room in its own buffers
        stepping = stack.reserve(of, L)
        assert (stepping.memory.k.data_ptr() == of.memory.k.data_ptr()) == (of is newest)
        assert stack.fork(stepping).memory.k.data_ptr() != stepping.memory.k.data_ptr()


def test_what_reads_no_chunk_is_told_so():
    memory = Memory(torch.zeros(2, 3, C), *torch.randn(2, 2, 3, L, 2, 6))
    indices = torch.tensor([[[-1, 2], [1, -1]], [[-1, -1], [-1, -1]]])
    fetched, local = host.HostStore().gather(memory, indices)
    assert local.tolist() == [[[-1, 1], [0, -1]], [[-1, -1], [-1, -1]]]
    assert torch.equal(fetched.k[0], memory.k[0, 1:])


@torch.no_grad()
def test_a_state_is_saved_from_files_and_loaded_to_files_or_memory(stack, tmp_path):
    x = torch.randn(2, 12 * L, C)
    stack.offload_to(tmp_path)
    state = run(stack, x[:, : 8 * L])[1]
    save_state(stack, state, tmp_path / "state")
    for folder in (tmp_path, None):
        stack.offload_to(folder)
        before = len(mapped(tmp_path))
        loaded, _ = load_state(stack, tmp_path / "state")
        assert len(mapped(tmp_path)) - before == (folder is not None)
        y = run(stack, x[:, 8 * L :], loaded)[0]
        assert torch.equal(y, run(stack, x[:, 8 * L :], stack.fork(state))[0])
        del loaded
    plain = replace(CONFIG, offload=False).build(C).eval()
    plain.load_state_dict(stack.state_dict())
    with pytest.raises(UserError, match="a state of a model with other modules"):
        load_state(plain, tmp_path / "state")


@torch.no_grad()
def test_a_full_disk_is_an_error_and_harms_no_state(stack, tmp_path, monkeypatch):
    x = torch.randn(1, 12 * L, C)
    stack.offload_to(tmp_path)
    _, state = run(stack, x[:, : 8 * L])

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match="No space left on device"):
            run(stack, x[:, 8 * L :], state)
    y, _ = run(stack, x[:, 8 * L :], state)
    assert_close("later", y, stack(x)[0][:, 8 * L :], rtol=1e-5)


@torch.no_grad()
def test_a_host_that_is_too_small_is_an_error_and_harms_no_state(stack, tmp_path, monkeypatch):
    x = torch.randn(1, 12 * L, C)
    _, state = run(stack, x[:, : 8 * L])
    monkeypatch.setattr(host, "available_memory", lambda: 100.0)
    with pytest.raises(UserError, match="give a folder"):
        run(stack, x[:, 8 * L :], state)
    stack.offload_to(tmp_path)
    y, _ = run(stack, x[:, 8 * L :], state)
    assert_close("in a folder", y, stack(x)[0][:, 8 * L :], rtol=1e-5)


def test_memory_that_the_process_may_not_have_is_an_error_in_our_words(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: math.inf)  # no limit is seen there
    with pytest.raises(UserError, match=r"GiB .* what this process may have .*: give a folder"):
        host.in_memory((2**60,), torch.int8)


@torch.no_grad()
def test_a_host_needs_memory_for_keys_and_values_together(stack, monkeypatch):
    x = torch.randn(1, 8 * L, C)
    _, state = run(stack, x)
    keys = state.memory.k.nbytes
    for free, fits in ((2.0 * keys, True), (1.9 * keys, False)):
        monkeypatch.setattr(host, "available_memory", lambda free=free: free)
        if fits:
            stack(x, stack.init_state(1))
        else:
            with pytest.raises(UserError, match="give a folder"):
                stack(x, stack.init_state(1))


@torch.no_grad()
def test_a_stack_that_writes_files_can_be_pickled(stack, tmp_path):
    x = torch.randn(1, 8 * L, C)
    stack.offload_to(str(tmp_path))
    again = pickle.loads(pickle.dumps(stack))
    y, state = run(again, x)
    assert sum(mapped(tmp_path)) >= 2 * state.memory.k.nbytes, "and writes there"
    assert_close("outputs", y, stack(x)[0], rtol=1e-5)


def in_fork(work):
    """Return the text that `work` returns in a forked process, or its error's one line."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # the parent's other threads are not here
        try:
            told = work()
        except Exception as error:
            told = str(error)
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return told


USES = {
    "forward": lambda stack, x, state: stack(x, state),
    "step": lambda stack, x, state: stack.step(x, state),
    "before_step": lambda stack, x, state: stack.before_step(state),
    "reserve": lambda stack, x, state: stack.reserve(state, 3),
    "fork": lambda stack, x, state: stack.fork(state),
    "select": lambda stack, x, state: stack.select(state, [1]),
    "reset": lambda stack, x, state: stack.reset(state, [1]),
}


@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_a_forked_process_is_refused_what_the_files_of_another_hold(stack, use, tmp_path):
    """The file is shared, but not what the states know about its room."""
    x = torch.randn(2, 12 * L, C)
    stack.offload_to(tmp_path)
    _, state = run(stack, x[:, : 8 * L])
    steps = stack.reserve(state, 2 * L)
    given = steps if "step" in use else state
    told = in_fork(lambda: f"accepted {USES[use](stack, x[:, :1], given)}")
    assert told.startswith("state has chunks in files of the process that forked this one")
    assert "\n" not in told
    y, _ = run(stack, x[:, 8 * L :], state)
    assert_close("in the process itself", y, stack(x)[0][:, 8 * L :], rtol=1e-5)


@torch.no_grad()
def test_a_forked_process_goes_on_alone_from_the_hosts_memory_and_writes_own_files(stack, tmp_path):
    x, other = torch.randn(2, 1, 12 * L, C)
    other[:, : 8 * L] = x[:, : 8 * L]
    _, state = run(stack, x[:, : 8 * L])

    def go_on():
        y, _ = run(stack, other[:, 8 * L :], state)
        assert_close("the other", y, stack(other)[0][:, 8 * L :], rtol=1e-5)
        stack.offload_to(tmp_path)
        assert_close("in files", run(stack, other)[0], stack(other)[0], rtol=1e-5)
        return "right"

    assert in_fork(go_on) == "right"
    y, _ = run(stack, x[:, 8 * L :], state)
    assert_close("in the process itself", y, stack(x)[0][:, 8 * L :], rtol=1e-5)


def test_folders_that_cannot_be_used_are_refused(stack, tmp_path):
    for bad in (tmp_path / "missing", "nul\0", "x" * 300, "", Path(__file__)):
        with pytest.raises(UserError, match="is no folder"):
            stack.offload_to(bad)
    with pytest.raises(UserError, match="/proc cannot take"):
        stack.offload_to("/proc")
    for bad in (3, True, b"bytes", [tmp_path], object()):
        with pytest.raises(TypeError, match="folder must be a path or None, got"):
            stack.offload_to(bad)
    plain = replace(CONFIG, offload=False).build(C)
    with pytest.raises(ValueError, match="offload=True"):
        plain.offload_to(tmp_path)


def test_a_folder_stays_the_same_when_the_process_moves_to_another(stack, tmp_path, monkeypatch):
    (tmp_path / "chunks").mkdir()
    monkeypatch.chdir(tmp_path)
    stack.offload_to("chunks")
    monkeypatch.chdir("/")
    x = torch.randn(1, 4 * L, C)
    y, _ = run(stack, x)
    assert_close("in files", y, stack(x)[0], rtol=1e-5)


def test_the_host_says_how_much_memory_it_has_left():
    assert 2**20 < host.available_memory() < 2**50
