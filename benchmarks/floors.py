"""The least that a call could cost: the driver's own time for its launch, an empty kernel, a fill of its output."""

from contextlib import contextmanager
from functools import partial

import cupy
import torch

from cupy_slots import _jit

THREADS = 256
PAD = -1

_SOURCE = r"""
extern "C" __global__ void empty() {}

extern "C" __global__ void fill(long long* out, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = -1;
}
"""


class _TorchStream:
    """torch's current stream, which changes while a graph is captured, as CuPy wants a stream."""

    @property
    def ptr(self) -> int:
        return torch.cuda.current_stream().cuda_stream


def empty_kernel():
    """A call of `cupy.RawKernel` for a kernel without arguments."""
    return partial(cupy.RawKernel(_SOURCE, "empty"), (1,), (1,), (), stream=_TorchStream())


def fills(out) -> dict:
    """Two ways to fill `out`; the floor is the faster one."""
    kernel = cupy.RawKernel(_SOURCE, "fill")
    arguments = (out.data_ptr(), out.numel())
    blocks = -(-out.numel() // THREADS)
    return {
        "fill kernel": partial(kernel, (blocks,), (THREADS,), arguments, stream=_TorchStream()),
        "torch fill_": partial(out.fill_, PAD),
    }


class _StandIn:
    """The driver, but for the launches."""

    def __init__(self, driver) -> None:
        self._driver = driver

    def __getattr__(self, name):
        return getattr(self._driver, name)


class NullDriver(_StandIn):
    """Launches nothing."""

    def launchKernel(self, *arguments) -> None:
        pass


class _Recorder(_StandIn):
    """Launches, and keeps the arguments."""

    def __init__(self, driver) -> None:
        super().__init__(driver)
        self.launches = []

    def launchKernel(self, *arguments) -> None:
        self.launches.append(partial(self._driver.launchKernel, *arguments))
        self.launches[-1]()


@contextmanager
def stand_in(driver):
    """Let the package's loaded kernels go through another driver for a while."""
    before = [kernel.loaded for kernel in _jit.Kernel.registry]
    for kernel in _jit.Kernel.registry:
        kernel.loaded = {device: loaded._replace(driver=driver) for device, loaded in kernel.loaded.items()}
    try:
        yield
    finally:
        for kernel, loaded in zip(_jit.Kernel.registry, before, strict=True):
            kernel.loaded = loaded


class BareLaunch:
    """The launch of a plan, as one call of the driver with its arguments ready."""

    def __init__(self, make_plan) -> None:
        make_plan()  # loads the kernel, if that is still to be done
        recorder = _Recorder(cupy.cuda.driver)
        with stand_in(recorder):
            self._plan = make_plan()  # kept, since the launch reads its memory
            self._plan.run()
        (self.launch,) = recorder.launches
