"""From a batch to the slots of its compressed KV states: meaning, checks, choice of path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from . import _cpu, _forms, _gpu
from ._arrays import CPU, LIBRARIES, Table, Vector, device_name, is_contiguous_int64, overlap
from ._gpu import Group
from ._integers import INT64_MAX, int_at_least
from .context_parallel import UNSHARDED, Sharding, check_sharding, interleaved_states

PAD = _cpu.PAD

# query_start_loc, seq_lens, positions, slot_mapping
Batch = tuple[Vector, Vector | None, Vector | None, Vector | None]


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
    numbers = (num_tokens, dcp_world_size, cp_interleave, dcp_rank, cp_shard, block_size, compress_ratio)
    arrays = (slot_mapping, query_start_loc, seq_lens, positions, block_table, out, None)
    return _map(numbers, arrays, CacheGroup._fields)[0]


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
    num_tokens, ..., positions
        The batch, as for `get_compressed_slot_mapping`.
    groups : sequence of CacheGroup
        The caches. Up to 16 share a launch.

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
    caches = list(chain.from_iterable(as_cache_groups(groups)))
    numbers = (num_tokens, dcp_world_size, cp_interleave, dcp_rank, cp_shard, *caches[1::5], *caches[2::5])
    arrays = (slot_mapping, query_start_loc, seq_lens, positions, *caches[::5], *caches[3::5], *caches[4::5])
    return _map(numbers, arrays)


def as_cache_groups(groups: Sequence[CacheGroup]) -> list[CacheGroup]:
    """The groups as records, whatever sequences they came as."""
    try:
        return [group if type(group) is CacheGroup else CacheGroup(*group) for group in groups]
    except TypeError as reason:
        raise TypeError(f"groups must be a sequence of CacheGroup: {reason}") from reason


def names_of_groups(number: int) -> list[tuple[str, ...]]:
    """What an error calls the fields of each group."""
    return [tuple(f"groups[{i}].{field}" for field in CacheGroup._fields) for i in range(number)]


def _map(numbers: tuple[Any, ...], arrays: tuple[Any, ...], names: tuple[str, ...] | None = None) -> list[Any]:
    """Launch as a call of the same form did, or check everything and then write. The one way of every call.

    Behind the numbers and the arrays of the batch come the groups': field by field, each for all groups. `names` is
    what errors call the fields of an only group.
    """
    kind, results = _forms.launch_again(numbers, arrays)
    if results is not None:
        return results

    num_tokens, *ranks = numbers[:5]
    slot_mapping, query_start_loc, seq_lens, positions = arrays[:4]
    n = (len(numbers) - 5) // 2
    fields = arrays[4 : 4 + n], numbers[5 : 5 + n], numbers[5 + n :], arrays[4 + n : 4 + 2 * n], arrays[4 + 2 * n :]
    caches, group_names = list(zip(*fields, strict=True)), [names] if names else names_of_groups(n)
    sharding = check_sharding(*ranks)
    num_tokens, batch, groups, results, stream_giver = check_call(
        num_tokens, slot_mapping, query_start_loc, seq_lens, positions, caches, group_names, sharding
    )
    starts, lengths, given_positions, _ = batch
    device = starts[5]
    if device == CPU:
        map_on_cpu(num_tokens, starts, lengths, given_positions, groups, sharding)
        return results
    stream = LIBRARIES[type(stream_giver)].stream(stream_giver, device)
    mapped = (num_tokens, starts, lengths, given_positions, groups, sharding)
    launches = _gpu.compressed_slot_mapping(*mapped, stream=stream)
    if kind and len(launches) == 1 and _is_plain(batch, groups):
        kind.remember(arrays, batch, groups, launches[0])
    return results


def check_call(
    num_tokens: int,
    slot_mapping: Any,
    query_start_loc: Any,
    seq_lens: Any,
    positions: Any,
    caches: Sequence[Any],
    names: Sequence[tuple[str, ...]],
    sharding: Sharding,
) -> tuple[int, Batch, list[Group], list[Any], Any]:
    """The call as both paths take it, each group's result, and the array whose stream a launch takes."""
    if type(num_tokens) is not int or not 0 <= num_tokens <= INT64_MAX:
        num_tokens = int_at_least("num_tokens", num_tokens, 0)
    starts = LIBRARIES[type(query_start_loc)].vector("query_start_loc", query_start_loc, 1)
    lengths = given_positions = slots = None
    if positions is None:
        lengths = LIBRARIES[type(seq_lens)].vector("seq_lens", seq_lens, starts[2] - 1)
    else:
        given_positions = LIBRARIES[type(positions)].vector("positions", positions, num_tokens)
    if slot_mapping is not None:
        slots = LIBRARIES[type(slot_mapping)].vector("slot_mapping", slot_mapping, num_tokens)

    groups, results = [], []
    stream_giver = query_start_loc
    for i, cache in enumerate(caches):
        out = cache[3]
        if out is None:
            out = LIBRARIES[type(query_start_loc)].empty(num_tokens, query_start_loc)
        elif stream_giver is query_start_loc:
            stream_giver = out
        group = _check_cache(cache, out, names[i], num_tokens, starts[2] - 1, slots, sharding)
        groups.append(group)
        results.append(out if group[5][2] == num_tokens else LIBRARIES[type(out)].prefix(out, num_tokens))
    batch = (starts, lengths, given_positions, slots)
    if not _is_plain(batch, groups):
        _check_places(batch, groups, names)
    return num_tokens, batch, groups, results, stream_giver


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
    pages = LIBRARIES[type(block_table)].table(names[0], block_table, num_requests)
    if own_slot_mapping is not None:
        slots = LIBRARIES[type(own_slot_mapping)].vector(names[4], own_slot_mapping, num_tokens)
    interleave = 1
    if sharding is not UNSHARDED:
        interleave = interleaved_states(names[2], sharding, compress_ratio)
        if slots is None and sharding.dcp_world_size > 1 and sharding.dcp_rank < 0:
            raise ValueError(
                f"dcp_rank is required with dcp_world_size={sharding.dcp_world_size} and no {names[4]}, was None"
            )
    result = LIBRARIES[type(out)].vector(names[3], out, num_tokens)
    _, _, length, stride, itemsize, _, _, _ = result
    if itemsize != 8:
        raise TypeError(f"{names[3]} must be an int64 array, was int32")
    if stride != 8 and length > 1:
        raise ValueError(f"{names[3]} must be contiguous, was strided by {stride} bytes")
    LIBRARIES[type(out)].check_writable(names[3], out)
    return slots, pages, block_size, compress_ratio, interleave, result


def _is_plain(batch: Batch, groups: Sequence[Group]) -> bool:
    """Whether the addresses alone show one device, and each `out` apart from all but its own slot mapping.

    Nearly every call is plain; `_check_places` judges the others, in ten times the time.
    """
    device = batch[0][5]
    for slots, pages, _, _, _, out in groups:
        low, high = out[6], out[7]
        if out[5] != device or pages[7] != device or slots is not batch[3]:
            return False
        if pages[8] < high and pages[9] > low:
            return False
        for array in batch:
            if array is None or (array[5] == device and (array[6] >= high or array[7] <= low)):
                continue
            if array[5] != device or array is not slots or len(groups) > 1 or not _in_place(out, array):
                return False
        if len(groups) > 1:
            for _, other_pages, _, _, _, other_out in groups:
                if other_pages[8] < high and other_pages[9] > low:
                    return False
                if other_out[6] < high and other_out[7] > low and other_out is not out:
                    return False
    return True


def _check_places(
    batch: Batch,
    groups: Sequence[Group],
    names: Sequence[tuple[str, ...]],
) -> None:
    """All arrays on one device, and each `out` apart from all that any group reads or writes.

    Only the slot mapping that its own group alone reads may lie where `out` does: it is mapped in place.
    """
    reads: dict[str, Any] = dict(zip(("query_start_loc", "seq_lens", "positions", "slot_mapping"), batch, strict=True))
    writes: dict[str, Vector] = {}
    for (slots, pages, _, _, _, out), cache_names in zip(groups, names, strict=True):
        reads[cache_names[0]] = pages
        if slots is not batch[3]:
            reads[cache_names[4]] = slots
        writes[cache_names[3]] = out
    arrays = {name: array for name, array in (reads | writes).items() if array is not None}
    if len({array[-3] for array in arrays.values()}) > 1:
        where = ", ".join(f"{name} on {device_name(array[-3])}" for name, array in arrays.items())
        raise ValueError(f"all arrays must be on one device, were: {where}")
    for name, out in writes.items():
        for other, array in arrays.items():
            if array is out or not overlap(out, array):
                continue
            writers = [group[5] for group in groups if group[0] is array]
            if array is batch[3] and not writers:
                continue  # every group has slots of its own
            if len(writers) != 1 or writers[0] is not out or not _in_place(out, array):
                raise ValueError(f"{name} must not overlap {other}")


def _in_place(out: Vector, slots: Vector) -> bool:
    """Whether each token's slot lies where its result goes."""
    return slots[1] == out[1] and is_contiguous_int64(slots)


def map_on_cpu(
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
        _cpu.Group(host(slots), host(pages), block_size, ratio, interleave, host(out))
        for slots, pages, block_size, ratio, interleave, out in groups
    ]
    _cpu.compressed_slot_mapping(num_tokens, host(starts), host(lengths), host(positions), mirrored, sharding)
