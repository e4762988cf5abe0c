"""A model that was pretrained with softmax, fine-tuned and used with hash collisions in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sparing.documents import default
from sparing.workbench.estimate import proportion
from sparing_lab.report.figure import PAPER, panels, style
from sparing_lab.studies._yoso_trained import EXPECTATION, METHODS, SAMPLED, YOSO, started
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue
from sparing_lab.tasks.trainable import Split, Task
from sparing_lab.tasks.tuning import OWN, USUAL
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Table 2: MRPC and QQP in F1, the others in accuracy; x-E was pretrained with x hashes and fine-tuned with the
#: expectation.
TASKS = ("MRPC", "RTE", "SST-2", "QNLI", "QQP", "MNLI", "MNLI-mm")
TABLE_2 = {
    "softmax": (88.3, 70.8, 91.1, 90.3, 87.3, 82.4, 82.4),
    "YOSO-16": (87.1, 68.6, 90.7, 88.3, 85.3, 79.6, 79.5),
    "YOSO-32": (87.3, 71.8, 90.9, 89.0, 86.3, 80.5, 80.7),
    "YOSO-64": (88.1, 69.7, 91.5, 89.5, 87.0, 81.6, 81.6),
    "YOSO-E": (88.1, 74.4, 92.3, 90.1, 87.3, 82.2, 82.9),
    "YOSO-16-E": (87.8, 69.3, 91.5, 89.3, 86.8, 81.0, 81.4),
    "YOSO-32-E": (87.8, 70.4, 91.1, 90.1, 86.8, 80.8, 81.4),
    "YOSO-64-E": (88.3, 72.2, 91.7, 90.0, 87.2, 81.9, 82.8),
}
#: Table 3, from RoBERTa: SST-2, QQP (F1), MNLI, MNLI-mm.
TABLE_3 = {"YOSO-32": {"SST-2": 93.5, "QQP": 87.3, "MNLI": 84.4, "MNLI-mm": 84.1},
           "YOSO-64": {"SST-2": 94.2, "QQP": 87.9, "MNLI": 85.1, "MNLI-mm": 85.2}}  # fmt: skip
BY_F1 = ("MRPC", "QQP")
BEST = ("YOSO-64", "YOSO-E")  #: what the paper finds comparable with softmax
MODELS = {"table 2": "bert-base-uncased", "table 3": "roberta-base"}
SEARCHED = ("MRPC", "RTE", "SST-2")  #: for batch and rate, as BERT did; the others have a batch of 32 and 3e-5
SMALL_TASKS = ("SST-2", "MRPC", "RTE")  #: the first that the folder holds is taken
_SMALL: dict[str, Any] = {"length": 40, "batch": 16, "steps": 96, "rate": 2e-4, "warmup": 0.1,
                          "evaluate": 32, "frozen": "embeddings"}  # fmt: skip
_FURTHER = 96  #: steps that follow a swap
_HELD = 256  #: examples that a small run is judged by
COMPARABLE = 0.02  #: of a score
ERRORS = 2.0  #: standard errors that noise is given
MOST, HALF = 0.8, 0.5  #: shares of what lies between chance and softmax


def _cells(settings: Settings) -> list[Cell]:
    if settings.small:
        return [_cell(settings, task, settings.model or USUAL, name, _SMALL) for task in [_first(settings)]
                for name in METHODS]  # fmt: skip
    cells = []
    for task in TASKS:
        for rate, batch in _search(task):
            asked = {"length": 128, "batch": batch, "epochs": 4.0, "rate": rate, "dropout": 0.1, "warmup": 0.1}
            model = settings.model or MODELS["table 2"]
            cells += [_cell(settings, task, model, name, asked) for name in METHODS]
            if settings.model is None and task in TABLE_3["YOSO-32"]:
                cells.append(_cell(settings, task, MODELS["table 3"], "softmax", asked))
    return cells


def _search(task: str) -> list[tuple[float, int]]:
    if task not in SEARCHED:
        return [(3e-5, 32)]
    return [(rate, batch) for rate in (2e-5, 3e-5, 4e-5, 5e-5) for batch in (8, 16, 32)]


def _first(settings: Settings) -> str:
    """The task of a small run."""
    if settings.data is None:
        return OWN.name
    for name in SMALL_TASKS:
        if all(glue.TASKS[name].path(settings.data, split).is_file() for split in ("train", "dev")):
            return name
    settings.refuse_unused(
        f"glue/TASK/train.tsv and dev.tsv of {', '.join(SMALL_TASKS)}, as the GLUE benchmark has them"
    )
    return OWN.name


def _cell(settings: Settings, task: str, model: str, name: str, asked: dict[str, Any]) -> Cell:
    own = task == OWN.name
    where: dict[str, Any] = {} if own else {"data": str(settings.data), "part": task}
    of: dict[str, Any] = {} if settings.small and settings.model is None else {"pretrained": model}
    config = Config("glue", METHODS[name], **where, **of, **asked)
    swaps = [] if name != "softmax" else ["YOSO-32"] if settings.small else list(TABLE_3)
    return {
        "task": task, "model": model, "name": name, "text": _fingerprint(settings, task), "swaps": swaps,
        "further": _FURTHER if settings.small else None, "held": _HELD if settings.small else None,
        "config": asdict(config),
    }  # fmt: skip


def _fingerprint(settings: Settings, task: str) -> str:
    if task == OWN.name:
        return default().fingerprint
    about = glue.TASKS[task]
    return " ".join(glue.read(about, settings.data, split).fingerprint for split in ("train", "dev"))


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    config = Config(**cell["config"])
    task = config.load()
    if cell["task"] in BY_F1:
        task = replace(task, judged="f1")
    task = replace(task, valid=first(task.valid, cell["held"]))
    training = Training(config, task=task)
    curve = _curve(training)
    weights = training.bare.state_dict()

    def tried(method: str, steps: int | None = None) -> Training:
        asked = replace(config, method=method) if steps is None else replace(config, method=method, steps=steps)
        return started(asked, weights, task)

    rows: list[Row] = [{"what": "tuned", "curve": curve, "metric": task.metric, **_held(task)}]
    if cell["name"] in SAMPLED:
        rows.append({"what": "expectation", "record": tried(EXPECTATION).evaluate()})
    if cell["swaps"]:
        rows += [{"what": "zero", "swap": name, "record": tried(METHODS[name]).evaluate()} for name in YOSO]
    rows += [
        {"what": "further", "swap": name, "curve": _curve(tried(METHODS[name], cell["further"]))}
        for name in cell["swaps"]
    ]
    return rows


def first(split: Split, count: int | None) -> Split:
    """The first examples; None: all."""
    count = len(split) if count is None else min(count, len(split))
    return Split(count, split.example, None if split.lengths is None else split.lengths[:count])


def _curve(training: Training) -> list[dict[str, float]]:
    """Before the first step, and then as the run says."""
    return [{"step": 0.0, **training.evaluate()}, *training.run().records]


def _held(task: Task) -> dict[str, float]:
    """How many examples are held out, and the score of who always says the same."""
    labels = [task.valid[number].label for number in range(len(task.valid))]
    ones = labels.count(1) / len(labels)
    often = max(labels.count(label) for label in set(labels)) / len(labels)
    return {"held": len(labels), "chance": 2 * ones / (1 + ones) if task.metric == "f1" else often}


class Case:
    """A model on a task: what all rows about it say."""

    def __init__(self, rows: Rows, task: str, model: str) -> None:
        self.rows = [row for row in rows if (row["task"], row["model"]) == (task, model)]
        self.task, self.model = task, model
        one = pick(self.rows, what="tuned")[0]
        self.metric, self.chance, self.held = one["metric"], one["chance"], one["held"]

    def tuned(self, name: str) -> float:
        """Fine-tuned with a method; of several runs the best, as the paper chose."""
        return max(row["curve"][-1][self.metric] for row in pick(self.rows, what="tuned", name=name))

    def expected(self, name: str) -> float:
        """That model with the expectation in place of its hashes."""
        return max(row["record"][self.metric] for row in pick(self.rows, what="expectation", name=name))

    def zero(self, name: str) -> float:
        """The softmax model with a method swapped in."""
        return max(row["record"][self.metric] for row in pick(self.rows, what="zero", swap=name))

    def further(self, name: str) -> float:
        """That, trained on."""
        return max(row["curve"][-1][self.metric] for row in pick(self.rows, what="further", swap=name))

    @property
    def swaps(self) -> list[str]:
        return list(dict.fromkeys(row["swap"] for row in pick(self.rows, what="further")))

    @property
    def noise(self) -> float:
        """Of a score, ERRORS standard errors of a share of the held-out examples."""
        share = self.tuned("softmax")
        return ERRORS * math.sqrt(share * (1 - share) / self.held)

    @property
    def learned(self) -> bool:
        """Whether softmax has learned anything that is no noise."""
        return self.tuned("softmax") > self.chance + self.noise

    def kept(self, score: float) -> float:
        """The share of softmax's distance from chance."""
        return (score - self.chance) / (self.tuned("softmax") - self.chance)


def cases(rows: Rows) -> list[Case]:
    """All that there are."""
    return [Case(rows, *each) for each in dict.fromkeys((row["task"], row["model"]) for row in rows)]


def _of(judge: Callable[[Sequence[Case]], Judgement], *, whole: bool = True) -> Callable[[Rows], Judgement]:
    """A question about the cases in which softmax has learned its task; whole: and which have all methods."""

    def answer(rows: Rows) -> Judgement:
        found = [case for case in cases(rows) if not whole or pick(case.rows, what="tuned", name="YOSO-E")]
        some = [case for case in found if case.learned]
        if not some:
            return not_run("softmax itself has not learned the task: " + _scores(found, "softmax"))
        return judge(some)

    return answer


def _scores(found: Sequence[Case], *names: str) -> str:
    return "; ".join(
        f"{case.task}: " + ", ".join(f"{name} {100 * case.tuned(name):.1f}" for name in names)
        + f" (chance {100 * case.chance:.1f}, noise {100 * case.noise:.1f})"
        for case in found
    )  # fmt: skip


def _comparable(found: Sequence[Case]) -> Judgement:
    near = all(case.tuned(name) >= case.tuned("softmax") - COMPARABLE for case in found for name in BEST)
    kept = min(case.kept(case.tuned(name)) for case in found for name in BEST)
    return judged(near, kept >= MOST, ours=_scores(found, "softmax", *BEST))


def _hashes(found: Sequence[Case]) -> Judgement:
    rise = all(
        case.tuned(later) >= case.tuned(earlier) - case.noise
        for case in found for earlier, later in pairwise(YOSO)
    )  # fmt: skip
    more = all(case.tuned("YOSO-E") > case.tuned("YOSO-16") for case in found)
    ours = _scores(found, *YOSO)
    if not all(case.tuned("YOSO-E") > case.chance + case.noise for case in found):
        return judged(False, ours=ours)
    return judged(rise and more, more, ours=ours)


def _expectation(found: Sequence[Case]) -> Judgement:
    gains = {case.task: fmean(case.expected(name) - case.tuned(name) for name in SAMPLED) for case in found}
    ours = "; ".join(
        f"{case.task}: " + ", ".join(f"{name} {100 * case.tuned(name):.1f} to {100 * case.expected(name):.1f}"
                                     for name in SAMPLED)
        for case in found
    )  # fmt: skip
    if not all(case.expected("YOSO-64") > case.chance + case.noise for case in found):
        return judged(False, ours=ours)
    return judged(min(gains.values()) >= 0, min(gains.values()) >= -COMPARABLE, ours=ours)


def _zero(found: Sequence[Case]) -> Judgement:
    kept = {(case.task, name): case.kept(case.zero(name)) for case in found for name in YOSO}
    ours = "; ".join(
        f"{case.task}: softmax {100 * case.tuned('softmax'):.1f}, "
        + ", ".join(f"{name} {100 * case.zero(name):.1f}" for name in YOSO) + f" (chance {100 * case.chance:.1f})"
        for case in found
    )  # fmt: skip
    return judged(max(kept.values()) <= HALF, fmean(kept.values()) <= HALF, ours=ours)


def _recovered(found: Sequence[Case]) -> Judgement:
    each = [(case, name) for case in found for name in case.swaps]
    near = all(case.further(name) >= case.tuned("softmax") - COMPARABLE for case, name in each)
    some = all(
        case.kept(case.further(name)) >= HALF and case.further(name) > case.zero(name) + case.noise
        for case, name in each
    )
    ours = "; ".join(
        f"{case.task}: softmax {100 * case.tuned('softmax'):.1f}, {name} {100 * case.zero(name):.1f} at once, "
        f"{100 * case.further(name):.1f} after more training" for case, name in each
    )  # fmt: skip
    return judged(near, some, ours=ours)


def _values(rows: Rows) -> Judgement:
    found = [case for case in cases(rows) if case.model == MODELS["table 2"] and case.task in TASKS]
    if not found:
        return not_run("needs bert-base-uncased, pretrained with each method, and all training data: --scale paper")
    off = {
        (case.task, name): 100 * case.tuned(name) - TABLE_2[name][TASKS.index(case.task)]
        for case in found for name in METHODS
    }  # fmt: skip
    worst = max(off, key=lambda key: abs(off[key]))
    ours = f"largest difference {off[worst]:+.1f} ({worst[1]}, {worst[0]})"
    return judged(abs(off[worst]) <= 1.5, abs(off[worst]) <= 5, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    body, swapped = [], []
    for case in cases(rows):
        printed = {name: line[TASKS.index(case.task)] for name, line in TABLE_2.items()} if case.task in TASKS else {}
        for name in METHODS:
            if not pick(case.rows, what="tuned", name=name):
                continue
            theirs = [f"{printed[each]:.1f}" if each in printed else "" for each in (name, f"{name}-E")]
            expected = f"{100 * case.expected(name):.1f}" if name in SAMPLED else ""
            steps = str(int(pick(case.rows, what="tuned", name=name)[0]["curve"][-1]["step"]))
            body.append([case.task, name, steps, f"{100 * case.tuned(name):.1f}", theirs[0], expected, theirs[1]])
        body.append([case.task, "chance", "", f"{100 * case.chance:.1f}", "", "", ""])
        for name in YOSO:
            further = pick(case.rows, what="further", swap=name)
            after = (
                [f"{100 * case.further(name):.1f}", str(int(further[0]["curve"][-1]["step"]))] if further else ["", ""]
            )
            theirs = [f"{TABLE_3[name][case.task]:.1f}" if case.task in TABLE_3.get(name, {}) else ""]
            swapped.append([case.task, name, f"{100 * case.tuned('softmax'):.1f}", f"{100 * case.zero(name):.1f}",
                            *after, *theirs])  # fmt: skip
    held = ", ".join(f"{case.task} {case.held}, noise {100 * case.noise:.1f}" for case in cases(rows))
    return [
        Table(f"Fine-tuned, score x 100 (held out: {held})",
              ["task", "method", "steps", "score", "paper's", "then with E", "paper's x-E"], body),
        Table("Swapped into the softmax model, score x 100",
              ["task", "method", "softmax", "at once", "trained on", "steps", "paper's"], swapped),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.6, 4.6))
    case = cases(rows)[0]
    looks = {"softmax": {"color": "black", "marker": "*", "markersize": 8}}
    looks |= {name: style(number) for number, name in enumerate(YOSO)}
    for place, name in enumerate(METHODS):
        found = proportion(case.tuned(name) * case.held, case.held)
        assert found.low is not None
        assert found.high is not None
        ends = [[100 * (found.mean - found.low)], [100 * (found.high - found.mean)]]
        left.errorbar([place], [100 * case.tuned(name)], ends, capsize=3, linestyle="none", **looks[name])
        if name in SAMPLED:
            look = {**looks[name], "fillstyle": "none"}
            left.plot([place + 0.25], [100 * case.expected(name)], linestyle="none", **look)
        if name != "softmax":
            left.plot([place - 0.25], [100 * case.zero(name)], linestyle="none", marker="_", markersize=14,
                      color=looks[name]["color"], markeredgewidth=2)  # fmt: skip
        if case.task in TASKS:
            left.plot([place], [TABLE_2[name][TASKS.index(case.task)]], **PAPER)
    left.plot([], [], "ko", label="fine-tuned, 95 % interval")
    left.plot([], [], "ko", fillstyle="none", label="then with the expectation")
    left.plot([], [], linestyle="none", marker="_", color="black", markersize=14, markeredgewidth=2,
              label="swapped into the softmax model")  # fmt: skip
    if case.task in TASKS:
        left.plot([], [], **PAPER, label="the paper's")
    left.axhline(100 * case.chance, color="black", linestyle="--", linewidth=0.8, label="chance")
    left.set_xticks(range(len(METHODS)), list(METHODS))
    left.set_xlim(-0.6, len(METHODS) - 0.4)
    left.set(ylabel=f"{case.metric} x 100", title=f"{case.task}, {case.held} held-out examples")
    for name in METHODS:
        curve = pick(case.rows, what="tuned", name=name)[0]["curve"]
        right.plot(*_points(curve, case.metric), label=name, **looks[name])
    for name in case.swaps:
        before = pick(case.rows, what="tuned", name="softmax")[0]["curve"][-1]["step"]
        steps, scores = _points(pick(case.rows, what="further", swap=name)[0]["curve"], case.metric)
        right.plot(
            [before + step for step in steps], scores, linestyle=":", label=f"softmax, then {name}", **looks[name]
        )
    right.axhline(100 * case.chance, color="black", linestyle="--", linewidth=0.8)
    right.set(xlabel="steps", ylabel=f"{case.metric} x 100", title="Over the steps")
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _points(curve: Sequence[dict[str, float]], metric: str) -> tuple[list[float], list[float]]:
    return [point["step"] for point in curve], [100 * point[metric] for point in curve]


_GUARD = f"; not run where softmax is not above chance by {ERRORS:g} standard errors"
STUDY = Study(
    name="yoso-glue",
    title="Fine-tuning with hash collisions, and swapping them into a model that was trained with softmax",
    paper="yoso",
    where="tables 2 and 3",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "model"),
    claims=(
        Claim("comparable", "table 2", "fine-tuned, YOSO-64 and YOSO-E are comparable with softmax",
              "at most 1.1 and 0.2 below it on six tasks",
              f"both at most {100 * COMPARABLE:g} points below softmax; same shape: both keep {100 * MOST:g} % of its "
              "distance from chance" + _GUARD, _of(_comparable),),
        Claim("hashes", "table 2", "the score generally increases with the hashes", "79.6, 80.5, 81.6, E 82.2 on MNLI",
              f"16, 32, 64, E rise, with {ERRORS:g} standard errors of room, and E is above 16 and above chance; same "
              "shape: only the latter" + _GUARD, _of(_hashes),),
        Claim("expectation", "table 2, x-E", "the expectation in place of the hashes costs nothing",
              "x-E above x for 20 of 21 scores",
              "models that were fine-tuned with x hashes and then use the expectation: mean of 16, 32, 64 not lower "
              f"than with hashes, and above chance; same shape: at most {100 * COMPARABLE:g} points lower" + _GUARD,
              _of(_expectation),),
        Claim("zero", "section 6", "without further training the swap ruins a softmax model", "not printed",
              f"every YOSO keeps at most {100 * HALF:g} % of softmax's distance from chance; same shape: on average"
              + _GUARD, _of(_zero, whole=False), ours=True,
             ),
        Claim("recovered", "table 3", "trained on, a softmax model that was swapped is as good as others",
              "YOSO-64 94.2, Longformer 94.9 on SST-2, 95 000 steps",
              f"at most {100 * COMPARABLE:g} points below softmax; same shape: keeps {100 * HALF:g} % of its distance "
              f"from chance, and is above the swap by {ERRORS:g} standard errors" + _GUARD,
              _of(_recovered, whole=False),),
        Claim("values", "table 2", "the scores", "softmax 82.4, YOSO-64 81.6, YOSO-E 82.2 on MNLI",
              "all within 1.5 points of the paper's; same shape: 5", _values),
    ),
)  # fmt: skip
