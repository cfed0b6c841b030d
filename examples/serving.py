"""A serving engine without a model: request traces, and a scheduler that turns them into an engine's steps.

NumPy only. Each step comes with its arrays, built and padded as an engine does.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAD = -1
HASHED_TOKENS = 512  # tokens that one of a trace's `hash_ids` covers


class TraceRequest(NamedTuple):
    """One line of a trace in the Mooncake format; `timestamp` is in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path, limit=None) -> list[TraceRequest]:
    """Read the first `limit` requests of a Mooncake trace: one JSON object a line, in order of arrival."""
    trace = []
    with Path(path).open() as lines:
        for number, line in enumerate(lines, 1):
            if len(trace) == limit:
                break
            try:
                fields = json.loads(line)
                trace.append(TraceRequest(*(fields[name] for name in TraceRequest._fields)))
                if min(trace[-1].input_length, trace[-1].output_length) < 1:
                    raise ValueError("input_length and output_length must be at least 1")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a request of a Mooncake trace: {error!r}") from None
    if not trace:
        raise ValueError(f"{path} holds no requests")
    return trace


PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
NEW_INPUT_TOKENS = (891, 919, 1895, 6703, 15368, 27809, 43399, 94943, 122889)
FOLLOW_UP_TOKENS = (10, 388, 575, 839, 3518, 11710, 17987, 35489, 65948)  # behind the blocks of the earlier request
OUTPUT_TOKENS = (1, 25, 165, 363, 485, 602, 689, 1060, 2000)
MAX_INPUT_TOKENS = 123_192
FOLLOW_UPS = 0.3  # share of requests that continue an earlier one
BURST_MS = 3000
REQUESTS_PER_BURST = 8.9


def synthetic_trace(requests, seed=0) -> list[TraceRequest]:
    """Make a trace with the lengths and the prefix sharing of Mooncake's conversation trace.

    That trace was published with "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving". 2,000
    synthetic requests, in the mean over 12 seeds, and in parentheses that trace's first 2,000: input length, mean
    13.8k (13.7k) and median 7.9k (8.0k) tokens, at most 123,192 (123,192); output length, mean 341 (352) and
    median 357 (363); one 512-token block that begins every request; 27% (28%) of the requests share more than that
    with an earlier one; 30% (29%) of all blocks were seen before; 9 (9) requests arrive every 3 s.
    """
    rng = np.random.default_rng(seed)

    def draw(percentiles):
        return int(np.exp(np.interp(100 * rng.random(), PERCENTILES, np.log(percentiles))))

    trace: list[TraceRequest] = []
    next_hash_id, arrival = 1, 0.0
    for number in range(requests):
        if number and rng.random() < FOLLOW_UPS:
            earlier = trace[int(number * rng.random() ** 0.75)]  # rather a recent one
            shared = earlier.hash_ids[: earlier.input_length // HASHED_TOKENS]
            input_length = min(len(shared) * HASHED_TOKENS + draw(FOLLOW_UP_TOKENS), MAX_INPUT_TOKENS)
        else:
            shared, input_length = [0], draw(NEW_INPUT_TOKENS)
        new_blocks = -(-input_length // HASHED_TOKENS) - len(shared)
        hash_ids = [*shared, *range(next_hash_id, next_hash_id + new_blocks)]
        next_hash_id += new_blocks
        timestamp = int(arrival // BURST_MS) * BURST_MS
        trace.append(TraceRequest(timestamp, input_length, draw(OUTPUT_TOKENS), hash_ids))
        arrival += rng.exponential(BURST_MS / REQUESTS_PER_BURST)
    return trace


@dataclass(eq=False, slots=True)
class Request:
    """A request of the trace while the engine serves it."""

    number: int
    arrival: int
    input_length: int
    end: int  # tokens that go through the model: the last output token never does
    num_pages: int
    page_keys: list[int]  # names of the prompt's full pages: equal keys mean equal prefixes
    pages: np.ndarray | None = None
    shared_pages: int = 0  # leading pages found in the prefix cache
    cached: int = 0  # tokens on them
    computed: int = 0  # tokens whose results are in place; the next step starts here
    published: int = 0  # leading pages offered to the prefix cache

    @property
    def decoding(self) -> bool:
        return self.computed >= self.input_length

    def take(self, budget, drafts, accepted) -> "Scheduled":
        """The tokens this request runs in a step that has room for `budget` more."""
        if self.decoding:
            submitted = min(1 + drafts, budget)
            written = min(1 + accepted, submitted, self.end - self.computed)
            return Scheduled(self, self.computed, 0, written, submitted - written)
        tokens = min(self.input_length - self.computed, budget)
        replayed = min(max(self.cached - self.computed, 0), tokens)
        return Scheduled(self, self.computed, replayed, tokens - replayed, 0)


class Scheduled(NamedTuple):
    """A request's tokens in one step, in this order: replayed, written, rejected."""

    request: Request
    start: int  # position of the first of them
    replayed: int
    written: int
    rejected: int


class Kind(IntEnum):
    """What a row of a step's flat batch is."""

    PREFILL = 0
    DECODE = 1
    REPLAYED = 2
    REJECTED = 3
    PADDED = 4


@dataclass(slots=True)
class Step:
    """One forward pass. The arrays are views of buffers that the next step overwrites.

    They are padded as for a CUDA graph: `query_start_loc` repeats its last real entry, `seq_lens` is zero, and the
    rows of `block_table` and the entries of `slot_mapping` behind the batch are what earlier steps left there.
    """

    number: int
    num_tokens: int
    num_requests: int
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    kind: np.ndarray
    scheduled: list[Scheduled]
    admitted: list[Request]
    finished: list[Request]


class PagePool:
    """The pages of the KV cache: who holds them, which prefixes they keep, and which to give up first."""

    def __init__(self, num_pages):
        self.free = list(reversed(range(num_pages)))
        self.idle: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody, least recently used first
        self.holders = [0] * num_pages
        self.page_of: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.used: set[int] = set()
        self.reused = self.evicted = 0

    def claim(self, keys, num_pages) -> tuple[list[int], int] | None:
        """Take `num_pages` pages, the first of them from the prefix cache as far as `keys` are found there.

        Returns the pages and how many were found, or None when there is no room now.
        """
        shared = []
        for key in keys:
            if key not in self.page_of:
                break
            shared.append(self.page_of[key])
        fresh = num_pages - len(shared)
        if fresh > len(self.free) + len(self.idle) - sum(page in self.idle for page in shared):
            return None
        for page in shared:
            self.idle.pop(page, None)
        pages = shared + [self._fresh_page() for _ in range(fresh)]
        for page in pages:
            self.holders[page] += 1
        return pages, len(shared)

    def _fresh_page(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.page_of[self.key_of.pop(page)]
            self.evicted += 1
        self.reused += page in self.used
        self.used.add(page)
        return page

    def publish(self, page, key) -> None:
        """Let later requests find a filled page. A prefix that two requests computed at once is kept once."""
        if self.page_of.setdefault(key, page) == page:
            self.key_of[page] = key

    def release(self, pages) -> None:
        """Give pages back, the end of the sequence to be evicted before its beginning."""
        for page in reversed(pages):
            self.holders[page] -= 1
            if self.holders[page] == 0:
                if page in self.key_of:
                    self.idle[page] = None
                else:
                    self.free.append(page)


def graph_size(count) -> int:
    """Size of the smallest CUDA graph that holds `count`: 1, 2, 4, multiples of 8 to 256, then of 16."""
    for size in (1, 2, 4):
        if count <= size:
            return size
    granularity = 8 if count <= 256 else 16
    return -(-count // granularity) * granularity


class Scheduler:
    """Continuous batching over a paged KV cache. Iterating serves the trace, one `Step` at a time, once.

    Decodes come first, then prefill chunks under what is left of the token budget, in order of arrival. A request
    is admitted when pages for its whole length can be had, so none is ever preempted. A prefix-cache hit replays
    its last `window` tokens, as a sliding-window cache that is not kept with the prefix needs.

    Parameters
    ----------
    trace : list of TraceRequest
    token_budget : int
        Most tokens in a step.
    max_requests : int
        Most requests running at once.
    num_pages, page_tokens : int
        Pages of the cache, and the tokens on each.
    speculative_tokens : int
        Draft tokens behind every decoded token. Verification keeps each with probability `acceptance`, until the
        first that it rejects.
    window : int
        Cached tokens run again after a prefix-cache hit.
    step_ms : int
        Trace time that passes in a step. A request waits until its timestamp.
    seed : int
        Seed of the verification's luck.
    """

    def __init__(
        self,
        trace,
        *,
        token_budget=8192,
        max_requests=256,
        num_pages=16_384,
        page_tokens=256,
        speculative_tokens=0,
        acceptance=0.7,
        window=128,
        step_ms=200,
        seed=0,
    ):
        if HASHED_TOKENS % page_tokens:
            raise ValueError(f"page_tokens must divide a hashed block's {HASHED_TOKENS} tokens, was {page_tokens}")
        self.token_budget, self.max_requests = token_budget, max_requests
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.step_ms, self.window = step_ms, window
        self.speculative_tokens, self.acceptance = speculative_tokens, acceptance
        self.rng = np.random.default_rng(seed)
        self.pool = PagePool(num_pages)
        self.clock = 0
        self.running: list[Request] = []
        self.waiting = deque(self._request(number, entry) for number, entry in enumerate(trace))
        table_width = max((request.num_pages for request in self.waiting), default=0)
        if table_width > num_pages:
            raise ValueError(f"the longest request needs {table_width} pages, the cache has {num_pages}")

        self.max_tokens = graph_size(token_budget)
        request_rows = graph_size(max_requests)
        self.query_start_loc = np.zeros(request_rows + 1, np.int32)
        self.seq_lens = np.zeros(request_rows, np.int32)
        self.block_table = np.zeros((request_rows, table_width), np.int32)
        self.slot_mapping = np.full(self.max_tokens, PAD, np.int64)
        self.kind = np.full(self.max_tokens, Kind.PADDED, np.int8)

    def _request(self, number, entry) -> Request:
        per_block = HASHED_TOKENS // self.page_tokens
        page_keys = [hash_id * per_block + part for hash_id in entry.hash_ids for part in range(per_block)]
        tokens = entry.input_length + entry.output_length
        return Request(
            number=number,
            arrival=entry.timestamp,
            input_length=entry.input_length,
            end=tokens - 1,
            num_pages=-(-(tokens + self.speculative_tokens) // self.page_tokens),
            page_keys=page_keys[: entry.input_length // self.page_tokens],
        )

    def __iter__(self) -> Iterator[Step]:
        number = 0
        while self.running or self.waiting:
            if not self.running:
                self.clock = max(self.clock, self.waiting[0].arrival)
            step = self._build(number, *self._schedule())
            yield step
            self._advance(step)
            number += 1

    def _schedule(self) -> tuple[list[Scheduled], list[Request]]:
        budget = self.token_budget
        scheduled, admitted = [], []
        decodes_first = sorted(self.running, key=lambda request: not request.decoding)
        accepted = self._verify(len(decodes_first))
        for request, kept in zip(decodes_first, accepted, strict=True):
            if budget == 0:
                break
            scheduled.append(request.take(budget, self.speculative_tokens, kept))
            budget -= sum(scheduled[-1][2:])
        while budget and len(self.running) < self.max_requests and self._admit():
            request = self.running[-1]
            admitted.append(request)
            scheduled.append(request.take(budget, 0, 0))
            budget -= sum(scheduled[-1][2:])
        return scheduled, admitted

    def _verify(self, num_requests) -> list[int]:
        kept = self.rng.random((num_requests, self.speculative_tokens)) < self.acceptance
        return np.cumprod(kept, axis=1, dtype=int).sum(axis=1).tolist()

    def _admit(self) -> bool:
        if not self.waiting or self.waiting[0].arrival > self.clock:
            return False
        request = self.waiting[0]
        # A hit on the whole prompt would leave no token to sample from.
        usable = request.page_keys[: (request.input_length - 1) // self.page_tokens]
        claimed = self.pool.claim(usable, request.num_pages)
        if claimed is None:
            return False
        pages, request.shared_pages = claimed
        request.pages = np.array(pages, np.int32)
        request.published = request.shared_pages
        request.cached = request.shared_pages * self.page_tokens
        request.computed = max(request.cached - self.window, 0)
        self.running.append(self.waiting.popleft())
        return True

    def _build(self, number, scheduled, admitted) -> Step:
        num_requests = len(scheduled)
        start = np.array([share.start for share in scheduled])
        parts = np.array([share[2:] for share in scheduled])
        query_lens = parts.sum(axis=1)
        batch = int(query_lens.sum())
        num_tokens = graph_size(batch)
        num_rows = graph_size(num_requests)

        self.query_start_loc[1 : num_requests + 1] = np.cumsum(query_lens)
        self.query_start_loc[num_requests + 1 :] = batch
        self.seq_lens[:num_requests] = start + query_lens
        self.seq_lens[num_requests:] = 0
        for row, share in enumerate(scheduled):
            self.block_table[row, : share.request.num_pages] = share.request.pages

        phases = [Kind.DECODE if share.request.decoding else Kind.PREFILL for share in scheduled]
        kinds = [(Kind.REPLAYED, phase, Kind.REJECTED) for phase in phases]
        self.kind[:batch] = np.repeat(np.array(kinds, np.int8).ravel(), parts.ravel())
        self.kind[batch:] = Kind.PADDED
        row = np.repeat(np.arange(num_requests), query_lens)
        position = np.arange(batch) + (start - self.query_start_loc[:num_requests])[row]
        page, offset = np.divmod(position, self.page_tokens)
        slots = self.block_table[row, page] * np.int64(self.page_tokens) + offset
        slots[self.kind[:batch] >= Kind.REPLAYED] = PAD
        self.slot_mapping[:batch] = slots

        return Step(
            number=number,
            num_tokens=num_tokens,
            num_requests=num_requests,
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_table=self.block_table[:num_rows],
            slot_mapping=self.slot_mapping[:num_tokens],
            kind=self.kind[:num_tokens],
            scheduled=scheduled,
            admitted=admitted,
            finished=[s.request for s in scheduled if s.start + s.replayed + s.written == s.request.end],
        )

    def _advance(self, step) -> None:
        """What verification and the step's end make of it: rejected tokens never happened."""
        for request, start, replayed, written, _ in step.scheduled:
            request.computed = start + replayed + written
            filled = min(request.computed // self.page_tokens, len(request.page_keys))
            for index in range(request.published, filled):
                self.pool.publish(int(request.pages[index]), request.page_keys[index])
            request.published = max(request.published, filled)
        for request in step.finished:
            self.pool.release(request.pages.tolist())
            self.running.remove(request)
        self.clock += self.step_ms
