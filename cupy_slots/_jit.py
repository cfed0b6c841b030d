"""From kernels/*.cu to loaded kernels: find the file, compile it with `cupy.RawKernel`, keep it, reload it.

`import cupy_slots` compiles for the current device, unless CUPY_SLOTS_JIT=lazy leaves that to the first call.
Nothing that goes wrong there may break the import: the reason is raised by the first call with a GPU array.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

INSTALL = 'pip install "cupy_slots[cuda13x]" (or cuda12x, to match the driver)'


def kernel_dir() -> Path:
    """The directory of the `.cu` files: CUPY_SLOTS_KERNEL_DIR, else the wheel's copy, else the checkout's."""
    if chosen := os.environ.get("CUPY_SLOTS_KERNEL_DIR"):
        return Path(chosen)
    package = Path(__file__).parent
    carried = package / "kernels"
    return carried if carried.is_dir() else package.parent / "kernels"


def require_cupy() -> Any:
    """CuPy with a usable GPU, or a RuntimeError that says why not and what to install."""
    try:
        import cupy
    except Exception as reason:  # a broken install raises anything, not only ImportError
        raise RuntimeError(f"a GPU array needs CuPy, which cannot be imported: {reason}. {INSTALL}") from reason
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as reason:
        raise RuntimeError(f"a GPU array needs a usable GPU, but CuPy says: {reason}. {INSTALL}") from reason
    if count == 0:
        raise RuntimeError(f"a GPU array needs a visible GPU, and CuPy sees none. {INSTALL}")
    return cupy


class Loaded(NamedTuple):
    """A kernel on one device, as the driver knows it."""

    function: int
    context: int
    driver: Any  # `cupy.cuda.driver`
    multiprocessors: int


class Kernel:
    """One entry point of one `.cu` file, compiled with one set of macros; loaded once a device."""

    registry: ClassVar[list[Kernel]] = []
    _lock: ClassVar = threading.RLock()
    _retired: ClassVar[list[Any]] = []  # captured graphs may still launch what was loaded before a reload

    def __init__(self, name: str, **macros: int) -> None:
        self.name = name
        self.macros = macros
        self.loaded: dict[int, Loaded] = {}  # by device
        self._raw: Any = None
        Kernel.registry.append(self)

    def source(self) -> str:
        """The file's text behind its macros, with the compiler told the file's own path and line."""
        path = kernel_dir() / f"{self.name}.cu"
        macros = "".join(f"#define {macro} {value}\n" for macro, value in self.macros.items())
        return f'{macros}#line 1 "{path.as_posix()}"\n{path.read_text(encoding="utf-8")}'

    def load(self, device: int, stream: int | None = None) -> Loaded:
        """Compile and load for `device`.

        With `stream`, refuse while it is being captured: loading a module then would break the capture.
        """
        with Kernel._lock:
            if device in self.loaded:
                return self.loaded[device]
            cupy = require_cupy()
            runtime = cupy.cuda.runtime
            with cupy.cuda.Device(device):
                if stream is not None and runtime.streamIsCapturing(stream):
                    raise RuntimeError(
                        f"{self.name} is not loaded on cuda:{device} and cannot be while a CUDA graph is being "
                        "captured: call cupy_slots.warmup() before the capture"
                    )
                try:
                    if self._raw is None:
                        self._raw = cupy.RawKernel(self.source(), self.name, ("-std=c++17",))
                    function = self._raw.kernel.ptr
                except OSError as reason:
                    raise RuntimeError(f"the kernel source cannot be read: {reason}") from reason
                except Exception as reason:
                    raise RuntimeError(f"{self.name}.cu cannot be compiled: {reason}\n{INSTALL}") from reason
                driver = cupy.cuda.driver
                count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
                self.loaded[device] = Loaded(function, driver.ctxGetCurrent(), driver, count)
            return self.loaded[device]

    def retire(self) -> None:
        with Kernel._lock:
            Kernel._retired.append(self._raw)
            self._raw, self.loaded = None, {}


def warmup(device: int | None = None) -> None:
    """Compile and load every kernel on a device, so that no later call does."""
    cupy = require_cupy()
    ordinal = cupy.cuda.runtime.getDevice() if device is None else int(device)
    for kernel in Kernel.registry:
        kernel.load(ordinal)


def reload_kernels() -> None:
    """Read the `.cu` files again, and compile them where they were loaded."""
    for kernel in Kernel.registry:
        devices = list(kernel.loaded)
        kernel.retire()
        for device in devices:
            kernel.load(device)


def load_at_import() -> None:
    """Warm up the current device, unless told to wait; a failure shows again at the first call with a GPU array."""
    if os.environ.get("CUPY_SLOTS_JIT", "").lower() != "lazy":
        with contextlib.suppress(Exception):
            warmup()
