"""What `import cupy_slots` costs a process, each time in a fresh one."""

import json
import os
import subprocess
import sys
import tempfile

from measure import Timing

PROCESSES = 5

_STEPS = """
import json, sys
from time import perf_counter

begin = perf_counter()
import cupy
imported = perf_counter()
if sys.argv[1] == "context first":
    cupy.cuda.runtime.free(0)
context = perf_counter()
import cupy_slots
end = perf_counter()
cupy_slots.warmup()  # raises the reason if the import could not load the kernels
print(json.dumps([1e3 * (imported - begin), 1e3 * (context - imported), 1e3 * (end - context)]))
"""


def _process(when_context: str, cache_dir: str) -> tuple[float, float, float]:
    """Milliseconds of `import cupy`, of making the CUDA context, and of `import cupy_slots`."""
    command = [sys.executable, "-c", _STEPS, when_context]
    environment = os.environ | {"CUPY_CACHE_DIR": cache_dir}
    environment.pop("CUPY_SLOTS_JIT", None)
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    return tuple(json.loads(finished.stdout.splitlines()[-1]))


def import_times() -> dict[str, Timing]:
    """Medians of `PROCESSES` processes of each kind, in milliseconds, the kinds in turn."""
    warm, warm_after_context, cold_after_context = [], [], []
    with tempfile.TemporaryDirectory() as warm_cache:
        _process("", warm_cache)
        for _ in range(PROCESSES):
            warm.append(_process("", warm_cache))
            warm_after_context.append(_process("context first", warm_cache))
            with tempfile.TemporaryDirectory() as empty_cache:
                cold_after_context.append(_process("context first", empty_cache))
    return {
        "import cupy": Timing.of([process[0] for process in warm]),
        "CUDA context": Timing.of([process[1] for process in warm_after_context]),
        "warm": Timing.of([process[2] for process in warm]),
        "warm, context made before": Timing.of([process[2] for process in warm_after_context]),
        "cold, context made before": Timing.of([process[2] for process in cold_after_context]),
    }
