"""A model pretrained with softmax, fine-tuned and evaluated with hash collisions in place of softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from sparing.documents import default
from sparing.workbench.estimate import proportion
from sparing_lab.figure import PAPER, Figure, legends, level, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._yoso_glue import ERRORS, TunedModel, first, tuned_models
from sparing_lab.studies._yoso_trained import EXPECTATION, METHODS, SAMPLED, YOSO, started
from sparing_lab.studies.judges import Criterion, Judge, NotRun, at_most, each
from sparing_lab.studies.rows import Cell, Row, Rows, curve, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue
from sparing_lab.tasks.trainable import Task
from sparing_lab.tasks.tuning import OWN, USUAL
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

TABLE_2, TABLE_3 = numbers("yoso", "table 2"), numbers("yoso", "table 3")
TASKS = tuple(TABLE_2["softmax"])
BY_F1 = ("MRPC", "QQP")
BEST = ("YOSO-64", "YOSO-E")  #: what the paper finds comparable with softmax
MODELS = {"table 2": "bert-base-uncased", "table 3": "roberta-base"}
SEARCHED = ("MRPC", "RTE", "SST-2")  #: over batch size and learning rate, as BERT did; others: 32 and 3e-5
SMALL_TASKS = ("SST-2", "MRPC", "RTE")  #: the first one in the data folder is used
_SMALL: dict[str, Any] = {"max_length": 40, "batch_size": 16, "max_steps": 96, "learning_rate": 2e-4,
                          "warmup_ratio": 0.1,
                          "eval_steps": 32, "frozen": "embeddings"}  # fmt: skip
_FURTHER = 96  #: fine-tuning steps after a swap
_HELD = 256  #: held-out examples of a small run
COMPARABLE = 0.02  #: largest difference of comparable scores
MOST, HALF = 0.8, 0.5  #: shares of the distance from chance to softmax


def _cells(settings: Settings) -> list[Cell]:
    if settings.small:
        return [_cell(settings, task, settings.model or USUAL, name, _SMALL) for task in [_first(settings)]
                for name in METHODS]  # fmt: skip
    cells = []
    for task in TASKS:
        searched = [(rate, batch) for rate in (2e-5, 3e-5, 4e-5, 5e-5) for batch in (8, 16, 32)]
        for rate, batch in searched if task in SEARCHED else [(3e-5, 32)]:
            asked = {"max_length": 128, "batch_size": batch, "epochs": 4.0, "learning_rate": rate, "dropout": 0.1,
                     "warmup_ratio": 0.1}  # fmt: skip
            model = settings.model or MODELS["table 2"]
            cells += [_cell(settings, task, model, name, asked) for name in METHODS]
            if settings.model is None and task in TABLE_3["YOSO-32"]:
                cells.append(_cell(settings, task, MODELS["table 3"], "softmax", asked))
    return cells


def _first(settings: Settings) -> str:
    """Return the task of a small run."""
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
        asked = replace(config, method=method) if steps is None else replace(config, method=method, max_steps=steps)
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


def _curve(training: Training) -> list[dict[str, float]]:
    """Return the evaluations of a run, with one before the first step."""
    return [{"step": 0.0, **training.evaluate()}, *training.run().records]


def _held(task: Task) -> dict[str, float]:
    """Return the number of held-out examples, and the score of a constant answer."""
    labels = [task.valid[number].label for number in range(len(task.valid))]
    ones = labels.count(1) / len(labels)
    often = max(labels.count(label) for label in set(labels)) / len(labels)
    return {"held": len(labels), "chance": 2 * ones / (1 + ones) if task.metric == "f1" else often}


def _learned(rows: Rows) -> list[TunedModel]:
    """Return the models that have learned their task with softmax."""
    return _with_softmax(tuned_models(rows))


def _whole(rows: Rows) -> list[TunedModel]:
    """Return the models of `_learned` that were fine-tuned with all methods."""
    return _with_softmax([case for case in tuned_models(rows) if pick(case.rows, what="tuned", name="YOSO-E")])


def _with_softmax(found: Sequence[TunedModel]) -> list[TunedModel]:
    some = [case for case in found if case.learned(case.tuned("softmax"))]
    if not some:
        raise NotRun("softmax itself has not learned the task: " + _scores("softmax")(found))
    return some


def _scores(*names: str) -> Callable[[Sequence[TunedModel]], str]:
    return lambda found: "; ".join(
        f"{case.task}: " + ", ".join(f"{name} {100 * case.tuned(name):.1f}" for name in names)
        + f" (chance {100 * case.chance:.1f}, noise {100 * case.noise:.1f})" for case in found
    )  # fmt: skip


def _every(words: str, names: Sequence[str], test: Callable[[TunedModel, str], bool]) -> Criterion:
    """Require a test of every model and each of these methods."""
    return each(words, lambda case: all(test(case, name) for name in names))


def _swapped(words: str, test: Callable[[TunedModel, str], bool]) -> Criterion:
    """Require a test of every model and each of its swaps."""
    return each(words, lambda case: all(test(case, name) for name in case.swaps))


def _gain(case: TunedModel) -> float:
    """Return by how much the expectation raises the scores of hashes, on average."""
    return fmean(case.expected(name) - case.tuned(name) for name in SAMPLED)


_ABOVE = each("E above 16, and above chance", lambda case: (
    case.tuned("YOSO-E") > case.tuned("YOSO-16") and case.learned(case.tuned("YOSO-E"))))  # fmt: skip
_RISE = each(f"16, 32, 64, E rise, with {ERRORS:g} standard errors of room", lambda case: all(
    case.tuned(later) >= case.tuned(earlier) - case.noise for earlier, later in pairwise(YOSO)))  # fmt: skip


def _expected(words: str, least: float) -> Criterion:
    """Require that the expectation changes scores by at least `least`, and that YOSO-64 is above chance with it."""
    return each(words, lambda case: case.learned(case.expected("YOSO-64")) and _gain(case) >= least)


def _off(rows: Rows) -> dict[tuple[str, str], float]:
    """Return the differences from the paper's scores in points, by task and method."""
    found = [case for case in tuned_models(rows) if case.model == MODELS["table 2"] and case.task in TASKS]
    return {(case.task, name): 100 * case.tuned(name) - TABLE_2[name][case.task] for case in found for name in METHODS}


def _farthest(found: dict[tuple[str, str], float]) -> str:
    worst = max(found, key=lambda key: abs(found[key]))
    return f"largest difference {found[worst]:+.1f} ({worst[1]}, {worst[0]})"


def _tables(rows: Rows) -> list[Table]:
    def points(score: float) -> str:
        return f"{100 * score:.1f}"

    def paper(table: Any, name: str, task: str) -> str:
        return f"{table[name][task]:.1f}" if task in table.get(name, {}) else ""

    def steps(case: TunedModel, **wanted: Any) -> str:
        return str(int(pick(case.rows, **wanted)[0]["curve"][-1]["step"]))

    tuned, swapped = [], []
    for case in tuned_models(rows):
        tuned += [
            [case.task, name, steps(case, what="tuned", name=name), points(case.tuned(name)),
             paper(TABLE_2, name, case.task), points(case.expected(name)) if name in SAMPLED else "",
             paper(TABLE_2, f"{name}-E", case.task)]
            for name in METHODS if pick(case.rows, what="tuned", name=name)
        ]  # fmt: skip
        tuned.append([case.task, "chance", "", points(case.chance), "", "", ""])
        swapped += [
            [case.task, name, points(case.tuned("softmax")), points(case.zero(name)),
             *([points(case.further(name)), steps(case, what="further", swap=name)] if name in case.swaps
               else ["", ""]), paper(TABLE_3, name, case.task)]
            for name in YOSO
        ]  # fmt: skip
    held = ", ".join(f"{case.task} {case.held}, noise {100 * case.noise:.1f}" for case in tuned_models(rows))
    return [
        Table(f"Fine-tuned, score x 100 (held out: {held})",
              ["task", "method", "steps", "score", "paper's", "then with E", "paper's x-E"], tuned),
        Table("Swapped into the softmax model, score x 100",
              ["task", "method", "softmax", "at once", "trained on", "steps", "paper's"], swapped),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.6, 4.6))
    case = tuned_models(rows)[0]
    looks: dict[str, Any] = {"softmax": {"color": "black", "marker": "*", "markersize": 8}}
    looks |= {name: style(number) for number, name in enumerate(YOSO)}
    dash: dict[str, Any] = {"linestyle": "none", "marker": "_", "markersize": 14, "markeredgewidth": 2}
    for place, name in enumerate(METHODS):
        found = proportion(case.tuned(name) * case.held, case.held)
        ends = [[100 * (found.mean - (found.low or 0.0))], [100 * ((found.high or 0.0) - found.mean)]]
        left.errorbar([place], [100 * case.tuned(name)], ends, capsize=3, linestyle="none", **looks[name])
        if name in SAMPLED:
            hollow = {**looks[name], "fillstyle": "none", "linestyle": "none"}
            left.plot([place + 0.25], [100 * case.expected(name)], **hollow)
        if name != "softmax":
            left.plot([place - 0.25], [100 * case.zero(name)], color=looks[name]["color"], **dash)
        if case.task in TASKS:
            left.plot([place], [TABLE_2[name][case.task]], **PAPER)
    left.plot([], [], "ko", label="fine-tuned, 95 % interval")
    left.plot([], [], "ko", fillstyle="none", label="then with the expectation")
    left.plot([], [], color="black", label="swapped into the softmax model", **dash)
    if case.task in TASKS:
        left.plot([], [], **PAPER, label="the paper's")
    level(left, 100 * case.chance, linestyle="--", label="chance")
    left.set_xticks(range(len(METHODS)), list(METHODS))
    left.set_xlim(-0.6, len(METHODS) - 0.4)
    left.set(ylabel=f"{case.metric} x 100", title=f"{case.task}, {case.held} held-out examples")

    def draw_curve(start: float, label: str, look: Any, **wanted: Any) -> None:
        found = curve(pick(case.rows, **wanted)[0]["curve"], "step", case.metric)
        right.plot([start + step for step in found], [100 * y for y in found.values()], label=label, **look)

    for name in METHODS:
        draw_curve(0, name, looks[name], what="tuned", name=name)
    for name in case.swaps:
        before = pick(case.rows, what="tuned", name="softmax")[0]["curve"][-1]["step"]
        draw_curve(before, f"softmax, then {name}", {**looks[name], "linestyle": ":"}, what="further", swap=name)
    level(right, 100 * case.chance, linestyle="--")
    right.set(xlabel="steps", ylabel=f"{case.metric} x 100", title="Over the steps")
    legends((left, right))


_GUARD = f"where softmax is above chance by {ERRORS:g} standard errors"
STUDY = Study(
    name="yoso-glue", paper="yoso", where="tables 2 and 3",
    title="Fine-tuning with hash collisions, and swapping them into a model that was trained with softmax",
    cells=_cells, measure=_measure, tables=_tables, draw=_draw, version=2, options=("data", "model"),
    claims=(
        Claim("comparable", "table 2", "fine-tuned, YOSO-64 and YOSO-E are comparable with softmax",
              "at most 1.1 and 0.2 below it on six tasks", judge=Judge(
                  _whole, _every(f"both at most {100 * COMPARABLE:g} points below softmax", BEST, lambda case, name: (
                      case.tuned(name) >= case.tuned("softmax") - COMPARABLE)),
                  _every(f"both keep {100 * MOST:g} % of its distance from chance", BEST, lambda case, name: (
                      case.kept(case.tuned(name)) >= MOST)), _scores("softmax", *BEST), of=_GUARD)),
        Claim("hashes", "table 2", "the score generally increases with the hashes", "79.6, 80.5, 81.6, E 82.2 on MNLI",
              judge=Judge(_whole, _RISE & _ABOVE, _ABOVE, _scores(*YOSO), of=_GUARD)),
        Claim("expectation", "table 2, x-E", "the expectation in place of the hashes costs nothing",
              "x-E above x for 20 of 21 scores", judge=Judge(
                  _whole, _expected("mean of 16, 32, 64 not lower with the expectation, and above chance", 0),
                  _expected(f"at most {100 * COMPARABLE:g} points lower", -COMPARABLE),
                  lambda found: "; ".join(f"{case.task}: " + ", ".join(
                      f"{name} {100 * case.tuned(name):.1f} to {100 * case.expected(name):.1f}" for name in SAMPLED)
                      for case in found), of=_GUARD)),
        Claim("zero", "section 6", "without further training the swap ruins a softmax model", "not printed",
              judge=Judge(
                  lambda rows: {"kept": [case.kept(case.zero(name)) for case in _learned(rows) for name in YOSO],
                                "tuned_models": _learned(rows)},
                  at_most(HALF).of("kept"), at_most(HALF).on_average().of("kept"), lambda found: "; ".join(
                      f"{case.task}: softmax {100 * case.tuned('softmax'):.1f}, "
                      + ", ".join(f"{name} {100 * case.zero(name):.1f}" for name in YOSO)
                      + f" (chance {100 * case.chance:.1f})" for case in found["tuned_models"]),
                  of="share of softmax's distance from chance that every YOSO keeps, " + _GUARD), ours=True),
        Claim("recovered", "table 3", "trained on, a softmax model that was swapped is as good as others",
              "YOSO-64 94.2, Longformer 94.9 on SST-2, 95 000 steps", judge=Judge(
                  _learned, _swapped(f"at most {100 * COMPARABLE:g} points below softmax", lambda case, name: (
                      case.further(name) >= case.tuned("softmax") - COMPARABLE)),
                  _swapped(f"keeps {100 * HALF:g} % of its distance from chance, and is above the swap by {ERRORS:g} "
                           "standard errors", lambda case, name: case.kept(case.further(name)) >= HALF
                           and case.further(name) > case.zero(name) + case.noise),
                  lambda found: "; ".join(
                      f"{case.task}: softmax {100 * case.tuned('softmax'):.1f}, {name} {100 * case.zero(name):.1f} at "
                      f"once, {100 * case.further(name):.1f} after more training"
                      for case in found for name in case.swaps), of=_GUARD)),
        Claim("values", "table 2", "the scores", "softmax 82.4, YOSO-64 81.6, YOSO-E 82.2 on MNLI", judge=Judge(
            _off, each("within 1.5 points of the paper's", lambda off: abs(off) <= 1.5),
            each("within 5", lambda off: abs(off) <= 5), _farthest,
            needs="needs bert-base-uncased, pretrained with each method, and all training data: --scale paper")),
    ),
)  # fmt: skip
