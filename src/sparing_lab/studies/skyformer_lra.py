"""The Long Range Arena with every method under one protocol: accuracy, and the time and memory of a step.

All methods have the same examples, start, batches and optimizer. What the paper's code does to some is left out:
self-attention is not computed twice to save memory, no batch is cut in half, Linformer's projection is learned,
Performer's scale is applied once, black pixels are tokens like others, and means are over the tokens that are there.
Reformer has queries apart from keys, BigBird no random blocks; this library has no Informer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparing_lab.figure import PAPER, Figure, legend_below, level, line, log_marks, log_ticks, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies import _arena as arena
from sparing_lab.studies._arena import EXACT, KERNELIZED, LINFORMER, MATRIX, NYSTROM, SIDES, SKYFORMER, TASKS, Setup
from sparing_lab.studies.judges import Criterion, Judge, NotRun, above, each, listed, rises, within
from sparing_lab.studies.rows import Cell, Row, Rows, mean, over, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing, pivot, shown

SMALL = {
    "Text": Setup(128, 16, 3e-3, 100, 0.1, features=16),
    "ListOps": Setup(64, 32, 3e-3, 150, 0.1, features=16),
    "Retrieval": Setup(128, 16, 3e-3, 40, 0.1, features=16),
    "Pathfinder": Setup(256, 16, 3e-3, 40, 0.1, features=32),
    "Image": Setup(64, 32, 3e-3, 200, 0.1, features=16),
}
UNLEARNED = ("Retrieval", "Pathfinder")  #: not learned in so few steps; one seed is enough to show that
SECONDS = {"small": 6.0, "paper": 60.0}  #: for each side of a race, unless two rounds take longer
NEAR = 0.8  #: share of the paper's ratio that counts as reproduced
#: Table 1 of the paper, in percent, and table 2, in hours and GB: side -> task -> value.
ACCURACY, HOURS, MEMORY = (numbers("skyformer", name) for name in ("accuracy", "hours", "memory"))
LENGTHS = tuple(sorted(set(arena.PADDED.values())))  #: lengths of its tasks
NOISE = 2.0  #: least difference of two runs that counts, in points


def _cells(settings: Settings) -> list[Cell]:
    data = arena.data_of(settings, list(TASKS))
    setups = SMALL if settings.small else arena.PAPER_SETUPS
    seeds = {task: 3 if not settings.small else 1 if task in UNLEARNED else 2 for task in TASKS}
    evaluations = 1 if settings.small else 50
    specs = {side: arena.spec_of(side, arena.FEATURES) for side in (MATRIX, *SIDES)}
    return [
        *(arena.training_cell(settings, task, side, setup, seed=seed, data=data[task],
                              eval_steps=setup.steps // evaluations)
          for task, setup in setups.items() for seed in range(settings.seeds or seeds[task]) for side in SIDES),
        *({"what": "cost", "length": length, "batch": 1, "specs": specs, "seconds": SECONDS[settings.scale]}
          for length in LENGTHS),
    ]  # fmt: skip


def _measure(settings: Settings, cell: Cell) -> Row | list[Row]:
    return arena.cost_at(cell) if cell["what"] == "cost" else arena.train_one(cell)


def ratios(table: Mapping[str, Mapping[str, float]], side: str) -> dict[int, float]:
    """Return self-attention's entry / the side's, by length: the mean over the tasks of that length."""
    return {
        length: statistics.fmean(
            table[EXACT][task] / table[side][task] for task in arena.PADDED if arena.PADDED[task] == length
        )
        for length in LENGTHS
    }


def learned_tasks(rows: Rows) -> list[str]:
    """Return the tasks that some model has learned."""
    return [task for task in TASKS if arena.learned(rows, task)]


def points_of(rows: Rows, side: str, task: str) -> float:
    """Return the accuracy in percent, mean over seeds."""
    return 100 * mean(pick(rows, what="train", side=side, task=task), "accuracy")


def mean_points(rows: Rows, side: str) -> float:
    """Return the mean over the tasks that are learned."""
    return statistics.fmean(points_of(rows, side, task) for task in learned_tasks(rows))


def spread_of(rows: Rows, task: str) -> float:
    """Return the standard deviation of a run's accuracy over seeds; 0 where there is one.

    The part that a seed changes for all methods alike is removed, because they share its examples.
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

    The error of a run is that from its held-out examples or the spread over seeds, whichever is larger.
    """
    tasks = learned_tasks(rows)
    total = 0.0
    for task in tasks:
        spread = spread_of(rows, task)
        for side in (one, other):
            mine = pick(rows, what="train", side=side, task=task)
            total += sum((max(arena.error(row["accuracy"], row["held"]), spread) / len(mine)) ** 2 for row in mine)
    return max(200 * math.sqrt(total) / len(tasks), NOISE)


def cost_of(rows: Rows, side: str, length: int) -> Row:
    """Return the row with the cost of a side's step."""
    return the(rows, what="cost", side=side, length=length)


def faster_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float:
    """Return how many times as long a step of the other takes."""
    return float(cost_of(rows, side, length)["gain"][against][0])


def smaller_by(rows: Rows, side: str, length: int, against: str = MATRIX) -> float | None:
    """Return how many times as much memory a step of the other takes; None if unknown."""
    theirs, mine = (cost_of(rows, each, length)["peak"] for each in (against, side))
    return None if theirs is None or mine is None else theirs / max(mine, 1)


def _against(other: str, *sides: str) -> Any:
    """Return a function for the lead of sides over another in the mean over tasks, with its noise."""

    def figures(rows: Rows) -> dict[str, Any]:
        if not (tasks := learned_tasks(rows)):
            raise NotRun("no task was learned")
        means = {side: mean_points(rows, side) for side in SIDES}
        noise = {side: noise_between(rows, side, other) for side in sides}
        leads = {side: (means[side] - means[other], noise[side]) for side in sides}
        return {"leads": leads, "means": means, "noise": max(noise.values()), "tasks": tasks}

    return figures


_OTHERS = [side for side in SIDES if side != SKYFORMER]
_REST = [side for side in SIDES if side != LINFORMER]
_KEEPS = each("not lower by more than the noise", lambda lead: lead[0] >= -lead[1])
_AHEAD = each("higher by more than the noise", lambda lead: lead[0] > lead[1])


def _means(found: dict[str, Any], sides: Sequence[str]) -> str:
    return ", ".join(f"{side} {found['means'][side]:.1f}" for side in sides)


def _keeps(sides: Sequence[str], against: str) -> Judge:
    """Judge whether no side is worse in the mean by more than noise; same shape: at least one is not."""
    return Judge(
        _against(against, *sides), _KEEPS.of("leads"), _KEEPS.once().of("leads"), lambda found: (
            f"{_means(found, [*sides, against])} (noise {found['noise']:.1f}); {', '.join(found['tasks'])}"),
        of=f"mean over the tasks that are learned (noise: two standard errors, at least {NOISE:g} points)",
    )  # fmt: skip


def _first(found: dict[str, Any]) -> str:
    order = sorted(SIDES, key=lambda side: -found["means"][side])
    return _means(found, order[: max(3, order.index(SKYFORMER) + 1)])


def _lowest(found: dict[str, Any]) -> str:
    lowest = min(SIDES, key=found["means"].__getitem__)
    return f"{_means(found, [LINFORMER, EXACT])}; lowest is {lowest} with {found['means'][lowest]:.1f}"


def _learned(rows: Rows) -> dict[str, Any]:
    chances = {task: pick(rows, what="train", task=task, side=EXACT)[0]["chance"] for task in TASKS}
    return {"points": {task: (points_of(rows, EXACT, task), 100 * chance) for task, chance in chances.items()},
            "count": len(learned_tasks(rows))}  # fmt: skip


def _gains(side: str, against: str = MATRIX) -> Any:
    return lambda rows: {length: faster_by(rows, side, length, against) for length in LENGTHS}


def _memory(against: str) -> Any:
    def figures(rows: Rows) -> dict[int, float]:
        found = {length: smaller_by(rows, SKYFORMER, length, against) for length in LENGTHS}
        if None in found.values():
            raise NotRun("this system does not tell a peak of memory")
        return {length: value for length, value in found.items() if value is not None}

    return figures


_LONGEST = LENGTHS[-1]
_FORM = "{value:.1f} at {key}"


def _paper(table: Any, side: str = SKYFORMER) -> str:
    return listed(ratios(table, side), _FORM)


def _enough(paper: dict[int, float]) -> Criterion:
    return Criterion(f"at least {NEAR:g} of the paper's ratio at {', '.join(map(str, paper))} tokens",
                     lambda found: all(found[length] >= NEAR * theirs for length, theirs in paper.items()))  # fmt: skip


def _fast(against: str) -> Judge:
    paper = {_LONGEST: ratios(HOURS, SKYFORMER)[_LONGEST]}
    return Judge(_gains(SKYFORMER, against), _enough(paper), above(1).of(_LONGEST, "at 4096"), _FORM,
                 of=f"time of {against} / Skyformer")  # fmt: skip


def _light(against: str) -> Judge:
    return Judge(_memory(against), _enough(ratios(MEMORY, SKYFORMER)), above(1).of(_LONGEST, "at 4096"), _FORM,
                 of=f"memory of {against} / Skyformer")  # fmt: skip


def _tables(rows: Rows) -> list[Table]:
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
                {"task": "{name}", "data": "{of}", "tokens": "{max_length}", "steps": "{max_steps}",
                 "batch": "{batch_size}", "layers x width": "{num_layers} x {hidden_size}"}),
        pivot("Time of a training step in these runs, ms", "method", SIDES, list(TASKS), lambda side, task: (
            f"{1e3 * mean(pick(rows, what='train', side=side, task=task), over('seconds', 'steps')):.1f}")),
        pivot("A step of the paper's model: self-attention with its matrix / method (paper's ratio)", "method",
              (MATRIX, *SIDES), columns, ratio),
        pivot("A step of the paper's model, one text: time and peak memory", "method", (MATRIX, *SIDES), LENGTHS,
              absolute),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
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
        log_marks(panel, (0.2, 0.5, 1, 2, 5, 10, 20))
    legend_below(figure, [middle, left], 5)


_LINFORMER = each("Linformer", lambda side: side == LINFORMER)
STUDY = Study(
    name="skyformer-lra", title="The Long Range Arena with every method under one protocol: accuracy, time, memory",
    paper="skyformer", where="main paper, tables 1 and 2", cells=_cells, measure=_measure, tables=_tables,
    draw=_draw, timed=True, options=("data", "seeds"),
    claims=(
        Claim("comparable", "table 1", "kernelized attention and Skyformer are as accurate as self-attention or more",
              "means 58.6 and 59.4 against 57.4", judge=_keeps((KERNELIZED, SKYFORMER), EXACT)),
        Claim("better", "table 1", "Skyformer is more accurate than self-attention",
              "+2.0 points in the mean, +2.75 on Text, +1.37 on Retrieval", judge=Judge(
                  _against(EXACT, SKYFORMER), _AHEAD.of("leads"), shows=lambda found: (
                      "{:+.1f} points (noise {:.1f})".format(*found["leads"][SKYFORMER])),
                  of="mean over the tasks that are learned")),
        Claim("first", "table 1", "Skyformer has the highest mean of all",
              "59.39; then BigBird 59.05, Reformer 58.99, Nystromformer 58.93", judge=Judge(
                  _against(SKYFORMER, *_OTHERS), each("ahead of every other by more than the noise", lambda lead: (
                      -lead[0] > lead[1])).of("leads"),
                  each("no other is ahead of it by more than that", lambda lead: lead[0] <= lead[1]).of("leads"),
                  _first)),
        Claim("target", "table 1", "Skyformer is as accurate as the attention that it approximates",
              "59.4 against 58.6", judge=_keeps((SKYFORMER,), KERNELIZED)),
        Claim("others", "table 1", "Nystromformer, Performer, Reformer and BigBird, too, keep up with self-attention",
              "58.9, 58.0, 59.0, 59.1 against 57.4",
              judge=_keeps((NYSTROM, arena.PERFORMER, arena.REFORMER, arena.BIGBIRD), EXACT)),
        Claim("linformer", "table 1", "Linformer is the least accurate of these", "54.7 against 57.4 and more",
              judge=Judge(
                  _against(LINFORMER, *_REST), _AHEAD.of("leads"), Criterion("self-attention is", lambda found: (
                      found["leads"][EXACT][0] > found["leads"][EXACT][1])), _lowest, of="every other")),
        Claim("faster", "table 2", "Skyformer trains nearly 4 times as fast as self-attention at 4096 tokens",
              f"time of self-attention / Skyformer: {_paper(HOURS)}", judge=_fast(MATRIX)),
        Claim("longer", "table 2", "the gain grows with the length", _paper(HOURS), judge=Judge(
            _gains(SKYFORMER), rises("the length") & above(1).of(LENGTHS[0], "at 1024"),
            Criterion("higher at 4096 than at 1024", lambda found: found[_LONGEST] > found[LENGTHS[0]]), _FORM)),
        Claim("memory", "table 2", "Skyformer needs less memory than self-attention", _paper(MEMORY),
              judge=_light(MATRIX)),
        Claim("kernelized", "table 2", "kernelized attention takes about as long as self-attention",
              _paper(HOURS, KERNELIZED), judge=Judge(
                  _gains(KERNELIZED), within(0.8, 1.5), within(0.8, 1.5).once("at one"), _FORM,
                  of="ratio at each length")),
        Claim("least", "table 2", "Linformer takes the least time of all", "on every task", judge=Judge(
            lambda rows: {n: min(pick(rows, what="cost", length=n), key=lambda row: row["seconds"])["side"]
                          for n in LENGTHS},
            _LINFORMER, _LINFORMER.once("at one"), "{value} at {key}", of="fastest at each length")),
        Claim("fused", "not in the paper", "Skyformer is as much faster than fused exact attention", "-",
              judge=_fast(EXACT), ours=True),
        Claim("fused-memory", "not in the paper", "Skyformer needs as much less memory than fused exact attention", "-",
              judge=_light(EXACT), ours=True),
        Claim("learned", "not in the paper", "the models of this run have learned their tasks", "-", judge=Judge(
            _learned, Criterion("on every task", lambda found: found["count"] == len(TASKS)),
            Criterion("on three tasks", lambda found: found["count"] >= 3), lambda found: ", ".join(
                f"{task} {mine:.0f} (chance {chance:.0f})" for task, (mine, chance) in found["points"].items()),
            of="some model is above chance by three standard errors"), ours=True),
    ),
)  # fmt: skip
