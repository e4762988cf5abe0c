"""Scores and savings from the rows of `mca-glue`, and the judges of its claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparing.workbench.estimate import Estimate, estimate
from sparing_lab.papers import numbers
from sparing_lab.studies._mca import ALPHAS, NO_LABELS, POINT, TOPICS, ProjectionWork
from sparing_lab.studies.judges import Criterion, Judge, NotRun, at_least, at_most, each, rises
from sparing_lab.studies.rows import Rows, pick

WORDS = {"matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "accuracy": "accuracy", "f1": "F1"}


class Score(NamedTuple):
    """Which score: a metric of a model on a task."""

    family: str
    task: str
    apart: bool
    metric: str

    def __str__(self) -> str:
        family = "" if self.family == "MiniLM" else f"{self.family} "
        return f"{family}{self.task} {WORDS.get(self.metric, self.metric)}"


def cases(rows: Rows) -> list[Score]:
    """Return all scores that compare with labels."""
    found = [
        Score(row["family"], row["task"], row["apart"], name)
        for row in pick(rows, method="exact") for name in row["scores"] if name != "cosine"
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def score(rows: Rows, case: Score, method: str, alpha: float = 0.0, reading: str = "padded") -> Estimate | None:
    """Return the mean of a score over seeds; None if it was not run."""
    wanted: dict[str, Any] = {"family": case.family, "task": case.task, "apart": case.apart, "method": method}
    if method != "exact":
        wanted |= {"alpha": alpha, "reading": reading}
    found = [row["scores"][case.metric] for row in pick(rows, **wanted)]
    return estimate(found) if found else None


def loss(rows: Rows, case: Score, method: str, alpha: float, reading: str = "padded") -> float:
    """Return the loss of a score against the exact model; NaN counts as a score of 0."""
    exact, found = score(rows, case, "exact"), score(rows, case, method, alpha, reading)
    assert exact is not None
    assert found is not None
    return exact.mean - (0.0 if math.isnan(found.mean) else found.mean)


def works(rows: Rows, alpha: float, reading: str = "padded") -> dict[tuple[str, str], ProjectionWork]:
    """Return the work by model and task, with both texts of a pair read together, as in the paper."""
    found = pick(rows, method="independent", alpha=alpha, reading=reading, seed=0)
    joint = [row for row in found if not row["apart"]]
    return {(row["family"], row["task"]): ProjectionWork(**row["work"]) for row in joint or found}


def paper_line(family: str, task: str, name: str) -> Sequence[float] | None:
    """Return a line of the paper's tables, BERT's if it has no such model; name: a score, or "flops"."""
    tables = numbers("mca", "tables 1 and 2")
    found: Sequence[float] | None = tables.get(family, tables["BERT"]).get(task, {}).get(name)
    return found


def _printed(family: str, task: str, alpha: float) -> float | None:
    found = paper_line(family, task, "flops")
    return None if found is None else found[ALPHAS.index(alpha)]


def _scored(rows: Rows) -> list[Score]:
    if not (found := [case for case in cases(rows) if case.task != TOPICS]):
        raise NotRun(NO_LABELS)
    return found


def mean_reduction(alpha: float) -> Judge:
    """Judge the mean saving over tasks, counted as in the paper."""

    def figures(rows: Rows) -> dict[str, Any]:
        pairs = [(work.paper, _printed(*key, alpha)) for key, work in works(rows, alpha).items()]
        known = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
        if len(known) < 2:
            raise NotRun("needs files of two tasks of GLUE: --data")
        ours, theirs = (sum(column) / len(known) for column in zip(*known, strict=True))
        apart = [abs(math.log(a / b)) for a, b in known]
        return {"ours": ours, "theirs": theirs, "apart": abs(math.log(ours / theirs)), "each": apart, "n": len(known)}

    return Judge(
        figures, Criterion("within 10 % of its own for the same tasks", at_most(math.log(1.1)).of("apart").holds),
        Criterion("most tasks within 25 %", at_most(math.log(1.25)).mostly().of("each").holds),
        "{ours:.2f}x over {n} tasks, of which the paper's tables have {theirs:.2f}x".format_map,
        of="mean over the tasks that are given, counted as the paper does",
    )  # fmt: skip


def _own_shares(rows: Rows) -> dict[str, Any]:
    """Return log(saving on valid tokens) / log(the paper's saving) by task, for the last model, and all work."""
    found = [(task, work) for (_, task), work in works(rows, 0.2).items()]
    shares = {task: math.log(work.real) / math.log(work.paper) if work.paper > 1 else 1.0 for task, work in found}
    return {"shares": shares, "works": found}


own = Judge(
    _own_shares, at_least(0.5).of("shares"), at_least(0.5).once("of one").of("shares"), lambda found: ", ".join(
        f"{task} {w.paper:.1f}x = {w.padding:.1f}x padding x {w.real:.2f}" for task, w in found["works"]),
    of="share of each saving, as a factor (in logarithms), that is left on valid tokens",
)  # fmt: skip


def _between(rows: Rows) -> dict[str, Any]:
    """Return the tasks that save most and least, and the share of the log-ratio between them on valid tokens."""
    found = [(key[1], work) for key, work in works(rows, 0.2).items() if _printed(*key, 0.2) is not None]
    if len(found) < 2:
        raise NotRun("needs files of two tasks of GLUE: --data")
    most, least = (choose(found, key=lambda item: item[1].paper) for choose in (max, min))
    if most[1].paper == least[1].paper:
        raise NotRun("all tasks save the same")
    share = math.log(most[1].real / least[1].real) / math.log(most[1].paper / least[1].paper)
    return {"share": share, "tasks": (most, least)}


def _saved_between(found: dict[str, Any]) -> str:
    (most, a), (least, b) = found["tasks"]
    return f"{most} {a.paper:.1f}x, {least} {b.paper:.1f}x; on valid tokens {a.real:.2f}x and {b.real:.2f}x"


differ = Judge(
    _between, at_least(0.5).of("share"), Criterion("more than a tenth", lambda found: found["share"] > 0.1),
    _saved_between, of="share of the factor between the tasks that save most and least that is there on valid tokens",
)  # fmt: skip


def losses(alpha: float, reading: str = "padded") -> Judge:
    """Judge whether each score loses at most a point."""

    def figures(rows: Rows) -> dict[Score, tuple[float, float]]:
        return {case: _lost(rows, case, "independent", alpha, reading) for case in _scored(rows)}

    n = "n = 128" if reading == "padded" else "n = tokens"
    return Judge(
        figures, each("at most 1 point by its interval over seeds", lambda lost: lost[1] <= POINT),
        each("the mean", lambda lost: lost[0] <= POINT).mostly("in most"), lambda found: "loss " + ", ".join(
            f"{case} {100 * mean:.1f} (at most {100 * high:.1f})" for case, (mean, high) in found.items()) + " points",
        of=f"loss of each score, independent samples, {n}",
    )  # fmt: skip


def _lost(rows: Rows, case: Score, method: str, alpha: float, reading: str = "padded") -> tuple[float, float]:
    """Return the loss: its mean over seeds, and the upper end of its interval."""
    mean, found = loss(rows, case, method, alpha, reading), score(rows, case, method, alpha, reading)
    assert found is not None
    return mean, mean if found.low is None else mean + found.mean - found.low


def _over_alpha(rows: Rows) -> dict[Score, list[Estimate]]:
    found = {case: [score(rows, case, "independent", alpha) for alpha in ALPHAS] for case in _scored(rows)}
    return {case: [each for each in line if each is not None] for case, line in found.items()}


def _lower(line: Sequence[Estimate]) -> bool:
    """Return whether the last estimate is below the first and their intervals do not overlap."""
    first, last = line[0], line[-1]
    return last.mean < first.mean and (first.low is None or last.high is None or last.high < first.low)


_STEADY = each("no step up by more than 1 point", lambda line: rises(room=POINT).holds([-x.mean for x in line]))
falls = Judge(
    _over_alpha, each("alpha = 1 below alpha = 0.2 by more than the intervals", _lower) & _STEADY,
    _STEADY.mostly("in most"), lambda found: ", ".join(
        f"{case} " + " ".join(f"{100 * x.mean:.1f}" for x in line) for case, line in found.items()), of="each score",
)  # fmt: skip
shared = Judge(
    lambda rows: {case: [loss(rows, case, kind, 0.4) for kind in ("shared", "independent")] for case in _scored(rows)},
    each("at most 1 point more in each score", lambda lost: lost[0] - lost[1] <= POINT),
    shows=lambda found: "loss at 0.4, shared against independent: " + ", ".join(
        f"{case} {100 * a:.1f} against {100 * b:.1f}" for case, (a, b) in found.items()) + " points",
    of="what shared samples lose at alpha = 0.4",
)  # fmt: skip


def _compared(rows: Rows) -> dict[str, list[float]]:
    """Return, for "mean" and "drop", their loss minus that of sampling, for all scores, alphas and readings of n."""
    settings = [
        (case, reading, alpha) for case in _scored(rows) for reading in ("padded", "tokens") for alpha in ALPHAS
    ]
    return {
        other: [loss(rows, case, other, alpha, reading) - loss(rows, case, "independent", alpha, reading)
                for case, reading, alpha in settings] for other in ("mean", "drop")
    }  # fmt: skip


baselines = Judge(
    _compared, at_least(0).mostly("in most settings where they are replaced by the mean of all tokens").of("mean")
    & at_least(0).mostly("in most where they are left out").of("drop"),
    at_least(0).mostly("in most where they are left out").of("drop"),
    lambda found: "at least as good as the mean in {} of {} settings, as leaving out in {}".format(
        sum(x >= 0 for x in found["mean"]), len(found["mean"]), sum(x >= 0 for x in found["drop"])),
    of="loss without sampled tokens less the loss with them, over all scores, alphas and both readings of n",
)  # fmt: skip


def _capped(found: list[ProjectionWork]) -> str:
    most = max(found, key=lambda work: work.paper)
    cap = 1 + most.features / (most.padded_pairs / most.slots)
    return f"at 1.0 at most {most.paper:.1f}x without A H, {most.paper_weighed:.2f}x with it; its limit is {cap:.1f}x"


cap = Judge(
    lambda rows: list(works(rows, 1.0).values()),
    each("at least 90 % of each saving is left; by arithmetic none above 1 + d / n can be",
         lambda work: work.paper_weighed / work.paper >= 0.9), shows=_capped, of="with A H counted, n = 128, alpha = 1",
)  # fmt: skip


def _pairs(rows: Rows) -> dict[str, float]:
    """Return, for each task, the absolute log-ratio of the savings of BERT and DistilBERT."""
    at = works(rows, 0.2)
    return {
        task: abs(math.log(work.paper / at["DistilBERT", task].paper)) for (family, task), work in at.items()
        if family == "BERT" and ("DistilBERT", task) in at
    }  # fmt: skip


distil = Judge(
    _pairs, Criterion("at most 15 %", at_most(math.log(1.15)).holds), Criterion("50 %", at_most(math.log(1.5)).holds),
    lambda found: f"at most {math.exp(max(found.values())) - 1:.0%} apart",
    of="difference at alpha = 0.2 in each task", needs="needs the tuned weights of --scale paper",
)  # fmt: skip
