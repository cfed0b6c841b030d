"""The second call of a form: what the first one's checks found, and its launch but for the addresses.

A serving loop calls with new arrays of the same shapes, strides, dtypes and devices over and over. All that the checks
can find follows from those, from the numbers, and from the addresses. So the first call of a form leaves its packed
arguments here; a later one puts its addresses in, looks whether any two arrays now overlap, and launches. That takes
two thirds of the host time of checking anew. Only calls that went through the checks leave a form, and whatever is out
of the ordinary (several libraries, strides that run backwards, an array that an `out` overlaps) never does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import _gpu
from ._arrays import LIBRARIES, Table, Vector
from ._jit import Kernel
from .context_parallel import Sharding

_MOST_FORMS = 4096
# Arrays count as query_start_loc, seq_lens, positions, slot_mapping, then each group's block_table, slot_mapping, out.
_FIRST_OUT = 6


def _look_torch(arrays: Sequence[Any], form: list[Any]) -> list[int] | None:
    kind = type(arrays[0])
    addresses = []
    for tensor in arrays:
        if type(tensor) is kind:
            addresses.append(tensor.data_ptr())
            form += tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()
        elif tensor is None:
            addresses.append(0)
            form.append(None)
        else:
            return None
    return addresses


def _look_cupy(arrays: Sequence[Any], form: list[Any]) -> list[int] | None:
    kind = type(arrays[0])
    addresses = []
    for array in arrays:
        if type(array) is kind:
            memory = array.data
            address = memory.ptr
            addresses.append(address)
            form += array.dtype, array.shape, array.strides, memory.device_id, address % 8
        elif array is None:
            addresses.append(0)
            form.append(None)
        else:
            return None
    return addresses


class _Lookers(dict[type, Any]):
    """By the type of a call's `query_start_loc`: how to look at its arrays. None for those that leave no form."""

    def __missing__(self, kind: type) -> Any:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        self[kind] = None
        if kind is getattr(torch, "Tensor", ()):
            self[kind] = _look_torch
        elif kind is getattr(cupy, "ndarray", ()):
            self[kind] = _look_cupy
        return self[kind]


class Form:
    """A launch without its addresses."""

    def __init__(
        self,
        num_tokens: int,
        arrays: Sequence[Vector | Table | None],
        batch: Sequence[Vector | None],
        groups: Sequence[_gpu.Group],
        prepared: _gpu.Launch,
    ) -> None:
        self._num_tokens = num_tokens
        self._launch = prepared[:5]
        self._pack, self._fields, self._places = _gpu.blank_addresses(prepared, [g[0] is batch[3] for g in groups])
        self._device = groups[0][5][5]
        self._kernel = next(k for k in Kernel.registry if k.loaded.get(self._device) is prepared[0])
        spans = [(i, array[-1] - array[-2]) for i, array in enumerate(arrays) if array is not None]
        outs = range(_FIRST_OUT, len(arrays), 3)
        self._apart = [(out, size, [span for span in spans if span[0] != out]) for out, size in spans if out in outs]
        self._longer = [i for i, group in enumerate(groups) if group[5][2] != num_tokens]

    def run(self, query_start_loc: Any, results: list[Any], addresses: list[int]) -> bool:
        """Launch, and make the `results` out of the `out` arrays; or False where the addresses ask for the checks."""
        library = LIBRARIES[type(query_start_loc)]
        for i, out in enumerate(results):
            if out is None:
                results[i] = library.empty(self._num_tokens, query_start_loc)
                addresses[_FIRST_OUT + 3 * i] = library.address(results[i])
        for out, size, others in self._apart:
            low = addresses[out]
            high = low + size
            for i, reach in others:
                address = addresses[i]
                if address < high and address + reach > low:
                    return False
        if self._kernel.loaded.get(self._device) is not self._launch[0]:
            return False  # reloaded since
        fields = self._fields.copy()
        for place, i in self._places:
            fields[place] = addresses[i]
        arguments = _gpu.take_arguments()
        self._pack(arguments.block, 0, *fields)
        _gpu.launch((*self._launch, arguments), library.stream(query_start_loc, self._device))
        _gpu.give_back(arguments)
        for i in self._longer:
            results[i] = library.prefix(results[i], self._num_tokens)
        return True


_LOOKERS = _Lookers()
_forms: dict[tuple[Any, ...], Form] = {}


def recall(
    arrays: Sequence[Any], numbers: Sequence[Any], sharding: Sharding
) -> tuple[tuple[Any, ...] | None, list[int], Form | None]:
    """The key of a call's form, its addresses, and the form if there is one; the key is None where none can be."""
    looker = _LOOKERS[type(arrays[0])]
    if looker is None:
        return None, [], None
    form = [sharding, *numbers]
    for number in numbers:
        if type(number) is not int:  # True == 1
            return None, [], None
    try:
        addresses = looker(arrays, form)
    except RuntimeError:  # a tensor without memory
        addresses = None
    if addresses is None:
        return None, [], None
    key = tuple(form)
    return key, addresses, _forms.get(key)


def remember(
    key: tuple[Any, ...],
    num_tokens: int,
    batch: Sequence[Vector | None],
    groups: Sequence[_gpu.Group],
    prepared: Sequence[_gpu.Launch],
) -> None:
    """Keep the form of a call that has been checked."""
    arrays: list[Vector | Table | None] = [*batch]
    for slots, pages, _, _, _, out in groups:
        arrays += pages, None if slots is batch[3] else slots, out
    forwards = all(array is None or array[1] == array[-2] for array in arrays)  # an address is the lowest
    if len(prepared) == 1 and forwards:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[key] = Form(num_tokens, arrays, batch, groups, prepared[0])
