"""get_compressed_slot_mappings: one launch for several caches, the same results as one call for each."""

import math
import random

import batches
import numpy as np
import oracle
import pytest
from backends import GUARD, NOISE, array_backends, every_backend, result_type, to_list
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_slots import CacheGroup, get_compressed_slot_mapping, get_compressed_slot_mappings

OWN = ("slot_mapping", "block_table", "block_size", "compress_ratio")  # what a group has of its own
BATCH = {"num_tokens": 8, "slot_mapping": [0, 1, 2, 3, -1, 5, 6, 7], "query_start_loc": [0, 8], "seq_lens": [12]}
GROUPS = [
    {"block_table": [[3, 4, 5]], "block_size": 1, "compress_ratio": 4},
    {"block_table": [[6, 7]], "block_size": 8, "compress_ratio": 1},
]


@st.composite
def batch_and_groups(draw):
    """A batch, and of each group its own arguments, the layout of its arrays and the length of its `out`."""
    batch = draw(batches.sensible())
    shared, rng = batch.arguments, random.Random(draw(st.integers(0, 2**32)))
    rows, n = len(shared["block_table"]), shared["num_tokens"]
    needs_mask = shared.get("dcp_world_size", 1) > 1 and shared["dcp_rank"] is None
    groups = []
    for _ in range(draw(st.integers(1, 16))):
        own = {"slot_mapping": None, "block_size": rng.choice([1, 2, 64]), "compress_ratio": rng.choice([1, 2, 4, 128])}
        own["block_table"] = batches.page_table(
            rng, shared["seq_lens"] or [90], rows, own["block_size"], own["compress_ratio"], rng.choice([0, 1, -2])
        )
        if draw(st.booleans()) or (needs_mask and shared["slot_mapping"] is None):
            own["slot_mapping"] = batches.own_slots(rng, n + rng.randrange(3))
        layout = draw(batches.layouts())
        batches.repeat_the_first(own, layout)
        groups.append((own, layout, rng.choice([None, n, n + 3])))
    if shared.get("dcp_world_size", 1) > 1 and shared["cp_shard"] == "token":
        shared["cp_interleave"] = math.lcm(*(own["compress_ratio"] for own, _, _ in groups))
    return batch, groups


@every_backend
@settings(max_examples=30)
@given(drawn=batch_and_groups())
def test_the_same_as_separate_calls(backend, drawn):
    batch, groups = drawn
    shared = {name: value for name, value in batch.arguments.items() if name not in OWN[1:]}
    n, inputs = shared["num_tokens"], backend.make_inputs(shared, batch.layout)
    outs = [(None, None) if out is None else backend.make_out([NOISE] * out) for _, _, out in groups]
    own_inputs = [backend.make_inputs(own, layout) for own, layout, _ in groups]

    results = get_compressed_slot_mappings(
        groups=[CacheGroup(**own, out=out) for own, (out, _) in zip(own_inputs, outs, strict=True)], **inputs
    )

    assert isinstance(results, list)
    assert len(results) == len(groups)
    for i, (result, (own, _, out_len), (out, memory)) in enumerate(zip(results, groups, outs, strict=True)):
        own = own if own["slot_mapping"] is not None else own | {"slot_mapping": shared["slot_mapping"]}
        expected = oracle.compressed_slot_mapping(**shared | own, out_len=out_len)
        assert to_list(result) == expected[:n], (i, drawn)
        assert out is None or to_list(memory) == GUARD + expected + GUARD, (i, drawn)
        assert result is out or out_len != n, (i, drawn)
        assert out is not None or type(result) is result_type(inputs["query_start_loc"]), (i, drawn)

        alone = {name: value for name, value in own_inputs[i].items() if value is not None}
        assert to_list(get_compressed_slot_mapping(**inputs | alone)) == expected[:n], (i, drawn)


@every_backend
def test_forty_groups(backend):
    groups = [
        {"block_table": [[i, i + 1, -1]], "block_size": 1 + i % 8, "compress_ratio": 1 + i // 8} for i in range(40)
    ]
    outs = [backend.make_out([NOISE] * (8 + i % 3)) for i in range(40)]
    get_compressed_slot_mappings(
        **backend.make_inputs(BATCH),
        groups=[CacheGroup(**backend.make_inputs(g), out=out) for g, (out, _) in zip(groups, outs, strict=True)],
    )
    for i, (group, (_, memory)) in enumerate(zip(groups, outs, strict=True)):
        assert to_list(memory) == GUARD + oracle.compressed_slot_mapping(**BATCH | group, out_len=8 + i % 3) + GUARD, i


@every_backend
def test_ratio_one_gives_the_raw_mapping(backend):
    """The cache that holds every token: what the group writes is what the mapping said already."""
    table = [[7, 2, 9], [4, 1, 0]]
    raw = [table[r][pos // 4] * 4 + pos % 4 for r, pos in [(0, 5), (0, 6), (0, 7), (0, 8), (1, 0), (1, 1)]]
    raw[2] = -1
    shared = {"num_tokens": 6, "slot_mapping": raw, "query_start_loc": [0, 4, 6], "seq_lens": [9, 2]}
    cache = backend.make_inputs({"block_table": table, "block_size": 4})
    groups = [CacheGroup(**cache, compress_ratio=2), CacheGroup(**cache, compress_ratio=1)]
    assert to_list(get_compressed_slot_mappings(**backend.make_inputs(shared), groups=groups)[1]) == raw


@every_backend
@pytest.mark.parametrize("num_tokens", [0, 8])
def test_no_groups(backend, num_tokens):
    assert get_compressed_slot_mappings(**backend.make_inputs(BATCH | {"num_tokens": num_tokens}), groups=[]) == []


@every_backend
def test_no_tokens(backend):
    groups = [
        CacheGroup(**backend.make_inputs(group), out=backend.make_out([NOISE] * length)[0])
        for length, group in enumerate(GROUPS)
    ]
    inputs = backend.make_inputs(BATCH | {"num_tokens": 0})
    assert [to_list(result) for result in get_compressed_slot_mappings(**inputs, groups=groups)] == [[], []]
    assert [to_list(group.out) for group in groups] == [[], [-1]]


def refuse(backend, error, word, changes, shared=BATCH):
    """The second group is refused by name, and nothing is written for the first one."""
    outs = [backend.make_out([NOISE] * 8)[0] for _ in GROUPS]
    groups = [backend.make_inputs(group) | {"out": out} for group, out in zip(GROUPS, outs, strict=True)]
    groups[1] |= changes
    with pytest.raises(error) as caught:
        get_compressed_slot_mappings(**backend.make_inputs(shared), groups=[CacheGroup(**group) for group in groups])
    assert word in str(caught.value), (str(caught.value), changes)
    assert [to_list(out) for out in outs] == [[NOISE] * 8] * 2


@array_backends
@pytest.mark.parametrize(
    ("error", "name", "values"),
    [
        (ValueError, "block_table", np.zeros(3, np.int32)),
        (ValueError, "block_table", np.zeros((0, 3), np.int32)),
        (TypeError, "block_table", np.zeros((1, 3), np.float32)),
        (ValueError, "slot_mapping", np.zeros(7, np.int64)),
        (TypeError, "slot_mapping", np.zeros(8, bool)),
        (ValueError, "out", np.zeros(7, np.int64)),
        (TypeError, "out", np.zeros(8, np.int32)),
    ],
)
def test_errors_name_the_group_of_an_array(backend, error, name, values):
    refuse(backend, error, f"groups[1].{name}", {name: backend.wrap(values)})


@array_backends
@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "block_size", 0),
        (TypeError, "block_size", 1.5),
        (TypeError, "block_size", True),
        (ValueError, "compress_ratio", 0),
        (TypeError, "compress_ratio", None),
        (TypeError, "block_table", None),
        (TypeError, "out", [0] * 8),
    ],
)
def test_errors_name_the_group_of_a_number(backend, error, name, value):
    refuse(backend, error, f"groups[1].{name}", {name: value})


@array_backends
def test_the_interleave_must_suit_every_group(backend):
    shared = BATCH | {"dcp_world_size": 2, "cp_interleave": 4}
    refuse(backend, ValueError, "groups[1]", {"compress_ratio": 3}, shared)


@array_backends
def test_sharded_tokens_need_a_mask_or_a_rank_for_every_group(backend):
    inputs = backend.make_inputs(BATCH | {"slot_mapping": None}) | {"dcp_world_size": 2, "cp_interleave": 4}
    masked, bare = (CacheGroup(**backend.make_inputs(GROUPS[0] | {"slot_mapping": own})) for own in ([0] * 8, None))
    assert len(get_compressed_slot_mappings(**inputs, groups=[masked])) == 1
    with pytest.raises(ValueError, match="dcp_rank"):
        get_compressed_slot_mappings(**inputs, groups=[masked, bare])


@array_backends
@pytest.mark.parametrize("read_by", ["nobody else", "its own group", "another group", "every group"])
def test_out_on_a_slot_mapping(backend, read_by):
    """In place is one group's own affair: the mapping must not be read by another group."""
    buffer, _ = backend.make_out(BATCH["slot_mapping"])
    inputs = backend.make_inputs(BATCH)
    first, second = (backend.make_inputs(group) for group in GROUPS)
    first["out"] = buffer
    if read_by == "nobody else":
        inputs["slot_mapping"], second["slot_mapping"] = buffer, backend.make(BATCH["slot_mapping"])
    elif read_by == "its own group":
        first["slot_mapping"] = buffer
    elif read_by == "another group":
        second["slot_mapping"] = buffer
    else:
        inputs["slot_mapping"] = buffer
    groups = [CacheGroup(**first), CacheGroup(**second)]
    if read_by in ("nobody else", "its own group"):
        results = get_compressed_slot_mappings(**inputs, groups=groups)
        assert [to_list(r) for r in results] == [oracle.compressed_slot_mapping(**BATCH | group) for group in GROUPS]
    else:
        with pytest.raises(ValueError, match=r"groups\[0\]\.out"):
            get_compressed_slot_mappings(**inputs, groups=groups)
        assert to_list(buffer) == BATCH["slot_mapping"]


@array_backends
def test_out_on_another_groups_table(backend):
    memory = backend.wrap(np.arange(12))
    first, second = (backend.make_inputs(group) for group in GROUPS)
    first["out"] = backend.as_out(memory[:8])
    second["block_table"] = backend.as_input(memory[None, 7:])
    with pytest.raises(ValueError, match=r"groups\[1\]\.block_table"):
        get_compressed_slot_mappings(**backend.make_inputs(BATCH), groups=[CacheGroup(**first), CacheGroup(**second)])
    assert to_list(memory) == list(range(12))


@array_backends
@pytest.mark.parametrize(("gap", "refused"), [(0, True), (7, True), (8, False)])
def test_outs_of_two_groups(backend, gap, refused):
    memory = backend.wrap(np.full(16, NOISE))
    outs = [backend.as_out(memory[start : start + 8]) for start in (0, gap)]
    groups = [CacheGroup(**backend.make_inputs(g), out=out) for g, out in zip(GROUPS, outs, strict=True)]
    inputs = backend.make_inputs(BATCH)
    if refused:
        with pytest.raises(ValueError, match=r"groups\[[01]\]\.out"):
            get_compressed_slot_mappings(**inputs, groups=groups)
        assert to_list(memory) == [NOISE] * 16
    else:
        get_compressed_slot_mappings(**inputs, groups=groups)
        assert to_list(memory) == [s for group in GROUPS for s in oracle.compressed_slot_mapping(**BATCH | group)]


def test_a_group_keeps_its_fields():
    group = CacheGroup([[1]], 2, 3)
    assert (group.block_table, group.block_size, group.compress_ratio) == ([[1]], 2, 3)
    assert group.out is None
    assert group.slot_mapping is None
