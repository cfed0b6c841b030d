"""Which rank of a context-parallel group stores what, and where: the one place for these formulas on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._integers import int_at_least

CP_SHARDS = ("token", "state")


class Sharding(NamedTuple):
    """How a cache is split over decode-context-parallel (DCP) ranks."""

    dcp_world_size: int
    cp_interleave: int
    dcp_rank: int  # -1: ownership is not checked
    cp_shard: str


UNSHARDED = Sharding(1, 1, -1, "token")


def local_index(n: Any, dcp_world_size: int, cp_interleave: int) -> tuple[Any, Any]:
    """The rank that owns the `n`-th token or state, and its index among those of that rank."""
    run = n // cp_interleave
    turn = run // dcp_world_size
    return run - turn * dcp_world_size, turn * cp_interleave + (n - run * cp_interleave)


def get_state_owner(
    position: Any,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int = 1,
    *,
    cp_shard: str = "token",
) -> tuple[Any, Any]:
    """Say which DCP rank stores the state of a position, and at which local state.

    For schedulers, cache managers and tests that must agree with the mapping: it uses the formulas that
    `get_compressed_slot_mapping` uses.

    Parameters
    ----------
    position : int or integer array
        Positions in the sequence, from 0, in tokens.
    compress_ratio : int
        Tokens per state.
    dcp_world_size : int
        Number of ranks.
    cp_interleave : int
        Length of a rank's runs: in tokens with ``cp_shard="token"``, in states with ``"state"``.
    cp_shard : {"token", "state"}
        What the cache interleaves over the ranks.

    Returns
    -------
    (rank, local_state) : pair of int, or of int64 arrays shaped as `position`
        The slot of the state is ``block_table[request, local_state // block_size] * block_size +
        local_state % block_size`` on that rank.

    Raises
    ------
    TypeError, ValueError
        For a number that is no integer, or out of range; a negative position; an interleave of tokens that is no
        multiple of `compress_ratio`.

    Examples
    --------
    Sixteen tokens in states of 4, sharded by token in runs of 4 over 2 ranks:

    >>> get_state_owner(np.array([3, 7, 11, 15]), 4, 2, 4)
    (array([0, 1, 0, 1]), array([0, 0, 1, 1]))
    >>> get_state_owner(515, compress_ratio=4, dcp_world_size=2, cp_shard="state")
    (0, 64)

    Notes
    -----
    ``"token"`` is the layout of vLLM 0.33; ``"state"`` interleaves compressed entries instead. With a ratio of 2 and
    two ranks::

        "token", runs of 4 tokens            "state", runs of 1 state
        position  0 1 2 3 | 4 5 6 7 | 8 9    position  0 1 | 2 3 | 4 5 | 6 7 | 8 9
        rank         0    |    1    |  0     rank       0  |  1  |  0  |  1  |  0
        state      0   1  |  0   1  |  2     state      0  |  0  |  1  |  1  |  2
    """
    if isinstance(position, np.ndarray):
        if position.dtype.kind != "i":
            raise TypeError(f"position must be an integer array, was {position.dtype}")
        if position.size and position.min() < 0:
            raise ValueError(f"position must be at least 0, was {position.min()}")
        position = position.astype(np.int64)
    else:
        position = int_at_least("position", position, 0)
    compress_ratio = int_at_least("compress_ratio", compress_ratio, 1)
    sharding = check_sharding(dcp_world_size, cp_interleave, 0, cp_shard)
    interleave = interleaved_states("compress_ratio", sharding, compress_ratio)
    return local_index(position // compress_ratio, sharding.dcp_world_size, interleave)


def check_sharding(dcp_world_size: object, cp_interleave: object, dcp_rank: object, cp_shard: str) -> Sharding:
    """The four arguments as a `Sharding`, or an error that names the one that is wrong."""
    ints = type(dcp_world_size) is type(cp_interleave) is int  # True == 1 too
    if ints and dcp_world_size == cp_interleave == 1 and dcp_rank is None and cp_shard == "token":
        return UNSHARDED
    world_size = int_at_least("dcp_world_size", dcp_world_size, 1)
    interleave = int_at_least("cp_interleave", cp_interleave, 1)
    if cp_shard not in CP_SHARDS:
        raise ValueError(f"cp_shard must be 'token' or 'state', was {cp_shard!r}")
    if dcp_rank is None:
        if cp_shard == "state":
            raise ValueError("dcp_rank is required with cp_shard='state', was None")
        return Sharding(world_size, interleave, -1, cp_shard)
    rank = int_at_least("dcp_rank", dcp_rank, 0)
    if rank >= world_size:
        raise ValueError(f"dcp_rank must be less than dcp_world_size={world_size}, was {rank}")
    return Sharding(world_size, interleave, rank, cp_shard)


def interleaved_states(ratio_name: str, sharding: Sharding, compress_ratio: int) -> int:
    """Length of a rank's runs in states, where both layouts are one: runs of tokens hold whole states."""
    if sharding.cp_shard == "state" or sharding.dcp_world_size == 1:
        return sharding.cp_interleave
    if sharding.cp_interleave % compress_ratio:
        raise ValueError(
            f"cp_interleave must be a multiple of {ratio_name}={compress_ratio} when tokens are sharded, "
            f"was {sharding.cp_interleave}"
        )
    return sharding.cp_interleave // compress_ratio
