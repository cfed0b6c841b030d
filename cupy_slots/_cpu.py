"""The NumPy mirror: one function a kernel, with the kernel's name and arguments.

Where the kernel asks of every token whether it closes a state, the mirror lists the closing tokens of every
request, so its cost grows with states and requests; only the fill with PAD grows with tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .context_parallel import Sharding, local_index

PAD = -1


class Group(NamedTuple):
    """One cache's part of a call, checked."""

    slot_mapping: np.ndarray | None
    block_table: np.ndarray
    block_size: int
    compress_ratio: int
    out: np.ndarray


class _Closing(NamedTuple):
    """The tokens that close a state, in order, with their requests and the states as this rank counts them."""

    token: np.ndarray
    request: np.ndarray
    state: np.ndarray


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
    closing: dict[int, _Closing] = {}
    for group in groups:
        ratio = group.compress_ratio
        if ratio not in closing:
            if positions is None:
                assert seq_lens is not None
                closing[ratio] = _closing_tokens(num_tokens, query_start_loc, seq_lens, ratio)
            else:
                closing[ratio] = _closing_positions(num_tokens, query_start_loc, positions, ratio)
            if sharding.dcp_world_size > 1:
                closing[ratio] = _on_this_rank(closing[ratio], ratio, sharding)
        token, slot = _slots(closing[ratio], group)
        group.out.fill(PAD)
        group.out[token] = slot


def _real_requests(query_start_loc: np.ndarray) -> np.ndarray:
    """The offsets before the first that falls, in 64 bits."""
    falls = np.flatnonzero(query_start_loc[1:] < query_start_loc[:-1])
    if len(falls):
        query_start_loc = query_start_loc[: falls[0] + 1]
    return query_start_loc.astype(np.int64)


def _closing_tokens(
    num_tokens: int, query_start_loc: np.ndarray, seq_lens: np.ndarray, compress_ratio: int
) -> _Closing:
    """Closing tokens where each request's tokens are the last of its sequence: `position = token + base`."""
    base = seq_lens[: len(query_start_loc) - 1] - query_start_loc[1:]
    token_bound = np.minimum(np.maximum(query_start_loc, 0), num_tokens)
    first_state = np.maximum(token_bound[:-1] + base, 0) // compress_ratio
    count = np.maximum((token_bound[1:] + base) // compress_ratio - first_state, 0)
    request = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(request))
    state = nth + np.repeat(first_state - (np.cumsum(count) - count), count)
    token = (state + 1) * compress_ratio - np.repeat(base + 1, count)
    return _Closing(token, request, state)


def _closing_positions(
    num_tokens: int, query_start_loc: np.ndarray, positions: np.ndarray, compress_ratio: int
) -> _Closing:
    """Closing tokens where each token's position is given."""
    begin, end = max(int(query_start_loc[0]), 0), min(int(query_start_loc[-1]), num_tokens)
    position = positions[begin : max(begin, end)].astype(np.int64)
    nth = np.flatnonzero((position >= 0) & ((position + 1) % compress_ratio == 0))
    token = nth + begin
    request = np.searchsorted(query_start_loc, token, side="right") - 1
    return _Closing(token, request, position[nth] // compress_ratio)


def _on_this_rank(closing: _Closing, compress_ratio: int, sharding: Sharding) -> _Closing:
    """Drop other ranks' states and count the rest as this rank does."""
    token, request, state = closing
    index = state if sharding.shard_states else (state + 1) * compress_ratio - 1
    rank, index = local_index(index, sharding.dcp_world_size, sharding.cp_interleave)
    if not sharding.shard_states:
        index //= compress_ratio
    if sharding.dcp_rank < 0:
        return _Closing(token, request, index)
    own = rank == sharding.dcp_rank
    return _Closing(token[own], request[own], index[own])


def _slots(closing: _Closing, group: Group) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that get a slot, and their slots."""
    token, request, state = closing
    column = state // group.block_size
    inside = column < group.block_table.shape[1]
    if not inside.all():
        token, request, state, column = token[inside], request[inside], state[inside], column[inside]
    page = group.block_table[request, column].astype(np.int64, copy=False)
    slot = page * group.block_size + (state - column * group.block_size)
    written = page >= 0
    if group.slot_mapping is not None:
        written &= group.slot_mapping[token] != PAD
    return token[written], slot[written]
