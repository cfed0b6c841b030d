"""What the mapping refuses: the error, a message that names the argument and what it was, `out` as before."""

import os
import re
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from backends import (
    ARRAYS,
    GPU_BACKENDS,
    NO_GPU,
    NO_SECOND_GPU,
    NO_TORCH,
    NOISE,
    array_backends,
    cpu_backends,
    cupy,
    every_backend,
    gpu_backends,
    to_list,
    torch,
)
from hypothesis import given
from hypothesis import strategies as st

from cupy_slots import get_compressed_slot_mapping

GOOD = {
    "num_tokens": 8,
    "slot_mapping": [0, 1, 2, 3, 4, 5, 6, 7],
    "query_start_loc": [0, 4, 8],
    "seq_lens": [4, 8],
    "block_table": [[1, 2], [3, 4]],
    "block_size": 1,
    "compress_ratio": 4,
    "positions": [0, 1, 2, 3, 4, 5, 6, 7],
}
SHAPES = {name: np.shape(GOOD[name]) for name in ARRAYS} | {"out": (8,)}
NOT_INTEGERS = [True, False, np.True_, np.array(True), "4", [4], {}, 4j]
NOT_INTEGERS += [1.5, np.float32(0.5), np.array(1.5), float("nan"), float("inf"), Fraction(1, 2)]
WRONG_DTYPES = ["bool", "float32", "float64", "complex64", "uint8", "uint16", "uint32", "uint64", "int8", "int16"]
NUMBERS = ("num_tokens", "block_size", "compress_ratio", "dcp_world_size", "cp_interleave", "dcp_rank")


def good(name):
    """The arguments, with `positions` in place of `seq_lens` only where it is the one to be spoilt."""
    return GOOD | {"seq_lens" if name == "positions" else "positions": None}


def refuse(backend, error, name, value, *words, **others):
    out, _ = backend.make_out([NOISE] * 8)
    arguments = backend.make_inputs(good(name)) | {"out": out, **others, name: value}
    with pytest.raises(error) as caught:
        get_compressed_slot_mapping(**arguments)
    for word in (name, *words):
        assert re.search(word, str(caught.value)), (word, str(caught.value))
    assert to_list(out) == [NOISE] * 8, arguments


@array_backends
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_dtype(backend, name, dtype):
    refuse(backend, TypeError, name, backend.wrap(np.ones(SHAPES[name], dtype)), dtype)


@array_backends
def test_out_of_int32(backend):
    refuse(backend, TypeError, "out", backend.wrap(np.zeros(8, np.int32)), "int32")


@every_backend
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", ["abc", 5, {1: 2}, {3}, b"12345678"], ids=repr)
def test_no_array(backend, name, value):
    refuse(backend, TypeError, name, value, f"{type(value).__name__}|{re.escape(repr(value))}")


@every_backend
@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table"])
def test_none(backend, name):
    refuse(backend, TypeError, name, None, "None")


@cpu_backends
def test_out_is_no_list(backend):
    refuse(backend, TypeError, "out", [0] * 8, "list")


@cpu_backends
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("item", [1.0, True, "1", None], ids=repr)
def test_list_of_something_else(backend, name, item):
    refuse(backend, TypeError, name, np.full(SHAPES[name], item, object).tolist())


@cpu_backends
@pytest.mark.parametrize("name", ARRAYS)
def test_list_beyond_64_bits(backend, name):
    refuse(backend, (TypeError, ValueError), name, np.full(SHAPES[name], 2**64, object).tolist())


@cpu_backends
@pytest.mark.parametrize("name", ARRAYS)
def test_ragged_list(backend, name):
    refuse(backend, TypeError, name, [[1, 2], [3]])


@array_backends
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("added", [-1, 1])
def test_number_of_dimensions(backend, name, added):
    shape = (*SHAPES[name], 1) if added == 1 else SHAPES[name][1:]
    refuse(backend, ValueError, name, backend.wrap(np.ones(shape, np.int64)), ", ".join(map(str, shape)))


@cpu_backends
def test_number_of_dimensions_of_a_list(backend):
    refuse(backend, ValueError, "seq_lens", [[4, 8]], "1, 2")
    refuse(backend, ValueError, "block_table", [1, 2, 3], "3")


@every_backend
@pytest.mark.parametrize(("name", "rows"), [("seq_lens", 1), ("block_table", 1), ("slot_mapping", 7), ("positions", 7)])
def test_too_few_rows(backend, name, rows):
    refuse(backend, ValueError, name, backend.make(GOOD[name][:rows]), str(rows), str(len(GOOD[name])))


@array_backends
def test_out_too_short(backend):
    refuse(backend, ValueError, "out", backend.make_out([NOISE] * 7)[0], "7", "8")


@every_backend
def test_query_start_loc_empty(backend):
    refuse(backend, ValueError, "query_start_loc", backend.make([]))


@every_backend
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_no_integer(backend, name, value):
    refuse(backend, TypeError, name, value, f"{type(value).__name__}|{re.escape(repr(value))}")


@every_backend
@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "dcp_rank"])
def test_no_number(backend, name):
    refuse(backend, TypeError, name, None, "None")


@every_backend
@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int64, np.uint64, np.array, float, np.float32, np.float64])
def test_integral_values_of_any_type_are_taken(backend, integer):
    numbers = {"num_tokens": 8, "block_size": 1, "compress_ratio": 4}
    numbers |= {"dcp_world_size": 2, "cp_interleave": 4, "dcp_rank": 1}
    expected = oracle.compressed_slot_mapping(**good("") | numbers)
    taken = {name: integer(value) for name, value in numbers.items()}
    assert to_list(get_compressed_slot_mapping(**backend.make_inputs(good("") | taken))) == expected


@every_backend
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", -1),
        ("block_size", 0),
        ("block_size", -64),
        ("compress_ratio", 0),
        ("compress_ratio", -4),
        ("dcp_world_size", 0),
        ("dcp_world_size", -1),
    ]
    + [(name, value) for name in NUMBERS for value in (2**63, -(2**63) - 1)],
)
def test_number_out_of_range(backend, name, value):
    refuse(backend, ValueError, name, value, str(value))


@every_backend
@pytest.mark.parametrize("shard", ["token", "state"])
@pytest.mark.parametrize(("world", "rank"), [(1, 1), (2, 2), (2, -1), (4, 7)])
def test_rank_outside_the_world(backend, shard, world, rank):
    context = {"dcp_world_size": world, "cp_interleave": 4, "cp_shard": shard}
    refuse(backend, ValueError, "dcp_rank", rank, str(rank), **context)


@every_backend
@pytest.mark.parametrize("interleave", [1, 2, 6, 0, -4])
@pytest.mark.parametrize("rank", [None, 1])
def test_token_interleave_is_a_multiple_of_the_ratio(backend, interleave, rank):
    refuse(backend, ValueError, "cp_interleave", interleave, str(interleave), dcp_world_size=2, dcp_rank=rank)


@every_backend
@pytest.mark.parametrize("interleave", [0, -1])
def test_state_interleave_is_at_least_one(backend, interleave):
    context = {"dcp_world_size": 2, "dcp_rank": 1, "cp_shard": "state"}
    refuse(backend, ValueError, "cp_interleave", interleave, str(interleave), **context)


@every_backend
def test_sharded_tokens_need_a_mask_or_a_rank(backend):
    refuse(backend, ValueError, "dcp_rank", None, "slot_mapping", slot_mapping=None, dcp_world_size=2, cp_interleave=4)


@every_backend
@pytest.mark.parametrize("world", [1, 2])
def test_sharded_states_need_a_rank(backend, world):
    refuse(backend, ValueError, "dcp_rank", None, "state", dcp_world_size=world, cp_shard="state")


@every_backend
@pytest.mark.parametrize("shard", ["page", "", "Token", None, 1])
def test_unknown_shard(backend, shard):
    refuse(backend, ValueError, "cp_shard", shard, re.escape(repr(shard)), "token", "state", dcp_rank=0)


def test_out_read_only():
    out = np.full(8, NOISE)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out.*read-only"):
        get_compressed_slot_mapping(**good(""), out=out)
    assert out.tolist() == [NOISE] * 8


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")
def test_out_of_a_read_only_interface():
    memory = cupy.full(8, NOISE)
    interface = memory.__cuda_array_interface__ | {"data": (memory.data.ptr, True)}
    inputs = {
        name: cupy.array(value) if name in ARRAYS and value is not None else value for name, value in good("").items()
    }
    with pytest.raises(ValueError, match=r"out.*read-only"):
        get_compressed_slot_mapping(**inputs, out=SimpleNamespace(__cuda_array_interface__=interface))
    assert memory.tolist() == [NOISE] * 8


@array_backends
def test_out_not_contiguous(backend):
    for step in (2, 3, -1) if "reversed" in backend.strides else (2, 3):
        memory = backend.wrap(np.full(24, NOISE))
        refuse(backend, ValueError, "out", backend.as_out(memory[::step]), "contiguous")
        assert to_list(memory) == [NOISE] * 24, step


def check_overlap(backend, name, value, out, memory, overlaps, arguments):
    """Refused and nothing written where an element is shared; else mapped as ever."""
    before = to_list(memory)
    inputs = backend.make_inputs(arguments) | {name: backend.as_input(value)}
    if overlaps:
        with pytest.raises(ValueError, match=f"out.*{name}|{name}.*out"):
            get_compressed_slot_mapping(**inputs, out=backend.as_out(out))
        assert to_list(memory) == before
    else:
        get_compressed_slot_mapping(**inputs, out=backend.as_out(out))
        out_len = out.shape[0]
        assert to_list(out) == oracle.compressed_slot_mapping(**arguments, out_len=out_len), arguments


@array_backends
@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "block_table"])
@given(start=st.integers(0, 30), step=st.integers(1, 4), out_start=st.integers(0, 50), out_len=st.integers(8, 12))
def test_overlap_in_one_dimension(backend, name, start, step, out_start, out_len):
    cells = np.arange(62)
    key = slice(start, start + (len(GOOD[name]) - 1) * step + 1, step)
    memory, span = backend.wrap(cells), range(out_start, out_start + out_len)
    overlaps = not set(cells[key].tolist()).isdisjoint(span)
    if name == "slot_mapping" and step == 1 and start == out_start:
        overlaps = False  # in place
    arguments = good(name) | {name: cells[key].tolist()}
    check_overlap(backend, name, memory[key], memory[out_start : span.stop], memory, overlaps, arguments)


@array_backends
@given(
    rows=st.builds(slice, st.integers(0, 4), st.integers(7, 8), st.integers(1, 2)),
    columns=st.builds(slice, st.integers(0, 7), st.integers(0, 8), st.integers(1, 3)),
    transposed=st.booleans(),
    out_start=st.integers(0, 52),
    out_len=st.integers(8, 12),
)
def test_overlap_in_two_dimensions(backend, rows, columns, transposed, out_start, out_len):
    """Overlap is of elements, not of bounding boxes: `out` may lie between the rows or columns of a table."""
    cells = np.arange(64).reshape(8, 8)
    memory, span = backend.wrap(cells), range(out_start, out_start + out_len)
    table, values = memory[rows, columns], cells[rows, columns]
    if transposed and values.shape[1] >= 2:
        table, values = table.T, values.T
    overlaps = not set(values.ravel().tolist()).isdisjoint(span)
    arguments = good("") | {"block_table": values.tolist()}
    out = memory.reshape(-1)[out_start : span.stop]
    check_overlap(backend, "block_table", table, out, memory, overlaps, arguments)


def test_overlap_of_the_same_bytes_in_another_dtype():
    memory = np.arange(12)
    with pytest.raises(ValueError, match="slot_mapping"):
        get_compressed_slot_mapping(**good("") | {"slot_mapping": memory.view(np.int32)[:8]}, out=memory[:8])
    assert memory.tolist() == list(range(12))


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "-")
def test_overlap_of_the_same_memory_in_another_library():
    memory = np.arange(12)
    with pytest.raises(ValueError, match="slot_mapping"):
        get_compressed_slot_mapping(**good("") | {"slot_mapping": torch.from_numpy(memory)[4:]}, out=memory[:8])
    assert memory.tolist() == list(range(12))


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU, and the array is a fake")
@pytest.mark.parametrize("name", SHAPES)
def test_gpu_array_among_cpu_arrays_without_a_gpu(name):
    """Refused for the mixture or for want of a GPU: both are true."""
    interface = {"shape": SHAPES[name], "typestr": "<i8", "data": (4096, False), "version": 3}
    out = np.full(8, NOISE)
    arguments = good(name) | {"out": out} | {name: SimpleNamespace(__cuda_array_interface__=interface)}
    with pytest.raises((ValueError, RuntimeError)):
        get_compressed_slot_mapping(**arguments)
    assert out.tolist() == [NOISE] * 8


@gpu_backends
@pytest.mark.parametrize("name", SHAPES)
def test_cpu_array_among_gpu_arrays(backend, name):
    value = np.zeros(SHAPES[name], np.int64)
    refuse(backend, ValueError, name, value, "(?i)cpu", "(?i)cuda|gpu", *(n for n in ARRAYS if good(name)[n]))
    assert not value.any()


@pytest.mark.skipif(bool(NO_SECOND_GPU), reason=NO_SECOND_GPU or "-")
@pytest.mark.parametrize("name", SHAPES)
def test_arrays_on_two_gpus(name):
    backend = next(b for b in GPU_BACKENDS if b.name == "cupy")
    with cupy.cuda.Device(1):
        elsewhere = cupy.zeros(SHAPES[name], cupy.int64)
    refuse(backend, ValueError, name, elsewhere, "1", "0")


def run_python(program, **environment):
    """What the program printed, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_CUPY = """
import sys
{hide}
import cupy_slots
class FakeGPUArray:
    def __init__(self, *shape, typestr="<i4"):
        self.__cuda_array_interface__ = dict(shape=shape, typestr=typestr, data=(4096, False), version=3)
try:
    cupy_slots.get_compressed_slot_mapping(8, FakeGPUArray(8), FakeGPUArray(3), FakeGPUArray(2), FakeGPUArray(2, 2),
                                           1, 4, FakeGPUArray(8, typestr="<i8"))
except RuntimeError as error:
    print(error)
try:
    import cupy
    cupy.cuda.runtime.getDeviceCount()
except Exception as reason:
    print(reason)
"""


@pytest.mark.parametrize("hide", ["", "sys.modules['cupy'] = None"], ids=["unusable", "missing"])
def test_gpu_array_without_cupy(hide):
    """The message has CuPy's own reason and the line that installs it."""
    *message, reason = run_python(WITHOUT_CUPY.format(hide=hide), CUDA_VISIBLE_DEVICES="").splitlines()
    message = " ".join(message)
    assert all(words in message for words in (reason, "pip install", "cupy")), message


FIRST_CALL_IN_A_CAPTURE = """
import cupy, cupy_slots
n = cupy.arange(9, dtype=cupy.int32)
out = cupy.full(8, 77)
stream = cupy.cuda.Stream(non_blocking=True)
cupy.cuda.Device().synchronize()

def capture():
    with stream:
        stream.begin_capture()
        try:
            cupy_slots.get_compressed_slot_mapping(8, None, n, n[1:], n[1:, None], 4, 1, out)
        except RuntimeError as error:
            print(error)
        finally:
            graph = stream.end_capture()
    return graph

capture()
print(out.tolist())
cupy_slots.warmup()
capture().launch(stream)
stream.synchronize()
print(out.tolist())
"""


@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")
def test_first_call_in_a_graph_capture():
    """Refused before the kernels are loaded, taken after warmup()."""
    *message, untouched, mapped = run_python(FIRST_CALL_IN_A_CAPTURE, CUPY_SLOTS_JIT="lazy").splitlines()
    assert "warmup()" in " ".join(message)
    assert untouched == str([NOISE] * 8)
    assert mapped == str([4, 9, 14, 19, -1, -1, -1, -1])
