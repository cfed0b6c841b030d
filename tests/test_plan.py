"""plan_compressed_slot_mappings: checked once, run many times, always what a call would give at that moment."""

import gc

import numpy as np
import pytest
from backends import CPU_BACKENDS, GPU_BACKENDS, NO_GPU, array_backends, cupy, every_backend, parametrize, to_list

from cupy_slots import CacheGroup, get_compressed_slot_mappings, plan_compressed_slot_mappings

BATCH = {"num_tokens": 8, "slot_mapping": [0, 1, 2, 3, -1, 5, 6, 7], "query_start_loc": [0, 5, 8], "seq_lens": [8, 6]}


def make(backend, num_groups=2):
    """A batch and its groups, every other with an `out` of its own."""
    table = backend.make([[10, 11], [20, 21]], np.int32)
    outs = [None if i % 2 else backend.make_out([0] * 10)[0] for i in range(num_groups)]
    groups = [CacheGroup(table, 64, 4 >> i % 3, out) for i, out in enumerate(outs)]
    return backend.make_inputs(BATCH), groups


@array_backends
@pytest.mark.parametrize("num_groups", [0, 1, 3, 16, 40])
def test_the_same_as_a_call(backend, num_groups):
    inputs, groups = make(backend, num_groups)
    plan = plan_compressed_slot_mappings(**inputs, groups=groups)
    expected = [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)]
    first, second = plan.run(), plan.run()
    assert [to_list(result) for result in first] == expected
    assert all(a is b for a, b in zip(first, second, strict=True))


@parametrize([b for b in CPU_BACKENDS + GPU_BACKENDS if b.name in ("numpy", "torch", "torch-cuda", "cupy")])
def test_it_maps_what_the_arrays_hold_now(backend):
    inputs, groups = make(backend)
    plan = plan_compressed_slot_mappings(**inputs, groups=groups)
    before = [to_list(result) for result in plan.run()]
    inputs["seq_lens"][0] = 12
    after = [to_list(result) for result in plan.run()]
    assert after == [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)]
    assert after != before


@every_backend
def test_no_tokens(backend):
    inputs = backend.make_inputs(BATCH | {"num_tokens": 0, "slot_mapping": None, "query_start_loc": [0]})
    plan = plan_compressed_slot_mappings(**inputs, groups=[CacheGroup(backend.make([[1]], np.int32), 4, 4)])
    assert [to_list(result) for result in plan.run()] == [[]]


@every_backend
def test_it_keeps_its_arrays_alive(backend):
    inputs, groups = make(backend)
    expected = [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)]
    plan = plan_compressed_slot_mappings(**inputs, groups=groups)
    del inputs, groups
    gc.collect()
    noise = [backend.make([77] * 8) for _ in range(8)]
    assert [to_list(result) for result in plan.run()] == expected, noise


@array_backends
def test_errors_come_when_it_is_made(backend):
    inputs, groups = make(backend)
    groups[1] = groups[1]._replace(block_size=0)
    with pytest.raises(ValueError, match=r"groups\[1\]\.block_size"):
        plan_compressed_slot_mappings(**inputs, groups=groups)


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")
def test_it_runs_on_the_stream_that_is_current_then():
    """A capture sees only the work of its own stream, and no synchronisation."""
    table, slots = cupy.array([[10]], np.int32), cupy.arange(4)
    offsets, lengths = cupy.array([0, 4], np.int32), cupy.array([4], np.int32)
    plan = plan_compressed_slot_mappings(4, slots, offsets, lengths, [CacheGroup(table, 64, 4)])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        (result,) = plan.run()
        graph = stream.end_capture()
        lengths[0] = 8
        graph.launch(stream)
        stream.synchronize()
    assert result.tolist() == [-1, -1, -1, 641]
