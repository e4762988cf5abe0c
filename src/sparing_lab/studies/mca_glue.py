"""Monte-Carlo attention on GLUE: what it costs in accuracy, what it saves, and how much of that is padding."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.workbench.estimate import Estimate
from sparing_lab.figure import PAPER, Figure, legends, level, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies import _mca as mca
from sparing_lab.studies import _mca_glue as judges
from sparing_lab.studies._mca import ALPHAS, METHODS, SLOTS
from sparing_lab.studies._mca_glue import cases, paper_line, score, works
from sparing_lab.studies.rows import Cell, Row, Rows
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue

SEEDS = {"small": 3, "paper": 128}
MOST = 128  #: documents of a task that an encoder has a score for, at small scale; classifiers read all
MOST_JOINT = 32  #: documents of a task where only FLOPs are counted


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
    """Return what to run: a model, a task, how its pairs are read, and whether there is a score."""
    given = [] if settings.data is None else glue.given(settings.data)
    own = settings.model
    tuned = settings.scale == "paper" if own is None else mca.model_of(own).kind == "classifier"
    found: list[dict[str, Any]] = []

    def add(
        family: str, model: str, task: str, *, apart: bool = False, scored: bool = True, tuned: bool = tuned
    ) -> None:
        most = None if tuned else MOST if scored else MOST_JOINT
        base = mca.cell_of(settings, family, model, task, most=most, apart=apart, tuned=tuned)
        found.append({**base, "scored": scored})

    if own is not None and tuned:
        name = mca.own_task(own, given)
        for task in (name, *(["MNLI-mm"] if name == "MNLI" and glue.TASKS["MNLI-mm"] in given else [])):
            add(mca.model_of(own).name, own, task)
    elif tuned:
        for family, ids in numbers("mca", "weights").items():
            for each in given or [glue.TASKS["CoLA"]]:  # without data, the error names the file of CoLA
                add(family, ids[each.name.removesuffix("-mm")], each.name)
    else:
        model = own or "minilm"
        family = "MiniLM" if own is None else mca.model_of(own).name
        for each in given:
            assert settings.data is not None
            if own is None and (classifier := mca.classifier_of(each, settings.data)) is not None:
                add(mca.TUNED, classifier, each.name, tuned=True)
                continue
            add(family, model, each.name, scored=mca.reads_out(each.name, settings.data))
            if not each.classes:
                add(family, model, each.name, apart=True)
        if not given:
            settings.refuse_unused(glue.WANTED)
        if not any(task["scored"] for task in found):
            add(family, model, mca.TOPICS, apart=True)
    return found


def _measure(settings: Settings, cell: Cell) -> Row:
    most = cell["documents"] if settings.small else None
    given = mca.problem(cell["model"], cell["task"], settings.data, most, apart=cell["apart"])
    if cell["method"] == "exact":
        scores, work = given.run(None, padded=False, seed=0)
    else:
        method = MonteCarlo(alpha=cell["alpha"], **METHODS[cell["method"]])
        scores, work = given.run(method, padded=cell["reading"] == "padded", seed=cell["seed"])
    return {"scores": scores, "work": None if work is None else asdict(work)}


_READINGS = {"padded": "n = 128", "tokens": "n = tokens"}


def _tables(rows: Rows) -> list[Table]:
    scored = []
    for case in cases(rows):
        exact = score(rows, case, "exact")
        theirs = paper_line(case.family, case.task, case.metric)
        if theirs is not None:
            scored.append([str(case), "the paper's", *(f"{value:.2f}" for value in theirs)])
        for reading, words in _READINGS.items():
            for method in METHODS:
                found = [score(rows, case, method, alpha, reading) for alpha in ALPHAS]
                if any(found) and exact is not None:
                    scored.append([str(case), f"{method}, {words}", f"{100 * exact.mean:.2f}", *map(_plus, found)])
    counted, other = [], []
    for number, alpha in enumerate(ALPHAS):
        for (family, task), work in works(rows, alpha).items():
            printed = paper_line(family, task, "flops")
            saved = (work.paper, work.padding, work.real, work.weighed, work.paper_weighed, work.layer)
            theirs_x = "" if printed is None else f"{printed[number]:.2f}x"
            counted.append([task, f"{alpha:g}", f"{SLOTS / work.padding:.1f}", theirs_x, *(f"{x:.2f}x" for x in saved)])
        for (_, task), work in works(rows, alpha, "tokens").items():
            saved_ = (work.paper, work.real, work.weighed, work.layer)
            other.append([task, f"{alpha:g}", *(f"{x:.2f}x" for x in saved_)])
    heads = [f"alpha {alpha:g}" for alpha in ALPHAS]
    names = ["task", "alpha", "tokens", "paper's", "its count", "padding", "valid", "and A H", "padded, A H", "layer"]
    return [
        Table("Scores x 100, with 95 % intervals over seeds", ["task", "method", "exact", *heads], scored),
        Table("FLOPs saved, independent samples, alpha as printed (n = 128)", names, counted),
        Table("FLOPs saved where n in eq. 9 counts tokens", [*names[:2], names[4], *names[6:8], "layer"], other),
    ]  # fmt: skip


def _plus(found: Estimate | None) -> str:
    if found is None:
        return ""
    return f"{100 * found.mean:.2f}" + ("" if found.high is None else f" ±{100 * (found.high - found.mean):.1f}")


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.4, 4.2))
    for case in cases(rows)[:1]:
        exact = score(rows, case, "exact")
        level(left, math.nan if exact is None else 100 * exact.mean, linewidth=1, label="exact")
        for number, method in enumerate(METHODS):
            for (reading, words), dash in zip(_READINGS.items(), ("-", ":"), strict=True):
                found = [score(rows, case, method, alpha, reading) for alpha in ALPHAS]
                if any(found):
                    means = [100 * (math.nan if x is None else x.mean) for x in found]
                    halves = [0.0 if x is None or x.high is None else 100 * (x.high - x.mean) for x in found]
                    left.errorbar(ALPHAS, means, halves, capsize=2, linestyle=dash, label=f"{method}, {words}",
                                  **style(number))  # fmt: skip
        theirs = paper_line(case.family, case.task, case.metric)
        if theirs is not None:
            left.plot(ALPHAS, theirs[1:], **PAPER, label="the paper's (tuned BERT)")
        left.set(title=str(case), xlabel="alpha", ylabel="score x 100", xticks=ALPHAS)
    bars = works(rows, 0.2)
    counts = (("paper", 0, 0.8, "counted as the paper does"), ("padding", 4, 0.5, "padding alone"))
    for of, colour, width, label in counts:
        heights = [getattr(work, of) for work in bars.values()]
        right.bar(range(len(bars)), heights, color=style(colour)["color"], width=width, label=label)
    for place, (family, task) in enumerate(bars):
        printed = paper_line(family, task, "flops")
        if printed is not None:
            right.plot([place], [printed[0]], **PAPER, label="the paper's" if place == 0 else None)
    level(right, 1)
    right.set(ylabel="FLOPs saved (times)", title="alpha = 0.2, n = 128")
    names = [f"{task}\n{SLOTS / work.padding:.0f} tokens" for (_, task), work in bars.items()]
    right.set_xticks(range(len(bars)), names)
    right.tick_params(axis="x", labelsize=8)
    legends([left], 2, 0.16)
    legends([right], 3, 0.16)


STUDY = Study(
    name="mca-glue", title="GLUE with sampled value projections: scores, FLOPs saved, and how much of that is padding",
    paper="mca", where="tables 1 and 2", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds", "model"), version=2,
    claims=(
        Claim("reduction-0.2", "section 4, table 1", "alpha = 0.2 saves 4.64 times the FLOPs, the mean of all tests",
              "4.64x (4.78x over its nine tasks)", judge=judges.mean_reduction(0.2)),
        Claim("reduction-0.4", "section 4, table 1", "alpha = 0.4 saves 5.72 times the FLOPs, the mean of all tests",
              "5.72x (5.75x over its nine tasks)", judge=judges.mean_reduction(0.4)),
        Claim("own", "section 4", "what is saved at alpha = 0.2 is the method's doing", "2.50x to 11.44x",
              judge=judges.own),
        Claim("differ", "section 4", "savings differ between tasks because attention is sparser in some (a conjecture)",
              "11.44x against 2.50x", judge=judges.differ),
        Claim("negligible", "section 4", "alpha = 0.2 costs a negligible loss",
              "BERT at most 0.9 points (RTE); DistilBERT WNLI 1.9", judge=judges.losses(0.2)),
        Claim("loss-0.4", "section 4", "alpha = 0.4 costs at most 1 % accuracy in all cases",
              "<= 1 %; its table has STS-B -5.4 and -6.6, RTE -2.2, QNLI -1.3", judge=judges.losses(0.4)),
        Claim("falls", "section 4", "the larger alpha, the lower the score", "for example SST-2 92.3, 92.0, 91.2, 80.7",
              judge=judges.falls),
        Claim("tokens", "eq. 9", "alpha = 0.2 costs a negligible loss where n is the number of tokens, too",
              "n is the length of the sequence", judge=judges.losses(0.2, "tokens"), ours=True),
        Claim("shared", "eq. 5; the authors' code",
              "one list of samples for all tokens does as well as a list for each", "its code shares them",
              judge=judges.shared, ours=True),
        Claim("baselines", "section 3", "samples are a good use of the work: sampling beats doing without it",
              "not compared", judge=judges.baselines, ours=True),
        Claim("cap", "section 4", "the savings hold for the FLOPs of A X W, A H included", "up to 18.38x",
              judge=judges.cap),
        Claim("distil", "table 2", "DistilBERT saves as much as BERT", "for example SST-2 5.60x and 5.58x",
              judge=judges.distil),
    ),
)  # fmt: skip
