"""CuPy as on a machine with one GPU, where there is no driver: what needs a driver is replaced on import.

NVRTC, the search for it and for its headers, the cache on disk and all messages are CuPy's own. A launch does nothing.
"""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import cupy
import numpy as np
from cupy._core import core
from cupy.cuda import compiler, driver, runtime

ARCH = "90"
addresses = itertools.count(2**20, 2**12)


class Module:
    def load(self, cubin):
        assert cubin.startswith(b"\x7fELF")

    def _set_mapping(self, mapping):
        pass


class RawKernel:
    def __init__(self, code, name, options):
        self.code, self.name, self.options = code, name, options

    @functools.cached_property
    def kernel(self):
        compiler._compile_module_with_cache(self.code, core.assemble_cupy_compiler_options(self.options), arch=ARCH)
        return SimpleNamespace(ptr=1)


def array(values):
    """An array that has an address, and no memory there."""
    values = np.asarray(values)
    memory = cupy.cuda.UnownedMemory(next(addresses), values.nbytes, None, 0)
    return cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0))


cupy.RawKernel = RawKernel
cupy.cuda.Device = contextlib.nullcontext
cupy.cuda.get_current_stream = lambda device: SimpleNamespace(ptr=0)
compiler.function = SimpleNamespace(Module=Module)
compiler._get_arch_for_options_for_nvrtc = lambda arch: (f"-arch=sm_{arch}", "cubin")
runtime.getDeviceCount = lambda: 1
runtime.getDevice = lambda: 0
runtime.setDevice = lambda device: None
runtime.deviceGetAttribute = lambda attribute, device: 1
runtime.streamIsCapturing = lambda stream: False
driver.ctxGetCurrent = lambda: 1
driver.launchKernel = lambda *arguments: None
