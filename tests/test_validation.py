"""The checking mode: each mistake in a call's values in words, and nothing said of a batch without any."""

import random
import re
from collections import Counter
from itertools import accumulate, pairwise

import batches
import oracle
import pytest
from backends import NO_GPU, NO_TORCH, NOISE, array_backends, every_backend, to_list
from hypothesis import given
from hypothesis import strategies as st
from oracle import PAD
from replay_trace import main
from serving import PagePool

from cupy_slots import get_compressed_slot_mapping, validate_compressed_slot_mapping

GOOD = {
    "num_tokens": 12,
    "slot_mapping": [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, -1, -1],
    "query_start_loc": [0, 4, 10, 10, 10],
    "seq_lens": [8, 6, 0, 0],
    "block_table": [[5, 6], [7, 8], [-1, -1], [-1, -1]],
    "block_size": 2,
    "compress_ratio": 2,
}
SLOTS = [-1, 12, -1, 13, -1, 14, -1, 15, -1, 16, -1, -1]
ONE_PAGE = {"slot_mapping": None, "block_table": [[5], [7], [0], [0]], "block_size": 1, "dcp_world_size": 2}
MISTAKES = [
    (
        {"query_start_loc": [0, 4, 10, 5, 12]},
        ["request 2: query_start_loc falls from 10 to 5: it and all later requests are padding and have no tokens"],
    ),
    (
        {"query_start_loc": [0, 4, 10, 0, 0]},
        ["request 2: query_start_loc falls from 10 to 0: it and all later requests are padding and have no tokens"],
    ),
    (
        {"query_start_loc": [1, 4, 10, 10, 10]},
        ["query_start_loc begins at 1, not at 0", "token 0 belongs to no request, its slot_mapping is 50"],
    ),
    (
        {"query_start_loc": [0, 4, 9, 9, 9], "seq_lens": [8, 5, 0, 0]},
        ["token 9 belongs to no request, its slot_mapping is 59"],
    ),
    (
        {"slot_mapping": [-1, -2, *range(8), -1, -1]},
        ["request 0, token 1: slot_mapping is -2, only -1 masks a token"],
    ),
    (
        {"seq_lens": [8, 4, 0, 0], "slot_mapping": [*range(4), -1, *range(5), -1, -1]},
        ["request 1, token 5: position -1 is negative (seq_lens 4, query length 6)"],
    ),
    (
        {"seq_lens": None, "positions": [4, 5, 6, -7, 0, 1, 2, 3, 4, 5, -1, -1]},
        ["request 0, token 3: position -7 is negative"],
    ),
    (
        {"seq_lens": [10, 6, 0, 0]},
        ["request 0, token 3: state 4 lies in page column 2, block_table's width is 2"],
    ),
    (
        ONE_PAGE | {"cp_interleave": 2, "dcp_rank": 1},
        ["request 0, token 3: local state 1 lies in page column 1, block_table's width is 1"],
    ),
    (
        ONE_PAGE | {"cp_shard": "state", "dcp_rank": 0},
        [
            "request 0, token 1: local state 1 lies in page column 1, block_table's width is 1",
            "request 1, token 9: local state 1 lies in page column 1, block_table's width is 1",
        ],
    ),
    (
        {"dcp_world_size": 2, "cp_interleave": 2, "num_tokens": 4},  # without PAD where the other rank owns the token
        ["tokens 1 and 3 of requests 0 and 0 both write slot 11"],
    ),
    (
        {"block_table": [[5, 6], [7, -3], [-1, -1], [-1, -1]]},
        ["request 1, token 9: page id -3 at column 1"],
    ),
    (
        {"block_table": [[5, 6], [6, 8], [-1, -1], [-1, -1]]},
        [
            "tokens 1 and 5 of requests 0 and 1 both write slot 12",
            "tokens 3 and 7 of requests 0 and 1 both write slot 13",
        ],
    ),
    (
        {"num_slots": 16},
        ["request 1, token 9: slot 16 is outside the cache of 16 slots"],
    ),
    (
        {"block_table": [[2**31 - 1], [0], [0], [0]], "block_size": 2**40, "num_slots": 2**40, "num_tokens": 2},
        [f"request 0, token 1: slot {2 - 2**40} is outside the cache of {2**40} slots"],  # it has left 64 bits
    ),
]


@every_backend
def test_nothing_is_wrong(backend):
    assert oracle.compressed_slot_mapping(**GOOD) == SLOTS
    assert validate_compressed_slot_mapping(**backend.make_inputs(GOOD), num_slots=17) == []


@every_backend
@pytest.mark.parametrize(("changes", "findings"), MISTAKES, ids=[findings[-1] for _, findings in MISTAKES])
def test_planted_mistake(backend, changes, findings):
    assert validate_compressed_slot_mapping(**backend.make_inputs(GOOD | changes)) == findings, changes


@every_backend
@pytest.mark.parametrize("tokens", [5, 6, 42])
def test_the_first_five_and_how_many_more(backend, tokens):
    arguments = GOOD | {"num_tokens": tokens, "slot_mapping": None, "query_start_loc": [0, tokens], "seq_lens": [0]}
    findings = validate_compressed_slot_mapping(**backend.make_inputs(arguments))
    assert [finding.split(":")[0] for finding in findings[:5]] == [f"request 0, token {t}" for t in range(5)]
    assert findings[5:] == [f"and {tokens - 5} more"] * (tokens > 5)


@every_backend
def test_tokens_on_one_slot_in_their_order(backend):
    arguments = GOOD | {"num_tokens": 42, "slot_mapping": None, "query_start_loc": [0, 42], "positions": [*[3] * 41, 1]}
    findings = validate_compressed_slot_mapping(**backend.make_inputs(arguments))
    pairs = [f"tokens {t} and {t + 1} of requests 0 and 0 both write slot 11" for t in range(5)]
    assert findings == [*pairs, "and 35 more"]


def live_tokens(arguments):
    """Every token that is not masked: its request, its position, and the state of this rank that it closes, or None."""
    n, own, offsets = (arguments[name] for name in ("num_tokens", "slot_mapping", "query_start_loc"))
    ratio, lens, positions = (arguments[name] for name in ("compress_ratio", "seq_lens", "positions"))
    sharding = (arguments.get("dcp_world_size", 1), arguments.get("cp_interleave", 1), arguments.get("dcp_rank"))
    for t, r in enumerate(oracle.request_of_each_token(n, offsets)):
        if own is None or own[t] != PAD:
            pos = 0 if r is None else oracle.position(t, r, offsets, lens, positions)
            closing = r is not None and pos >= 0 and (pos + 1) % ratio == 0
            shard = arguments.get("cp_shard", "token")
            yield t, r, pos, oracle.state_on_rank(pos, ratio, *sharding, shard) if closing else None


def mistakes(arguments, num_slots):
    """How many there are of each kind."""
    own, offsets = arguments["slot_mapping"], arguments["query_start_loc"]
    count = Counter({"begins at": offsets[0] != 0, "falls from": offsets != sorted(offsets)})
    for t, r, pos, state in live_tokens(arguments):
        count["belongs to no request"] += own is not None and r is None
        count["only -1 masks a token"] += own is not None and r is not None and own[t] < 0
        count["is negative"] += pos < 0
        if state is not None:
            column, row = state // arguments["block_size"], arguments["block_table"][r]
            count["lies in page column"] += column >= len(row)
            count["page id"] += column < len(row) and row[column] < 0
    written = [slot for slot in oracle.compressed_slot_mapping(**arguments) if slot != PAD]
    count["both write slot"] = len(written) - len(set(written))
    count["is outside the cache"] = sum(slot >= num_slots for slot in written)
    return +count


@every_backend
@given(batch=batches.sensible() | batches.hostile(), num_slots=st.integers(0, 2**22))
def test_every_mistake_is_counted(backend, batch, num_slots):
    inputs = backend.make_inputs(batch.arguments, batch.layout)
    expected, found = mistakes(batch.arguments, num_slots), Counter()
    for finding in validate_compressed_slot_mapping(**inputs, num_slots=num_slots):
        more = re.fullmatch(r"and (\d+) more", finding)
        if not more:
            kind = next((kind for kind in expected if kind in finding), finding)
        found[kind] += int(more[1]) if more else 1
    assert found == expected, (batch, num_slots)


@st.composite
def clean(draw):
    """A sensible batch without its mistakes."""
    batch, rng = draw(batches.sensible()), random.Random(draw(st.integers(0, 2**32)))
    arguments, n = batch.arguments, batch.arguments["num_tokens"]
    first, *later = arguments["query_start_loc"]
    offsets = arguments["query_start_loc"] = list(accumulate([0, *(offset - first for offset in later)], max))
    if arguments["positions"]:
        arguments["positions"] = rng.sample(range(n + 20), n + 1)
    else:
        query_lens = [end - start for start, end in pairwise(offsets)]
        arguments["seq_lens"] = list(map(max, arguments["seq_lens"], query_lens))

    any_rank = {"slot_mapping": None, "dcp_rank": arguments.get("dcp_rank") or 0}
    unmasked = list(live_tokens(arguments | any_rank))
    if own := arguments["slot_mapping"]:
        of_other_ranks = arguments.get("dcp_world_size", 1) > 1 and arguments["dcp_rank"] is None
        for t, r, _, state in unmasked:
            own[t] = PAD if r is None or (of_other_ranks and state is None) else max(own[t], PAD)

    rows, block_size = len(arguments["block_table"]), arguments["block_size"]
    width = 1 + max((state // block_size for *_, state in unmasked if state is not None), default=0)
    pages = rng.sample(range(10**6), rows * width)
    arguments["block_table"] = [pages[row * width :][:width] for row in range(rows)]
    batch.layout = {name: (dtype, strides.replace("zero", "step")) for name, (dtype, strides) in batch.layout.items()}
    return batch


@every_backend
@given(batch=clean())
def test_clean_batches(backend, batch):
    """Nothing is said of them, and every live token that closes a state gets a slot."""
    arguments = batch.arguments
    slots = oracle.compressed_slot_mapping(**arguments)
    assert all(slots[t] != PAD for t, *_, state in live_tokens(arguments) if state is not None), batch
    assert validate_compressed_slot_mapping(**backend.make_inputs(arguments, batch.layout)) == [], batch


@array_backends
@pytest.mark.parametrize("in_place", [False, True])
def test_out_is_not_written(backend, in_place):
    inputs = backend.make_inputs(GOOD)
    out, memory = backend.make_out(GOOD["slot_mapping"] if in_place else [NOISE] * 14)
    before = to_list(memory)
    assert validate_compressed_slot_mapping(**inputs | ({"slot_mapping": out} if in_place else {}), out=out) == []
    assert to_list(memory) == before


@array_backends
@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": -1},
        {"num_tokens": 13},
        {"query_start_loc": []},
        {"seq_lens": [8, 6]},
        {"block_table": [[5, 6]]},
        {"block_table": None},
        {"block_size": 0},
        {"compress_ratio": 1.5},
        {"out": [0] * 12},
        {"dcp_world_size": 2},
        {"dcp_rank": 1},
        {"cp_shard": "state"},
        {"cp_shard": "page"},
    ],
    ids=str,
)
def test_the_errors_of_the_mapping(backend, changes):
    inputs = backend.make_inputs(GOOD | changes)
    with pytest.raises((TypeError, ValueError)) as expected:
        get_compressed_slot_mapping(**inputs)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        validate_compressed_slot_mapping(**inputs)


@pytest.mark.parametrize(("num_slots", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_num_slots(num_slots, error):
    with pytest.raises(error, match="num_slots"):
        validate_compressed_slot_mapping(**GOOD, num_slots=num_slots)


REPLAY = ["--requests", "20", "--pages", "600", "--validate"]


@pytest.mark.parametrize(
    "backend",
    [
        "numpy",
        pytest.param("torch", marks=pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)),
        pytest.param("cupy", marks=pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)),
    ],
)
def test_replay(capsys, backend):
    assert main([*REPLAY, "--backend", backend]) == 0
    assert capsys.readouterr().out.endswith("violations: 0\n")


def test_replay_prints_and_counts_findings(capsys, monkeypatch):
    finding = "request 1, token 5: page id -1 at column 2"
    monkeypatch.setattr("replay_trace.validate_compressed_slot_mapping", lambda *call, **options: [finding])
    assert main(REPLAY) == 1
    *printed, violations = capsys.readouterr().out.splitlines()
    assert printed[:2] == [f"step 0, ratio {ratio}: {finding}" for ratio in (4, 128)]
    assert violations == f"violations: {sum(finding in line for line in printed)}"


def test_replay_finds_a_page_given_to_two_requests(capsys, monkeypatch):
    monkeypatch.setattr(PagePool, "_fresh_page", lambda pool: pool.free[-1])
    assert main(REPLAY) == 1
    assert "both write slot" in capsys.readouterr().out
