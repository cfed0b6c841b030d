"""Where the kernels come from, when they are compiled, and what sees an edit."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from backends import NO_GPU
from processes import CHECK, CHECK_GPU, GPU, NO_KERNELS, TESTS, run_python

from cupy_slots import _jit

needs_gpu = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS or "-")
CHECKOUT = TESTS.parent

# ---- the directory ----

KERNEL_DIR = "import cupy_slots; print(cupy_slots._jit.kernel_dir())"


def copy_checkout(to):
    shutil.copytree(Path(_jit.__file__).parent, to / "cupy_slots", ignore=shutil.ignore_patterns("kernels", "__py*"))
    shutil.copytree(_jit.kernel_dir(), to / "kernels")
    return to / "kernels" / "compressed_slot_mapping.cu"


def test_checkout(tmp_path):
    """As with an editable install, which puts the checkout on the path."""
    file = copy_checkout(tmp_path)
    for variables in {}, {"CUPY_SLOTS_KERNEL_DIR": ""}:
        assert run_python(KERNEL_DIR, tmp_path, CUPY_SLOTS_JIT="lazy", **variables).strip() == str(file.parent)


def test_wheel(tmp_path):
    """It carries a copy, which comes before a directory of the same name beside the package."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=120)
    installed = tmp_path / "site-packages"
    with zipfile.ZipFile(*tmp_path.glob("*.whl")) as wheel:
        wheel.extractall(installed)
    (installed / "kernels").mkdir()
    directory = Path(run_python(KERNEL_DIR, installed, CUPY_SLOTS_JIT="lazy").strip())
    assert directory == installed / "cupy_slots" / "kernels"
    carried, ours = [{file.name: file.read_bytes() for file in d.iterdir()} for d in (directory, CHECKOUT / "kernels")]
    assert carried == ours


@pytest.mark.parametrize("kernel", _jit.Kernel.registry, ids=lambda kernel: f"{kernel.name}-{kernel.macros}")
def test_source(tmp_path, monkeypatch, kernel):
    """The compiler is told that the first line behind the macros is line 1 of the file."""
    text = "first line\nsecond line\n"
    (tmp_path / f"{kernel.name}.cu").write_text(text)
    monkeypatch.setenv("CUPY_SLOTS_KERNEL_DIR", str(tmp_path))
    macros, line, lines = kernel.source().partition(f'#line 1 "{tmp_path}/{kernel.name}.cu"\n')
    assert line
    assert lines == text
    assert macros.splitlines() == [f"#define {macro} {value}" for macro, value in kernel.macros.items()]


# ---- the time ----

# Notes the arguments of each RawKernel that is made.
COUNTING = f"""
import sys
import numpy as np
{GPU}
import cupy
RawKernel, made = cupy.RawKernel, []
def counted(*arguments):
    made.append(arguments)
    return RawKernel(*arguments)
cupy.RawKernel = counted
"""

EAGER = f"""
{COUNTING}
import cupy_slots
assert [(code, name) for code, name, _ in made] == [(k.source(), k.name) for k in cupy_slots._jit.Kernel.registry]
count = len(made)
{CHECK}
check(array, answered={not NO_GPU})
cupy_slots.warmup()
cupy_slots.warmup(0)
assert len(made) == count, made[count:]
assert "torch" not in sys.modules
"""

LAZY = f"""
import sys
import cupy_slots
assert "cupy" not in sys.modules
{COUNTING}
{CHECK}
check(np.array)
assert not made
{CHECK_GPU}
assert len(made) == 1
cupy_slots.warmup({{device}})
assert len(made) == len(cupy_slots._jit.Kernel.registry)
cupy_slots.warmup()
{CHECK_GPU}
assert len(made) == len(cupy_slots._jit.Kernel.registry)
"""


@needs_kernels
def test_import_loads_the_kernels():
    """All of them, and no call loads another."""
    run_python(EAGER)


@needs_kernels
@pytest.mark.parametrize(("device", "value"), [("", "lazy"), ("device=None", "Lazy"), ("device=0", "LAZY")])
def test_lazy_import_leaves_them_to_calls(device, value):
    """A call loads its own kernel, and `warmup` the rest."""
    run_python(LAZY.format(device=device), CUPY_SLOTS_JIT=value)


# ---- edits ----

FIRST_CALL = f"""
import numpy as np
{GPU}
import cupy_slots
{CHECK}
check(np.array)
try:
    {CHECK_GPU}
except RuntimeError as error:
    print(error)
"""

RELOAD = f"""
import gc
from pathlib import Path
{GPU}
import cupy, cupy_slots
{CHECK}
file = cupy_slots._jit.kernel_dir() / "compressed_slot_mapping.cu"
text = file.read_text()

def raw_kernels():
    gc.collect()
    return sum(type(thing) is cupy.RawKernel for thing in gc.get_objects())

{CHECK_GPU}
count = raw_kernels()
file.write_text(text + "// edited")
cupy_slots.reload_kernels()
assert raw_kernels() == count + 1  # the one in use again, and the old one is kept
{CHECK_GPU}
file.write_text(text + "#error edited")
{CHECK_GPU}
try:
    cupy_slots.reload_kernels()
except RuntimeError as error:
    print(error)
file.write_text(text)
cupy_slots.reload_kernels()
{CHECK_GPU}
"""

REPLAY = f"""
import gc
import cupy, cupy_slots
{GPU}
{CHECK}
file = cupy_slots._jit.kernel_dir() / "compressed_slot_mapping.cu"
text = file.read_text()
pad = "constexpr i64 PAD = -1;"
assert pad in text

arguments = 8, None, array([0, 8]), array([8]), array([[3]]), 64, 4
captured, called = array([0] * 8), array([0] * 8)
stream = cupy.cuda.Stream(non_blocking=True)
cupy.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    cupy_slots.get_compressed_slot_mapping(*arguments, captured)
    graph = stream.end_capture()

file.write_text(text.replace(pad, pad.replace("-1", "-7")))
for _ in range(3):
    cupy_slots.reload_kernels()
gc.collect()
cupy_slots.get_compressed_slot_mapping(*arguments, called)
graph.launch(stream)
cupy.cuda.Device().synchronize()
print(called.tolist(), captured.tolist())
"""


@needs_kernels
def test_a_new_process_sees_an_edit(tmp_path):
    file = copy_checkout(tmp_path)
    assert run_python(FIRST_CALL, tmp_path, CUPY_SLOTS_JIT="lazy") == ""
    line = len(file.read_text().splitlines()) + 1
    with file.open("a") as end:
        end.write("#error edited")
    message = run_python(FIRST_CALL, tmp_path)
    assert f"{file}({line})" in message, message
    assert "edited" in message, message


@needs_kernels
def test_reload_sees_an_edit(tmp_path):
    """Nothing else does; a mistake is shown by the reload itself."""
    file = copy_checkout(tmp_path)
    line = len(file.read_text().splitlines()) + 1
    message = run_python(RELOAD, CUPY_SLOTS_JIT="lazy", CUPY_SLOTS_KERNEL_DIR=str(file.parent))
    assert f"{file}({line})" in message, message
    assert "edited" in message, message


@needs_gpu
def test_reload_leaves_captured_graphs_alone(tmp_path):
    """A graph launches the kernel that it was captured with, a call the new one."""
    file = copy_checkout(tmp_path)
    printed = run_python(REPLAY, CUPY_SLOTS_KERNEL_DIR=str(file.parent))
    new, old = [-7, -7, -7, 192, -7, -7, -7, 193], [-1, -1, -1, 192, -1, -1, -1, 193]
    assert printed.strip() == f"{new} {old}"
