"""Language models trained with three kernels, and how few keys each can do with.

The paper trains on the words of WikiText-103, with a rate that falls with the root of the steps; here a token is a
byte, and the rate falls in a line. The oracles take the weights of the kernel that the model was trained with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparing import documents
from sparing.call import Call
from sparing.contract import Method, Supports, method
from sparing.documents import Documents
from sparing.oracles.kernels import OracleOf, weights_of
from sparing.sample_text import distinct_topics
from sparing_lab.report.figure import PAPER, panels, style
from sparing_lab.studies._trained import Tried, row_of, running, trained, tried
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import wikitext
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"exp": "exponential", "poly": "polynomial (degree 2)", "elu": "elu"}
ORACLES = {"top_keys": "OVO", "value_aware": "OVA"}
#: Heads of 16 at 128 bytes: width + 1 keys are as large a share of all as the paper's 65 of 512.
SMALL: dict[str, Any] = {
    "task": "causal", "length": 128, "width": 64, "heads": 4, "layers": 2, "hidden": 256, "batch": 16, "steps": 1000,
    "rate": 2e-3, "evaluate": 500,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "task": "causal", "length": 512, "width": 512, "heads": 8, "layers": 6, "hidden": 2048, "batch": 128,
    "steps": 31520, "rate": 5e-4, "warmup": 4000 / 31520, "decay": 0.01, "clip": 1e9,
}  # fmt: skip
BUDGETS = {
    "small": {"top_keys": (1, 2, 4, 8, 17, 32, 64), "value_aware": (1, 2, 4, 8, 17)},
    "paper": {"top_keys": (1, 2, 4, 8, 16, 32, 65, 128, 256), "value_aware": (1, 2, 4, 8, 16, 32, 65)},
}
EXAMPLES = {"small": 64, "paper": 256}  #: held-out pieces
SEARCHED = {"small": 4, "paper": 4}  #: pieces in which width + 1 values are looked for, which takes longest
CONTEXT = 0.5  #: share of a piece that only gives context
#: Perplexities of exact attention and of the oracles at 1 and 65 keys.
TABLE_2 = {
    "exp": {"exact": 30.5, "top_keys": {1: 1031.1, 65: 33.5}, "value_aware": {1: 280.3, 65: 30.5}},
    "poly": {"exact": 34.2, "top_keys": {1: 6700.2, 65: 310.2}, "value_aware": {1: 1005.4, 65: 34.2}},
    "elu": {"exact": 35.3, "top_keys": {1: 1770.6, 65: 62.7}, "value_aware": {1: 837.4, 65: 35.3}},
}
_LARGE_FILE = "wikitext103/wiki.train.tokens"


@functools.lru_cache(maxsize=1)
def _text(settings: Settings) -> tuple[Path | None, str]:
    """The file that is learned from, None for the help topics, and the fingerprint of its text."""
    data = settings.data
    if settings.small:
        path = None if data is None else wikitext.path_in(data)
        if path is None:
            settings.refuse_unused("wikitext2/train.txt (or valid.txt, .txt.xz), plain text")
            return None, Documents("topics", tuple(distinct_topics())).fingerprint
    else:
        places = [] if data is None else [data / f"{_LARGE_FILE}{end}" for end in ("", ".xz", ".gz")]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(
                f"data: value-aware-kernels wants WikiText-103, {data or 'FOLDER'}/{_LARGE_FILE} (or .xz): plain text; "
                "the paper's is on https://huggingface.co/datasets/Salesforce/wikitext (wikitext-103-v1)"
            )
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
    run, few = (_trial(model, found.task, cell[count]) for count in ("examples", "searched"))
    exact, exact_few = run(kernel), few(kernel)
    rows: list[Row] = [
        {"what": "trained", **row_of(found), **_skew(kernel, run, cell)},
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


def _trial(model: Any, task: Task, examples: int) -> Callable[[Method], Tried]:
    """What a method in the layers loses on so many held-out pieces, in the half that has most context before it."""
    many, all_ = min(examples, len(task.valid)), len(task.valid)
    numbers = [number * all_ // many for number in range(many)]

    def run(method: Method) -> Tried:
        with running(model, method):
            return tried(model, task, numbers, context=round(CONTEXT * task.length))

    return run


@dataclass(frozen=True, kw_only=True)
class _Seen(Method):
    """A kernel whose weights somebody looks at."""

    name = "_seen"
    target = "kernel"
    supports = Supports(causal=True, attn_mask="boolean", gradient=False)

    kernel: Method
    see: Callable[[Tensor], None]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        weights = weights_of(self.kernel, q, k, call)
        self.see(weights)
        return (weights @ v.double()).to(v.dtype)


def _skew(kernel: Method, run: Callable[[Method], Tried], cell: Cell) -> Row:
    """How large a query's largest weight is, and how much the width + 1 largest hold, on average."""
    first, few = round(CONTEXT * cell["length"]), head(cell) + 1
    sums = torch.zeros(3, dtype=torch.float64)

    def see(weights: Tensor) -> None:
        rows = weights[:, :, first:].flatten(0, 2)
        top = rows.topk(min(few, rows.shape[-1])).values
        sums.add_(torch.stack([top[:, 0].sum(), top.sum(), torch.tensor(float(len(rows)))]))

    run(_Seen(kernel=kernel, see=see))
    return {"largest": float(sums[0] / sums[2]), "held": float(sums[1] / sums[2])}


def head(cell: Cell) -> int:
    """The width of a head's values."""
    return int(cell["width"] // cell["heads"])


# What the rows say


def _of(rows: Rows, kind: str, oracle: str, r: int | None) -> tuple[float, float, float]:
    """Loss, how much that is above exact attention's, and the standard error of this; means over seeds."""
    found = pick(rows, what="swap", kind=kind, oracle=oracle, r=r)
    if not found:
        raise LookupError(f"no row has {kind}, {oracle}, {r}")
    count = len(found)
    error = math.sqrt(sum(row["error"] ** 2 for row in found)) / count
    return sum(row["loss"] for row in found) / count, sum(row["gap"] for row in found) / count, error


def _full(rows: Rows) -> int:
    """Width + 1 keys."""
    return head(rows[0]) + 1


def _budgets(rows: Rows, oracle: str) -> list[int]:
    return sorted({row["r"] for row in pick(rows, what="swap", oracle=oracle)})


def _perplexity(rows: Rows, kind: str, oracle: str, r: int | None = None) -> float:
    return math.exp(_of(rows, kind, oracle, r)[0])


def _shown(rows: Rows, of: Callable[[str], str]) -> str:
    return "; ".join(f"{kind} {of(kind)}" for kind in KINDS)


def _below(rows: Rows, kind: str, r: int) -> bool:
    """Whether the best values lose less than the largest weights, by more than two standard errors."""
    (_, aware, one), (_, oblivious, two) = (_of(rows, kind, oracle, r) for oracle in ("value_aware", "top_keys"))
    return oblivious - aware > 2 * math.hypot(one, two)


def _aware(rows: Rows) -> Judgement:
    both = [r for r in _budgets(rows, "value_aware") if r in _budgets(rows, "top_keys")]
    answers = {(kind, r): _below(rows, kind, r) for kind in KINDS for r in both}
    ours = "r = 4: " + _shown(
        rows, lambda kind: " / ".join(f"{_perplexity(rows, kind, oracle, 4):.2f}" for oracle in ORACLES)
    )
    ours += f" (OVO / OVA); below at {sum(answers.values())} of {len(answers)} points"
    return judged(all(answers.values()), all(said for (_, r), said in answers.items() if r >= 4), ours=ours)


def _exact(rows: Rows) -> Judgement:
    gaps = {kind: abs(_of(rows, kind, "value_aware", _full(rows))[1]) for kind in KINDS}
    ours = f"r = {_full(rows)}: " + _shown(rows, lambda kind: f"{gaps[kind]:.0e} nats off")
    return judged(max(gaps.values()) < 1e-5, max(gaps.values()) < 1e-3, ours=ours)


def _oblivious(rows: Rows) -> Judgement:
    more = {kind: math.exp(_of(rows, kind, "top_keys", _full(rows))[1]) - 1 for kind in KINDS}
    ours = f"r = {_full(rows)}: " + _shown(rows, lambda kind: f"{more[kind]:+.1%}")
    return judged(min(more.values()) >= 0.08, min(more.values()) >= 0.01, ours=ours)


def _single(rows: Rows) -> Judgement:
    times = {kind: [math.exp(_of(rows, kind, oracle, 1)[1]) for oracle in ORACLES] for kind in KINDS}
    less = all(_below(rows, kind, 1) for kind in KINDS)
    ours = _shown(rows, lambda kind: " / ".join(f"{each:.1f}" for each in times[kind])) + " times (OVO-1 / OVA-1)"
    return judged(less and min(map(min, times.values())) >= 3, less, ours=ours)


def _alike(rows: Rows) -> Judgement:
    found = {kind: _perplexity(rows, kind, "exact") for kind in KINDS}
    best = min(found, key=found.__getitem__) == "exp"
    ours = _shown(rows, lambda kind: f"{found[kind]:.2f}")
    return judged(best and max(found.values()) <= 1.16 * found["exp"], best, ours=ours)


def _less(rows: Rows, one: str, two: str) -> bool:
    """Whether width + 1 keys cost one kernel less than another, by more than two standard errors."""
    (_, low, first), (_, high, second) = (_of(rows, kind, "top_keys", _full(rows)) for kind in (one, two))
    return high - low > 2 * math.hypot(first, second)


def _slower(rows: Rows) -> Judgement:
    found = {kind: _of(rows, kind, "top_keys", _full(rows))[1:] for kind in KINDS}
    ours = f"r = {_full(rows)}: " + _shown(rows, lambda kind: f"+{found[kind][0]:.3f} nats")
    ours += f" (standard error at most {max(error for _, error in found.values()):.3f})"
    first = _less(rows, "exp", "elu")
    return judged(first and _less(rows, "elu", "poly"), first and _less(rows, "exp", "poly"), ours=ours)


def _largest(rows: Rows, kind: str) -> float:
    found = pick(rows, what="trained", kind=kind)
    return float(sum(row["largest"] for row in found) / len(found))


def _skewed(rows: Rows) -> Judgement:
    skew = {kind: _largest(rows, kind) for kind in KINDS}
    first, second, third = sorted(KINDS, key=skew.__getitem__, reverse=True)
    exp = first == "exp" and _less(rows, first, second) and _less(rows, first, third)
    gaps = _shown(rows, lambda kind: f"{_of(rows, kind, 'top_keys', _full(rows))[1]:+.3f}")
    ours = f"largest weight, mean: {_shown(rows, lambda kind: f'{skew[kind]:.2f}')}; OVO-{_full(rows)}: {gaps} nats"
    return judged(exp and _less(rows, second, third), exp, ours=ours)


# What people see


def _tables(rows: Rows) -> list[Table]:
    full = _full(rows)
    lines = []
    for kind, words in KINDS.items():
        mine = [_perplexity(rows, kind, oracle, r) for oracle in ORACLES for r in (1, full)]
        lines.append([words, f"{_perplexity(rows, kind, 'exact'):.2f}", *(f"{each:.2f}" for each in mine)])
        of: Any = TABLE_2[kind]
        theirs = [of["exact"], *(of[oracle][r] for oracle in ORACLES for r in (1, 65))]
        lines.append(["  paper (words; 65 keys)", *(f"{each:.1f}" for each in theirs)])
    columns = ["kernel", "exact", *(f"{short}-{r}" for short in ORACLES.values() for r in (1, full))]
    curves = [
        [
            short,
            str(r),
            *(
                f"{loss:.3f} ({abs(gap) if abs(gap) < 5e-4 else gap:+.3f})"
                for loss, gap, _ in (_of(rows, kind, name, r) for kind in KINDS)
            ),
        ]
        for name, short in ORACLES.items()
        for r in _budgets(rows, name)
    ]
    some = rows[0]
    runs = []
    for kind in KINDS:
        first = the(rows, what="trained", kind=kind, seed=0)
        held = f"{first['largest']:.3f}", f"{first['held']:.3f}"
        runs.append([kind, str(first["steps"]), f"{first['last']['perplexity']:.2f}", f"{first['chance']:.0f}", *held])
    place = f"{some['examples']} held-out pieces of {some['length']} bytes, their second half"
    return [
        Table(f"Perplexity of a byte: {place}", columns, lines),
        Table(
            "Loss in nats (and above exact attention)",
            ["oracle", "keys", *(f"{kind}, exact {_of(rows, kind, 'exact', None)[0]:.3f}" for kind in KINDS)], curves,
        ),
        Table(
            "Training, and the weights of the first seed's model",
            ["kernel", "steps", "perplexity", "chance", "largest weight", f"{full} largest hold"], runs,
        ),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(4.4, 4.2))
    for number, kind in enumerate(KINDS):
        for oracle, line in (("top_keys", "-"), ("value_aware", ":")):
            keys = _budgets(rows, oracle)
            found = [_of(rows, kind, oracle, r) for r in keys]
            words = f"{KINDS[kind]}, {ORACLES[oracle]}"
            left.plot(keys, [loss for loss, *_ in found], label=words, linestyle=line, **style(number))
            shown = [(r, gap) for r, (_, gap, _) in zip(keys, found, strict=True) if gap > 1e-4]
            middle.plot(*zip(*shown, strict=True), linestyle=line, **style(number))
            of: Any = TABLE_2[kind]
            theirs = {r: math.log(value) for r, value in of[oracle].items()}
            right.plot(list(theirs), list(theirs.values()), linestyle=line, **style(number))
            right.plot(list(theirs), list(theirs.values()), **PAPER)
        left.axhline(_of(rows, kind, "exact", None)[0], color=style(number)["color"], linestyle="--", linewidth=0.8)
        right.axhline(math.log(of["exact"]), color=style(number)["color"], linestyle="--", linewidth=0.8)
    left.plot([], [], color="black", linestyle="--", linewidth=0.8, label="exact attention, by its colour")
    left.plot([], [], label="the paper's Table 2", **PAPER)
    some = rows[0]
    keys_axis = "r: keys read by a query"
    left.set(xscale="log", xlabel=keys_axis, ylabel="loss (nats per byte)", title=f"Ours: {some['length']} bytes")
    middle.set(
        xscale="log", yscale="log", xlabel=keys_axis, ylabel="above exact attention (nats per byte)",
        title="The same, above exact attention",
    )  # fmt: skip
    title = "The paper: 512 words of WikiText-103"
    right.set(xscale="log", xlabel=keys_axis, ylabel="loss (nats per word)", title=title)
    figure.legend(loc="outside lower center", ncols=4)


STUDY = Study(
    name="value-aware-kernels",
    title="Language models with exponential, polynomial and elu kernels: how few keys each can do with",
    paper="value-aware",
    where="Table 2, Figure 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim(
            "aware", "Table 2", "the best r values (OVA) lose less than the r largest weights (OVO), with every kernel",
            "r = 1: 1031 / 280, 6700 / 1005, 1771 / 837; r = 65: 33.5 / 30.5, 310 / 34.2, 62.7 / 35.3",
            "by more than two standard errors at every r that both were measured at, with every kernel; same shape: at "
            "every r from 4 on", _aware,
        ),
        Claim(
            "exact", "section 3, Table 2", "width + 1 values make the output exactly, with every kernel",
            "30.5, 34.2 and 35.3 are exact attention's", "values are looked for; loss within 1e-5 nats of exact "
            "attention's; same shape: 1e-3", _exact,
        ),
        Claim(
            "oblivious", "Table 2", "width + 1 keys of largest weight are not enough, with any kernel",
            "perplexity +10 %, +807 %, +78 % (exp, poly, elu)", "perplexity at least 8 % above exact attention's with "
            "every kernel; same shape: 1 %", _oblivious,
        ),
        Claim(
            "single", "Table 2", "one key is close to useless, and one value less so",
            "perplexity x 33.8 / 9.2, x 196 / 29, x 50 / 24 (OVO-1 / OVA-1)",
            "both at least three times exact attention's perplexity, OVA-1 below OVO-1 by more than two standard "
            "errors, with every kernel; same shape: only the second", _single,
        ),
        Claim(
            "alike", "Table 2, Figure 2", "with all keys the kernels are close, the exponential the best",
            "30.5, 34.2, 35.3 (exp, poly, elu): at most 16 % apart", "exp has the lowest perplexity, none is more than "
            "16 % above; same shape: only the first", _alike,
        ),
        Claim(
            "slower", "Figure 2", "with less skewed kernels OVO needs more keys: elu, and above all the polynomial",
            "at 65 keys: +0.09, +2.21, +0.57 nats (exp, poly, elu)", "loss above exact attention at width + 1 keys: "
            "exp < elu < poly, each step by more than two standard errors; same shape: exp below both", _slower,
        ),
        Claim(
            "skew", "sections 3, 4", "the less skewed the weights of a kernel, the more OVO loses, and exp is the most "
            "skewed", "argued, not measured", "exp has the largest mean of a query's largest weight, and the smaller "
            "that is with a kernel, the more OVO loses at width + 1 keys, each step by more than two standard errors; "
            "same shape: exp is the most skewed and loses less than both",
            _skewed,
        ),
    ),
)  # fmt: skip
