"""Monte-Carlo attention beside a window: long documents, a window of 256 tokens and a global first token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparing.documents import Documents, default
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.models import Subject, load
from sparing.workbench.outputs import digest
from sparing.workbench.prepare import extended
from sparing_lab.figure import PAPER, Figure, line, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._mca import ALPHAS, METHODS, TOPICS, ProjectionWork
from sparing_lab.studies._mca_longformer import compare, run
from sparing_lab.studies.judges import Criterion, Judge, at_least, each, listed, rises
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, grouped, mean, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import articles
from sparing_lab.tasks.longformer import from_bert

WINDOW = 256
MOST, MOST_TOPICS = 6, 3  #: number of documents at small scale, and of help topics, which are long
TOKENS = 768  #: tokens of a document that are read at small scale
LONGEST = 4096  #: tokens that the paper's model reads
SEEDS = {"small": 1, "paper": 128}

REDUCTIONS = numbers("mca", "table 3")["flops"]
COUNTS = ("length", "visible")  #: meanings of n in eq. 9: the document's length, or the keys that a token sees


def _cells(settings: Settings) -> list[Cell]:
    if settings.model is None and not settings.small:
        raise ValueError(
            "model: the paper tuned allenai/longformer-base-4096 on each dataset itself, and there are no public "
            "weights; name a folder with such a classifier: --model FOLDER, ending with imdb, hyperpartisan or aapd"
        )
    seeds = range(settings.seeds or SEEDS[settings.scale])
    cells: list[Cell] = []
    for base in _tasks(settings):
        plan = [("window", "length", "independent"), *(("window", "visible", method) for method in METHODS)]
        if settings.model is None:
            plan.append(("full", "length", "independent"))
        cells += [
            {**base, "attention": attention, "counts": counts, "method": method, "alpha": alpha, "seed": seed}
            for attention, counts, method in plan for alpha in ALPHAS
            for seed in (seeds if method in ("independent", "shared") else (0,))
        ]  # fmt: skip
    return cells


def _tasks(settings: Settings) -> list[dict[str, Any]]:
    """Return what to read: the collections in the data folder, or the help topics; for a classifier, its own one."""
    names = [] if settings.data is None else [each.title for each in articles.given(settings.data)]
    weights = {}
    if settings.model is not None:
        subject = _subject(settings.model, "window")
        weights = {"weights": subject.fingerprint}
        if subject.kind == "classifier":
            names = [_own(subject.name, names)]
    if not names:
        settings.refuse_unused("imdb, hyperpartisan or aapd: " + articles.COLLECTIONS["imdb"].form)
    tokens = TOKENS if settings.small else LONGEST
    found = []
    for name in names or [TOPICS]:
        most = MOST_TOPICS if name == TOPICS else MOST
        given = _documents(name, settings.data, most if settings.small else None)
        found.append({
            "task": name, "model": settings.model or "minilm", **weights, "documents": len(given), "tokens": tokens,
            "data": given.fingerprint,
        })  # fmt: skip
    return found


def _own(name: str, names: Sequence[str]) -> str:
    """Return the collection that a classifier was made for, by the end of its name."""
    for known in articles.COLLECTIONS.values():
        if name.lower().endswith((known.name, known.title.lower())):
            return known.title
    if len(names) == 1:
        return names[0]
    raise ValueError(
        f"model: {name} does not say which dataset it is for; let its folder's name end with imdb, hyperpartisan or "
        "aapd"
    )


@functools.lru_cache(maxsize=8)
def _documents(name: str, data: Path | None, most: int | None) -> Documents:
    """Return the documents; if only some are wanted, they are evenly spread over the file, of whatever length."""
    if name == TOPICS:
        given = default()
    else:
        (collection,) = [each for each in articles.COLLECTIONS.values() if each.title == name]
        given = articles.load(collection, data)
    if most is None or most >= len(given):
        return given
    numbers = [number * len(given) // most for number in range(most)]
    labels = None if given.labels is None else tuple(given.labels[number] for number in numbers)
    return Documents(given.name, tuple(given.texts[number] for number in numbers), labels)


@functools.lru_cache(maxsize=2)
def _subject(name: str, attention: str) -> Subject:
    found = load(name)
    if name == "minilm":
        return from_bert(found, window=WINDOW, length=LONGEST) if attention == "window" else extended(found, LONGEST)
    if found.model.config.model_type != "longformer":
        raise ValueError(
            f"model: {name} is a {found.model.config.model_type} model; mca-longformer takes a Longformer classifier"
        )
    return found


@functools.lru_cache(maxsize=8)
def _exact(model: str, attention: str, task: str, data: Path | None, most: int | None, tokens: int) -> Any:
    """Return the tokens of the documents and the exact model's answers."""
    subject = _subject(model, attention)
    rows, _ = subject.encode(_documents(task, data, most).texts, tokens)
    with torch.no_grad():
        return rows, [digest(subject, ids, subject.run(ids)) for ids in rows]


def _measure(settings: Settings, cell: Cell) -> Row:
    most = cell["documents"] if settings.small else None
    where = (cell["model"], cell["attention"], cell["task"], settings.data, most, cell["tokens"])
    rows, exact = _exact(*where)
    subject = _subject(cell["model"], cell["attention"])
    method = MonteCarlo(alpha=cell["alpha"], **METHODS[cell["method"]])
    found, work = run(subject, rows, method, visible=cell["counts"] == "visible", seed=cell["seed"])
    labels = _documents(cell["task"], settings.data, most).labels
    length = sum(map(len, rows)) / len(rows)
    parts = {name: asdict(part) for name, part in work.items()}
    return {**compare(subject.kind, exact, found, labels), **parts, "length": length}


def _saved(rows: Rows, kind: str, values: str = "all") -> float:
    """Return a reduction of `ProjectionWork`, averaged over seeds."""
    return mean(rows, lambda row: getattr(ProjectionWork(**row[values]), kind))


def _lines(rows: Rows, counts: str = "length", attention: str = "window", method: str = "independent") -> Any:
    """Return the rows of all seeds, by task and alpha."""
    mine = pick(rows, attention=attention, counts=counts, method=method)
    return {task: {alpha: pick(some, alpha=alpha) for alpha in ALPHAS} for task, some in grouped(mine, "task").items()}


def _reductions(rows: Rows, counts: str = "length", attention: str = "window") -> dict[str, dict[float, float]]:
    """Return the reductions by task and alpha, counted as in the paper."""
    lines = _lines(rows, counts, attention)
    return {task: {alpha: _saved(seeds, "paper") for alpha, seeds in some.items()} for task, some in lines.items()}


def _loss(rows: Rows) -> float:
    """Return the loss of accuracy (or F1) of a classifier, or else 1 - cosine."""
    if "scores" not in rows[0]:
        return mean(rows, "change")
    name = "accuracy" if "accuracy" in rows[0]["scores"] else "f1"
    return mean(rows, lambda row: row["scores"][f"exact_{name}"] - row["scores"][name])


def _losses(rows: Rows) -> dict[str, list[float]]:
    """Return the losses over alpha, for each task."""
    return {task: [_loss(seeds) for seeds in some.values()] for task, some in _lines(rows).items()}


def _beside_full(rows: Rows) -> dict[str, float]:
    """Return, for each meaning of n, the least ratio of the reduction on valid tokens to that with full attention."""
    full = _lines(rows, attention="full")
    if not full:
        return {}
    found = {}
    for counts in COUNTS:
        windowed = _lines(rows, counts)
        found[counts] = min(
            _saved(windowed[task][alpha], "real", "local") / _saved(seeds, "real", "local")
            for task, some in full.items() for alpha, seeds in some.items()
        )  # fmt: skip
    return found


def _quarter(found: dict[str, dict[float, float]]) -> bool:
    pairs = [pair for task, some in found.items() for pair in zip(some.values(), REDUCTIONS[task], strict=True)]
    return all(0.75 <= ours / paper <= 1.33 for ours, paper in pairs)


def _growth(found: dict[str, dict[float, float]]) -> bool:
    growths = [(some[1.0] / some[0.2]) / (REDUCTIONS[task][-1] / REDUCTIONS[task][0]) for task, some in found.items()]
    return all(0.5 <= growth <= 2 for growth in growths)


def _first_loss(rows: Rows) -> dict[str, Any]:
    scored = all("scores" in row for row in pick(rows, attention="window"))
    return {"scored": scored, "losses": {task: some[0] for task, some in _losses(rows).items()}}


def _kept(found: dict[str, Any]) -> str:
    if found["scored"]:
        return ", ".join(f"{task} {100 * loss:+.2f}" for task, loss in found["losses"].items())
    cosines = {task: 1 - loss for task, loss in found["losses"].items()}
    return f"no classifier; cosine of the embedding {listed(cosines, '{key} {value:.4f}')}"


def _small(found: dict[str, Any]) -> bool:
    return max(found["losses"].values()) <= 0.01


def _tables(rows: Rows) -> list[Table]:
    names = {("window", "length"): "window", ("window", "visible"): "seen", ("full", "length"): "full"}
    columns = ["attention", "method", "alpha", "r/d", "paper's", "padding", "values", "with AH", "loss",
               "same next", "Table 3"]  # fmt: skip
    tables = []
    for task, mine in grouped(rows, "task").items():
        lines = []
        for (attention, counts, method), plan in grouped(mine, "attention", "counts", "method").items():
            printed = task in REDUCTIONS and (attention, counts, method) == ("window", "length", "independent")
            for number, (alpha, some) in enumerate((alpha, pick(plan, alpha=alpha)) for alpha in ALPHAS):
                lines.append([
                    names[attention, counts], "own" if method == "independent" else method, f"{alpha:g}",
                    f"{1 / _saved(some, 'real', 'local'):.3f}",
                    *(f"{_saved(some, kind):.2f}x" for kind in ("paper", "padding")),
                    *(f"{_saved(some, kind, 'local'):.2f}x" for kind in ("real", "weighed")), f"{_loss(some):.4f}",
                    f"{mean(some, 'neighbours'):.0%}" if "neighbours" in some[0] else "",
                    f"{REDUCTIONS[task][number]:.2f}x" if printed else "",
                ])  # fmt: skip
        first = mine[0]
        title = (
            f"{task}: {first['documents']} documents of up to {first['tokens']} tokens, of {first['length']:.0f} on "
            f"average (the paper's: AAPD 167, HND 705, IMDB 300). seen: a window, and n of eq. 9 "
            "is the number of keys that a token sees. own, shared: lists of samples. paper's, padding: all values; "
            "r/d, values, with AH: without those of the global token. same next: documents with the same nearest one. "
            f"loss: {'of the score' if 'scores' in first else '1 - cosine'}"
        )
        tables.append(Table(title, columns, lines))
    return tables


def _draw(rows: Rows, figure: Figure) -> None:
    tasks = distinct(rows, "task")
    axes = panels(figure, len(tasks), 2, size=(5.2, 4.0))
    for left, right, task in zip(axes[::2], axes[1::2], tasks, strict=True):
        line(left, _reductions(rows)[task], "n: length of the document", 0)
        alone = {alpha: _saved(seeds, "real", "local") for alpha, seeds in _lines(rows)[task].items()}
        line(left, alone, "the same, without the global token's values", 4, linestyle="--")
        line(left, _reductions(rows, "visible")[task], "n: keys that a token sees", 1)
        if full := _reductions(rows, attention="full").get(task):
            line(left, full, "full attention", 2)
        for title, shade in {"AAPD": "0.55", "HND": "black", "IMDB": "0.35"}.items():
            if task == title or task not in REDUCTIONS:
                colour = "black" if task == title else shade
                left.plot(ALPHAS, REDUCTIONS[title], label=f"paper, {title}", **{**PAPER, "color": colour})
        left.set(xlabel="alpha", ylabel="FLOPs of the value projection, exact / sampled", yscale="log",
                 title=f"{task}: reduction, counted as in the paper")  # fmt: skip
        left.set_yticks([1, 2, 4, 8, 16, 32], ["1x", "2x", "4x", "8x", "16x", "32x"])
        left.minorticks_off()
        left.set_ylim(0.9, 120)
        left.legend(loc="upper left")
        for number, method in enumerate(METHODS):
            seeds = _lines(rows, "visible", method=method)[task].values()
            points = [(1 / _saved(some, "real", "local"), max(_loss(some), 1e-6)) for some in seeds]
            right.plot(*zip(*points, strict=True), label=method, **style(number))
        scored = "scores" in pick(rows, task=task)[0]
        right.set(xlabel="work of the value projection, r / d of valid tokens", yscale="log",
                  ylabel="loss of accuracy or F1" if scored else "1 - cosine of the embedding",
                  title=f"{task}: what the same work buys")  # fmt: skip
        right.legend(loc="best")


_VISIBLE = "where n is the number of keys that a token sees"
STUDY = Study(
    name="mca-longformer", title="Sampled values beside a window of 256 tokens and a global first token", paper="mca",
    where="Table 3", cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("data", "seeds", "model"),
    version=2,
    claims=(
        Claim("grows", "Table 3", "the reduction of FLOPs grows with alpha", "IMDB 3.67x to 11.30x", judge=Judge(
            lambda rows: {n: _reductions(rows, n) for n in COUNTS},
            each("rises at each step of alpha for both meanings of n", rises().holds),
            shows=lambda found: ", ".join(
                f"{task} {some[0.2]:.2f}x to {some[1.0]:.2f}x" for task, some in found["length"].items()),
            of="reduction in all data")),
        Claim("three", "section 4", "at least 3 times fewer FLOPs in all data at alpha = 0.2", "3.44x, 5.32x, 3.67x",
              judge=Judge(
                  lambda rows: {n: min(some[0.2] for some in _reductions(rows, n).values()) for n in COUNTS},
                  at_least(3, "x").of("length", "where n of eq. 9 is the length of the document"),
                  at_least(3, "x").of("visible", _VISIBLE),
                  "at least {length:.2f}x; {visible:.2f}x with the keys that a token sees for n".format_map,
                  of="least reduction in all data, counted as in the paper")),
        Claim("table", "Table 3", "the reductions of Table 3",
              "HND 5.32x, 6.81x, 7.93x, 11.81x (11.30x in its F1 line); IMDB 3.67x, 5.06x, 7.50x, 11.30x", judge=Judge(
                  lambda rows: _reductions([row for row in rows if row["task"] in REDUCTIONS]),
                  Criterion("each within a quarter, n being the document's length", _quarter),
                  Criterion("the growth from alpha = 0.2 to 1 is within a factor of 2 of the paper's", _growth),
                  lambda found: "; ".join(
                      f"{task} {', '.join(f'{x:.2f}' for x in some.values())}" for task, some in found.items()),
                  needs="needs --data with imdb, hyperpartisan or aapd")),
        Claim("accuracy", "section 4", "the error is negligible at alpha = 0.2", "-0.11, -0.15, -0.06 points",
              judge=Judge(
                  _first_loss,
                  Criterion("a classifier loses at most 1 point", lambda found: found["scored"] and _small(found)),
                  Criterion("without one, the embedding keeps a cosine of 0.99",
                            lambda found: not found["scored"] and _small(found)), _kept)),
        Claim("trade", "Table 3", "the loss grows with alpha", "IMDB 89.05, 84.10, 81.17, 75.11", judge=Judge(
            _losses, each("at no step of alpha less", lambda some: sorted(some) == some)
            & each("more at the last than at the first", lambda some: some[0] < some[-1]),
            each("from the first to the last", lambda some: some[0] < some[-1]),
            lambda found: f"loss at alpha {', '.join(map(str, ALPHAS))}: " + "; ".join(
                f"{task} {', '.join(f'{x:.2g}' for x in some)}" for task, some in found.items()),
            of="loss in all data")),
        Claim("composes", "section 4", "sampling saves beside sparse attention as it does without",
              "agrees with prior observations", judge=Judge(
                  _beside_full, at_least(0.8).of("length"), at_least(0.8).of("visible", _VISIBLE),
                  ("reduction / that with full attention: at least {length:.2f}; {visible:.2f} with the keys that a "
                   "token sees for n").format_map,
                  of="reduction on valid tokens / that of the same model with full attention, at every alpha",
                  needs="a Longformer has no full attention to compare with")),
    ),
)  # fmt: skip
