"""The cases of cases.json on every backend, and on the oracle that the other tests trust."""

import json
from pathlib import Path

import oracle
import pytest
from backends import every_backend, to_list

import cupy_slots

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())


def cases_of(*functions):
    cases = [case for case in CASES if case["function"] in functions]
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in cases])


@every_backend
@cases_of("get_compressed_slot_mapping")
def test_slot_mapping(backend, case):
    arguments = dict(case["args"])
    n = arguments["num_tokens"]
    out, _ = backend.make_out([7] * arguments.pop("out_len", n))
    result = cupy_slots.get_compressed_slot_mapping(**backend.make_inputs(arguments), out=out)
    assert to_list(result) == case["expected"][:n], case
    assert to_list(out) == case["expected"], case


@cases_of("get_compressed_slot_mapping")
def test_slot_mapping_of_the_oracle(case):
    assert oracle.compressed_slot_mapping(**case["args"]) == case["expected"], case


@cases_of("get_dspark_swa_index_width")
def test_index_width(case):
    assert cupy_slots.get_dspark_swa_index_width(**case["args"]) == case["expected"]
    assert oracle.dspark_swa_index_width(**case["args"]) == case["expected"]


@cases_of("get_swa_indices", "get_dspark_swa_indices")
def test_swa_indices_of_the_oracle(case):
    rows, lens = oracle.swa_indices(**case["args"])
    assert (rows, lens) == (case["expected"]["indices"], case["expected"]["lens"]), case


def test_every_case_is_checked_by_a_test_above():
    checked = ("get_compressed_slot_mapping", "get_dspark_swa_index_width", "get_swa_indices", "get_dspark_swa_indices")
    assert {case["function"] for case in CASES} == set(checked)
