"""Monte-Carlo attention: accuracy against FLOPs and alpha, with weights of 16 bits, and in half of the layers."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.workbench.estimate import Estimate, estimate
from sparing_lab.figure import PAPER, Figure, legends, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies import _mca as mca
from sparing_lab.studies._mca import POINT, ProjectionWork
from sparing_lab.studies.judges import Criterion, Judge, NotRun, at_least, each
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, grouped, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue

ALPHAS = {"small": (0.1, 0.2, 0.4, 0.6, 1.0), "paper": tuple(tenths / 10 for tenths in range(1, 11))}
SEEDS = {"small": 3, "paper": 128}
MOST = 96  #: documents that an encoder reads, at small scale; classifiers read all
WIDE, HALF = "float32", "float16"
ROUNDINGS = (WIDE, HALF, "bfloat16")
TASK = "SST-2"  #: the paper's task
BESIDE = "STS-B"  #: a task where the paper's tables lose more, beside it if its classifier is given


class AlphaPoint(NamedTuple):
    """A point of a curve, at one alpha."""

    alpha: float
    score: Estimate
    loss: float  #: compared with the exact model with the same weights
    work: ProjectionWork

    @property
    def half(self) -> float:
        """Return half the width of the interval over seeds; 0 if there is none."""
        return 0.0 if self.score.high is None else self.score.high - self.score.mean


def _cells(settings: Settings) -> list[Cell]:
    seeds = settings.seeds or SEEDS[settings.scale]
    cells: list[Cell] = []
    for base in _models(settings):
        for rounding in ROUNDINGS:
            one = {**base, "rounding": rounding}
            cells.append({**one, "layers": "none"})
            for layers in ("all", "half") if rounding == WIDE else ("all",):
                cells += [
                    {**one, "layers": layers, "alpha": alpha, "seed": seed}
                    for alpha in ALPHAS[settings.scale] for seed in range(seeds)
                ]  # fmt: skip
    return cells


def _models(settings: Settings) -> list[dict[str, Any]]:
    given = [] if settings.data is None else glue.given(settings.data)
    own = settings.model
    if own is not None and mca.model_of(own).kind == "classifier":
        return [mca.cell_of(settings, mca.model_of(own).name, own, mca.own_task(own, given), most=None)]
    if settings.scale == "paper" and own is None:
        weights = numbers("mca", "weights").items()
        return [mca.cell_of(settings, family, ids[TASK], TASK, most=None) for family, ids in weights]
    if own is None and settings.data is not None:
        tasks = [glue.TASKS[name] for name in (TASK, BESIDE) if glue.TASKS[name] in given]
        classifiers = {task.name: mca.classifier_of(task, settings.data) for task in tasks}
        found = [
            mca.cell_of(settings, mca.TUNED if name == TASK else f"{mca.TUNED} on {name}", folder, name, most=None)
            for name, folder in classifiers.items() if folder is not None
        ]  # fmt: skip
        if classifiers.get(TASK) is not None:
            return found
    read = mca.reads_out(TASK, settings.data) and glue.TASKS[TASK] in given
    if not read:
        settings.refuse_unused(f"{TASK}, dev.tsv with classifiers/{TASK} or with train.tsv: {glue.WANTED}")
    family, task = "MiniLM" if own is None else mca.model_of(own).name, TASK if read else mca.TOPICS
    return [mca.cell_of(settings, family, own or "minilm", task, most=MOST, apart=not read, tuned=False)]


def _measure(settings: Settings, cell: Cell) -> Row:
    most = cell["documents"] if settings.small else None
    given = mca.problem(cell["model"], cell["task"], settings.data, most, apart=cell["apart"],
                        rounding=cell["rounding"])  # fmt: skip
    if cell["layers"] == "none":
        scores, work = given.run(None, padded=False, seed=0)
    else:
        method = MonteCarlo(alpha=cell["alpha"])
        scores, work = given.run(method, padded=True, seed=cell["seed"], half=cell["layers"] == "half")
    name = given.names[0]
    return {"metric": name, "score": scores[name], "work": None if work is None else asdict(work)}


AlphaCurve = dict[float, AlphaPoint]  #: points by alpha


def curve(rows: Rows, family: str, rounding: str = WIDE, layers: str = "all") -> AlphaCurve:
    """Return a model's scores by alpha; means over seeds."""
    mine = pick(rows, family=family, rounding=rounding)
    exact = the(mine, layers="none")["score"]
    found = {}
    for alpha, some in sorted(grouped(pick(mine, layers=layers), "alpha").items()):
        score = estimate([row["score"] for row in some])
        found[alpha] = AlphaPoint(alpha, score, exact - score.mean, ProjectionWork(**some[0]["work"]))
    return found


def _curves(rows: Rows) -> dict[str, AlphaCurve]:
    """Return the curves that claims are judged by: those of the first task, if its scores compare with labels."""
    task = rows[0]["task"]
    if task == mca.TOPICS:
        raise NotRun(mca.NO_LABELS)
    return {family: curve(rows, family) for family in distinct(pick(rows, task=task), "family")}


def _scores(line: AlphaCurve) -> list[float]:
    return [point.score.mean for point in line.values()]


_LOWER = each("lower at the largest alpha than at the smallest", lambda line: _scores(line)[-1] < _scores(line)[0])
_STEADY = each("no step up by more than 1 point", lambda line: all(b <= a + POINT for a, b in pairwise(_scores(line))))


def _shown(point: AlphaPoint) -> str:
    return f"{100 * point.loss:.1f} ±{100 * point.half:.1f}"


def _saves(times: float, points_lost: float) -> Judge:
    """Judge whether some alpha that loses at most that much, with its interval, saves that many times."""
    few = f"{points_lost:g} point{'s' if points_lost > 1 else ''}"

    def figures(rows: Rows) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {"real": {}, "paper": {}, "padding": {}}
        for family, line in _curves(rows).items():
            fine = [point.work for point in line.values() if point.loss + point.half <= points_lost * POINT]
            for of in ("real", "paper"):
                found[of][family] = max((getattr(work, of) for work in fine), default=1.0)
            found["padding"][family] = next(iter(line.values())).work.padding
        return found

    return Judge(
        figures, at_least(times).of("real", "on valid tokens"), at_least(times).of("paper", "where padding counts"),
        lambda found: f"with at most {few} lost, by the interval over seeds: " + ", ".join(
            f"{family} {real:.2f}x ({found['paper'][family]:.1f}x with padding, which alone is "
            f"{found['padding'][family]:.1f}x)" for family, real in found["real"].items()),
        of=f"times saved at some alpha that surely loses at most {few}",
    )  # fmt: skip


def _rest(line: AlphaCurve) -> float:
    """Return the additional loss from alpha = 0.6 to alpha = 1."""
    return line[1.0].loss - line[0.6].loss


def _tips(line: AlphaCurve) -> bool:
    beyond = _rest(line) - line[1.0].half - line[0.6].half
    return _rest(line) >= 2 * line[0.6].loss and beyond > POINT


def _rounded(rows: Rows) -> dict[str, Any]:
    """Return how far losses of rounded weights are from float32's, and half of the largest loss."""
    lines = _curves(rows)
    apart = {
        rounding: max(0.0, *(abs(point.loss - curve(rows, family, rounding)[alpha].loss)
                             for family, line in lines.items() for alpha, point in line.items()))
        for rounding in ROUNDINGS[1:]
    }  # fmt: skip
    return {"apart": apart, "half": max(0.0, *(point.loss for line in lines.values() for point in line.values())) / 2}


def _layers(rows: Rows) -> dict[str, AlphaPoint]:
    """Return the points at alpha = 1 of BERT and DistilBERT, or of one model with all and with half of its layers."""
    both, found = ("BERT", "DistilBERT"), _curves(rows)
    if set(both) <= set(found):
        return {family: found[family][1.0] for family in both}
    family = rows[0]["family"]
    if not pick(rows, family=family, layers="half"):
        raise NotRun("needs a model with every other layer sampled")
    names = {f"{family}, all layers": "all", "every other": "half"}
    return {name: curve(rows, family, layers=layers)[1.0] for name, layers in names.items()}


def _fewer(found: dict[str, AlphaPoint]) -> bool:
    whole, fewer = found.values()
    apart = fewer.loss + fewer.half < whole.loss - whole.half
    return fewer.loss <= 0.75 * whole.loss and apart and whole.loss > POINT


def _named(rows: Rows) -> dict[str, AlphaCurve]:
    """Return all curves by their names."""
    families = distinct(rows, "family")
    found = {f"{family}, {rounding}": curve(rows, family, rounding) for family in families for rounding in ROUNDINGS}
    found |= {f"{family}, every other layer": curve(rows, family, layers="half") for family in families}
    return {name: line for name, line in found.items() if line}


def _tables(rows: Rows) -> list[Table]:
    return [_table(task, some) for (task, _), some in grouped(rows, "task", "metric").items()]


def _table(task: str, rows: Rows) -> Table:
    lines = []
    for name, line in _named(rows).items():
        for alpha, point in line.items():
            spread = "" if point.score.high is None else f" ±{100 * point.half:.1f}"
            saved = (point.work.paper, point.work.padding, point.work.real, point.work.weighed)
            lines.append([name, f"{alpha:g}", f"{100 * point.score.mean:.2f}{spread}", f"{100 * point.loss:.2f}",
                          *(f"{value:.2f}x" for value in saved)])  # fmt: skip
    title = f"{task}, {rows[0]['metric']} x 100, and how many times fewer FLOPs"
    return Table(title, ["model", "alpha", "score", "lost", "its count", "padding", "valid", "and A H"], lines)


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.4, 4.6))
    for number, (name, line) in enumerate(_named(rows).items()):
        means, halves = [100 * score for score in _scores(line)], [100 * point.half for point in line.values()]
        left.plot([100 / point.work.real for point in line.values()], means, label=name, **style(number))
        beside = [alpha + 0.012 * (number - 1.5) for alpha in line]  # so that no interval hides another
        right.errorbar(beside, means, halves, capsize=2, label=name, **style(number))
    star: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 11, "color": "#E69F00"}
    for family in distinct(rows, "family"):
        exact = pick(rows, family=family, rounding=WIDE, layers="none")[0]["score"]
        left.plot([100], [100 * exact], zorder=6, **star)
        right.axhline(100 * exact, color=star["color"], linestyle="--", linewidth=1)
    left.plot([], [], label="exact (right: dashed)", **star)
    if rows[0]["task"] == TASK:
        for marker, (family, table) in zip("x+", numbers("mca", "tables 1 and 2").items(), strict=True):
            right.plot((0.2, 0.4, 0.6, 1.0), table[TASK]["accuracy"][1:], label=f"paper: {family}",
                       **{**PAPER, "marker": marker})  # fmt: skip
    score = f"{rows[0]['metric']} x 100"
    left.set(xlabel="FLOPs of the value projection, % of exact, valid tokens", ylabel=score, title="Accuracy and FLOPs")
    right.set(xlabel="alpha (n = 128)", ylabel=score, title="Accuracy and alpha")
    legends((left, right))


STUDY = Study(
    name="mca-tradeoff", title="Accuracy against FLOPs and against alpha, with weights of 16 bits", paper="mca",
    where="figures 1 and 2", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds", "model"), version=2,
    claims=(
        Claim("gradual", "figure 2", "accuracy falls gradually as alpha grows",
              "SST-2: BERT 92.3 to 80.7 from 0.2 to 1", judge=Judge(
                  _curves, _STEADY & _LOWER, _LOWER, lambda found: "; ".join(
                      f"{family} " + ", ".join(f"{alpha:g}: {100 * it.score.mean:.1f}" for alpha, it in line.items())
                      for family, line in found.items()))),
        Claim("minimal", "figure 2", "alpha of 0.4, or even of 0.6, only minimally changes accuracy",
              "SST-2: BERT -0.4 and -1.2, DistilBERT -0.1 and -0.6 points", judge=Judge(
                  lambda rows: {(family, alpha): line[alpha] for family, line in _curves(rows).items()
                                for alpha in (0.4, 0.6)},
                  each("at most 1.5 points lost at both, by the intervals over seeds",
                       lambda point: point.loss + point.half <= 1.5 * POINT),
                  each("by the mean at 0.4", lambda point: point.alpha != 0.4 or point.loss <= 1.5 * POINT),
                  lambda found: "loss " + ", ".join(
                      f"{key[0]} {_shown(point)} at {key[1]:g}" for key, point in found.items()) + " points")),
        Claim("nearly-same", "figure 1", "40 to 60 % fewer FLOPs with nearly the same accuracy", "40 to 60 %",
              judge=_saves(1.4, 1)),
        Claim("small-loss", "figure 1", "as much as 170 % fewer FLOPs with small loss",
              "170 %, read as 2.7 times fewer", judge=_saves(2.7, 3)),
        Claim("tipping", "figure 1", "below a tipping point of FLOPs the loss is noticeable",
              "SST-2, BERT: -1.2 points up to 0.6, -10.6 from there to 1", judge=Judge(
                  _curves, each("above 1 point beyond the intervals, and at least twice as much as up to 0.6", _tips),
                  each("more than up to 0.6", lambda line: _rest(line) > line[0.6].loss), lambda found: "; ".join(
                      f"{family} {100 * line[0.6].loss:.1f} points up to 0.6, {100 * _rest(line):.1f} from there to 1 "
                      f"(intervals ±{100 * line[0.6].half:.1f} and ±{100 * line[1.0].half:.1f})"
                      for family, line in found.items()), of="loss from 0.6 to 1")),
        Claim("quantised", "figure 1", "the trend holds for weights of 16 bits", "FP16 curves beside the others",
              judge=Judge(
                  _rounded, Criterion("at most 1 point at every alpha", lambda found: found["apart"][HALF] <= POINT),
                  Criterion("less than half of the largest loss", lambda found: found["apart"][HALF] < found["half"]),
                  lambda found: "losses differ from float32's by at most " + ", ".join(
                      f"{name} {100 * value:.2f}" for name, value in found["apart"].items()) + " points",
                  of="difference of the losses with weights rounded to float16")),
        Claim("layers", "section 4, figure 2", "fewer layers accumulate less error (a conjecture)",
              "at 1: BERT -11.8, DistilBERT -3.3", judge=Judge(
                  _layers, Criterion("at most 3/4 of what all lose, beyond the intervals", _fewer),
                  Criterion("less", lambda found: (points := list(found.values()))[1].loss < points[0].loss),
                  lambda found: "loss at 1: " + ", ".join(f"{name} {_shown(point)}" for name, point in found.items())
                  + " points", of="loss of half of the layers at alpha = 1 (DistilBERT, or every other layer)")),
    ),
)  # fmt: skip
