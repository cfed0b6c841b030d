"""GPUs made of fibres: what the package uses of CuPy, with `kernels/*.cu` built by g++ under sanitizers.

Not all sanitizers can share a build, so there are two kinds: "memory" has AddressSanitizer, whose library must be
preloaded, and UndefinedBehaviorSanitizer; "races" has the emulator's own check of shared memory (emulator.cpp), and
counts how often each line runs.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

EMULATOR = Path(__file__).parent / "emulator"
COMPILE = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "races": ["-fsanitize=thread", "--coverage"],
}
LINK = {
    "memory": COMPILE["memory"],
    "races": ["--coverage"],  # the emulator has the functions that -fsanitize=thread calls
}
MULTIPROCESSORS = [2, 16]  # of each GPU: a block of the one gets several tiles where a block of the other gets one
ORDERS = range(4)  # of threads and blocks: ascending, descending, two random ones


def compile_cpp(*arguments, source=None):
    command = ["g++", "-std=c++17", "-O1", "-g1", "-fPIC", "-fno-exceptions", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, input=source, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def why_not():
    """Why there can be no emulated GPU here, or nothing."""
    if sys.platform != "linux":
        return "no emulated GPU: it takes an ELF object's thread-local storage for shared memory"
    if shutil.which("g++") is None:
        return "no compiler: the emulated GPU needs g++"
    with tempfile.TemporaryDirectory() as directory:
        try:
            compile_cpp(*LINK["memory"], "-shared", "-x", "c++", "-", "-o", f"{directory}/empty.so", source="")
        except RuntimeError as reason:
            return f"no sanitizers: {reason}"
    return ""


def build(source, name, checks, directory):
    """The emulator's `launch` of one kernel."""
    stem = tempfile.mkdtemp(dir=directory) + f"/{name}"
    compile_cpp(
        *COMPILE[checks],
        *("-fno-extern-tls-init", "-fno-gnu-unique"),  # shared memory needs no set-up, and variants share none
        *("-include", EMULATOR / "cuda_builtins.h", "-c", "-x", "c++", "-", "-o", f"{stem}.o"),
        source=f"{source}\nEMULATED_KERNEL({name})\n",
    )
    if not (directory / "emulator.o").exists():
        compile_cpp("-c", EMULATOR / "emulator.cpp", "-o", directory / "emulator.o")
    compile_cpp(*LINK[checks], "-shared", f"{stem}.o", directory / "emulator.o", "-o", f"{stem}.so")
    launch = ctypes.CDLL(f"{stem}.so").launch
    launch.argtypes = [*[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_uint]
    launch.restype = ctypes.c_char_p
    return launch


class Device(contextlib.AbstractContextManager):
    current = 0

    def __init__(self, ordinal):
        self._ordinal, self._outer = ordinal, []

    def __enter__(self):
        self._outer.append(Device.current)
        Device.current = self._ordinal

    def __exit__(self, *error):
        Device.current = self._outer.pop()


class Driver:
    """A context is its device's ordinal, and a function is the emulator's `launch` of it."""

    order = 0
    launches = 0

    def ctxGetCurrent(self):
        return Device.current

    def ctxSetCurrent(self, context):
        Device.current = context

    def launchKernel(self, launch, grid_x, grid_y, grid_z, x, y, z, shared, stream, arguments, extra):
        self.launches += 1
        failure = launch(grid_x, grid_y, grid_z, x, y, z, shared, arguments, self.order)
        assert failure is None, failure.decode()


DRIVER = Driver()


class Array:
    """An array of an emulated GPU."""

    def __init__(self, host, device=0):
        self.host, self.dtype, self.shape, self.strides = host, host.dtype, host.shape, host.strides
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device)
        self.device = Device(device)

    def __getitem__(self, key):
        return Array(self.host[key], self.data.device_id)


def to_gpu(array, device):
    """A copy with the same strides, in memory that begins at its first byte and ends with its last.

    On GPU 1 it begins one item earlier, so that there no array is aligned to more than its items.
    """
    if array.size == 0:
        return Array(array.copy(), device)
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    first = device * array.itemsize - sum(min(step, 0) for step in reach)
    size = first + sum(max(step, 0) for step in reach) + array.itemsize
    copy = np.ndarray(array.shape, array.dtype, np.full(size, 77, np.uint8), first, array.strides)
    copy[...] = array
    return Array(copy, device)


def emulated_cupy(checks, directory):
    """What the package uses of the module `cupy`; kernels are built in the directory."""

    def RawKernel(source, name, options):
        return SimpleNamespace(kernel=SimpleNamespace(ptr=build(source, name, checks, directory)))

    runtime = SimpleNamespace(
        cudaDevAttrMultiProcessorCount=None,
        deviceGetAttribute=lambda attribute, device: MULTIPROCESSORS[device],
        getDevice=lambda: Device.current,
        getDeviceCount=lambda: len(MULTIPROCESSORS),
        setDevice=DRIVER.ctxSetCurrent,
        streamIsCapturing=lambda stream: False,
    )
    cuda = SimpleNamespace(
        Device=Device,
        driver=DRIVER,
        get_current_stream=lambda device: SimpleNamespace(ptr=0),
        runtime=runtime,
    )
    return SimpleNamespace(
        RawKernel=RawKernel,
        cuda=cuda,
        empty=lambda length, dtype: to_gpu(np.empty(length, dtype), Device.current),
        ndarray=Array,
    )
