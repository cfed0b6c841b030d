"""From a batch to the slots of its compressed KV states: meaning, checks, choice of path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _cpu, _gpu
from ._arrays import CPU, LIBRARIES, Table, Vector, adopt, device_name, library_of, overlap
from ._gpu import Group
from ._integers import INT64_MAX, int_at_least
from .context_parallel import UNSHARDED, Sharding, check_interleave, check_sharding

PAD = _cpu.PAD


class CacheGroup(NamedTuple):
    """One compressed cache of a model, for `get_compressed_slot_mappings`.

    Attributes are the arguments of `get_compressed_slot_mapping` of the same names; a `slot_mapping` of None
    stands for the batch's.
    """

    block_table: Any
    block_size: int
    compress_ratio: int
    out: Any = None
    slot_mapping: Any = None


def get_compressed_slot_mapping(
    num_tokens: int,
    slot_mapping: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    block_size: int,
    compress_ratio: int,
    out: Any = None,
    dcp_world_size: int = 1,
    cp_interleave: int = 1,
    *,
    dcp_rank: int | None = None,
    cp_shard: str = "token",
    positions: Any = None,
) -> Any:
    """Map each token of a batch to the slot of the compressed KV state that it closes.

    A compressed cache keeps one state for `compress_ratio` consecutive positions, written by the last of them.
    An engine calls this once a step, and the kernel that writes the cache skips every token mapped to -1 (PAD).

    All arrays are int32 or int64 in any mix, with any strides, on one device: NumPy arrays, torch tensors, CuPy
    arrays, other objects with ``__cuda_array_interface__``, or on the CPU whatever NumPy takes. GPU work is one
    launch on the current stream of the result's library, with no synchronisation.

    Parameters
    ----------
    num_tokens : int
        Tokens to map.
    slot_mapping : array of shape [>= num_tokens], or None
        Each token's own slot in the uncompressed cache. -1 masks the token; None masks nothing.
    query_start_loc : array of shape [num_requests + 1]
        Offset of each request's first token in the batch. From the first entry that falls, all is padding.
    seq_lens : array of shape [>= num_requests], or None
        Length of each sequence after this step, in tokens. None, and not read, with `positions`.
    block_table : array of shape [>= num_requests, num_columns]
        Page ids of each request.
    block_size : int
        States per page.
    compress_ratio : int
        Tokens per state. 1 maps every token.
    out : int64 array of shape [>= num_tokens], optional
        Where to write: contiguous and writable. All of it is set, PAD behind the tokens. It may be
        `slot_mapping` itself, and must not overlap an input otherwise.
    dcp_world_size : int
        Ranks of decode context parallelism that share the cache.
    cp_interleave : int
        Length of a rank's runs: in tokens with ``cp_shard="token"``, where it must be a multiple of
        `compress_ratio`; in states with ``"state"``.
    dcp_rank : int, optional
        This rank. Required with ``cp_shard="state"``; with ``"token"`` it may be left to `slot_mapping`, which
        then carries PAD where another rank owns the token.
    cp_shard : {"token", "state"}
        What the cache interleaves over the ranks. With ``"state"``, pass None for `slot_mapping`, or one whose
        PADs mean "do not write": the mapping of a token-sharded cache has PAD at other ranks' tokens, which
        would drop states.
    positions : array of shape [>= num_tokens], optional
        Each token's position in its sequence, for batches whose rows are not the end of their sequence.

    Returns
    -------
    int64 array of shape [num_tokens]
        ``block_table[request, state // block_size] * block_size + state % block_size`` for a token that closes
        ``state = position // compress_ratio``. PAD for every other token, and where the token is masked or
        belongs to no request, the position or the page id is negative, or the table has no such column.
        The view ``out[:num_tokens]`` (`out` itself when that is all of it), else a new array of the library
        and device of `query_start_loc`.

    Raises
    ------
    TypeError
        For an array that is not int32 or int64, an `out` that is not int64, a number that is not integral.
    ValueError
        For a wrong number of dimensions, an array that is too short, a number out of range, an `out` that is
        read-only, not contiguous or overlaps an input, arrays on different devices.
    RuntimeError
        For a GPU array where CuPy is missing or unusable, or before `warmup` while a CUDA graph is captured.
        All errors are raised before anything is written.

    Examples
    --------
    Two requests: 5 tokens that end at length 8, and 3 that end at length 6; states of 4 tokens, 64 a page:

    >>> get_compressed_slot_mapping(
    ...     num_tokens=8,
    ...     slot_mapping=None,
    ...     query_start_loc=np.array([0, 5, 8]),
    ...     seq_lens=np.array([8, 6]),
    ...     block_table=np.array([[10], [20]]),
    ...     block_size=64,
    ...     compress_ratio=4,
    ... )
    array([ 640,   -1,   -1,   -1,  641, 1280,   -1,   -1])

    Notes
    -----
    The rule and the order of the arguments are those of vLLM 0.33's function of this name; keyword-only
    arguments, the several array libraries, and the checks are this project's.
    """
    cache = (block_table, block_size, compress_ratio, out, None)
    sharding = check_sharding(dcp_world_size, cp_interleave, dcp_rank, cp_shard)
    batch = (num_tokens, slot_mapping, query_start_loc, seq_lens, positions)
    return _map(*batch, (cache,), (CacheGroup._fields,), sharding)[0]


def get_compressed_slot_mappings(
    num_tokens: int,
    slot_mapping: Any,
    query_start_loc: Any,
    seq_lens: Any,
    groups: Sequence[CacheGroup],
    dcp_world_size: int = 1,
    cp_interleave: int = 1,
    *,
    dcp_rank: int | None = None,
    cp_shard: str = "token",
    positions: Any = None,
) -> list[Any]:
    """Map one batch for several caches at once: `get_compressed_slot_mapping` for each, in one launch.

    A model has a compressed cache per ratio and per indexer. A group of ratio 1 with a table of its own gives
    the raw mapping of a cache whose slots must be computed too.

    Parameters
    ----------
    num_tokens, slot_mapping, query_start_loc, seq_lens, dcp_world_size, cp_interleave, dcp_rank, cp_shard, positions
        The batch, as for `get_compressed_slot_mapping`.
    groups : sequence of CacheGroup
        The caches. Up to 32 share a launch.

    Returns
    -------
    list of int64 arrays of shape [num_tokens]
        One result a group.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `get_compressed_slot_mapping`; messages name the group. An `out` must overlap no array that another
        group reads or writes.

    Examples
    --------
    >>> raw, compressed = get_compressed_slot_mappings(
    ...     num_tokens=4,
    ...     slot_mapping=None,
    ...     query_start_loc=np.array([0, 4]),
    ...     seq_lens=np.array([8]),
    ...     groups=[
    ...         CacheGroup(np.array([[7, 9]]), block_size=4, compress_ratio=1),
    ...         CacheGroup(np.array([[3]]), block_size=64, compress_ratio=4),
    ...     ],
    ... )
    >>> raw
    array([36, 37, 38, 39])
    >>> compressed
    array([ -1,  -1,  -1, 193])
    """
    try:
        groups = [CacheGroup(*group) for group in groups]
    except TypeError as reason:
        raise TypeError(f"groups must be a sequence of CacheGroup: {reason}") from reason
    names = [tuple(f"groups[{i}].{field}" for field in CacheGroup._fields) for i in range(len(groups))]
    sharding = check_sharding(dcp_world_size, cp_interleave, dcp_rank, cp_shard)
    return _map(num_tokens, slot_mapping, query_start_loc, seq_lens, positions, groups, names, sharding)


def _map(
    num_tokens: int,
    slot_mapping: Any,
    query_start_loc: Any,
    seq_lens: Any,
    positions: Any,
    caches: Sequence[Any],
    names: Sequence[tuple[str, ...]],
    sharding: Sharding,
) -> list[Any]:
    """Check everything, then write: the one way of every call."""
    if type(num_tokens) is not int or not 0 <= num_tokens <= INT64_MAX:
        num_tokens = int_at_least("num_tokens", num_tokens, 0)
    starts = _vector("query_start_loc", query_start_loc, 1)
    num_requests = starts[2] - 1
    lengths = _vector("seq_lens", seq_lens, num_requests) if positions is None else None
    given_positions = None if positions is None else _vector("positions", positions, num_tokens)
    slots = None if slot_mapping is None else _vector("slot_mapping", slot_mapping, num_tokens)
    batch = (starts, lengths, given_positions, slots)
    groups = []
    results = []
    stream_giver = query_start_loc
    for cache, cache_names in zip(caches, names, strict=True):
        out = cache[3]
        if out is None:
            out = library_of(query_start_loc).empty(num_tokens, query_start_loc)
        elif stream_giver is query_start_loc:
            stream_giver = out
        group = _check_cache(cache, out, cache_names, num_tokens, num_requests, slots, sharding)
        groups.append(group)
        results.append(out if group[4][2] == num_tokens else library_of(out).prefix(out, num_tokens))
    if not _is_plain(batch, groups):
        _check_places(batch, groups, names)

    if starts[5] == CPU:
        _map_on_cpu(num_tokens, starts, lengths, given_positions, groups, sharding)
    else:
        stream = library_of(stream_giver).stream(stream_giver, starts[5])
        _gpu.compressed_slot_mapping(num_tokens, starts, lengths, given_positions, groups, sharding, stream=stream)
    return results


def _vector(name: str, array: Any, least: int) -> Vector:
    library = LIBRARIES.get(type(array))
    if library is None:
        array = adopt(name, array)
        library = library_of(array)
    vector: Vector = library.vector(name, array, least)
    return vector


def _check_cache(
    cache: Sequence[Any],
    out: Any,
    names: tuple[str, ...],
    num_tokens: int,
    num_requests: int,
    slots: Vector | None,
    sharding: Sharding,
) -> Group:
    """One cache's arguments as both paths take them; `slots` is the batch's slot mapping."""
    block_table, block_size, compress_ratio, _, own_slot_mapping = cache
    if type(block_size) is not int or not 1 <= block_size <= INT64_MAX:
        block_size = int_at_least(names[1], block_size, 1)
    if type(compress_ratio) is not int or not 1 <= compress_ratio <= INT64_MAX:
        compress_ratio = int_at_least(names[2], compress_ratio, 1)
    library = LIBRARIES.get(type(block_table))
    if library is None:
        block_table = adopt(names[0], block_table)
        library = library_of(block_table)
    table = library.table(names[0], block_table, num_requests)
    if own_slot_mapping is not None:
        slots = _vector(names[4], own_slot_mapping, num_tokens)
    if sharding is not UNSHARDED and sharding.dcp_world_size > 1:
        check_interleave(names[2], sharding, compress_ratio)
        if slots is None and sharding.dcp_rank < 0:
            raise ValueError(
                f"dcp_rank is required with dcp_world_size={sharding.dcp_world_size} and no {names[4]}, was None"
            )
    return slots, table, block_size, compress_ratio, _out(names[3], out, num_tokens)


def _out(name: str, array: Any, num_tokens: int) -> Vector:
    if type(array) not in LIBRARIES and adopt(name, array) is not array:
        raise TypeError(f"{name} must be an array that can be written in place, was {type(array).__name__}")
    library = LIBRARIES[type(array)]
    vector: Vector = library.vector(name, array, num_tokens)
    _, _, length, stride, itemsize, _ = vector
    if itemsize != 8:
        raise TypeError(f"{name} must be an int64 array, was int32")
    if stride != 8 and length > 1:
        raise ValueError(f"{name} must be contiguous, was strided by {stride} bytes")
    if not library.writable(array):
        raise ValueError(f"{name} must be writable, was read-only")
    return vector


def _is_plain(batch: Sequence[Vector | None], groups: Sequence[Group]) -> bool:
    """Whether the addresses alone show one device, and each `out` apart from all but its own slot mapping.

    Nearly every call is plain, and this takes a tenth of the time of `_check_places`, which judges the others.
    """
    outs = [group[4] for group in groups]
    device = outs[0][5] if outs else CPU
    for vector in (*batch, *outs):
        if vector is None:
            continue
        _, low, length, stride, itemsize, on = vector
        if on != device or stride < 0:
            return False
        high = low + (length - 1) * stride + itemsize
        for out in outs:
            if low >= out[1] + 8 * out[2] or high <= out[1] or vector is out:
                continue
            if len(groups) > 1 or vector is not groups[0][0] or not _in_place(out, vector):
                return False
    for slots, table, _, _, _ in groups:
        _, low, rows, columns, row_stride, column_stride, itemsize, on = table
        if on != device or row_stride < 0 or column_stride < 0 or slots is not batch[3]:
            return False
        high = low + (rows - 1) * row_stride + (columns - 1) * column_stride + itemsize
        for out in outs:
            if low < out[1] + 8 * out[2] and out[1] < high:
                return False
    return True


def _check_places(batch: Sequence[Vector | None], groups: Sequence[Group], names: Sequence[tuple[str, ...]]) -> None:
    """All arrays on one device, and each `out` apart from all that any group reads or writes.

    Only the slot mapping that its own group alone reads may lie where `out` does: it is mapped in place.
    """
    reads: dict[str, Any] = dict(zip(("query_start_loc", "seq_lens", "positions", "slot_mapping"), batch, strict=True))
    writes: dict[str, Vector] = {}
    for (slots, table, _, _, out), cache_names in zip(groups, names, strict=True):
        reads[cache_names[0]] = table
        if slots is not batch[3]:
            reads[cache_names[4]] = slots
        writes[cache_names[3]] = out
    arrays = {name: array for name, array in (reads | writes).items() if array is not None}
    if len({array[-1] for array in arrays.values()}) > 1:
        where = ", ".join(f"{name} on {device_name(array[-1])}" for name, array in arrays.items())
        raise ValueError(f"all arrays must be on one device, were: {where}")
    for name, out in writes.items():
        for other, array in arrays.items():
            if array is out or not overlap(out, array):
                continue
            writers = [group[4] for group in groups if group[0] is array]
            if array is batch[3] and not writers:
                continue  # every group has slots of its own
            if len(writers) != 1 or writers[0] is not out or not _in_place(out, array):
                raise ValueError(f"{name} must not overlap {other}")


def _in_place(out: Vector, slots: Vector) -> bool:
    """Whether each token's slot lies where its result goes."""
    _, pointer, length, stride, itemsize, _ = slots
    return pointer == out[1] and itemsize == 8 and (stride == 8 or length <= 1)


def _map_on_cpu(
    num_tokens: int,
    starts: Vector,
    lengths: Vector | None,
    positions: Vector | None,
    groups: Sequence[Group],
    sharding: Sharding,
) -> None:
    """Call the mirror with NumPy arrays in the place of what was seen of them."""

    def host(array: Vector | Table | None) -> Any:
        return None if array is None else array[0]

    mirrored = [
        _cpu.Group(host(slots), host(table), size, ratio, host(out)) for slots, table, size, ratio, out in groups
    ]
    _cpu.compressed_slot_mapping(num_tokens, host(starts), host(lengths), host(positions), mirrored, sharding)
