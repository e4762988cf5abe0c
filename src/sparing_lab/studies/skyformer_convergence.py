"""Validation loss against training time: does Skyformer get there earlier?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparing_lab.report.figure import legend_below, panels, style
from sparing_lab.studies._arena import (  # fmt: skip
    EXACT,
    KERNELIZED,
    NYSTROM,
    PAPER_SETUPS,
    SKYFORMER,
    TASKS,
    Setup,
    data_of,
    learned,
    train_one,
    training_cell,
)
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = (EXACT, KERNELIZED, SKYFORMER, NYSTROM)
RIVALS = (EXACT, KERNELIZED)
#: Long enough that Skyformer can be faster, and short enough that kernelized attention ends. ListOps of such a length
#: is not learned in so few steps.
SMALL = {
    "Text": Setup(512, 8, 3e-3, 60, 0.1, features=32),
    "Image": Setup(256, 16, 3e-3, 120, 0.1, features=32),
}
NARROW = {"width": 32, "hidden": 64, "dropout": 0.0}  #: of models at small scale
POINTS = {"small": 5, "paper": 50}  #: of a curve
RISEN = 1.05  #: times the lowest loss is over-fitting
AS_LOW = 1.02  #: times the level counts as reached


def _cells(settings: Settings) -> list[Cell]:
    setups = SMALL if settings.small else PAPER_SETUPS
    data = data_of(settings, list(setups))
    narrow = NARROW if settings.small else {}
    return [
        training_cell(task, side, setup, seed=seed, data=data[task],
                      evaluate=setup.steps // POINTS[settings.scale], **narrow)
        for task, setup in setups.items()
        for seed in range(settings.seeds or 1)
        for side in SIDES
    ]  # fmt: skip


def _measure(settings: Settings, cell: Cell) -> Row:
    return train_one(cell)


def _tasks(rows: Rows) -> list[str]:
    return [task for task in TASKS if pick(rows, task=task)]


def _seconds(rows: Rows, side: str, task: str) -> float:
    """Of all steps, mean over seeds."""
    return statistics.fmean(row["seconds"] for row in pick(rows, side=side, task=task))


def _lowest(row: Row) -> float:
    return min(float(point["valid_loss"]) for point in row["curve"])


def _level(rows: Rows, task: str, seed: int) -> float:
    """The loss that self-attention, kernelized attention and Skyformer all reach."""
    return AS_LOW * max(_lowest(row) for row in pick(rows, task=task, seed=seed) if row["side"] != NYSTROM)


def reached(rows: Rows, side: str, task: str, what: str) -> float:
    """Seconds, or steps, until the level; mean over seeds."""
    found = []
    for row in pick(rows, side=side, task=task):
        level = _level(rows, task, row["seed"])
        found.append(next(float(point[what]) for point in row["curve"] if point["valid_loss"] <= level))
    return statistics.fmean(found)


def _earlier(value: Callable[[Rows, str, str], float], unit: str) -> Callable[[Rows], Judgement]:
    """Skyformer's is lower than both rivals' on every task; same shape: in at least half of the comparisons."""

    def judge(rows: Rows) -> Judgement:
        tasks = _tasks(rows)
        less = [value(rows, SKYFORMER, task) < value(rows, rival, task) for task in tasks for rival in RIVALS]
        ours = "; ".join(
            f"{task} " + " / ".join(f"{value(rows, side, task):.3g}" for side in (SKYFORMER, *RIVALS)) for task in tasks
        )
        return judged(all(less), 2 * sum(less) >= len(less), ours=f"{ours} {unit}")

    return judge


def _until(what: str) -> Callable[[Rows, str, str], float]:
    return lambda rows, side, task: reached(rows, side, task, what)


def _step(rows: Rows) -> Judgement:
    tasks = _tasks(rows)
    value = _until("step")
    kept = [value(rows, SKYFORMER, task) <= value(rows, EXACT, task) for task in tasks]
    shown = "; ".join(f"{t} {value(rows, SKYFORMER, t):g} / {value(rows, EXACT, t):g}" for t in tasks)
    return judged(all(kept), 2 * sum(kept) >= len(kept), ours=shown)


def _rises(rows: Rows) -> Judgement:
    mine = pick(rows, task="Text")
    if not mine:
        return not_run("needs Text")
    risen = [_rose(row) for row in mine]
    ratios = (f"{row['side']} {_last(row) / _lowest(row):.2f}" for row in mine)
    return judged(all(risen), any(risen), ours="last / lowest loss: " + ", ".join(ratios))


def _rose(row: Row) -> bool:
    """Whether the loss is well above its lowest at all later evaluations, of which there are some."""
    losses = [float(point["valid_loss"]) for point in row["curve"]]
    later = losses[losses.index(min(losses)) + 1 :]
    return len(later) >= 2 and all(loss >= RISEN * min(losses) for loss in later)


def _stuck(rows: Rows) -> Judgement:
    mine = pick(rows, task="Pathfinder")
    if not mine or not learned(rows, "Pathfinder"):
        return not_run("no model learns Pathfinder at this scale")
    points = {side: statistics.fmean(100 * row["accuracy"] for row in pick(mine, side=side)) for side in SIDES}
    ours = ", ".join(f"{side} {value:.1f} %" for side, value in points.items())
    return judged(points[EXACT] < min(points[KERNELIZED], points[SKYFORMER]) - 2, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    body, setting = [], []
    for task in _tasks(rows):
        for side in SIDES:
            mine = pick(rows, task=task, side=side)
            low, last = (statistics.fmean(f(row) for row in mine) for f in (_lowest, _last))
            until = ["-", "-"]
            if side != NYSTROM:
                until = [f"{reached(rows, side, task, what):.3g}" for what in ("step", "seconds")]
            accuracy = 100 * statistics.fmean(row["accuracy"] for row in mine)
            body.append([task, side, f"{_seconds(rows, side, task):.1f}", *until, f"{low:.3f}", f"{last:.3f}",
                         f"{accuracy:.1f}"])  # fmt: skip
        config, row = mine[0]["config"], mine[0]
        data = "files of --data" if config["data"] else "installed or generated"
        setting.append([task, data, str(config["length"]), str(config["steps"]),
                        str(config["batch"]), str(row["held"]), f"{100 * row['chance']:.1f}",
                        "yes" if learned(rows, task) else "no"])  # fmt: skip
    columns = ["task", "method", "seconds", "steps to level", "s to level", "lowest loss", "last", "accuracy"]
    return [
        Table("Time of training, without evaluations, and validation loss", columns, body),
        Table("Runs", ["task", "data", "tokens", "steps", "batch", "held out", "chance, %", "learned"], setting),
    ]


def _last(row: Row) -> float:
    return float(row["curve"][-1]["valid_loss"])


def _draw(rows: Rows, figure: Figure) -> None:
    tasks = _tasks(rows)
    axes = panels(figure, 1, len(tasks), size=(4.4, 3.9))
    for task, panel in zip(tasks, axes, strict=True):
        for number, side in enumerate(SIDES):
            look: dict[str, Any] = {**style(number), **({"color": "black"} if side == EXACT else {})}
            for row in pick(rows, task=task, side=side):
                times = [point["seconds"] for point in row["curve"]]
                label = side if row["seed"] == 0 else None
                panel.plot(times, [point["valid_loss"] for point in row["curve"]], label=label, **look)
        length = pick(rows, task=task)[0]["config"]["length"]
        panel.set(
            xlabel="training time, seconds", ylabel="validation loss", title=f"{task}, {length} tokens", xlim=(0, None)
        )
    legend_below(figure, axes[:1], len(SIDES))


STUDY = Study(
    name="skyformer-convergence",
    title="Validation loss against training time",
    paper="skyformer",
    where="appendix A, Figure 1",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    timed=True,
    options=("data", "seeds"),
    claims=(
        Claim(
            "finishes", "appendix A", "Skyformer finishes its steps earlier than self-attention and kernelized "
            "attention on all tasks", "50,000 steps; times only as curves", "less time than both on every task; same "
            "shape: in at least half of the comparisons",
            _earlier(_seconds, "s (Skyformer / self-attention / kernelized)"),
        ),
        Claim(
            "converges", "appendix A", "Skyformer converges faster than both on all tasks", "curves only",
            "the validation loss that all three reach (the highest of their lowest, and 2 % more) is reached in less "
            "time than by both on every task; same shape: in at least half of the comparisons",
            _earlier(_until("seconds"), "s (Skyformer / self-attention / kernelized)"),
        ),
        Claim(
            "overfits", "appendix A", "on Text all models over-fit, and the validation loss rises", "curves only",
            f"after its lowest the loss is at least {RISEN:g} times that at all later evaluations, of which there are "
            "two or more, for every method; same shape: for one", _rises,
        ),
        Claim(
            "pathfinder", "appendix A", "on Pathfinder self-attention does not get to where the others do",
            "in the run shown", "accuracy of self-attention more than 2 points below both", _stuck,
        ),
        Claim(
            "steps", "not in the paper", "Skyformer needs no more steps than self-attention, either", "-",
            "the level of 'converges' is reached at the same evaluation or earlier on every task; same shape: on half",
            _step, ours=True,
        ),
    ),
)  # fmt: skip
