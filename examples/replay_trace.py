"""Replay a request trace through a continuous-batching scheduler and check every slot that the mapping gives.

    python examples/replay_trace.py                          # a synthetic trace
    python examples/replay_trace.py conversation_trace.jsonl --speculative-tokens 3 --plot step.png

Each step is mapped for two compressed caches, of 4 and of 128 tokens a state. The results are compared with a
ledger that walks the tokens and knows no slot formula. The exit code is 1 when it finds a violation.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from ledger import Ledger
from serving import PAD, Kind, Scheduler, read_trace, synthetic_trace

from cupy_slots import get_compressed_slot_mapping, validate_compressed_slot_mapping

RATIOS = (4, 128)
PAGE_TOKENS = 256


class Backend(NamedTuple):
    """Where a step's arrays live while they are mapped."""

    name: str
    upload: Callable = np.asarray
    download: Callable = np.asarray
    synchronize: Callable | None = None


def open_backend(name) -> Backend:
    """The backend of that name, or RuntimeError with the reason why it cannot run here."""
    if name == "numpy":
        return Backend("NumPy")
    try:
        if name == "torch":
            import torch

            if not torch.cuda.is_available():
                return Backend("torch, CPU", torch.from_numpy, torch.Tensor.numpy)
            gpu = torch.cuda.get_device_name()
            return Backend(
                f"torch, {gpu}",
                lambda array: torch.from_numpy(array).cuda(),
                lambda tensor: tensor.cpu().numpy(),
                torch.cuda.synchronize,
            )
        import cupy

        device = cupy.cuda.Device()
        gpu = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        return Backend(f"CuPy, {gpu}", cupy.asarray, cupy.asnumpy, device.synchronize)
    except Exception as error:  # a missing library, or whatever a broken driver raises
        raise RuntimeError(f"--backend {name} cannot run here: {type(error).__name__}: {error}") from None


@dataclass
class Cache:
    """One compressed cache: its geometry, the buffer its mapping goes to, and the ledger that judges it."""

    ratio: int
    states_per_page: int
    out: Any
    ledger: Ledger
    pads: int = 0


def validate_step(step, arrays, caches) -> list[str]:
    """What is wrong with the values that a step is about to be mapped with."""
    batch = int(step.query_start_loc[-1])  # what earlier steps left in slot_mapping behind the batch is no mistake
    findings = []
    for cache in caches:
        geometry, num_slots = (cache.states_per_page, cache.ratio), cache.ledger.page_slots.size
        found = validate_compressed_slot_mapping(batch, *arrays, *geometry, cache.out, num_slots=num_slots)
        findings += [f"step {step.number}, ratio {cache.ratio}: {finding}" for finding in found]
    return findings


def map_step(step, arrays, backend, caches) -> float:
    """Map one step for every cache, the job under test. Returns the seconds that the calls took."""
    if backend.synchronize:
        backend.synchronize()
    start = perf_counter()
    for cache in caches:
        get_compressed_slot_mapping(step.num_tokens, *arrays, cache.states_per_page, cache.ratio, out=cache.out)
    if backend.synchronize:
        backend.synchronize()
    return perf_counter() - start


@dataclass
class Replay:
    """What a replay has come to so far."""

    caches: list[Cache]
    requests: int = 0
    steps: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(len(Kind), int))  # by Kind
    cached_tokens: int = 0
    seconds: list[float] = field(default_factory=list)  # in the mapping, a step
    findings: list[str] = field(default_factory=list)  # of validation

    @property
    def violations(self) -> int:
        return len(self.findings) + sum(cache.ledger.violations.total() for cache in self.caches)


def replay(scheduler, backend, on_step=lambda step, mapped: None, validate=False) -> Replay:
    """Serve the scheduler's trace, mapping and checking every step. `on_step` sees each, and its mapping by ratio."""
    num_pages = scheduler.num_pages
    caches = []
    for ratio in RATIOS:
        states_per_page = scheduler.page_tokens // ratio
        out = backend.upload(np.full(scheduler.max_tokens, PAD, np.int64))
        caches.append(Cache(ratio, states_per_page, out, Ledger(ratio, states_per_page, num_pages)))

    so_far = Replay(caches)
    for step in scheduler:
        arrays = [backend.upload(a) for a in (step.slot_mapping, step.query_start_loc, step.seq_lens, step.block_table)]
        if validate:
            so_far.findings += validate_step(step, arrays, caches)
        so_far.seconds.append(map_step(step, arrays, backend, caches))
        mapped = {cache.ratio: backend.download(cache.out) for cache in caches}
        for cache in caches:
            cache.ledger.check(step, mapped[cache.ratio])
            cache.pads += np.count_nonzero(mapped[cache.ratio][: step.num_tokens] == PAD)
        so_far.requests += len(step.finished)
        so_far.steps += 1
        so_far.tokens += np.bincount(step.kind, minlength=len(Kind))
        so_far.cached_tokens += sum(request.cached for request in step.admitted)
        on_step(step, mapped)
    return so_far


def print_table(result, pool, backend) -> None:
    """What validation found, first examples of what went wrong, then a table whose last row counts the violations."""
    for finding in result.findings:
        print(finding)
    for cache in result.caches:
        print(*cache.ledger.examples[:10], sep="\n", end="\n" * bool(cache.ledger.examples))

    tokens, microseconds = result.tokens.sum(), 1e6 * np.array(result.seconds)
    timed = "host time a step in the mapping" + ", synchronised" * bool(backend.synchronize)
    rows = {
        "backend": backend.name,
        "requests": f"{result.requests:,}",
        "steps": f"{result.steps:,}",
        "tokens mapped": f"{tokens:,}",
        **{f"  {kind.name.lower()}": f"{count:,}" for kind, count in zip(Kind, result.tokens, strict=True)},
        "tokens found in the prefix cache": f"{result.cached_tokens:,}",
        "pages used again": f"{pool.reused:,}",
        "  evicted from the prefix cache": f"{pool.evicted:,}",
        **{f"states written, ratio {cache.ratio}": f"{cache.ledger.states:,}" for cache in result.caches},
        **{f"share of PAD, ratio {cache.ratio}": f"{cache.pads / tokens:.1%}" for cache in result.caches},
        f"{timed}, median": f"{np.median(microseconds):,.0f} µs",
        f"{timed}, mean": f"{np.mean(microseconds):,.0f} µs",
    }
    for name, value in rows.items():
        print(f"{name:<56}{value:>14}")
    print(f"violations: {result.violations}")


class PlainProgress:
    """A line for every tenth of the requests, where tqdm is not installed."""

    def __init__(self, total):
        self.total, self.done = total, 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def update(self, count) -> None:
        before, self.done = self.done, self.done + count
        if 10 * self.done // self.total > 10 * before // self.total:
            print(f"replayed {self.done:,} of {self.total:,} requests", file=sys.stderr)


def progress_bar(total):
    try:
        from tqdm import tqdm
    except ImportError:
        return PlainProgress(total)
    return tqdm(total=total, desc="replaying", unit=" requests")


def at_least(lowest):
    """An argparse type: an integer that is not below `lowest`."""

    def integer(text):
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, was {text}")
        return int(text)

    return integer


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Serve a request trace with a small scheduler, map every step for compressed KV caches of 4 "
        "and of 128 tokens a state, and check every slot. The exit code is 1 if there is a violation.",
    )
    positive, count = at_least(1), at_least(0)
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE.jsonl", help="a trace in the Mooncake format; without it, a synthetic one")
    add("--backend", choices=("numpy", "torch", "cupy"), default="numpy", help="whose arrays are mapped (%(default)s)")
    add("--requests", type=positive, metavar="N", help="requests to replay (the whole file, or 1000 synthetic ones)")
    add(
        "--seed",
        type=count,
        default=0,
        help="seed of the synthetic trace and of what verification rejects (%(default)s)",
    )
    add("--token-budget", type=positive, default=8192, metavar="N", help="most tokens in a step (%(default)s)")
    add("--max-requests", type=positive, default=256, metavar="N", help="most requests running at once (%(default)s)")
    add(
        "--pages",
        type=positive,
        default=16384,
        metavar="N",
        help=f"pages of {PAGE_TOKENS} tokens in the cache (%(default)s)",
    )
    add(
        "--speculative-tokens",
        type=count,
        default=3,
        metavar="K",
        help="draft tokens behind each decoded token (%(default)s)",
    )
    add(
        "--window",
        type=count,
        default=128,
        metavar="W",
        help="cached tokens replayed after a prefix-cache hit (%(default)s)",
    )
    add("--validate", action="store_true", help="look for wrong values before each call; a finding is a violation")
    add("--plot", metavar="FILE", help="draw the step that shows most (needs matplotlib)")
    return parser


def main(argv=None) -> int:
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        if args.plot:
            from step_picture import Exhibit, draw_step
        backend = open_backend(args.backend)
        trace = (
            read_trace(args.trace, args.requests) if args.trace else synthetic_trace(args.requests or 1000, args.seed)
        )
        scheduler = Scheduler(
            trace,
            token_budget=args.token_budget,
            max_requests=args.max_requests,
            num_pages=args.pages,
            page_tokens=PAGE_TOKENS,
            speculative_tokens=args.speculative_tokens,
            window=args.window,
            seed=args.seed,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))

    exhibit = Exhibit() if args.plot else None
    with progress_bar(len(trace)) as bar:

        def on_step(step, mapped):
            bar.update(len(step.finished))
            if exhibit:
                exhibit.offer(step, mapped)

        result = replay(scheduler, backend, on_step, args.validate)
    if exhibit:
        draw_step(exhibit.step, exhibit.mapped, PAGE_TOKENS, args.plot)
    print_table(result, scheduler.pool, backend)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
