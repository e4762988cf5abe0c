"""What the rows of `mca-glue` say, and what they say to its claims."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from sparing.workbench.estimate import Estimate, estimate
from sparing_lab.studies._mca import ALPHAS, POINT, Work
from sparing_lab.studies._mca_tables import PAPER_TABLES
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Rows, pick
from sparing_lab.studies.study import judged, not_run

WORDS = {"matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "accuracy": "accuracy", "f1": "F1"}


class Case(NamedTuple):
    """A score of a model on a task."""

    family: str
    task: str
    apart: bool
    metric: str

    def __str__(self) -> str:
        family = "" if self.family == "MiniLM" else f"{self.family} "
        return f"{family}{self.task} {WORDS.get(self.metric, self.metric)}"


def cases(rows: Rows) -> list[Case]:
    """All scores against labels."""
    found = [
        Case(row["family"], row["task"], row["apart"], name)
        for row in pick(rows, method="exact") for name in row["scores"] if name != "cosine"
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def score(rows: Rows, case: Case, method: str, alpha: float = 0.0, reading: str = "padded") -> Estimate | None:
    """Its mean over seeds; None where it was not run."""
    wanted: dict[str, Any] = {"family": case.family, "task": case.task, "apart": case.apart, "method": method}
    if method != "exact":
        wanted |= {"alpha": alpha, "reading": reading}
    found = [row["scores"][case.metric] for row in pick(rows, **wanted)]
    return estimate(found) if found else None


def loss(rows: Rows, case: Case, method: str, alpha: float, reading: str = "padded") -> float:
    """Of the score, against the exact model; what is no number has lost everything."""
    exact, found = score(rows, case, "exact"), score(rows, case, method, alpha, reading)
    assert exact is not None
    assert found is not None
    return exact.mean - (0.0 if math.isnan(found.mean) else found.mean)


def works(rows: Rows, alpha: float, reading: str = "padded") -> dict[tuple[str, str], Work]:
    """By model and task, with pairs read as one, as the paper's models read them."""
    found = pick(rows, method="independent", alpha=alpha, reading=reading, seed=0)
    joint = [row for row in found if not row["apart"]]
    return {(row["family"], row["task"]): Work(**row["work"]) for row in joint or found}


def printed(family: str, task: str, alpha: float) -> float | None:
    """The paper's FLOPs reduction, of the model that is nearest to this one."""
    line = PAPER_TABLES.get(family, PAPER_TABLES["BERT"]).get(task)
    return None if line is None else line.flops[ALPHAS.index(alpha)]


# What the rows say to the claims.


def mean_reduction(alpha: float) -> Any:
    """The mean over tasks of what is saved, counted as the paper does."""

    def judge(rows: Rows) -> Judgement:
        pairs = [(work.paper, printed(*key, alpha), key) for key, work in works(rows, alpha).items()]
        known = [(ours, theirs, key) for ours, theirs, key in pairs if theirs is not None]
        if len(known) < 2:
            return not_run("needs files of two tasks of GLUE: --data")
        ours, theirs = (sum(column) / len(known) for column in list(zip(*known, strict=True))[:2])
        near = [abs(math.log(a / b)) <= math.log(1.25) for a, b, _ in known]
        text = f"{ours:.2f}x over {len(known)} tasks, of which the paper's tables have {theirs:.2f}x"
        return judged(abs(math.log(ours / theirs)) <= math.log(1.1), 2 * sum(near) > len(near), ours=text)

    return judge


def own(rows: Rows) -> Judgement:
    """Is it the method that saves, or the padding?"""
    found = works(rows, 0.2)
    shares = {
        task: math.log(work.real) / math.log(work.paper) if work.paper > 1 else 1.0 for (_, task), work in found.items()
    }
    shown = ", ".join(
        f"{task} {w.paper:.1f}x = {w.padding:.1f}x padding x {w.real:.2f}" for (_, task), w in found.items()
    )
    return judged(min(shares.values()) >= 0.5, max(shares.values()) >= 0.5, ours=shown)


def differ(rows: Rows) -> Judgement:
    """Do tasks still differ on valid tokens?"""
    found = {key: work for key, work in works(rows, 0.2).items() if printed(*key, 0.2) is not None}
    if len(found) < 2:
        return not_run("needs files of two tasks of GLUE: --data")
    most, least = (pick_by(found, key=lambda w: w.paper) for pick_by in (_largest, _least))
    a, b = found[most], found[least]
    if a.paper == b.paper:
        return not_run("all tasks save the same")
    share = math.log(a.real / b.real) / math.log(a.paper / b.paper)
    text = f"{most[1]} {a.paper:.1f}x, {least[1]} {b.paper:.1f}x; on valid tokens {a.real:.2f}x and {b.real:.2f}x"
    return judged(share >= 0.5, share > 0.1, ours=text)


def _largest(found: dict[tuple[str, str], Work], key: Any) -> tuple[str, str]:
    return max(found, key=lambda name: key(found[name]))


def _least(found: dict[tuple[str, str], Work], key: Any) -> tuple[str, str]:
    return min(found, key=lambda name: key(found[name]))


def losses(alpha: float, reading: str = "padded") -> Any:
    """Is at most a point of each score lost?"""

    def judge(rows: Rows) -> Judgement:
        lost = {case: interval_of(rows, case, "independent", alpha, reading) for case in cases(rows)}
        if not lost:
            return not_run("needs a task with a score")
        sure = [high <= POINT for _, high in lost.values()]
        fine = [mean <= POINT for mean, _ in lost.values()]
        return judged(all(sure), 2 * sum(fine) > len(fine), ours=_points(lost.items()))

    return judge


def interval_of(rows: Rows, case: Case, method: str, alpha: float, reading: str = "padded") -> tuple[float, float]:
    """What is lost: the mean over seeds, and the most by its interval."""
    mean, found = loss(rows, case, method, alpha, reading), score(rows, case, method, alpha, reading)
    assert found is not None
    return mean, mean if found.low is None else mean + found.mean - found.low


def _points(lost: Iterable[tuple[Case, tuple[float, float]]]) -> str:
    shown = (f"{case} {100 * mean:.1f} (at most {100 * high:.1f})" for case, (mean, high) in lost)
    return "loss " + ", ".join(shown) + " points"


def falls(rows: Rows) -> Judgement:
    """Do scores fall as alpha grows?"""
    falls, steady, shown = [], [], []
    for case in cases(rows):
        means = [score(rows, case, "independent", alpha) for alpha in ALPHAS]
        assert all(means)
        first, last = means[0], means[-1]
        assert first is not None
        assert last is not None
        falls.append(last.mean < first.mean and (first.low is None or last.high is None or last.high < first.low))
        steady.append(all(b.mean <= a.mean + POINT for a, b in pairwise(means) if a is not None and b is not None))
        shown.append(f"{case} " + " ".join(f"{100 * mean.mean:.1f}" for mean in means if mean is not None))
    if not falls:
        return not_run("needs a task with a score")
    return judged(all(falls) and all(steady), 2 * sum(steady) > len(steady), ours=", ".join(shown))


def shared(rows: Rows) -> Judgement:
    """Is one list of samples as good as a list for each token?"""
    worse = {case: loss(rows, case, "shared", 0.4) - loss(rows, case, "independent", 0.4) for case in cases(rows)}
    if not worse:
        return not_run("needs a task with a score")
    both = ", ".join(
        f"{case} {100 * loss(rows, case, 'shared', 0.4):.1f} against {100 * loss(rows, case, 'independent', 0.4):.1f}"
        for case in worse
    )
    return judged(max(worse.values()) <= POINT, ours=f"loss at 0.4, shared against independent: {both} points")


def baselines(rows: Rows) -> Judgement:
    """Is sampling better than no sampling, for the same work?"""
    found: dict[str, list[bool]] = {"mean": [], "drop": []}
    for case in cases(rows):
        for reading in ("padded", "tokens"):
            for alpha in ALPHAS:
                own = loss(rows, case, "independent", alpha, reading)
                for name, wins in found.items():
                    wins.append(own <= loss(rows, case, name, alpha, reading))
    if not found["mean"]:
        return not_run("needs a task with a score")
    wins, drops = found["mean"], found["drop"]
    text = f"at least as good as the mean in {sum(wins)} of {len(wins)} settings, as leaving out in {sum(drops)}"
    return judged(2 * sum(wins) > len(wins) and 2 * sum(drops) > len(drops), 2 * sum(drops) > len(drops), ours=text)


def cap(rows: Rows) -> Judgement:
    """What is left of the saving where A H is counted?"""
    found = works(rows, 1.0)
    with_ah = [work.paper_weighed / work.paper for work in found.values()]
    most = max(found.values(), key=lambda work: work.paper)
    cap = 1 + most.features / (most.padded_pairs / most.slots)
    text = f"at 1.0 at most {most.paper:.1f}x without A H, {most.paper_weighed:.2f}x with it; its limit is {cap:.1f}x"
    return judged(min(with_ah) >= 0.9, ours=text)


def distil(rows: Rows) -> Judgement:
    """Is it the same for DistilBERT?"""
    at = works(rows, 0.2)
    both = [(work, at["DistilBERT", task]) for (family, task), work in at.items()
            if family == "BERT" and ("DistilBERT", task) in at]  # fmt: skip
    if not both:
        return not_run("needs the tuned weights of --scale paper")
    apart = max(abs(math.log(a.paper / b.paper)) for a, b in both)
    return judged(apart <= math.log(1.15), apart <= math.log(1.5), ours=f"at most {math.exp(apart) - 1:.0%} apart")
