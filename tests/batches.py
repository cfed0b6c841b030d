"""Hypothesis strategies for whole calls: batches as an engine makes them, and the same with wild values."""

import random
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from backends import ARRAYS, STRIDES
from hypothesis import strategies as st

WIDEST = {np.int32: (-(2**31), 2**31 - 1), np.int64: (-(2**62), 2**62)}


@dataclass
class Batch:
    arguments: dict  # of the oracle and, once its arrays are made, of the call
    layout: dict  # argument: (dtype, strides)
    out: int | str | None  # its length, "in place", or None


@st.composite
def layouts(draw):
    dtypes, strides = st.sampled_from([np.int32, np.int64]), st.sampled_from(STRIDES)
    layout = {name: (draw(dtypes), draw(strides)) for name in ARRAYS}
    if layout["query_start_loc"][1] == "zero":  # equal offsets would leave no token with a request
        layout["query_start_loc"] = (np.int64, "plain")
    return layout


@st.composite
def context_parallel(draw, ratio):
    if not draw(st.booleans()):
        return {}
    world, shard = draw(st.integers(1, 4)), draw(st.sampled_from(["token", "state"]))
    return {
        "dcp_world_size": world,
        "cp_interleave": draw(st.integers(1, 3)) * (ratio if shard == "token" and world > 1 else 1),
        "dcp_rank": draw(st.integers(0, world - 1) | (st.none() if shard == "token" else st.nothing())),
        "cp_shard": shard,
    }


def page_table(rng, seq_lens, rows, block_size, ratio, missing=0):
    """Wide enough for the longest request but for the missing columns, with a few pages not there."""
    width = max([-(-n // (ratio * block_size)) for n in seq_lens], default=0) - missing
    return [[rng.choice([-1] + [rng.randrange(2**20)] * 9) for _ in range(max(width, 0))] for _ in range(rows)]


def some_position(rng, ratio):
    """As often as not a closing one, since those are rare where the ratio is large; -1 is among them."""
    return rng.choice([rng.randrange(5 * ratio), rng.randrange(6) * ratio - 1])


def own_slots(rng, length):
    return [rng.choice([-1, -2, rng.randrange(10**6), rng.randrange(10**6)]) for _ in range(length)]


def repeat_the_first(arguments, layout):
    """Zero strides show the first element everywhere."""
    for name, (_, strides) in layout.items():
        if strides == "zero" and arguments.get(name):
            arguments[name] = arguments[name][:1] * len(arguments[name])


@st.composite
def sensible(draw):
    rng = random.Random(draw(st.integers(0, 2**32)))
    ratio, block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 128])), draw(st.sampled_from([1, 2, 3, 8, 64]))
    parallel = draw(context_parallel(ratio))

    requests = draw(st.sampled_from([1, 3, 6, 0]))
    query_lens = draw(st.lists(st.integers(0, 12), min_size=requests, max_size=requests))
    offsets = list(accumulate(query_lens, initial=draw(st.sampled_from([0, 0, 2]))))
    offsets += draw(st.sampled_from([[], [offsets[-1]] * 2, [0, 0], [-1, 50]]))  # rows of padding
    num_tokens = max(0, offsets[len(query_lens)] + draw(st.sampled_from([0, 0, -1, -3, 4])))
    seq_lens = [n + some_position(rng, ratio) for n in query_lens]
    seq_lens += [rng.randint(-5, 50) for _ in range(len(offsets) - 1 - len(query_lens) + draw(st.integers(0, 2)))]
    rows = len(offsets) - 1 + draw(st.integers(0, 2))
    missing = draw(st.sampled_from([0, 0, 1, -2]))

    masked = draw(st.booleans()) or (parallel.get("dcp_world_size", 1) > 1 and parallel["dcp_rank"] is None)
    positions = draw(st.booleans()) and [some_position(rng, ratio) for _ in range(num_tokens + 1)]
    arguments = {
        "num_tokens": num_tokens,
        "slot_mapping": own_slots(rng, num_tokens + draw(st.integers(0, 2))) if masked else None,
        "query_start_loc": offsets,
        "seq_lens": None if positions and draw(st.booleans()) else seq_lens,
        "block_table": page_table(rng, seq_lens, max(rows, 1), block_size, ratio, missing),
        "block_size": block_size,
        "compress_ratio": ratio,
        "positions": positions or None,
        **parallel,
    }
    layout = draw(layouts())
    repeat_the_first(arguments, layout)
    out = draw(st.sampled_from([None, num_tokens, num_tokens + 5, "in place" if masked else num_tokens]))
    return Batch(arguments, layout, out)


@st.composite
def hostile(draw):
    """A batch with any value of the dtype in any place; page ids stop where the slots would leave 64 bits."""
    batch = draw(sensible())
    rng = random.Random(draw(st.integers(0, 2**32)))
    arguments, share = batch.arguments, draw(st.sampled_from([0.03, 0.3, 1]))
    if draw(st.booleans()):
        arguments["block_size"] = rng.choice([2**31 - 1, 2**40])
    if draw(st.booleans()) and arguments.get("dcp_world_size", 1) == 1:
        arguments["compress_ratio"] = rng.choice([2**31, 2**62])
    last_page = 2**62 // arguments["block_size"]

    def wild(value, name):
        if rng.random() > share:
            return value
        low, high = WIDEST[batch.layout[name][0]]
        value = rng.choice([rng.randint(low, high), rng.randint(-3, 20), low, high])
        return min(value, last_page) if name == "block_table" else value

    for name in ARRAYS:
        values = arguments[name]
        if name == "block_table":
            arguments[name] = [[wild(page, name) for page in row] for row in values]
        elif values is not None:
            arguments[name] = [wild(value, name) for value in values]
    repeat_the_first(arguments, batch.layout)
    return batch
