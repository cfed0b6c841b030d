"""Sizes at the edge of what a launch, a 32-bit index or a table's stride can count, compared with the NumPy path."""

import numpy as np
import pytest
from backends import NO_GPU, cupy

from cupy_slots import get_compressed_slot_mapping

pytestmark = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")


def on_gpu(num_bytes):
    """Skip where the arrays would not fit the GPU."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes:,} free bytes on the GPU, has {free:,}")


def compare(num_tokens, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio):
    arrays = (slot_mapping, query_start_loc, seq_lens, block_table)
    expected = get_compressed_slot_mapping(num_tokens, *arrays, block_size, compress_ratio)
    arrays = [None if array is None else cupy.asarray(array) for array in arrays]
    mapped = get_compressed_slot_mapping(num_tokens, *arrays, block_size, compress_ratio).get()
    wrong = np.flatnonzero(mapped != expected)
    assert not len(wrong), (wrong[:10], mapped[wrong[:10]], expected[wrong[:10]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_table_of_131072_columns(dtype):
    seq_lens = np.array([4, 2**19, 2**19 + 4, 77_777], dtype)
    query_start_loc = np.array([0, 4, 5000, 9000, 9500], dtype)
    table = np.random.default_rng(0).integers(-5, 2**31 - 1, (4, 131_072)).astype(dtype)
    compare(9500, None, query_start_loc, seq_lens, table, 1, 4)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_70000_requests(dtype):
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4, 70_000)
    query_start_loc = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
    seq_lens = (lengths + rng.integers(0, 500, 70_000)).astype(dtype)
    table = rng.integers(-1, 1000, (70_000, 2)).astype(dtype)
    tokens = int(query_start_loc[-1])
    compare(tokens, rng.integers(-1, 9, tokens), query_start_loc, seq_lens, table, 64, 4)
    query_start_loc[60_000] = -1
    compare(tokens, rng.integers(-1, 9, tokens), query_start_loc, seq_lens, table, 64, 4)


def test_67_million_tokens():
    tokens, requests = 2**26, 1024
    on_gpu(3 * 8 * tokens)
    slots = np.arange(tokens)
    slots[::97] = -1
    query_start_loc = np.arange(requests + 1, dtype=np.int32) * (tokens // requests)
    seq_lens = np.full(requests, tokens // requests + 5, np.int32)
    table = np.arange(requests * 257, dtype=np.int32).reshape(requests, 257)
    compare(tokens, slots, query_start_loc, seq_lens, table, 64, 4)


def test_more_tokens_than_32_bit_indices_count():
    tokens = 2**30 + 1000
    on_gpu(9 * tokens)
    table = cupy.arange(2**14 + 1, dtype=np.int32)[None, :]
    offsets, lengths = cupy.array([0, tokens], np.int32), cupy.array([tokens], np.int32)
    mapped = get_compressed_slot_mapping(tokens, None, offsets, lengths, table, 2**14, 4)
    for first in (0, 2**29 - 500, tokens - 2000):
        token = np.arange(first, first + 2000)
        assert mapped[first : first + 2000].tolist() == np.where(token % 4 == 3, token // 4, -1).tolist(), first
    assert int((mapped >= 0).sum()) == tokens // 4


def test_rows_more_than_2_to_the_31_elements_apart():
    apart = 2**31 + 1024
    on_gpu(5 * apart)
    memory = cupy.empty(apart + 8, np.int32)
    table = cupy.ndarray((2, 8), np.int32, memory.data, strides=(4 * apart, 4))
    table[:] = cupy.arange(16, dtype=np.int32).reshape(2, 8)
    offsets, lengths = cupy.array([0, 8, 16], np.int32), cupy.array([8, 8], np.int32)
    mapped = get_compressed_slot_mapping(16, None, offsets, lengths, table, 1, 1)
    assert mapped.tolist() == list(range(16))
