"""Threads, streams, graphs and devices: a call depends on its own thread's alone, and leaves them as they were."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from backends import (
    ARRAYS,
    CPU_BACKENDS,
    GPU_BACKENDS,
    NO_GPU,
    NO_SECOND_GPU,
    NO_TORCH,
    NOISE,
    cupy,
    gpu_backends,
    parametrize,
    to_list,
    torch,
)
from processes import CHECK, run_python

from cupy_slots import (
    CacheGroup,
    _jit,
    get_compressed_slot_mapping,
    get_compressed_slot_mappings,
    reload_kernels,
    warmup,
)

needs_gpu = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")
# The two libraries that have graphs, and a current stream and device.
library_backends = parametrize([backend for backend in GPU_BACKENDS if backend.name in ("torch-cuda", "cupy")])
THREADS = 8

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""


def batch(seed):
    """The arguments, always of the same shapes, and the answer."""
    rng = random.Random(seed)
    tokens, requests = 500, 20
    offsets = sorted([0, tokens, *(rng.randrange(tokens) for _ in range(requests - 1))])
    arguments = {
        "num_tokens": tokens,
        "slot_mapping": [rng.randrange(-1, 9) for _ in range(tokens)],
        "query_start_loc": offsets,
        "seq_lens": [end - start + rng.randrange(200) for start, end in pairwise(offsets)],
        "block_table": [[rng.randrange(-1, 10**6) for _ in range(24)] for _ in range(requests)],
        "block_size": 8,
        "compress_ratio": 4,
    }
    return arguments, oracle.compressed_slot_mapping(**arguments)


@contextlib.contextmanager
def own_stream():
    """A non-blocking stream that both libraries take as the current one of this thread."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, contextlib.nullcontext() if NO_TORCH else torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield stream
        stream.synchronize()


def spin(milliseconds):
    """Work for CuPy's current stream."""
    cupy.RawKernel(SPIN, "spin")((1,), (1,), (milliseconds * 10**6,))


def make(backend, arguments):
    """The arguments as the backend has them, and the memory behind its arrays."""
    memory = {
        name: backend.wrap(np.array(arguments[name], np.int64 if name == "slot_mapping" else np.int32))
        for name in ARRAYS
        if name in arguments
    }
    return arguments | {name: backend.as_input(array) for name, array in memory.items()}, memory


def overwrite(memory, by):
    for name, array in memory.items():
        array[...] = by[name]


# ---- threads ----


@pytest.mark.parametrize(
    "backends", [pytest.param(CPU_BACKENDS, id="cpu"), pytest.param(GPU_BACKENDS, id="gpu", marks=needs_gpu)]
)
def test_threads_of_all_libraries(backends):
    """Each with its own stream and its own batches."""
    available = [backend for backend in backends if not backend.why_not]
    work = [[batch(20 * thread + call) for call in range(20)] for thread in range(THREADS)]
    start = threading.Barrier(THREADS, timeout=60)

    def calls(thread):
        backend = available[thread % len(available)]
        with contextlib.nullcontext() if backends is CPU_BACKENDS else own_stream():
            start.wait()
            for arguments, expected in work[thread]:
                result = get_compressed_slot_mapping(**backend.make_inputs(arguments))
                assert to_list(result) == expected, (backend.name, arguments)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(calls, range(THREADS)))


FIRST_CALLS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import cupy, cupy_slots
RawKernel, made = cupy.RawKernel, []
def counted(code, *arguments):
    made.append(code)
    return RawKernel(code, *arguments)
cupy.RawKernel = counted
start = threading.Barrier(8, timeout=60)

def first_call(thread):
    def array(values):
        return cupy.asarray(np.array(values, [np.int32, np.int64][thread % 2]))
    with cupy.cuda.Stream(non_blocking=True):
        arrays = array([0, 4]), array([4]), array([[thread]])
        start.wait()
        return cupy_slots.get_compressed_slot_mapping(4, None, *arrays, 64, 4).tolist()

with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(first_call, range(8)))
assert results == [[-1, -1, -1, 64 * thread] for thread in range(8)], results
assert len(made) == len(set(made)) == 2, made
"""


@needs_gpu
def test_first_calls_at_once(tmp_path):
    """Each of the two kernels that they need is compiled once."""
    run_python(FIRST_CALLS, CUPY_SLOTS_JIT="lazy", CUPY_CACHE_DIR=str(tmp_path))


@needs_gpu
def test_reload_while_other_threads_call():
    work = [[batch(100 * thread + call) for call in range(50)] for thread in range(4)]
    backend = next(backend for backend in GPU_BACKENDS if backend.name == "cupy")

    def calls(thread):
        with own_stream():
            for arguments, expected in work[thread]:
                assert to_list(get_compressed_slot_mapping(**backend.make_inputs(arguments))) == expected, arguments

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(calls, thread) for thread in range(4)]
        while wait(running, timeout=0.005).not_done:
            reload_kernels()
        for call in running:
            call.result()


@library_backends
def test_thread_without_a_context(backend):
    """The kernel's context is current for its launch only."""
    arguments, expected = batch(0)
    inputs, (out, _) = backend.make_inputs(arguments), backend.make_out([NOISE] * len(expected))
    warmup()
    cupy.cuda.Device().synchronize()

    def call():
        before = cupy.cuda.driver.ctxGetCurrent()
        get_compressed_slot_mapping(**inputs, out=out)
        return before, cupy.cuda.driver.ctxGetCurrent()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result() == (0, 0)
    cupy.cuda.Device().synchronize()
    assert to_list(out) == expected


LOADED_WITHOUT_A_CONTEXT = f"""
from concurrent.futures import ThreadPoolExecutor
import cupy, cupy_slots
{CHECK}
for load in cupy_slots.warmup, cupy_slots.reload_kernels:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(load).result()
    check(cupy.asarray)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check, cupy.asarray).result()
"""


@needs_gpu
def test_kernels_loaded_by_a_thread_without_a_context():
    """Other threads, and threads to come, can use them."""
    run_python(LOADED_WITHOUT_A_CONTEXT, CUPY_SLOTS_JIT="lazy")


# ---- streams ----


@gpu_backends
def test_behind_work_of_the_stream(backend):
    """The inputs get their values after 50 ms, and results follow."""
    (old, _), (new, expected) = batch(1), batch(2)
    with own_stream() as stream:
        (arguments, memory), (_, written) = make(backend, old), make(backend, new)
        out, _ = backend.make_out([NOISE] * (len(expected) + 5))

        def calls():
            get_compressed_slot_mapping(**arguments, out=out)
            return get_compressed_slot_mapping(**arguments)

        calls()  # the library then has memory for a result: to get more, it would wait for the GPU
        stream.synchronize()
        spin(milliseconds=50)
        overwrite(memory, written)
        result = calls()
        assert to_list(result) == expected
        assert to_list(out) == [*expected, *[-1] * 5]


PER_THREAD_STREAMS = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
import cupy, cupy_slots
spin = cupy.RawKernel({SPIN!r}, "spin")
spin.compile()
start = threading.Barrier(8, timeout=60)

def call(thread):
    assert cupy.cuda.get_current_stream().ptr == cupy.cuda.runtime.streamPerThread
    offsets, lengths, table, new = map(cupy.asarray, ([0, 4], [4], [[0]], [[thread + 1]]))
    start.wait()
    spin((1,), (1,), (50 * 10**6,))
    table[...] = new
    return cupy_slots.get_compressed_slot_mapping(4, None, offsets, lengths, table, 64, 4).tolist()

with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(call, range(8)))
assert results == [[-1, -1, -1, 64 * (thread + 1)] for thread in range(8)], results
"""


@needs_gpu
def test_per_thread_default_streams():
    """Each call is behind 50 ms of work in the default stream of its thread."""
    run_python(PER_THREAD_STREAMS, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM="1")


# ---- graphs ----


def capture(backend, stream, calls):
    """What the calls returned, and the function that replays them."""
    if backend.name == "torch-cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = calls()
        return returned, graph.replay
    stream.begin_capture()
    try:
        returned = calls()
    finally:
        graph = stream.end_capture()
    return returned, lambda: graph.launch(stream)


@library_backends
def test_replay_after_the_inputs_changed(backend):
    """A call that makes its result, and one of two launches, both with other calls since."""
    warmup()
    ratios = range(1, 21)
    first, _ = batch(0)
    with own_stream() as stream:
        arguments, memory = make(backend, first)
        shared = {name: arguments[name] for name in ("num_tokens", "slot_mapping", "query_start_loc", "seq_lens")}
        outs = [backend.make_out([NOISE] * (first["num_tokens"] + 5))[0] for _ in ratios]
        groups = [CacheGroup(arguments["block_table"], 8, *own) for own in zip(ratios, outs, strict=True)]

        def calls():
            get_compressed_slot_mappings(groups=groups, **shared)
            return get_compressed_slot_mapping(**arguments)

        stream.synchronize()
        result, replay = capture(backend, stream, calls)
        for seed in (1, 2):
            new, expected = batch(seed)
            overwrite(memory, make(backend, new)[1])
            get_compressed_slot_mapping(**make(backend, batch(3)[0])[0])
            replay()
            assert to_list(result) == expected, seed
            for ratio, out in zip(ratios, outs, strict=True):
                expected = oracle.compressed_slot_mapping(**new | {"compress_ratio": ratio}, out_len=len(out))
                assert to_list(out) == expected, (seed, ratio)


FIRST_CALL_IN_A_TORCH_CAPTURE = """
import torch, cupy_slots
arrays = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, 4], [4], [[3]])]
out = torch.full((4,), 77, device="cuda")

def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            cupy_slots.get_compressed_slot_mapping(4, None, *arrays, 64, 4, out)
        except RuntimeError as error:
            print(error)
    return graph

capture()
assert out.tolist() == [77] * 4
cupy_slots.warmup()
capture().replay()
assert out.tolist() == [-1, -1, -1, 192], out
"""


@pytest.mark.skipif(bool(NO_GPU or NO_TORCH), reason=NO_GPU or NO_TORCH or "-")
def test_first_call_in_a_torch_capture(tmp_path):
    """Refused with nothing loaded and an empty cache, taken after warmup()."""
    message = run_python(FIRST_CALL_IN_A_TORCH_CAPTURE, CUPY_SLOTS_JIT="lazy", CUPY_CACHE_DIR=str(tmp_path))
    assert "warmup()" in message, message


# ---- what is current ----


def current():
    """The device, the context and the streams, as both libraries have them."""
    devices = range(cupy.cuda.runtime.getDeviceCount())
    state = [cupy.cuda.runtime.getDevice(), cupy.cuda.driver.ctxGetCurrent()]
    state += [cupy.cuda.get_current_stream(device).ptr for device in devices]
    if not NO_TORCH:
        state += [torch.cuda.current_device(), *(torch.cuda.current_stream(device).cuda_stream for device in devices)]
    return state


@pytest.mark.parametrize(
    "device", [0, pytest.param(1, marks=pytest.mark.skipif(bool(NO_SECOND_GPU), reason=NO_SECOND_GPU or "-"))]
)
@gpu_backends
def test_device_and_stream_stay_current(backend, device, monkeypatch):
    """After a call, a refused one and a failed launch."""

    def fail(*arguments):
        raise RuntimeError("no launch")

    arguments, expected = batch(device)
    with cupy.cuda.Device(device):
        inputs, (out, _) = backend.make_inputs(arguments), backend.make_out([NOISE] * len(expected))
        cupy.cuda.Device().synchronize()
    # A CuPy array's interface names the stream of the current device, whatever device the array is on.
    with own_stream() if device == 0 else contextlib.nullcontext():
        before = current()
        result = get_compressed_slot_mapping(**inputs)
        get_compressed_slot_mapping(**inputs, out=out)
        assert current() == before
        with pytest.raises(TypeError, match="block_size"):
            get_compressed_slot_mapping(**inputs | {"block_size": 0.5})
        assert current() == before
        failing = SimpleNamespace(**vars(cupy.cuda.driver) | {"launchKernel": fail})
        for kernel in _jit.Kernel.registry:
            loaded = {loaded_on: loaded._replace(driver=failing) for loaded_on, loaded in kernel.loaded.items()}
            monkeypatch.setattr(kernel, "loaded", loaded)
        with pytest.raises(RuntimeError, match="no launch"):
            get_compressed_slot_mapping(**inputs)
        assert current() == before
    with cupy.cuda.Device(device):
        cupy.cuda.Device().synchronize()
        assert to_list(result) == to_list(out) == expected
