"""A mapping whose arrays are checked once and launched many times, for loops over fixed buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _gpu
from ._arrays import CPU, LIBRARIES
from .context_parallel import check_sharding
from .slot_mapping import CacheGroup, as_cache_groups, check_call, map_on_cpu, names_of_groups


class SlotMappingPlan:
    """The arrays of one `get_compressed_slot_mappings` call, checked; see `plan_compressed_slot_mappings`."""

    def __init__(self, call: tuple[Any, ...], results: list[Any], stream_giver: Any, keep_alive: Any) -> None:
        self._call = call
        self._results = results
        self._stream_giver = stream_giver
        self._keep_alive = keep_alive
        self._device = call[1][5]
        self._library = LIBRARIES[type(stream_giver)]
        self._launches = [] if self._device == CPU else _gpu.prepare(*call, stream=self._stream())

    def _stream(self) -> int:
        handle: int = self._library.stream(self._stream_giver, self._device)
        return handle

    def run(self) -> list[Any]:
        """Map what the arrays hold now.

        Returns
        -------
        list of int64 arrays of shape [num_tokens]
            One result a group, the same objects every time.
        """
        if self._device == CPU:
            map_on_cpu(*self._call)
        elif self._launches:
            stream = self._stream()
            for grid, arguments in self._launches:
                _gpu.launch(grid, arguments, stream)
        return self._results


def plan_compressed_slot_mappings(
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
) -> SlotMappingPlan:
    """Check the arrays of a call once, to map them many times.

    For loops over fixed buffers, such as a decode step with persistent inputs: `SlotMappingPlan.run` does what
    `get_compressed_slot_mappings` does with these arguments, without looking at the arrays again. Their contents may
    change between runs; their memory, shapes and dtypes must not.

    Parameters
    ----------
    num_tokens, ..., positions
        As for `get_compressed_slot_mappings`. A group without `out` gets one here, which every run writes.

    Returns
    -------
    SlotMappingPlan
        It keeps the arrays alive, and the kernel that was current: `reload_kernels` does not change it. A run takes
        the stream that is current then, and may come from any thread.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `get_compressed_slot_mappings`.

    Examples
    --------
    >>> seq_lens = np.array([4])
    >>> plan = plan_compressed_slot_mappings(
    ...     num_tokens=1,
    ...     slot_mapping=None,
    ...     query_start_loc=np.array([0, 1]),
    ...     seq_lens=seq_lens,
    ...     groups=[CacheGroup(np.array([[7]]), block_size=64, compress_ratio=4)],
    ... )
    >>> plan.run()
    [array([448])]
    >>> seq_lens += 4
    >>> plan.run()
    [array([449])]
    """
    caches = as_cache_groups(groups)
    sharding = check_sharding(dcp_world_size, cp_interleave, dcp_rank, cp_shard)
    batch = (num_tokens, slot_mapping, query_start_loc, seq_lens, positions)
    num_tokens, (starts, lengths, given_positions, _), checked, results, stream_giver = check_call(
        *batch, caches, names_of_groups(len(caches)), sharding
    )
    call = (num_tokens, starts, lengths, given_positions, checked, sharding)
    return SlotMappingPlan(call, results, stream_giver, keep_alive=(batch, caches))
