"""get_dspark_swa_index_width: a number out of numbers."""

from fractions import Fraction

import numpy as np
import oracle
import pytest
from backends import NO_TORCH, torch
from hypothesis import given
from hypothesis import strategies as st

from cupy_slots import get_dspark_swa_index_width

NOT_INTEGERS = [True, False, np.True_, np.array(True), None, "128", [128], {}, 1j]
NOT_INTEGRAL = [1.5, float("nan"), float("inf"), np.float32(0.5), np.array(1.5), Fraction(1, 2)]


@pytest.mark.parametrize(
    ("window", "drafts", "width"),
    [
        (128, 0, 128),
        (128, 4, 192),
        (128, 64, 192),
        (128, 65, 256),
        (512, 7, 576),
        (64, 0, 64),
        (0, 1, 64),
        (0, 0, 0),
        (-5, 3, 64),
        (128, -3, 128),
    ],
)
def test_values(window, drafts, width):
    assert get_dspark_swa_index_width(window, drafts) == width


@given(window=st.integers(-300, 9000), drafts=st.integers(-9, 300), alignment=st.integers(1, 700))
def test_every_alignment(window, drafts, alignment):
    width = get_dspark_swa_index_width(window, drafts, alignment=alignment)
    assert width == oracle.dspark_swa_index_width(window, drafts, alignment), (window, drafts, alignment)


@pytest.mark.parametrize("integer", [int, float, np.int8, np.uint8, np.int32, np.uint64, np.float32, np.array])
def test_integral_values_of_any_type(integer):
    width = get_dspark_swa_index_width(integer(100), integer(29), alignment=integer(64))
    assert type(width) is int
    assert width == 192


@pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH or "-")
def test_torch_scalars():
    width = get_dspark_swa_index_width(torch.tensor(100), torch.tensor(29), alignment=torch.tensor(64))
    assert type(width) is int
    assert width == 192


@pytest.mark.parametrize("name", ["window_size", "num_speculative_tokens", "alignment"])
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_other_types(name, value):
    with pytest.raises(TypeError, match=name):
        get_dspark_swa_index_width(**{"window_size": 128, "num_speculative_tokens": 4} | {name: value})


@pytest.mark.parametrize("name", ["window_size", "num_speculative_tokens", "alignment"])
@pytest.mark.parametrize("value", NOT_INTEGRAL, ids=repr)
def test_numbers_that_are_not_integral(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        get_dspark_swa_index_width(**{"window_size": 128, "num_speculative_tokens": 4} | {name: value})


@pytest.mark.parametrize("alignment", [0, -64])
def test_alignment_below_one(alignment):
    with pytest.raises(ValueError, match=f"alignment.*{alignment}"):
        get_dspark_swa_index_width(128, 4, alignment=alignment)


def test_alignment_is_a_keyword():
    with pytest.raises(TypeError):
        get_dspark_swa_index_width(128, 4, 64)
