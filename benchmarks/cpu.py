"""Time of the NumPy path, beside a fill of its output and formulas that work on every token.

    python benchmarks/cpu.py --json cpu.json --plot cpu.png

Every candidate's result is compared with the NumPy formula's before it is timed.
"""

import sys
from functools import partial

import numpy as np
from batches import LONG, STEP_TOKENS, Batch
from call_tree import call_tree
from measure import cpu_sampler, round_robin
from peers import cpu_peers, numpy_formula, torch
from report import THIS, Goal, Report, Row, machine, options

from cupy_slots import get_compressed_slot_mapping

POISON = -7
STEP_BATCHES = [Batch(64, 1), Batch(1024, 1), Batch(8, 1024), Batch(1, 8192)]
LONG_BATCHES = [LONG, Batch(1024, 1024)]
FILLS = {128: 1.5, 4: 10}  # goals for a million tokens, by ratio
FASTER = 5  # goal for 8,192 tokens, against the faster formula


def row(batch: Batch, rounds: int) -> Row:
    arguments = batch.arguments()
    out = np.empty(batch.out_len, np.int64)
    samplers = {}
    for name, function in ({THIS: get_compressed_slot_mapping} | cpu_peers()).items():
        own = [torch.from_numpy(a) if isinstance(a, np.ndarray) and name.startswith("torch") else a for a in arguments]
        call = partial(function, *own, out=torch.from_numpy(out) if name.startswith("torch") else out)
        out.fill(POISON)
        call()
        answer = np.full_like(out, POISON)
        numpy_formula(*arguments, out=answer)
        np.testing.assert_array_equal(out, answer, err_msg=f"{batch}, {name}")
        samplers[name] = cpu_sampler(call)
    samplers["fill"] = cpu_sampler(partial(out.fill, -1))
    times = round_robin(samplers, rounds)
    fill = times.pop("fill")
    this = times[THIS].median
    if batch.num_tokens <= STEP_TOKENS:
        fastest = min((timing.median, name) for name, timing in times.items() if name != THIS)
        goals = [Goal(fastest[0] / this, f"x faster than the {fastest[1]}", FASTER, at_least=True)]
    else:
        goals = [Goal(this / fill.median, "x fill", FILLS[batch.compress_ratio])]
    case = f"{batch.name}, ratio {batch.compress_ratio}, out {batch.out_len:,}"
    return Row("CPU, us", case, times, {"fill": fill}, goals if batch.num_tokens >= STEP_TOKENS else [])


def main() -> int:
    arguments = options(__doc__)
    report = Report(machine("numpy", *(["torch"] if torch else []), "cupy_slots"))
    if torch:
        report.machine["torch"] = f"{torch.get_num_threads()} threads"
    for shape in (*STEP_BATCHES, *LONG_BATCHES):
        for ratio in FILLS:
            with report.part(shape.name):
                report.rows.append(row(shape._replace(compress_ratio=ratio), arguments.rounds))
    if arguments.profile:
        with report.part("--profile"):
            for batch in (STEP_BATCHES[0], LONG):
                call = partial(get_compressed_slot_mapping, *batch.arguments(), out=np.empty(batch.out_len, np.int64))
                print(f"Time of a call, {batch.name}:\n\n{call_tree(call, arguments.rounds)}\n")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
