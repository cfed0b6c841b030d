"""What an array is, whatever library made it: where it lies, how it is laid out, and how to make another.

One object a library (`NUMPY`, `_Torch`, `_CuPy`, `_ForeignGPU`), found by the array's exact type. Nothing here imports
torch or CuPy unless an array of theirs has come in.

Each array is looked at once a call. What was seen is a plain tuple, since making an object with named fields costs as
much as all the checks made on it:

    Vector = (host, pointer, length, stride, itemsize, device)
    Table = (host, pointer, rows, columns, row_stride, column_stride, itemsize, device)

host: the memory as a NumPy array where the CPU can read it, else None. Strides are in bytes. itemsize: 4 or 8.
device: a GPU's ordinal, or `CPU`.
"""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any, NoReturn

import numpy as np

from . import _jit

CPU = -1
Vector = tuple[Any, int, int, int, int, int]
Table = tuple[Any, int, int, int, int, int, int, int]


def device_name(device: int) -> str:
    return "cpu" if device == CPU else f"cuda:{device}"


def _raise_dtype(name: str, dtype: object) -> NoReturn:
    raise TypeError(f"{name} must be an int32 or int64 array, was {str(dtype).removeprefix('torch.')}")


def _raise_shape(name: str, shape: tuple[int, ...], least: int, dimensions: str) -> NoReturn:
    raise ValueError(f"{name} must have shape {dimensions} with n >= {least}, was {list(shape)}")


def _raise_alignment(name: str, pointer: int, strides: tuple[int, ...], itemsize: int) -> NoReturn:
    raise ValueError(f"{name} must be aligned to its {itemsize}-byte items, was at {pointer:#x} with strides {strides}")


class _NumPy:
    @staticmethod
    def _look(name: str, array: np.ndarray) -> tuple[np.ndarray, int, int]:
        dtype = array.dtype
        if dtype.kind != "i" or dtype.itemsize < 4:
            _raise_dtype(name, dtype)
        host = np.asarray(array)  # a subclass may index in its own way
        return host, host.__array_interface__["data"][0], dtype.itemsize

    def vector(self, name: str, array: np.ndarray, least: int) -> Vector:
        host, pointer, itemsize = self._look(name, array)
        shape = host.shape
        if len(shape) != 1 or shape[0] < least:
            _raise_shape(name, shape, least, "[n]")
        return host, pointer, shape[0], host.strides[0], itemsize, CPU

    def table(self, name: str, array: np.ndarray, least: int) -> Table:
        host, pointer, itemsize = self._look(name, array)
        shape = host.shape
        if len(shape) != 2 or shape[0] < least:
            _raise_shape(name, shape, least, "[n, columns]")
        return host, pointer, *shape, *host.strides, itemsize, CPU

    @staticmethod
    def writable(array: np.ndarray) -> bool:
        return array.flags.writeable

    @staticmethod
    def empty(length: int, like: Any) -> np.ndarray:
        return np.empty(length, np.int64)

    @staticmethod
    def prefix(array: np.ndarray, length: int) -> np.ndarray:
        return array[:length]


class _Torch:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._itemsizes = {torch.int32: 4, torch.int64: 8}

    def vector(self, name: str, tensor: Any, least: int) -> Vector:
        try:
            (length,), (stride,) = tensor.shape, tensor.stride()
            itemsize = self._itemsizes[tensor.dtype]
            pointer = tensor.data_ptr()
        except (KeyError, ValueError, RuntimeError) as reason:
            self._raise(name, tensor, 1, "[n]", least, reason)
        if length < least:
            _raise_shape(name, tensor.shape, least, "[n]")
        device = tensor.get_device()
        host = self._host(name, tensor) if device < 0 else None
        return host, pointer, length, stride * itemsize, itemsize, device

    def table(self, name: str, tensor: Any, least: int) -> Table:
        try:
            (rows, columns), (row_stride, column_stride) = tensor.shape, tensor.stride()
            itemsize = self._itemsizes[tensor.dtype]
            pointer = tensor.data_ptr()
        except (KeyError, ValueError, RuntimeError) as reason:
            self._raise(name, tensor, 2, "[n, columns]", least, reason)
        if rows < least:
            _raise_shape(name, tensor.shape, least, "[n, columns]")
        device = tensor.get_device()
        host = self._host(name, tensor) if device < 0 else None
        return host, pointer, rows, columns, row_stride * itemsize, column_stride * itemsize, itemsize, device

    def _raise(self, name: str, tensor: Any, ndim: int, dimensions: str, least: int, reason: Exception) -> NoReturn:
        if tensor.dtype not in self._itemsizes:
            _raise_dtype(name, tensor.dtype)
        if tensor.ndim != ndim:
            _raise_shape(name, tensor.shape, least, dimensions)
        raise TypeError(f"{name} must be a tensor with strided memory: {reason}") from reason

    @staticmethod
    def _host(name: str, tensor: Any) -> np.ndarray:
        if tensor.device.type != "cpu":
            raise TypeError(f"{name} must be on the CPU or a CUDA device, was on {tensor.device}")
        host: np.ndarray = tensor.detach().numpy()
        return host

    @staticmethod
    def writable(tensor: Any) -> bool:
        return True

    def empty(self, length: int, like: Any) -> Any:
        return self._torch.empty(length, dtype=self._torch.int64, device=like.device)

    @staticmethod
    def prefix(tensor: Any, length: int) -> Any:
        return tensor[:length]

    def stream(self, like: Any, device: int) -> int:
        handle: int = self._torch._C._cuda_getCurrentRawStream(device)
        return handle


class _CuPy:
    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def vector(self, name: str, array: Any, least: int) -> Vector:
        dtype, shape, memory = array.dtype, array.shape, array.data
        itemsize = dtype.itemsize
        if dtype.kind != "i" or itemsize < 4:
            _raise_dtype(name, dtype)
        if len(shape) != 1 or shape[0] < least:
            _raise_shape(name, shape, least, "[n]")
        (stride,), pointer = array.strides, memory.ptr
        if (pointer | stride) % itemsize:
            _raise_alignment(name, pointer, (stride,), itemsize)
        return None, pointer, shape[0], stride, itemsize, memory.device_id

    def table(self, name: str, array: Any, least: int) -> Table:
        dtype, shape, memory = array.dtype, array.shape, array.data
        itemsize = dtype.itemsize
        if dtype.kind != "i" or itemsize < 4:
            _raise_dtype(name, dtype)
        if len(shape) != 2 or shape[0] < least:
            _raise_shape(name, shape, least, "[n, columns]")
        (row_stride, column_stride), pointer = array.strides, memory.ptr
        if (pointer | row_stride | column_stride) % itemsize:
            _raise_alignment(name, pointer, (row_stride, column_stride), itemsize)
        return None, pointer, *shape, row_stride, column_stride, itemsize, memory.device_id

    @staticmethod
    def writable(array: Any) -> bool:
        return True

    def empty(self, length: int, like: Any) -> Any:
        with like.device:
            return self._cupy.empty(length, np.int64)

    @staticmethod
    def prefix(array: Any, length: int) -> Any:
        return array[:length]

    def stream(self, like: Any, device: int) -> int:
        handle: int = self._cupy.cuda.get_current_stream(device).ptr
        return handle


class _ForeignGPU:
    """Any other object with `__cuda_array_interface__`: results are CuPy arrays, on the stream that it names."""

    @staticmethod
    def _view(name: str, array: Any) -> Any:
        """The object's memory as a CuPy array; unlike `cupy.asarray`, without waiting for its stream."""
        interface = array.__cuda_array_interface__
        dtype = np.dtype(interface["typestr"])
        if dtype.kind != "i" or dtype.itemsize < 4 or not dtype.isnative:
            _raise_dtype(name, dtype)
        if interface.get("mask") is not None:
            raise TypeError(f"{name} must not be a masked array")
        cupy = _jit.require_cupy()
        runtime, shape, pointer = cupy.cuda.runtime, tuple(interface["shape"]), interface["data"][0]
        device = runtime.pointerGetAttributes(pointer).device if pointer else runtime.getDevice()
        memory = cupy.cuda.UnownedMemory(pointer, dtype.itemsize * math.prod(shape), array, device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), interface.get("strides"))

    def vector(self, name: str, array: Any, least: int) -> Vector:
        return _CuPy(_jit.require_cupy()).vector(name, self._view(name, array), least)

    def table(self, name: str, array: Any, least: int) -> Table:
        return _CuPy(_jit.require_cupy()).table(name, self._view(name, array), least)

    @staticmethod
    def writable(array: Any) -> bool:
        return not array.__cuda_array_interface__["data"][1]

    def empty(self, length: int, like: Any) -> Any:
        cupy, device = _jit.require_cupy(), self._view("query_start_loc", like).device
        # CuPy's pool hands out memory in the order of one stream, so it must be the stream of the launch.
        with device, cupy.cuda.Stream.from_external(_StreamHandle(self.stream(like, device.id))):
            return cupy.empty(length, np.int64)

    def prefix(self, array: Any, length: int) -> Any:
        return self._view("out", array)[:length]

    @staticmethod
    def stream(like: Any, device: int) -> int:
        return like.__cuda_array_interface__.get("stream") or 0


class _StreamHandle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


NUMPY = _NumPy()
LIBRARIES: dict[type, Any] = {np.ndarray: NUMPY}


def library_of(array: Any) -> Any:
    """The library of an array that has been adopted; NumPy's of all that was converted."""
    return LIBRARIES.get(type(array), NUMPY)


def adopt(name: str, array: Any) -> Any:
    """`array`, with its type entered in `LIBRARIES`; or a NumPy array made from it, where it is of no library."""
    library = _find_library(array)
    if library is None:
        return _from_host(name, array)
    LIBRARIES[type(array)] = library
    return array


def _find_library(array: Any) -> Any:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if isinstance(array, np.ndarray):
        return NUMPY
    if torch is not None and isinstance(array, torch.Tensor):
        return _Torch(torch)
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return _CuPy(cupy)
    if hasattr(array, "__cuda_array_interface__"):
        return _ForeignGPU()
    return None


def _from_host(name: str, array: Any) -> np.ndarray:
    if array is None or isinstance(array, (str, bytes, numbers.Number)):
        raise TypeError(f"{name} must be an array, was {array!r}")
    try:
        converted = np.asarray(array)
    except (TypeError, ValueError) as reason:
        raise TypeError(f"{name} must be an array or a nested list of integers: {reason}") from reason
    if converted.dtype == object:
        raise TypeError(f"{name} must be an array or a nested list of integers, was {type(array).__name__}")
    # NumPy reads an empty list as float64.
    return converted.astype(np.int64) if isinstance(array, (list, tuple)) and converted.size == 0 else converted


def overlap(out: Vector, other: Vector | Table) -> bool:
    """Whether a contiguous vector shares a byte with another array of its device."""
    _, first, length, _, itemsize, _ = out
    low, high = _extent(other)
    if length == 0 or low >= high or high <= first or first + length * itemsize <= low:
        return False
    # Strided arrays may interleave without meeting: NumPy solves that from the layouts alone.
    return np.shares_memory(_shadow(out), _shadow(other))


def _extent(array: Vector | Table) -> tuple[int, int]:
    """Address of the first byte, and of the one behind the last."""
    shape, strides = _shape_and_strides(array)
    low = high = array[1]
    for length, stride in zip(shape, strides, strict=True):
        if length == 0:
            return low, low
        low, high = (low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride))
    return low, high + array[-2]


def _shape_and_strides(array: Vector | Table) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((array[2],), (array[3],)) if len(array) == 6 else (array[2:4], array[4:6])


class _Shadow:
    def __init__(self, array: Vector | Table) -> None:
        shape, strides = _shape_and_strides(array)
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"i{array[-2]}",
            "data": (array[1], True),
            "shape": shape,
            "strides": strides,
        }


def _shadow(array: Vector | Table) -> np.ndarray:
    """A NumPy array with the same addresses, which nobody reads."""
    return np.asarray(_Shadow(array))
