"""Where the host time of a call goes: each function of the package that it enters, timed on its own.

A profiler would add its own cost to every function. So one call is watched, the arguments of each function that it
enters are kept, and each function is then called again with them, in a loop, without a profiler.
"""

import sys
from collections import Counter
from contextlib import suppress
from copy import copy
from functools import partial

from measure import cpu_sampler, round_robin

PACKAGE = "cupy_slots"


def watch(call) -> list[tuple[tuple[str, ...], partial]]:
    """The path to each function of the package that `call` enters, and the same call of it again, in order."""
    entered, path = [], []

    def on_event(frame, event, _):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        function = frame.f_globals.get(name) if owner is None else getattr(owner, name, None)
        # Lambdas and comprehensions count as their caller's.
        if frame.f_globals.get("__package__") != PACKAGE or getattr(function, "__code__", None) is not frame.f_code:
            return
        if event == "call":
            path.append(f"{type(owner).__name__}.{name}" if owner else name)
            entered.append((tuple(path), again(function, frame)))
        elif event == "return":
            path.pop()

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def again(function, frame) -> partial:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # Lists and dicts as they are now: the call goes on to change them.
    values = [copy(value) if isinstance(value := frame.f_locals[name], list | dict) else value for name in names]
    bound = int("self" in names)
    keywords = dict(zip(names[code.co_argcount :], values[code.co_argcount :], strict=True))
    return partial(function, *values[bound : code.co_argcount], **keywords)


def call_tree(call, rounds) -> str:
    """A line a function, callees below: microseconds in all its calls, what it calls included."""
    entered, samplers = watch(call), {}
    for i, (_, function) in enumerate(entered):
        with suppress(Exception):  # what cannot be called twice has no line
            samplers[i] = cpu_sampler(function)
    calls, total = Counter(), Counter()
    for i, timing in round_robin(samplers, rounds).items():
        path, _ = entered[i]
        calls[path] += 1
        total[path] += timing.median
    lines = ["| function, callees below | calls | us |", "| --- | --- | --- |"]
    for path, count in calls.items():
        lines.append(f"| {'. ' * (len(path) - 1)}{path[-1]} | {count} | {total[path]:.2f} |")
    return "\n".join(lines)
