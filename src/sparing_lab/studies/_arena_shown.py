"""What the Long Range Arena's runs say: means, noise, costs, tables and the figure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from sparing_lab.report.figure import PAPER, legend_below, panels, style
from sparing_lab.studies._arena import (
    EXACT,
    KERNELIZED,
    LINFORMER,
    MATRIX,
    NYSTROM,
    SIDES,
    SKYFORMER,
    TASKS,
    error,
    learned,
)
from sparing_lab.studies._arena_tables import ACCURACY, HOURS, LENGTHS, MEMORY, ratios
from sparing_lab.studies.rows import Row, Rows, pick
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = 2.0  #: points that two runs can differ by, at the least


def learned_tasks(rows: Rows) -> list[str]:
    return [task for task in TASKS if learned(rows, task)]


def points_of(rows: Rows, side: str, task: str) -> float:
    """Accuracy in percent, mean over seeds."""
    return 100 * statistics.fmean(row["accuracy"] for row in pick(rows, what="train", side=side, task=task))


def mean_points(rows: Rows, side: str) -> float:
    """Over the tasks that are learned."""
    return statistics.fmean(points_of(rows, side, task) for task in learned_tasks(rows))


def spread_of(rows: Rows, task: str) -> float:
    """Standard deviation of a run's accuracy over seeds; 0 where there is one.

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
    """Points that the means of two methods may differ by for no reason: two standard errors, and not below `NOISE`.

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


def paper_mean(side: str) -> float:
    return statistics.fmean(ACCURACY[side])


def cost_of(rows: Rows, side: str, length: int) -> Row:
    (row,) = pick(rows, what="cost", side=side, length=length)
    return row


def faster_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float:
    """How many times as long a step of the other takes."""
    return float(cost_of(rows, side, length)["gain"][against][0])


def smaller_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float | None:
    """How many times as much memory a step of the other takes; None where nobody can tell."""
    theirs, mine = (cost_of(rows, each, length)["peak"] for each in (against, side))
    return None if theirs is None or mine is None else theirs / max(mine, 1)


def tables(rows: Rows) -> list[Table]:
    known = learned_tasks(rows)
    body = []
    for side in SIDES:
        mean = f"{mean_points(rows, side):.1f}" if known else "-"
        body.append([side, *(f"{points_of(rows, side, task):.1f} ({paper:.1f})"
                             for task, paper in zip(TASKS, ACCURACY[side], strict=True)),
                     f"{mean} ({paper_mean(side):.1f})"])  # fmt: skip
    chance = [100 * pick(rows, what="train", task=task)[0]["chance"] for task in TASKS]
    held = [pick(rows, what="train", task=task)[0]["held"] for task in TASKS]
    body.append(["chance", *(f"{value:.1f}" for value in chance), ""])
    seeds = [len(pick(rows, what="train", task=task, side=EXACT)) for task in TASKS]
    body.append(["seeds", *map(str, seeds), ""])
    spreads = [f"{100 * spread_of(rows, task):.1f}" if n > 1 else "-" for task, n in zip(TASKS, seeds, strict=True)]
    body.append(["deviation over seeds", *spreads, ""])
    body.append(["held-out examples", *map(str, held), ""])
    body.append(["learned", *("yes" if task in known else "no" for task in TASKS), ""])
    setting = []
    for task in TASKS:
        row = pick(rows, what="train", task=task)[0]
        config = row["config"]
        data = "files of --data" if config["data"] else "installed or generated"
        setting.append([task, data, str(config["length"]), str(config["steps"]),
                        str(config["batch"]), f"{config['layers']} x {config['width']}"])  # fmt: skip
    steps = [[side, *(f"{1e3 * _step(rows, side, task):.1f}" for task in TASKS)] for side in SIDES]
    costs = []
    for side in (MATRIX, *SIDES):
        paper = (ratios(HOURS, side), ratios(MEMORY, side)) if side in HOURS else ({}, {})
        line = [side]
        for length in LENGTHS:
            small = smaller_by(rows, side, length)
            beside = f" ({paper[0][length]:.1f})" if paper[0] and side != EXACT else ""
            line.append(f"{faster_by(rows, side, length):.2f}{beside}")
            beside = f" ({paper[1][length]:.1f})" if paper[1] and side != EXACT else ""
            line.append(("-" if small is None else f"{small:.1f}") + beside)
        costs.append(line)
    columns = [f"{what} {length}" for length in LENGTHS for what in ("time", "mem")]
    absolute = [
        [side, *(f"{1e3 * cost_of(rows, side, n)['seconds']:.0f} ms, {_mebibytes(cost_of(rows, side, n)['peak'])}"
                 for n in LENGTHS)]
        for side in (MATRIX, *SIDES)
    ]  # fmt: skip
    return [
        Table("Accuracy, % (paper's, longer inputs and 50,000 steps); mean of what is learned",
              ["method", *TASKS, "mean"], body),
        Table("Models and data", ["task", "data", "tokens", "steps", "batch", "layers x width"], setting),
        Table("Time of a training step in these runs, ms", ["method", *TASKS], steps),
        Table("A step of the paper's model: self-attention with its matrix / method (paper's ratio)",
              ["method", *columns], costs),
        Table("A step of the paper's model, one text: time and peak memory", ["method", *map(str, LENGTHS)], absolute),
    ]  # fmt: skip


def _step(rows: Rows, side: str, task: str) -> float:
    """Seconds."""
    mine = pick(rows, what="train", side=side, task=task)
    return statistics.fmean(row["seconds"] / row["steps"] for row in mine)


def _mebibytes(found: int | None) -> str:
    return "-" if found is None else f"{found / 2**20:.0f} MiB"


def draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(5.0, 4.4))
    tasks = list(TASKS)
    for number, side in enumerate(SIDES):
        where = [place + 0.09 * (number - 3.5) for place in range(len(tasks))]
        look = {**style(number), **({"color": "black"} if side == EXACT else {})}
        left.plot(where, [points_of(rows, side, task) for task in tasks], linestyle="none", **look)
        left.plot(where, ACCURACY[side], **{**PAPER, "markersize": 4, "color": look["color"]})
        for panel, value, table in ((middle, faster_by, HOURS), (right, smaller_by, MEMORY)):
            found = {n: x for n in LENGTHS if (x := value(rows, side, n)) is not None}
            panel.plot(list(found), list(found.values()), label=side if side != EXACT else f"{side} (fused)", **look)
            if side in (SKYFORMER, NYSTROM, LINFORMER, KERNELIZED):
                paper = ratios(table, side)
                panel.plot(list(paper), list(paper.values()), **{**PAPER, "color": look["color"]})
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
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="length, tokens")
        panel.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        panel.minorticks_off()
        low, high = panel.get_ylim()
        ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    legend_below(figure, [middle, left], 5)
