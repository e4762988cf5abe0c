"""Monte-Carlo attention: accuracy against FLOPs and alpha, with weights of 16 bits, and in half of the layers."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.workbench.estimate import Estimate, estimate
from sparing_lab.report.figure import PAPER, panels, style
from sparing_lab.studies._mca import POINT, TOPICS, Work, documents_of, model_of, problem, reads_out, train_of
from sparing_lab.studies._mca_tables import PAPER_TABLES, WEIGHTS
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import glue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = {"small": (0.1, 0.2, 0.4, 0.6, 1.0), "paper": tuple(tenths / 10 for tenths in range(1, 11))}
SEEDS = {"small": 3, "paper": 128}
MOST = 96  #: documents at small scale
WIDE, HALF = "float32", "float16"
ROUNDINGS = (WIDE, HALF, "bfloat16")
TASK = "SST-2"  #: the paper's


class Point(NamedTuple):
    """A curve's, at one alpha."""

    alpha: float
    score: Estimate
    loss: float  #: against the exact model with the same weights
    work: Work

    @property
    def half(self) -> float:
        """How far the interval over seeds reaches."""
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
    found: list[dict[str, Any]] = []

    def add(family: str, model: str, task: str, *, apart: bool = False) -> None:
        data = documents_of(task, settings.data, MOST if settings.small else None)
        base = {"family": family, "model": model, "task": task, "apart": apart, "data": data.fingerprint}
        if settings.model is not None:
            base["weights"] = model_of(settings.model).fingerprint
        found.append({**base, "documents": len(data)})

    if settings.model is not None and model_of(settings.model).kind == "classifier":
        subject = model_of(settings.model)
        task = glue.task_of(subject.name, subject.model.config, given or list(glue.TASKS.values()))
        add(subject.name, settings.model, task.name)
    elif settings.scale == "paper" and settings.model is None:
        for family, ids in WEIGHTS.items():
            add(family, ids[TASK], TASK)
    else:
        name = settings.model or "minilm"
        read = reads_out(TASK, settings.data) and glue.TASKS[TASK] in given
        if not read:
            settings.refuse_unused(f"{TASK}, dev.tsv and train.tsv: {glue.WANTED}")
        add("MiniLM" if settings.model is None else model_of(name).name, name, TASK if read else TOPICS, apart=not read)
        if read:
            assert settings.data is not None
            found[-1]["train"] = train_of(TASK, settings.data).fingerprint
    return found


def _measure(settings: Settings, cell: Cell) -> Row:
    most = cell["documents"] if settings.small else None
    given = problem(
        cell["model"], cell["task"], settings.data, most, apart=cell["apart"], rounding=cell["rounding"]
    )  # fmt: skip
    if cell["layers"] == "none":
        scores, work = given.run(None, padded=False, seed=0)
    else:
        method = MonteCarlo(alpha=cell["alpha"])
        scores, work = given.run(method, padded=True, seed=cell["seed"], half=cell["layers"] == "half")
    name = given.names[0]
    return {"metric": name, "score": scores[name], "work": None if work is None else asdict(work)}


def families(rows: Rows) -> list[str]:
    """The models, in their order."""
    return list(dict.fromkeys(row["family"] for row in rows))


def curve(rows: Rows, family: str, rounding: str = WIDE, layers: str = "all") -> list[Point]:
    """By alpha; scores are means over seeds."""
    mine = pick(rows, family=family, rounding=rounding)
    (exact,) = (row["score"] for row in pick(mine, layers="none"))
    found = []
    for alpha in sorted({row["alpha"] for row in pick(mine, layers=layers)}):
        some = pick(mine, layers=layers, alpha=alpha)
        score = estimate([row["score"] for row in some])
        found.append(Point(alpha, score, exact - score.mean, Work(**some[0]["work"])))
    return found


def at(points: list[Point], alpha: float) -> Point:
    """The one of that alpha."""
    return next(point for point in points if point.alpha == alpha)


def _gradual(rows: Rows) -> Judgement:
    down, steady, shown = [], [], []
    for family in families(rows):
        points = curve(rows, family)
        steady.append(all(b.score.mean <= a.score.mean + POINT for a, b in pairwise(points)))
        down.append(points[-1].score.mean < points[0].score.mean)
        shown.append(f"{family} " + ", ".join(f"{point.alpha:g}: {100 * point.score.mean:.1f}" for point in points))
    return judged(all(steady) and all(down), all(down), ours="; ".join(shown))


def _minimal(rows: Rows) -> Judgement:
    lost = {(family, alpha): at(curve(rows, family), alpha) for family in families(rows) for alpha in (0.4, 0.6)}
    shown = ", ".join(
        f"{family} {100 * point.loss:.1f} ±{100 * point.half:.1f} at {alpha:g}"
        for (family, alpha), point in lost.items()
    )
    sure = max(point.loss + point.half for point in lost.values()) <= 1.5 * POINT
    likely = max(point.loss for (_, alpha), point in lost.items() if alpha == 0.4) <= 1.5 * POINT
    return judged(sure, likely, ours=f"loss {shown} points")


def _saves(times: float, points_lost: float) -> Any:
    def judge(rows: Rows) -> Judgement:
        honest, padded, shown = [], [], []
        for family in families(rows):
            fine = [point for point in curve(rows, family) if point.loss + point.half <= points_lost * POINT]
            honest.append(max((point.work.real for point in fine), default=1.0))
            padded.append(max((point.work.paper for point in fine), default=1.0))
            alone = curve(rows, family)[0].work.padding
            shown.append(f"{family} {honest[-1]:.2f}x ({padded[-1]:.1f}x with padding, which alone is {alone:.1f}x)")
        limit = f"with at most {points_lost:g} points lost, by the interval over seeds: "
        return judged(min(honest) >= times, min(padded) >= times, ours=limit + ", ".join(shown))

    return judge


def _tipping(rows: Rows) -> Judgement:
    sharp, some, shown = [], [], []
    for family in families(rows):
        points = curve(rows, family)
        first, last = at(points, 0.6), at(points, 1.0)
        rest = last.loss - first.loss
        sharp.append(rest >= 2 * first.loss and rest - last.half - first.half > POINT)
        some.append(rest > first.loss)
        shown.append(f"{family} {100 * first.loss:.1f} points up to 0.6, {100 * rest:.1f} from there to 1")
        shown[-1] += f" (intervals ±{100 * first.half:.1f} and ±{100 * last.half:.1f})"
    return judged(all(sharp), all(some), ours="; ".join(shown))


def _quantised(rows: Rows) -> Judgement:
    worst = dict.fromkeys(ROUNDINGS[1:], 0.0)
    moved = 0.0
    for family in families(rows):
        wide = curve(rows, family)
        moved = max(moved, *(point.loss for point in wide))
        for rounding in worst:
            off = [abs(a.loss - b.loss) for a, b in zip(wide, curve(rows, family, rounding), strict=True)]
            worst[rounding] = max(worst[rounding], *off)
    shown = ", ".join(f"{name} {100 * value:.2f}" for name, value in worst.items())
    text = f"losses differ from float32's by at most {shown} points"
    return judged(worst[HALF] <= POINT, worst[HALF] < moved / 2, ours=text)


def _layers(rows: Rows) -> Judgement:
    if {"BERT", "DistilBERT"} <= set(families(rows)):
        whole, fewer = (at(curve(rows, family), 1.0) for family in ("BERT", "DistilBERT"))
        names = "BERT", "DistilBERT"
    else:
        family = families(rows)[0]
        if not pick(rows, family=family, layers="half"):
            return not_run("needs a model with every other layer sampled")
        whole, fewer = (at(curve(rows, family, layers=layers), 1.0) for layers in ("all", "half"))
        names = f"{family}, all layers", "every other"
    shown = (
        f"{name} {100 * point.loss:.1f} ±{100 * point.half:.1f}"
        for name, point in zip(names, (whole, fewer), strict=True)
    )
    sure = fewer.loss <= 0.75 * whole.loss and fewer.loss + fewer.half < whole.loss - whole.half
    return judged(sure and whole.loss > POINT, fewer.loss < whole.loss, ours=f"loss at 1: {', '.join(shown)} points")


def _named(rows: Rows) -> list[tuple[str, list[Point]]]:
    """All curves with their names."""
    found = [
        (f"{family}, {rounding}", curve(rows, family, rounding)) for family in families(rows) for rounding in ROUNDINGS
    ]
    found += [(f"{family}, every other layer", curve(rows, family, layers="half")) for family in families(rows)]
    return [(name, points) for name, points in found if points]


def _tables(rows: Rows) -> list[Table]:
    lines = []
    for name, points in _named(rows):
        for point in points:
            spread = "" if point.score.high is None else f" ±{100 * (point.score.high - point.score.mean):.1f}"
            saved = (point.work.paper, point.work.padding, point.work.real, point.work.weighed)
            lines.append([
                name, f"{point.alpha:g}", f"{100 * point.score.mean:.2f}{spread}", f"{100 * point.loss:.2f}",
                *(f"{value:.2f}x" for value in saved),
            ])  # fmt: skip
    row = rows[0]
    title = f"{row['task']}, {row['metric']} x 100, and how many times fewer FLOPs"
    names = ["model", "alpha", "score", "lost", "its count", "padding", "valid", "and A H"]
    return [Table(title, names, lines)]


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2, size=(5.4, 4.6))
    score = f"{rows[0]['metric']} x 100"
    for number, (name, points) in enumerate(_named(rows)):
        means = [100 * point.score.mean for point in points]
        halves = [0.0 if p.score.high is None else 100 * (p.score.high - p.score.mean) for p in points]
        left.plot([100 / point.work.real for point in points], means, label=name, **style(number))
        beside = [point.alpha + 0.012 * (number - 1.5) for point in points]  # so that no interval hides another
        right.errorbar(beside, means, halves, capsize=2, label=name, **style(number))
    for family in families(rows):
        exact = pick(rows, family=family, rounding=WIDE, layers="none")[0]["score"]
        left.plot([100], [100 * exact], linestyle="none", marker="*", markersize=11, color="#E69F00", zorder=6)
        right.axhline(100 * exact, color="#E69F00", linestyle="--", linewidth=1)
    left.plot([], [], linestyle="none", marker="*", markersize=11, color="#E69F00", label="exact (right: dashed)")
    for number, (family, table) in enumerate(PAPER_TABLES.items()):
        if rows[0]["task"] == TASK:
            marks = {**PAPER, "marker": "x" if number == 0 else "+"}
            right.plot((0.2, 0.4, 0.6, 1.0), table[TASK].results["accuracy"][1:], label=f"paper: {family}", **marks)
    left.set(
        xlabel="FLOPs of the value projection, % of exact, valid tokens", ylabel=score, title="Accuracy and FLOPs",
    )  # fmt: skip
    right.set(xlabel="alpha (n = 128)", ylabel=score, title="Accuracy and alpha")
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


STUDY = Study(
    name="mca-tradeoff",
    title="Accuracy against FLOPs and against alpha, with weights of 16 bits",
    paper="mca",
    where="figures 1 and 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds", "model"),
    claims=(
        Claim(
            "gradual", "figure 2", "accuracy falls gradually as alpha grows", "SST-2: BERT 92.3 to 80.7 from 0.2 to 1",
            "no step up by more than 1 point, and lower at the largest alpha than at the smallest; same shape: the "
            "latter", _gradual,
        ),
        Claim(
            "minimal", "figure 2", "alpha of 0.4, or even of 0.6, only minimally changes accuracy",
            "SST-2: BERT -0.4 and -1.2, DistilBERT -0.1 and -0.6 points",
            "at most 1.5 points lost at both, by the intervals over seeds; same shape: by the mean at 0.4", _minimal,
        ),
        Claim(
            "nearly-same", "figure 1", "40 to 60 % fewer FLOPs with nearly the same accuracy", "40 to 60 %",
            "some alpha saves 1.4 times on valid tokens and surely loses at most 1 point; same shape: only where "
            "padding counts as saved", _saves(1.4, 1),
        ),
        Claim(
            "small-loss", "figure 1", "as much as 170 % fewer FLOPs with small loss", "170 %, read as 2.7 times fewer",
            "some alpha saves 2.7 times on valid tokens and surely loses at most 3 points; same shape: only where "
            "padding counts as saved", _saves(2.7, 3),
        ),
        Claim(
            "tipping", "figure 1", "below a tipping point of FLOPs the loss is noticeable",
            "SST-2, BERT: -1.2 points up to 0.6, -10.6 from there to 1",
            "from 0.6 to 1 more than 1 point is lost, beyond the intervals, and at least twice as much as up to 0.6; "
            "same shape: more than up to 0.6", _tipping,
        ),
        Claim(
            "quantised", "figure 1", "the trend holds for weights of 16 bits", "FP16 curves beside the others",
            "weights rounded to float16: at every alpha the loss differs by at most 1 point; same shape: by less than "
            "half of the largest loss", _quantised,
        ),
        Claim(
            "layers", "section 4, figure 2", "fewer layers accumulate less error (a conjecture)",
            "at 1: BERT -11.8, DistilBERT -3.3",
            "at alpha = 1, half of the layers (DistilBERT, or every other layer of a model) lose at most 3/4 of what "
            "all lose, beyond the intervals; same shape: less", _layers,
        ),
    ),
)  # fmt: skip
