"""How time is taken: candidates in turn, round after round, so that a drift of the machine meets all of them alike."""

import gc
import os
from collections.abc import Callable
from contextlib import contextmanager
from itertools import repeat
from statistics import quantiles
from time import perf_counter
from typing import NamedTuple

ROUNDS = 15
CALLS_WITHOUT_SYNCHRONISATION = 300
CALLS_PER_GRAPH = 20
SAMPLE_SECONDS = 2e-3

# Has to be set before torch is imported: its idle threads would spin through the turns of the other candidates.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class Timing(NamedTuple):
    """The middle of the rounds: half of them lie between `low` and `high`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples) -> "Timing":
        low, median, high = quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def round_robin(samplers: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time the candidates: each sampler takes one sample and returns it."""
    for sample in samplers.values():
        sample()
    samples = {name: [] for name in samplers}
    with no_garbage_collection():
        for _ in range(rounds):
            for name, sample in samplers.items():
                samples[name].append(sample())
    return {name: Timing.of(taken) for name, taken in samples.items()}


@contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def host_sampler(call, synchronize=lambda: None, calls=CALLS_WITHOUT_SYNCHRONISATION) -> Callable[[], float]:
    """Microseconds that a call keeps the host, for calls one after the other without a synchronisation between."""

    def sample():
        synchronize()
        start = perf_counter()
        for _ in repeat(None, calls):
            call()
        return (perf_counter() - start) / calls * 1e6

    return sample


def cpu_sampler(call) -> Callable[[], float]:
    """The same for work on the CPU, with as many calls as fill a sample."""
    call()
    seconds = host_sampler(call, calls=1)() / 1e6
    return host_sampler(call, calls=max(1, round(SAMPLE_SECONDS / seconds)))


class GraphReplay:
    """Microseconds of GPU time a call, inside a CUDA graph of `CALLS_PER_GRAPH` that is replayed back to back.

    The call must have run before: nothing may be compiled or loaded during the capture.
    """

    def __init__(self, call) -> None:
        import torch

        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.Stream()):
            for _ in range(CALLS_PER_GRAPH):
                call()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.replay(1)
        self._replays = max(1, round(SAMPLE_SECONDS * 1e6 / (self.replay(1) * CALLS_PER_GRAPH)))

    def replay(self, replays: int) -> float:
        self._begin.record()
        for _ in range(replays):
            self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3 / (replays * CALLS_PER_GRAPH)

    def __call__(self) -> float:
        return self.replay(self._replays)
