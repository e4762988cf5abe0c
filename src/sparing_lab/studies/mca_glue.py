"""Monte-Carlo attention on GLUE: what it costs in accuracy, what it saves, and how much of that is padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.workbench.estimate import Estimate
from sparing_lab.report.figure import PAPER, panels, style
from sparing_lab.studies._mca import (
    ALPHAS,
    METHODS,
    SLOTS,
    TOPICS,
    documents_of,
    model_of,
    problem,
    reads_out,
    train_of,
)
from sparing_lab.studies._mca_glue import (  # fmt: skip
    Case,
    baselines,
    cap,
    cases,
    differ,
    distil,
    falls,
    losses,
    mean_reduction,
    own,
    printed,
    score,
    shared,
    works,
)
from sparing_lab.studies._mca_tables import PAPER_TABLES, WEIGHTS
from sparing_lab.studies.rows import Cell, Row, Rows
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = {"small": 3, "paper": 128}
MOST = 128  #: documents of a task with a score, at small scale
MOST_JOINT = 32  #: of one whose FLOPs alone are counted


def _cells(settings: Settings) -> list[Cell]:
    cells: list[Cell] = []
    for base in _tasks(settings):
        scored, small = base.pop("scored"), settings.small
        seeds = settings.seeds or SEEDS[settings.scale]
        few = 1 if small else seeds
        cells.append({**base, "method": "exact"})
        plan: list[tuple[str, str, int]] = [("padded", "independent", seeds if scored else 1)]
        if scored:
            plan += [("padded", "shared", few), ("padded", "mean", 1), ("padded", "drop", 1)]
            plan += [("tokens", "independent", few), ("tokens", "mean", 1), ("tokens", "drop", 1)]
        cells += [
            {**base, "reading": reading, "method": method, "alpha": alpha, "seed": seed}
            for reading, method, count in plan for alpha in ALPHAS for seed in range(count)
        ]  # fmt: skip
    return cells


def _tasks(settings: Settings) -> list[dict[str, Any]]:
    """What is run: a model, a task, how its pairs are read, and whether there is a score."""
    given = [] if settings.data is None else glue.given(settings.data)
    own = settings.model
    tuned = settings.scale == "paper" if own is None else model_of(own).kind == "classifier"
    found: list[dict[str, Any]] = []

    def add(family: str, model: str, task: str, *, apart: bool = False, scored: bool = True) -> None:
        most = None if not settings.small else MOST if scored else MOST_JOINT
        data = documents_of(task, settings.data, most)
        weights = {} if settings.model is None else {"weights": model_of(settings.model).fingerprint}
        if settings.data is not None and scored and not apart and not tuned and reads_out(task, settings.data):
            weights["train"] = train_of(task, settings.data).fingerprint
        found.append({
            "family": family, "model": model, **weights, "task": task, "apart": apart, "documents": len(data),
            "data": data.fingerprint, "scored": scored,
        })  # fmt: skip

    if own is not None and tuned:
        subject = model_of(own)
        task = glue.task_of(subject.name, subject.model.config, given or list(glue.TASKS.values()))
        for name in (task.name, *(("MNLI-mm",) if task.name == "MNLI" and glue.TASKS["MNLI-mm"] in given else ())):
            add(subject.name, own, name)
    elif tuned:
        for family, ids in WEIGHTS.items():
            for task in given or [glue.TASKS["CoLA"]]:  # whose file the error names
                add(family, ids[task.name.removesuffix("-mm")], task.name)
    else:
        name = settings.model or "minilm"
        family = "MiniLM" if settings.model is None else model_of(name).name
        for task in given:
            add(family, name, task.name, scored=reads_out(task.name, settings.data))
            if not task.classes:
                add(family, name, task.name, apart=True)
        if not given:
            settings.refuse_unused(glue.WANTED)
        if not any(task["scored"] for task in found):
            add(family, name, TOPICS, apart=True)
    return found


def _measure(settings: Settings, cell: Cell) -> Row:
    most = cell["documents"] if settings.small else None
    given = problem(cell["model"], cell["task"], settings.data, most, apart=cell["apart"])
    if cell["method"] == "exact":
        scores, work = given.run(None, padded=False, seed=0)
    else:
        method = MonteCarlo(alpha=cell["alpha"], **METHODS[cell["method"]])
        scores, work = given.run(method, padded=cell["reading"] == "padded", seed=cell["seed"])
    return {"scores": scores, "work": None if work is None else asdict(work)}


def _tables(rows: Rows) -> list[Table]:
    scored = []
    for case in cases(rows):
        exact = score(rows, case, "exact")
        assert exact is not None
        theirs = _line(case)
        if theirs is not None:
            scored.append([str(case), "the paper's", f"{theirs[0]:.2f}", *(f"{value:.2f}" for value in theirs[1:])])
        for reading, words in (("padded", "n = 128"), ("tokens", "n = tokens")):
            for method in METHODS:
                found = [score(rows, case, method, alpha, reading) for alpha in ALPHAS]
                if any(found):
                    scored.append([str(case), f"{method}, {words}", f"{100 * exact.mean:.2f}", *map(_plus, found)])
    counted = [
        [task, f"{alpha:g}", f"{SLOTS / work.padding:.1f}", _times(printed(family, task, alpha)),
         *map(_times, (work.paper, work.padding, work.real, work.weighed, work.paper_weighed, work.layer))]
        for alpha in ALPHAS for (family, task), work in works(rows, alpha).items()
    ]  # fmt: skip
    other = [
        [task, f"{alpha:g}", *map(_times, (work.paper, work.real, work.weighed, work.layer))]
        for alpha in ALPHAS for (_, task), work in works(rows, alpha, "tokens").items()
    ]  # fmt: skip
    heads = [f"alpha {alpha:g}" for alpha in ALPHAS]
    names = ["task", "alpha", "tokens", "paper's", "its count", "padding", "valid", "and A H", "padded, A H", "layer"]
    return [
        Table("Scores x 100, with 95 % intervals over seeds", ["task", "method", "exact", *heads], scored),
        Table("FLOPs saved, independent samples, alpha as printed (n = 128)", names, counted),
        Table("FLOPs saved where n in eq. 9 counts tokens", [*names[:2], names[4], *names[6:8], "layer"], other),
    ]  # fmt: skip


def _line(case: Case) -> Sequence[float] | None:
    line = PAPER_TABLES.get(case.family, PAPER_TABLES["BERT"]).get(case.task)
    return None if line is None else line.results.get(case.metric)


def _plus(found: Estimate | None) -> str:
    if found is None:
        return ""
    return f"{100 * found.mean:.2f}" + ("" if found.high is None else f" ±{100 * (found.high - found.mean):.1f}")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.4, 4.2))
    shown = cases(rows)[:1]
    for case in shown:
        exact = score(rows, case, "exact")
        assert exact is not None
        left.axhline(100 * exact.mean, color="black", linewidth=1, label="exact")
        for number, method in enumerate(METHODS):
            for reading, line in (("padded", "-"), ("tokens", ":")):
                found = [score(rows, case, method, alpha, reading) for alpha in ALPHAS]
                if not any(found):
                    continue
                means = [100 * (math.nan if x is None else x.mean) for x in found]
                halves = [0.0 if x is None or x.high is None else 100 * (x.high - x.mean) for x in found]
                words = "n = 128" if reading == "padded" else "n = tokens"
                left.errorbar(
                    ALPHAS, means, halves, capsize=2, linestyle=line, label=f"{method}, {words}", **style(number)
                )
        theirs = _line(case)
        if theirs is not None:
            left.plot(ALPHAS, theirs[1:], **PAPER, label="the paper's (tuned BERT)")
        left.set(title=str(case), xlabel="alpha", ylabel="score x 100", xticks=ALPHAS)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    bars = works(rows, 0.2)
    places = range(len(bars))
    right.bar(
        places, [work.paper for work in bars.values()], color=style(0)["color"], label="counted as the paper does"
    )
    right.bar(
        places, [work.padding for work in bars.values()], color=style(4)["color"], width=0.5, label="padding alone"
    )
    for place, (family, task) in zip(places, bars, strict=True):
        theirs_x = printed(family, task, 0.2)
        if theirs_x is not None:
            right.plot([place], [theirs_x], **PAPER, label="the paper's" if place == 0 else None)
    right.axhline(1, color="black", linewidth=0.8)
    right.set(ylabel="FLOPs saved (times)", title="alpha = 0.2, n = 128")
    right.set_xticks(list(places), [f"{task}\n{SLOTS / work.padding:.0f} tokens" for (_, task), work in bars.items()])
    right.tick_params(axis="x", labelsize=8)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


STUDY = Study(
    name="mca-glue",
    title="GLUE with sampled value projections: scores, FLOPs saved, and how much of that is padding",
    paper="mca",
    where="tables 1 and 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds", "model"),
    claims=(
        Claim(
            "reduction-0.2", "section 4, table 1", "alpha = 0.2 saves 4.64 times the FLOPs, the mean of all tests",
            "4.64x (4.78x over its nine tasks)",
            "counted its way, the mean over the tasks that are given is within 10 % of its own for the same tasks; "
            "same shape: most tasks within 25 %", mean_reduction(0.2),
        ),
        Claim(
            "reduction-0.4", "section 4, table 1", "alpha = 0.4 saves 5.72 times the FLOPs, the mean of all tests",
            "5.72x (5.75x over its nine tasks)", "as for 0.2", mean_reduction(0.4),
        ),
        Claim(
            "own", "section 4", "what is saved at alpha = 0.2 is the method's doing", "2.50x to 11.44x",
            "at least half of each saving, as a factor (in logarithms), is left on valid tokens; same shape: of one",
            own,
        ),
        Claim(
            "differ", "section 4", "savings differ between tasks because attention is sparser in some (a conjecture)",
            "11.44x against 2.50x",
            "between the tasks that save most and least, at least half of the factor is there on valid tokens; same "
            "shape: a tenth of it", differ,
        ),
        Claim(
            "negligible", "section 4", "alpha = 0.2 costs a negligible loss",
            "BERT at most 0.9 points (RTE); DistilBERT WNLI 1.9",
            "independent samples, n = 128: at most 1 point in each score, by its interval over seeds; same shape: the "
            "mean, in most", losses(0.2),
        ),
        Claim(
            "loss-0.4", "section 4", "alpha = 0.4 costs at most 1 % accuracy in all cases",
            "<= 1 %; its table has STS-B -5.4 and -6.6, RTE -2.2, QNLI -1.3",
            "as for 0.2", losses(0.4),
        ),
        Claim(
            "falls", "section 4", "the larger alpha, the lower the score", "for example SST-2 92.3, 92.0, 91.2, 80.7",
            "in each score, alpha = 1 below alpha = 0.2 by more than the intervals, and no step up by more than 1 "
            "point; same shape: no such step in most", falls,
        ),
        Claim(
            "tokens", "eq. 9", "alpha = 0.2 costs a negligible loss where n is the number of tokens, too",
            "n is the length of the sequence",
            "as for 'negligible', with n = tokens",
            losses(0.2, "tokens"), ours=True,
        ),
        Claim(
            "shared", "eq. 5; the authors' code", "one list of samples for all tokens does as well as a list for each",
            "its code shares them", "at alpha = 0.4 shared samples lose at most 1 point more in each score", shared,
            ours=True,
        ),
        Claim(
            "baselines", "section 3", "samples are a good use of the work: sampling beats doing without it",
            "not compared",
            "over all scores, alphas and both readings of n, sampling loses no more than taking the mean of all tokens "
            "in most settings, and no more than leaving tokens out in most; same shape: the latter", baselines,
            ours=True,
        ),
        Claim(
            "cap", "section 4", "the savings hold for the FLOPs of A X W, A H included", "up to 18.38x",
            "with A H counted, at n = 128 and alpha = 1, at least 90 % of each saving is left; by arithmetic "
            "none above 1 + d / n can be", cap,
        ),
        Claim(
            "distil", "table 2", "DistilBERT saves as much as BERT", "for example SST-2 5.60x and 5.58x",
            "at alpha = 0.2 at most 15 % apart in each task; same shape: 50 %", distil,
        ),
    ),
)  # fmt: skip
