"""Masked language models trained here at growing length, and what is left of them with few keys.

The paper trains RoBERTa further at 4096 tokens; here a model is trained from scratch and a token is a byte. The budgets
are the paper's shares: width + 1 keys, four features for each coordinate of a head, n/64 and n/8 keys in a round of
LSH. Models of all lengths are trained on equally many bytes. The lengths are short at small scale: the longer the text,
the more steps it takes until a model does better than the frequencies of bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparing import documents
from sparing.contract import Method, method
from sparing.documents import Documents
from sparing.oracles.kernels import OracleOf
from sparing.sample_text import distinct_topics
from sparing_lab.figure import Figure, legend_below, level, panels
from sparing_lab.studies import _value_aware as oracles
from sparing_lab.studies._trained import Tried, row_of, running, trained, tried
from sparing_lab.studies._value_aware import TABLE_1, WRONG, Group, buckets, groups, spec_of
from sparing_lab.studies.judges import Criterion, Judge, each, rises
from sparing_lab.studies.rows import Cell, Row, Rows, mean, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing, pivot
from sparing_lab.tasks.language import VALID
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config

SMALL: dict[str, Any] = {
    "task": "masked", "hidden_size": 64, "num_heads": 8, "num_layers": 2, "intermediate_size": 256,
    "max_steps": 1200, "learning_rate": 4e-3,
    "eval_steps": 400,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "task": "masked", "hidden_size": 768, "num_heads": 12, "num_layers": 12, "intermediate_size": 3072,
    "max_steps": 2_476_000, "learning_rate": 1e-4,
    "warmup_ratio": 0.1, "weight_decay": 0.01, "max_grad_norm": 5.0,
}  # fmt: skip
LENGTHS = {"small": (32, 64, 128), "paper": (512, 4096)}
HASHED = 128  #: shorter texts have less than two keys in the smaller of the paper's chunks
BYTES = {"small": 2048, "paper": 4096}  #: bytes in a training step
TRIED = {"small": 8192, "paper": 2**20}  #: held-out bytes, in as many pieces as a task holds out at most
SEARCHED = 2  #: number of pieces where width + 1 values are searched
DRAWS = {"small": 2, "paper": 5}  #: seeds of methods that draw random numbers
KEYS = {
    "small": {"top_keys": (1, 2, 4, 8, 9, 16, 32), "value_aware": (1, 2, 4, 9), "window": (2, 4, 8, 16, 32)},
    "paper": {
        "top_keys": (1, 2, 4, 8, 16, 32, 64, 65, 128, 256), "value_aware": (1, 2, 4, 8, 16, 32, 65),
        "window": (2, 4, 8, 16, 32, 64, 128, 256),
    },
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def _text(settings: Settings) -> tuple[str | None, str]:
    """Return the folder of training texts, None for the help topics, and the fingerprint of its text."""
    found = oracles.books(settings, "value-aware-mlm")
    if not found:
        return None, Documents("topics", tuple(distinct_topics())).fingerprint
    return str(found[0].parent), documents.read(found, whole=True).fingerprint


def _specs(settings: Settings, length: int, head: int) -> list[str]:
    few = [spec_of(name, r) for name, keys in KEYS[settings.scale].items() for r in keys]
    return [*few, _features(head), *(buckets(length) if length >= HASHED else ())]


def _features(head: int) -> str:
    """Return random features, as many for each coordinate of a head as the paper's 256 for 64."""
    return f"random_features(features={4 * head})"


def _cells(settings: Settings) -> list[Cell]:
    of = {
        **(SMALL if settings.small else LARGE), "text": _text(settings)[1], "draws": DRAWS[settings.scale],
        "searched": SEARCHED,
    }  # fmt: skip
    head = of["hidden_size"] // of["num_heads"]
    return [
        {"length": length, "seed": seed, **of, "batch_size": BYTES[settings.scale] // length, "head": head,
         "examples": min(TRIED[settings.scale] // length, VALID), "specs": _specs(settings, length, head)}
        for seed in range(settings.seeds or 1) for length in LENGTHS[settings.scale]
    ]  # fmt: skip


def _config(cell: Cell, folder: str | None) -> Config:
    names = {*SMALL, *LARGE, "batch_size", "seed"} & set(cell)
    return Config(data=folder, max_length=cell["length"], **{name: cell[name] for name in names})


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
    """Return a row for `Group`: the percentage of hidden bytes that are wrong, and its excess over exact attention."""
    gap, error = got.beyond(exact, "wrong")
    return {
        "what": "swap", "model": "byte model", "kind": "masked", "spec": spec, "value": 100 * got.error, "read": None,
        "gap": 100 * gap, "error": 100 * error, "loss": got.loss, "asked": int(got.asked.sum()),
    }  # fmt: skip


def _searched(run: Callable[..., Tried], keys: int, numbers: Sequence[int]) -> Row:
    """Return how far the loss is from exact attention's if that many values are searched for each query."""
    choice = OracleOf(kernel=method("kernel(kind=exp)"), choice=method(f"value_aware(keys={keys})"))
    exact, found = run("exact", numbers=numbers), run(choice, numbers=numbers)
    return {"off": abs(found.loss - exact.loss)}


def _guess(task: Task) -> Callable[..., Tensor]:
    """Return a model that always predicts the most frequent byte."""
    some = torch.cat([task.train[number].tokens for number in range(min(64, len(task.train)))])
    common = int(some.bincount().argmax())

    def said(tokens: Tensor, mask: Tensor) -> Tensor:
        return F.one_hot(torch.full_like(tokens, common), task.vocabulary).float()

    return said


def _few(group: Group) -> str:
    return spec_of("top_keys", group.width + 1)


def _noise(group: Group, *specs: str) -> float:
    """Return two standard errors of the difference between methods."""
    return 2 * math.hypot(*(mean(pick(group.rows, spec=spec), "error") for spec in specs))


def _by_length(of: Callable[[Group], str]) -> Callable[[Sequence[Group]], str]:
    return lambda found: "; ".join(f"{group.length}: {of(group)}" for group in found)


def _longest(found: Sequence[Group]) -> Group:
    return max(found, key=lambda group: group.length)


def _seen(found: Sequence[Group]) -> bool:
    group = _longest(found)
    return group.loss(_few(group)) > _noise(group, _few(group))


def _share_left(found: Sequence[Group]) -> str:
    group = _longest(found)
    lengths = _by_length(lambda each: f"{each.show(_few(each))}, exact {each.show('exact')}")(found)
    way = f"{group.share(_few(group)):.0%} of the way to OVO-1 at {group.length}"
    return f"{lengths} ({group.width + 1} keys; {way})"


def _guessed(rows: Rows, length: int) -> float:
    """Return the errors of a model that always predicts the most frequent byte."""
    return mean(pick(rows, what="trained", length=length), "guess")


_ONE = (spec_of("top_keys", 1), spec_of("value_aware", 1))
_LESS = each("OVA-1 below OVO-1 by more than two standard errors", lambda found: (
    found[0].loss(_ONE[0]) - found[0].loss(_ONE[1]) > _noise(found[0], *_ONE)))  # fmt: skip


def _useless(found: tuple[Group, float]) -> bool:
    group, guess = found
    return all(group.loss(spec) >= 0.75 * (guess - group.values["exact"]) for spec in _ONE)


def _ends(rows: Rows) -> list[Group]:
    """Return all models, the shortest text first."""
    return sorted(groups(rows), key=lambda group: group.length)


def _fall(found: Sequence[Group]) -> tuple[float, float]:
    """Return by how many points the error falls from the shortest to the longest text, and two standard errors."""
    shares = [(group.values["exact"] / 100, group.rows[0]["asked"]) for group in (found[0], found[-1])]
    noise = 200 * math.sqrt(sum(share * (1 - share) / asked for share, asked in shares))
    return found[0].values["exact"] - found[-1].values["exact"], noise


def _grown(found: Sequence[Group]) -> bool:
    first, last = found[0], found[-1]
    noise = math.hypot(*(_noise(group, _few(group)) for group in (first, last)))
    return last.loss(_few(last)) - first.loss(_few(first)) > noise


def _tables(rows: Rows) -> list[Table]:
    found = groups(rows)
    full = found[0].width + 1

    methods: list[tuple[str, float, Callable[[int], str]]] = [  # name, the paper's figure, spec by length
        ("exact", TABLE_1["exact"], lambda length: "exact"),
        *((f"{short}-{r}", TABLE_1[name][key], partial(lambda spec, length: spec, spec_of(name, r)))
          for name, short in (("top_keys", "OVO"), ("value_aware", "OVA")) for r, key in ((1, 1), (full, 65))),
        (f"random features, {4 * found[0].width}", 89.79, lambda length: _features(found[0].width)),
        ("LSH, n/64 keys x 4 rounds", 90.39, lambda length: buckets(length)[0]),
        ("LSH, n/8 keys x 16 rounds", 26.11, lambda length: buckets(length)[1]),
    ]  # fmt: skip
    ladder = [spec for name in KEYS["small"] for spec in found[0].values if oracles.family(spec) == name]
    columns = {f"{group.length} bytes": group for group in found}
    asked = ", ".join(str(group.rows[0]["asked"]) for group in found)
    return [
        pivot(f"Table 1: {WRONG} and perplexity, of {asked} hidden bytes", ["method", "paper"], methods, columns,
              lambda line, group: _cell(group, line[2](group.length)), lambda line: [line[0], f"{line[1]:.1f}"]),
        pivot("By keys", ["method, r", ""], ladder, columns, lambda spec, group: _cell(group, spec),
              lambda spec: [f"{oracles.NAMES[oracles.family(spec)]}, {oracles.budget(spec)}", ""]),
        listing("Training", pick(rows, what="trained"),
                {"length": "{length}", "batch": "{batch_size}", "steps": "{max_steps}",
                 "perplexity": "{last[perplexity]:.2f}",
                 "chance": "{chance:.0f}", "one byte always: wrong (%)": "{guess:.1f}"}),
    ]  # fmt: skip


def _cell(group: Group, spec: str) -> str:
    mine = pick(group.rows, spec=spec)
    return f"{group.values[spec]:.1f}, {math.exp(mean(mine, 'loss')):.2f}" if mine else ""


def _draw(rows: Rows, figure: Figure) -> None:
    found = groups(rows)
    axes: list[Any] = list(panels(figure, math.ceil((len(found) + 1) / 2), 2, size=(5.2, 3.7)))
    oracles.draw_groups(axes, found)
    for group, panel in zip(found, axes, strict=False):
        level(panel, _guessed(rows, group.length), linestyle="-.", label="one byte always")
        panel.set(
            xscale="log", ylim=(0, 100), ylabel="hidden bytes predicted wrongly (%)",
            xlabel="r: keys read by a query (LSH: in a round; or features)", title=f"Ours, {group.length} bytes",
        )  # fmt: skip
    legend_below(figure, axes[: len(found) + 1], 4)


_SEEN = Criterion("more than two standard errors", _seen)
_GROWN = Criterion("the longest above the shortest by more than two standard errors", _grown)
STUDY = Study(
    name="value-aware-mlm", title="Masked language models trained at growing length: what few keys leave of them",
    paper="value-aware", where="Table 1, Figures 1, 3", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim("aware", "Table 1", "the best r values (OVA) lose less than the r largest weights (OVO)",
              "r = 1: 96.6 / 88.6, r = 65: 43.5 / 24.2 (OVO / OVA)", judge=oracles.aware(_noise, (4,))),
        Claim("exact", "section 3, Table 1", "width + 1 values make the output exactly", "24.2 = 24.2 at 65",
              judge=Judge(
                  lambda rows: {
                      "nats": max(row["off"] for row in pick(rows, what="search")),
                      "points": max(abs(group.loss(spec_of("value_aware", group.width + 1))) for group in groups(rows)),
                  }, Criterion("within 1e-5 nats of exact attention's, wrong bytes within 0.05 points",
                                    lambda found: found["nats"] < 1e-5 and found["points"] < 0.05),
                  Criterion("1e-3 nats", lambda found: found["nats"] < 1e-3),
                  "{nats:.0e} nats, {points:.2f} points off at most".format_map,
                  of="loss where values are looked for in whole pieces")),
        Claim("oblivious", "Table 1", "width + 1 keys of largest weight are not enough",
              "43.5, exact 24.2: 27 % of the way to OVO-1", judge=Judge(
                  groups, Criterion("at least a tenth of the way to OVO-1",
                                    lambda found: (group := _longest(found)).share(_few(group)) >= 0.1) & _SEEN, _SEEN,
                  _share_left, of="at the longest text")),
        Claim("single", "Table 1", "one key is close to useless, and one value less so", "96.6 / 88.6, exact 24.2",
              judge=Judge(
                  lambda rows: [(group, _guessed(rows, group.length)) for group in groups(rows)],
                  each("both at least three quarters of the way to a model that always says the most frequent byte",
                       _useless) & _LESS, _LESS, lambda found: "; ".join(
                      f"{group.length}: {' / '.join(map(group.show, _ONE))}, exact {group.show('exact')}, one byte "
                      f"always {guess:.1f}" for group, guess in found), of="at every length")),
        Claim("features", "Table 1", "random features, four for a coordinate, are close to useless",
              "89.79: 91 % of the way from exact to OVO-1",
              judge=oracles.features(lambda group: _features(group.width))),
        Claim("lsh", "Table 1", "LSH needs many rounds and large chunks",
              "n/64 keys x 4 rounds 90.39 (91 % of the way to OVO-1), n/8 x 16 26.11 (3 %)",
              judge=oracles.lsh(lambda found: all(few > 2 * many for few, many in found.values()))),
        Claim("window", "Figure 1", "windows trail behind the largest weights", "at all r", judge=oracles.trails(16)),
        Claim("longer", "section 4, Figure 3", "a model of longer texts is wrong less often", "512: 26.6, 4096: 24.2",
              judge=Judge(
                  _ends, Criterion("by more than two standard errors", lambda found: _fall(found)[0] > _fall(found)[1]),
                  Criterion("below", lambda found: _fall(found)[0] > 0), lambda found: (
                      _by_length(lambda group: f"{group.show('exact')} %")(found)
                      + f" (two standard errors of a difference: {_fall(found)[1]:.1f})"),
                  of="wrong bytes of the longest below those of the shortest")),
        Claim("grows", "ours", "the longer the text, the more is lost with width + 1 keys of largest weight",
              "one length only", judge=Judge(
                  _ends, Criterion("more points above exact attention at each doubling",
                                   lambda found: rises().holds([group.loss(_few(group)) for group in found])) & _GROWN,
                  _GROWN, _by_length(lambda group: f"+{group.loss(_few(group)):.1f} points")), ours=True),
    ),
)  # fmt: skip
