"""Calls of one form, which recall what the checks of the first one found: nothing of the result may depend on it."""

import threading

import numpy as np
import pytest
from backends import GPU_BACKENDS as ALL_GPU_BACKENDS
from backends import NOISE, parametrize, to_list

import cupy_slots
from cupy_slots import CacheGroup, _forms, get_compressed_slot_mapping, get_compressed_slot_mappings

BATCH = {
    "num_tokens": 8,
    "slot_mapping": [0, 1, 2, 3, -1, 5, 6, 7],
    "query_start_loc": [0, 5, 8],
    "seq_lens": [8, 6],
    "block_table": [[10, 11], [20, 21]],
    "block_size": 64,
    "compress_ratio": 4,
}
EXPECTED = [640, -1, -1, -1, -1, 1280, -1, -1]

gpu_backends = parametrize([backend for backend in ALL_GPU_BACKENDS if backend.name in ("torch-cuda", "cupy")])


@pytest.fixture(autouse=True)
def no_forms():
    _forms._forms.clear()


def call(backend, **changed):
    return get_compressed_slot_mapping(**backend.make_inputs(BATCH) | changed)


@gpu_backends
@pytest.mark.parametrize("out_len", [None, 8, 11])
def test_a_recalled_call_maps_its_own_arrays(backend, out_len):
    for pages in ([[10, 11], [20, 21]], [[30, 31], [40, 41]], [[-1, 0], [-1, 0]]):
        out = None if out_len is None else backend.make_out([NOISE] * out_len)[0]
        result = call(backend, block_table=backend.make(pages, np.int32), out=out)
        expected = [page * 64 if page >= 0 else -1 for page in (pages[0][0], pages[1][0])]
        assert to_list(result) == [expected[0], -1, -1, -1, -1, expected[1], -1, -1], pages
        assert out is None or to_list(out)[8:] == [-1] * (out_len - 8)
        assert (result is out) == (out_len == 8)
    assert len(_forms._forms) == 1


@gpu_backends
def test_a_later_overlap_is_seen(backend):
    """Same shapes, strides, dtypes and devices; other addresses."""
    memory = backend.wrap(np.zeros(40, np.int64))
    call(backend, slot_mapping=memory[:8], out=memory[8:16])
    with pytest.raises(ValueError, match="out must not overlap slot_mapping"):
        call(backend, slot_mapping=memory[:8], out=memory[4:12])
    assert to_list(call(backend, slot_mapping=memory[:8], out=memory[:8]))[0] == 640  # in place


@parametrize([backend for backend in ALL_GPU_BACKENDS if backend.name == "cupy"])
def test_an_overlap_with_an_array_that_runs_backwards_is_seen(backend):
    memory = backend.wrap(np.zeros(40, np.int64))
    call(backend, slot_mapping=memory[15:7:-1], out=memory[20:28])
    with pytest.raises(ValueError, match="out must not overlap slot_mapping"):
        call(backend, slot_mapping=memory[15:7:-1], out=memory[2:10])


@gpu_backends
@pytest.mark.parametrize("name", ["num_tokens", "block_size", "compress_ratio", "dcp_world_size", "cp_interleave"])
def test_a_later_bool_is_refused(backend, name):
    ones = BATCH | {"num_tokens": 1, "block_size": 1, "compress_ratio": 1}
    arguments = backend.make_inputs(ones) | {"dcp_world_size": 1, "cp_interleave": 1}
    get_compressed_slot_mapping(**arguments)
    with pytest.raises(TypeError, match=name):
        get_compressed_slot_mapping(**arguments | {name: True})


@gpu_backends
def test_a_later_wrong_array_is_refused(backend):
    call(backend)
    with pytest.raises(TypeError, match="seq_lens"):
        call(backend, seq_lens=backend.wrap(np.zeros(2)))
    with pytest.raises(ValueError, match="slot_mapping"):
        call(backend, slot_mapping=backend.make([0] * 7))
    with pytest.raises(ValueError, match="dcp_rank"):
        call(backend, dcp_rank=1)
    assert to_list(call(backend)) == EXPECTED


@gpu_backends
def test_numbers_belong_to_the_form(backend):
    for block_size, expected in ((64, 640), (2, 20), (64, 640)):
        assert to_list(call(backend, block_size=block_size))[0] == expected
    assert to_list(call(backend, dcp_world_size=2, dcp_rank=1, cp_shard="state")) == [-1, -1, -1, -1, -1, -1, -1, -1]
    assert to_list(call(backend, dcp_world_size=2, dcp_rank=0, cp_shard="state")) == EXPECTED


@gpu_backends
@pytest.mark.parametrize("masked", [False, True])
def test_groups(backend, masked):
    inputs = backend.make_inputs(BATCH)
    _, block_size, compress_ratio = (inputs.pop(name) for name in ("block_table", "block_size", "compress_ratio"))
    for page in (10, 50):
        table = backend.make([[page, 11], [20, 21]], np.int32)
        own = backend.make([-1] * 8) if masked else None
        groups = [CacheGroup(table, block_size, compress_ratio, None, slots) for slots in (None, own, None)]
        results = [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)]
        expected = [page * 64, *EXPECTED[1:]]
        assert results == [expected, [-1] * 8 if masked else expected, expected]
    assert len(_forms._forms) == (0 if masked else 1)


@gpu_backends
def test_a_reload_is_followed(backend):
    call(backend)
    (form,) = _forms._forms.values()
    cupy_slots.reload_kernels()
    assert to_list(call(backend)) == EXPECTED
    (later,) = _forms._forms.values()
    assert later is not form


@gpu_backends
def test_threads_of_one_form(backend):
    wrong = []

    def loop(page):
        table = backend.make([[page, 11], [20, 21]], np.int32)
        for _ in range(200):
            result = to_list(call(backend, block_table=table))
            if result != [page * 64, *EXPECTED[1:]]:
                wrong.append((page, result))

    threads = [threading.Thread(target=loop, args=(page,)) for page in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu_backends
def test_forms_are_bounded(backend):
    for block_size in range(1, 20):
        _forms._MOST_FORMS, before = 8, _forms._MOST_FORMS
        try:
            call(backend, block_size=block_size)
        finally:
            _forms._MOST_FORMS = before
        assert len(_forms._forms) <= 8
