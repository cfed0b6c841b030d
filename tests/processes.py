"""Programs in a Python process of their own, whose environment says nothing to CuPy but what the test says."""

import os
import subprocess
import sys
from pathlib import Path

from backends import NO_GPU

import cupy_slots

TESTS = Path(__file__).parent
PACKAGES = Path(cupy_slots.__file__).parent.parent


def why_no_gpu_and_no_pretence():
    if not NO_GPU:
        return ""
    try:
        from cupy._core import core
        from cupy.cuda import compiler

        compiler._get_nvrtc_version()
        core.assemble_cupy_compiler_options(())
    except Exception as reason:  # a broken CuPy raises whatever it likes
        return f"{NO_GPU}, and no CuPy with NVRTC to pretend one: {type(reason).__name__}: {reason}"
    return ""


NO_KERNELS = why_no_gpu_and_no_pretence()

# Snippets of programs. `array` makes an array on the GPU, or on one that is pretended so that CI can load kernels too;
# a kernel there gives no answer. Where kernels cannot be loaded at all, the two snippets do nothing.
CHECK = """
def check(array, answered=True):
    out = array([0] * 8)
    cupy_slots.get_compressed_slot_mapping(8, None, array([0, 8]), array([8]), array([[3]]), 64, 4, out)
    assert not answered or out.tolist() == [-1, -1, -1, 192, -1, -1, -1, 193], out
"""
GPU = CHECK_GPU = ""
if not NO_KERNELS:
    GPU = "from without_driver import array" if NO_GPU else "from cupy import asarray as array"
    CHECK_GPU = f"check(array, answered={not NO_GPU})"


def start_python(program, *first_on_path, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUPY_", "PYTHON"))}
    environment |= variables | {"PYTHONPATH": os.pathsep.join(map(str, (*first_on_path, PACKAGES)))}
    command = [sys.executable, "-c", program]  # which has the directory that it runs in first on its path
    return subprocess.Popen(
        command, env=environment, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def output(process):
    """What the program printed, after its asserts have held."""
    try:
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return printed


def run_python(program, *first_on_path, **variables):
    return output(start_python(program, *first_on_path, **variables))
