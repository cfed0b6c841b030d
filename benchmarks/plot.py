"""The picture of a report: bars for this library and its peers, a line where the floor is.

python benchmarks/plot.py gpu.json gpu.png
"""

import json
import sys
from pathlib import Path

THIS = "this library"
COLORS = {
    THIS: "#2a78b8",
    "Triton": "#e08a1e",
    "vLLM": "#c8504b",
    "torch formula": "#9a9a9a",
    "NumPy formula": "#b9cfe0",
}


def draw(report: dict, file: str) -> None:
    """One panel for each thing measured that has peers, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {}
    for row in report["rows"]:
        if len(row["times"]) > 1:
            panels.setdefault(row["measured"], []).append(row)
    heights = [len(rows) for rows in panels.values()]
    figure, axes = plt.subplots(
        len(panels), figsize=(10, 1.5 + 0.62 * sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (measured, rows) in zip(axes[:, 0], panels.items(), strict=True):
        draw_panel(axis, measured, rows)
    figure.suptitle("\n".join(f"{name}: {value}" for name, value in report["machine"].items()), fontsize=8)
    figure.savefig(file, dpi=150)


def draw_panel(axis, measured: str, rows: list[dict]) -> None:
    names = [name for name in COLORS if any(name in row["times"] for row in rows)]
    thickness = 0.8 / len(names)
    for nth, name in enumerate(names):
        places = [i for i, row in enumerate(rows) if name in row["times"]]
        times = [rows[i]["times"][name]["median"] for i in places]
        bars = axis.barh(
            [i + (nth - (len(names) - 1) / 2) * thickness for i in places],
            times,
            thickness,
            color=COLORS[name],
            label=name,
        )
        axis.bar_label(
            bars, [f"{time:,.3g}" if time < 1000 else f"{time:,.0f}" for time in times], padding=2, fontsize=7
        )
    floors = [next(iter(row["floors"].items())) for row in rows]
    for i, (_, floor) in enumerate(floors):
        axis.plot([floor["median"]] * 2, [i - 0.45, i + 0.45], color="black", linewidth=1.5)
    axis.plot([], [], color="black", linewidth=1.5, label=" or ".join(dict.fromkeys(name for name, _ in floors)))
    axis.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.set_title(measured, loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    source, target = sys.argv[1:]
    draw(json.loads(Path(source).read_text()), target)
