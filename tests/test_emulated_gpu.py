"""The emulated GPU itself: what built-ins give a thread, and what makes a launch fail."""

import ctypes

import emulated_gpu
import pytest

WHY_NOT = emulated_gpu.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")

THREADS = 64
BUILT_INS = {  # by expression, what thread t gets
    "__shfl_sync(0xffffffff, t, 5)": lambda t: t // 32 * 32 + 5,
    "__shfl_sync(0xffffffff, t * 10000000000, t ^ 3)": lambda t: (t ^ 3) * 10**10,
    "__ballot_sync(0xffffffff, t == 0 || t == 40)": lambda t: 1 << t // 32 * 8,
    "__syncthreads_count(t % 5 == 0)": lambda t: 13,
    "__syncthreads_or(t == 9)": lambda t: 1,
    "__syncthreads_or(t < 0)": lambda t: 0,
    "__clz(t)": lambda t: 32 - t.bit_length(),
    "__clzll(t)": lambda t: 64 - t.bit_length(),
    "__popc(t)": lambda t: bin(t).count("1"),
    "__ldg(&blockDim.x)": lambda t: THREADS,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def run_kernel(body, rows, directory):
    """In every order, what each thread leaves in `row[0]`, `row[THREADS]` and so on, and what the launch says."""
    source = f"""
        extern "C" __global__ void kernel(long long* results) {{
            __shared__ int mail[{THREADS}];
            const long long t = threadIdx.x;
            long long* row = results + t;
            {body}
        }}"""
    launch = emulated_gpu.build(source, "kernel", "races", directory)
    for order in emulated_gpu.ORDERS:
        results = (ctypes.c_longlong * (rows * THREADS))()
        argument = ctypes.c_void_p(ctypes.addressof(results))
        arguments = ctypes.c_void_p(ctypes.addressof(argument))
        failure = launch(1, 1, 1, THREADS, 1, 1, 0, ctypes.addressof(arguments), order)
        yield list(results), failure and failure.decode()


def test_built_ins(directory):
    body = "".join(f"*row = {expression}; row += {THREADS};" for expression in BUILT_INS)
    expected = [value(t) for value in BUILT_INS.values() for t in range(THREADS)]
    for results, failure in run_kernel(body, len(BUILT_INS), directory):
        assert (results, failure) == (expected, None)


@pytest.mark.parametrize(("barrier", "distance"), [("__syncthreads();", 33), ("__syncwarp();", 1), ("", 0)])
def test_threads_exchange_values(barrier, distance, directory):
    body = f"mail[t] = t; {barrier} *row = mail[t ^ {distance}];"
    for results, failure in run_kernel(body, 1, directory):
        assert (results, failure) == ([t ^ distance for t in range(THREADS)], None)


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("mail[t] = t; *row = mail[t ^ 1];", "race: "),
        ("mail[t] = t; __ballot_sync(0xffffffff, 1); *row = mail[t ^ 1];", "race: "),  # orders no memory
        ("mail[t] = t; __syncwarp(); *row = mail[t ^ 33];", "race: "),
        ("atomicMax(&mail[0], t); *row = mail[0];", "race: "),
        ("if (t < 40) __syncthreads();", "not all threads come together: "),
        ("if (t & 1) __syncthreads();\nelse __syncthreads();", "not all threads come together: "),
        ("if (t == 3) return; __syncwarp();", "not all threads come together: "),
        ("__shfl_sync(0xff, t, 3);", "a collective's mask leaves out its caller"),
    ],
)
def test_faults(body, finding, directory):
    for _, failure in run_kernel(body, 1, directory):
        assert failure is not None
        assert failure.startswith(finding)
