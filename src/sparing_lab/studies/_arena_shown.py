"""What the Long Range Arena's runs say: means, noise, costs, tables and the figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from sparing_lab.figure import PAPER, Figure, legend_below, level, line, log_ticks, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._arena import (
    EXACT,
    KERNELIZED,
    LINFORMER,
    MATRIX,
    NYSTROM,
    PADDED,
    SIDES,
    SKYFORMER,
    TASKS,
    error,
    learned,
)
from sparing_lab.studies.rows import Row, Rows, mean, over, pick, the
from sparing_lab.studies.tables import Table, listing, pivot, shown

#: Table 1 of the paper, in percent, and table 2, in hours and GB: side -> task -> value.
ACCURACY, HOURS, MEMORY = (numbers("skyformer", name) for name in ("accuracy", "hours", "memory"))
LENGTHS = tuple(sorted(set(PADDED.values())))  #: of its tasks
NOISE = 2.0  #: points that two runs can differ by, at the least


def ratios(table: Mapping[str, Mapping[str, float]], side: str) -> dict[int, float]:
    """Return self-attention's entry / the side's, by length: the mean over the tasks of that length."""
    return {
        length: statistics.fmean(table[EXACT][task] / table[side][task] for task in PADDED if PADDED[task] == length)
        for length in LENGTHS
    }


def learned_tasks(rows: Rows) -> list[str]:
    """Return the tasks that some model has learned."""
    return [task for task in TASKS if learned(rows, task)]


def points_of(rows: Rows, side: str, task: str) -> float:
    """Return the accuracy in percent, mean over seeds."""
    return 100 * mean(pick(rows, what="train", side=side, task=task), "accuracy")


def mean_points(rows: Rows, side: str) -> float:
    """Return the mean over the tasks that are learned."""
    return statistics.fmean(points_of(rows, side, task) for task in learned_tasks(rows))


def spread_of(rows: Rows, task: str) -> float:
    """Return the standard deviation of a run's accuracy over seeds; 0 where there is one.

    What a seed does to all methods alike is taken out: its examples are theirs, too.
    """
    runs = [[row["accuracy"] for row in pick(rows, what="train", task=task, side=side)] for side in SIDES]
    seeds = len(runs[0])
    if seeds < 2:
        return 0.0
    alike = [statistics.fmean(run[seed] for run in runs) for seed in range(seeds)]
    total = 0.0
    for run in runs:
        own = [value - mean for value, mean in zip(run, alike, strict=True)]
        total += sum((value - statistics.fmean(own)) ** 2 for value in own)
    return math.sqrt(total / ((seeds - 1) * (len(runs) - 1)))


def noise_between(rows: Rows, one: str, other: str) -> float:
    """Return two standard errors of the difference of two methods' means, in points, and not less than `NOISE`.

    The error of a run is what its held-out examples allow, or what seeds differ by, whichever is more.
    """
    tasks = learned_tasks(rows)
    total = 0.0
    for task in tasks:
        spread = spread_of(rows, task)
        for side in (one, other):
            mine = pick(rows, what="train", side=side, task=task)
            total += sum((max(error(row["accuracy"], row["held"]), spread) / len(mine)) ** 2 for row in mine)
    return max(200 * math.sqrt(total) / len(tasks), NOISE)


def cost_of(rows: Rows, side: str, length: int) -> Row:
    """Return the row about a side's step."""
    return the(rows, what="cost", side=side, length=length)


def faster_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float:
    """Return how many times as long a step of the other takes."""
    return float(cost_of(rows, side, length)["gain"][against][0])


def smaller_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float | None:
    """Return how many times as much memory a step of the other takes; None where it is not known."""
    theirs, mine = (cost_of(rows, each, length)["peak"] for each in (against, side))
    return None if theirs is None or mine is None else theirs / max(mine, 1)


def tables(rows: Rows) -> list[Table]:
    """Return accuracies, settings, times and memory."""
    known = learned_tasks(rows)
    first = {task: pick(rows, what="train", task=task)[0] for task in TASKS}
    seeds = {task: len(pick(rows, what="train", task=task, side=EXACT)) for task in TASKS}
    body = [
        [side, *(f"{points_of(rows, side, task):.1f} ({ACCURACY[side][task]:.1f})" for task in TASKS),
         f"{shown(mean_points(rows, side) if known else None, '.1f', '-')} "
         f"({statistics.fmean(ACCURACY[side].values()):.1f})"]
        for side in SIDES
    ]  # fmt: skip
    body += [
        ["chance", *(f"{100 * row['chance']:.1f}" for row in first.values()), ""],
        ["seeds", *map(str, seeds.values()), ""],
        ["deviation over seeds", *(f"{100 * spread_of(rows, task):.1f}" if n > 1 else "-" for task, n in seeds.items()),
         ""],
        ["held-out examples", *(str(row["held"]) for row in first.values()), ""],
        ["learned", *("yes" if task in known else "no" for task in TASKS), ""],
    ]  # fmt: skip
    settings = [
        {**row["config"], "name": task, "of": "files of --data" if row["config"]["data"] else "installed or generated"}
        for task, row in first.items()
    ]

    def ratio(side: str, column: tuple[str, int]) -> str:
        what, length = column
        paper = {"time": HOURS, "mem": MEMORY}[what]
        beside = f" ({ratios(paper, side)[length]:.1f})" if side in paper and side != EXACT else ""
        if what == "time":
            return f"{faster_by(rows, side, length):.2f}{beside}"
        return shown(smaller_by(rows, side, length), ".1f", "-") + beside

    def absolute(side: str, length: int) -> str:
        cost = cost_of(rows, side, length)
        peak = "-" if cost["peak"] is None else f"{cost['peak'] / 2**20:.0f} MiB"
        return f"{1e3 * cost['seconds']:.0f} ms, {peak}"

    columns = {f"{what} {length}": (what, length) for length in LENGTHS for what in ("time", "mem")}
    return [
        Table("Accuracy, % (paper's, longer inputs and 50,000 steps); mean of what is learned",
              ["method", *TASKS, "mean"], body),
        listing("Models and data", settings,
                {"task": "{name}", "data": "{of}", "tokens": "{length}", "steps": "{steps}", "batch": "{batch}",
                 "layers x width": "{layers} x {width}"}),
        pivot("Time of a training step in these runs, ms", "method", SIDES, list(TASKS), lambda side, task: (
            f"{1e3 * mean(pick(rows, what='train', side=side, task=task), over('seconds', 'steps')):.1f}")),
        pivot("A step of the paper's model: self-attention with its matrix / method (paper's ratio)", "method",
              (MATRIX, *SIDES), columns, ratio),
        pivot("A step of the paper's model, one text: time and peak memory", "method", (MATRIX, *SIDES), LENGTHS,
              absolute),
    ]  # fmt: skip


def draw(rows: Rows, figure: Figure) -> None:
    """Draw accuracies, times and memory beside the paper's."""
    left, middle, right = panels(figure, 1, 3, size=(5.0, 4.4))
    tasks = list(TASKS)
    for number, side in enumerate(SIDES):
        where = [place + 0.09 * (number - 3.5) for place in range(len(tasks))]
        look = {**style(number), **({"color": "black"} if side == EXACT else {})}
        left.plot(where, [points_of(rows, side, task) for task in tasks], linestyle="none", **look)
        left.plot(where, list(ACCURACY[side].values()), **{**PAPER, "markersize": 4, "color": look["color"]})
        for panel, value, table in ((middle, faster_by, HOURS), (right, smaller_by, MEMORY)):
            found = {n: x for n in LENGTHS if (x := value(rows, side, n)) is not None}
            line(panel, found, side if side != EXACT else f"{side} (fused)", **look)
            if side in (SKYFORMER, NYSTROM, LINFORMER, KERNELIZED):
                line(panel, ratios(table, side), **{**PAPER, "color": look["color"]})
    for place, task in enumerate(tasks):
        chance = 100 * pick(rows, what="train", task=task)[0]["chance"]
        left.plot([place - 0.4, place + 0.4], [chance, chance], color="black", linestyle=":",
                  label="chance" if place == 0 else None)  # fmt: skip
    left.plot([], [], **PAPER, label="paper (longer inputs; by colour)")
    left.set_xticks(range(len(tasks)), tasks)
    left.set(ylabel="accuracy, %", title="Accuracy (table 1)", ylim=(0, 100))
    middle.set(ylabel="time: self-attention (matrix) / method", title="Time of a training step (table 2)")
    right.set(ylabel="memory: self-attention (matrix) / method", title="Peak memory of a step (table 2)")
    for panel in (middle, right):
        level(panel, 1)
        panel.set(yscale="log", xlabel="length, tokens")
        log_ticks(panel, LENGTHS)
        low, high = panel.get_ylim()
        ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    legend_below(figure, [middle, left], 5)
