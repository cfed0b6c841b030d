"""The CPU path and the launch of a kernel have one name and one signature, so that a reader holds them side by side."""

import inspect

import pytest

from cupy_slots import _cpu, _gpu
from cupy_slots._jit import Kernel


@pytest.mark.parametrize("name", sorted({kernel.name for kernel in Kernel.registry}))
def test_one_signature(name):
    on_cpu, on_gpu = (inspect.signature(getattr(module, name)).parameters for module in (_cpu, _gpu))
    assert [*on_gpu] == [*on_cpu, "stream"]
