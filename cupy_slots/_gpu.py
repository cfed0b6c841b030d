"""The launch of each kernel: its geometry and its arguments, for arrays that have been checked.

A launch goes straight to the driver with one block of arguments, filled by one `struct` call: that costs about
half of what `cupy.RawKernel.__call__` with separate arguments does.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from ._arrays import Table, Vector
from ._jit import Kernel, Loaded
from .context_parallel import UNSHARDED, Sharding

GROUPS_PER_LAUNCH = 16
_SEGMENT = 32  # as in the kernel
_NO_VECTOR = (None, 0, 0, 0, 4, 0)
_NARROW_LIMIT = 2**30  # tokens or requests that 32-bit indices can count, with the tiles past the last

# By whether indices have 64 bits.
_KERNELS = {
    wide: Kernel("compressed_slot_mapping", MAX_GROUPS=GROUPS_PER_LAUNCH, WIDE=int(wide)) for wide in (False, True)
}

# slot_mapping, block_table, block_size, compress_ratio, out
Group = tuple[Vector | None, Table, int, int, Vector]

_DIVISOR = struct.Struct("qqq")
_SHARDING = struct.Struct(f"{_DIVISOR.size}s{_DIVISOR.size}sqq")
_BATCH_FORMAT = f"13q{_SHARDING.size}s"
_GROUP_FORMAT = f"qq{_DIVISOR.size}s{_DIVISOR.size}s8q"
_BATCH_FIELDS = 14
_ARGUMENTS = [struct.Struct(_BATCH_FORMAT + n * _GROUP_FORMAT) for n in range(GROUPS_PER_LAUNCH + 1)]


class _Arguments:
    """The memory of a kernel's one argument, and the array of pointers that the driver wants around it."""

    def __init__(self) -> None:
        self.block = ctypes.create_string_buffer(_ARGUMENTS[-1].size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))
        self.pointers = ctypes.addressof(self._pointers)


# A launch takes one and puts it back: popping a list is atomic, so threads and re-entrant calls never share one.
_arguments: list[_Arguments] = []


def compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: Vector,
    seq_lens: Vector | None,
    positions: Vector | None,
    groups: Sequence[Group],
    sharding: Sharding,
    *,
    stream: int,
) -> None:
    """Write the slots of all `groups` to their `out` on `stream`, `GROUPS_PER_LAUNCH` at a time."""
    _, qsl_first, num_offsets, qsl_stride, qsl_itemsize, device = query_start_loc
    _, seq_first, _, seq_stride, seq_itemsize, _ = seq_lens or _NO_VECTOR
    _, pos_first, _, pos_stride, pos_itemsize, _ = positions or _NO_VECTOR
    num_requests = num_offsets - 1
    longest = max([out[2] for *_, out in groups], default=0)
    if longest == 0:
        return
    wide = qsl_itemsize + seq_itemsize + pos_itemsize > 12 or max(longest, num_requests) > _NARROW_LIMIT
    kernel = _KERNELS[wide]
    loaded = kernel.loaded.get(device) or kernel.load(device, stream)
    threads, shared, tokens, tiles, blocks = _geometry(longest, num_requests, wide, loaded.multiprocessors)
    fields = [
        qsl_first, qsl_stride, qsl_itemsize, seq_first, seq_stride, seq_itemsize, num_requests, num_tokens,
        pos_first, pos_stride, pos_itemsize, tiles, tokens,
        _NOT_SHARDED if sharding is UNSHARDED else _sharding(sharding),
    ]  # fmt: skip
    for first in range(0, len(groups), GROUPS_PER_LAUNCH):
        launched = groups[first : first + GROUPS_PER_LAUNCH]
        for slot_mapping, block_table, block_size, compress_ratio, out in launched:
            _, slot_first, _, slot_stride, slot_itemsize, _ = slot_mapping or _NO_VECTOR
            _, table_first, _, columns, row_stride, column_stride, table_itemsize, _ = block_table
            fields += (
                out[1], out[2], _divisor(compress_ratio), _divisor(block_size),
                table_first, column_stride, table_itemsize, row_stride, columns, slot_first, slot_stride, slot_itemsize,
            )  # fmt: skip
        _launch(loaded, blocks, len(launched), threads, shared, stream, fields)
        del fields[_BATCH_FIELDS:]


@functools.lru_cache(maxsize=1024)
def _divisor(value: int) -> bytes:
    """`value`, and the multiplier and shift that divide every n < 2**31 by it."""
    if value > 2**31:
        return _DIVISOR.pack(value, 0, 0)
    shift = 31 + (value - 1).bit_length()
    return _DIVISOR.pack(value, -(-(1 << shift) // value), shift)


@functools.lru_cache(maxsize=64)
def _sharding(sharding: Sharding) -> bytes:
    world_size, interleave, rank, shard_states = sharding
    return _SHARDING.pack(_divisor(world_size), _divisor(interleave), rank, shard_states)


_NOT_SHARDED = _sharding(UNSHARDED)


@functools.lru_cache(maxsize=4096)
def _geometry(longest: int, num_requests: int, wide: bool, multiprocessors: int) -> tuple[int, int, int, int, int]:
    """Threads a block, its shared memory in bytes, tokens a thread, tiles a block, and blocks."""
    if num_requests <= 1024 and longest <= 128 * multiprocessors:
        threads, tokens, most_blocks = 256 if num_requests <= 256 else 512, 1, multiprocessors
    elif num_requests <= 1024:
        threads, tokens, most_blocks = 256, 4, 4 * multiprocessors
    elif longest <= 512 * multiprocessors:
        threads, tokens, most_blocks = 512, 1, multiprocessors
    else:
        threads, tokens, most_blocks = 512, 4, 2 * multiprocessors
    tile = threads * tokens
    tiles = -(-longest // tile)
    tiles_per_block = -(-tiles // most_blocks)
    marks = tile + tile // _SEGMENT
    return threads, marks * (16 if wide else 8), tokens, tiles_per_block, -(-tiles // tiles_per_block)


def _launch(
    loaded: Loaded, blocks: int, groups: int, threads: int, shared: int, stream: int, fields: list[Any]
) -> None:
    """Launch in the kernel's own context, and leave the caller's current as it was."""
    function, context, driver, _ = loaded
    arguments = _arguments.pop() if _arguments else _Arguments()
    _ARGUMENTS[groups].pack_into(arguments.block, 0, *fields)
    current = driver.ctxGetCurrent()
    if current != context:
        driver.ctxSetCurrent(context)
    try:
        driver.launchKernel(function, blocks, groups, 1, threads, 1, 1, shared, stream, arguments.pointers, 0)
    finally:
        if current != context:
            driver.ctxSetCurrent(current)
        _arguments.append(arguments)
