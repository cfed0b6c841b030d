"""On any machine the import and the CPU path work, and a GPU array gets one error: what is wrong, what to install."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from backends import NO_GPU, NO_TORCH
from processes import CHECK, CHECK_GPU, GPU, NO_KERNELS, output, run_python, start_python

from cupy_slots import _jit

needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS or "-")
needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="no CuPy")

FOREIGN = """
from types import SimpleNamespace
def array(values):
    shape = (len(values), len(values[0])) if isinstance(values[0], list) else (len(values),)
    interface = {"shape": shape, "typestr": "<i8", "data": (4096, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface)
"""

# The machine is a snippet, which defines `array`.
REFUSED = """
import sys
import numpy as np
{machine}
with_torch = "torch" in sys.modules
import cupy_slots
{check}

check(np.array)
cupy_slots.reload_kernels()
for refused in cupy_slots.warmup, lambda: check(array, answered=False):
    try:
        refused()
    except Exception as error:
        assert type(error) is RuntimeError, repr(error)
        message = str(error)
    else:
        raise SystemExit("nothing was refused")
check(np.array)
assert ("torch" in sys.modules) == with_torch
print(message)
"""


def refusal(machine, *first_on_path, **variables):
    return run_python(REFUSED.format(machine=machine, check=CHECK), *first_on_path, **variables)


# ---- CuPy ----

DRIVER = "from types import SimpleNamespace\ncuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount={}))\n"
STAND_INS = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')", "No module named 'cupy'"),
    "raising": ("raise RuntimeError('built for another CUDA')", "built for another CUDA"),
    "half imported": ("import cupy.cuda\nraise ImportError('libcublas is broken')", "libcublas is broken"),
    "emptied": ("", "no attribute 'cuda'"),
    "no driver": (
        "def getDeviceCount():\n    raise RuntimeError('cudaErrorInsufficientDriver: no driver')\n"
        + DRIVER.format("getDeviceCount"),
        "cudaErrorInsufficientDriver: no driver",
    ),
    "no GPU": (DRIVER.format("lambda: 0"), "sees none"),
}


def write_stand_in(directory, name):
    source, reason = STAND_INS[name]
    (directory / "cupy").mkdir()
    (directory / "cupy" / "__init__.py").write_text(source)
    (directory / "cupy" / "cuda.py").touch()
    return reason


@pytest.mark.parametrize("name", STAND_INS)
def test_unusable_cupy(tmp_path, name):
    reason = write_stand_in(tmp_path, name)
    message = refusal(FOREIGN, tmp_path)
    assert reason in message, message
    assert 'pip install "cupy_slots[' in message, message


@pytest.mark.skipif(bool(NO_GPU or NO_TORCH), reason=NO_GPU or NO_TORCH or "-")
@pytest.mark.parametrize("name", ["absent", "no driver"])
def test_torch_tensors_and_unusable_cupy(tmp_path, name):
    reason = write_stand_in(tmp_path, name)
    message = refusal("import torch\ndef array(values): return torch.tensor(values, device='cuda')", tmp_path)
    assert reason in message, message
    assert 'pip install "cupy_slots[' in message, message


@needs_cupy
def test_hidden_gpus():
    """Where there is no GPU at all, this is the machine without a driver."""
    message = refusal(FOREIGN, CUDA_VISIBLE_DEVICES="-1")
    assert ("cudaErrorInsufficientDriver" if NO_GPU else "cudaErrorNoDevice") in message, message
    assert 'pip install "cupy_slots[' in message, message


# ---- NVRTC, headers, kernels, cache ----

NOT_FOUND = {
    "NVRTC": """
import cuda.pathfinder
load = cuda.pathfinder.load_nvidia_dynamic_lib
def load_all_but_nvrtc(name):
    if name == "nvrtc":
        raise cuda.pathfinder.DynamicLibNotFoundError("no nvrtc anywhere")
    return load(name)
cuda.pathfinder.load_nvidia_dynamic_lib = load_all_but_nvrtc
""",
    "headers": """
import cuda.pathfinder
cuda.pathfinder.find_nvidia_header_directory = lambda name: None
""",
}


@needs_kernels
@pytest.mark.parametrize(("missing", "reason"), [("NVRTC", "no nvrtc anywhere"), ("headers", "CUDA headers")])
def test_missing_part_of_the_toolkit(missing, reason):
    message = refusal(NOT_FOUND[missing] + GPU)
    assert reason in message, message
    assert 'pip install "cupy_slots[' in message, message


@needs_kernels
@pytest.mark.parametrize("broken", ["directory missing", "file missing", "file unreadable", "file not text"])
def test_unreadable_kernels(tmp_path, broken):
    """The file is named, whatever is wrong with it."""
    directory = tmp_path / "kernels"
    file = directory / "compressed_slot_mapping.cu"
    if broken != "directory missing":
        directory.mkdir()
    if broken == "file unreadable":
        file.mkdir()  # root reads a file whatever its permissions
    if broken == "file not text":
        file.write_bytes(b"// \xff\n")
    message = refusal(GPU, CUPY_SLOTS_KERNEL_DIR=str(directory))
    assert str(file) in message, message
    assert "cannot be read" in message, message


@needs_kernels
def test_mistake_in_a_kernel(tmp_path):
    """The message has the file's path, the line and the compiler's words."""
    directory = tmp_path / "Kernel für mich"
    shutil.copytree(_jit.kernel_dir(), directory)
    file = directory / "compressed_slot_mapping.cu"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, "__device__ int mistaken() { return undeclared; }"]))
    message = refusal(GPU, CUPY_SLOTS_KERNEL_DIR=str(directory))
    assert f'{file}({len(lines) + 1}): error: identifier "undeclared" is undefined' in message, message


# Nobody, root included, can create anything here.
NOT_WRITABLE = "/proc"
needs_proc = pytest.mark.skipif(not Path(NOT_WRITABLE).is_dir(), reason=f"no {NOT_WRITABLE} that cannot be written to")


@needs_proc
@needs_cupy
def test_home_that_cannot_be_written():
    """CuPy creates its cache on import."""
    assert f"{NOT_WRITABLE}/.cupy" in refusal(FOREIGN, HOME=NOT_WRITABLE)


@needs_proc
@needs_kernels
def test_cache_that_cannot_be_written(tmp_path):
    """CuPy writes there what it has compiled, which must not look like the kernel's own file."""
    (tmp_path / "compressed_slot_mapping.cu").write_text('extern "C" __global__ void compressed_slot_mapping() {}')
    message = refusal(GPU, CUPY_CACHE_DIR=NOT_WRITABLE, CUPY_SLOTS_KERNEL_DIR=str(tmp_path))
    assert f"'{NOT_WRITABLE}/" in message, message
    assert "kernel source" not in message, message


# ---- processes ----

WORKING = f"""
import sys
import numpy as np
{{machine}}
{GPU}
import cupy_slots
{CHECK}
check(np.array)
{CHECK_GPU}
"""


@needs_kernels
def test_two_processes_compile_at_once_on_an_empty_cache(tmp_path):
    processes = [start_python(WORKING.format(machine=""), CUPY_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in processes:
        output(process)
    assert len(list(tmp_path.iterdir())) == len(_jit.Kernel.registry)


FORK = f"""
import os, signal, sys
import numpy as np
import cupy_slots
assert "cupy" not in sys.modules
pid = os.fork()
signal.alarm(60)  # a child that waits for a lock of its parent's must not wait for ever
{GPU}
{CHECK}
check(np.array)
{CHECK_GPU}
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_fork_after_a_lazy_import():
    run_python(FORK, CUPY_SLOTS_JIT="lazy")


# ---- torch ----


def test_torch_absent():
    run_python(WORKING.format(machine="sys.modules['torch'] = None"))


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "-")
def test_torch_built_for_the_cpu():
    machine = "import torch\nvars(torch._C).pop('_cuda_getCurrentRawStream', None)"
    run_python(WORKING.format(machine=machine) + "check(torch.tensor)")
