"""The NumPy mirror: one function a kernel, with the kernel's name and arguments.

Where the kernel asks of every token whether it closes a state, the mirror lists what each request closes, in runs of
states that lie in one page. So its cost grows with requests, pages and states; only the fill with PAD and the
search of given positions grow with tokens. Where requests are few or long, each is mapped on its own instead: the
tokens that close its states are a slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .context_parallel import Sharding, local_index

PAD = -1
_STATES_AT_ONCE = 2**15  # so that all that is made on the way stays in a core's cache
# Measured: a request on its own costs what it saves on 4,096 states, and runs cost at least what 4 requests do.
_LONG_REQUEST = 2**12
_FEW_REQUESTS = 4


class Group(NamedTuple):
    """One cache's part of a call, checked; `interleave` is in states."""

    slot_mapping: np.ndarray | None
    block_table: np.ndarray
    block_size: int
    compress_ratio: int
    interleave: int
    out: np.ndarray


class _Runs(NamedTuple):
    """Runs of tokens of one request that close consecutive states: the first token, its request and state, how many."""

    token: np.ndarray
    request: np.ndarray
    state: np.ndarray
    length: np.ndarray


def compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray | None,
    positions: np.ndarray | None,
    groups: Sequence[Group],
    sharding: Sharding,
) -> None:
    """Write the slots of all `groups` to their `out`."""
    query_start_loc = _real_requests(query_start_loc)
    runs: dict[tuple[int, int], _Runs] = {}
    for group in groups:
        ratio, longest = group.compress_ratio, group.block_size
        few_or_long = (len(query_start_loc) - 1 - _FEW_REQUESTS) * _LONG_REQUEST <= num_tokens // ratio
        if few_or_long and seq_lens is not None and sharding.dcp_world_size == 1:
            _write_each_request(num_tokens, query_start_loc, seq_lens, group)
            continue
        if sharding.dcp_world_size > 1:
            longest = math.gcd(longest, group.interleave)  # divides both, so no run leaves its page or its rank
        if (ratio, longest) not in runs:
            if positions is None:
                assert seq_lens is not None
                runs[ratio, longest] = _runs(num_tokens, query_start_loc, seq_lens, ratio, longest)
            else:
                runs[ratio, longest] = _runs_of_one(num_tokens, query_start_loc, positions, ratio)
        _write(runs[ratio, longest], group, sharding)


def _real_requests(query_start_loc: np.ndarray) -> np.ndarray:
    """The offsets before the first that falls, in 64 bits."""
    (falls,) = (query_start_loc[1:] < query_start_loc[:-1]).nonzero()
    if len(falls):
        query_start_loc = query_start_loc[: falls[0] + 1]
    return query_start_loc.astype(np.int64)


def _runs(
    num_tokens: int, query_start_loc: np.ndarray, seq_lens: np.ndarray, compress_ratio: int, longest: int
) -> _Runs:
    """Runs where each request's tokens are the last of its sequence: `position = token + base`."""
    # A negative length maps as little as 0 does, which no offset makes wrap.
    base = np.maximum(seq_lens[: len(query_start_loc) - 1], 0) - query_start_loc[1:]
    bounds = np.minimum(np.maximum(query_start_loc, 0), num_tokens)
    state = np.maximum(bounds[:-1] + base, 0) // compress_ratio
    end = (bounds[1:] + base) // compress_ratio
    (closing,) = (end > state).nonzero()
    state, end, base = state[closing], end[closing], base[closing]

    part = state // longest
    more = (end - 1) // longest - part
    if np.count_nonzero(more):
        parts = more + 1
        closing, state, end, base = (a.repeat(parts) for a in (closing, state, end, base))
        part = (part + parts - parts.cumsum()).repeat(parts) + np.arange(len(closing))
        first = part * longest
        state = np.maximum(state, first)
        end = np.minimum(end - first, longest) + first
    return _Runs((state + 1) * compress_ratio - (base + 1), closing, state, end - state)


def _runs_of_one(num_tokens: int, query_start_loc: np.ndarray, positions: np.ndarray, compress_ratio: int) -> _Runs:
    """A run for each closing token, where each token's position is given."""
    begin, end = max(int(query_start_loc[0]), 0), min(int(query_start_loc[-1]), num_tokens)
    position = positions[begin : max(begin, end)].astype(np.int64)
    (closing,) = ((position >= 0) & ((position + 1) % compress_ratio == 0)).nonzero()
    token = closing + begin
    request = query_start_loc.searchsorted(token, side="right") - 1
    return _Runs(token, request, position[closing] // compress_ratio, np.ones_like(token))


def _write_each_request(num_tokens: int, query_start_loc: np.ndarray, seq_lens: np.ndarray, group: Group) -> None:
    """Set all of the group's `out`, some pages of one request at a time."""
    block_size, ratio = group.block_size, group.compress_ratio
    pages_at_once = max(1, _STATES_AT_ONCE // block_size)
    own_slot = _own_slot_behind_fill(group)
    count = np.arange(min(num_tokens // ratio + 1, _STATES_AT_ONCE))
    starts = query_start_loc.tolist()
    lengths = seq_lens[: len(starts) - 1].tolist()
    for row, start, query_end, length in zip(group.block_table, starts, starts[1:], lengths, strict=False):
        base = length - query_end  # position = token + base
        state = max(max(start, 0) + base, 0) // ratio
        end = min((min(query_end, num_tokens) + base) // ratio, len(row) * block_size)
        while state < end:
            column, offset = divmod(state, block_size)
            stop = min(end, state + _STATES_AT_ONCE, (column + pages_at_once) * block_size)
            pages = row[column : (stop - 1) // block_size + 1]
            tokens = slice((state + 1) * ratio - 1 - base, stop * ratio - base, ratio)
            written = True if own_slot is None else own_slot[tokens] != PAD
            _write_slots(group.out[tokens], written, pages, block_size, offset, count[: stop - state])
            state = stop


def _write_slots(
    out: np.ndarray, written: np.ndarray | bool, pages: np.ndarray, block_size: int, offset: int, count: np.ndarray
) -> None:
    """Set `out`, where `written`, to the slots of consecutive states: `count` of them, from `offset` in `pages` on."""

    def of_states(of_pages: np.ndarray) -> np.ndarray:
        return of_pages.repeat(block_size)[offset : offset + len(count)] if len(pages) > 1 else of_pages

    if np.count_nonzero(pages < 0):
        written = written & of_states(pages >= 0)
    slot = (pages - count[: len(pages)]) * block_size + offset
    np.copyto(out, of_states(slot) + count, where=written)


def _own_slot_behind_fill(group: Group) -> np.ndarray | None:
    """The group's own slots, kept from the fill of its `out` with PAD."""
    own_slot = group.slot_mapping
    if own_slot is not None and np.may_share_memory(own_slot, group.out):
        own_slot = own_slot.copy()
    group.out.view(np.uint8).fill(0xFF)  # PAD, all bits set, by a memset: up to twice as fast as a fill with int64
    return own_slot


def _write(runs: _Runs, group: Group, sharding: Sharding) -> None:
    """Set all of the group's `out`."""
    if sharding.dcp_world_size > 1:
        rank, local_state = local_index(runs.state, sharding.dcp_world_size, group.interleave)
        runs = runs._replace(state=local_state)
        if sharding.dcp_rank >= 0:
            runs = _keep(runs, rank == sharding.dcp_rank)
    runs = _keep(runs, runs.state < group.block_table.shape[1] * group.block_size)
    column = runs.state // group.block_size
    page = group.block_table[runs.request, column].astype(np.int64, copy=False)
    slot = (page - column) * group.block_size + runs.state
    has_page = page >= 0
    if np.count_nonzero(has_page) < len(has_page):
        runs, slot = _keep(runs, has_page), slot[has_page]

    own_slot = _own_slot_behind_fill(group)
    step = max(1, _STATES_AT_ONCE // runs.length.max(initial=1))
    for first in range(0, len(slot), step):
        part = slice(first, first + step)
        tokens, slots = _expand(runs.token[part], slot[part], runs.length[part], group.compress_ratio)
        if own_slot is not None:
            slots[own_slot.take(tokens) == PAD] = PAD
        group.out[tokens] = slots


def _expand(
    token: np.ndarray, slot: np.ndarray, length: np.ndarray, compress_ratio: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all states of some runs, and their slots."""
    after = length.cumsum()
    total = after[-1]
    if len(token) == total:
        return token, slot
    before = after - length
    tokens = (token - before * compress_ratio).repeat(length)
    tokens += np.arange(0, total * compress_ratio, compress_ratio)
    slots = (slot - before).repeat(length)
    slots += np.arange(total)
    return tokens, slots


def _keep(runs: _Runs, kept: np.ndarray) -> _Runs:
    return runs if np.count_nonzero(kept) == len(kept) else _Runs(*(column[kept] for column in runs))
