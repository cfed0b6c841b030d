"""A program that holds what the package makes of many batches on emulated GPUs to the oracle.

`emulated_batches.py CHECKS DIRECTORY`: what the kernels are built for, of emulated_gpu.py, and where.
"""

import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import emulated_gpu
import numpy as np

if __name__ == "__main__":  # before the real ones are imported, which takes seconds under a sanitizer
    checks, directory = sys.argv[1], Path(sys.argv[2])
    sys.modules["torch"], sys.modules["cupy"] = None, emulated_gpu.emulated_cupy(checks, directory)

import batches
import oracle
from backends import ARRAYS, NOISE, Backend
from conftest import settings
from emulated_gpu import DRIVER, MULTIPROCESSORS, ORDERS, to_gpu
from hypothesis import given
from hypothesis import strategies as st

from cupy_slots import CacheGroup, _forms, get_compressed_slot_mapping, get_compressed_slot_mappings


def check(batch, expected, order):
    """The slots of a batch alone, twice again in other memory, and as two groups of one launch."""
    (directory / "last_batch.txt").write_text(f"order={order}, {batch}")  # a sanitizer's report does not say
    arguments, n = batch.arguments, batch.arguments["num_tokens"]
    device = order % len(MULTIPROCESSORS)
    gpu = Backend("emulated", "", np.copy, as_input=lambda array: to_gpu(array, device))
    DRIVER.order = order
    for groups in (1, 1, 1, 2):  # the third is recalled
        inputs = gpu.make_inputs(arguments, batch.layout)
        outs = [batch.out if batch.out is None else gpu.make([NOISE] * len(expected)) for _ in range(groups)]
        if groups == 1:
            if batch.out == "in place":
                outs = [gpu.make(arguments["slot_mapping"])]
                inputs["slot_mapping"] = outs[0]
            results = [get_compressed_slot_mapping(**inputs, out=outs[0])]
        else:
            cache = [inputs.pop(name) for name in ("block_table", "block_size", "compress_ratio")]
            results = get_compressed_slot_mappings(**inputs, groups=[CacheGroup(*cache, out) for out in outs])
        for result, out in zip(results, outs, strict=True):
            assert result.host.tolist() == expected[:n], (order, batch)
            assert out is None or out.host.tolist() == expected, (order, batch)


def every_dtype(arguments):
    """The int32/int64 mixes of the arrays that hold their values."""
    dtypes = {}
    for name in ARRAYS:
        values = np.asarray(arguments.get(name) or [0], np.int64)
        narrow = arguments.get(name) is not None and np.array_equal(values, values.astype(np.int32))
        dtypes[name] = [(np.int64, "plain"), (np.int32, "plain")] if narrow else [(np.int64, "plain")]
    return [dict(zip(dtypes, mix, strict=True)) for mix in itertools.product(*dtypes.values())]


def large_batch(requests, tokens, *, tail=0, ratio=4, positions=False, falls=False):
    """A few long requests among many short ones, with a table too narrow for the longest; and the length of `out`."""
    rng = np.random.default_rng(requests + tokens)
    weights = rng.pareto(0.8, requests)
    query_lens = rng.multinomial(tokens, weights / weights.sum()) if requests else np.zeros(0, int)
    seq_lens = query_lens + rng.integers(-1, 500, requests)
    offsets = [0, *np.cumsum(query_lens).tolist()]
    if falls:
        offsets[requests * 3 // 4] = 0
    columns = seq_lens.max(initial=0) // (ratio * 64) if requests < 10 else 3
    arguments = {
        "num_tokens": tokens,
        "slot_mapping": rng.integers(-1, 9, tokens).tolist(),
        "query_start_loc": offsets,
        "seq_lens": seq_lens.tolist(),
        "block_table": rng.integers(-1, 2**31, (max(requests, 1), columns)).tolist(),
        "block_size": 64,
        "compress_ratio": ratio,
        "positions": rng.integers(-1, 1000, tokens).tolist() if positions else None,
    }
    return arguments, tokens + tail


def check_large_batches():
    large_batches = [
        large_batch(1, 300, ratio=1),
        large_batch(2, 20000),
        large_batch(1000, 1000, tail=9, falls=True),
        large_batch(5000, 5000, tail=1, falls=True),
        large_batch(5000, 5000, positions=True),
        large_batch(1025, 1025),
        large_batch(5, 5000, tail=700, ratio=3),
        large_batch(5000, 20000, tail=3000),
        large_batch(1, 70000, ratio=128),
        large_batch(1, 10000, positions=True),
        large_batch(5000, 0, tail=5),
        large_batch(0, 5000),
    ]
    for turn, (arguments, out_len) in enumerate(large_batches):
        expected = oracle.compressed_slot_mapping(**arguments, out_len=out_len)
        mixes = every_dtype(arguments)
        published, widest, *others = {}, mixes[0], mixes[5 * turn % len(mixes)], mixes[7 * turn % len(mixes)]
        for order, layout in enumerate([published, published, widest, widest, *others]):
            check(batches.Batch(arguments, layout, out_len), expected, order % len(ORDERS))


def check_cases():
    for case in json.loads(Path(__file__).with_name("cases.json").read_text()):
        if case["function"] != "get_compressed_slot_mapping":
            continue
        arguments = dict(case["args"])
        out_len = arguments.pop("out_len", None)
        for layout, order in zip(every_dtype(arguments), itertools.cycle(ORDERS), strict=False):
            check(batches.Batch(arguments, layout, out_len), case["expected"], order)


@settings(max_examples=400)
@given(batch=batches.sensible() | batches.hostile(), order=st.sampled_from(ORDERS))
def check_drawn_batches(batch, order):
    out_len = len(batch.arguments["slot_mapping"]) if batch.out == "in place" else batch.out
    check(batch, oracle.compressed_slot_mapping(**batch.arguments, out_len=out_len), order)


if __name__ == "__main__":
    with mock.patch.object(_forms.Form, "launch", autospec=True, side_effect=_forms.Form.launch) as recalled:
        check_large_batches()
        check_cases()
        check_drawn_batches()
    assert recalled.called, "no call was recalled"
    print(f"{DRIVER.launches} launches match the oracle")
