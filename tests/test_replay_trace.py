"""The replayed trace: the scheduler serves as an engine does, the ledger passes what is right and finds faults."""

import json
import sys

import numpy as np
import pytest
from backends import NO_GPU, NO_TORCH
from ledger import Ledger
from replay_trace import main
from serving import PAD, Kind, PagePool, Scheduler, TraceRequest, graph_size, read_trace, synthetic_trace

from cupy_slots import get_compressed_slot_mapping

RATIOS = (4, 128)
NUM_PAGES = 600  # fewer than the trace fills, so that pages are evicted and used again
SETTINGS = [
    {"speculative_tokens": 0, "window": 0},
    {"speculative_tokens": 0, "window": 128},
    {"speculative_tokens": 1, "window": 5},
    {"speculative_tokens": 3, "window": 128, "token_budget": 8192},
    {"speculative_tokens": 3, "window": 700, "token_budget": 64},
    {"speculative_tokens": 7, "window": 128, "page_tokens": 512, "max_requests": 5},
]


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(24, seed=5)


def mapping(step, ratio, page_tokens, out, slot_mapping):
    get_compressed_slot_mapping(
        step.num_tokens,
        slot_mapping,
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        page_tokens // ratio,
        ratio,
        out=out,
    )
    return out


def violations(scheduler, ratio, fault=lambda step, mapped, ledger: False, masked=True):
    """What the ledger finds when `fault` spoils the mapping of the first step on which it can."""
    ledger = Ledger(ratio, scheduler.page_tokens // ratio, scheduler.num_pages)
    out = np.full(scheduler.max_tokens, 77, np.int64)
    planted = False
    for step in scheduler:
        mapped = mapping(step, ratio, scheduler.page_tokens, out, step.slot_mapping if masked else None)
        planted = planted or fault(step, mapped, ledger)
        ledger.check(step, mapped)
    return ledger.violations


def scheduler_of(trace, **settings):
    return Scheduler(trace, **{"num_pages": NUM_PAGES, "token_budget": 1024, "seed": 3, **settings})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_clean(trace, settings):
    for ratio in RATIOS:
        assert not violations(scheduler_of(trace, **settings), ratio), (ratio, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scheduler(trace, settings):
    scheduler = scheduler_of(trace, **settings)
    replayed, written, drafts, clock = {}, {}, 0, []
    for step in scheduler:
        shares, batch = step.scheduled, sum(sum(share[2:]) for share in step.scheduled)
        assert 0 < batch <= scheduler.token_budget
        assert step.num_tokens == graph_size(batch) == len(step.slot_mapping)
        assert 0 < step.num_requests == len(shares) <= scheduler.max_requests
        assert step.query_start_loc[0] == 0
        assert np.diff(step.query_start_loc).tolist()[: len(shares)] == [sum(share[2:]) for share in shares]
        assert np.all(step.query_start_loc[len(shares) :] == batch)
        assert np.all(step.seq_lens[len(shares) :] == 0)
        assert np.array_equal(step.slot_mapping[:batch] == PAD, step.kind[:batch] >= Kind.REPLAYED)
        assert all(request.arrival <= scheduler.clock for request in step.admitted)
        for share in shares:
            replayed[share.request] = replayed.get(share.request, 0) + share.replayed
            written[share.request] = written.get(share.request, 0) + share.written
            drafts += share.rejected
        clock.append(scheduler.clock)

    assert clock == sorted(set(clock))
    assert len(written) == len(trace)
    for request, tokens in written.items():
        line = trace[request.number]
        assert tokens == line.input_length + line.output_length - 1 - request.cached, request.number
        assert replayed[request] == min(settings["window"], request.cached), request.number
    assert any(request.cached for request in written)
    assert scheduler.pool.evicted
    assert scheduler.pool.reused > scheduler.pool.evicted
    assert bool(drafts) == bool(settings["speculative_tokens"])
    assert not any(scheduler.pool.holders)


def writers(step, mapped):
    return np.flatnonzero(mapped != PAD)


def later_writers(step, mapped):
    return writers(step, mapped)[1:]


def silent(kind):
    return lambda step, mapped: np.flatnonzero((step.kind == kind) & (mapped[: step.num_tokens] == PAD))


def behind(step, mapped):
    return np.arange(step.num_tokens, len(mapped))


def free_slots(mapped, ledger):
    return np.flatnonzero(ledger.writes == 0)[::-1]


def live_slots(mapped, ledger):
    return np.flatnonzero(ledger.writes)


# What the ledger must say, the tokens that can be made to cause it, and the slots to give the first of them.
FAULTS = [
    ("a state went to a wrong slot", writers, free_slots),
    ("the token that closes a state did not write it", writers, lambda mapped, ledger: [PAD]),
    ("a state was written twice", later_writers, lambda mapped, ledger: mapped[mapped != PAD]),
    ("a write hit another live state", writers, live_slots),
    ("a slot is outside the cache", writers, lambda mapped, ledger: [ledger.writes.size]),
    ("a slot is outside the cache", writers, lambda mapped, ledger: [-2]),
    ("a token wrote that closes no state", silent(Kind.PREFILL), free_slots),
    ("a token wrote that closes no state", silent(Kind.DECODE), free_slots),
    ("a replayed token wrote", silent(Kind.REPLAYED), free_slots),
    ("a rejected token wrote", silent(Kind.REJECTED), free_slots),
    ("a padded token wrote", silent(Kind.PADDED), free_slots),
    ("a padded token wrote", behind, free_slots),
]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("violation", "tokens", "slots"), FAULTS)
def test_planted_fault_is_found(trace, violation, tokens, slots, ratio):
    def fault(step, mapped, ledger):
        where, what = tokens(step, mapped), slots(mapped, ledger)
        if not len(where) or not len(what):
            return False
        mapped[where[0]] = what[0]
        return True

    found = violations(scheduler_of(trace, speculative_tokens=3), ratio, fault)
    assert found[violation], (violation, ratio, found)


@pytest.mark.parametrize("ratio", RATIOS)
def test_mapping_without_the_mask_is_found(trace, ratio):
    found = violations(scheduler_of(trace, speculative_tokens=3), ratio, masked=False)
    assert found["a replayed token wrote"], found
    assert found["a rejected token wrote"], found
    assert found["a state was written twice"], found


def test_page_given_to_two_requests_is_found(trace, monkeypatch):
    monkeypatch.setattr(PagePool, "_fresh_page", lambda pool: pool.free[-1])
    assert violations(scheduler_of(trace), 4)["two live states share a slot"]


def test_prefix_hit_on_another_prefix_is_found(trace, monkeypatch):
    publish = PagePool.publish
    monkeypatch.setattr(PagePool, "publish", lambda pool, page, key: publish(pool, page, key ^ 1))
    assert violations(scheduler_of(trace), 4)["a slot holds another state"]


def test_same_seed_same_trace():
    assert synthetic_trace(50, seed=1) == synthetic_trace(50, seed=1)
    assert synthetic_trace(50, seed=1) != synthetic_trace(50, seed=2)
    assert synthetic_trace(50, seed=1)[:20] == synthetic_trace(20, seed=1)


def test_synthetic_trace_is_well_formed():
    parents = {}
    for previous, request in zip([None, *(trace := synthetic_trace(400))], trace, strict=False):
        assert len(request.hash_ids) == -(-request.input_length // 512)
        assert request.output_length >= 1
        assert previous is None or previous.timestamp <= request.timestamp
        for parent, hash_id in zip([None, *request.hash_ids], request.hash_ids, strict=False):
            assert parents.setdefault(hash_id, parent) == parent, "a hash id names one prefix"


LINES = [
    {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1300, "output_length": 140, "hash_ids": [0, 1, 2]},
    {"timestamp": 9000, "input_length": 1400, "output_length": 1, "hash_ids": [0, 1, 3]},
]


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_read_trace(trace_file):
    assert read_trace(trace_file) == [TraceRequest(**line) for line in LINES]
    assert read_trace(trace_file, limit=2) == [TraceRequest(**line) for line in LINES[:2]]


@pytest.mark.parametrize(
    "line", ["", "[]", "{", '{"timestamp": 0}', json.dumps({**LINES[0], "output_length": 0})], ids=repr
)
def test_read_trace_names_the_bad_line(trace_file, line):
    with trace_file.open("a") as lines:
        lines.write(line + "\n")
    with pytest.raises(ValueError, match="line 4: not a request"):
        read_trace(trace_file)


@pytest.mark.parametrize(
    "backend",
    [
        "numpy",
        pytest.param("torch", marks=pytest.mark.skipif(bool(NO_TORCH), reason=NO_TORCH)),
        pytest.param("cupy", marks=pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)),
    ],
)
def test_main(trace_file, capsys, backend):
    assert main([str(trace_file), "--backend", backend]) == 0
    assert main(["--backend", backend, "--requests", "20", "--pages", "600"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "violations: 0"


def test_main_fails_on_a_violation(trace_file, capsys, monkeypatch):
    def one_slot_off(*arguments, out):
        mapped = get_compressed_slot_mapping(*arguments, out=out)
        mapped[mapped != PAD] += 1

    monkeypatch.setattr("replay_trace.get_compressed_slot_mapping", one_slot_off)
    assert main([str(trace_file)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any("ratio 4, token" in line for line in printed)
    assert printed[-1].startswith("violations: ")
    assert printed[-1] != "violations: 0"


@pytest.mark.parametrize(
    "arguments",
    [["absent.jsonl"], ["--requests", "0"], ["--window", "-1"], ["--pages", "2"], ["--backend", "abacus"]],
    ids=" ".join,
)
def test_main_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2, arguments
    assert "error: " in capsys.readouterr().err


def test_main_without_tqdm(trace_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main([str(trace_file)]) == 0
    assert "replayed 3 of 3 requests" in capsys.readouterr().err


@pytest.mark.parametrize("drafts", ["0", "3"])
def test_main_plots(trace_file, tmp_path, drafts):
    pytest.importorskip("matplotlib", reason="no matplotlib: install the extra `examples`")
    assert main([str(trace_file), "--speculative-tokens", drafts, "--plot", str(tmp_path / "step.png")]) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
