"""The launch of each kernel: its geometry and its arguments, for arrays that have been checked.

A launch goes straight to the driver with one block of arguments, filled by one `struct` call: that costs about
half of what `cupy.RawKernel.__call__` with separate arguments does.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Sequence

from ._arrays import Table, Vector
from ._jit import Kernel, Loaded
from .context_parallel import UNSHARDED, Sharding

GROUPS_PER_LAUNCH = 16
_SEGMENT, _QUAD = 32, 4  # as in the kernel
_NO_VECTOR: Vector = (None, 0, 0, 0, 4, 0, 0, 0)
_NARROW_LIMIT = 2**30  # tokens or requests that 32-bit indices can count, with the tiles past the last

# By (several groups, 64-bit indices). One group has its own build: 2 KiB of unused arguments would cost 5% of a launch.
_KERNELS = {
    (several, wide): Kernel("compressed_slot_mapping", MAX_GROUPS=GROUPS_PER_LAUNCH if several else 1, WIDE=int(wide))
    for several in (False, True)
    for wide in (False, True)
}

# slot_mapping, block_table, block_size, compress_ratio, interleave (in states), out
Group = tuple[Vector | None, Table, int, int, int, Vector]

_DIVISOR_FIELDS = 3
_BATCH_FORMAT = f"14q{8 * (_DIVISOR_FIELDS + 1)}s"
_GROUP_FORMAT = f"qq{8 * 3 * _DIVISOR_FIELDS}s8q"
_ARGUMENTS = [struct.Struct(_BATCH_FORMAT + n * _GROUP_FORMAT) for n in range(GROUPS_PER_LAUNCH + 1)]


class Arguments:
    """The memory of a kernel's one argument, and the array of pointers that the driver wants around it."""

    def __init__(self, num_groups: int) -> None:
        self.block = ctypes.create_string_buffer(_ARGUMENTS[num_groups].size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))
        self.pointers = ctypes.addressof(self._pointers)


# What the driver takes of a launch besides its arguments: kernel, blocks, groups, threads and shared memory a block.
Grid = tuple[Loaded, int, int, int, int]
Launch = tuple[Grid, Arguments]


def compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: Vector,
    seq_lens: Vector | None,
    positions: Vector | None,
    groups: Sequence[Group],
    sharding: Sharding,
    *,
    stream: int,
) -> list[Launch]:
    """Write the slots of all `groups` to their `out` on `stream`; return how."""
    launches = prepare(num_tokens, query_start_loc, seq_lens, positions, groups, sharding, stream=stream)
    for grid, arguments in launches:
        launch(grid, arguments, stream)
    return launches


def prepare(
    num_tokens: int,
    query_start_loc: Vector,
    seq_lens: Vector | None,
    positions: Vector | None,
    groups: Sequence[Group],
    sharding: Sharding,
    *,
    stream: int,
) -> list[Launch]:
    """The launches that `compressed_slot_mapping` takes, for `GROUPS_PER_LAUNCH` groups each at most."""
    if len(groups) > GROUPS_PER_LAUNCH:
        batch = (num_tokens, query_start_loc, seq_lens, positions)
        first = prepare(*batch, groups[:GROUPS_PER_LAUNCH], sharding, stream=stream)
        return first + prepare(*batch, groups[GROUPS_PER_LAUNCH:], sharding, stream=stream)
    _, qsl_first, num_offsets, qsl_stride, qsl_itemsize, device, _, _ = query_start_loc
    _, seq_first, _, seq_stride, seq_itemsize, _, _, _ = seq_lens or _NO_VECTOR
    _, pos_first, _, pos_stride, pos_itemsize, _, _, _ = positions or _NO_VECTOR
    num_requests = num_offsets - 1
    longest = 0
    fields: list[int | bytes] = []
    for slot_mapping, block_table, block_size, compress_ratio, interleave, out in groups:
        _, out_first, out_len, _, _, _, _, _ = out
        _, slot_first, _, slot_stride, slot_itemsize, _, _, _ = slot_mapping or _NO_VECTOR
        _, table_first, _, columns, row_stride, column_stride, table_itemsize, _, _, _ = block_table
        fields += (
            out_first, out_len, _sizes(compress_ratio, block_size, interleave),
            table_first, column_stride, table_itemsize, row_stride, columns, slot_first, slot_stride, slot_itemsize,
        )  # fmt: skip
        if out_len > longest:
            longest = out_len
    if longest == 0:
        return []
    wide = qsl_itemsize + seq_itemsize + pos_itemsize > 12 or longest > _NARROW_LIMIT or num_requests > _NARROW_LIMIT
    kernel = _KERNELS[len(groups) > 1, wide]
    loaded = kernel.loaded.get(device) or kernel.load(device, stream)
    threads, shared, tile_size, tiles, seek_owner, blocks = _geometry(
        longest, num_requests, wide, loaded.multiprocessors
    )
    arguments = Arguments(len(groups))
    _ARGUMENTS[len(groups)].pack_into(
        arguments.block, 0,
        qsl_first, qsl_stride, qsl_itemsize, seq_first, seq_stride, seq_itemsize,
        num_requests, num_tokens, pos_first, pos_stride, pos_itemsize, tile_size, tiles, seek_owner,
        _UNSHARDED if sharding is UNSHARDED else _ranks(sharding.dcp_world_size, sharding.dcp_rank), *fields,
    )  # fmt: skip
    return [((loaded, blocks, len(groups), threads, shared), arguments)]


def blank_addresses(arguments: Arguments, num_groups: int) -> tuple[Callable[..., None], list[int | bytes]]:
    """The arguments of a launch as a `pack_into` with its fields, of which every other one is an array's address.

    The arrays are, in this order, query_start_loc, seq_lens, positions, and each group's out, block_table,
    slot_mapping.
    """
    group_size = struct.calcsize(_GROUP_FORMAT)
    groups = range(struct.calcsize(_BATCH_FORMAT), _ARGUMENTS[num_groups].size, group_size)
    addresses = [0, 24, 64, *(group + place for group in groups for place in (0, 88, 128))]
    layout = ""
    fields: list[int | bytes] = []
    packed = bytes(arguments.block)
    for address, end in itertools.pairwise([*addresses, len(packed)]):
        constants = packed[address + 8 : end]
        layout += f"q{len(constants)}s"
        fields += 0, constants
    return struct.Struct("=" + layout).pack_into, fields


def launch(grid: Grid, arguments: Arguments, stream: int) -> None:
    """Launch in the kernel's own context, and leave the caller's current as it was."""
    (function, context, driver, _), blocks, groups, threads, shared = grid
    current = driver.ctxGetCurrent()
    if current == context:
        driver.launchKernel(function, blocks, groups, 1, threads, 1, 1, shared, stream, arguments.pointers, 0)
        return
    driver.ctxSetCurrent(context)
    try:
        driver.launchKernel(function, blocks, groups, 1, threads, 1, 1, shared, stream, arguments.pointers, 0)
    finally:
        driver.ctxSetCurrent(current)


def _divisor(value: int) -> tuple[int, int, int]:
    """`value`, and the multiplier and shift that divide every n < 2**31 by it."""
    if value > 2**31:
        return value, 0, 0
    shift = 31 + (value - 1).bit_length()
    return value, -(-(1 << shift) // value), shift


@functools.lru_cache(maxsize=1024)
def _sizes(compress_ratio: int, block_size: int, interleave: int) -> bytes:
    return struct.pack("9q", *_divisor(compress_ratio), *_divisor(block_size), *_divisor(interleave))


@functools.lru_cache(maxsize=64)
def _ranks(dcp_world_size: int, dcp_rank: int) -> bytes:
    return struct.pack("4q", *_divisor(dcp_world_size), dcp_rank)


_UNSHARDED = _ranks(UNSHARDED.dcp_world_size, UNSHARDED.dcp_rank)


@functools.lru_cache(maxsize=4096)
def _geometry(longest: int, num_requests: int, wide: bool, multiprocessors: int) -> tuple[int, int, int, int, int, int]:
    """Threads a block, its shared memory in bytes, tokens a tile, tiles a block, if tiles have one owner, blocks.

    What measured best on an H200: small tiles on many multiprocessors while a block has one tile; else blocks that
    walk requests of many tiles four tokens a thread, or as many blocks as fit.
    """
    threads = 256 if num_requests <= 512 else 512 if num_requests <= 1024 else 1024
    marks = (threads + threads // _SEGMENT) * (16 if wide else 8)
    if longest <= 128 * multiprocessors and num_requests <= 1024:
        tile = threads // 2
        return threads, marks, tile, 1, 0, -(-longest // tile)
    tiles = -(-longest // threads)
    quads_fit = longest >= 2 * _QUAD * threads * num_requests
    if not quads_fit:
        tiles_per_block = -(-tiles * threads // (2048 * multiprocessors))
        return threads, marks, threads, tiles_per_block, 0, -(-tiles // tiles_per_block)
    tiles_per_block = -(-tiles // (2 * multiprocessors))
    if tiles_per_block > 4 * _QUAD:
        tiles_per_block = max(4 * _QUAD, -(-tiles // (4 * multiprocessors)))
    if tiles_per_block > 1:
        tiles_per_block = -(-tiles_per_block // _QUAD) * _QUAD
    return threads, marks, threads, tiles_per_block, 1, -(-tiles // tiles_per_block)
