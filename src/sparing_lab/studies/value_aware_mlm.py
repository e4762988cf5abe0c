"""Masked language models trained here at growing length, and what is left of them with few keys.

The paper trains RoBERTa on at 4096 tokens; here a model starts from nothing, a token is a byte, and the budgets are the
paper's shares: width + 1 keys, four features for each coordinate of a head, n/64 and n/8 keys in a round of LSH. A
model of each length learns from as many bytes. The lengths are short on the small scale: the longer the text, the more
steps it takes until a model does better than the frequencies of bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparing import documents
from sparing.contract import Method, method
from sparing.documents import Documents
from sparing.oracles.kernels import OracleOf
from sparing.sample_text import distinct_topics
from sparing_lab.report.figure import legend_below, panels, style
from sparing_lab.studies._trained import Tried, row_of, running, trained, tried
from sparing_lab.studies._value_aware import (
    NAMES,
    TABLE_1,
    WRONG,
    Group,
    books,
    buckets,
    budget,
    draw_paper,
    family,
    groups,
)
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table
from sparing_lab.tasks.language import VALID
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL: dict[str, Any] = {
    "task": "masked", "width": 64, "heads": 8, "layers": 2, "hidden": 256, "steps": 1200, "rate": 4e-3,
    "evaluate": 400,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "task": "masked", "width": 768, "heads": 12, "layers": 12, "hidden": 3072, "steps": 2_476_000, "rate": 1e-4,
    "warmup": 0.1, "decay": 0.01, "clip": 5.0,
}  # fmt: skip
LENGTHS = {"small": (32, 64, 128), "paper": (512, 4096)}
HASHED = 128  #: shorter texts have less than two keys in the smaller of the paper's chunks
BYTES = {"small": 2048, "paper": 4096}  #: of a step
TRIED = {"small": 8192, "paper": 2**20}  #: held-out bytes, in as many pieces as a task holds out at most
SEARCHED = 2  #: pieces in which width + 1 values are looked for
DRAWS = {"small": 2, "paper": 5}  #: of methods that draw random numbers
KEYS = {
    "small": {"top_keys": (1, 2, 4, 8, 9, 16, 32), "value_aware": (1, 2, 4, 9), "window": (2, 4, 8, 16, 32)},
    "paper": {
        "top_keys": (1, 2, 4, 8, 16, 32, 64, 65, 128, 256), "value_aware": (1, 2, 4, 8, 16, 32, 65),
        "window": (2, 4, 8, 16, 32, 64, 128, 256),
    },
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def _text(settings: Settings) -> tuple[str | None, str]:
    """The folder that is learned from, None for the help topics, and the fingerprint of its text."""
    found = books(settings, "value-aware-mlm")
    if not found:
        return None, Documents("topics", tuple(distinct_topics())).fingerprint
    return str(found[0].parent), documents.read(found, whole=True).fingerprint


def _specs(settings: Settings, length: int, head: int) -> list[str]:
    named = {"window": "window(size={})"}
    ladders = KEYS[settings.scale].items()
    few = [named.get(name, f"{name}(keys={{}})").format(r) for name, keys in ladders for r in keys]
    return [*few, _features(head), *(buckets(length) if length >= HASHED else ())]


def _features(head: int) -> str:
    """As many for each coordinate as the paper's 256 for 64."""
    return f"random_features(features={4 * head})"


def _cells(settings: Settings) -> list[Cell]:
    of = {
        **(SMALL if settings.small else LARGE), "text": _text(settings)[1], "draws": DRAWS[settings.scale],
        "searched": SEARCHED,
    }  # fmt: skip
    cells: list[Cell] = []
    for seed in range(settings.seeds or 1):
        for length in LENGTHS[settings.scale]:
            head = of["width"] // of["heads"]
            cells.append(
                {"length": length, "seed": seed, **of, "batch": BYTES[settings.scale] // length, "head": head,
                 "examples": min(TRIED[settings.scale] // length, VALID), "specs": _specs(settings, length, head)}
            )  # fmt: skip
    return cells


def _config(cell: Cell, folder: str | None) -> Config:
    names = {*SMALL, *LARGE, "length", "batch", "seed"} & set(cell)
    return Config(data=folder, **{name: cell[name] for name in names})


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    model, found = trained(_config(cell, _text(settings)[0]))
    task = found.task
    many, all_ = min(cell["examples"], len(task.valid)), len(task.valid)
    numbers = [number * all_ // many for number in range(many)]

    def run(what: str | Method, seed: int = 0, numbers: Sequence[int] = numbers) -> Tried:
        with running(model, what, seed=seed):
            return tried(model, task, numbers)

    exact = run("exact")
    rows: list[Row] = [
        {"what": "trained", **row_of(found), "guess": 100 * tried(_guess(task), task, numbers).error},
        {"what": "search", "keys": cell["head"] + 1, **_searched(run, cell["head"] + 1, numbers[: cell["searched"]])},
        _row("exact", exact, exact),
    ]
    for spec in cell["specs"]:
        draws = cell["draws"] if method(spec).supports.stochastic else 1
        rows += [{**_row(spec, run(spec, draw), exact), "draw": draw} for draw in range(draws)]
    return rows


def _row(spec: str, got: Tried, exact: Tried) -> Row:
    """As `Group` reads it: the share of hidden bytes that are wrong, and by how much it is more than exactly."""
    gap, error = got.beyond(exact, "wrong")
    return {
        "what": "swap", "model": "byte model", "kind": "masked", "spec": spec, "value": 100 * got.error, "read": None,
        "gap": 100 * gap, "error": 100 * error, "loss": got.loss, "asked": int(got.asked.sum()),
    }  # fmt: skip


def _searched(run: Callable[..., Tried], keys: int, numbers: Sequence[int]) -> Row:
    """How far the loss is from exact attention's if so many values are looked for, for every query of some pieces."""
    choice = OracleOf(kernel=method("kernel(kind=exp)"), choice=method(f"value_aware(keys={keys})"))
    exact, found = run("exact", numbers=numbers), run(choice, numbers=numbers)
    return {"off": abs(found.loss - exact.loss)}


def _guess(task: Task) -> Callable[..., Tensor]:
    """A model that always says the most frequent byte."""
    some = torch.cat([task.train[number].tokens for number in range(min(64, len(task.train)))])
    common = int(some.bincount().argmax())

    def said(tokens: Tensor, mask: Tensor) -> Tensor:
        return F.one_hot(torch.full_like(tokens, common), task.vocabulary).float()

    return said


# What the rows say


def _few(group: Group) -> str:
    return f"top_keys(keys={group.width + 1})"


def _noise(group: Group, *specs: str) -> float:
    """Two standard errors of a difference between them."""
    errors = [pick(group.rows, spec=spec) for spec in specs]
    return 2 * math.sqrt(sum((sum(row["error"] for row in found) / len(found)) ** 2 for found in errors))


def _by_length(rows: Rows, of: Callable[[Group], str]) -> str:
    return "; ".join(f"{group.length}: {of(group)}" for group in groups(rows))


def _aware(rows: Rows) -> Judgement:
    answers: dict[tuple[int, int], bool] = {}
    for group in groups(rows):
        for r, oblivious, aware in group.both("top_keys", "value_aware"):
            specs = (f"{name}(keys={r})" for name in ("top_keys", "value_aware"))
            answers[group.length, r] = oblivious - aware > _noise(group, *specs)
    ours = _by_length(
        rows, lambda group: " / ".join(group.show(f"{name}(keys=4)") for name in ("top_keys", "value_aware"))
    )
    ours += f" at r = 4 (OVO / OVA); below at {sum(answers.values())} of {len(answers)} points"
    return judged(all(answers.values()), all(said for (_, r), said in answers.items() if r >= 4), ours=ours)


def _exact(rows: Rows) -> Judgement:
    off = max(row["off"] for row in pick(rows, what="search"))
    points = max(abs(group.loss(f"value_aware(keys={group.width + 1})")) for group in groups(rows))
    return judged(off < 1e-5 and points < 0.05, off < 1e-3, ours=f"{off:.0e} nats, {points:.2f} points off at most")


def _oblivious(rows: Rows) -> Judgement:
    longest = max(groups(rows), key=lambda group: group.length)
    spec = _few(longest)
    far = longest.share(spec)
    ours = _by_length(rows, lambda group: f"{group.show(_few(group))}, exact {group.show('exact')}")
    ours += f" ({longest.width + 1} keys; {far:.0%} of the way to OVO-1 at {longest.length})"
    seen = longest.loss(spec) > _noise(longest, spec)
    return judged(seen and far >= 0.1, seen, ours=ours)


def _single(rows: Rows) -> Judgement:
    useless, less = True, True
    specs = ("top_keys(keys=1)", "value_aware(keys=1)")
    for group in groups(rows):
        way = _guessed(rows, group) - group.values["exact"]
        useless &= all(group.loss(spec) >= 0.75 * way for spec in specs)
        less &= group.loss(specs[0]) - group.loss(specs[1]) > _noise(group, *specs)
    ours = _by_length(
        rows,
        lambda group: (
            " / ".join(group.show(spec) for spec in specs)
            + f", exact {group.show('exact')}, one byte always {_guessed(rows, group):.1f}"
        ),
    )
    return judged(useless and less, less, ours=ours)


def _guessed(rows: Rows, group: Group) -> float:
    found = [row["guess"] for row in pick(rows, what="trained", length=group.length)]
    return float(sum(found) / len(found))


def _random(rows: Rows) -> Judgement:
    found = [group.share(_features(group.width)) for group in groups(rows)]
    ours = _by_length(rows, lambda group: f"{group.share(_features(group.width)):.0%}") + " of the way to OVO-1"
    return judged(min(found) >= 0.5, max(found) >= 0.5, ours=ours)


def _lsh(rows: Rows) -> Judgement:
    found = {
        group.length: [group.share(spec) for spec in buckets(group.length)]
        for group in groups(rows)
        if group.length >= HASHED
    }
    whole = all(few >= 0.5 and many <= 0.1 for few, many in found.values())
    ours = "; ".join(f"{length}: {few:.0%} / {many:.0%}" for length, (few, many) in found.items())
    return judged(whole, all(few > 2 * many for few, many in found.values()), ours=f"{ours} of the way to OVO-1")


def _window(rows: Rows) -> Judgement:
    pairs = [pair for group in groups(rows) for pair in group.both("window", "top_keys")]
    trails = [window > oblivious for _, window, oblivious in pairs]
    ours = _by_length(rows, lambda group: f"{group.show('window(size=16)')} / {group.show('top_keys(keys=16)')}")
    ours += f" at r = 16 (window / OVO); trails at {sum(trails)} of {len(trails)} points"
    return judged(all(trails), sum(trails) >= 0.75 * len(trails), ours=ours)


def _longer(rows: Rows) -> Judgement:
    found = sorted(groups(rows), key=lambda group: group.length)
    ours = _by_length(rows, lambda group: f"{group.show('exact')} %")
    shares = [(group.values["exact"] / 100, group.rows[0]["asked"]) for group in (found[0], found[-1])]
    noise = 200 * math.sqrt(sum(share * (1 - share) / asked for share, asked in shares))
    fall = found[0].values["exact"] - found[-1].values["exact"]
    return judged(fall > noise, fall > 0, ours=f"{ours} (two standard errors of a difference: {noise:.1f})")


def _grows(rows: Rows) -> Judgement:
    found = sorted(groups(rows), key=lambda group: group.length)
    losses = [group.loss(_few(group)) for group in found]
    clear = losses[-1] - losses[0] > math.hypot(*(_noise(group, _few(group)) for group in (found[0], found[-1])))
    rises = all(a < b for a, b in pairwise(losses))
    return judged(clear and rises, clear, ours=_by_length(rows, lambda group: f"+{group.loss(_few(group)):.1f} points"))


# What people see


def _tables(rows: Rows) -> list[Table]:
    found = groups(rows)
    full = found[0].width + 1
    theirs: Any = TABLE_1

    def lines(of: Callable[[Group], list[tuple[str, str, str]]]) -> list[list[str]]:
        """Name, the paper's and the spec, for each group."""
        return [
            [name, paper, *(_cell(group, of(group)[number][2]) for group in found)]
            for number, (name, paper, _) in enumerate(of(found[0]))
        ]

    def table(group: Group) -> list[tuple[str, str, str]]:
        few, many = buckets(group.length)
        return [
            ("exact", f"{theirs['exact']:.1f}", "exact"),
            *(
                (f"{short}-{r}", f"{theirs[name][key]:.1f}", f"{name}(keys={r})")
                for name, short in (("top_keys", "OVO"), ("value_aware", "OVA"))
                for r, key in ((1, 1), (full, 65))
            ),
            (f"random features, {4 * group.width}", "89.8", _features(group.width)),
            ("LSH, n/64 keys x 4 rounds", "90.4", few),
            ("LSH, n/8 keys x 16 rounds", "26.1", many),
        ]

    def curves(group: Group) -> list[tuple[str, str, str]]:
        return [
            (f"{NAMES[family(spec)]}, {budget(spec)}", "", spec)
            for name in ("top_keys", "value_aware", "window")
            for spec in group.values
            if family(spec) == name
        ]

    columns = [f"{group.length} bytes" for group in found]
    asked = ", ".join(str(group.rows[0]["asked"]) for group in found)
    runs = [
        [str(row["length"]), str(row["batch"]), str(row["steps"]), f"{row['last']['perplexity']:.2f}",
         f"{row['chance']:.0f}", f"{row['guess']:.1f}"]
        for row in pick(rows, what="trained")
    ]  # fmt: skip
    return [
        Table(f"Table 1: {WRONG} and perplexity, of {asked} hidden bytes", ["method", "paper", *columns], lines(table)),
        Table("By keys", ["method, r", "", *columns], lines(curves)),
        Table("Training", ["length", "batch", "steps", "perplexity", "chance", "one byte always: wrong (%)"], runs),
    ]


def _cell(group: Group, spec: str) -> str:
    losses = [row["loss"] for row in pick(group.rows, spec=spec)]
    return f"{group.values[spec]:.1f}, {math.exp(sum(losses) / len(losses)):.2f}" if losses else ""


def _draw(rows: Rows, figure: Figure) -> None:
    found = groups(rows)
    axes = panels(figure, math.ceil((len(found) + 1) / 2), 2, size=(5.2, 3.7))
    for each in axes[len(found) + 1 :]:
        each.set_visible(False)
    for group, each in zip(found, axes, strict=False):
        for number, (name, words) in enumerate(NAMES.items()):
            points = sorted((budget(spec), value) for spec, value in group.values.items() if family(spec) == name)
            line = "-" if name in ("top_keys", "value_aware", "window") else "none"
            each.plot(*zip(*points, strict=True), label=words, linestyle=line, **style(number)) if points else None
        each.axhline(group.values["exact"], color="black", linestyle="--")
        each.axhline(_guessed(rows, group), color="black", linestyle="-.", linewidth=0.8, label="one byte always")
        each.set(
            xscale="log", ylim=(0, 100), ylabel="hidden bytes predicted wrongly (%)",
            xlabel="r: keys read by a query (LSH: in a round; or features)", title=f"Ours, {group.length} bytes",
        )  # fmt: skip
    draw_paper(axes[len(found)])
    legend_below(figure, axes[: len(found) + 1], 4)


STUDY = Study(
    name="value-aware-mlm",
    title="Masked language models trained at growing length: what few keys leave of them",
    paper="value-aware",
    where="Table 1, Figures 1, 3",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim(
            "aware", "Table 1", "the best r values (OVA) lose less than the r largest weights (OVO)",
            "r = 1: 96.6 / 88.6, r = 65: 43.5 / 24.2 (OVO / OVA)",
            "fewer wrong bytes, by more than two standard errors, at every r that both were measured at and every "
            "length; same shape: at every r from 4 on", _aware,
        ),
        Claim(
            "exact", "section 3, Table 1", "width + 1 values make the output exactly", "24.2 = 24.2 at 65",
            "values looked for in whole pieces: loss within 1e-5 nats of exact attention's; wrong bytes within 0.05 "
            "points; same shape: 1e-3 nats", _exact,
        ),
        Claim(
            "oblivious", "Table 1", "width + 1 keys of largest weight are not enough",
            "43.5, exact 24.2: 27 % of the way to OVO-1", "at the longest text at least a tenth of the way to OVO-1, "
            "and more than two standard errors; same shape: only the second", _oblivious,
        ),
        Claim(
            "single", "Table 1", "one key is close to useless, and one value less so",
            "96.6 / 88.6, exact 24.2", "at every length both at least three quarters of the way to a model that always "
            "says the most frequent byte, OVA-1 below OVO-1 by more than two standard errors; same shape: only the "
            "second", _single,
        ),
        Claim(
            "features", "Table 1", "random features, four for a coordinate, are close to useless",
            "89.79: 91 % of the way from exact to OVO-1", "at least half of the way at every length; same shape: at "
            "one", _random,
        ),
        Claim(
            "lsh", "Table 1", "LSH needs many rounds and large chunks",
            "n/64 keys x 4 rounds 90.39 (91 % of the way to OVO-1), n/8 x 16 26.11 (3 %)",
            "from 128 bytes on at least half, and at most a tenth of the way; same shape: the first more than twice "
            "the second", _lsh,
        ),
        Claim(
            "window", "Figure 1", "windows trail behind the largest weights", "at all r",
            "more wrong bytes at every r and length; same shape: at three quarters of these points", _window,
        ),
        Claim(
            "longer", "section 4, Figure 3", "a model of longer texts is wrong less often", "512: 26.6, 4096: 24.2",
            "the longest below the shortest by more than two standard errors; same shape: below", _longer,
        ),
        Claim(
            "grows", "ours", "the longer the text, the more is lost with width + 1 keys of largest weight",
            "one length only", "more points above exact attention at each doubling, the longest above the shortest by "
            "more than two standard errors; same shape: only the second", _grows, ours=True,
        ),
    ),
)  # fmt: skip
