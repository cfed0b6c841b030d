"""What an array is, whatever library made it: where it lies, how it is laid out, and how to make another.

One object a library, found by the array's type. Nothing here imports torch or CuPy unless an array of theirs has
come in.

Each array is looked at once a call. What was seen is a plain tuple, since making an object with named fields costs as
much as all the checks made on it:

    Vector = (host, pointer, length, stride, itemsize, device, low, high)
    Table = (host, pointer, rows, columns, row_stride, column_stride, itemsize, device, low, high)

host: the memory as a NumPy array where the CPU can read it, else None. Strides are in bytes. itemsize: 4 or 8.
device: a GPU's ordinal, or `CPU`. low, high: addresses of the first byte and of the one behind the last.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from . import _jit

CPU = -1
Vector = tuple[Any, int, int, int, int, int, int, int]
Table = tuple[Any, int, int, int, int, int, int, int, int, int]


def device_name(device: int) -> str:
    return "cpu" if device == CPU else f"cuda:{device}"


def _raise_dtype(name: str, dtype: object) -> NoReturn:
    raise TypeError(f"{name} must be an int32 or int64 array, was {str(dtype).removeprefix('torch.')}")


def _raise_shape(name: str, shape: tuple[int, ...], least: int, form: str) -> NoReturn:
    raise ValueError(f"{name} must have shape {form} with n >= {least}, was {list(shape)}")


def _raise_alignment(name: str, pointer: int, strides: tuple[int, ...]) -> NoReturn:
    raise ValueError(f"{name} must be aligned to its items, was at {pointer:#x} with strides {strides}")


def _span(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First byte, and the one behind the last, of an array that may be empty or run backwards."""
    low = high = pointer
    for length, stride in zip(shape, strides, strict=True):
        if length == 0:
            return pointer, pointer
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + itemsize


class _NumPy:
    array_type = None

    @staticmethod
    def _look(name: str, array: np.ndarray) -> tuple[np.ndarray, int, int]:
        dtype = array.dtype
        if dtype.kind != "i" or dtype.itemsize < 4:
            _raise_dtype(name, dtype)
        host = np.asarray(array)  # a subclass may index in its own way
        return host, host.__array_interface__["data"][0], dtype.itemsize

    def vector(self, name: str, array: np.ndarray, least: int) -> Vector:
        host, pointer, itemsize = self._look(name, array)
        shape, strides = host.shape, host.strides
        if len(shape) != 1 or shape[0] < least:
            _raise_shape(name, shape, least, "[n]")
        return host, pointer, *shape, *strides, itemsize, CPU, *_span(pointer, shape, strides, itemsize)

    def table(self, name: str, array: np.ndarray, least: int) -> Table:
        host, pointer, itemsize = self._look(name, array)
        shape, strides = host.shape, host.strides
        if len(shape) != 2 or shape[0] < least:
            _raise_shape(name, shape, least, "[n, columns]")
        return host, pointer, *shape, *strides, itemsize, CPU, *_span(pointer, shape, strides, itemsize)

    @staticmethod
    def check_writable(name: str, array: np.ndarray) -> None:
        if not array.flags.writeable:
            raise ValueError(f"{name} must be writable, was read-only")

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
        self.array_type = torch.Tensor
        self.address_of = torch.Tensor.data_ptr

    def vector(self, name: str, tensor: Any, least: int) -> Vector:
        try:
            (length,), (stride,) = tensor.shape, tensor.stride()
            itemsize = self._itemsizes[tensor.dtype]
            pointer = tensor.data_ptr()
        except (KeyError, ValueError, RuntimeError) as reason:
            self._raise(name, tensor, 1, "[n]", least, reason)
        if length < least:
            _raise_shape(name, tensor.shape, least, "[n]")
        stride *= itemsize
        device = tensor.get_device()
        host = self._host(name, tensor) if device < 0 else None
        # torch has no negative strides.
        return host, pointer, length, stride, itemsize, device, pointer, pointer + (length - 1) * stride + itemsize

    def table(self, name: str, tensor: Any, least: int) -> Table:
        try:
            (rows, columns), (row_stride, column_stride) = tensor.shape, tensor.stride()
            itemsize = self._itemsizes[tensor.dtype]
            pointer = tensor.data_ptr()
        except (KeyError, ValueError, RuntimeError) as reason:
            self._raise(name, tensor, 2, "[n, columns]", least, reason)
        if rows < least:
            _raise_shape(name, tensor.shape, least, "[n, columns]")
        row_stride *= itemsize
        column_stride *= itemsize
        device = tensor.get_device()
        host = self._host(name, tensor) if device < 0 else None
        high = pointer + (rows - 1) * row_stride + (columns - 1) * column_stride + itemsize
        return host, pointer, rows, columns, row_stride, column_stride, itemsize, device, pointer, high

    def _raise(self, name: str, tensor: Any, ndim: int, form: str, least: int, reason: Exception) -> NoReturn:
        if tensor.dtype not in self._itemsizes:
            _raise_dtype(name, tensor.dtype)
        if tensor.ndim != ndim:
            _raise_shape(name, tensor.shape, least, form)
        # Sparse, fake and other tensors without strided memory of their own.
        raise TypeError(f"{name} must be a tensor with strided memory: {reason}") from reason

    @staticmethod
    def _host(name: str, tensor: Any) -> np.ndarray:
        if tensor.device.type != "cpu":
            raise TypeError(f"{name} must be on the CPU or a CUDA device, was on {tensor.device}")
        host: np.ndarray = tensor.detach().numpy()
        return host

    @staticmethod
    def check_writable(name: str, tensor: Any) -> None:
        """Every tensor is."""

    def empty(self, length: int, like: Any) -> Any:
        return self._torch.empty(length, dtype=self._torch.int64, device=like.device)

    def same_layout(self, tensors: Sequence[Any]) -> Callable[..., bool]:
        """A test of as many tensors: whether each has the dtype, shape, strides and device of its counterpart here."""
        guard = _tensor_guard(self._torch)
        if guard:
            same: Callable[..., bool] = guard(*tensors).check
            if same(*tensors):  # not where one comes twice
                return same
        layouts = self._layouts(*tensors)
        return lambda *others: self._layouts(*others) == layouts

    @staticmethod
    def _layouts(*tensors: Any) -> list[Any] | None:
        try:
            return [(t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() % 8) for t in tensors]
        except RuntimeError:  # a tensor without strided memory of its own
            return None

    def prefix(self, tensor: Any, length: int) -> Any:
        """`tensor[:length]` of a contiguous tensor, in three quarters of the time."""
        return self._torch.as_strided(tensor, (length,), (1,))

    def stream(self, like: Any, device: int) -> int:
        handle: int = self._torch._C._cuda_getCurrentRawStream(device)
        return handle


@functools.cache
def _tensor_guard(torch: Any) -> Any:
    """How `torch.compile` recognises tensors, which is one call in C for all of them; None where it would not do here.

    It is no public part of torch, so each difference that matters is tried before any call relies on it.
    """
    try:
        guard = functools.partial(
            torch._C._dynamo.guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        vector = torch.zeros(4, dtype=torch.int64, device="cpu")
        others = vector.int(), vector[:3], torch.cat([vector, vector])[::2], vector[None], vector.to("meta")
        parameter = torch.nn.Parameter(vector, requires_grad=False)
        same = guard(vector).check
        return guard if same(vector.clone()) and not any(map(same, (*others, parameter))) else None
    except Exception:
        return None


class _CuPy:
    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.array_type = cupy.ndarray
        self.address_of = attrgetter("data.ptr")

    @staticmethod
    def vector(name: str, array: Any, least: int) -> Vector:
        dtype, shape, memory = array.dtype, array.shape, array.data
        itemsize, pointer = dtype.itemsize, memory.ptr
        if dtype.kind != "i" or itemsize < 4:
            _raise_dtype(name, dtype)
        if len(shape) != 1 or shape[0] < least:
            _raise_shape(name, shape, least, "[n]")
        (length,), (stride,) = shape, array.strides
        if (pointer | stride) % itemsize:
            _raise_alignment(name, pointer, (stride,))
        low, high = pointer, pointer + (length - 1) * stride + itemsize
        if stride < 0:
            low, high = _span(pointer, shape, (stride,), itemsize)
        return None, pointer, length, stride, itemsize, memory.device_id, low, high

    @staticmethod
    def table(name: str, array: Any, least: int) -> Table:
        dtype, shape, memory = array.dtype, array.shape, array.data
        itemsize, pointer = dtype.itemsize, memory.ptr
        if dtype.kind != "i" or itemsize < 4:
            _raise_dtype(name, dtype)
        if len(shape) != 2 or shape[0] < least:
            _raise_shape(name, shape, least, "[n, columns]")
        (rows, columns), (row_stride, column_stride) = shape, array.strides
        if (pointer | row_stride | column_stride) % itemsize:
            _raise_alignment(name, pointer, (row_stride, column_stride))
        low, high = pointer, pointer + (rows - 1) * row_stride + (columns - 1) * column_stride + itemsize
        if row_stride < 0 or column_stride < 0:
            low, high = _span(pointer, shape, (row_stride, column_stride), itemsize)
        return None, pointer, rows, columns, row_stride, column_stride, itemsize, memory.device_id, low, high

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        """Every CuPy array is."""

    def empty(self, length: int, like: Any) -> Any:
        with like.device:
            return self._cupy.empty(length, np.int64)

    def same_layout(self, arrays: Sequence[Any]) -> Callable[..., bool]:
        """As for torch."""
        layouts = self._layouts(*arrays)
        return lambda *others: self._layouts(*others) == layouts

    @staticmethod
    def _layouts(*arrays: Any) -> list[Any]:
        return [(a.dtype, a.shape, a.strides, (memory := a.data).device_id, memory.ptr % 8) for a in arrays]

    @staticmethod
    def prefix(array: Any, length: int) -> Any:
        return array[:length]

    def stream(self, like: Any, device: int) -> int:
        handle: int = self._cupy.cuda.get_current_stream(device).ptr
        return handle


class _Other:
    """Any other object: its `__cuda_array_interface__`, with CuPy arrays as results, or else what NumPy makes of it."""

    array_type = None

    def vector(self, name: str, array: Any, least: int) -> Vector:
        if hasattr(array, "__cuda_array_interface__"):
            return _CuPy.vector(name, self._view(name, array), least)
        return NUMPY.vector(name, _from_host(name, array), least)

    def table(self, name: str, array: Any, least: int) -> Table:
        if hasattr(array, "__cuda_array_interface__"):
            return _CuPy.table(name, self._view(name, array), least)
        return NUMPY.table(name, _from_host(name, array), least)

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

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise TypeError(f"{name} must be an array that can be written in place, was {type(array).__name__}")
        if interface["data"][1]:
            raise ValueError(f"{name} must be writable, was read-only")

    def empty(self, length: int, like: Any) -> Any:
        if not hasattr(like, "__cuda_array_interface__"):
            return NUMPY.empty(length, like)
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


class _Libraries(dict[type, Any]):
    """The library of an array, by its type; each type is looked for once."""

    def __missing__(self, kind: type) -> Any:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if issubclass(kind, np.ndarray):
            self[kind] = NUMPY
        elif issubclass(kind, getattr(torch, "Tensor", ())):  # an import that failed leaves less than a module
            self[kind] = _Torch(torch)
        elif issubclass(kind, getattr(cupy, "ndarray", ())):
            self[kind] = _CuPy(cupy)
        else:
            self[kind] = _Other()
        return self[kind]


NUMPY = _NumPy()
LIBRARIES = _Libraries()


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


def is_contiguous_int64(vector: Vector) -> bool:
    _, _, length, stride, itemsize, _, _, _ = vector
    return itemsize == 8 and (stride == 8 or length <= 1)


def overlap(out: Vector, other: Vector | Table) -> bool:
    """Whether a contiguous vector shares a byte with another array of its device."""
    if other[-2] >= out[-1] or other[-1] <= out[-2]:
        return False
    # Strided arrays may interleave without meeting: NumPy solves that from the layouts alone.
    return np.shares_memory(_shadow(out), _shadow(other))


class _Shadow:
    def __init__(self, array: Vector | Table) -> None:
        shape, strides = (array[2:3], array[3:4]) if len(array) == 8 else (array[2:4], array[4:6])
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"i{array[-4]}",
            "data": (array[1], True),
            "shape": shape,
            "strides": strides,
        }


def _shadow(array: Vector | Table) -> np.ndarray:
    """A NumPy array with the same addresses, which nobody reads."""
    return np.asarray(_Shadow(array))
