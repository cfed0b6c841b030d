"""Map a trace under decode context parallelism, a process for each rank, and check the ranks against one alone.

    torchrun --nproc-per-node 4 examples/context_parallel.py
    torchrun --nproc-per-node 2 examples/context_parallel.py conversation_trace.jsonl --shard state --interleave 2
    python examples/context_parallel.py                      # a world of one rank

Every rank runs the same scheduler and so sees the same steps. `map_step` maps its share of a step for two compressed
caches, of 4 and of 128 tokens a state, in one call. The ranks gather what they wrote, over NCCL where each has a GPU
and over gloo elsewhere, and rank 0 checks it (`Check`): every closing token got exactly one slot, each rank's states of
a request are 0, 1, 2, ..., and the whole is what one rank maps. The exit code is 1 when it finds a violation.

Ranks choose their GPU after the import: set CUPY_SLOTS_JIT=lazy, or each loads the kernels on the first GPU too.
"""

import argparse
import os
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from typing import NamedTuple

import numpy as np
from replay_trace import Backend, at_least, open_backend, progress_bar
from serving import PAD, Kind, PagePool, Scheduler, read_trace, synthetic_trace

from cupy_slots import CacheGroup, get_compressed_slot_mappings, get_state_owner

RATIOS = (4, 128)
PAGE_TOKENS = 512
RUNS = (1, 2, 4)  # in states of the larger ratio; they divide a page, so that a page ends where a run does
NOWHERE = -2


class Layout(NamedTuple):
    """What the ranks share out in which runs, and what tells the mapping the tokens of its own rank."""

    cp_shard: str
    cp_interleave: int
    owner_from: str  # "mask": slot_mapping has PAD at other ranks' tokens; "rank": dcp_rank is given

    def __str__(self):
        return f"{self.cp_shard}s in runs of {self.cp_interleave}, owner from the {self.owner_from}"


def layouts_of(shard, runs) -> list[Layout]:
    ways = [("token", "mask"), ("token", "rank"), ("state", "rank")]
    return [
        Layout(cp_shard, run * max(RATIOS) if cp_shard == "token" else run, owner_from)
        for cp_shard, owner_from in ways
        if shard in (cp_shard, "both")
        for run in runs
    ]


class SharedPagePool(PagePool):
    """Finds prefixes by `world_size` pages at a time: what they hold fills one page of each rank."""

    def __init__(self, num_pages, world_size):
        super().__init__(num_pages)
        self.world_size = world_size

    def claim(self, keys, num_pages):
        found = next((i for i, key in enumerate(keys) if key not in self.page_of), len(keys))
        return super().claim(keys[: found - found % self.world_size], num_pages)


def open_scheduler(trace, world_size, **settings) -> Scheduler:
    scheduler = Scheduler(trace, page_tokens=PAGE_TOKENS, **settings)
    scheduler.pool = SharedPagePool(scheduler.num_pages, world_size)
    return scheduler


def local_block_table(step, world_size) -> np.ndarray:
    """A rank's pages: one in the place of every `world_size`, and with the id of the last of them."""
    rows, columns = step.block_table.shape
    table = np.full((rows, -(-columns // world_size)), PAD, np.int32)
    for row, (request, *_) in enumerate(step.scheduled):
        last = np.arange(world_size - 1, request.num_pages + world_size - 1, world_size)
        table[row, : len(last)] = request.pages[np.minimum(last, request.num_pages - 1)]
    return table


def rows_and_positions(step) -> tuple[np.ndarray, np.ndarray]:
    """Of each token of the batch, the row of its request and its position."""
    ends = step.query_start_loc[1 : step.num_requests + 1]
    row = np.repeat(np.arange(step.num_requests), np.diff(ends, prepend=0))
    return row, np.arange(len(row)) + (step.seq_lens[: step.num_requests] - ends)[row]


def groups_of(block_table, out) -> list[CacheGroup]:
    return [CacheGroup(block_table, PAGE_TOKENS // ratio, ratio, o) for ratio, o in zip(RATIOS, out, strict=True)]


def map_step(step, block_table, layout, rank, world_size, out, upload=np.asarray) -> None:
    """Map one rank's share of a step for every cache, as an engine's worker does."""
    slot_mapping = step.slot_mapping  # PAD at replayed and rejected tokens, which must not be written
    if layout.owner_from == "mask":
        _, position = rows_and_positions(step)
        slot_mapping = slot_mapping.copy()
        slot_mapping[: len(position)][position // layout.cp_interleave % world_size != rank] = PAD
    get_compressed_slot_mappings(
        step.num_tokens,
        upload(slot_mapping),
        upload(step.query_start_loc),
        upload(step.seq_lens),
        groups_of(upload(block_table), out),
        world_size,
        layout.cp_interleave,
        dcp_rank=rank if layout.owner_from == "rank" else None,
        cp_shard=layout.cp_shard,
    )


def map_step_alone(step, out, upload=np.asarray) -> None:
    """Map a step for a rank that has all the tokens."""
    batch = map(upload, (step.slot_mapping, step.query_start_loc, step.seq_lens))
    get_compressed_slot_mappings(step.num_tokens, *batch, groups_of(upload(step.block_table), out))


def states_of(slots, pages, states_per_page) -> np.ndarray:
    """The index of each slot's state in its sequence, whose pages are the same row of `pages`."""
    page, offset = np.divmod(slots, states_per_page)
    found = pages == page[:, None]
    return np.where(found.any(axis=1), found.argmax(axis=1) * states_per_page + offset, NOWHERE)


class Check:
    """What the ranks hold in one cache under one layout, and what went wrong there."""

    def __init__(self, layout, ratio, world_size, scheduler):
        self.ratio, self.states_per_page = ratio, PAGE_TOKENS // ratio
        columns = -(-scheduler.block_table.shape[1] // world_size)
        self.state_at = np.full((world_size, columns * self.states_per_page), NOWHERE)  # by rank and local state
        state = np.arange(self.state_at.size)
        closing = (state + 1) * ratio - 1
        owner = get_state_owner(closing, ratio, world_size, layout.cp_interleave, cp_shard=layout.cp_shard)
        self.state_at[owner] = state
        self.held = np.zeros((world_size, len(scheduler.waiting)), int)  # states, by rank and request
        self.written = np.zeros(world_size, int)  # states, by rank
        self.violations: Counter[str] = Counter()

    def check(self, step, block_table, mapped, alone) -> None:
        """Judge a step: `mapped[rank]` was written with the ranks' `block_table`, `alone` by one without others."""
        row, position = rows_and_positions(step)
        batch = len(row)
        closes, writers = np.zeros(len(alone), bool), np.count_nonzero(mapped != PAD, axis=0)
        closes[:batch] = ((position + 1) % self.ratio == 0) & (step.kind[:batch] <= Kind.DECODE)
        self._count("a closing token got no slot", closes & (writers == 0))
        self._count("a token got a slot on several ranks", writers > 1)
        self._count("a token got a slot that closes no state", ~closes & (writers > 0))

        whole, token = np.full(batch, PAD), np.flatnonzero(alone[:batch] != PAD)
        whole[token] = states_of(alone[token], step.block_table[row[token]], self.states_per_page)
        self._count("the whole is not the mapping of one rank", self._join(step, row, block_table, mapped) != whole)

    def _join(self, step, row, block_table, mapped) -> np.ndarray:
        """The state of the sequence that each token of the batch wrote on any rank, PAD where none."""
        joined = np.full(len(row), PAD)
        for request in step.admitted:
            self.held[:, request.number] = request.cached // (self.ratio * len(mapped))
        number = np.array([share.request.number for share in step.scheduled])[row]
        for rank, slots in enumerate(mapped):
            token = np.flatnonzero(slots[: len(row)] != PAD)
            local = states_of(slots[token], block_table[row[token]], self.states_per_page)
            earlier = np.arange(len(token)) - np.searchsorted(row[token], row[token])  # of the request, in this step
            self._count("a rank's states are not dense", local != self.held[rank, number[token]] + earlier)
            np.add.at(self.held[rank], number[token], 1)
            self.written[rank] += len(token)
            joined[token] = np.where(local == NOWHERE, NOWHERE, self.state_at[rank, local])
        return joined

    def _count(self, violation, tokens) -> None:
        self.violations[violation] += np.count_nonzero(tokens)


class Ranks(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    world_size: int
    backend: Backend
    gathered_over: str | None  # "nccl", "gloo", or None for a process alone

    def gather(self, out) -> np.ndarray | None:
        """Every rank's `out` on rank 0, None on the others."""
        if self.gathered_over is None:
            return self.backend.download(out)[None]
        import torch

        on_gpu = self.gathered_over == "nccl"
        mine = torch.as_tensor(out, device="cuda") if on_gpu else torch.from_numpy(self.backend.download(out))
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else None
        torch.distributed.gather(mine, everyones)
        return torch.stack(everyones).cpu().numpy() if everyones else None


def join_ranks(backend_name=None) -> Ranks:
    """Join the ranks that torchrun started, each on a GPU of its own where its host has enough; or be alone."""
    if "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, open_backend(backend_name or "numpy"), None)
    import torch

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world_size, local_rank, local_size = (int(os.environ[name]) for name in names)
    over, device = "gloo", None
    enough_gpus = torch.distributed.is_nccl_available() and torch.cuda.device_count() >= local_size
    if enough_gpus and backend_name != "numpy":
        over, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if backend_name == "cupy":
            import cupy

            cupy.cuda.Device(local_rank).use()
    backend = open_backend(backend_name or ("torch" if device else "numpy"))
    torch.distributed.init_process_group(over, device_id=device)
    return Ranks(rank, world_size, backend, over)


def replay(ranks, scheduler, layouts, steps=None, on_step=lambda step: None) -> list[list[Check]]:
    """Map the steps in every layout, and check them on rank 0. Returns the checks of each layout, by ratio."""
    rank, world_size, (_, upload, download, _), _ = ranks
    out_alone = upload(np.full((len(RATIOS), scheduler.max_tokens), PAD, np.int64))
    out = upload(np.full((len(layouts), len(RATIOS), scheduler.max_tokens), PAD, np.int64))
    checks = [[Check(layout, ratio, world_size, scheduler) for ratio in RATIOS] for layout in layouts]
    for step in islice(scheduler, steps):
        block_table = local_block_table(step, world_size)
        for layout, layout_out in zip(layouts, out, strict=True):
            map_step(step, block_table, layout, rank, world_size, layout_out, upload)
        mapped = ranks.gather(out)
        if rank == 0:
            map_step_alone(step, out_alone, upload)
            alone = download(out_alone)
            for i, j in np.ndindex(len(layouts), len(RATIOS)):
                checks[i][j].check(step, block_table, mapped[:, i, j], alone[j])
        on_step(step)
    return checks


def print_table(ranks, tokens, layouts, checks) -> int:
    """The outcome, a row a layout. Returns the number of violations, which the last row says."""
    print(f"ranks: {ranks.world_size}, {ranks.backend.name}, gathered over {ranks.gathered_over or 'nothing'}")
    print("tokens:", ", ".join(f"{count:,} {kind.name.lower()}" for kind, count in zip(Kind, tokens, strict=True)))
    columns = [f"states, ratio {ratio} (most on a rank)" for ratio in RATIOS]
    print(f"{'layout':<44}{columns[0]:>36}{columns[1]:>38}{'violations':>12}")
    violations = Counter()
    for layout, by_ratio in zip(layouts, checks, strict=True):
        found = sum((check.violations for check in by_ratio), Counter())
        states = [f"{check.written.sum():,} ({check.written.max():,})" for check in by_ratio]
        print(f"{layout!s:<44}{states[0]:>36}{states[1]:>38}{found.total():>12,}")
        violations += found
    for violation, count in violations.items():
        print(f"{violation}: {count:,}")
    print(f"violations: {violations.total()}")
    return violations.total()


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Map a trace on the ranks that torchrun started, and check that together they map as one rank "
        "does. The exit code is 1 if there is a violation.",
    )
    positive, count, add = at_least(1), at_least(0), parser.add_argument
    add("trace", nargs="?", metavar="TRACE.jsonl", help="a trace in the Mooncake format; without it, a synthetic one")
    add("--requests", type=positive, default=50, metavar="N", help="requests of the trace (%(default)s)")
    add("--steps", type=positive, metavar="N", help="steps to map (all)")
    add("--speculative-tokens", type=count, default=3, metavar="K", help="drafts behind a decoded token (%(default)s)")
    unit = f"states, or {max(RATIOS)} tokens where tokens are sharded"
    add("--interleave", type=int, nargs="+", choices=RUNS, default=RUNS, help=f"lengths of a rank's runs, in {unit}")
    add("--shard", choices=("token", "state", "both"), default="both", help="what is interleaved (%(default)s)")
    default = "torch where torchrun's ranks have a GPU each, else numpy"
    add("--backend", choices=("numpy", "torch", "cupy"), help=f"whose arrays are mapped ({default})")
    return parser


def main(argv=None) -> int:
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        trace = read_trace(args.trace, args.requests) if args.trace else synthetic_trace(args.requests)
        ranks = join_ranks(args.backend)
        scheduler = open_scheduler(trace, ranks.world_size, speculative_tokens=args.speculative_tokens)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))

    layouts, tokens = layouts_of(args.shard, args.interleave), np.zeros(len(Kind), int)
    with progress_bar(len(trace)) if ranks.rank == 0 else nullcontext() as bar:

        def on_step(step):
            tokens[:] += np.bincount(step.kind, minlength=len(Kind))
            if bar:
                bar.update(len(step.finished))

        checks = replay(ranks, scheduler, layouts, args.steps, on_step)
    violations = print_table(ranks, tokens, layouts, checks) if ranks.rank == 0 else 0
    if ranks.gathered_over:
        import torch

        torch.distributed.destroy_process_group()
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
