"""The context-parallel example: launched with gloo it finds nothing, and its check finds every planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import context_parallel
import numpy as np
import pytest
from backends import NO_SECOND_GPU, NO_TORCH, NOISE, torch
from context_parallel import (
    PAD,
    RATIOS,
    RUNS,
    Check,
    layouts_of,
    local_block_table,
    main,
    map_step,
    map_step_alone,
    open_scheduler,
)
from serving import Kind, TraceRequest

EXAMPLE = Path(context_parallel.__file__)
TRACE = [  # the second finds four pages of the first, the third is chunked
    TraceRequest(0, 2500, 150, [0, 1, 2, 3, 4]),
    TraceRequest(60_000, 3000, 140, [0, 1, 2, 3, 5, 6]),
    TraceRequest(60_000, 9000, 9, [0, *range(10, 27)]),
]
LAYOUTS = layouts_of("both", RUNS)
NO_RANKS = NO_TORCH or ("" if torch.distributed.is_available() else "this torch has no torch.distributed")
NO_GLOO = NO_RANKS or ("" if torch.distributed.is_gloo_available() else "this torch has no gloo")
NO_NCCL = NO_RANKS or NO_SECOND_GPU or ("" if torch.distributed.is_nccl_available() else "this torch has no NCCL")


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request._asdict()) + "\n" for request in TRACE))
    return str(path)


def torchrun(processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), str(EXAMPLE), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUPY_SLOTS_JIT": "lazy"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    printed = done.stdout.splitlines()
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert printed[-1] == "violations: 0", (command, done.stdout)
    return printed


@pytest.mark.skipif(bool(NO_GLOO), reason=NO_GLOO or "-")
@pytest.mark.parametrize("processes", [2, 4])
def test_over_gloo(trace_file, processes):
    printed = torchrun(processes, trace_file, "--backend", "numpy")
    assert printed[0] == f"ranks: {processes}, NumPy, gathered over gloo"
    assert len(printed) == len(LAYOUTS) + 4, printed


@pytest.mark.skipif(bool(NO_NCCL), reason=NO_NCCL or "-")
@pytest.mark.parametrize("backend", [[], ["--backend", "cupy"]], ids=str)
def test_over_nccl(trace_file, backend):
    assert torchrun(2, trace_file, *backend)[0].endswith("gathered over nccl")


class Replay:
    """All ranks of a world, one after the other, in every step of the trace."""

    def __init__(self, world_size, layout, **settings):
        self.world_size, self.layout = world_size, layout
        self.scheduler = open_scheduler(TRACE, world_size, speculative_tokens=3, **settings)
        self.checks = [Check(layout, ratio, world_size, self.scheduler) for ratio in RATIOS]

    def __iter__(self):
        """Each step, with what all ranks wrote and what one alone did: writable, and judged after the loop's body."""
        for step in self.scheduler:
            block_table = local_block_table(step, self.world_size)
            mapped = np.full((len(RATIOS), self.world_size, self.scheduler.max_tokens), NOISE)
            alone = np.full((len(RATIOS), self.scheduler.max_tokens), NOISE)
            for rank in range(self.world_size):
                map_step(step, block_table, self.layout, rank, self.world_size, mapped[:, rank])
            map_step_alone(step, alone)
            yield step, mapped, alone
            for check, of_ranks, of_one in zip(self.checks, mapped, alone, strict=True):
                check.check(step, block_table, of_ranks, of_one)

    def violations(self, i):
        return +self.checks[i].violations


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clean(world_size, layout):
    replay, tokens = Replay(world_size, layout), np.zeros(len(Kind), int)
    for step, mapped, alone in replay:
        tokens += np.bincount(step.kind, minlength=len(Kind))
        assert world_size > 1 or np.array_equal(mapped[:, 0], alone), (step.number, layout)
    assert tokens.all(), tokens
    for i, ratio in enumerate(RATIOS):
        assert not replay.violations(i), (world_size, layout, ratio, replay.violations(i))
        assert replay.checks[i].written.all(), (world_size, layout, ratio)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mask_and_rank_map_the_same(world_size, run):
    ways = [Replay(world_size, layout) for layout in layouts_of("token", [run])]
    for (step, by_mask, _), (_, by_rank, _) in zip(*ways, strict=True):
        assert np.array_equal(by_mask, by_rank), (world_size, run, step.number)


def a_writer(mapped):
    ranks, tokens = np.nonzero(mapped != PAD)
    return (ranks[-1], tokens[-1]) if len(tokens) else None


def lose(step, mapped, rank, token):
    mapped[rank, token] = PAD


def duplicate(step, mapped, rank, token):
    mapped[rank - 1, token] = mapped[rank, token]


def give_to_another_rank(step, mapped, rank, token):
    mapped[rank - 1, token], mapped[rank, token] = mapped[rank, token], PAD


def shift(step, mapped, rank, token):
    mapped[rank, token] += 1


def leave_the_cache(step, mapped, rank, token):
    mapped[rank, token] = -7


def repeat_the_slot_before(step, mapped, rank, token):
    written = np.flatnonzero(mapped[rank] != PAD)
    mapped[rank, token] = mapped[rank, written[-2]] if len(written) > 1 else mapped[rank, token] - 1


def write_behind_the_batch(step, mapped, rank, token):
    mapped[rank, step.num_tokens :] = mapped[rank, token]


def write_a_token_that_closes_nothing(step, mapped, rank, token):
    mapped[rank, token - 1] = mapped[rank, token]


NOT_DENSE, NOT_WHOLE = "a rank's states are not dense", "the whole is not the mapping of one rank"
FAULTS = [
    (lose, {"a closing token got no slot", NOT_WHOLE}),
    (duplicate, {"a token got a slot on several ranks", NOT_DENSE}),
    (give_to_another_rank, {NOT_DENSE, NOT_WHOLE}),
    (shift, {NOT_DENSE, NOT_WHOLE}),
    (leave_the_cache, {NOT_DENSE, NOT_WHOLE}),
    (repeat_the_slot_before, {NOT_DENSE, NOT_WHOLE}),
    (write_behind_the_batch, {"a token got a slot that closes no state"}),
    (write_a_token_that_closes_nothing, {"a token got a slot that closes no state", NOT_DENSE, NOT_WHOLE}),
]


@pytest.mark.parametrize("layout", layouts_of("both", [1]), ids=str)
@pytest.mark.parametrize("i", range(len(RATIOS)))
@pytest.mark.parametrize(("fault", "found"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_fault_is_found(fault, found, i, layout):
    """In one step, in one cache, on one rank; nothing is found in the other cache."""
    replay, planted = Replay(2, layout), None
    for step, mapped, _ in replay:
        if planted is None and (planted := a_writer(mapped[i])):
            fault(step, mapped[i], *planted)
    assert planted is not None
    assert found <= replay.violations(i).keys(), (layout, replay.violations(i))
    assert not replay.violations(1 - i), layout


@pytest.mark.parametrize(("checked", "mapped_in"), list(zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True)), ids=str)
def test_ranks_that_map_in_another_layout_are_found(checked, mapped_in):
    replay = Replay(2, checked)
    replay.layout = mapped_in
    for _ in replay:
        pass
    assert NOT_WHOLE in replay.violations(0) | replay.violations(1), (checked, mapped_in)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_that_uses_the_pages_of_one_alone_is_found(layout):
    replay = Replay(2, layout)
    for step, mapped, _ in replay:
        map_step(step, step.block_table, layout, 1, 2, mapped[:, 1])
    for i, ratio in enumerate(RATIOS):
        assert {NOT_DENSE, NOT_WHOLE} == replay.violations(i).keys(), (layout, ratio, replay.violations(i))


def test_main_alone(trace_file, capsys):
    assert main([trace_file]) == 0
    assert main(["--requests", "3", "--steps", "5", "--shard", "state", "--interleave", "1", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "violations: 0"


def test_main_fails_on_a_violation(trace_file, capsys, monkeypatch):
    def one_slot_off(*arguments, **sharding):
        for mapped in get_compressed_slot_mappings(*arguments, **sharding):
            mapped[mapped != PAD] += 1 if sharding else 0

    get_compressed_slot_mappings = context_parallel.get_compressed_slot_mappings
    monkeypatch.setattr("context_parallel.get_compressed_slot_mappings", one_slot_off)
    assert main([trace_file, "--shard", "token"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith(NOT_WHOLE) for line in printed), printed
    assert printed[-1].startswith("violations: ")
    assert printed[-1] != "violations: 0"


@pytest.mark.parametrize(
    "arguments",
    [["absent.jsonl"], ["--steps", "0"], ["--interleave", "3"], ["--shard", "page"], ["--backend", "abacus"]],
    ids=" ".join,
)
def test_main_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2, arguments
    assert "error: " in capsys.readouterr().err
