"""Validation loss against training time: does Skyformer reach a loss earlier?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparing_lab.figure import Figure, legend_below, line, panels
from sparing_lab.studies import _arena as arena
from sparing_lab.studies._arena import EXACT, KERNELIZED, NYSTROM, SKYFORMER, TASKS, Setup
from sparing_lab.studies.judges import Criterion, Judge, NotRun, each
from sparing_lab.studies.rows import Cell, Row, Rows, mean, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing

SIDES = (EXACT, KERNELIZED, SKYFORMER, NYSTROM)
RIVALS = (EXACT, KERNELIZED)
#: Long enough that Skyformer can be faster, and short enough that kernelized attention finishes. ListOps of this
#: length is not learned in so few steps.
SMALL = {
    "Text": Setup(512, 8, 3e-3, 60, 0.1, features=32),
    "Image": Setup(256, 16, 3e-3, 120, 0.1, features=32),
}
POINTS = {"small": 5, "paper": 50}  #: points of a curve
RISEN = 1.05  #: times the lowest loss counts as over-fitting
AS_LOW = 1.02  #: times the level counts as reached


def _cells(settings: Settings) -> list[Cell]:
    setups = SMALL if settings.small else arena.PAPER_SETUPS
    data = arena.data_of(settings, list(setups))
    return [
        arena.training_cell(settings, task, side, setup, seed=seed, data=data[task],
                            eval_steps=setup.steps // POINTS[settings.scale])
        for task, setup in setups.items() for seed in range(settings.seeds or 1) for side in SIDES
    ]  # fmt: skip


def _losses(row: Row) -> list[float]:
    return [float(point["valid_loss"]) for point in row["curve"]]


def reached(rows: Rows, side: str, task: str, what: str) -> float:
    """Return the seconds, or steps, until the loss that all but Nystromformer reach; mean over seeds."""

    def until(row: Row) -> float:
        others = [other for other in pick(rows, task=task, seed=row["seed"]) if other["side"] != NYSTROM]
        level = AS_LOW * max(min(_losses(other)) for other in others)
        return next(float(point[what]) for point in row["curve"] if point["valid_loss"] <= level)

    return mean(pick(rows, side=side, task=task), until)


def _by_task(rows: Rows, of: Callable[[str, str], float]) -> dict[str, dict[str, float]]:
    """Return a figure by task and side, Skyformer first."""
    tasks = [task for task in TASKS if pick(rows, task=task)]
    return {task: {side: of(side, task) for side in (SKYFORMER, *RIVALS)} for task in tasks}


def _less(share: float) -> Callable[[Any], bool]:
    """Return a test of whether Skyformer is below a rival in at least a share of the comparisons."""

    def holds(found: dict[str, dict[str, float]]) -> bool:
        less = [times[SKYFORMER] < times[rival] for times in found.values() for rival in RIVALS]
        return sum(less) >= share * len(less)

    return holds


def _earlier(figures: Callable[[Rows], dict[str, dict[str, float]]], of: str) -> Judge:
    """Judge whether Skyformer takes less time than both rivals."""
    return Judge(
        figures, Criterion("less than both on every task", _less(1)),
        Criterion("in at least half of the comparisons", _less(0.5)), lambda found: "; ".join(
            f"{task} " + " / ".join(f"{value:.3g}" for value in times.values()) for task, times in found.items())
        + " s (Skyformer / self-attention / kernelized)", of=of,
    )  # fmt: skip


def _rose(row: Row) -> bool:
    """Return whether the loss is well above its minimum at all later evaluations, of which there are at least two."""
    losses = _losses(row)
    later = losses[losses.index(min(losses)) + 1 :]
    return len(later) >= 2 and all(loss >= RISEN * min(losses) for loss in later)


_ROSE = each(f"after its lowest the loss is at least {RISEN:g} times that at all later evaluations, of which there are "
             "two or more", _rose)  # fmt: skip
_SOONER = each("at the same evaluation or earlier", lambda steps: steps[SKYFORMER] <= steps[EXACT])


def _pathfinder(rows: Rows) -> dict[str, float]:
    """Return the accuracy on Pathfinder in percent, for each side."""
    mine = pick(rows, task="Pathfinder")
    if not mine or not arena.learned(rows, "Pathfinder"):
        raise NotRun("no model learns Pathfinder at this scale")
    return {side: mean(pick(mine, side=side), lambda row: 100 * row["accuracy"]) for side in SIDES}


def _tables(rows: Rows) -> list[Table]:
    tasks = [task for task in TASKS if pick(rows, task=task)]
    body = []
    for task, side in ((task, side) for task in tasks for side in SIDES):
        mine = pick(rows, task=task, side=side)
        until = {what: "-" if side == NYSTROM else f"{reached(rows, side, task, what):.3g}"
                 for what in ("step", "seconds")}  # fmt: skip
        low, last = mean(mine, lambda row: min(_losses(row))), mean(mine, lambda row: _losses(row)[-1])
        body.append({"task": task, "side": side, "seconds": mean(mine, "seconds"), "until": until, "low": low,
                     "last": last, "points": mean(mine, lambda row: 100 * row["accuracy"])})  # fmt: skip
    runs = [
        {**row, **row["config"], "percent": 100 * row["chance"], "known": "yes" if arena.learned(rows, task) else "no",
         "of": "files of --data" if row["config"]["data"] else "installed or generated", "task": task}
        for task in tasks for row in pick(rows, task=task, side=SIDES[-1])[:1]
    ]  # fmt: skip
    return [
        listing("Time of training, without evaluations, and validation loss", body,
                {"task": "{task}", "method": "{side}", "seconds": "{seconds:.1f}", "steps to level": "{until[step]}",
                 "s to level": "{until[seconds]}", "lowest loss": "{low:.3f}", "last": "{last:.3f}",
                 "accuracy": "{points:.1f}"}),
        listing("Runs", runs,
                {"task": "{task}", "data": "{of}", "tokens": "{max_length}", "steps": "{max_steps}",
                 "batch": "{batch_size}", "held out": "{held}", "chance, %": "{percent:.1f}", "learned": "{known}"}),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    tasks = [task for task in TASKS if pick(rows, task=task)]
    axes = panels(figure, 1, len(tasks), size=(4.4, 3.9))
    for task, panel in zip(tasks, axes, strict=True):
        for number, side in enumerate(SIDES):
            black: dict[str, Any] = {"color": "black"} if side == EXACT else {}
            for row in pick(rows, task=task, side=side):
                losses = {point["seconds"]: point["valid_loss"] for point in row["curve"]}
                line(panel, losses, side if row["seed"] == 0 else None, number, **black)
        title = f"{task}, {pick(rows, task=task)[0]['config']['max_length']} tokens"
        panel.set(xlabel="training time, seconds", ylabel="validation loss", title=title, xlim=(0, None))
    legend_below(figure, axes[:1], len(SIDES))


STUDY = Study(
    name="skyformer-convergence", title="Validation loss against training time", paper="skyformer",
    where="appendix A, Figure 1", cells=_cells, measure=lambda settings, cell: arena.train_one(cell), tables=_tables,
    draw=_draw, timed=True,
    options=("data", "seeds"),
    claims=(
        Claim("finishes", "appendix A",
              "Skyformer finishes its steps earlier than self-attention and kernelized attention on all tasks",
              "50,000 steps; times only as curves", judge=_earlier(
                  lambda rows: _by_task(rows, lambda side, task: mean(pick(rows, side=side, task=task), "seconds")),
                  "time of all steps")),
        Claim("converges", "appendix A", "Skyformer converges faster than both on all tasks", "curves only",
              judge=_earlier(
                  lambda rows: _by_task(rows, lambda side, task: reached(rows, side, task, "seconds")),
                  "time to the validation loss that all three reach (the highest of their lowest, and 2 % more)")),
        Claim("overfits", "appendix A", "on Text all models over-fit, and the validation loss rises", "curves only",
              judge=Judge(
                  lambda rows: pick(rows, task="Text"), _ROSE, _ROSE.once(), lambda found: "last / lowest loss: "
                  + ", ".join(f"{row['side']} {_losses(row)[-1] / min(_losses(row)):.2f}" for row in found),
                  of="every method", needs="needs Text")),
        Claim("pathfinder", "appendix A", "on Pathfinder self-attention does not get to where the others do",
              "in the run shown", judge=Judge(
                  _pathfinder, Criterion("accuracy of self-attention more than 2 points below both", lambda found: (
                      found[EXACT] < min(found[KERNELIZED], found[SKYFORMER]) - 2)), shows="{key} {value:.1f} %")),
        Claim("steps", "not in the paper", "Skyformer needs no more steps than self-attention, either", "-",
              judge=Judge(
                  lambda rows: _by_task(rows, lambda side, task: reached(rows, side, task, "step")), _SOONER,
                  _SOONER.in_share(0.5, "on half"), lambda found: "; ".join(
                      f"{task} {steps[SKYFORMER]:g} / {steps[EXACT]:g}" for task, steps in found.items()),
                  of="when the level of 'converges' is reached, on every task"), ours=True),
    ),
)  # fmt: skip
