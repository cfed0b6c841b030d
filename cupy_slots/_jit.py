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

CACHE = "CuPy needs a cache directory that it can write: set CUPY_CACHE_DIR, or CUPY_CACHE_IN_MEMORY=1"
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
        remedy = CACHE if isinstance(reason, OSError) else INSTALL
        raise RuntimeError(f"a GPU array needs CuPy, which cannot be imported: {reason}. {remedy}") from reason
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
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as reason:
            raise RuntimeError(
                f"the kernel source {path} cannot be read: {reason}. "
                "Reinstall cupy_slots, or correct CUPY_SLOTS_KERNEL_DIR"
            ) from reason
        macros = "".join(f"#define {macro} {value}\n" for macro, value in self.macros.items())
        return f'{macros}#line 1 "{path.as_posix()}"\n{text}'

    def load(self, device: int, stream: int | None = None) -> Loaded:
        """Compile and load for `device`.

        With `stream`, refuse while it is being captured: loading a module then would break the capture.
        """
        with Kernel._lock:
            if device not in self.loaded:
                runtime = require_cupy().cuda.runtime
                if stream is not None and runtime.streamIsCapturing(stream):
                    raise RuntimeError(
                        f"{self.name} is not loaded on cuda:{device}, and cannot be while a CUDA graph is captured: "
                        "call cupy_slots.warmup() before the capture"
                    )
                raw = self._raw or self._build()
                self.loaded[device] = self._load(raw, device)
                self._raw = raw
            return self.loaded[device]

    def _build(self) -> Any:
        return require_cupy().RawKernel(self.source(), self.name, ("-std=c++17",))

    def _load(self, raw: Any, device: int) -> Loaded:
        cuda = require_cupy().cuda
        runtime, driver = cuda.runtime, cuda.driver
        with cuda.Device(device):
            runtime.setDevice(device)  # makes the context current in a thread that has none
            try:
                function = raw.kernel.ptr
            except OSError as reason:
                raise RuntimeError(f"{self.name}.cu cannot be compiled: {reason}. {CACHE}") from reason
            except Exception as reason:
                raise RuntimeError(f"{self.name}.cu cannot be compiled: {reason}\n{INSTALL}") from reason
            count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
            return Loaded(function, driver.ctxGetCurrent(), driver, count)

    def rebuilt(self) -> tuple[Any, dict[int, Loaded]]:
        """The kernel made anew from its file, on the devices where it is loaded."""
        raw = self._build() if self.loaded else None
        return raw, {device: self._load(raw, device) for device in self.loaded}

    def replace(self, raw: Any, loaded: dict[int, Loaded]) -> None:
        Kernel._retired.append(self._raw)
        self._raw, self.loaded = raw, loaded


def warmup(device: int | None = None) -> None:
    """Compile and load every kernel on a device, so that no later call does.

    For programs that import with ``CUPY_SLOTS_JIT=lazy`` or use more devices than the one that was current at import:
    a kernel cannot be loaded while a CUDA graph is captured.

    Parameters
    ----------
    device : int, optional
        Ordinal of the device; the current one by default.

    Raises
    ------
    RuntimeError
        Where CuPy or the GPU cannot be used or a kernel does not compile, with the reason.
    """
    cupy = require_cupy()
    ordinal = cupy.cuda.runtime.getDevice() if device is None else int(device)
    for kernel in Kernel.registry:
        kernel.load(ordinal)


def reload_kernels() -> None:
    """Read the `.cu` files again, and compile them where they were loaded.

    For editing a kernel in a running program: later calls use the new one. Graphs that were captured before keep
    launching the old one, which is never unloaded.

    Raises
    ------
    RuntimeError
        Where a file cannot be read or compiled; every kernel stays as it was then.
    """
    with Kernel._lock:
        fresh = [kernel.rebuilt() for kernel in Kernel.registry]
        for kernel, (raw, loaded) in zip(Kernel.registry, fresh, strict=True):
            kernel.replace(raw, loaded)


def load_at_import() -> None:
    """Warm up the current device, unless told to wait; a failure shows again at the first call with a GPU array."""
    if os.environ.get("CUPY_SLOTS_JIT", "").lower() != "lazy":
        with contextlib.suppress(Exception):
            warmup()
