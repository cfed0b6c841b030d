"""A picture of one step: its tokens, which of them close a state, and the pages and slots these go to."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from serving import PAD, Kind, Request

COLORS = {
    Kind.PREFILL: "#2a78b8",
    Kind.DECODE: "#e08a1e",
    Kind.REPLAYED: "#9bc4de",
    Kind.REJECTED: "#c8504b",
    Kind.PADDED: "#d5d5d5",
}
OLD, EMPTY, INK = "#b4b4b4", "#f6f6f6", "#333333"
TOKEN_ROW, PAGE_ROWS = 0.0, (-4.0, 3.1)  # heights of the rows' middles; the pages of the smaller ratio come below
HALF_TOKEN, HALF_PAGE = 0.45, 0.4


class Run(NamedTuple):
    """Neighbouring tokens of one request, or padded ones, drawn side by side."""

    request: Request | None
    tokens: range
    position: int  # of the first token
    left: float
    pitch: float  # from one token to the next

    def middle(self, column) -> float:
        return self.left + self.pitch * (column + 0.5)


def excerpt(step, decodes=8, replayed=24, written=132, padded=12) -> list[Run]:
    """The part of a step that fits a picture: a few decodes, a prefill behind its replay, and the padding."""
    shares, starts = step.scheduled, step.query_start_loc[: step.num_requests + 1].tolist()
    decoding = step.kind[starts[:-1]] == Kind.DECODE
    prefills = sorted(np.flatnonzero(~decoding), key=lambda row: (shares[row].replayed > 0, shares[row].written))

    pieces = []
    for row in [*np.flatnonzero(decoding)[-decodes:], *prefills[-1:]]:
        request, position, *parts = shares[row]
        skipped = max(parts[0] - replayed, 0)
        shown = min(sum(parts) - skipped, replayed + written)
        pieces.append((request, range(starts[row] + skipped, starts[row] + skipped + shown), position + skipped))
    pieces.append((None, range(starts[-1], min(starts[-1] + padded, step.num_tokens)), 0))

    runs, left = [], 0.0
    for request, tokens, position in pieces:
        pitch = 2.0 if request and step.kind[tokens[0]] == Kind.DECODE else 1.0
        runs.append(Run(request, tokens, position, left, pitch))
        left += max(len(tokens) * pitch + 2, 10)
    return runs


class Exhibit:
    """Keeps the step whose excerpt shows most: all kinds of token, all ratios, many writes, in few tokens."""

    def __init__(self):
        self.score, self.step, self.mapped = (-1, 0.0), None, {}

    def offer(self, step, mapped) -> None:
        shown = np.concatenate([run.tokens for run in excerpt(step)]).astype(int)
        written = [np.count_nonzero(slots[shown] != PAD) for slots in mapped.values()]
        score = (len(np.unique(step.kind[shown])) + np.count_nonzero(written), sum(written) - step.num_tokens / 200)
        if score > self.score:
            # The next step overwrites the buffers.
            self.score = score
            self.step = replace(step, kind=step.kind.copy(), query_start_loc=step.query_start_loc.copy())
            self.mapped = {ratio: slots[: step.num_tokens].copy() for ratio, slots in mapped.items()}


class Page(NamedTuple):
    """A page that shown tokens lie on."""

    id: int
    request: Request
    positions: range  # of the tokens that it holds
    left: float
    width: float

    def middle(self, slot, states) -> float:
        """The x of a slot, in a cache with so many states a page."""
        return self.left + self.width * (slot % states + 0.5) / states


def shown_pages(runs, page_tokens, width) -> list[Page]:
    """The pages of the runs' tokens, in their order, wider where more tokens are shown."""
    places: dict[int, tuple[Request, range, int]] = {}
    for request, tokens, position, *_ in runs[:-1]:
        for first in range(position - position % page_tokens, position + len(tokens), page_tokens):
            positions = range(first, first + page_tokens)
            shown = min(positions.stop, position + len(tokens)) - max(first, position)
            places[int(request.pages[first // page_tokens])] = request, positions, shown
    weights = [1 + shown / 60 for *_, shown in places.values()]
    rights = np.cumsum(weights) * width / sum(weights)
    lefts = [0.0, *rights[:-1]]
    return [
        Page(page, request, positions, left, right - left - 1)
        for (page, (request, positions, _)), left, right in zip(places.items(), lefts, rights, strict=True)
    ]


def draw_step(step, mapped, page_tokens, path) -> None:
    """Draw `step` and its mappings, an array for each ratio, into the file `path`."""
    runs = excerpt(step)
    width = runs[-1].left + len(runs[-1].tokens)
    pages = shown_pages(runs, page_tokens, width)
    figure = Figure(figsize=(16, 8.2), dpi=150)
    axes = figure.add_axes((0.02, 0.07, 0.96, 0.91))
    axes.set(xlim=(-1, width + 1), ylim=(-5.3, 6.8))
    axes.axis("off")

    draw_overview(axes, step, runs, width)
    draw_tokens(axes, step, runs)
    for row, ratio in zip(PAGE_ROWS, sorted(mapped), strict=True):
        draw_pages(axes, step, mapped[ratio], ratio, pages, row)
        draw_links(axes, step, mapped[ratio], ratio, runs, pages, row)
    draw_legend(figure)
    figure.savefig(path)


def draw_overview(axes, step, runs, width) -> None:
    """The whole batch as one strip, with the excerpt underlined."""
    scale = width / step.num_tokens
    edges = np.flatnonzero(np.diff(step.kind, prepend=-1, append=-1))
    colors = [COLORS[kind] for kind in step.kind[edges[:-1]]]
    axes.bar(edges[:-1] * scale, 0.45, np.diff(edges) * scale, 5.2, align="edge", color=colors)
    for run in runs:
        axes.plot([run.tokens.start * scale, run.tokens.stop * scale], [5.08, 5.08], color=INK, lw=2.5)
    counts = np.bincount(step.kind, minlength=len(Kind))
    label(axes, 0, 6.55, f"Step {step.number:,}: {step.num_requests} requests, {step.num_tokens:,} tokens", 16, "left")
    counted = ", ".join(f"{counts[kind]:,} {kind.name.lower()}" for kind in Kind if counts[kind])
    label(axes, 0, 5.97, f"{counted}. Underlined: the tokens shown below.", 10.5, "left")


def draw_tokens(axes, step, runs) -> None:
    """The excerpt, a cell a token, with the requests' numbers."""
    above = TOKEN_ROW + HALF_TOKEN + 0.3
    for run in runs:
        kind = step.kind[run.tokens.start : run.tokens.stop]
        x = run.left + run.pitch * np.arange(len(kind))
        colors = [COLORS[k] for k in kind]
        axes.bar(x, 2 * HALF_TOKEN, 0.86 * run.pitch, TOKEN_ROW - HALF_TOKEN, align="edge", color=colors)
        if run.request is None:
            continue
        if run.pitch > 1:
            label(axes, run.middle((len(kind) - 1) / 2), above, f"#{run.request.number}", 8)
            continue
        share = next(share for share in step.scheduled if share.request is run.request)
        old, new = np.count_nonzero(kind == Kind.REPLAYED), np.count_nonzero(kind == Kind.PREFILL)
        number = f"#{run.request.number}"
        if old:
            label(axes, run.left, above + 0.55, f"{number}: last {old} of {share.replayed} replayed", 8, "left")
        label(axes, run.middle(old + 2), above, f"{number}: first {new} of {share.written:,} new", 8, "left")


def draw_pages(axes, step, mapped, ratio, pages, row) -> None:
    """A cache's pages, slot by slot: written in this step, in an earlier one, or not yet."""
    outward = np.sign(row - TOKEN_ROW)
    writer = {slot: token for token, slot in enumerate(mapped.tolist()) if slot != PAD}
    begin = {share.request: share.start + share.replayed for share in step.scheduled}
    for page in pages:
        closing = page.positions[ratio - 1 :: ratio]
        states = len(closing)
        slots = range(page.id * states, (page.id + 1) * states)
        colors = [
            COLORS[step.kind[writer[slot]]] if slot in writer else OLD if position < begin[page.request] else EMPTY
            for slot, position in zip(slots, closing, strict=True)
        ]
        x, y, edge = [page.middle(slot, states) for slot in slots], row - HALF_PAGE, min(1, 10 / states)
        axes.bar(x, 2 * HALF_PAGE, page.width / states, y, color=colors, ec="white", lw=edge)
        axes.add_patch(Rectangle((page.left, y), page.width, 2 * HALF_PAGE, fc="none", ec=INK, lw=0.8))
        label(axes, page.left + page.width / 2, row + outward * (HALF_PAGE + 0.28), f"page {page.id}", 8.5)
    title = f"ratio {ratio}: a state for {ratio} tokens, {states} slots a page"
    label(axes, 0, row + outward * (HALF_PAGE + 0.85), title, 11, "left")


def draw_links(axes, step, mapped, ratio, runs, pages, row) -> None:
    """From every token that closes a state to its slot; a cross where the token must not write."""
    outward = np.sign(row - TOKEN_ROW)
    start, end = TOKEN_ROW + outward * HALF_TOKEN, row - outward * HALF_PAGE
    states = len(pages[0].positions) // ratio
    by_id = {page.id: page for page in pages}
    for run in runs[:-1]:
        for column in range(ratio - 1 - run.position % ratio, len(run.tokens), ratio):
            x, slot, kind = run.middle(column), int(mapped[run.tokens[column]]), step.kind[run.tokens[column]]
            if slot == PAD:
                axes.plot([x, x], [start, start + outward * 0.3], color=INK, lw=1)
                axes.plot(x, start + outward * 0.3, "x", color=INK, ms=5)
            elif page := by_id.get(slot // states):  # a wrong slot may lie on no page that is shown
                to, between = page.middle(slot, states), (start + end) / 2
                curve = Path([(x, start), (x, between), (to, between), (to, end)], [Path.MOVETO] + 3 * [Path.CURVE4])
                axes.add_patch(PathPatch(curve, fc="none", ec=COLORS[kind], lw=1))


def draw_legend(figure) -> None:
    handles = [Patch(color=COLORS[kind], label=kind.name.lower()) for kind in Kind]
    handles += [
        Line2D([], [], color=INK, lw=1, label="closes a state: its slot"),
        Line2D([], [], color=INK, marker="x", lw=0, label="would close a state, must not write"),
        Patch(color=OLD, label="state of an earlier step"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9.5)


def label(axes, x, y, words, size, align="center") -> None:
    axes.text(x, y, words, fontsize=size, ha=align, va="center", color=INK)
