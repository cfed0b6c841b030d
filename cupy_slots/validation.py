"""A checking mode for those who debug a scheduler: what is wrong with the values of a call, in words."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _cpu, _jit
from ._arrays import Table, Vector
from ._integers import int_at_least
from .context_parallel import Sharding, check_sharding, local_index
from .slot_mapping import PAD, CacheGroup, check_call

MOST_OF_A_KIND = 5


def validate_compressed_slot_mapping(
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
    num_slots: int | None = None,
) -> list[str]:
    """Say in words what is wrong with the values of a call of `get_compressed_slot_mapping`.

    The mapping turns wrong values into PAD without a word, since to see them it would have to wait for the GPU.
    This function does wait: it copies GPU arrays to the host. It writes to none.

    Parameters
    ----------
    num_tokens, ..., positions
        The arguments of the call, as for `get_compressed_slot_mapping`. `out` is checked, and not written.
    num_slots : int, optional
        Size of the cache in states: slots from there on are reported.

    Returns
    -------
    list of str
        Empty where nothing was found. Of each kind the first 5, then "and 37 more":

        - `query_start_loc` that does not begin at 0, or falls;
        - a live token (its slot is not PAD) of no request, if `slot_mapping` is given;
        - a live token's slot below -1: it masks nothing;
        - a live token's negative position;
        - a live token that closes a state in a column that `block_table` does not have, or with a negative page id;
        - two tokens that write one slot;
        - a slot outside the cache, if `num_slots` is given.

        Offsets that repeat, and masked tokens behind the last request, are an engine's padding and no finding.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `get_compressed_slot_mapping`, with the same messages.

    Examples
    --------
    Two requests: 5 tokens that end at length 8, and 3 that end at length 2; states of 4 tokens, 1 a page:

    >>> findings = validate_compressed_slot_mapping(
    ...     num_tokens=8,
    ...     slot_mapping=None,
    ...     query_start_loc=np.array([0, 5, 8]),
    ...     seq_lens=np.array([8, 2]),
    ...     block_table=np.array([[10, -1], [20, -1]]),
    ...     block_size=1,
    ...     compress_ratio=4,
    ... )
    >>> for finding in findings:
    ...     print(finding)
    request 1, token 5: position -1 is negative (seq_lens 2, query length 3)
    request 0, token 4: page id -1 at column 1
    """
    cache = (block_table, block_size, compress_ratio, out, None)
    sharding = check_sharding(dcp_world_size, cp_interleave, dcp_rank, cp_shard)
    batch = (num_tokens, slot_mapping, query_start_loc, seq_lens, positions)
    num_tokens, seen, (seen_group,), _, _ = check_call(*batch, (cache,), (CacheGroup._fields,), sharding)
    if num_slots is not None:
        num_slots = int_at_least("num_slots", num_slots, 0)

    arrays = (query_start_loc, seq_lens, positions, slot_mapping, block_table)
    starts, lengths, given, own, pages = map(_on_host, (*seen, seen_group[1]), arrays)
    group = _cpu.Group(own, pages, *seen_group[2:5], out=np.empty(num_tokens, np.int64))
    _cpu.compressed_slot_mapping(num_tokens, starts, lengths, given, (group,), sharding)

    offsets = _cpu._real_requests(starts)
    token = np.arange(num_tokens)
    belongs = (token >= offsets[0]) & (token < offsets[-1])
    findings = _in_offsets(starts, offsets)
    if own is not None:
        stray = ~belongs & (own[token] != PAD)
        findings += _say("token {} belongs to no request, its slot_mapping is {}", stray, token, own)
    token = token[belongs]
    request = offsets.searchsorted(token, side="right") - 1
    findings += _in_tokens(token, request, offsets, lengths, given, group, sharding)
    findings += _in_slots(token, request, group.out[token], num_slots)
    return findings


def _on_host(seen: Vector | Table | None, array: Any) -> Any:
    """The values of an array that has been looked at."""
    if seen is None:
        return None
    if seen[0] is not None:
        return seen[0]
    if hasattr(array, "cpu"):  # torch's, which needs no CuPy
        return array.cpu().numpy()
    return _jit.require_cupy().asnumpy(array)


def _say(sentence: str, where: np.ndarray, *columns: np.ndarray) -> list[str]:
    """The sentence with the columns' values at the first places of the mask, and how many places are left."""
    (places,) = where.nonzero()
    first, more = places[:MOST_OF_A_KIND], len(places) - MOST_OF_A_KIND
    said = [sentence.format(*values) for values in zip(*(column[first].tolist() for column in columns), strict=True)]
    return [*said, f"and {more} more"] if more > 0 else said


def _in_offsets(starts: np.ndarray, offsets: np.ndarray) -> list[str]:
    """`offsets` are those of `starts` before the first that falls."""
    findings = []
    if starts[0] != 0:
        findings.append(f"query_start_loc begins at {starts[0]}, not at 0")
    if len(offsets) < len(starts):
        request = len(offsets) - 1
        findings.append(
            f"request {request}: query_start_loc falls from {starts[request]} to {starts[request + 1]}: "
            "it and all later requests are padding and have no tokens"
        )
    return findings


def _in_tokens(
    token: np.ndarray,
    request: np.ndarray,
    offsets: np.ndarray,
    seq_lens: np.ndarray | None,
    positions: np.ndarray | None,
    group: _cpu.Group,
    sharding: Sharding,
) -> list[str]:
    """Why a live token has no slot where it should, for the tokens that belong to requests."""
    findings = []
    live = np.ones(len(token), bool)
    if group.slot_mapping is not None:
        own = group.slot_mapping[token]
        live = own != PAD
        odd = live & (own < 0)
        findings += _say("request {}, token {}: slot_mapping is {}, only -1 masks a token", odd, request, token, own)

    negative = "request {}, token {}: position {} is negative"
    if positions is None:
        assert seq_lens is not None
        length, query_len = seq_lens[request], (offsets[1:] - offsets[:-1])[request]
        position = length - offsets[request + 1] + token
        negative += " (seq_lens {}, query length {})"
        findings += _say(negative, live & (position < 0), request, token, position, length, query_len)
    else:
        position = positions[token].astype(np.int64)
        findings += _say(negative, live & (position < 0), request, token, position)

    rank, state = local_index(position // group.compress_ratio, sharding.dcp_world_size, group.interleave)
    closing = live & (position >= 0) & ((position + 1) % group.compress_ratio == 0)
    if sharding.dcp_rank >= 0:
        closing &= rank == sharding.dcp_rank
    width = group.block_table.shape[1]
    column = state // group.block_size
    local = "local " if sharding.dcp_world_size > 1 else ""
    beyond = f"request {{}}, token {{}}: {local}state {{}} lies in page column {{}}, block_table's width is {width}"
    findings += _say(beyond, closing & (column >= width), request, token, state, column)

    closing &= column < width
    token, request, column = token[closing], request[closing], column[closing]
    page = group.block_table[request, column]
    findings += _say("request {}, token {}: page id {} at column {}", page < 0, request, token, page, column)
    return findings


def _in_slots(token: np.ndarray, request: np.ndarray, slot: np.ndarray, num_slots: int | None) -> list[str]:
    """Writes that meet, and those outside the cache."""
    token, request, slot = (column[slot != PAD] for column in (token, request, slot))
    by_slot = slot.argsort(kind="stable")
    one, other = by_slot[:-1], by_slot[1:]
    pairs = (token[one], token[other], request[one], request[other], slot[one])
    findings = _say("tokens {} and {} of requests {} and {} both write slot {}", slot[one] == slot[other], *pairs)
    if num_slots is not None:
        outside = (slot < 0) | (slot >= num_slots)
        too_far = f"request {{}}, token {{}}: slot {{}} is outside the cache of {num_slots} slots"
        findings += _say(too_far, outside, request, token, slot)
    return findings
