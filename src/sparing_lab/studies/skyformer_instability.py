"""How much a model's states move for a small step of its weights: the paper's score, read out in four ways."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparing.nn import MultiheadAttention
from sparing.workbench.estimate import estimate
from sparing_lab.report.figure import PAPER, legend_below, panels, style
from sparing_lab.studies._arena import (  # fmt: skip
    EXACT,
    KERNELIZED,
    NYSTROM,
    PAPER_SETUPS,
    SKYFORMER,
    TASKS,
    Setup,
    config_of,
    data_of,
    fingerprint,
)
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from sparing_lab.training.objectives import inputs_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Table 1 of the appendix.
TABLE = {
    NYSTROM: {"Text": 1.03, "ListOps": 1.01, "Retrieval": 0.97, "Pathfinder": 0.99, "Image": 1.02},
    KERNELIZED: {"Text": 0.83, "ListOps": 0.77, "Retrieval": 0.64, "Pathfinder": 0.74, "Image": 0.62},
    SKYFORMER: {"Text": 0.81, "ListOps": 0.79, "Retrieval": 0.64, "Pathfinder": 0.79, "Image": 0.65},
}
GAUSSIAN = (KERNELIZED, SKYFORMER)
FIRST = 20  #: steps, the paper's
#: What f is. The paper says only "the embedding after two layers".
AFTER, BEFORE, RELATIVE, REDRAWN = "after LayerNorm", "before LayerNorm", "before, relative", "new landmarks"
READ = (AFTER, BEFORE, RELATIVE, REDRAWN)
NEAR = 0.1  #: of a mean ratio is as good as the paper's
ONE = 0.1  #: from 1 is "around 1"
SPREAD = 0.1  #: standard deviation over seeds, a third of the paper's effect


def _setup(settings: Settings, task: str) -> Setup:
    paper = PAPER_SETUPS[task]
    return replace(paper, length=256, batch=8, features=32) if settings.small else paper


def _cells(settings: Settings) -> list[Cell]:
    data = data_of(settings, list(TASKS))
    found: list[Cell] = []
    for task in TASKS:
        for seed in range(settings.seeds or 3):
            setup = _setup(settings, task)
            configs = {
                side: asdict(config_of(task, side, setup, seed=seed, data=data[task], evaluate=setup.steps))
                for side in (EXACT, *TABLE)
            }
            found.append({"task": task, "seed": seed, "first": FIRST, "of": fingerprint(task, data[task]),
                          "configs": configs})  # fmt: skip
    return found


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    return [
        {"side": side, "read": read, "scores": found}
        for side, config in cell["configs"].items()
        for read, found in scores(Config(**config), cell["first"]).items()
    ]


def plain_start(model: Any, seed: int) -> None:
    """Let attention's projections start as torch's linear layers do, biases too, as in the paper's code."""
    random = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, MultiheadAttention):
            most = layer.embed_dim**-0.5
            for weight in (layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias):
                assert weight is not None
                with torch.no_grad():
                    weight.uniform_(-most, most, generator=random)


class _EnoughError(Exception):
    """The steps were seen."""


def scores(config: Config, first: int = FIRST) -> dict[str, list[float]]:
    """Of each of the first steps, by read-out: |f(x, W) - f(x, W')|^2 / |W - W'|^2, W' the weights before the step.

    x is the batch of the step. Nothing is dropped out, and both models use the same random numbers, but for
    "new landmarks", where the second draws its own.
    """
    found: dict[str, list[float]] = {read: [] for read in READ}

    def see(text: str, done: int, steps: int) -> None:
        numbers = training.batches.batch(done - 1)
        inputs = inputs_of(training.task, [training.task.train[number] for number in numbers], [0] * len(numbers))
        model = copy.deepcopy(training.bare).eval()
        moved = moved_by(old, model)
        first_, second = (states(each, inputs.arguments) for each in (old, model))
        found[AFTER].append(apart(first_[0], second[0]) / moved)
        found[BEFORE].append(apart(first_[1], second[1]) / moved)
        found[RELATIVE].append(apart(first_[1], second[1]) / size(first_[1]) / moved)
        if redraw(model):
            second = states(model, inputs.arguments)
        found[REDRAWN].append(apart(first_[0], second[0]) / moved)
        old.load_state_dict(training.bare.state_dict())
        if done == first:
            raise _EnoughError

    training = Training(config, tell=see)
    plain_start(training.bare, config.seed)
    old = copy.deepcopy(training.bare).eval()
    with suppress(_EnoughError):
        training.run()
    return found


@torch.no_grad()
def states(model: Any, arguments: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the encoder makes of each text: behind the last normalisation, and before it; zero where nothing stands."""
    after: list[Tensor] = []
    before: list[Tensor] = []
    encoder = model.encoder
    hooks = [
        encoder.norm.register_forward_hook(lambda module, given, made: before.append(given[0])),
        encoder.register_forward_hook(lambda module, given, made: after.append(made)),
        encoder.register_forward_pre_hook(lambda module, given: masks.append(given[1])),
    ]
    masks: list[Tensor] = []
    try:
        model(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return after, [each * mask[..., None] for each, mask in zip(before, masks, strict=True)]


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The squared distance of two lists of states."""
    return size([b.double() - a.double() for a, b in zip(one, other, strict=True)])


def size(found: Sequence[Tensor]) -> float:
    """Squared."""
    return sum(float(each.double().square().sum()) for each in found)


def moved_by(old: Any, new: Any) -> float:
    """The squared distance of two models' weights."""
    return apart([each.detach() for each in old.parameters()], [each.detach() for each in new.parameters()])


def redraw(model: Any) -> bool:
    """Other random numbers in evaluation, in every layer that has some; False where none has."""
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("evaluation_seed")]
    for buffer in found:
        buffer.add_(1)
    return bool(found)


def ratios(rows: Rows, side: str, read: str, task: str) -> list[float]:
    """The mean over the steps of score / score of self-attention, for each seed."""
    found = []
    for row in pick(rows, side=side, read=read, task=task):
        (base,) = pick(rows, side=EXACT, read=read, task=task, seed=row["seed"])
        found.append(statistics.fmean(a / b for a, b in zip(row["scores"], base["scores"], strict=True)))
    return found


def _means(rows: Rows, side: str, read: str) -> dict[str, float]:
    """By task."""
    tasks = [task for task in TASKS if pick(rows, task=task)]
    return {task: statistics.fmean(ratios(rows, side, read, task)) for task in tasks}


def _highest(rows: Rows, side: str, read: str) -> dict[str, float]:
    """The upper end of each task's 95 % interval over seeds; the mean where one seed allows none."""
    found = {}
    for task in _means(rows, side, read):
        known = estimate(ratios(rows, side, read, task))
        found[task] = known.mean if known.high is None else known.high
    return found


def _shown(rows: Rows, sides: Sequence[str], read: str) -> str:
    each = ((side, _means(rows, side, read)) for side in sides)
    return "; ".join(f"{side} " + "/".join(_number(value) for value in found.values()) for side, found in each)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _paper(sides: Sequence[str]) -> str:
    return "; ".join(f"{side} " + "/".join(f"{value:.2f}" for value in TABLE[side].values()) for side in sides)


def _below(read: str) -> Callable[[Rows], Judgement]:
    """Both below 1 on all tasks, surely; same shape: their means over the tasks are."""

    def judge(rows: Rows) -> Judgement:
        whole = all(high < 1 for side in GAUSSIAN for high in _highest(rows, side, read).values())
        means = [statistics.fmean(_means(rows, side, read).values()) for side in GAUSSIAN]
        return judged(whole, max(means) < 1, ours=_shown(rows, GAUSSIAN, read))

    return judge


def _size(rows: Rows) -> Judgement:
    near, close, shown = [], [], []
    for side in GAUSSIAN:
        found = _means(rows, side, AFTER)
        mine, paper = (statistics.fmean(values) for values in (found.values(), [TABLE[side][task] for task in found]))
        near.append(abs(mine - paper) <= NEAR)
        close.append(abs(mine - paper) <= 2 * NEAR)
        shown.append(f"{side} {mine:.2f} (paper {paper:.2f})")
    return judged(all(near), all(close), ours="mean over tasks: " + "; ".join(shown))


def _around(rows: Rows) -> Judgement:
    found = _means(rows, NYSTROM, AFTER)
    whole = all(abs(value - 1) <= ONE for value in found.values())
    shape = abs(statistics.fmean(found.values()) - 1) <= ONE
    return judged(whole, shape, ours=_shown(rows, [NYSTROM], AFTER))


def _alike(rows: Rows) -> Judgement:
    kernel, sky = (_means(rows, side, AFTER) for side in GAUSSIAN)
    most = max(abs(kernel[task] - sky[task]) for task in kernel)
    mean = abs(statistics.fmean(kernel.values()) - statistics.fmean(sky.values()))
    return judged(most <= ONE, mean <= ONE, ours=f"largest difference {most:.2f}, of means {mean:.2f}")


def _order(rows: Rows) -> Judgement:
    found = {side: _means(rows, side, AFTER) for side in GAUSSIAN}
    if any(set(each) != set(TASKS) for each in found.values()):
        return not_run("needs all five tasks")
    whole = all(max(each["Retrieval"], each["Image"]) < min(each["Text"], each["ListOps"]) for each in found.values())
    highest, shown = [], []
    for side in GAUSSIAN:
        runs = {task: ratios(rows, side, AFTER, task) for task in TASKS}
        pairs = zip(runs["Retrieval"], runs["Image"], runs["Text"], runs["ListOps"], strict=True)
        apart_ = estimate([(a + b) / 2 - (c + d) / 2 for a, b, c, d in pairs])
        highest.append(apart_.mean if apart_.high is None else apart_.high)
        shown.append(f"{side} {apart_.mean:+.2f}" + ("" if apart_.high is None else f" (at most {apart_.high:+.2f})"))
    return judged(whole, max(highest) < 0, ours="Retrieval and Image less Text and ListOps: " + "; ".join(shown))


def _seeds(rows: Rows) -> Judgement:
    if len({row["seed"] for row in rows}) < 2:
        return not_run("one seed shows no spread")
    tasks = _means(rows, KERNELIZED, AFTER)
    found = {side: [statistics.stdev(ratios(rows, side, AFTER, task)) for task in tasks] for side in TABLE}
    ours = "; ".join(f"{side} {min(each):.2f} to {max(each):.2f}" for side, each in found.items())
    most = [max(found[side]) for side in GAUSSIAN]
    return judged(max(most) <= SPREAD, min(max(found[side]) for side in TABLE) <= SPREAD, ours=ours)


def _redrawn(rows: Rows) -> Judgement:
    found = _means(rows, SKYFORMER, REDRAWN)
    below = [value < 1 for value in found.values()]
    return judged(all(below), statistics.fmean(found.values()) < 1, ours=_shown(rows, [SKYFORMER], REDRAWN))


def _tables(rows: Rows) -> list[Table]:
    tasks = [task for task in TASKS if pick(rows, task=task)]
    body = []
    for side, paper in TABLE.items():
        body.append([side, "paper", *(f"{paper[task]:.2f}" for task in tasks)])
        for read in READ:
            if read == REDRAWN and side != SKYFORMER:
                continue  # nothing is drawn
            body.append(["", read, *(_number(value) for value in _means(rows, side, read).values())])
    seeds = len({row["seed"] for row in rows})
    title = f"Instability score / that of self-attention, mean of {len(rows[0]['scores'])} steps and {seeds} seeds"
    spans = [[side, *(_span(ratios(rows, side, AFTER, task)) for task in tasks)] for side in TABLE]
    tables = [
        Table(title, ["method", "read-out", *tasks], body),
        Table(f"The same {AFTER}, lowest and highest of {seeds} seeds", ["method", *tasks], spans),
    ]
    softmax = [
        [read, *(_score(pick(rows, side=EXACT, read=read, task=task)) for task in tasks)] for read in (AFTER, BEFORE)
    ]
    return [*tables, Table("Instability score of self-attention, mean", ["read-out", *tasks], softmax)]


def _span(values: Sequence[float]) -> str:
    return f"{_number(min(values))} to {_number(max(values))}"


def _score(rows: Rows) -> str:
    return f"{statistics.fmean(math.fsum(row['scores']) / len(row['scores']) for row in rows):.3g}"


def _draw(rows: Rows, figure: Figure) -> None:
    axes = panels(figure, 1, 3, size=(4.6, 3.9))
    tasks = [task for task in TASKS if pick(rows, task=task)]
    for panel, read in zip(axes, (AFTER, BEFORE, RELATIVE), strict=True):
        for number, (side, paper) in enumerate(TABLE.items()):
            where = [place + 0.22 * (number - 1) for place in range(len(tasks))]
            each = [ratios(rows, side, read, task) for task in tasks]
            means = [statistics.fmean(values) for values in each]
            spread = [[m - min(v) for m, v in zip(means, each, strict=True)],
                      [max(v) - m for m, v in zip(means, each, strict=True)]]  # fmt: skip
            panel.errorbar(where, means, yerr=spread, linestyle="none", capsize=2, label=side, **style(number))
            if read == AFTER:
                label = "paper" if number == 0 else None
                panel.plot(where, [paper[task] for task in tasks], **PAPER, label=label)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(tasks)), tasks, rotation=20)
        panel.set(title=f"Read out {read}", ylabel="score / that of self-attention", yscale="log")
        low, high = panel.get_ylim()
        marks = [mark for mark in (0.2, 0.5, 1, 2, 5, 10, 100, 1000, 10000) if low <= mark <= high]
        panel.set_yticks(marks, [f"{mark:g}" for mark in marks])
        panel.minorticks_off()
    legend_below(figure, axes[:1], 4, title="bars: lowest to highest seed")


STUDY = Study(
    name="skyformer-instability",
    title="How much states move for a small step of the weights, and what that hangs on",
    paper="skyformer",
    where="appendix F, Table 1",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim(
            "stable", "appendix F, Table 1", "kernelized attention and Skyformer have lower scores than self-attention "
            "on every task", _paper(GAUSSIAN),
            "read out behind the last LayerNorm: the 95 % interval over seeds lies below 1 for both methods on every "
            "task; same shape: both means over the tasks do", _below(AFTER),
        ),
        Claim(
            "size", "appendix F, Table 1", "they are about a quarter lower", "means over the tasks: 0.72 and 0.74",
            f"both means over the tasks within {NEAR} of the paper's; same shape: within {2 * NEAR}", _size,
        ),
        Claim(
            "nystrom", "appendix F, Table 1", "the score of Nystromformer, which approximates self-attention, "
            "fluctuates around 1", _paper([NYSTROM]), f"within {ONE} of 1 on every task; same shape: in the mean",
            _around,
        ),
        Claim(
            "alike", "appendix F, Table 1", "Skyformer's scores are those of what it approximates",
            "differences 0.00 to 0.05", f"within {ONE} of kernelized attention's on every task; same shape: in the "
            "mean", _alike,
        ),
        Claim(
            "order", "appendix F, Table 1", "the gain is larger on Retrieval and Image than on Text and ListOps",
            "0.62 to 0.65 against 0.77 to 0.83", "both of the first below both of the others, for both methods; same "
            "shape: their mean is, with the 95 % interval over seeds", _order,
        ),
        Claim(
            "seeds", "not in the paper", "one run per task, as the paper's table has, tells the methods apart",
            "no spread is stated", f"standard deviation over seeds at most {SPREAD} on every task for kernelized "
            "attention and Skyformer; same shape: for one of the three methods", _seeds, ours=True,
        ),
        Claim(
            "before", "not in the paper", "the same holds before the last LayerNorm", "the paper does not say which "
            "states it read out", "as the first claim, read out before the last LayerNorm", _below(BEFORE),
            ours=True,
        ),
        Claim(
            "relative", "not in the paper", "the same holds for relative changes before the last LayerNorm", "-",
            "as the first claim, with the score before the last LayerNorm divided by the squared size of the states",
            _below(RELATIVE), ours=True,
        ),
        Claim(
            "redrawn", "not in the paper", "Skyformer's score is low, too, where each evaluation draws its landmarks",
            "the public code draws new ones at each call, also in evaluation", "below 1 on every task; same shape: in "
            "the mean", _redrawn, ours=True,
        ),
    ),
)  # fmt: skip
