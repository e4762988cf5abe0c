"""Language models trained with three kernels, and how few keys each can do with.

The paper trains on the words of WikiText-103, with a learning rate that falls with the root of the steps; here a
token is a byte, and the learning rate falls linearly. The oracles take the weights of the kernel that the model was
trained with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparing import documents
from sparing.contract import method
from sparing.documents import Documents
from sparing.oracles.kernels import OracleOf
from sparing.sample_text import distinct_topics
from sparing_lab.figure import PAPER, Figure, level, line, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._trained import row_of, trained
from sparing_lab.studies._value_aware_kernels import head, skew, trial
from sparing_lab.studies.judges import Criterion, Judge, each
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, mean, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing
from sparing_lab.tasks import wikitext
from sparing_lab.training.config import Config

KINDS = {"exp": "exponential", "poly": "polynomial (degree 2)", "elu": "elu"}
ORACLES = {"top_keys": "OVO", "value_aware": "OVA"}
#: Heads of 16 at 128 bytes: width + 1 keys are as large a share of all as the paper's 65 of 512.
SMALL: dict[str, Any] = {
    "task": "causal", "max_length": 128, "hidden_size": 64, "num_heads": 4, "num_layers": 2,
    "intermediate_size": 256, "batch_size": 16, "max_steps": 1000,
    "learning_rate": 2e-3, "eval_steps": 500,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "task": "causal", "max_length": 512, "hidden_size": 512, "num_heads": 8, "num_layers": 6,
    "intermediate_size": 2048, "batch_size": 128,
    "max_steps": 31520, "learning_rate": 5e-4, "warmup_ratio": 4000 / 31520, "weight_decay": 0.01, "max_grad_norm": 1e9,
}  # fmt: skip
BUDGETS = {
    "small": {"top_keys": (1, 2, 4, 8, 17, 32, 64), "value_aware": (1, 2, 4, 8, 17)},
    "paper": {"top_keys": (1, 2, 4, 8, 16, 32, 65, 128, 256), "value_aware": (1, 2, 4, 8, 16, 32, 65)},
}
EXAMPLES = {"small": 64, "paper": 256}  #: number of held-out pieces
SEARCHED = {"small": 4, "paper": 4}  #: pieces where width + 1 values are searched, the slowest part
TABLE_2 = numbers("value-aware", "table 2")  #: perplexities of exact attention and of the oracles at 1 and 65 keys
_LARGE_FILE = "wikitext103/wiki.train.tokens"


@functools.lru_cache(maxsize=1)
def _text(settings: Settings) -> tuple[Path | None, str]:
    """Return the training file, None for the help topics, and the fingerprint of its text."""
    data = settings.data
    if settings.small:
        path = None if data is None else wikitext.path_in(data)
        if path is None:
            settings.refuse_unused("wikitext2/train.txt (or valid.txt, .txt.xz), plain text")
            return None, Documents("topics", tuple(distinct_topics())).fingerprint
    else:
        path, *_ = settings.files(
            _LARGE_FILE, f"{_LARGE_FILE}.xz", f"{_LARGE_FILE}.gz", wanted=_LARGE_FILE,
            paper=f"value-aware-kernels wants WikiText-103, {data or 'FOLDER'}/{_LARGE_FILE} (or .xz): plain text; the "
            "paper's is on https://huggingface.co/datasets/Salesforce/wikitext (wikitext-103-v1)",
        )  # fmt: skip
    return path, documents.read([path], whole=True).fingerprint


def _cells(settings: Settings) -> list[Cell]:
    of = {
        **(SMALL if settings.small else LARGE), "text": _text(settings)[1], "examples": EXAMPLES[settings.scale],
        "searched": SEARCHED[settings.scale],
        "budgets": {name: list(keys) for name, keys in BUDGETS[settings.scale].items()},
    }  # fmt: skip
    return [{"kind": kind, "seed": seed, **of} for seed in range(settings.seeds or 1) for kind in KINDS]


def _config(cell: Cell, path: Path | None) -> Config:
    names = {*SMALL, *LARGE, "seed"} & set(cell)
    data = None if path is None else str(path)
    return Config(method=f"kernel(kind={cell['kind']})", data=data, **{name: cell[name] for name in names})


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    model, found = trained(_config(cell, _text(settings)[0]))
    kernel = method(found.config.method)
    run, few = (trial(model, found.task, cell[count]) for count in ("examples", "searched"))
    exact, exact_few = run(kernel), few(kernel)
    rows: list[Row] = [
        {"what": "trained", **row_of(found), **skew(kernel, run, cell)},
        {"what": "swap", "oracle": "exact", "r": None, "loss": exact.loss, "gap": 0.0, "error": 0.0},
    ]
    for oracle, keys in cell["budgets"].items():
        for r in keys:
            choice = OracleOf(kernel=kernel, choice=method(f"{oracle}(keys={r})"))
            whole = oracle == "value_aware" and r > head(cell)
            gap, error = few(choice).beyond(exact_few) if whole else run(choice).beyond(exact)
            rows.append(
                {"what": "swap", "oracle": oracle, "r": r, "loss": exact.loss + gap, "gap": gap, "error": error}
            )
    return rows


Loss = tuple[float, float, float]  #: a loss, its excess over exact attention, and the standard error of that


def _of(rows: Rows, kind: str, oracle: str, r: int | None = None) -> Loss:
    """Return a loss averaged over seeds."""
    found = pick(rows, what="swap", kind=kind, oracle=oracle, r=r)
    error = math.sqrt(sum(row["error"] ** 2 for row in found)) / len(found)
    return mean(found, "loss"), mean(found, "gap"), error


def _full(rows: Rows) -> int:
    """Return width + 1, the number of keys that is enough for exact outputs."""
    return head(rows[0]) + 1


def _budgets(rows: Rows, oracle: str) -> list[int]:
    return sorted(distinct(pick(rows, what="swap", oracle=oracle), "r"))


def _apart(low: Loss, high: Loss) -> bool:
    """Return whether `low` loses less than `high`, by more than two standard errors."""
    return high[1] - low[1] > 2 * math.hypot(low[2], high[2])


def _shown(of: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
    return lambda found: "; ".join(f"{kind} {of(value)}" for kind, value in found.items())


def _at(rows: Rows, oracle: str, r: int) -> dict[str, Loss]:
    return {kind: _of(rows, kind, oracle, r) for kind in KINDS}


def _both(rows: Rows) -> dict[tuple[str, int], dict[str, Loss]]:
    """Return the losses of both oracles, by kernel and budget."""
    budgets = [r for r in _budgets(rows, "value_aware") if r in _budgets(rows, "top_keys")]
    return {(kind, r): {oracle: _of(rows, kind, oracle, r) for oracle in ORACLES} for kind in KINDS for r in budgets}


def _less(both: dict[str, Loss]) -> bool:
    return _apart(both["value_aware"], both["top_keys"])


def _compared(found: dict[tuple[str, int], dict[str, Loss]]) -> str:
    four = {kind: " / ".join(f"{math.exp(loss):.2f}" for loss, *_ in found[kind, 4].values()) for kind in KINDS}
    answers = [_less(both) for both in found.values()]
    return f"r = 4: {_shown(str)(four)} (OVO / OVA); below at {sum(answers)} of {len(answers)} points"


def _full_keys(oracle: str) -> Callable[[Rows], dict[str, Any]]:
    return lambda rows: {"keys": _full(rows), "losses": _at(rows, oracle, _full(rows))}


def _more(least: float) -> Criterion:
    return each(f"at least {least:.0%}", lambda loss: math.exp(loss[1]) - 1 >= least).of("losses")


def _skewed(rows: Rows) -> dict[str, Any]:
    """Return the skew and the loss of each kernel, and their order, the most skewed first."""
    skew = {kind: mean(pick(rows, what="trained", kind=kind), "largest") for kind in KINDS}
    losses = _at(rows, "top_keys", _full(rows))
    order = sorted(KINDS, key=skew.__getitem__, reverse=True)
    return {"skew": skew, "losses": losses, "keys": _full(rows), "order": order}


def _in_order(first: int, second: int) -> Callable[[dict[str, Any]], bool]:
    return lambda found: _apart(*(found["losses"][found["order"][place]] for place in (first, second)))


_EXP_FIRST = Criterion(
    "exp is the most skewed and loses less than both at width + 1 keys, by more than two standard errors",
    lambda found: found["order"][0] == "exp" and _in_order(0, 1)(found) and _in_order(0, 2)(found),
)
_BELOW = each("OVA-1 below OVO-1 by more than two standard errors", _less)
_EXP_BEST = Criterion("exp has the lowest perplexity", lambda found: min(found, key=found.__getitem__) == "exp")


def _kernels(*pairs: tuple[str, str]) -> Callable[[dict[str, Any]], bool]:
    return lambda found: all(_apart(found["losses"][a], found["losses"][b]) for a, b in pairs)


def _tables(rows: Rows) -> list[Table]:
    full = _full(rows)
    lines = []
    for kind, words in KINDS.items():
        mine = [_of(rows, kind, "exact"), *(_of(rows, kind, oracle, r) for oracle in ORACLES for r in (1, full))]
        lines.append([words, *(f"{math.exp(loss):.2f}" for loss, *_ in mine)])
        of = TABLE_2[kind]
        theirs = [of["exact"], *(of[oracle][r] for oracle in ORACLES for r in (1, 65))]
        lines.append(["  paper (words; 65 keys)", *(f"{value:.1f}" for value in theirs)])
    columns = ["kernel", "exact", *(f"{short}-{r}" for short in ORACLES.values() for r in (1, full))]
    curves = [
        [short, str(r), *(f"{loss:.3f} ({abs(gap) if abs(gap) < 5e-4 else gap:+.3f})"
                          for loss, gap, _ in (_of(rows, kind, name, r) for kind in KINDS))]
        for name, short in ORACLES.items() for r in _budgets(rows, name)
    ]  # fmt: skip
    place = f"{rows[0]['examples']} held-out pieces of {rows[0]['max_length']} bytes, their second half"
    return [
        Table(f"Perplexity of a byte: {place}", columns, lines),
        Table("Loss in nats (and above exact attention)",
              ["oracle", "keys", *(f"{kind}, exact {_of(rows, kind, 'exact')[0]:.3f}" for kind in KINDS)], curves),
        listing("Training, and the weights of the first seed's model",
                [the(rows, what="trained", kind=kind, seed=0) for kind in KINDS],
                {"kernel": "{kind}", "steps": "{max_steps}", "perplexity": "{last[perplexity]:.2f}",
                 "chance": "{chance:.0f}", "largest weight": "{largest:.3f}", f"{full} largest hold": "{held:.3f}"}),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(4.4, 4.2))
    for number, kind in enumerate(KINDS):
        colour = style(number)["color"]
        for oracle, dash in (("top_keys", "-"), ("value_aware", ":")):
            found = {r: _of(rows, kind, oracle, r) for r in _budgets(rows, oracle)}
            losses = {r: loss for r, (loss, *_) in found.items()}
            line(left, losses, f"{KINDS[kind]}, {ORACLES[oracle]}", number, linestyle=dash)
            line(middle, {r: gap for r, (_, gap, _) in found.items() if gap > 1e-4}, None, number, linestyle=dash)
            theirs = {r: math.log(value) for r, value in TABLE_2[kind][oracle].items()}
            line(right, theirs, None, number, linestyle=dash)
            line(right, theirs, **PAPER)
        level(left, _of(rows, kind, "exact")[0], color=colour, linestyle="--")
        level(right, math.log(TABLE_2[kind]["exact"]), color=colour, linestyle="--")
    left.plot([], [], color="black", linestyle="--", linewidth=0.8, label="exact attention, by its colour")
    left.plot([], [], label="the paper's Table 2", **PAPER)
    keys = "r: keys read by a query"
    left.set(xscale="log", xlabel=keys, ylabel="loss (nats per byte)", title=f"Ours: {rows[0]['max_length']} bytes")
    middle.set(xscale="log", yscale="log", xlabel=keys, ylabel="above exact attention (nats per byte)",
               title="The same, above exact attention")  # fmt: skip
    right.set(xscale="log", xlabel=keys, ylabel="loss (nats per word)", title="The paper: 512 words of WikiText-103")
    figure.legend(loc="outside lower center", ncols=4)


_TWICE = "by more than two standard errors"
STUDY = Study(
    name="value-aware-kernels", paper="value-aware", where="Table 2, Figure 2",
    title="Language models with exponential, polynomial and elu kernels: how few keys each can do with",
    cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("data", "seeds"),
    claims=(
        Claim("aware", "Table 2",
              "the best r values (OVA) lose less than the r largest weights (OVO), with every kernel",
              "r = 1: 1031 / 280, 6700 / 1005, 1771 / 837; r = 65: 33.5 / 30.5, 310 / 34.2, 62.7 / 35.3", judge=Judge(
                  _both, each(f"{_TWICE} at every r that both were measured at, with every kernel", _less),
                  Criterion("at every r from 4 on",
                            lambda found: all(_less(both) for (_, r), both in found.items() if r >= 4)), _compared)),
        Claim("exact", "section 3, Table 2", "width + 1 values make the output exactly, with every kernel",
              "30.5, 34.2 and 35.3 are exact attention's", judge=Judge(
                  _full_keys("value_aware"),
                  each("within 1e-5 nats of exact attention's", lambda loss: abs(loss[1]) < 1e-5).of("losses"),
                  each("1e-3", lambda loss: abs(loss[1]) < 1e-3).of("losses"), lambda found: (
                      f"r = {found['keys']}: " + _shown(lambda loss: f"{abs(loss[1]):.0e} nats off")(found["losses"])),
                  of="loss where values are looked for")),
        Claim("oblivious", "Table 2", "width + 1 keys of largest weight are not enough, with any kernel",
              "perplexity +10 %, +807 %, +78 % (exp, poly, elu)", judge=Judge(
                  _full_keys("top_keys"), _more(0.08), _more(0.01), lambda found: f"r = {found['keys']}: "
                  + _shown(lambda loss: f"{math.exp(loss[1]) - 1:+.1%}")(found["losses"]),
                  of="perplexity above exact attention's, with every kernel")),
        Claim("single", "Table 2", "one key is close to useless, and one value less so",
              "perplexity x 33.8 / 9.2, x 196 / 29, x 50 / 24 (OVO-1 / OVA-1)", judge=Judge(
                  lambda rows: {kind: {oracle: _of(rows, kind, oracle, 1) for oracle in ORACLES} for kind in KINDS},
                  each("both at least three times exact attention's perplexity", lambda both: (
                      min(math.exp(gap) for _, gap, _ in both.values()) >= 3)) & _BELOW, _BELOW, lambda found: (
                      _shown(lambda both: " / ".join(f"{math.exp(loss[1]):.1f}" for loss in both.values()))(found)
                      + " times (OVO-1 / OVA-1)"), of="with every kernel")),
        Claim("alike", "Table 2, Figure 2", "with all keys the kernels are close, the exponential the best",
              "30.5, 34.2, 35.3 (exp, poly, elu): at most 16 % apart", judge=Judge(
                  lambda rows: {kind: math.exp(_of(rows, kind, "exact")[0]) for kind in KINDS},
                  _EXP_BEST & Criterion("none is more than 16 % above",
                                        lambda found: max(found.values()) <= 1.16 * found["exp"]),
                  _EXP_BEST, _shown("{:.2f}".format))),
        Claim("slower", "Figure 2", "with less skewed kernels OVO needs more keys: elu, and above all the polynomial",
              "at 65 keys: +0.09, +2.21, +0.57 nats (exp, poly, elu)", judge=Judge(
                  _full_keys("top_keys"),
                  Criterion(f"exp < elu < poly, each step {_TWICE}", _kernels(("exp", "elu"), ("elu", "poly"))),
                  Criterion("exp below both", _kernels(("exp", "elu"), ("exp", "poly"))), lambda found: (
                      f"r = {found['keys']}: " + _shown(lambda loss: f"+{loss[1]:.3f} nats")(found["losses"])
                      + f" (standard error at most {max(error for *_, error in found['losses'].values()):.3f})"),
                  of="loss above exact attention at width + 1 keys")),
        Claim("skew", "sections 3, 4",
              "the less skewed the weights of a kernel, the more OVO loses, and exp is the most skewed",
              "argued, not measured", judge=Judge(
                  _skewed, _EXP_FIRST & Criterion("the less skewed of the others loses more", _in_order(1, 2)),
                  _EXP_FIRST, lambda found: (
                      f"largest weight, mean: {_shown('{:.2f}'.format)(found['skew'])}; OVO-{found['keys']}: "
                      f"{_shown(lambda loss: f'{loss[1]:+.3f}')(found['losses'])} nats"))),
    ),
)  # fmt: skip
