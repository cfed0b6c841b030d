"""Time on a GPU: the host's share of a call, and the GPU's inside a replayed CUDA graph, beside floors and peers.

    python benchmarks/gpu.py --json gpu.json --plot gpu.png

Every candidate's result is compared with the NumPy path before it is timed, and again from its graph. All candidates
of a row read the same arrays, which stay in the L2 cache where they fit, as an engine's do: it has just written them.
"""

import sys
from functools import partial
from itertools import cycle
from operator import itemgetter

import cupy
import numpy as np
import torch
from batches import HUGE, LONG, MANY, MOST, STEPS, Batch
from call_tree import call_tree
from floors import BareLaunch, NullDriver, empty_kernel, fills, stand_in
from measure import GraphReplay, host_sampler, round_robin
from peers import gpu_peers
from report import THIS, Goal, Report, Row, machine, nvidia_driver, options
from startup import import_times

from cupy_slots import (
    CacheGroup,
    get_compressed_slot_mapping,
    get_compressed_slot_mappings,
    plan_compressed_slot_mappings,
)

POISON = -7
ON_THE_HOST, IN_A_GRAPH, IMPORT = "host, us", "GPU in a graph, us", "import, ms"

HOST_BATCH = Batch(64, 1)  # small, so that the GPU is always ahead of the host
GROUP_BATCH = Batch(256, 1)
GROUP_RATIOS = (4, 4, 128)
AN_EARLIER_SKETCH = {LONG: 6.75, MANY: 15.3, MOST: 4.68}  # microseconds on an H200

# What the goal allows for a result beside the launch: with a longer `out` it is a slice, without one it is new.
OUTS = {"out as long as the batch": None, "longer out": "slice", "out=None": "empty"}


def to_gpu(arguments) -> list:
    return [torch.from_numpy(a).cuda() if isinstance(a, np.ndarray) else a for a in arguments]


def right_answer(batch: Batch, out_len: int) -> torch.Tensor:
    out = np.full(out_len, POISON)
    get_compressed_slot_mapping(*batch.arguments(), out=out)
    return torch.from_numpy(out).cuda()


class Bench:
    """The report, and how candidates are checked before they get into it."""

    def __init__(self, rounds: int) -> None:
        gpu = f"{torch.cuda.get_device_name()}, driver {nvidia_driver()}, CUDA {torch.version.cuda} in torch"
        self.report = Report({"GPU": gpu} | machine("cupy", "torch", "triton", "vllm", "numpy", "cupy_slots"))
        self.rounds = rounds
        self.peers = gpu_peers()
        self.implementations = {THIS: get_compressed_slot_mapping} | self.peers

    def right(self, what: str, call, outs, answers) -> bool:
        """Whether `call` fills all `outs` with the answers. If not, the report says so."""
        with self.report.part(what):
            for out in outs:
                out.fill_(POISON)
            call()
            for out, answer in zip(outs, answers, strict=True):
                wrong = (out != answer).nonzero()[:, 0]
                if len(wrong):
                    first = int(wrong[0])
                    found = f"{int(out[first])} instead of {int(answer[first])}"
                    raise AssertionError(f"{len(wrong)} wrong tokens, the first is token {first}: {found}")
            return True
        return False

    def graph_samplers(self, case: str, calls: dict, outs, answers) -> dict:
        """A sampler for each candidate that is right, called and from its graph."""
        samplers = {}
        for name, call in calls.items():
            with self.report.part(f"{case}, {name}, graph"):
                if self.right(f"{case}, {name}", call, outs, answers):
                    replay = GraphReplay(call)
                    if self.right(f"{case}, {name}, replayed", partial(replay.replay, 1), outs, answers):
                        samplers[name] = replay
        return samplers

    def add(self, measured: str, case: str, times: dict, floors: dict, *goals: Goal) -> None:
        shown = {name: times[name] for name in self.implementations if name in times}
        self.report.rows.append(Row(measured, case, shown, floors, list(goals)))

    def graph_row(self, batch: Batch) -> None:
        """One batch inside a graph, beside a fill of its `out` and, for the largest, a copy of it."""
        arguments, answer = to_gpu(batch.arguments()), right_answer(batch, batch.out_len)
        out, filled = torch.empty_like(answer), torch.full_like(answer, -1)
        calls = {name: partial(function, *arguments, out=out) for name, function in self.implementations.items()}
        samplers = self.graph_samplers(batch.name, calls, [out], [answer])
        samplers |= self.graph_samplers(batch.name, fills(out), [out], [filled])
        if batch is HUGE:
            samplers |= self.graph_samplers(batch.name, {"copy": partial(out.copy_, filled)}, [out], [filled])

        times = round_robin(samplers, self.rounds)
        this, floors = times[THIS].median, {"fill": min(times["fill kernel"], times["torch fill_"])}
        if batch is HUGE:
            floors["copy"] = times["copy"]
            goal = Goal(this / times["copy"].median, "x copy", 1.0, 1.3)
        elif batch in AN_EARLIER_SKETCH:
            goal = Goal(this, "us", AN_EARLIER_SKETCH[batch])
        else:
            goal = Goal(this / floors["fill"].median, "x fill", 2.0, 2.6)
        self.add(IN_A_GRAPH, f"{batch.name}, out {batch.out_len:,}", times, floors, goal)

    def empty_kernel_row(self) -> None:
        empty = empty_kernel()
        empty()
        self.add(IN_A_GRAPH, "floor", {}, round_robin({"empty kernel": GraphReplay(empty)}, self.rounds))

    def host_rows(self) -> None:
        """Each kind of `out`, with torch tensors and with CuPy arrays, beside what the goals are made of."""
        num_tokens = HOST_BATCH.num_tokens
        answer = right_answer(HOST_BATCH, HOST_BATCH.out_len)
        tensors = to_gpu(HOST_BATCH.arguments())
        arrays = [cupy.asarray(a) if isinstance(a, torch.Tensor) else a for a in tensors]
        longer, exact = torch.empty_like(answer), torch.empty_like(answer[:num_tokens])
        outs = dict(zip(OUTS, (exact, longer, None), strict=True))
        calls = {}  # by library of the arrays, kind of `out`, implementation
        for kind, out in outs.items():
            for name, function in self.implementations.items():
                calls["torch", kind, name] = partial(function, *tensors, out=out)
            same_out = None if out is None else cupy.asarray(out)
            calls["CuPy", kind, THIS] = partial(get_compressed_slot_mapping, *arrays, out=same_out)
        calls = {key: call for key, call in calls.items() if self.right_on_host(key, call, outs[key[1]], answer)}

        make_plan = partial(plan_compressed_slot_mappings, *tensors[:4], [CacheGroup(*tensors[4:], out=exact)])
        bare = BareLaunch(make_plan)
        first_tokens = itemgetter(slice(None, num_tokens))
        floors = {
            "bare launch": bare.launch,
            "kept plan": make_plan().run,
            "empty RawKernel": empty_kernel(),
            "torch fill_": partial(exact.fill_, -1),
            "torch slice": partial(first_tokens, longer),
            "torch empty": partial(torch.empty, num_tokens, dtype=torch.int64, device=longer.device),
            "CuPy slice": partial(first_tokens, cupy.asarray(longer)),
            "CuPy empty": partial(cupy.empty, num_tokens, np.int64),
        }
        turns = cycle([[a.clone() if isinstance(a, torch.Tensor) else a for a in tensors] for _ in range(4)])
        others = {"other memory": lambda: get_compressed_slot_mapping(*next(turns), out=exact)}
        timed = floors | calls | others
        samplers = {key: host_sampler(call, torch.cuda.synchronize) for key, call in timed.items()}
        times = round_robin(samplers, self.rounds)
        if not self.right("bare launch", bare.launch, [exact], [answer[:num_tokens]]):
            return

        for library in ("torch", "CuPy"):
            for kind, allowed in OUTS.items():
                row = {key[2]: times[key] for key in calls if key[:2] == (library, kind)}
                shown = {name: times[name] for name in ("bare launch", f"{library} {allowed}") if name in times}
                launch, *result = (timing.median for timing in shown.values())
                ratio = (row[THIS].median - sum(result)) / launch
                beside = f" beside the {allowed}" if allowed else ""
                self.add(ON_THE_HOST, f"{library}, {kind}", row, shown, Goal(ratio, f"x launch{beside}", 2.0, 3.0))
        launch = times["bare launch"]
        for name, case in {
            "other memory": "inputs in other memory each time",
            "kept plan": "a kept plan's run",
        }.items():
            goal = Goal(times[name].median / launch.median, "x launch", 2.0, 3.0)
            self.add(ON_THE_HOST, f"torch, {case}", {THIS: times[name]}, {"bare launch": launch}, goal)
        self.add(ON_THE_HOST, "floor", {}, {name: times[name] for name in ("empty RawKernel", "torch fill_")})

    def right_on_host(self, key: tuple, call, out, answer) -> bool:
        what = f"host, {', '.join(key)}"
        if out is not None:
            return self.right(what, call, [out], [answer[: len(out)]])
        copied = torch.empty_like(answer[: HOST_BATCH.num_tokens])
        return self.right(what, lambda: copied.copy_(torch.as_tensor(call())), [copied], [answer[: len(copied)]])

    def group_rows(self) -> None:
        """A step of a model with three compressed caches: all at once, one alone, and peers called for each."""
        batches = [GROUP_BATCH._replace(compress_ratio=ratio) for ratio in GROUP_RATIOS]
        answers = [right_answer(batch, batch.out_len) for batch in batches]
        outs = [torch.empty_like(answer) for answer in answers]
        arguments = [to_gpu(batch.arguments()) for batch in batches]
        # The batches differ in their caches alone.
        groups = [CacheGroup(*own[4:], out=out) for own, out in zip(arguments, outs, strict=True)]

        def for_each_group(function):
            for own, out in zip(arguments, outs, strict=True):
                function(*own, out=out)

        calls = {name: partial(for_each_group, function) for name, function in self.peers.items()}
        calls[THIS] = partial(get_compressed_slot_mappings, *arguments[0][:4], groups)
        one = {"one group": partial(get_compressed_slot_mapping, *arguments[0], out=outs[0])}
        graphs = self.graph_samplers("three groups", calls, outs, answers)
        graphs |= self.graph_samplers("one group", one, outs[:1], answers[:1])
        hosts = {name: host_sampler((calls | one)[name], torch.cuda.synchronize) for name in graphs}

        for measured, samplers, below_triton in ((ON_THE_HOST, hosts, 15), (IN_A_GRAPH, graphs, 4)):
            times = round_robin(samplers, self.rounds)
            this = times[THIS].median
            goals = [Goal(this / times["one group"].median, "x one group", 1.3)]
            if "Triton" in times:
                goals.append(Goal(times["Triton"].median / this, "x faster than Triton", below_triton, at_least=True))
            case = f"three groups of {GROUP_BATCH.name}, out {GROUP_BATCH.out_len:,}"
            self.add(measured, case, times, {"one group": times["one group"]}, *goals)

    def import_rows(self) -> None:
        times = import_times()
        before = {name: times.pop(name) for name in ("import cupy", "CUDA context")}
        self.add(IMPORT, "floor", {}, before)
        for case, timing in times.items():
            goals = [Goal(timing.median, "ms", 50)] if case == "warm" else []
            self.add(IMPORT, f"kernel cache {case}", {THIS: timing}, {}, *goals)

    def profile(self) -> None:
        """The host's time for one call by function, without the driver's."""
        arguments = to_gpu(HOST_BATCH.arguments())
        out = torch.empty(HOST_BATCH.num_tokens, dtype=torch.int64, device="cuda")
        call = partial(get_compressed_slot_mapping, *arguments, out=out)
        call()
        with stand_in(NullDriver(cupy.cuda.driver)):
            for _ in range(2):
                call()  # so that the watched one is recalled
            print(f"Host time of a call whose launch does nothing:\n\n{call_tree(call, self.rounds)}\n")
        tensors = [a for a in [*arguments, out] if isinstance(a, torch.Tensor)]
        reads = {
            "data_ptr()": lambda: [tensor.data_ptr() for tensor in tensors],
            "shape": lambda: [tensor.shape for tensor in tensors],
            "stride()": lambda: [tensor.stride() for tensor in tensors],
            "dtype": lambda: [tensor.dtype for tensor in tensors],
            "is_cuda": lambda: [tensor.is_cuda for tensor in tensors],
            "get_device()": lambda: [tensor.get_device() for tensor in tensors],
        }
        times = round_robin({name: host_sampler(read) for name, read in reads.items()}, self.rounds)
        listed = ", ".join(f"{name} {timing.median:.2f}" for name, timing in times.items())
        print(f"Reads of {len(tensors)} tensors, us: {listed}\n")


def main() -> int:
    arguments = options(__doc__)
    if not torch.cuda.is_available():
        sys.exit("gpu.py needs a GPU that torch can use; cpu.py runs everywhere")
    bench = Bench(arguments.rounds)
    parts = {"host time": bench.host_rows, "empty kernel": bench.empty_kernel_row}
    parts |= {batch.name: partial(bench.graph_row, batch) for batch in (*STEPS, LONG, MANY, MOST, HUGE)}
    parts |= {"three groups": bench.group_rows, "import": bench.import_rows}
    if arguments.profile:
        parts["--profile"] = bench.profile
    for name, measure in parts.items():
        with bench.report.part(name):
            measure()
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return bench.report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
