"""Map random batches on the GPU and with NumPy until a time is over, small ones with the plain loop too.

    python tests/differential_fuzz.py --seconds 300
    compute-sanitizer --tool memcheck python tests/differential_fuzz.py --batches 300

Values are drawn over the whole range of their dtype, over sensible ranges, or in between. Every array is an allocation
of its own, exactly to size, so that memory checkers see the first byte outside. The exit code is 1 at a difference.
"""

import argparse
import itertools
import sys
import time

import cupy
import numpy as np
import oracle

from cupy_slots import get_compressed_slot_mapping

SMALL = 2_000  # tokens and requests that the plain loop still takes


def draw(rng):
    """The arguments of a call, NumPy arrays among them."""
    requests = int(rng.choice([0, 1, 3, 12, 40, 300, 900, 1500, 5000]))
    tokens = int(rng.choice([0, 1, 31, 300, 5000, 40_000, 300_000]))
    hostile = rng.random(5) < rng.choice([0, 0.3, 1])
    ratio, block_size = int(rng.choice([1, 2, 3, 4, 5, 64, 128, 2**33])), int(rng.choice([1, 2, 7, 64, 2**20]))

    def integers(low, high, shape, wild, dtype=None):
        dtype = dtype or rng.choice([np.int32, np.int64])
        if wild:  # int64 beyond 2**40 could leave the slot's 64 bits
            low, high = (-(2**31), 2**31) if dtype == np.int32 else (-(2**40), 2**40)
        return rng.integers(low, high, shape).astype(dtype)

    query_start_loc = np.sort(integers(0, tokens + 5, requests + 1, hostile[0]))
    if hostile[0] and requests and rng.random() < 0.7:
        query_start_loc[rng.integers(0, requests + 1)] -= rng.integers(0, 10)
    elif requests and rng.random() < 0.3:  # padding behind the last real request
        query_start_loc[rng.integers(0, requests + 1) :] = rng.integers(-1, 2)
    columns = int(rng.choice([0, 1, 5, 600, 300_000 // (requests + 1)]))
    arguments = {
        "num_tokens": tokens,
        "slot_mapping": None if rng.random() < 0.3 else integers(-2, 3, tokens + 3, hostile[1]),
        "query_start_loc": query_start_loc,
        "seq_lens": integers(-3, tokens + 300, requests + 1, hostile[2]),
        "block_table": integers(-1, 10_000, (requests + 2, columns), hostile[3]),
        "block_size": block_size,
        "compress_ratio": ratio,
    }
    if rng.random() < 0.2:
        arguments |= {"positions": integers(-3, 4000, tokens, hostile[4]), "seq_lens": None}
    if rng.random() < 0.4:
        world = int(rng.integers(1, 9))
        shard = str(rng.choice(["token", "state"]))
        interleave = int(rng.integers(1, 6)) * (ratio if shard == "token" else 1)
        rank = int(rng.integers(0, world))
        arguments |= {"dcp_world_size": world, "cp_interleave": interleave, "cp_shard": shard, "dcp_rank": rank}
    return arguments


def difference(arguments, extra):
    """What differs between the GPU, NumPy and the loop, or None."""
    n = arguments["num_tokens"]
    expected = np.full(n + extra, -7)
    get_compressed_slot_mapping(**arguments, out=expected)
    upload = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    out = cupy.full(n + extra, -7)
    get_compressed_slot_mapping(**upload, out=out)
    wrong = np.flatnonzero(out.get() != expected)
    if len(wrong):
        return f"GPU and NumPy differ at tokens {wrong[:5]}: {out.get()[wrong[:5]]}, {expected[wrong[:5]]}"
    requests = len(arguments["query_start_loc"])
    if max(n, requests) <= SMALL and n * requests <= 50 * SMALL:
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        if oracle.compressed_slot_mapping(**plain, out_len=n + extra) != expected.tolist():
            return "NumPy and the plain loop differ"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--batches", type=int, default=sys.maxsize, help="stop after this many batches")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cupy.cuda.set_allocator(None)
    end, tokens, done = time.monotonic() + options.seconds, 0, 0
    for done in itertools.count():
        if done == options.batches or time.monotonic() > end:
            break
        rng = np.random.default_rng([options.seed, done])
        arguments = draw(rng)
        found = difference(arguments, int(rng.integers(0, 40)))
        if found:
            print(f"batch {done} of seed {options.seed}: {found}\n{arguments}")
            return 1
        tokens += arguments["num_tokens"]
    print(f"seed {options.seed}: {done:,} batches of {tokens:,} tokens, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
