"""How far approximate attention is from softmax attention in the spectral norm, against landmarks and length.

Informer, the figure's fourth method, is not in this library.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparing import documents
from sparing.documents import Documents
from sparing.functional import attention
from sparing.models import Subject, load
from sparing.workbench.capture import capture
from sparing.workbench.prepare import extended
from sparing_lab.report.figure import PAPER, panels, style
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import wikitext

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = (16, 32, 64, 128, 256)
WEIGHTS = ("initialised", "pretrained")
MODELS = {"small": "minilm", "paper": "bert-base-cased"}
LENGTHS = {"small": (512, 2048), "paper": (512, 1024, 2048, 4096)}
#: In the paper's figure Skyformer is the lifted Nystrom method on the softmax kernel, with normalised rows. Landmarks
#: are drawn as in its Definition 1, and M is not damped.
SPECS = {
    "Skyformer": "skyformer(landmarks={}, kernel=softmax, gamma=0, sampling=iid)",
    "Nystromformer": "nystrom(landmarks={})",
    "Performer": "random_features(features={})",
}
OTHERS = [name for name in SPECS if name != "Skyformer"]
#: What Skyformer is made for: its own kernel, against the dense form of that.
OWN = "skyformer(landmarks={})"
#: Read off the paper's figure, within 3 %: method -> values at these numbers of landmarks.
READ: dict[Panel, dict[str, dict[int, float]]] = {
    ("initialised", 512): {
        "Skyformer": dict(zip(BUDGETS, (1.45, 1.14, 0.89, 0.61, 0.36), strict=True)),
        "Nystromformer": {16: 1.34, 256: 0.93},
        "Performer": dict(zip(BUDGETS, (1.82, 1.62, 1.45, 1.21, 1.20), strict=True)),
    },
    ("initialised", 4096): {
        "Skyformer": dict(zip(BUDGETS, (4.65, 3.7, 2.88, 2.0, 1.2), strict=True)),
        "Nystromformer": {16: 4.64, 256: 4.61},
        "Performer": dict(zip(BUDGETS, (4.5, 4.3, 4.0, 4.4, 4.1), strict=True)),
    },
    ("pretrained", 512): {
        "Skyformer": dict(zip(BUDGETS, (2.14, 1.46, 1.06, 0.76, 0.51), strict=True)),
        "Nystromformer": {16: 1.16, 256: 0.66},
        "Performer": dict(zip(BUDGETS, (1.54, 1.25, 1.11, 1.06, 1.07), strict=True)),
    },
    ("pretrained", 4096): {
        "Skyformer": dict(zip(BUDGETS, (3.78, 2.75, 2.16, 1.72, 1.27), strict=True)),
        "Nystromformer": {16: 2.5, 256: 2.45},
        "Performer": dict(zip(BUDGETS, (2.9, 2.65, 2.33, 2.38, 2.3), strict=True)),
    },
}


Panel = tuple[str, int]  #: of the figure: weights and length


class Inputs(NamedTuple):
    """One layer on one text, and what dense attention makes of it."""

    q: Tensor  # [1, H, n, d]
    k: Tensor
    v: Tensor
    exact: Tensor
    own: Tensor  # Skyformer's target: the dense form of its kernel


def _cells(settings: Settings) -> list[Cell]:
    seeds = settings.seeds or 3
    if settings.data is not None and settings.small and wikitext.path_in(settings.data) is None:
        settings.refuse_unused("wikitext2/valid.txt, plain text (may be .xz)")
    text = _documents(settings.data, settings.small)
    model = settings.model or MODELS[settings.scale]
    given = {"model": model, "text": text.name, "fingerprint": text.fingerprint}
    cells: list[Cell] = []
    for weights in WEIGHTS:
        for length in LENGTHS[settings.scale]:
            for seed in range(seeds):
                here = {**given, "weights": weights, "length": length, "seed": seed}
                cells.append({**here, "method": "values", "budget": 0})
                cells += [{**here, "method": name, "budget": d} for name in (*SPECS, "own") for d in BUDGETS]
    return cells


def _measure(settings: Settings, cell: Cell) -> Row:
    inputs = _inputs(
        cell["model"], cell["weights"], cell["length"], cell["seed"], settings.data, settings.small, cell["fingerprint"]
    )
    return spectral_errors(cell["method"], cell["budget"], inputs, cell["seed"])


def spectral_errors(name: str, budget: int, inputs: Sequence[Inputs], seed: int) -> Row:
    """The spectral norm of the error of a head's output, and that divided by the norm of what it should be.

    Means over layers and heads. name: of `SPECS`; "own": Skyformer's against the dense form of its own kernel;
    "values": the mean of all values in place of attention; with it, what the queries and keys are like.
    """
    errors, relative = [], []
    for q, k, v, exact, own in inputs:
        target = own if name == "own" else exact
        if name == "values":
            found = v.mean(-2, keepdim=True).expand_as(v)
        else:
            spec = OWN if name == "own" else SPECS[name]
            found = attention(q, k, v, method=spec.format(budget), seed=seed)
        error, size = (torch.linalg.matrix_norm(x.double(), 2) for x in (found - target, target))
        errors += error.flatten().tolist()
        relative += (error / size).flatten().tolist()
    facts = {} if name != "values" else _facts(inputs)
    return {"error": fmean(errors), "relative": fmean(relative), "heads": len(errors), **facts}


def _facts(inputs: Sequence[Inputs]) -> Row:
    """Medians over heads of what hangs on queries and keys: how near they are, how unequal keys, how peaked rows.

    kernel: the Gaussian kernel of a typical pair. spread: the logarithm of the largest over the least factor
    exp(s |k|^2 / 2), which turns it into softmax's. keys: the exponential of the entropy of a typical row of weights.
    """
    kernel, spread, keys = [], [], []
    for q, k, *_ in inputs:
        q, k = q[..., :: max(q.shape[-2] // 256, 1), :].double(), k.double()
        scale = q.shape[-1] ** -0.5
        kernel.append((torch.cdist(q, k).square() * (-scale / 2)).exp().flatten(-2).median(-1).values)
        factor = scale / 2 * k.square().sum(-1)
        spread.append(factor.amax(-1) - factor.amin(-1))
        logs = (q @ k.mT * scale).log_softmax(-1)
        keys.append(-(logs.exp() * logs).sum(-1).median(-1).values)
    medians = (float(torch.cat([x.flatten() for x in each]).median()) for each in (kernel, spread, keys))
    typical, factors, entropy = medians
    return {"kernel": typical, "spread": factors, "keys": math.exp(entropy)}


def _documents(data: Path | None, small: bool) -> Documents:
    """WikiText-2, as in the paper; where nothing may be downloaded, Python's help topics do."""
    if small and (data is None or wikitext.path_in(data) is None):
        return documents.default()
    return wikitext.read(data, wanted_by="skyformer-spectral")


@functools.lru_cache(maxsize=1)
def _texts(data: Path | None, small: bool, fingerprint: str) -> tuple[str, ...]:
    return _documents(data, small).texts


@functools.lru_cache(maxsize=1)
def _subject(model: str) -> Subject:
    return load(model)


@functools.lru_cache(maxsize=1)
@torch.no_grad()
def _inputs(
    model: str, weights: str, length: int, seed: int, data: Path | None, small: bool, fingerprint: str
) -> list[Inputs]:
    """Of every layer, or of every second of a small model, for the text of that number."""
    subject = _subject(model)
    if weights == "initialised":
        subject = initialised(subject, seed)
    if subject.positions is not None and length > subject.positions:
        subject = extended(subject, length)
    texts = _texts(data, small, fingerprint)
    if seed >= len(texts):
        raise ValueError(f"seeds: each takes a text of its own, and there are {len(texts)}")
    ids = subject.encode(texts[seed : seed + 1], length)[0][0]
    if len(ids) < length:
        raise ValueError(f"seeds: each takes a text of {length} tokens, and there are only {seed}")
    found = []
    for layer in capture(subject.model, input_ids=ids[None])[1 if small else 0 :: 2 if small else 1]:
        found.append(inputs_of(layer.query, layer.key, layer.value.project(layer.key.shape[1])))
    return found


def inputs_of(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """With both targets."""
    return Inputs(q, k, v, *(attention(q, k, v, method=name) for name in ("exact", "kernelized")))


def initialised(subject: Subject, seed: int) -> Subject:
    """The same architecture with weights that nobody trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = type(subject.model)(copy.deepcopy(subject.model.config))
    return Subject(f"{subject.name}, initialised", model.eval(), subject.tokenizer)


def _means(rows: Rows, field: str = "error") -> dict[tuple[Panel, str, int], float]:
    """(panel, method, landmarks) -> the mean over seeds."""
    found: dict[tuple[Panel, str, int], list[float]] = {}
    for row in rows:
        found.setdefault(((row["weights"], row["length"]), row["method"], row["budget"]), []).append(row[field])
    return {key: fmean(values) for key, values in found.items()}


def _seen(rows: Rows, panel: Panel, name: str) -> list[list[float]]:
    """The errors of all seeds, for each number of landmarks."""
    here = pick(rows, weights=panel[0], length=panel[1], method=name)
    return [[row["error"] for row in pick(here, budget=d)] for d in BUDGETS]


def _ends(rows: Rows) -> list[Panel]:
    """The panels of the figure: both weights at the shortest and the longest length."""
    lengths = {row["length"] for row in rows}
    return [(weights, length) for weights in WEIGHTS for length in (min(lengths), max(lengths))]


def _ahead(rows: Rows, budget: int) -> list[Panel]:
    """The panels where Skyformer's error is the least."""
    means = _means(rows)
    return [
        panel for panel in _ends(rows)
        if all(means[panel, "Skyformer", budget] < means[panel, other, budget] for other in OTHERS)
    ]  # fmt: skip


def _named(panel: Sequence[Panel]) -> str:
    return ", ".join(f"{weights} {length}" for weights, length in panel) or "none"


def _best(rows: Rows) -> Judgement:
    won = _ahead(rows, BUDGETS[-1])
    return judged(len(won) == 4, len(won) == 3, ours=f"in {len(won)} of 4 panels: {_named(won)}")


def _from_64(rows: Rows) -> Judgement:
    won = {d: _ahead(rows, d) for d in BUDGETS if d >= 64}
    ours = "panels ahead: " + ", ".join(f"{len(panel)} of 4 at {d}" for d, panel in won.items())
    each = [set(_ends(rows)) - set(panel) for panel in won.values()]
    return judged(not any(each), not any(each[1:]) or len(set().union(*each)) == 1, ours=ours)


def _worst(rows: Rows) -> Judgement:
    means = _means(rows)
    panel = [each for each in _ends(rows) if each[0] == "pretrained"]
    found = [{name: means[each, name, 16] for name in SPECS} for each in panel]
    worst = [each["Skyformer"] == max(each.values()) for each in found]
    ours = "; ".join(
        f"{length}: " + ", ".join(f"{name} {value:.2f}" for name, value in each.items())
        for (_, length), each in zip(panel, found, strict=True)
    )
    return judged(all(worst), any(worst), ours=ours)


def _flat(rows: Rows) -> Judgement:
    means = _means(rows)
    name = "Nystromformer"
    falls = {panel: 1 - means[panel, name, 256] / means[panel, name, 16] for panel in _ends(rows)}
    lengths = [length for _, length in falls]
    short, long = ([falls[weights, length] for weights in WEIGHTS] for length in (min(lengths), max(lengths)))
    ours = "falls by " + ", ".join(f"{fall:.0%} ({weights} {length})" for (weights, length), fall in falls.items())
    less = all(b < max(a, 0.0) / 2 for a, b in zip(short, long, strict=True))
    return judged(max(long) < 0.05, less, ours=ours)


def _falls(rows: Rows) -> Judgement:
    means = _means(rows)
    curves = {panel: [means[panel, "Skyformer", d] for d in BUDGETS] for panel in _ends(rows)}
    steady = all(a > b for curve in curves.values() for a, b in pairwise(curve))
    thirds = all(curve[-1] <= curve[0] / 2.5 for curve in curves.values())
    factors = [f"{curve[0] / curve[-1]:.1f} ({panel[0]} {panel[1]})" for panel, curve in curves.items()]
    ours = f"by a factor of {', '.join(factors)}{'' if steady else '; not at every step'}"
    return judged(steady and thirds, steady, ours=ours)


def _grows(rows: Rows) -> Judgement:
    means, lengths = _means(rows), sorted({row["length"] for row in rows})
    ratios = {
        (weights, name, d): means[(weights, lengths[-1]), name, d] / means[(weights, lengths[0]), name, d]
        for weights in WEIGHTS for name in SPECS for d in BUDGETS
    }  # fmt: skip
    grown = [ratio > 1 for ratio in ratios.values()]
    ours = f"in {sum(grown)} of {len(grown)} cases, from {lengths[0]} to {lengths[-1]} tokens by a factor of "
    ours += f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f}"
    return judged(all(grown), sum(grown) >= 0.9 * len(grown), ours=ours)


def _values(rows: Rows) -> Judgement:
    if any(row["model"] != MODELS["paper"] or "help topics" in row["text"] for row in rows):
        return not_run(f"needs {MODELS['paper']} and WikiText-2: --scale paper")
    means = _means(rows)
    off = [
        abs(means[panel, name, d] / value - 1)
        for panel, curves in READ.items() for name, curve in curves.items() for d, value in curve.items()
    ]  # fmt: skip
    near = sum(each <= 0.2 for each in off)
    ours = f"{near} of {len(off)} within 20 %, the farthest {max(off):.0%} off"
    return judged(near == len(off), near >= len(off) / 2, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    relative = _means(rows, "relative")
    columns = ["weights, tokens", "method", *(f"d = {d}" for d in BUDGETS)]
    first, second, third = [], [], []
    for panel in dict.fromkeys((row["weights"], row["length"]) for row in rows):
        where = f"{panel[0]} {panel[1]}"
        for name in SPECS:
            shown = [f"{fmean(x):.2g} ±{(max(x) - min(x)) / 2 / fmean(x):.0%}" for x in _seen(rows, panel, name)]
            first.append([where, name, *shown])
            read = READ.get(panel, {}).get(name, {})
            if read:
                first.append(["", "  paper (BERT)", *(f"{read[d]:.2f}" if d in read else "" for d in BUDGETS)])
        for name in (*SPECS, "own"):
            label = "Skyformer, own kernel" if name == "own" else name
            second.append([where, label, *(f"{relative[panel, name, d]:.2g}" for d in BUDGETS)])
        plain = pick(rows, weights=panel[0], length=panel[1], method="values")
        facts = {name: fmean(row[name] for row in plain) for name in ("kernel", "spread", "keys", "error", "relative")}
        third.append([
            where, f"{facts['kernel']:.1g}", f"e^{facts['spread']:.1f}", f"{facts['keys']:.0f}",
            f"{facts['error']:.2f}", f"{facts['relative']:.3f}",
        ])  # fmt: skip
    return [
        Table("Spectral norm of the error, mean and half the range over seeds", columns, first),
        Table("Divided by the spectral norm of the exact output; own kernel: of the dense form", columns, second),
        Table(
            "Queries and keys, medians; and the error of the mean of all values in place of attention",
            ["weights, tokens", "kernel of a pair", "key factors", "keys that count", "error", "relative"], third,
        ),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    means, ends = _means(rows), _ends(rows)
    for axes, panel in zip(panels(figure, 2, 2, size=(4.2, 3.4)), ends, strict=True):
        theirs = (panel[0], 512 if panel[1] == ends[0][1] else 4096)
        for number, name in enumerate(SPECS):
            seen, look = _seen(rows, panel, name), style(number)
            axes.plot(BUDGETS, [fmean(each) for each in seen], label=name, **look)
            low, high = ([end(each) for each in seen] for end in (min, max))
            axes.fill_between(BUDGETS, low, high, alpha=0.2, color=look["color"])
            read = READ[theirs][name]
            hollow = {**PAPER, "color": look["color"], "marker": look["marker"], "markerfacecolor": "none"}
            axes.plot(list(read), list(read.values()), **hollow)
        axes.axhline(means[panel, "values", 0], color="black", linestyle=":", label="mean of all values")
        axes.plot([], [], label="hollow: the paper's, read off", **{**PAPER, "marker": "o", "markerfacecolor": "none"})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(BUDGETS, [str(d) for d in BUDGETS])
        axes.set(
            xlabel="landmarks or features d", ylabel="spectral norm of the error",
            title=f"{panel[0]}, {panel[1]} tokens (the paper's: BERT, {theirs[1]})",
        )  # fmt: skip
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{rows[0]['model']} on {rows[0]['text']}; bands: all seeds")


STUDY = Study(
    name="skyformer-spectral",
    title="Spectral error of the attention output against landmarks and length",
    paper="skyformer",
    where="Figure 1",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds", "model"),
    claims=(
        Claim(
            "best", "Figure 1", "at d = 256 Skyformer has the least error everywhere",
            "0.36, 1.2, 0.51, 1.27; the next 0.86, 4.1, 0.66, 2.3",
            "less than Nystromformer and random features in all four panels; same shape: in three", _best,
        ),
        Claim(
            "from-64", "Figure 1", "Skyformer is ahead from about d = 64", "all panels",
            "ahead at 64, 128 and 256 in all four panels; same shape: at 128 and 256, or in all panels but one",
            _from_64,
        ),
        Claim(
            "worst-16", "Figure 1", "at d = 16 Skyformer is the worst on pretrained weights",
            "2.14 at 512 (the next 1.54), 3.78 at 4096 (the next 2.9)",
            "the largest error at both lengths; same shape: at one", _worst,
        ),
        Claim(
            "falls", "Figure 1", "Skyformer's error falls steadily with d", "by a factor of 3.0 to 4.2 from 16 to 256",
            "with every doubling of d in every panel, in all by 2.5 or more; same shape: with every doubling", _falls,
        ),
        Claim(
            "flat", "Figure 1", "at the longest length Nystromformer hardly gains from landmarks",
            "4096 tokens: 4.64 to 4.61, 2.5 to 2.45; 512 tokens: 1.34 to 0.93, 1.16 to 0.66",
            "its error falls by less than 5 % from d = 16 to 256; same shape: by less than half of that at the "
            "shortest length", _flat,
        ),
        Claim(
            "grows", "Figure 1", "errors grow with the length", "by a factor of 1.8 to 5.0 from 512 to 4096",
            "for every method, d and weights; same shape: in nine of ten cases", _grows,
        ),
        Claim(
            "values", "Figure 1", "the errors themselves", "see the figure",
            "every value that was read off is met within 20 %; same shape: half of them", _values,
        ),
    ),
)  # fmt: skip
