"""A direct launch calls the compiled kernel that Triton would call, with the same arguments."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

jit = pytest.importorskip("triton.runtime.jit")
import triton.language as tl  # noqa: E402
from mezzo_core.ops import launch as module  # noqa: E402
from mezzo_core.ops.launch import launch  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

known = pytest.mark.skipif(not module._is_known, reason="this Triton launches all kernels itself")


def body(x, y, n, fixed, SIZE: tl.constexpr, MODE: tl.constexpr):
    """Stand for a kernel's source, which no test compiles."""


@pytest.fixture
def machine(monkeypatch):
    """Return a GPU that is not there: `calls` are (kernel, grid, stream, hook, arguments)."""
    gpu = SimpleNamespace(device=0, calls=[], made=[])
    gpu.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    gpu.get_current_device = lambda: gpu.device
    gpu.get_current_stream = lambda device: 7 + device

    def compile_it(kernel, key, signature, device, *rest):
        made = CompiledKernel.__new__(CompiledKernel)
        made.module, made.src, made.name, made.function = object(), None, "body", object()
        made.packed_metadata = object()

        def run(x, y, z, stream, function, metadata, told, enter, leave, *arguments):
            assert (function, metadata) == (made.function, made.packed_metadata)
            gpu.calls.append((made, (x, y, z), stream, enter, arguments))

        made._run = run
        gpu.made.append(made)
        return kernel.device_caches[device][0].setdefault(key, made)

    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile_it)
    monkeypatch.setattr(module, "_compiled", {})
    driver.set_active(gpu)
    yield gpu
    driver.set_active(None)
    for made in gpu.made:
        made.module = None  # else Triton 3.8 unloads it from the GPU


@pytest.fixture
def kernel():
    return jit.JITFunction(body, do_not_specialize=["fixed"])


def described(x, rows):
    return TensorDescriptor.from_tensor(x, [rows, 16])


ROW = torch.zeros(64, dtype=torch.bfloat16)
SQUARE = torch.zeros(16, 16, dtype=torch.bfloat16)
BASE = {"x": ROW, "y": ROW, "n": 32, "fixed": 32, "SIZE": 16, "MODE": "a", "num_warps": 4}
OTHERS = {
    "an unaligned pointer": {"y": ROW[1:]},
    "another dtype": {"x": ROW.float()},
    "no tensor": {"y": None},
    "an int of 1": {"n": 1},
    "an int that 16 does not divide": {"n": 33},
    "an int of 64 bits": {"n": 2**32},
    "a float": {"n": 0.5},
    "an unspecialized int of 64 bits": {"fixed": 2**32},
    "another constant": {"SIZE": 32},
    "another name": {"MODE": "b"},
    "another number of warps": {"num_warps": 8},
    "one more option": {"num_stages": 2},
    "a descriptor": {"x": described(SQUARE, 16)},
    "a descriptor of another tile": {"x": described(SQUARE, 8)},
    "a descriptor of another dtype": {"x": described(SQUARE.float(), 16)},
}
SAME = {"another tensor": {"x": ROW.clone()}, "another size": {"n": 48, "fixed": 1}, "as it is": {}}


def split(changes):
    """Return the arguments and the constants of a call."""
    given = {**BASE, **changes}
    return [given.pop(name) for name in ("x", "y", "n", "fixed")], given


def place(x):
    """Return what Triton makes of an argument: a tensor's address."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


@known
@pytest.mark.parametrize("device", [0, 1])
def test_each_call_gets_the_kernel_and_arguments_that_triton_gives_it(machine, kernel, device):
    machine.device = device
    calls = [split(changes) for changes in (*SAME.values(), *OTHERS.values())]
    for _ in range(2):
        for arguments, constants in calls:
            machine.calls.clear()
            kernel[3, 2](*arguments, **constants)
            launch(kernel, (3, 2), *arguments, **constants)
            launch(kernel, (3, 2), *arguments, **constants)
            own, *direct = machine.calls
            for made, grid, stream, _, passed in direct:
                assert made is own[0]
                assert (grid, stream) == own[1:3] == ((3, 2, 1), 7 + device)
                assert [*map(place, passed)] == [*map(place, own[4])]
            assert own[3] is not None
            assert direct[1][3] is None, "the second launch is direct, and calls no hooks"
            assert not any(isinstance(x, torch.Tensor) for x in direct[1][4])


@known
def test_what_differs_gets_another_kernel(machine, kernel):
    def found(changes):
        arguments, constants = split(changes)
        for _ in range(2):
            launch(kernel, (1,), *arguments, **constants)
        return machine.calls[-1][0]

    base = found({})
    for name, changes in SAME.items():
        assert found(changes) is base, name
    kernels = {name: found(changes) for name, changes in OTHERS.items()}
    machine.device = 1
    kernels["another device"] = found({})
    different = {id(base), *map(id, kernels.values())}
    assert len(different) == 1 + len(kernels)


@known
@pytest.mark.parametrize("why", ["watched", "hooked", "replaced", "debugged", "unknown"])
def test_otherwise_triton_launches(machine, kernel, why, monkeypatch):
    arguments, constants = split({})
    launch(kernel, (1,), *arguments, **constants)
    told = []
    if why == "watched":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [told.append])
    elif why == "hooked":
        kernel.add_pre_run_hook(lambda *arguments, **constants: told.append("hooked"))
    elif why == "replaced":
        monkeypatch.setattr(jit.JITFunction, "run", lambda self, *_, **__: told.append("replaced"))
    elif why == "debugged":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif why == "unknown":
        monkeypatch.setattr(module, "_is_known", False)
    launch(kernel, (1,), *arguments, **constants)
    assert told == [why] * (why in ("hooked", "replaced"))
    assert len(machine.calls) == 1 + (why != "replaced")
    assert machine.calls[-1][3] is knobs.runtime.launch_enter_hook, "the launch was direct"


@known
@pytest.mark.parametrize("most", [0, 1, 3])
def test_where_stages_do_not_fit_in_shared_memory_one_is_tried(machine, kernel, most, monkeypatch):
    compile_it = jit.JITFunction._do_compile

    def refusing(kernel, key, signature, device, constants, options, *rest):
        if options.num_stages > most:
            raise OutOfResources(2, 1, "shared memory")
        tried.append(options.num_stages)
        return compile_it(kernel, key, signature, device, constants, options, *rest)

    monkeypatch.setattr(jit.JITFunction, "_do_compile", refusing)
    arguments, constants = split({"num_stages": 3})
    tried = []
    with pytest.raises(OutOfResources) if most == 0 else nullcontext():
        for _ in range(2):
            launch(kernel, (1,), *arguments, **constants)
        assert tried == [most]
        assert machine.calls[1][3] is None, "the second launch is direct"


@known
def test_a_global_constant_is_compared_as_triton_does(machine, kernel):
    arguments, constants = split({})
    module = {"SCALE": tl.constexpr(2)}
    launch(kernel, (1,), *arguments, **constants)
    kernel.used_global_vals = {("SCALE", 0): (tl.constexpr(2), module)}
    launch(kernel, (1,), *arguments, **constants)
    assert machine.calls[-1][3] is None, "the launch was not direct"
    module["SCALE"] = tl.constexpr(3)
    with pytest.raises(RuntimeError, match="SCALE has changed"):
        launch(kernel, (1,), *arguments, **constants)


@known
def test_arguments_may_be_named(machine, kernel):
    arguments, constants = split({})
    for _ in range(2):
        launch(kernel, (1,), *arguments, **constants)
        launch(kernel, (1,), *arguments[:2], fixed=arguments[3], **constants, n=arguments[2])
    made, _, _, hook, passed = machine.calls[-1]
    assert hook is None, "the launch was not direct"
    assert (made, passed) == (machine.calls[-2][0], machine.calls[-2][4])


@known
def test_a_named_argument_behind_a_constant_is_left_to_triton(machine):
    def source(x, SIZE: tl.constexpr, n):
        """Stand for a kernel whose last argument follows a constant."""

    kernel, (x, _, n, _), _ = jit.JITFunction(source), *split({})
    for _ in range(2):
        launch(kernel, (1,), x, n=n, SIZE=16)
    assert all(call[3] is not None for call in machine.calls), "a launch was direct"
    assert machine.calls[-1][4][-1] == n


@known
def test_constants_among_the_arguments_are_left_to_triton(machine, kernel):
    arguments, constants = split({})
    size = constants.pop("SIZE")
    for value in (size, 2 * size, size):
        launch(kernel, (1,), *arguments, value, **constants)
    first, second, third = machine.calls
    assert first[0] is third[0] is not second[0]
    assert third[3] is not None, "the launch was direct"


def test_the_interpreter_launches_its_own_kernels():
    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: seen.append((grid, arguments, constants))

    seen = []
    launch(Interpreted(), (4,), 1, 2, SIZE=3)
    assert seen == [((4,), (1, 2), {"SIZE": 3})]
