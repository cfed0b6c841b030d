"""The later calls of a form: what the checks of an earlier one found, and its launch but for the addresses.

A serving loop calls with the same numbers and with arrays of the same shapes, strides, dtypes and devices over and
over. All that the checks can find follows from those and from the addresses. So a checked call that is seen a second
time leaves its form here: later ones compare their layouts with its own, look whether an `out` now overlaps another
array, and launch. That takes less than half of the host time of checking anew. Whatever is out of the ordinary (several
libraries, strides that run backwards, an array that an `out` overlaps) never leaves a form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from . import _gpu
from ._arrays import LIBRARIES, Vector, is_contiguous_int64
from ._jit import Kernel

_MOST_KINDS = 4096
_MOST_FORMS = 4  # of a kind; more are rare, and each costs a comparison
_NUMBERS = {int, str, type(None)}

# Where arrays are in a call; behind them all block tables, all outs, all own slot mappings.
_SLOT_MAPPING, _QUERY_START_LOC, _SEQ_LENS, _POSITIONS, _BLOCK_TABLES = range(5)


class Form:
    """A launch without its addresses, and which arrays it fits."""

    def __init__(self, kind: Kind, arrays: Sequence[Any], checked: dict[int, Any], launch: _gpu.Launch) -> None:
        present = kind.present(arrays)
        self.fits = kind.library.same_layout(present)
        self._library = kind.library
        self._num_tokens = kind.num_tokens
        self._grid, arguments = launch
        self._device = checked[_QUERY_START_LOC][-3]
        self._kernel = next(k for k in Kernel.registry if k.loaded.get(self._device) is self._grid[0])
        self._loaded = self._kernel.loaded

        self._outs = kind.outs
        outs = range(len(arrays))[kind.outs]
        self._missing = [i for i, out in enumerate(outs) if arrays[out] is None]
        self._longer = [i for i, out in enumerate(outs) if checked[out][2] != kind.num_tokens]
        order = [*kind.places, *(outs[i] for i in self._missing)]
        number = {place: i for i, place in enumerate(order) if place in checked}
        sizes = [(number[place], array[-1] - array[-2]) for place, array in checked.items()]
        written = {number[out] for out in outs}
        self._apart = [(i, size, [other for other in sizes if other[0] != i]) for i, size in sizes if i in written]
        slots = checked.get(_SLOT_MAPPING)
        self._in_place = number[_SLOT_MAPPING] if slots and len(outs) == 1 and is_contiguous_int64(slots) else None

        self._pack, self._fields = _gpu.blank_addresses(arguments, len(outs))
        places = [_QUERY_START_LOC, _SEQ_LENS, _POSITIONS]
        for i, out in enumerate(outs):
            places += out, _BLOCK_TABLES + i, _SLOT_MAPPING
        self._in_order = itemgetter(*(number.get(place, len(order)) for place in places))
        # Arguments with the addresses in them. A call takes one pair and puts it back: threads never share one, since
        # popping a list is atomic.
        self._ready: list[tuple[_gpu.Arguments, list[int]]] = [(arguments, [])]

    def launch(self, arrays: Sequence[Any], addresses: list[int]) -> list[Any] | None:
        """The results of a call, given the addresses of what it has; None where those ask for the checks."""
        if self._kernel.loaded is not self._loaded:
            return None  # reloaded since
        results = list(arrays[self._outs])
        for i in self._missing:
            results[i] = self._library.empty(self._num_tokens, arrays[_QUERY_START_LOC])
            addresses.append(self._library.address_of(results[i]))
        try:
            arguments, packed = self._ready.pop()
        except IndexError:
            arguments, packed = _gpu.Arguments(len(results)), []
        if packed != addresses:
            if self._overlap(addresses):
                return None
            fields = self._fields.copy()
            fields[::2] = self._in_order([*addresses, 0])
            self._pack(arguments.block, 0, *fields)
        _gpu.launch(self._grid, arguments, self._library.stream(arrays[_QUERY_START_LOC], self._device))
        self._ready.append((arguments, addresses))
        for i in self._longer:
            results[i] = self._library.prefix(results[i], self._num_tokens)
        return results

    def _overlap(self, addresses: list[int]) -> bool:
        """Whether an `out` may share a byte with another array."""
        for out, size, others in self._apart:
            low = addresses[out]
            high = low + size
            for i, reach in others:
                address = addresses[i]
                if address < high and address + reach > low and (i != self._in_place or address != low):
                    return True
        return False


class Kind:
    """The calls with the same numbers, the same types of arrays, and as many requests."""

    def __init__(self, num_tokens: int, types: tuple[type, ...]) -> None:
        self.num_tokens = num_tokens
        self.library = LIBRARIES[types[_QUERY_START_LOC]]
        self.address_of = self.library.address_of
        self.places = [place for place, array_type in enumerate(types) if array_type is not type(None)]
        self.present = itemgetter(*self.places)
        num_groups = (len(types) - _BLOCK_TABLES) // 3
        self.outs = slice(_BLOCK_TABLES + num_groups, _BLOCK_TABLES + 2 * num_groups)
        self.forms: tuple[Form, ...] = ()  # the last used first
        self._seen = False

    def remember(
        self, arrays: Sequence[Any], batch: Sequence[Vector | None], groups: Sequence[_gpu.Group], launch: _gpu.Launch
    ) -> None:
        """Keep the form of a call that has been checked, unless it is the first of its kind.

        Calls whose kind never comes again, such as those of prefills, would pay for a form in vain.
        """
        if not self._seen:
            self._seen = True
            return
        checked: dict[int, Any] = dict(
            zip((_QUERY_START_LOC, _SEQ_LENS, _POSITIONS, _SLOT_MAPPING), batch, strict=True)
        )
        for i, (_, block_table, _, _, _, out) in enumerate(groups):
            checked |= {_BLOCK_TABLES + i: block_table, self.outs.start + i: out}
        checked = {place: array for place, array in checked.items() if array is not None}
        if all(array[1] == array[-2] for array in checked.values()):  # forwards: an address is the lowest
            self.forms = (Form(self, arrays, checked, launch), *self.forms)[:_MOST_FORMS]


@functools.lru_cache(maxsize=_MOST_KINDS, typed=True)  # True == 1, but no bool is a number of tokens
def _kind(types: tuple[type, ...], starts_shape: tuple[int, ...], *numbers: Any) -> Kind:
    if not _NUMBERS.issuperset(map(type, numbers)):
        raise TypeError("a number whose value may change")
    if len(set(types) - {type(None)}) > 1:
        raise TypeError("arrays of several types")
    return Kind(numbers[0], types)


def launch_again(numbers: Sequence[Any], arrays: Sequence[Any]) -> tuple[Kind | None, list[Any] | None]:
    """The kind of a call, and its results if a form fits and was launched; if not, nothing is written.

    Calls of mixed libraries, of subclasses, of NumPy's integers have no kind: they leave no form.
    """
    query_start_loc = arrays[_QUERY_START_LOC]
    if LIBRARIES[type(query_start_loc)].array_type is not type(query_start_loc):
        return None, None
    try:
        kind = _kind(tuple(map(type, arrays)), query_start_loc.shape, *numbers)
    except TypeError:
        return None, None
    forms = kind.forms
    if forms:
        present = kind.present(arrays)
        for form in forms:
            if form.fits(*present):
                if form is not forms[0]:
                    kind.forms = (form, *(other for other in forms if other is not form))
                return kind, form.launch(arrays, list(map(kind.address_of, present)))
    return kind, None
