"""The Long Range Arena with every method under one protocol: accuracy, and the time and memory of a step.

All methods have the same examples, start, batches and optimizer. What the paper's code does to some is left out:
self-attention is not computed twice to save memory, no batch is cut in half, Linformer's projection is learned,
Performer's scale is applied once, black pixels are tokens like others, and means are over the tokens that are there.
Reformer has queries apart from keys, BigBird no random blocks; Informer is not among the methods of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from sparing_lab.studies._arena import (
    BIGBIRD,
    EXACT,
    FEATURES,
    KERNELIZED,
    LINFORMER,
    MATRIX,
    NYSTROM,
    PAPER_SETUPS,
    PERFORMER,
    REFORMER,
    SIDES,
    SKYFORMER,
    TASKS,
    Setup,
    cost_at,
    data_of,
    spec_of,
    train_one,
    training_cell,
)
from sparing_lab.studies._arena_shown import (
    NOISE,
    draw,
    faster_by,
    learned_tasks,
    mean_points,
    noise_between,
    points_of,
    smaller_by,
    tables,
)
from sparing_lab.studies._arena_tables import HOURS, LENGTHS, MEMORY, ratios
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run

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
    data = data_of(settings, list(TASKS))
    setups = SMALL if settings.small else PAPER_SETUPS
    narrow = NARROW if settings.small else {}

    def every(setup: Setup) -> int:
        return setup.steps if settings.small else setup.steps // 50

    def seeds_of(task: str) -> int:
        return 3 if not settings.small else 1 if task in UNLEARNED else 2

    found = [
        training_cell(task, side, setup, seed=seed, data=data[task], evaluate=every(setup), **narrow)
        for task, setup in setups.items()
        for seed in range(settings.seeds or seeds_of(task))
        for side in SIDES
    ]
    specs = {side: spec_of(side, FEATURES) for side in (MATRIX, *SIDES)}
    costs = [
        {"what": "cost", "length": length, "batch": 1, "specs": specs, "seconds": SECONDS[settings.scale]}
        for length in LENGTHS
    ]
    return [*found, *costs]


def _measure(settings: Settings, cell: Cell) -> Row | list[Row]:
    return cost_at(cell) if cell["what"] == "cost" else train_one(cell)


def _means(rows: Rows, sides: Sequence[str]) -> str:
    return ", ".join(f"{side} {mean_points(rows, side):.1f}" for side in sides)


_NOTHING = not_run("no task was learned")


def _keeps(sides: Sequence[str], against: str) -> Callable[[Rows], Judgement]:
    """None is behind in the mean; same shape: one is not."""

    def judge(rows: Rows) -> Judgement:
        if not learned_tasks(rows):
            return _NOTHING
        base = mean_points(rows, against)
        kept = [mean_points(rows, side) >= base - noise_between(rows, side, against) for side in sides]
        ours = (
            f"{_means(rows, [*sides, against])} (noise {max(noise_between(rows, side, against) for side in sides):.1f})"
        )
        return judged(all(kept), any(kept), ours=f"{ours}; {', '.join(learned_tasks(rows))}")

    return judge


def _ahead(rows: Rows) -> Judgement:
    if not learned_tasks(rows):
        return _NOTHING
    gain = mean_points(rows, SKYFORMER) - mean_points(rows, EXACT)
    limit = noise_between(rows, SKYFORMER, EXACT)
    return judged(gain > limit, ours=f"{gain:+.1f} points (noise {limit:.1f})")


def _first(rows: Rows) -> Judgement:
    if not learned_tasks(rows):
        return _NOTHING
    mine = mean_points(rows, SKYFORMER)
    others = {
        side: (mean_points(rows, side), noise_between(rows, side, SKYFORMER)) for side in SIDES if side != SKYFORMER
    }
    whole = all(mine > mean + limit for mean, limit in others.values())
    shape = all(mine >= mean - limit for mean, limit in others.values())
    order = sorted(SIDES, key=lambda side: -mean_points(rows, side))
    return judged(whole, shape, ours=_means(rows, order[: max(3, order.index(SKYFORMER) + 1)]))


def _behind(rows: Rows) -> Judgement:
    if not learned_tasks(rows):
        return _NOTHING
    mean = mean_points(rows, LINFORMER)
    less = {
        side: mean_points(rows, side) - mean > noise_between(rows, side, LINFORMER)
        for side in SIDES
        if side != LINFORMER
    }
    lowest = min(SIDES, key=lambda side: mean_points(rows, side))
    ours = f"{_means(rows, [LINFORMER, EXACT])}; lowest is {lowest} with {mean_points(rows, lowest):.1f}"
    return judged(all(less.values()), less[EXACT], ours=ours)


def _chance(rows: Rows) -> Judgement:
    shown = []
    for task in TASKS:
        (row, *_) = pick(rows, what="train", task=task, side=EXACT)
        shown.append(f"{task} {points_of(rows, EXACT, task):.0f} (chance {100 * row['chance']:.0f})")
    count = len(learned_tasks(rows))
    return judged(count == len(TASKS), count >= 3, ours=", ".join(shown))


def _by_length(found: dict[int, float]) -> str:
    return ", ".join(f"{value:.1f} at {length}" for length, value in found.items())


def _fast(against: str) -> Callable[[Rows], Judgement]:
    def judge(rows: Rows) -> Judgement:
        found = {length: faster_by(rows, SKYFORMER, length, against) for length in LENGTHS}
        paper = ratios(HOURS, SKYFORMER)[LENGTHS[-1]]
        last = found[LENGTHS[-1]]
        return judged(last >= NEAR * paper, last > 1, ours=_by_length(found))

    return judge


def _grows(rows: Rows) -> Judgement:
    found = {length: faster_by(rows, SKYFORMER, length) for length in LENGTHS}
    values = list(found.values())
    whole = all(a < b for a, b in pairwise(values)) and values[0] > 1
    return judged(whole, values[-1] > values[0], ours=_by_length(found))


def _light(against: str) -> Callable[[Rows], Judgement]:
    def judge(rows: Rows) -> Judgement:
        known = {length: smaller_by(rows, SKYFORMER, length, against) for length in LENGTHS}
        found = {length: value for length, value in known.items() if value is not None}
        if len(found) < len(known):
            return not_run("this system does not tell a peak of memory")
        paper = ratios(MEMORY, SKYFORMER)
        whole = all(value >= NEAR * paper[length] for length, value in found.items())
        return judged(whole, found[LENGTHS[-1]] > 1, ours=_by_length(found))

    return judge


def _kernelized(rows: Rows) -> Judgement:
    found = {length: faster_by(rows, KERNELIZED, length) for length in LENGTHS}
    near = [0.8 <= value <= 1.5 for value in found.values()]
    return judged(all(near), any(near), ours=_by_length(found))


def _least(rows: Rows) -> Judgement:
    firsts = []
    for length in LENGTHS:
        costs = {row["side"]: row["seconds"] for row in pick(rows, what="cost", length=length)}
        firsts.append(min(costs, key=lambda side: costs[side]))
    ours = ", ".join(f"{first} at {length}" for first, length in zip(firsts, LENGTHS, strict=True))
    return judged(all(first == LINFORMER for first in firsts), LINFORMER in firsts, ours=ours)


STUDY = Study(
    name="skyformer-lra",
    title="The Long Range Arena with every method under one protocol: accuracy, time, memory",
    paper="skyformer",
    where="main paper, tables 1 and 2",
    cells=_cells,
    measure=_measure,
    tables=tables,
    draw=draw,
    timed=True,
    options=("data", "seeds"),
    claims=(
        Claim(
            "comparable", "table 1", "kernelized attention and Skyformer are as accurate as self-attention or more",
            "means 58.6 and 59.4 against 57.4",
            "mean over the tasks that are learned not lower by more than two standard errors (of held-out examples and "
            f"seeds; at least {NOISE:g} points), for both; same shape: for one", _keeps((KERNELIZED, SKYFORMER), EXACT),
        ),
        Claim(
            "better", "table 1", "Skyformer is more accurate than self-attention", "+2.0 points in the mean, +2.75 on "
            "Text, +1.37 on Retrieval", "mean higher by more than two standard errors (at least "
            f"{NOISE:g} points)", _ahead,
        ),
        Claim(
            "first", "table 1", "Skyformer has the highest mean of all", "59.39; then BigBird 59.05, Reformer 58.99, "
            "Nystromformer 58.93", "ahead of every other by more than the noise; same shape: no other is ahead of it "
            "by more than that", _first,
        ),
        Claim(
            "target", "table 1", "Skyformer is as accurate as the attention that it approximates", "59.4 against 58.6",
            "mean not lower by more than the noise", _keeps((SKYFORMER,), KERNELIZED),
        ),
        Claim(
            "others", "table 1", "Nystromformer, Performer, Reformer and BigBird, too, keep up with self-attention",
            "58.9, 58.0, 59.0, 59.1 against 57.4", "no mean lower by more than the noise; same shape: at least one",
            _keeps((NYSTROM, PERFORMER, REFORMER, BIGBIRD), EXACT),
        ),
        Claim(
            "linformer", "table 1", "Linformer is the least accurate of these", "54.7 against 57.4 and more",
            "below every other by more than the noise; same shape: below self-attention", _behind,
        ),
        Claim(
            "faster", "table 2", "Skyformer trains nearly 4 times as fast as self-attention at 4096 tokens",
            f"time of self-attention / Skyformer: {_by_length(ratios(HOURS, SKYFORMER))}",
            f"at 4096 tokens at least {NEAR:g} of the paper's ratio to self-attention with its matrix in memory; same "
            "shape: faster", _fast(MATRIX),
        ),
        Claim(
            "longer", "table 2", "the gain grows with the length", _by_length(ratios(HOURS, SKYFORMER)),
            "above 1 at 1024 tokens, and higher at each doubling; same shape: higher at 4096 than at 1024", _grows,
        ),
        Claim(
            "memory", "table 2", "Skyformer needs less memory than self-attention",
            _by_length(ratios(MEMORY, SKYFORMER)), f"at least {NEAR:g} of the paper's ratio at each length; same "
            "shape: less at 4096 tokens", _light(MATRIX),
        ),
        Claim(
            "kernelized", "table 2", "kernelized attention takes about as long as self-attention",
            _by_length(ratios(HOURS, KERNELIZED)), "ratio 0.8 to 1.5 at each length; same shape: at one", _kernelized,
        ),
        Claim(
            "least", "table 2", "Linformer takes the least time of all", "on every task", "at each length; same shape: "
            "at one", _least,
        ),
        Claim(
            "fused", "not in the paper", "Skyformer is as much faster than fused exact attention", "-",
            "as 'faster', against torch's fused attention", _fast(EXACT), ours=True,
        ),
        Claim(
            "fused-memory", "not in the paper", "Skyformer needs as much less memory than fused exact attention", "-",
            "as 'memory', against torch's fused attention", _light(EXACT), ours=True,
        ),
        Claim(
            "learned", "not in the paper", "the models of this run have learned their tasks", "-",
            "some model of each task is above chance by three standard errors; same shape: on three tasks", _chance,
            ours=True,
        ),
    ),
)  # fmt: skip
