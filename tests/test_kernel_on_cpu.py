"""The kernels under sanitizers on emulated GPUs: all batches match the oracle, and planted faults are found."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import emulated_gpu
import pytest

import cupy_slots
from cupy_slots._jit import Kernel, kernel_dir

WHY_NOT = emulated_gpu.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")

SOURCES = {kernel.name: (kernel_dir() / f"{kernel.name}.cu").read_text() for kernel in Kernel.registry}
BARRIER = re.compile(r"__syncthreads\w*\((\))?")
BARRIERS = [
    pytest.param(name, line, id=f"{name} line {line}")
    for name, source in SOURCES.items()
    for line, text in enumerate(source.splitlines(), 1)
    if BARRIER.search(text.partition("//")[0])
]


def run_batches(checks, kernels, directory):
    environment = os.environ | {
        "CUPY_SLOTS_JIT": "lazy",
        "CUPY_SLOTS_KERNEL_DIR": str(kernels),
        "PYTHONPATH": str(Path(cupy_slots.__file__).parents[1]),
    }
    if checks == "memory":
        library = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
        environment |= {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    program = Path(__file__).with_name("emulated_batches.py")
    return subprocess.run([sys.executable, program, checks, directory], env=environment, capture_output=True, text=True)


def report(done, directory):
    last_batch = directory / "last_batch.txt"
    return f"{done.stdout}{done.stderr[-5000:]}\n{last_batch.read_text()[:5000] if last_batch.exists() else ''}"


def check_fault_is_found(name, planted, checks, finding, directory):
    for kernel, source in SOURCES.items():
        (directory / f"{kernel}.cu").write_text(planted if kernel == name else source)
    done = run_batches(checks, directory, directory)
    assert done.returncode != 0, f"not found: {done.stdout}"
    assert re.search(finding, done.stderr), report(done, directory)


def lines_never_run(directory):
    """Of each kernel, those that no variant has run."""
    runs = Counter()
    for counts in directory.rglob("*.gcda"):
        command = ["gcov", "--json-format", "--stdout", str(counts)]
        for file in json.loads(subprocess.check_output(command, cwd=counts.parent))["files"]:
            runs.update({(file["file"], line["line_number"]): line["count"] for line in file["lines"]})
    return sorted((file, line) for (file, line), count in runs.items() if file.endswith(".cu") and count == 0)


@pytest.mark.parametrize("checks", emulated_gpu.COMPILE)
def test_all_batches_match_the_oracle(checks, tmp_path):
    done = run_batches(checks, kernel_dir(), tmp_path)
    assert done.returncode == 0, report(done, tmp_path)
    assert re.fullmatch(r"\d{4} launches match the oracle\n", done.stdout)
    assert lines_never_run(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "checks", "finding"),
    [
        pytest.param(
            *("compressed_slot_mapping", r"column < \(u64\)group\.num_columns", "true"),
            *("memory", r"AddressSanitizer: heap-buffer-overflow .*\nREAD of size"),
            id="read outside the table",
        ),
        pytest.param(
            *("compressed_slot_mapping", r"(\(\(u64\)page.*?\)|\(u64\)page\S*) \* ([\w.]+)", r"(int)(\1) * (int)\2"),
            *("memory", r"compressed_slot_mapping\.cu:\d+:\d+: runtime error: signed integer overflow"),
            id="int32 product",
        ),
        pytest.param(
            *("compressed_slot_mapping", r"__syncthreads\(\);", "if (threadIdx.x != 7) __syncthreads();"),
            *("races", "not all threads come together: thread 0 waits .* thread 7 "),
            id="barrier that one thread passes by",
        ),
    ],
)
def test_planted_fault(name, pattern, replacement, checks, finding, tmp_path):
    planted, count = re.subn(pattern, replacement, SOURCES[name], count=1)
    assert count == 1, f"{name}.cu has nothing like {pattern}: plant the fault where that is now"
    check_fault_is_found(name, planted, checks, finding, tmp_path)


@pytest.mark.parametrize(("name", "line"), BARRIERS)
def test_no_barrier_can_be_left_out(name, line, tmp_path):
    lines = SOURCES[name].splitlines(keepends=True)
    lines[line - 1] = BARRIER.sub(lambda barrier: "void()" if barrier[1] else "(", lines[line - 1])
    check_fault_is_found(name, "".join(lines), "races", "AssertionError: race: ", tmp_path)
