"""Calls of one form, which recall what the checks of the first one found: nothing of the result may depend on it."""

import functools
import threading

import numpy as np
import pytest
from backends import GPU_BACKENDS as ALL_GPU_BACKENDS
from backends import NO_TORCH, NOISE, parametrize, to_list, torch

import cupy_slots
from cupy_slots import CacheGroup, _arrays, _forms, get_compressed_slot_mapping, get_compressed_slot_mappings

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
torch_backend = parametrize([backend for backend in ALL_GPU_BACKENDS if backend.name == "torch-cuda"])


@pytest.fixture(autouse=True)
def recalled(monkeypatch):
    """What each try to launch a form gave, beginning with none remembered."""
    results, launch = [], _forms.Form.launch

    def counted(*arguments):
        results.append(launch(*arguments))
        return results[-1]

    monkeypatch.setattr(_forms.Form, "launch", counted)
    _forms._kind.cache_clear()
    return results


def call(backend, **changed):
    return get_compressed_slot_mapping(**backend.make_inputs(BATCH) | changed)


@gpu_backends
@pytest.mark.parametrize("out_len", [None, 8, 11])
def test_a_recalled_call_maps_its_own_arrays(backend, out_len, recalled):
    for turn, page in enumerate((10, 30, -1, 40, 10)):
        out = None if out_len is None else backend.make_out([NOISE] * out_len)[0]
        result = call(backend, block_table=backend.make([[page, 0], [page + 5, 0]], np.int32), out=out)
        expected = [page * 64 if page >= 0 else -1, -1, -1, -1, -1, (page + 5) * 64, -1, -1]
        assert to_list(result) == expected, page
        assert out is None or to_list(out)[8:] == [-1] * (out_len - 8)
        assert (result is out) == (out_len == 8)
        assert len(recalled) == max(0, turn - 1), "the third call and later ones are recalled"


@gpu_backends
def test_calls_with_the_same_memory(backend, recalled):
    """The arguments that an earlier call packed are launched as they are."""
    inputs, out = backend.make_inputs(BATCH), backend.make_out([NOISE] * 8)[0]
    for turn in range(6):
        inputs["seq_lens"][0] = 8 + 4 * turn
        assert to_list(get_compressed_slot_mapping(**inputs, out=out))[0] == 640 + turn
    assert len(recalled) == 4


@gpu_backends
def test_layouts_in_turn(backend, recalled):
    """Several forms of one kind, and more than are kept."""
    for num_layouts in (3, 6):
        for turn in range(4 * num_layouts):
            columns = 2 + turn % num_layouts
            table = backend.make([[10] * columns, [20] * columns], np.int32)
            assert to_list(call(backend, block_table=table)) == EXPECTED
        assert bool(recalled) == (num_layouts == 3)
        recalled.clear()
        _forms._kind.cache_clear()


@gpu_backends
def test_in_place(backend, recalled):
    for _ in range(5):
        memory = backend.make_out(BATCH["slot_mapping"])[0]
        assert to_list(call(backend, slot_mapping=memory, out=memory)) == EXPECTED
    assert len(recalled) == 3


@gpu_backends
def test_a_later_overlap_is_seen(backend):
    """Same shapes, strides, dtypes and devices; other addresses."""
    memory = backend.wrap(np.zeros(40, np.int64))
    for _ in range(3):
        call(backend, slot_mapping=memory[:8], out=memory[8:16])
    with pytest.raises(ValueError, match="out must not overlap slot_mapping"):
        call(backend, slot_mapping=memory[:8], out=memory[4:12])
    assert to_list(call(backend, slot_mapping=memory[:8], out=memory[:8]))[0] == 640  # in place


@parametrize([backend for backend in ALL_GPU_BACKENDS if backend.name == "cupy"])
def test_an_overlap_with_an_array_that_runs_backwards_is_seen(backend):
    memory = backend.wrap(np.zeros(40, np.int64))
    for _ in range(3):
        call(backend, slot_mapping=memory[15:7:-1], out=memory[20:28])
    with pytest.raises(ValueError, match="out must not overlap slot_mapping"):
        call(backend, slot_mapping=memory[15:7:-1], out=memory[2:10])


@gpu_backends
@pytest.mark.parametrize("name", ["num_tokens", "block_size", "compress_ratio", "dcp_world_size", "cp_interleave"])
def test_a_later_bool_is_refused(backend, name):
    ones = BATCH | {"num_tokens": 1, "block_size": 1, "compress_ratio": 1}
    arguments = backend.make_inputs(ones) | {"dcp_world_size": 1, "cp_interleave": 1}
    for _ in range(3):
        get_compressed_slot_mapping(**arguments)
    with pytest.raises(TypeError, match=name):
        get_compressed_slot_mapping(**arguments | {name: True})


@gpu_backends
def test_a_later_wrong_array_is_refused(backend):
    for _ in range(3):
        call(backend)
    with pytest.raises(TypeError, match="seq_lens"):
        call(backend, seq_lens=backend.wrap(np.zeros(2)))
    with pytest.raises(ValueError, match="slot_mapping"):
        call(backend, slot_mapping=backend.make([0] * 7))
    with pytest.raises(ValueError, match="dcp_rank"):
        call(backend, dcp_rank=1)
    for number in ([], backend.wrap(np.zeros(1))):
        with pytest.raises(TypeError, match="block_size"):
            call(backend, block_size=number)
    assert to_list(call(backend)) == EXPECTED


@gpu_backends
def test_numbers_belong_to_the_form(backend):
    for block_size, expected in 3 * ((64, 640), (2, 20)):
        assert to_list(call(backend, block_size=block_size))[0] == expected
    assert to_list(call(backend, dcp_world_size=2, dcp_rank=1, cp_shard="state")) == [-1, -1, -1, -1, -1, -1, -1, -1]
    assert to_list(call(backend, dcp_world_size=2, dcp_rank=0, cp_shard="state")) == EXPECTED


@gpu_backends
@pytest.mark.parametrize("masked", [False, True])
def test_groups(backend, masked, recalled):
    inputs = backend.make_inputs(BATCH)
    _, block_size, compress_ratio = (inputs.pop(name) for name in ("block_table", "block_size", "compress_ratio"))
    for page in (10, 50, 10, 70):
        table = backend.make([[page, 11], [20, 21]], np.int32)
        own = backend.make([-1] * 8) if masked else None
        groups = [CacheGroup(table, block_size, compress_ratio, None, slots) for slots in (None, own, None)]
        results = [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)]
        expected = [page * 64, *EXPECTED[1:]]
        assert results == [expected, [-1] * 8 if masked else expected, expected]
    assert len(recalled) == (0 if masked else 2)


@gpu_backends
def test_an_own_slot_mapping_or_positions_make_another_kind(backend):
    """What is None is no part of a form's arrays."""
    for _ in range(3):
        call(backend)
    assert to_list(call(backend, slot_mapping=None)) == [640, -1, -1, -1, 641, 1280, -1, -1]
    positions = backend.make([3, 7, 0, 0, 0, 0, 0, 11], np.int32)
    assert to_list(call(backend, positions=positions)) == [640, 641, -1, -1, -1, -1, -1, 1282]


@gpu_backends
def test_a_reload_is_followed(backend, recalled):
    for _ in range(3):
        call(backend)
    cupy_slots.reload_kernels()
    for _ in range(2):
        assert to_list(call(backend)) == EXPECTED
    assert [result is None for result in recalled] == [False, True, False]


@torch_backend
@pytest.mark.parametrize("guarded", [True, False])
def test_an_array_that_comes_twice_and_tensors_of_other_modes(backend, guarded, monkeypatch, recalled):
    """Where torch's own test of tensors says no, and where there is none."""
    if not guarded:
        monkeypatch.setattr(_arrays, "_tensor_guard", lambda torch: None)
    twice = backend.make([0, 5, 8], np.int32)
    for _ in range(4):
        result = call(backend, query_start_loc=twice, seq_lens=twice)
        assert to_list(result) == [-1, -1, -1, -1, -1, -1, 1280, -1]
        with torch.inference_mode():
            assert to_list(call(backend)) == EXPECTED
        assert to_list(call(backend)) == EXPECTED
    assert len(recalled) >= 4


@torch_backend
def test_without_a_guard_every_array_is_compared(backend, monkeypatch, recalled):
    monkeypatch.setattr(_arrays, "_tensor_guard", lambda torch: None)
    for _ in range(4):
        assert to_list(call(backend)) == EXPECTED
    assert len(recalled) == 2
    with pytest.raises(TypeError, match="seq_lens"):
        call(backend, seq_lens=backend.wrap(np.zeros(2)))
    with pytest.raises(TypeError, match="seq_lens"):
        call(backend, seq_lens=torch.zeros(2, 2).to_sparse())
    assert to_list(call(backend, block_table=backend.make([[10, 11], [20, 21]], np.int64))) == EXPECTED


class Lenient:
    """A guard that knows fewer differences than the calls rely on."""

    def __init__(self, *tensors, blind, **options):
        self._tensors, self._blind = tensors, blind

    def check(self, *tensors):
        def seen(tensor):
            properties = {
                "type": type(tensor),
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "strides": tensor.stride(),
                "device": tensor.device,
            }
            return [value for name, value in properties.items() if name != self._blind]

        return [*map(seen, tensors)] == [*map(seen, self._tensors)]


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "-")
@pytest.mark.parametrize("blind", [None, "type", "dtype", "shape", "strides", "device"])
def test_a_guard_is_used_only_if_it_sees_all_differences(blind, monkeypatch):
    assert _arrays._tensor_guard.__wrapped__(torch) is not None
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", functools.partial(Lenient, blind=blind))
    assert (_arrays._tensor_guard.__wrapped__(torch) is None) == (blind is not None)


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
