"""Every kernel variant compiles without a GPU and without a warning, within its registers and its shared memory."""

import io
import re
from typing import NamedTuple

import pytest

from cupy_slots._jit import Kernel

try:
    from cupy.cuda.compiler import CompileException, _NVRTCProgram
    from cupy_backends.cuda.libs import nvrtc

    architectures = nvrtc.getSupportedArchs()
except Exception as error:  # a broken CuPy or CUDA raises whatever it likes
    architectures, WHY_NOT = (), f"no NVRTC: {type(error).__name__}: {error}"
else:
    WHY_NOT = ""

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


class Limit(NamedTuple):
    registers: int  # of a thread, with none spilled
    shared: int  # bytes that a block has whatever the launch; the emulated GPU checks the rest


LIMITS = {
    "compressed_slot_mapping MAX_GROUPS=1 WIDE=0": Limit(54, 32),
    "compressed_slot_mapping MAX_GROUPS=1 WIDE=1": Limit(64, 48),
    "compressed_slot_mapping MAX_GROUPS=16 WIDE=0": Limit(54, 32),
    "compressed_slot_mapping MAX_GROUPS=16 WIDE=1": Limit(64, 48),
}


def compile_for(architecture, source):
    """The compiler's log."""
    log = io.StringIO()
    program = _NVRTCProgram(source, "kernel.cu", method="cubin")
    program.compile(("-std=c++17", f"-arch=sm_{architecture}", "--ptxas-options=-v"), log)
    return log.getvalue()


def variant(kernel):
    return " ".join([kernel.name, *(f"{macro}={value}" for macro, value in kernel.macros.items())])


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize("kernel", Kernel.registry, ids=variant)
def test_compiles(kernel, architecture):
    if architecture not in architectures:
        pytest.skip(f"this NVRTC knows no sm_{architecture}: {architectures}")
    log = compile_for(architecture, kernel.source())
    assert "warning" not in log, log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
    registers, shared = re.findall(r"(\d+) registers", log), re.findall(r"(\d+) bytes smem", log)
    used = Limit(max(map(int, registers)), max(map(int, shared), default=0))
    limit = LIMITS[variant(kernel)]
    assert used.registers <= limit.registers, (used, limit, log)
    assert used.shared <= limit.shared, (used, limit, log)


def test_a_warning_is_seen():
    assert "warning" in compile_for(architectures[-1], 'extern "C" __global__ void kernel() { int unused; }')


def test_an_error_is_seen():
    with pytest.raises(CompileException, match="identifier"):
        compile_for(architectures[-1], 'extern "C" __global__ void kernel() { undeclared; }')
