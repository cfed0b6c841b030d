"""Every example in the docstrings of the public names runs as it is printed."""

import doctest

import numpy as np
import pytest

import cupy_slots

NAMES = {name: getattr(cupy_slots, name) for name in cupy_slots.__all__ if callable(getattr(cupy_slots, name))}


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    tests = doctest.DocTestFinder(recurse=False).find(NAMES[name], name, globs={"np": np, **NAMES})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0 or not name.startswith("get_"), f"no example in the docstring of {name}"
