"""What a benchmark says: one table, goals reached or missed, the machine, and the same as JSON or a picture."""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from measure import ROUNDS, Timing

THIS = "this library"


class Goal(NamedTuple):
    ratio: float
    to: str  # what it is a ratio to
    bound: float
    least: float | None = None  # the bound that still counts
    at_least: bool = False

    @property
    def verdict(self) -> str:
        def holds(bound):
            return self.ratio >= bound if self.at_least else self.ratio <= bound

        if holds(self.bound):
            return "reached"
        return "counts" if self.least is not None and holds(self.least) else "missed"

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        least = "" if self.least is None else f" ({self.least:g})"
        return f"{self.verdict}: {self.ratio:.2f} {self.to}, goal {sign} {self.bound:g}{least}"


@dataclass
class Row:
    measured: str  # with its unit
    case: str
    times: dict[str, Timing]  # this library and its peers
    floors: dict[str, Timing] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)

    def cells(self, names) -> list[str]:
        this = self.times.get(THIS)
        floors = ", ".join(f"{name} {number(timing.median)}" for name, timing in self.floors.items())
        cells = [self.measured, self.case, number(this.median) if this else "", floors]
        for name in names:
            timing = self.times.get(name)
            ratio = f" ({timing.median / this.median:.1f} x)" if timing and this else ""
            cells.append(number(timing.median) + ratio if timing else "")
        return [*cells, "; ".join(map(str, self.goals))]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


class Report:
    """Rows as they come in. A part that fails is told about at the end, and the others go on."""

    def __init__(self, machine: dict[str, str]) -> None:
        self.machine = machine
        self.rows: list[Row] = []
        self.failures: list[str] = []

    @contextmanager
    def part(self, name: str):
        try:
            yield
        except Exception:
            self.failures.append(f"{name}\n{traceback.format_exc()}")

    def peers(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.times if name != THIS))

    def table(self) -> str:
        """The rows in Markdown, padded so that it reads in a terminal too."""
        header = ["measured", "case", THIS, "floor", *(f"{name} (x {THIS})" for name in self.peers()), "goal"]
        lines = [header, *(row.cells(self.peers()) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )

    def spread(self) -> str:
        """How far the middle half of the rounds lies apart, at the worst and usually."""
        widths = sorted(
            ((t.high - t.low) / t.median, f"{row.measured}, {row.case}")
            for row in self.rows
            if (t := row.times.get(THIS))
        )
        if not widths:
            return "No row was measured."
        (usual, _), (worst, where) = widths[len(widths) // 2], widths[-1]
        return f"Middle half of the rounds: {usual:.0%} of the median wide in a usual row, {worst:.0%} in {where}."

    def as_json(self) -> dict:
        def timings(times):
            return {name: timing._asdict() for name, timing in times.items()}

        return {
            "machine": self.machine,
            "rows": [
                {
                    "measured": row.measured,
                    "case": row.case,
                    "times": timings(row.times),
                    "floors": timings(row.floors),
                    "goals": [goal._asdict() | {"verdict": goal.verdict} for goal in row.goals],
                }
                for row in self.rows
            ],
            "failures": self.failures,
        }

    def finish(self, options) -> int:
        """Print everything and write what was asked for. Returns the exit code."""
        if options.json:
            with self.part("--json"):
                Path(options.json).write_text(json.dumps(self.as_json(), indent=1))
        if options.plot:
            with self.part("--plot"):
                from plot import draw

                draw(self.as_json(), options.plot)
        print(*(f"{name}: {value}" for name, value in self.machine.items()), sep="\n", end="\n\n")
        print(self.table(), end="\n\n")
        print(f"Medians of {options.rounds} rounds, the candidates in turn. {self.spread()}")
        for failure in self.failures:
            print(f"\nFAILED: {failure}")
        return 1 if self.failures else 0


def options(description: str):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the numbers, with quartiles")
    parser.add_argument("--plot", metavar="FILE", help="draw the picture (needs matplotlib)")
    parser.add_argument("--profile", action="store_true", help="show where the host time of a call goes, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each candidate (default %(default)s)")
    return parser.parse_args()


def machine(*modules: str) -> dict[str, str]:
    """What the numbers depend on."""
    cpu = platform.processor()
    with_models = Path("/proc/cpuinfo")
    if with_models.exists():
        models = [line for line in with_models.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    versions = [f"Python {platform.python_version()}"]
    for name in modules:
        try:
            versions.append(f"{name} {importlib.import_module(name).__version__}")
        except Exception as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return {"CPU": f"{cpu}, {os.cpu_count()} cores", "versions": ", ".join(versions)}


def nvidia_driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as reason:
        return f"unknown ({reason})"
