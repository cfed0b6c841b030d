"""get_state_owner: the rank and the local state of a position, as the mapping of every rank has them."""

from fractions import Fraction

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_slots import get_compressed_slot_mapping, get_state_owner

SHARDS = ("token", "state")
INT64_MAX = 2**63 - 1
NOT_INTEGERS = [True, np.True_, None, "4", [4], {}, 4j, 1.5, float("nan"), float("inf"), Fraction(1, 2), np.array(1.5)]

every_shard = pytest.mark.parametrize("shard", SHARDS)


def numbers(least, most=INT64_MAX):
    return st.integers(least, min(most, 12)) | st.integers(least, most)


@st.composite
def sharings(draw, most=INT64_MAX):
    """compress_ratio, dcp_world_size, cp_interleave and cp_shard of any size."""
    ratio, world_size, shard = draw(numbers(1, most)), draw(numbers(1, most)), draw(st.sampled_from(SHARDS))
    per_run = ratio if shard == "token" and world_size > 1 else 1
    return ratio, world_size, per_run * draw(numbers(1, most // per_run)), shard


def owner_of(positions, sharing):
    *numbers, shard = sharing
    return get_state_owner(positions, *numbers, cp_shard=shard)


def positions_in(ratio, most):
    """Any, and as often as not a closing one."""
    return numbers(0, most) | numbers(1, (most + 1) // ratio).map(lambda n: n * ratio - 1)


@given(data=st.data(), sharing=sharings())
def test_ints_and_arrays_against_the_oracle(data, sharing):
    """Up to the edge of 64 bits, for closing tokens and for those that share their state."""
    position = data.draw(positions_in(sharing[0], INT64_MAX))
    rank, local = owner = owner_of(position, sharing)
    assert [type(rank), type(local)] == [int, int]
    assert 0 <= rank < sharing[1], (position, sharing)
    ratio, world_size, interleave, shard = sharing
    expected = oracle.state_on_rank(position, ratio, world_size, interleave, rank, shard)
    assert local == expected, (position, sharing, rank)
    assert [int(part[0]) for part in owner_of(np.array([position]), sharing)] == [*owner], (position, sharing)


@given(data=st.data(), sharing=sharings(most=2**62))
def test_agrees_with_the_mapping_of_every_rank(data, sharing):
    """One page holds it all, so that a slot is a local state; of many ranks, the owners and their neighbours map."""
    ratio, world_size, interleave, shard = sharing
    position = np.array(data.draw(st.lists(positions_in(ratio, 2**62), min_size=1, max_size=20)))
    owner, local = owner_of(position, sharing)
    closes = (position + 1) % ratio == 0
    near = {(int(rank) + step) % world_size for rank in owner for step in (-1, 0, 1)}
    for rank in range(world_size) if world_size <= 12 else near:
        slots = get_compressed_slot_mapping(
            num_tokens=len(position),
            slot_mapping=None,
            query_start_loc=[0, len(position)],
            seq_lens=None,
            block_table=[[0]],
            block_size=INT64_MAX,
            compress_ratio=ratio,
            dcp_world_size=world_size,
            cp_interleave=interleave,
            dcp_rank=rank,
            cp_shard=shard,
            positions=position,
        )
        expected = np.where(closes & (owner == rank), local, -1)
        assert slots.tolist() == expected.tolist(), (position, sharing, rank)


@every_shard
@given(world_size=st.integers(1, 6), runs=st.integers(1, 5), ratio=st.integers(1, 6), states=st.integers(0, 200))
def test_local_states_are_dense(shard, world_size, runs, ratio, states):
    """Each rank's states are 0, 1, 2, ... in the order of the sequence."""
    sharing = (ratio, world_size, runs * ratio if shard == "token" else runs, shard)
    owner, local = owner_of(np.arange(1, states + 1) * ratio - 1, sharing)
    for rank in range(world_size):
        assert local[owner == rank].tolist() == list(range(np.count_nonzero(owner == rank))), (sharing, rank)


@given(data=st.data(), sharing=sharings(most=2**62))
def test_all_tokens_of_a_state_have_its_owner(data, sharing):
    ratio = sharing[0]
    state = data.draw(numbers(0, INT64_MAX // ratio - 1))
    owners = {owner_of(state * ratio + token, sharing) for token in (0, ratio // 2, ratio - 1)}
    assert len(owners) == 1, (state, sharing, owners)


@every_shard
@given(position=numbers(0), ratio=numbers(1), interleave=numbers(1))
def test_one_rank_holds_every_state_where_it_is(shard, position, ratio, interleave):
    sharing = (ratio, 1, interleave, shard)
    assert owner_of(position, sharing) == (0, position // ratio), (position, sharing)


def test_tokens_are_sharded_one_by_one_unless_told():
    assert [get_state_owner(position, 1, 2) for position in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@every_shard
@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,), (6,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, ">i4"])
def test_arrays_of_any_shape_and_integer_type(shard, shape, dtype):
    sharing = (4, 3, 8, shard)
    position = np.resize(np.array([3, 7, 11, 64, 100, 127], dtype), shape)
    position.flags.writeable = False
    for part, parts in enumerate(owner_of(position, sharing)):
        assert parts.shape == shape
        assert parts.dtype == np.int64
        assert parts.ravel().tolist() == [owner_of(p, sharing)[part] for p in position.ravel().tolist()]


@pytest.mark.parametrize("integer", [int, float, np.int8, np.uint8, np.int32, np.uint64, np.float32, Fraction])
def test_integral_numbers_of_any_type(integer):
    arguments = [integer(number) for number in (27, 4, 2, 8)]
    owner = get_state_owner(*arguments)
    assert owner == (1, 2)
    assert [type(part) for part in owner] == [int, int]


GOOD = {"position": 27, "compress_ratio": 4, "dcp_world_size": 2, "cp_interleave": 8}


@every_shard
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_what_is_no_integer(name, value, shard):
    with pytest.raises(TypeError, match=f"^{name} must be an integer"):
        get_state_owner(**GOOD | {name: value}, cp_shard=shard)


@pytest.mark.parametrize("dtype", [bool, float, complex, object, "U1"])
def test_arrays_of_other_types(dtype):
    with pytest.raises(TypeError, match=r"^position must be an integer array"):
        get_state_owner(**GOOD | {"position": np.array([1, 1]).astype(dtype)})


@every_shard
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in GOOD for value in (-1, -(2**63), 2**63, 2**70)]
    + [(name, 0) for name in GOOD if name != "position"],
)
def test_numbers_out_of_range(name, value, shard):
    with pytest.raises(ValueError, match=f"^{name} must be at least .* was {value}$"):
        get_state_owner(**GOOD | {name: value}, cp_shard=shard)


def test_a_negative_position_among_others():
    with pytest.raises(ValueError, match=r"^position must be at least 0, was -3$"):
        get_state_owner(**GOOD | {"position": np.array([[0, 5], [-3, -1]])})


@pytest.mark.parametrize("interleave", [1, 2, 6, 9, 2**63 - 1])
def test_a_run_of_tokens_that_splits_a_state(interleave):
    with pytest.raises(ValueError, match=f"^cp_interleave must be a multiple of compress_ratio=4 .* was {interleave}$"):
        get_state_owner(**GOOD | {"cp_interleave": interleave})
    assert get_state_owner(**GOOD | {"cp_interleave": interleave, "dcp_world_size": 1}) == (0, 6)
    get_state_owner(**GOOD | {"cp_interleave": interleave}, cp_shard="state")


@pytest.mark.parametrize("shard", ["", "tokens", "STATE", None, 0, ["token"], b"token"], ids=repr)
def test_other_shards(shard):
    with pytest.raises(ValueError, match=r"^cp_shard must be 'token' or 'state', was "):
        get_state_owner(**GOOD, cp_shard=shard)


def test_the_shard_is_a_keyword():
    with pytest.raises(TypeError):
        get_state_owner(*GOOD.values(), "state")
