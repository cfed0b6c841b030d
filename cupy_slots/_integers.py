"""What counts as an integer argument."""

from __future__ import annotations

import operator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

INT64_MAX = 2**63 - 1


def as_int(name: str, value: Any) -> int:
    """The Python int that `value` stands for: any integer type, a 0-d array, or an integral float."""
    if type(value) is int:
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"{name} must be an integer on the host, was a GPU array (reading it would synchronise)")
    is_bool = isinstance(value, (bool, np.bool_)) or "bool" in str(getattr(value, "dtype", ""))
    if not is_bool and getattr(value, "ndim", 0) == 0:
        try:
            return operator.index(value)
        except TypeError:
            scalar = value.item() if hasattr(value, "item") else value
            if isinstance(scalar, (float, Fraction, Decimal)) and scalar == scalar // 1:
                return int(scalar)
    raise TypeError(f"{name} must be an integer, was {value!r}")


def int_at_least(name: str, value: object, least: int) -> int:
    """`value` as a Python int between `least` and the largest int64."""
    number = as_int(name, value)
    if not least <= number <= INT64_MAX:
        raise ValueError(f"{name} must be at least {least} and fit int64, was {number}")
    return number
