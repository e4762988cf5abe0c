"""The Long Range Arena with every method under one protocol: accuracy, and the time and memory of a step.

All methods have the same examples, start, batches and optimizer. What the paper's code does to some is left out:
self-attention is not computed twice to save memory, no batch is cut in half, Linformer's projection is learned,
Performer's scale is applied once, black pixels are tokens like others, and means are over the tokens that are there.
Reformer has queries apart from keys, BigBird no random blocks; Informer is not among the methods of this library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparing_lab.studies import _arena as arena
from sparing_lab.studies import _arena_shown as shown
from sparing_lab.studies._arena import EXACT, KERNELIZED, LINFORMER, MATRIX, SIDES, SKYFORMER, TASKS, Setup
from sparing_lab.studies._arena_shown import HOURS, LENGTHS, MEMORY, NOISE, mean_points, ratios
from sparing_lab.studies.judges import Criterion, Judge, NotRun, above, each, rises, within
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study

SMALL = {
    "Text": Setup(128, 16, 3e-3, 100, 0.1, features=16),
    "ListOps": Setup(64, 32, 3e-3, 150, 0.1, features=16),
    "Retrieval": Setup(128, 16, 3e-3, 40, 0.1, features=16),
    "Pathfinder": Setup(256, 16, 3e-3, 40, 0.1, features=32),
    "Image": Setup(64, 32, 3e-3, 200, 0.1, features=16),
}
UNLEARNED = ("Retrieval", "Pathfinder")  #: in so few steps; they get one seed, which shows that
NARROW = {"width": 32, "hidden": 64, "dropout": 0.0}  #: of models at small scale
SECONDS = {"small": 6.0, "paper": 60.0}  #: for each side of a race, unless two rounds take longer
NEAR = 0.8  #: of the paper's ratio is as good as it


def _cells(settings: Settings) -> list[Cell]:
    data = arena.data_of(settings, list(TASKS))
    setups = SMALL if settings.small else arena.PAPER_SETUPS
    narrow = NARROW if settings.small else {}

    def every(setup: Setup) -> int:
        return setup.steps if settings.small else setup.steps // 50

    def seeds_of(task: str) -> int:
        return 3 if not settings.small else 1 if task in UNLEARNED else 2

    found = [
        arena.training_cell(task, side, setup, seed=seed, data=data[task], evaluate=every(setup), **narrow)
        for task, setup in setups.items()
        for seed in range(settings.seeds or seeds_of(task))
        for side in SIDES
    ]
    specs = {side: arena.spec_of(side, arena.FEATURES) for side in (MATRIX, *SIDES)}
    costs = [
        {"what": "cost", "length": length, "batch": 1, "specs": specs, "seconds": SECONDS[settings.scale]}
        for length in LENGTHS
    ]
    return [*found, *costs]


def _measure(settings: Settings, cell: Cell) -> Row | list[Row]:
    return arena.cost_at(cell) if cell["what"] == "cost" else arena.train_one(cell)


def _against(other: str, *sides: str) -> Any:
    """The function that gives the lead of sides over another in the mean over tasks, with the noise of that."""

    def figures(rows: Rows) -> dict[str, Any]:
        if not (tasks := shown.learned_tasks(rows)):
            raise NotRun("no task was learned")
        means = {side: mean_points(rows, side) for side in SIDES}
        noise = {side: shown.noise_between(rows, side, other) for side in sides}
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
    """Whether none is behind in the mean; same shape: one is not."""
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
    return {"points": {task: (shown.points_of(rows, EXACT, task), 100 * chance) for task, chance in chances.items()},
            "count": len(shown.learned_tasks(rows))}  # fmt: skip


def _gains(side: str, against: str = MATRIX) -> Any:
    return lambda rows: {length: shown.faster_by(rows, side, length, against) for length in LENGTHS}


def _memory(against: str) -> Any:
    def figures(rows: Rows) -> dict[int, float]:
        found = {length: shown.smaller_by(rows, SKYFORMER, length, against) for length in LENGTHS}
        if None in found.values():
            raise NotRun("this system does not tell a peak of memory")
        return {length: value for length, value in found.items() if value is not None}

    return figures


_LONGEST = LENGTHS[-1]
_FORM = "{value:.1f} at {key}"


def _by_length(found: dict[int, float]) -> str:
    return ", ".join(f"{value:.1f} at {length}" for length, value in found.items())


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


def _fastest(rows: Rows) -> dict[int, str]:
    """By length: the side that takes the least time."""
    return {length: min(pick(rows, what="cost", length=length), key=lambda row: row["seconds"])["side"]
            for length in LENGTHS}  # fmt: skip


_LINFORMER = each("Linformer", lambda side: side == LINFORMER)
STUDY = Study(
    name="skyformer-lra", title="The Long Range Arena with every method under one protocol: accuracy, time, memory",
    paper="skyformer", where="main paper, tables 1 and 2", cells=_cells, measure=_measure, tables=shown.tables,
    draw=shown.draw, timed=True, options=("data", "seeds"),
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
              judge=_keeps((arena.NYSTROM, arena.PERFORMER, arena.REFORMER, arena.BIGBIRD), EXACT)),
        Claim("linformer", "table 1", "Linformer is the least accurate of these", "54.7 against 57.4 and more",
              judge=Judge(
                  _against(LINFORMER, *_REST), _AHEAD.of("leads"), Criterion("self-attention is", lambda found: (
                      found["leads"][EXACT][0] > found["leads"][EXACT][1])), _lowest, of="every other")),
        Claim("faster", "table 2", "Skyformer trains nearly 4 times as fast as self-attention at 4096 tokens",
              f"time of self-attention / Skyformer: {_by_length(ratios(HOURS, SKYFORMER))}", judge=_fast(MATRIX)),
        Claim("longer", "table 2", "the gain grows with the length", _by_length(ratios(HOURS, SKYFORMER)), judge=Judge(
            _gains(SKYFORMER), rises("the length") & above(1).of(LENGTHS[0], "at 1024"),
            Criterion("higher at 4096 than at 1024", lambda found: found[_LONGEST] > found[LENGTHS[0]]), _FORM)),
        Claim("memory", "table 2", "Skyformer needs less memory than self-attention",
              _by_length(ratios(MEMORY, SKYFORMER)), judge=_light(MATRIX)),
        Claim("kernelized", "table 2", "kernelized attention takes about as long as self-attention",
              _by_length(ratios(HOURS, KERNELIZED)), judge=Judge(
                  _gains(KERNELIZED), within(0.8, 1.5), within(0.8, 1.5).once("at one"), _FORM,
                  of="ratio at each length")),
        Claim("least", "table 2", "Linformer takes the least time of all", "on every task", judge=Judge(
            _fastest, _LINFORMER, _LINFORMER.once("at one"), "{value} at {key}", of="fastest at each length")),
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
