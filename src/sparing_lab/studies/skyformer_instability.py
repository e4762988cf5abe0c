"""How much a model's states move for a small step of its weights: the paper's score, read out in four ways."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from sparing.workbench.estimate import Estimate, estimate
from sparing_lab.figure import PAPER, Figure, legend_below, level, log_marks, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies import _arena as arena
from sparing_lab.studies._arena import EXACT, KERNELIZED, NYSTROM, SKYFORMER, TASKS
from sparing_lab.studies._skyformer_instability import AFTER, BEFORE, FIRST, READ, REDRAWN, RELATIVE, scores
from sparing_lab.studies.judges import Criterion, Judge, NotRun, at_most, below, each
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, mean, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot
from sparing_lab.training.config import Config

TABLE = numbers("skyformer", "instability")  #: table 1 of the appendix
GAUSSIAN = (KERNELIZED, SKYFORMER)
NEAR = 0.1  #: largest difference from the paper's mean ratio
ONE = 0.1  #: largest distance from 1 that counts as "around 1"
SPREAD = 0.1  #: standard deviation over seeds, a third of the paper's effect


def _cells(settings: Settings) -> list[Cell]:
    data = arena.data_of(settings, list(TASKS))
    less: dict[str, Any] = {"length": 256, "batch": 8, "features": 32} if settings.small else {}
    found: list[Cell] = []
    for task, seed in product(TASKS, range(settings.seeds or 3)):
        setup = replace(arena.PAPER_SETUPS[task], **less)
        configs = {
            side: asdict(arena.config_of(task, side, setup, seed=seed, data=data[task], eval_steps=setup.steps))
            for side in (EXACT, *TABLE)
        }
        found.append({"task": task, "seed": seed, "first": FIRST, "of": arena.fingerprint(task, data[task]),
                      "configs": configs})  # fmt: skip
    return found


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    return [
        {"side": side, "read": read, "scores": found}
        for side, config in cell["configs"].items()
        for read, found in scores(Config(**config), cell["first"]).items()
    ]


def ratios(rows: Rows, side: str, read: str, task: str) -> list[float]:
    """Return the mean over the steps of score / score of self-attention, for each seed."""
    found = []
    for row in pick(rows, side=side, read=read, task=task):
        base = the(rows, side=EXACT, read=read, task=task, seed=row["seed"])
        found.append(statistics.fmean(a / b for a, b in zip(row["scores"], base["scores"], strict=True)))
    return found


def _tasks(rows: Rows) -> list[str]:
    return [task for task in TASKS if pick(rows, task=task)]


def _means(rows: Rows, side: str, read: str) -> dict[str, float]:
    """Return the mean ratio over seeds, for each task."""
    return {task: statistics.fmean(ratios(rows, side, read, task)) for task in _tasks(rows)}


def _highest(known: Estimate) -> float:
    """Return the upper end of a 95 % interval over seeds, or the mean if there is one seed."""
    return known.mean if known.high is None else known.high


def _read(read: str, *sides: str) -> Callable[[Rows], dict[str, Any]]:
    """Return a function for the means by side and task, upper ends of their intervals, and means over tasks."""

    def figures(rows: Rows) -> dict[str, Any]:
        found = {side: _means(rows, side, read) for side in sides}
        high = [_highest(estimate(ratios(rows, side, read, task))) for side in sides for task in _tasks(rows)]
        average = {side: statistics.fmean(some.values()) for side, some in found.items()}
        every = [value for some in found.values() for value in some.values()]
        return {"means": found, "each": every, "high": high, "average": average}

    return figures


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _shown(found: dict[str, Any]) -> str:
    return "; ".join(f"{side} " + "/".join(map(_number, some.values())) for side, some in found["means"].items())


def _paper(*sides: str) -> str:
    return _shown({"means": {side: TABLE[side] for side in sides}})


def _paper_mean(found: dict[str, Any], side: str) -> float:
    return statistics.fmean(TABLE[side][task] for task in found["means"][side])


def _stable(read: str, of: str) -> Judge:
    """Judge whether both, with their intervals, are below 1 on all tasks; same shape: their means over tasks are."""
    return Judge(_read(read, *GAUSSIAN), below(1).of("high", "with the 95 % interval over seeds, on every task"),
                 below(1).of("average", "in the means over the tasks"), _shown, of=of)  # fmt: skip


def _size(by: float) -> Criterion:
    return Criterion(f"within {by:g} of the paper's", lambda found: all(
        abs(mean - _paper_mean(found, side)) <= by for side, mean in found["average"].items()))  # fmt: skip


def _apart(rows: Rows) -> dict[str, float]:
    """Return the largest difference on a task between Skyformer and kernelized attention, and that of the means."""
    kernel, sky = (_means(rows, side, AFTER) for side in GAUSSIAN)
    apart = abs(statistics.fmean(kernel.values()) - statistics.fmean(sky.values()))
    return {"most": max(abs(kernel[task] - sky[task]) for task in kernel), "mean": apart}


def _order(rows: Rows) -> dict[str, Any]:
    """Return, for each method, the means by task, and by how much Retrieval and Image exceed Text and ListOps."""
    if set(_tasks(rows)) != set(TASKS):
        raise NotRun("needs all five tasks")
    found = {}
    for side in GAUSSIAN:
        runs = [ratios(rows, side, AFTER, task) for task in ("Retrieval", "Image", "Text", "ListOps")]
        apart = estimate([(a + b) / 2 - (c + d) / 2 for a, b, c, d in zip(*runs, strict=True)])
        found[side] = {"means": [statistics.fmean(run) for run in runs], "apart": apart}
    return found


def _ordered(found: dict[str, Any]) -> str:
    return "Retrieval and Image less Text and ListOps: " + "; ".join(
        f"{side} {apart.mean:+.2f}" + ("" if apart.high is None else f" (at most {apart.high:+.2f})")
        for side, apart in ((side, each["apart"]) for side, each in found.items())
    )


def _spreads(rows: Rows) -> dict[str, list[float]]:
    """Return the standard deviations over seeds on all tasks, for each method."""
    if len(distinct(rows, "seed")) < 2:
        raise NotRun("one seed shows no spread")
    return {side: [statistics.stdev(ratios(rows, side, AFTER, task)) for task in _tasks(rows)] for side in TABLE}


def _around(value: float) -> bool:
    return abs(value - 1) <= ONE


_NARROW = each(f"at most {SPREAD:g} on every task", lambda spreads: max(spreads) <= SPREAD)


def _tables(rows: Rows) -> list[Table]:
    tasks, seeds = _tasks(rows), len(distinct(rows, "seed"))
    lines = [(side, read) for side in TABLE for read in ("paper", *READ) if read != REDRAWN or side == SKYFORMER]

    def entry(line: tuple[str, str], task: str) -> str:
        side, read = line
        return f"{TABLE[side][task]:.2f}" if read == "paper" else _number(_means(rows, side, read)[task])

    def spread(side: str, task: str) -> str:
        found = ratios(rows, side, AFTER, task)
        return f"{_number(min(found))} to {_number(max(found))}"

    title = f"Instability score / that of self-attention, mean of {len(rows[0]['scores'])} steps and {seeds} seeds"
    return [
        pivot(title, ["method", "read-out"], lines, tasks, entry,
              lambda of: [of[0] if of[1] == "paper" else "", of[1]]),
        pivot(f"The same {AFTER}, lowest and highest of {seeds} seeds", "method", TABLE, tasks, spread),
        pivot("Instability score of self-attention, mean", "read-out", (AFTER, BEFORE), tasks, lambda read, task: (
            f"{mean(pick(rows, side=EXACT, read=read, task=task), lambda row: statistics.fmean(row['scores'])):.3g}")),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    axes = panels(figure, 1, 3, size=(4.6, 3.9))
    tasks = _tasks(rows)
    for panel, read in zip(axes, (AFTER, BEFORE, RELATIVE), strict=True):
        for number, (side, paper) in enumerate(TABLE.items()):
            where = [place + 0.22 * (number - 1) for place in range(len(tasks))]
            runs = [ratios(rows, side, read, task) for task in tasks]
            means = [statistics.fmean(values) for values in runs]
            spread = [[m - min(v) for m, v in zip(means, runs, strict=True)],
                      [max(v) - m for m, v in zip(means, runs, strict=True)]]  # fmt: skip
            panel.errorbar(where, means, yerr=spread, linestyle="none", capsize=2, label=side, **style(number))
            if read == AFTER:
                label = "paper" if number == 0 else None
                panel.plot(where, [paper[task] for task in tasks], **PAPER, label=label)
        level(panel, 1)
        panel.set_xticks(range(len(tasks)), tasks, rotation=20)
        panel.set(title=f"Read out {read}", ylabel="score / that of self-attention", yscale="log")
        log_marks(panel, (0.2, 0.5, 1, 2, 5, 10, 100, 1000, 10000))
    legend_below(figure, axes[:1], 4, title="bars: lowest to highest seed")


_WHERE = "appendix F, Table 1"
STUDY = Study(
    name="skyformer-instability",
    title="How much states move for a small step of the weights, and what that depends on",
    paper="skyformer", where=_WHERE, cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim("stable", _WHERE,
              "kernelized attention and Skyformer have lower scores than self-attention on every task",
              _paper(*GAUSSIAN), judge=_stable(AFTER, "score / that of self-attention, after the last LayerNorm")),
        Claim("size", _WHERE, "they are about a quarter lower", "means over the tasks: 0.72 and 0.74", judge=Judge(
            _read(AFTER, *GAUSSIAN), _size(NEAR), _size(2 * NEAR), lambda found: "mean over tasks: " + "; ".join(
                f"{side} {mean:.2f} (paper {_paper_mean(found, side):.2f})" for side, mean in found["average"].items()),
            of="both means over the tasks")),
        Claim("nystrom", _WHERE,
              "the score of Nystromformer, which approximates self-attention, fluctuates around 1", _paper(NYSTROM),
              judge=Judge(
                  _read(AFTER, NYSTROM), each(f"within {ONE:g} of 1 on every task", _around).of("each"),
                  each("in the mean", _around).of("average"), _shown)),
        Claim("alike", _WHERE, "Skyformer's scores are those of what it approximates", "differences 0.00 to 0.05",
              judge=Judge(_apart, at_most(ONE).of("most", "on every task"), at_most(ONE).of("mean", "in the mean"),
                          "largest difference {most:.2f}, of means {mean:.2f}".format_map,
                          of="difference from kernelized attention's")),
        Claim("order", _WHERE, "the gain is larger on Retrieval and Image than on Text and ListOps",
              "0.62 to 0.65 against 0.77 to 0.83", judge=Judge(
                  _order, each("both of the first below both of the others, for both methods",
                               lambda found: max(found["means"][:2]) < min(found["means"][2:])),
                  each("their mean is, with the 95 % interval over seeds", lambda found: _highest(found["apart"]) < 0),
                  _ordered)),
        Claim("seeds", "not in the paper", "one run per task, as the paper's table has, tells the methods apart",
              "no spread is stated", judge=Judge(
                  _spreads, Criterion("at most 0.1 on every task for kernelized attention and Skyformer",
                                      lambda found: _NARROW.holds([found[side] for side in GAUSSIAN])),
                  _NARROW.once("for one of the three methods"),
                  lambda found: "; ".join(f"{side} {min(x):.2f} to {max(x):.2f}" for side, x in found.items()),
                  of="standard deviation over seeds"), ours=True),
        Claim("before", "not in the paper", "the same holds before the last LayerNorm",
              "the paper does not say which states it read out",
              judge=_stable(BEFORE, "score / that of self-attention, before the last LayerNorm"), ours=True),
        Claim("relative", "not in the paper", "the same holds for relative changes before the last LayerNorm", "-",
              judge=_stable(RELATIVE, "the score before the last LayerNorm divided by the squared size of the states / "
                            "that of self-attention"), ours=True),
        Claim("redrawn", "not in the paper", "Skyformer's score is low, too, where each evaluation draws its landmarks",
              "the public code draws new ones at each call, also in evaluation", judge=Judge(
                  _read(REDRAWN, SKYFORMER), below(1).of("each", "on every task"),
                  below(1).of("average", "in the mean"), _shown), ours=True),
    ),
)  # fmt: skip
