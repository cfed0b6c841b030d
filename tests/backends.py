"""The array libraries that every test body runs on: how each makes an array, lays it out and reads it back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

try:
    import torch
except ImportError as error:
    torch, NO_TORCH = None, f"no torch: {error}"
else:
    NO_TORCH = ""

try:
    import cupy

    gpus = cupy.cuda.runtime.getDeviceCount()
except Exception as error:  # a broken CuPy or driver raises whatever it likes
    cupy, NO_GPU = None, f"no GPU: {type(error).__name__}: {error}"
    NO_SECOND_GPU = NO_GPU
else:
    NO_GPU, NO_SECOND_GPU = "", "" if gpus > 1 else "no second GPU"

ARRAYS = ("slot_mapping", "query_start_loc", "seq_lens", "block_table", "positions")
STRIDES = ("plain", "step", "padded", "transposed", "reversed", "zero", "packed")
NOISE = 77  # what lies around the values, and in `out` before a call
GUARD = [NOISE] * 3


class Foreign:
    """An array of an unknown library: the CUDA array interface is all it shows."""

    def __init__(self, array):
        self._array = array

    @property
    def __cuda_array_interface__(self):
        return self._array.__cuda_array_interface__


def spread(values, strides):
    """An ndarray with the values among noise, and the function that cuts them out of it in any library."""
    if strides == "transposed" and values.ndim == 2:
        return values.T.copy(), lambda base: base.T
    if strides == "zero":
        return values[:1], lambda base: repeat(base, values.shape)
    if strides == "packed":  # one byte apart, so that nothing is aligned
        base = np.zeros(values.shape, [("tag", np.int8), ("value", values.dtype)])
        base["value"] = values
        return base, lambda base: base["value"]
    if strides == "padded":
        return np.pad(values, 3, constant_values=NOISE), lambda base: base[(slice(3, -3),) * values.ndim]
    key = (slice(None, None, {"step": 2, "reversed": -1}.get(strides, 1)),) * values.ndim
    base = np.full([2 * n if strides == "step" else n for n in values.shape], NOISE, values.dtype)
    base[key] = values
    return base, lambda base: base[key]


def repeat(base, shape):
    if hasattr(base, "expand"):  # torch's name for it
        return base.expand(shape)
    return (np if isinstance(base, np.ndarray) else cupy).broadcast_to(base, shape)


@dataclass(frozen=True)
class Backend:
    name: str
    why_not: str  # empty where the backend can run
    wrap: Callable  # a contiguous ndarray to the library's own array
    as_input: Callable = lambda array: array
    as_out: Callable = lambda array: array
    strides: tuple = STRIDES[:-1]

    def make(self, values, dtype=np.int64, strides="plain") -> Any:
        """An input; strides that the library cannot have become those of every second element."""
        base, cut = spread(np.asarray(values, dtype), strides if strides in self.strides else "step")
        return self.as_input(cut(self.wrap(base)))

    def make_inputs(self, arguments, layout=None) -> dict:
        """The arguments with their arrays made, by default in the published dtypes, plain."""
        layout = {"slot_mapping": (np.int64, "plain")} | (layout or {})
        return {
            name: self.make(value, *layout.get(name, (np.int32, "plain")))
            if name in ARRAYS and value is not None
            else value
            for name, value in arguments.items()
        }

    def make_out(self, values) -> tuple:
        """An `out` that holds the values, and the memory with the noise around it."""
        memory = self.wrap(np.pad(np.asarray(values, np.int64), len(GUARD), constant_values=NOISE))
        return self.as_out(memory[len(GUARD) : -len(GUARD)]), memory


def read_only(array):
    array.flags.writeable = False
    return array


def torch_cpu(array):
    return torch.from_numpy(array.copy())


def torch_cuda(array):
    return torch_cpu(array).cuda()


def cupy_array(array):
    return cupy.asarray(array)


def torch_where_int32(to_torch, to_other):
    return lambda array: to_torch(array) if array.dtype == np.int32 else to_other(array)


TORCH_STRIDES = ("plain", "step", "padded", "transposed", "zero")  # torch has no negative ones

CPU_BACKENDS = [
    Backend("numpy", "", np.copy, strides=STRIDES),
    Backend("numpy-readonly", "", np.copy, as_input=read_only, strides=STRIDES),
    Backend("lists", "", np.copy, as_input=np.ndarray.tolist, strides=("plain",)),
    Backend("torch", NO_TORCH, torch_cpu, strides=TORCH_STRIDES),
    Backend("numpy-and-torch", NO_TORCH, torch_where_int32(torch_cpu, np.copy), strides=TORCH_STRIDES),
]
GPU_BACKENDS = [
    Backend("torch-cuda", NO_TORCH or NO_GPU, torch_cuda, strides=TORCH_STRIDES),
    Backend("cupy", NO_GPU, cupy_array),
    Backend("cuda-array-interface", NO_GPU, cupy_array, as_input=Foreign, as_out=Foreign),
    Backend("cupy-and-torch", NO_TORCH or NO_GPU, torch_where_int32(torch_cuda, cupy_array), strides=TORCH_STRIDES),
]


def parametrize(backends):
    skip = pytest.mark.skipif
    return pytest.mark.parametrize(
        "backend",
        [pytest.param(b, id=b.name, marks=skip(bool(b.why_not), reason=b.why_not or "-")) for b in backends],
    )


every_backend = parametrize(CPU_BACKENDS + GPU_BACKENDS)
array_backends = parametrize([b for b in CPU_BACKENDS + GPU_BACKENDS if b.name != "lists"])
cpu_backends = parametrize(CPU_BACKENDS)
gpu_backends = parametrize(GPU_BACKENDS)


def to_list(array):
    if hasattr(array, "__cuda_array_interface__"):
        return cupy.asarray(array).get().tolist()
    return np.asarray(array).tolist()


def address(array):
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    if hasattr(array, "__cuda_array_interface__"):
        return array.__cuda_array_interface__["data"][0]
    return array.ctypes.data


def result_type(followed):
    """The type of a new result that follows this array: its own, where its library can make one."""
    if isinstance(followed, Foreign):
        return cupy.ndarray
    return np.ndarray if isinstance(followed, list) else type(followed)
