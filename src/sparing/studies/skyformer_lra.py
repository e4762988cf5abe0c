"""The Long Range Arena with every method under one protocol: accuracy, and the time and memory of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from sparing.studies._arena import (
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
    error,
    learned,
    spec_of,
    train_one,
    training_cell,
)  # fmt: skip
from sparing.studies._arena_tables import ACCURACY, HOURS, LENGTHS, MEMORY, ratios
from sparing.studies.figure import PAPER, panels, style
from sparing.studies.study import Cell, Claim, Judgement, Row, Rows, Settings, Study, Table, judged, not_run, pick

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = {
    "Text": Setup(128, 16, 3e-3, 100, 0.1, features=16),
    "ListOps": Setup(64, 32, 3e-3, 150, 0.1, features=16),
    "Retrieval": Setup(128, 16, 3e-3, 50, 0.1, features=16),
    "Pathfinder": Setup(256, 16, 3e-3, 50, 0.1, features=32),
    "Image": Setup(64, 32, 3e-3, 200, 0.1, features=16),
}
NARROW = {"width": 32, "hidden": 64, "dropout": 0.0}  #: of models at small scale
SECONDS = {"small": 6.0, "paper": 60.0}  #: for each side of a race, unless two rounds take longer
NOISE = 2.0  #: points that two runs can differ by, at the least
NEAR = 0.8  #: of the paper's ratio is as good as it


def _cells(settings: Settings) -> list[Cell]:
    data = data_of(settings, list(TASKS))
    setups = SMALL if settings.small else PAPER_SETUPS
    narrow = NARROW if settings.small else {}

    def every(setup: Setup) -> int:
        return setup.steps if settings.small else setup.steps // 50

    seeds = settings.seeds or (1 if settings.small else 3)
    found = [
        training_cell(task, side, setup, seed=seed, data=data[task], evaluate=every(setup), **narrow)
        for task, setup in setups.items()
        for seed in range(seeds)
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


def _learned(rows: Rows) -> list[str]:
    return [task for task in TASKS if learned(rows, task)]


def _points(rows: Rows, side: str, task: str) -> float:
    """Accuracy in percent, mean over seeds."""
    return 100 * statistics.fmean(row["accuracy"] for row in pick(rows, what="train", side=side, task=task))


def _mean(rows: Rows, side: str) -> float:
    """Over the tasks that are learned."""
    return statistics.fmean(_points(rows, side, task) for task in _learned(rows))


def _limit(rows: Rows, one: str, other: str) -> float:
    """Points that the means of two methods may differ by for no reason: two standard errors, and not below `NOISE`."""
    tasks = _learned(rows)
    total = 0.0
    for task in tasks:
        for side in (one, other):
            mine = pick(rows, what="train", side=side, task=task)
            total += sum((100 * error(row["accuracy"], row["held"]) / len(mine)) ** 2 for row in mine)
    return max(2 * math.sqrt(total) / len(tasks), NOISE)


def _paper_mean(side: str) -> float:
    return statistics.fmean(ACCURACY[side])


def _means(rows: Rows, sides: Sequence[str]) -> str:
    return ", ".join(f"{side} {_mean(rows, side):.1f}" for side in sides)


_NOTHING = not_run("no task was learned")


def _keeps(sides: Sequence[str], against: str) -> Callable[[Rows], Judgement]:
    """None is behind in the mean; same shape: one is not."""

    def judge(rows: Rows) -> Judgement:
        if not _learned(rows):
            return _NOTHING
        base = _mean(rows, against)
        kept = [_mean(rows, side) >= base - _limit(rows, side, against) for side in sides]
        ours = f"{_means(rows, [*sides, against])} (noise {max(_limit(rows, side, against) for side in sides):.1f})"
        return judged(all(kept), any(kept), ours=f"{ours}; {', '.join(_learned(rows))}")

    return judge


def _ahead(rows: Rows) -> Judgement:
    if not _learned(rows):
        return _NOTHING
    gain = _mean(rows, SKYFORMER) - _mean(rows, EXACT)
    limit = _limit(rows, SKYFORMER, EXACT)
    return judged(gain > limit, ours=f"{gain:+.1f} points (noise {limit:.1f})")


def _first(rows: Rows) -> Judgement:
    if not _learned(rows):
        return _NOTHING
    mine = _mean(rows, SKYFORMER)
    others = {side: (_mean(rows, side), _limit(rows, side, SKYFORMER)) for side in SIDES if side != SKYFORMER}
    whole = all(mine > mean + limit for mean, limit in others.values())
    shape = all(mine >= mean - limit for mean, limit in others.values())
    order = sorted(SIDES, key=lambda side: -_mean(rows, side))
    return judged(whole, shape, ours=_means(rows, order[: max(3, order.index(SKYFORMER) + 1)]))


def _behind(rows: Rows) -> Judgement:
    if not _learned(rows):
        return _NOTHING
    mean = _mean(rows, LINFORMER)
    less = {side: _mean(rows, side) - mean > _limit(rows, side, LINFORMER) for side in SIDES if side != LINFORMER}
    lowest = min(SIDES, key=lambda side: _mean(rows, side))
    ours = f"{_means(rows, [LINFORMER, EXACT])}; lowest is {lowest} with {_mean(rows, lowest):.1f}"
    return judged(all(less.values()), less[EXACT], ours=ours)


def _chance(rows: Rows) -> Judgement:
    shown = []
    for task in TASKS:
        (row, *_) = pick(rows, what="train", task=task, side=EXACT)
        shown.append(f"{task} {_points(rows, EXACT, task):.0f} (chance {100 * row['chance']:.0f})")
    count = len(_learned(rows))
    return judged(count == len(TASKS), count >= 3, ours=", ".join(shown))


def _cost(rows: Rows, side: str, length: int) -> Row:
    (row,) = pick(rows, what="cost", side=side, length=length)
    return row


def _faster(rows: Rows, side: str, length: int, against: str = MATRIX) -> float:
    """How many times as long a step of the other takes."""
    return float(_cost(rows, side, length)["gain"][against][0])


def _smaller(rows: Rows, side: str, length: int, against: str = MATRIX) -> float | None:
    """How many times as much memory a step of the other takes; None where nobody can tell."""
    theirs, mine = (_cost(rows, each, length)["peak"] for each in (against, side))
    return None if theirs is None or mine is None else theirs / max(mine, 1)


def _by_length(found: dict[int, float]) -> str:
    return ", ".join(f"{value:.1f} at {length}" for length, value in found.items())


def _fast(against: str) -> Callable[[Rows], Judgement]:
    def judge(rows: Rows) -> Judgement:
        found = {length: _faster(rows, SKYFORMER, length, against) for length in LENGTHS}
        paper = ratios(HOURS, SKYFORMER)[LENGTHS[-1]]
        last = found[LENGTHS[-1]]
        return judged(last >= NEAR * paper, last > 1, ours=_by_length(found))

    return judge


def _grows(rows: Rows) -> Judgement:
    found = {length: _faster(rows, SKYFORMER, length) for length in LENGTHS}
    values = list(found.values())
    whole = all(a < b for a, b in pairwise(values)) and values[0] > 1
    return judged(whole, values[-1] > values[0], ours=_by_length(found))


def _light(against: str) -> Callable[[Rows], Judgement]:
    def judge(rows: Rows) -> Judgement:
        known = {length: _smaller(rows, SKYFORMER, length, against) for length in LENGTHS}
        found = {length: value for length, value in known.items() if value is not None}
        if len(found) < len(known):
            return not_run("this system does not tell a peak of memory")
        paper = ratios(MEMORY, SKYFORMER)
        whole = all(value >= NEAR * paper[length] for length, value in found.items())
        return judged(whole, found[LENGTHS[-1]] > 1, ours=_by_length(found))

    return judge


def _kernelized(rows: Rows) -> Judgement:
    found = {length: _faster(rows, KERNELIZED, length) for length in LENGTHS}
    near = [0.8 <= value <= 1.5 for value in found.values()]
    return judged(all(near), any(near), ours=_by_length(found))


def _least(rows: Rows) -> Judgement:
    firsts = []
    for length in LENGTHS:
        costs = {row["side"]: row["seconds"] for row in pick(rows, what="cost", length=length)}
        firsts.append(min(costs, key=lambda side: costs[side]))
    ours = ", ".join(f"{first} at {length}" for first, length in zip(firsts, LENGTHS, strict=True))
    return judged(all(first == LINFORMER for first in firsts), LINFORMER in firsts, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    known = _learned(rows)
    body = []
    for side in SIDES:
        mean = f"{_mean(rows, side):.1f}" if known else "-"
        body.append([side, *(f"{_points(rows, side, task):.1f} ({paper:.1f})"
                             for task, paper in zip(TASKS, ACCURACY[side], strict=True)),
                     f"{mean} ({_paper_mean(side):.1f})"])  # fmt: skip
    chance = [100 * pick(rows, what="train", task=task)[0]["chance"] for task in TASKS]
    held = [pick(rows, what="train", task=task)[0]["held"] for task in TASKS]
    body.append(["chance", *(f"{value:.1f}" for value in chance), ""])
    body.append(["held-out examples", *map(str, held), ""])
    body.append(["learned", *("yes" if task in known else "no" for task in TASKS), ""])
    setting = []
    for task in TASKS:
        row = pick(rows, what="train", task=task)[0]
        config = row["config"]
        setting.append([task, config["data"] or "installed or generated", str(config["length"]), str(config["steps"]),
                        str(config["batch"]), f"{config['layers']} x {config['width']}"])  # fmt: skip
    steps = [[side, *(f"{1e3 * _step(rows, side, task):.1f}" for task in TASKS)] for side in SIDES]
    costs = []
    for side in (MATRIX, *SIDES):
        paper = (ratios(HOURS, side), ratios(MEMORY, side)) if side in HOURS else ({}, {})
        line = [side]
        for length in LENGTHS:
            small = _smaller(rows, side, length)
            beside = f" ({paper[0][length]:.1f})" if paper[0] and side != EXACT else ""
            line.append(f"{_faster(rows, side, length):.2f}{beside}")
            beside = f" ({paper[1][length]:.1f})" if paper[1] and side != EXACT else ""
            line.append(("-" if small is None else f"{small:.1f}") + beside)
        costs.append(line)
    columns = [f"{what} {length}" for length in LENGTHS for what in ("time", "mem")]
    absolute = [
        [side, *(f"{1e3 * _cost(rows, side, n)['seconds']:.0f} ms, {_mebibytes(_cost(rows, side, n)['peak'])}"
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


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(5.0, 4.4))
    tasks = list(TASKS)
    for number, side in enumerate(SIDES):
        where = [place + 0.09 * (number - 3.5) for place in range(len(tasks))]
        look = {**style(number), **({"color": "black"} if side == EXACT else {})}
        left.plot(where, [_points(rows, side, task) for task in tasks], linestyle="none", **look)
        left.plot(where, ACCURACY[side], **{**PAPER, "markersize": 4, "color": look["color"]})
        for panel, value, table in ((middle, _faster, HOURS), (right, _smaller, MEMORY)):
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
    middle.set(ylabel="time of self-attention / of the method", title="Time of a training step (table 2)")
    right.set(ylabel="memory of self-attention / of the method", title="Peak memory of a step (table 2)")
    for panel in (middle, right):
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="length, tokens")
        panel.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    one, other = (panel.get_legend_handles_labels() for panel in (left, middle))
    figure.legend(other[0] + one[0], other[1] + one[1], loc="outside lower center", ncols=5)


_CPU = (
    "Torch's fused attention never holds the n x n matrix: the paper's rival, which did, is measured beside it, and is "
    "what the paper's ratios are about."
)
STUDY = Study(
    name="skyformer-lra",
    title="The Long Range Arena with every method under one protocol: accuracy, time, memory",
    paper="skyformer",
    where="main paper, tables 1 and 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    timed=True,
    options=("data", "seeds"),
    claims=(
        Claim(
            "comparable", "table 1", "kernelized attention and Skyformer are as accurate as self-attention or more",
            "means 58.6 and 59.4 against 57.4",
            "mean over the tasks that are learned not lower by more than two standard errors (at least "
            f"{NOISE:g} points), for both; same shape: for one", _keeps((KERNELIZED, SKYFORMER), EXACT),
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
            otherwise="The paper's code never trains Linformer's projection; here it is learned.",
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
            "as 'faster', against torch's fused attention", _fast(EXACT), ours=True, otherwise=_CPU,
        ),
        Claim(
            "fused-memory", "not in the paper", "Skyformer needs as much less memory than fused exact attention", "-",
            "as 'memory', against torch's fused attention", _light(EXACT), ours=True, otherwise=_CPU,
        ),
        Claim(
            "learned", "not in the paper", "the models of this run have learned their tasks", "-",
            "some model of each task is above chance by three standard errors; same shape: on three tasks", _chance,
            ours=True,
            otherwise="Retrieval and Pathfinder are not learned in the few steps of this scale: their accuracies are "
            "chance, and they are left out of all means.",
        ),
    ),
)  # fmt: skip
