"""get_compressed_slot_mapping on every backend, against the oracle."""

from functools import cache
from itertools import accumulate

import batches
import numpy as np
import oracle
import pytest
from backends import (
    ARRAYS,
    GUARD,
    NO_SECOND_GPU,
    NO_TORCH,
    NOISE,
    address,
    array_backends,
    cupy,
    every_backend,
    gpu_backends,
    result_type,
    to_list,
    torch,
)
from hypothesis import given
from hypothesis import strategies as st

from cupy_slots import get_compressed_slot_mapping

ONE_REQUEST = {
    "num_tokens": 8,
    "slot_mapping": None,
    "query_start_loc": [0, 8],
    "seq_lens": [8],
    "block_table": [[5, 6]],
    "block_size": 1,
    "compress_ratio": 4,
}


def check(backend, batch):
    """The right slots, in the right array, and nothing else written."""
    arguments, n = batch.arguments, batch.arguments["num_tokens"]
    inputs = backend.make_inputs(arguments, batch.layout)
    out = memory = None
    if batch.out == "in place":
        out, memory = backend.make_out(arguments["slot_mapping"])
        inputs["slot_mapping"] = out
    elif batch.out is not None:
        out, memory = backend.make_out([NOISE] * batch.out)
    out_len = n if out is None else len(to_list(out))
    before = {
        name: to_list(inputs[name]) for name in ARRAYS if inputs.get(name) is not None and inputs[name] is not out
    }

    result = get_compressed_slot_mapping(**inputs, out=out)

    expected = oracle.compressed_slot_mapping(**arguments, out_len=out_len)
    assert to_list(result) == expected[:n], batch
    assert {name: to_list(inputs[name]) for name in before} == before, batch
    if out is not None:
        assert to_list(memory) == GUARD + expected + GUARD, batch
    if out is not None and out_len == n:
        assert result is out, batch
        return
    followed = inputs["query_start_loc"] if out is None else out
    assert type(result) is result_type(followed), batch
    assert str(result.dtype).endswith("int64"), batch
    if type(result) is type(followed):
        assert getattr(result, "device", None) == getattr(followed, "device", None), batch
    if out is not None and n > 0:
        assert address(result) == address(out), batch


@every_backend
@given(batch=batches.sensible())
def test_batches(backend, batch):
    check(backend, batch)


@every_backend
@given(batch=batches.hostile())
def test_hostile_values(backend, batch):
    check(backend, batch)


@every_backend
@pytest.mark.parametrize("out_len", [None, 0, 5])
@pytest.mark.parametrize(("requests", "columns"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_no_tokens(backend, requests, columns, out_len):
    rows = max(requests, 1) if backend.name == "lists" else requests  # a list of no rows has one dimension
    arguments = {
        "num_tokens": 0,
        "slot_mapping": [],
        "query_start_loc": [0] * (requests + 1),
        "seq_lens": [3] * requests,
        "block_table": np.zeros((rows, columns), np.int32),
        "block_size": 4,
        "compress_ratio": 4,
    }
    check(backend, batches.Batch(arguments, {}, out_len))


@every_backend
@pytest.mark.parametrize("out_len", [None, 6, 9])
@pytest.mark.parametrize(("requests", "columns"), [(0, 3), (2, 0)])
def test_all_pad_without_requests_or_pages(backend, requests, columns, out_len):
    arguments = {
        "num_tokens": 6,
        "slot_mapping": None,
        "query_start_loc": [0, 3, 6][: requests + 1],
        "seq_lens": [8, 8][:requests],
        "block_table": [[0] * columns] * 2,
        "block_size": 4,
        "compress_ratio": 1,
    }
    check(backend, batches.Batch(arguments, {}, out_len))


@every_backend
def test_positions_use_the_whole_query_behind_the_last_token(backend):
    arguments = ONE_REQUEST | {"num_tokens": 6, "query_start_loc": [0, 9], "seq_lens": [12]}
    assert oracle.compressed_slot_mapping(**arguments) == [5, -1, -1, -1, 6, -1]
    check(backend, batches.Batch(arguments, {}, 7))


@every_backend
def test_only_minus_one_is_pad(backend):
    own = [-1, -2, -(2**31), 2**31 - 1, 0, -1, -3, -1]
    arguments = ONE_REQUEST | {"slot_mapping": own, "block_size": 8, "compress_ratio": 1}
    assert oracle.compressed_slot_mapping(**arguments) == [-1, 41, 42, 43, 44, -1, 46, -1]
    check(backend, batches.Batch(arguments, {}, None))


@every_backend
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_beyond_32_bits(backend, dtype):
    arguments = ONE_REQUEST | {"block_table": [[2**31 - 1, 2**30]], "block_size": 2**31 - 1, "compress_ratio": 1}
    batch = batches.Batch(arguments | {"seq_lens": [2**31 + 3]}, {"block_table": (dtype, "plain")}, None)
    batch.layout["seq_lens"] = (np.int64, "plain")
    assert oracle.compressed_slot_mapping(**batch.arguments)[3:5] == [2**62 - 2**32 + 2**31 - 1, 2**61 - 2**30]
    check(backend, batch)


@every_backend
@pytest.mark.parametrize(
    "scalars",
    [
        {"compress_ratio": 9},
        {"compress_ratio": 2**63 - 1},
        {"block_size": 2**63 - 1, "compress_ratio": 1, "block_table": [[0]]},
        {"cp_interleave": 2**62, "dcp_world_size": 2**62, "dcp_rank": 0, "cp_shard": "state"},
        {"cp_interleave": 2**62, "dcp_world_size": 2**62, "dcp_rank": 0},
        {"cp_interleave": 1, "dcp_world_size": 2**63 - 1, "dcp_rank": 1, "cp_shard": "state"},
        {"cp_interleave": 2**33, "dcp_world_size": 2**31, "dcp_rank": 2**31 - 1, "cp_shard": "state"},
        {"cp_interleave": 2**63 - 1, "cp_shard": "state", "dcp_rank": 0},
        {"cp_interleave": 2**63 - 1},
    ],
    ids=str,
)
def test_scalars_up_to_the_edge_of_64_bits(backend, scalars):
    check(backend, batches.Batch(ONE_REQUEST | scalars, {}, None))


@every_backend
@given(batch=batches.hostile(), seed=st.integers(0, 2**32))
def test_values_beyond_62_bits_touch_nothing_outside(backend, batch, seed):
    """Slots may wrap; the tail is PAD all the same, and the memory around `out` is as it was."""
    rng, n = np.random.default_rng(seed), batch.arguments["num_tokens"]
    arguments = {
        name: rng.choice([-(2**63), 2**63 - 1, 2**62 + 1, 0, 1], np.shape(value))
        if name in ARRAYS and value is not None
        else value
        for name, value in batch.arguments.items()
    }
    out, memory = backend.make_out([NOISE] * (n + 2))
    layout = dict.fromkeys(ARRAYS, (np.int64, "plain"))
    get_compressed_slot_mapping(**backend.make_inputs(arguments, layout), out=out)
    around = to_list(memory)
    assert around[:3] + around[3 + n :] == [*GUARD, -1, -1, *GUARD], (arguments, around)


@cache
def large_batch(requests, tokens_each, table_columns):
    rng = np.random.default_rng(0)
    n = requests * tokens_each
    own = rng.integers(0, 2**40, n)
    own[rng.random(n) < 0.1] = -1
    arguments = {
        "num_tokens": n,
        "slot_mapping": own.tolist(),
        "query_start_loc": list(accumulate([tokens_each] * requests, initial=0)),
        "seq_lens": (tokens_each + rng.integers(0, 200, requests)).tolist(),
        "block_table": rng.integers(0, 2**20, (requests, table_columns)).tolist(),
        "block_size": 16,
        "compress_ratio": 4,
    }
    return arguments, oracle.compressed_slot_mapping(**arguments)


@every_backend
@pytest.mark.parametrize("tail", [0, 1, 100_000])
@pytest.mark.parametrize(
    "size",
    [(1, 100_000, 1563), (1, 1, 4), (257, 1000, 20), (3000, 1, 3), (20_000, 3, 3), (70_000, 1, 3), (70_000, 0, 3)],
)
def test_large_batches(backend, size, tail):
    arguments, expected = large_batch(*size)
    out, memory = backend.make_out([NOISE] * (len(expected) + tail))
    get_compressed_slot_mapping(**backend.make_inputs(arguments), out=out)
    assert to_list(memory) == GUARD + expected + [-1] * tail + GUARD, (size, tail)


@cache
def long_requests(requests, block_size, compress_ratio):
    """The first begins before the batch, all inside a page, and the last of their pages is not in the table."""
    rng = np.random.default_rng(0)
    n, tokens_each = 120_000, 120_000 // requests
    own = rng.integers(0, 2**40, n)
    own[rng.random(n) < 0.1] = -1
    block_table = rng.integers(0, 2**20, (requests, max(1, tokens_each // compress_ratio // block_size)))
    block_table[rng.random(block_table.shape) < 0.05] = -1
    block_table[-1, -1] = -1
    arguments = {
        "num_tokens": n,
        "slot_mapping": own.tolist(),
        "query_start_loc": [-5 + r * tokens_each for r in range(requests)] + [n + 5],
        "seq_lens": (tokens_each + rng.integers(0, 500, requests)).tolist(),
        "block_table": block_table.tolist(),
        "block_size": block_size,
        "compress_ratio": compress_ratio,
    }
    return arguments, oracle.compressed_slot_mapping(**arguments)


@every_backend
@pytest.mark.parametrize("compress_ratio", [1, 3])
@pytest.mark.parametrize("block_size", [1, 7, 50_000])
@pytest.mark.parametrize("requests", [1, 2, 16])
def test_long_requests(backend, requests, block_size, compress_ratio):
    arguments, expected = long_requests(requests, block_size, compress_ratio)
    inputs = backend.make_inputs(arguments)
    assert to_list(get_compressed_slot_mapping(**inputs)) == expected
    out, memory = backend.make_out(arguments["slot_mapping"])
    get_compressed_slot_mapping(**inputs | {"slot_mapping": out}, out=out)
    assert to_list(memory) == GUARD + expected + GUARD


@every_backend
@pytest.mark.parametrize("requests", [1, 7])
@pytest.mark.parametrize("length", [-(2**63), -(2**62), 2**62 + 3, 2**63 - 1])
@pytest.mark.parametrize("sharded", [{}, {"dcp_world_size": 2, "dcp_rank": 1, "cp_interleave": 2**61}])
def test_lengths_at_the_ends_of_64_bits(backend, requests, length, sharded):
    """Where a request goes on from the page of states below 2**62 to the next one."""
    arguments = {
        "num_tokens": 6 * requests - 1,  # the last request goes on
        "slot_mapping": None,
        "query_start_loc": list(range(0, 6 * requests + 1, 6)),
        "seq_lens": [length] * requests,
        "block_table": [[0, 0]] * requests,
        "block_size": 2**62,
        "compress_ratio": 1,
    } | sharded
    inputs = backend.make_inputs(arguments, {"seq_lens": (np.int64, "plain")})
    assert to_list(get_compressed_slot_mapping(**inputs)) == oracle.compressed_slot_mapping(**arguments)


@every_backend
@pytest.mark.parametrize("length", [6, 8, 11])
def test_in_place_in_a_buffer_of_another_length(backend, length):
    """`out` begins where `slot_mapping` does, and ends before it, with it, or behind it."""
    own = [0, -1, 2, 3, 4, 5, 6, -1, 8, 9, 10]
    memory = backend.wrap(np.array(own))
    arguments = ONE_REQUEST | {"num_tokens": 6, "slot_mapping": own[:8], "compress_ratio": 1, "block_size": 4}
    inputs = backend.make_inputs(arguments) | {"slot_mapping": backend.as_out(memory[:8])}
    get_compressed_slot_mapping(**inputs, out=backend.as_out(memory[:length]))
    expected = oracle.compressed_slot_mapping(**arguments, out_len=length)
    assert to_list(memory) == expected + own[length:]


@array_backends
def test_the_published_positional_order(backend):
    arguments = ONE_REQUEST | {"slot_mapping": [0] * 8, "dcp_world_size": 2, "cp_interleave": 4}
    (out, _), inputs = backend.make_out([NOISE] * 9), backend.make_inputs(arguments)
    *first, world, interleave = inputs.values()
    get_compressed_slot_mapping(*first, out, world, interleave)
    assert to_list(out) == oracle.compressed_slot_mapping(**arguments, out_len=9)


@every_backend
def test_seq_lens_is_not_looked_at_when_positions_are_given(backend):
    arguments = ONE_REQUEST | {"positions": [3, 7, 0, 1, 11, 4, 5, 6]}
    for seq_lens in (None, "nothing of the kind", np.zeros((0, 2))):
        result = get_compressed_slot_mapping(**backend.make_inputs(arguments) | {"seq_lens": seq_lens})
        assert to_list(result) == oracle.compressed_slot_mapping(**arguments), seq_lens


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "-")
@pytest.mark.parametrize("out", [None, "numpy", "torch"])
@pytest.mark.parametrize("first", ["list", "numpy", "torch"])
def test_the_result_follows_out_and_else_query_start_loc(first, out):
    """Lists, NumPy and torch CPU arrays mix, whichever is which."""
    make = {"list": list, "numpy": np.array, "torch": torch.tensor}
    buffer = make[out]([NOISE] * 8) if out else None
    for others in make.values():
        inputs = {name: others(value) if name in ARRAYS and value else value for name, value in ONE_REQUEST.items()}
        inputs["query_start_loc"] = make[first](ONE_REQUEST["query_start_loc"])
        result = get_compressed_slot_mapping(**inputs, out=buffer)
        assert type(result) is (torch.Tensor if (out or first) == "torch" else np.ndarray)
        assert result.tolist() == oracle.compressed_slot_mapping(**ONE_REQUEST), others


@every_backend
@pytest.mark.parametrize(("shard", "given_by"), [("token", "mask"), ("token", "rank"), ("state", "rank")])
@given(world=st.integers(1, 5), runs=st.integers(1, 3), ratio=st.integers(1, 5), length=st.integers(1, 100))
def test_over_all_ranks_each_closing_token_gets_one_slot(backend, shard, given_by, world, runs, ratio, length):
    """And each rank's states are 0, 1, 2, ...: its slots, with one state a page and pages 0, 1, 2, ..."""
    interleave = runs * ratio if shard == "token" else runs
    slots_of_ranks = []
    for rank in range(world):
        own = [0 if pos // interleave % world == rank else -1 for pos in range(length)]
        arguments = {
            "num_tokens": length,
            "slot_mapping": own if given_by == "mask" else None,
            "query_start_loc": [0, length],
            "seq_lens": [length],
            "block_table": [list(range(length))],
            "block_size": 1,
            "compress_ratio": ratio,
            "dcp_world_size": world,
            "cp_interleave": interleave,
            "dcp_rank": rank if given_by == "rank" else None,
            "cp_shard": shard,
        }
        slots = to_list(get_compressed_slot_mapping(**backend.make_inputs(arguments)))
        written = [slot for slot in slots if slot != -1]
        assert written == list(range(len(written))), arguments
        slots_of_ranks.append(slots)

    writers = [sum(slot != -1 for slot in slots) for slots in zip(*slots_of_ranks, strict=True)]
    assert writers == [int((pos + 1) % ratio == 0) for pos in range(length)], (shard, world, interleave, ratio)


@every_backend
@pytest.mark.parametrize("interleave", [1, 3, 4, 100])
def test_one_rank_is_the_plain_rule(backend, interleave):
    inputs = backend.make_inputs(ONE_REQUEST)
    plain = to_list(get_compressed_slot_mapping(**inputs))
    for shard, rank in [("token", None), ("token", 0), ("state", 0)]:
        result = get_compressed_slot_mapping(**inputs, cp_interleave=interleave, dcp_rank=rank, cp_shard=shard)
        assert to_list(result) == plain == [-1, -1, -1, 5, -1, -1, -1, 6], (shard, rank)


@pytest.mark.skipif(bool(NO_SECOND_GPU), reason=NO_SECOND_GPU or "-")
@gpu_backends
def test_arrays_of_a_gpu_that_is_not_the_current_one(backend):
    with cupy.cuda.Device(1):
        inputs = backend.make_inputs(ONE_REQUEST)
    result = get_compressed_slot_mapping(**inputs)
    assert to_list(result) == oracle.compressed_slot_mapping(**ONE_REQUEST)
    assert "1" in str(result.device)
    assert cupy.cuda.runtime.getDevice() == 0
