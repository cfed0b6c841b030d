"""The batches that are timed, by name: `requests x tokens of each`, as an engine would hold them in one step."""

from typing import NamedTuple

import numpy as np

PAD = -1
PAGE_TOKENS = 256
STEP_TOKENS = 8192  # what an engine's buffers hold: the length of `out` for batches up to that size


class Batch(NamedTuple):
    requests: int
    query_len: int
    context: int = 8192  # tokens that a sequence may have behind it
    compress_ratio: int = 4

    @property
    def name(self) -> str:
        return f"{self.requests:,} x {self.query_len:,}"

    @property
    def num_tokens(self) -> int:
        return self.requests * self.query_len

    @property
    def out_len(self) -> int:
        return max(self.num_tokens, STEP_TOKENS)

    def arguments(self) -> tuple:
        """The positional arguments of `get_compressed_slot_mapping` up to `out`, as NumPy arrays.

        The dtypes are the published ones: int64 slots, int32 the rest. One token in sixteen is masked.
        """
        rng = np.random.default_rng(0)
        slot_mapping = rng.integers(0, 2**40, self.num_tokens)
        slot_mapping[rng.integers(0, self.num_tokens, self.num_tokens // 16)] = PAD
        query_start_loc = np.arange(0, self.num_tokens + 1, self.query_len, dtype=np.int32)
        seq_lens = self.query_len + rng.integers(0, self.context + 1, self.requests, dtype=np.int32)
        columns = -(-(self.query_len + self.context) // PAGE_TOKENS)
        block_table = rng.integers(0, 2**20, (self.requests, columns), dtype=np.int32)
        block_size = PAGE_TOKENS // self.compress_ratio
        return (
            self.num_tokens,
            slot_mapping,
            query_start_loc,
            seq_lens,
            block_table,
            block_size,
            self.compress_ratio,
        )


STEPS = [  # of an engine: decode, speculative decode, prefill
    Batch(1, 1),
    Batch(64, 1),
    Batch(256, 1),
    Batch(1024, 1),
    Batch(256, 4),
    Batch(8, 1024),
    Batch(1, 8192),
]
LONG = Batch(1, 2**20, context=0)
MANY = Batch(16_384, 64)
MOST = Batch(65_536, 1)
HUGE = Batch(1024, 65_536, context=0)
