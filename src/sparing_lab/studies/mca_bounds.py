"""Lemma 1 and Theorem 2 of Monte-Carlo attention: errors as measured, as the variance predicts them, and the bounds."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING

from sparing import minilm
from sparing.models import load
from sparing.workbench.capture import Layer, capture
from sparing.workbench.estimate import exponent
from sparing_lab.report.figure import panels, style
from sparing_lab.studies._mca_bounds import DELTAS, GAUSSIAN, gaussian, row_error, token_error, worst
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = (0.1, 0.2, 0.4, 0.6, 1.0)  #: the paper's four, and a smaller one
LENGTHS = (32, 64, 128, 256)
ALPHA, LENGTH = 0.4, 128  #: of the rows where the other is varied
SAMPLES = ("independent", "shared")
COUNTS = tuple(2**power for power in range(9))  #: r of a single token
PAPER_MODEL = "textattack/bert-base-uncased-SST-2"  #: of those that the supplement names
LIMIT = 4.5  #: standard errors; in all cells of 60 draws together, one false alarm in some hundred runs or less


def _cells(settings: Settings) -> list[Cell]:
    draws = settings.seeds or (60 if settings.small else 1000)
    if draws < 10:
        raise ValueError(f"seeds={draws}: a mean square error needs 10 draws at least")
    model = settings.model or ("minilm" if settings.small else PAPER_MODEL)
    sources = [(model, "first"), (model, "last"), (GAUSSIAN, "")]
    pairs = [(alpha, LENGTH) for alpha in ALPHAS] + [(ALPHA, n) for n in LENGTHS if n != LENGTH]
    # Few draws of a shared list decide about all tokens: that varies more.
    rows = [
        {"what": "rows", "source": source, "layer": layer, "samples": samples, "alpha": alpha, "n": n,
         "draws": (5 if samples == "shared" else 1) * draws}
        for source, layer in sources for alpha, n in pairs for samples in SAMPLES
    ]  # fmt: skip
    tokens = [
        {"what": "token", "source": source, "layer": layer, "r": r, "n": LENGTH, "draws": 10 * draws}
        for source, layer in sources[1:] for r in COUNTS
    ]  # fmt: skip
    worst = [
        {"what": "worst", "case": case, "rounding": rounding, "draws": draws}
        for case, rounding in (("equal tokens", "up"), ("one token", "up"), ("one token", "down"))
    ]
    return [*worst, *tokens, *rows]


def _measure(settings: Settings, cell: Cell) -> Row:
    if cell["what"] == "worst":
        return worst(cell["case"], cell["rounding"], cell["draws"])
    layer = _layer(cell["source"], cell["layer"], cell["n"])
    if cell["what"] == "token":
        return token_error(layer.value, layer.key.shape[1], cell["r"], cell["draws"])
    return row_error(layer.query, layer.key, layer.value, cell["alpha"], cell["samples"], cell["draws"])


@functools.lru_cache(maxsize=8)
def _layers(source: str, n: int) -> list[Layer]:
    """What the layers of a model are given, for one text of n tokens."""
    subject = _subject(source)
    ids = minilm.token_ids(minilm.Encoder(subject.model, subject.tokenizer), length=n, documents=1)
    return capture(subject.model, input_ids=ids)


_subject = functools.lru_cache(maxsize=1)(load)


def _layer(source: str, which: str, n: int) -> Layer:
    """Without the bias, which is exact and would only hide how large an error is."""
    if source == GAUSSIAN:
        return gaussian(n)
    layers = _layers(source, n)
    found = layers[0 if which == "first" else -1]
    return found._replace(value=found.value._replace(bias=None))


def _real(rows: Rows) -> list[Row]:
    return [row for row in pick(rows, what="rows") if row["source"] != GAUSSIAN]


def _lines(rows: Rows) -> list[list[Row]]:
    """Calls of one source, layer and kind of samples, together; none where all tokens are exact."""
    rows = [row for row in rows if row["predicted"] > 0]
    keys = dict.fromkeys((row["source"], row["layer"], row["samples"]) for row in rows)
    return [pick(rows, source=source, layer=layer, samples=samples) for source, layer, samples in keys]


def _lemma(rows: Rows) -> Judgement:
    found = pick(rows, what="token")
    largest, excess = (max(row[name] for row in found) for name in ("worst_mean", "excess"))
    ours = f"at most {largest:.3f} of the bound ({excess:+.1f} standard errors), r = {COUNTS[0]} to {COUNTS[-1]}"
    return judged(excess <= LIMIT, ours=ours)


def _slope(rows: Rows) -> Judgement:
    found = {}
    for source in dict.fromkeys(row["source"] for row in pick(rows, what="token")):
        used = [row for row in pick(rows, what="token", source=source) if row["r"] >= 4]
        found[source] = exponent([row["r"] for row in used], [row["rms"] for row in used])
    close = all(-0.55 <= slope <= -0.45 for slope in found.values())
    return judged(close, ours=", ".join(f"{source} {slope:.3f}" for source, slope in found.items()))


def _variance(rows: Rows) -> Judgement:
    tokens, calls = pick(rows, what="token"), [row for row in pick(rows, what="rows") if row["predicted"] > 0]
    ours = []
    for name, some in (("tokens", tokens), *((kind, pick(calls, samples=kind)) for kind in SAMPLES)):
        ratios = [row["rms"] / row["predicted"] for row in some]
        ours.append(f"{name} {min(ratios):.3f} to {max(ratios):.3f}")
    largest, of_tokens = (max(abs(row["z"]) for row in some) for some in (tokens + calls, tokens))
    text = f"measured / predicted: {', '.join(ours)}; at most {largest:.1f} standard errors apart"
    return judged(largest <= LIMIT, of_tokens <= LIMIT, ours=text)


def _theorem(rows: Rows) -> Judgement:
    calls = pick(rows, what="rows")
    largest = max(row["worst_mean"] for row in calls)
    return judged(largest <= 1, ours=f"worst row of {len(calls)} calls: {largest:.2f} of its bound")


def _tail(rows: Rows) -> Judgement:
    calls = pick(rows, what="rows")
    worst = [[max(row["tails"][i][form] for row in calls) for form in (0, 1)] for i in range(len(DELTAS))]
    holds = all(share <= delta for (share, _), delta in zip(worst, DELTAS, strict=True))
    texts = [f"delta {delta:g}: {a:.1%} ({b:.1%})" for (a, b), delta in zip(worst, DELTAS, strict=True)]
    return judged(holds, ours=f"worst row beyond bound / delta (/ sqrt delta): {', '.join(texts)}")


def _rounding(rows: Rows) -> Judgement:
    kept = {rounding: max(row["rms_ratio"] for row in pick(rows, what="worst", rounding=rounding))
            for rounding in ("up", "down")}  # fmt: skip
    means = {rounding: max(row["ratio"] for row in pick(rows, what="worst", rounding=rounding)) for rounding in kept}
    within = {rounding: max(kept[rounding], means[rounding]) <= 1 + 1e-6 for rounding in kept}
    ours = f"worst cases, root mean square / bound: rounded up {kept['up']:.3f}, down {kept['down']:.3f}"
    return judged(all(within.values()), within["up"], ours=ours)


def _tight(rows: Rows) -> Judgement:
    calls = [row for row in _real(rows) if row["alpha"] in ALPHAS[1:] and row["rms"] > 0]
    loose = [row["bound"] / row["rms"] for row in calls]
    outputs = [row["bound"] / row["output"] for row in calls]
    ours = (
        f"bound / error {min(loose):.1f} to {max(loose):.0f}; bound / output {min(outputs):.1f} to {max(outputs):.0f}"
    )
    return judged(max(loose) <= 2, max(loose) <= 10, ours=ours)


def _linear(rows: Rows) -> Judgement:
    slopes, grows = {}, True
    for line in _lines([row for row in pick(rows, what="rows", n=LENGTH) if row["alpha"] in ALPHAS[1:]]):
        slopes[id(line[0])] = exponent([row["alpha"] for row in line], [row["rms"] for row in line])
        grows &= all(a["rms"] < b["rms"] for a, b in pairwise(line))
    low, high = min(slopes.values()), max(slopes.values())
    return judged(low >= 0.8 and high <= 1.2, grows, ours=f"error ~ alpha^p, p = {low:.2f} to {high:.2f}")


def _length(rows: Rows) -> Judgement:
    ends = {kind: [] for kind in SAMPLES}  # type: dict[str, list[float]]
    for line in _lines(pick(rows, what="rows", alpha=ALPHA)):
        line = sorted(line, key=lambda row: row["n"])
        ends[line[0]["samples"]].append((line[-1]["rms"] / line[-1]["bound"]) / (line[0]["rms"] / line[0]["bound"]))
    texts = [f"{kind} {min(found):.2f} to {max(found):.2f}" for kind, found in ends.items()]
    text = f"error / bound at {LENGTHS[-1]} tokens beside {LENGTHS[0]}: {', '.join(texts)} times"
    return judged(max(max(found) for found in ends.values()) <= 1.1, max(ends["independent"]) <= 1.1, ours=text)


def _name(row: Row) -> str:
    return f"{row['source'].rpartition('/')[2]} {row['layer']}".strip()


_LISTS = {"independent": "own", "shared": "shared"}  #: of samples, in tables


def _tables(rows: Rows) -> list[Table]:
    calls = sorted(pick(rows, what="rows"), key=lambda row: (_name(row), row["samples"], row["n"], row["alpha"]))
    lines = [
        [_name(row), _LISTS[row["samples"]], f"{row['n']}", f"{row['alpha']:g}", f"{row['rate']:.2f}",
         *(f"{row[name] / row['output']:.3g}" for name in ("rms", "predicted", "other", "bound")),
         f"{row['z']:+.1f}", f"{row['bound'] / row['rms']:.1f}" if row["rms"] else "", f"{row['worst_mean']:.2f}"]
        for row in calls
    ]  # fmt: skip
    columns = ["layer", "lists", "n", "alpha", "r/d", "rms", "exact", "other", "bound", "z", "bound/rms", "worst"]
    tokens = [
        [_name(row), f"{row['r']}", f"{row['rms']:.4g}", f"{row['predicted']:.4g}", f"{row['bound']:.4g}",
         f"{row['z']:+.1f}", f"{row['worst_mean']:.3f}"]
        for row in pick(rows, what="token")
    ]  # fmt: skip
    cases = [
        [f"{row['case']}, rounded {row['rounding']}", f"{row['wanted']:.2f}", f"{row['r']}", f"{row['ratio']:.3f}",
         f"{row['rms_ratio']:.3f}"]
        for row in pick(rows, what="worst")
    ]  # fmt: skip
    return [
        Table(
            "Rows, beside the root mean square of the output (other: the formula of the other kind of lists; worst: "
            "the largest mean error / bound)", columns, lines,
        ),
        Table(
            "One token from r samples, over heads", ["layer", "r", "rms", "exact", "bound", "z", "worst mean/bound"],
            tokens,
        ),
        Table("Where the bound is reached", ["case", "eq. 9", "r", "mean/bound", "rms/bound"], cases),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    by_alpha, by_length, by_count = panels(figure, 1, 3, size=(4.4, 4.2))
    real = next(row for row in _real(rows) if row["layer"] == "last")["source"]
    for axes, name, chosen in (
        (by_alpha, "alpha", pick(rows, what="rows", source=real, layer="last", n=LENGTH)),
        (by_length, "n", pick(rows, what="rows", source=real, layer="last", alpha=ALPHA)),
    ):
        for number, kind in enumerate(SAMPLES):
            line = sorted(pick(chosen, samples=kind), key=lambda row: row[name])
            x, look = [row[name] for row in line], style(number)
            axes.plot(x, [row["predicted"] / row["output"] for row in line], color=look["color"],
                      label=f"{kind} samples: exact variance")  # fmt: skip
            axes.plot(x, [row["rms"] / row["output"] for row in line], linestyle="none", label=f"{kind}: measured",
                      **look)  # fmt: skip
        axes.plot(x, [row["bound"] / row["output"] for row in line], color="black", linestyle="--",
                  label="bound of Theorem 2")  # fmt: skip
        axes.axhline(1, color="black", linestyle=":", label="as large as the output")
        axes.set(xscale="log", yscale="log", ylabel="root mean square error / that of the output")
        axes.set_xticks(x, [f"{each:g}" for each in x])
        axes.minorticks_off()
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 20)
        axes.legend(loc="upper left")
    by_alpha.set(xlabel="alpha", title=f"Rows of the last layer ({real.rpartition('/')[2]}), n = {LENGTH}")
    by_length.set(xlabel="length n [tokens]", title=f"The same, alpha = {ALPHA:g}")
    for number, source in enumerate(dict.fromkeys(row["source"] for row in pick(rows, what="token"))):
        line, look = pick(rows, what="token", source=source), style(number + 2)
        counts, unit, name = [row["r"] for row in line], line[0]["bound"], source.rpartition("/")[2]
        look["markersize"] = 9 - 4 * number  # they lie upon each other
        exact, found = ([row[kind] / unit for row in line] for kind in ("predicted", "rms"))
        by_count.plot(counts, exact, color=look["color"], label=f"{name}: exact variance")
        by_count.plot(counts, found, linestyle="none", label=f"{name}: measured", **look)
    by_count.plot(
        counts, [r**-0.5 for r in counts], color="black", linestyle="--", label="bound of Lemma 1: slope -1/2"
    )
    by_count.set(
        xscale="log", yscale="log", xlabel="samples r of one token", title="One token",
        ylabel="root mean square error / (|x| |W|)", ylim=(None, 8),
    )  # fmt: skip
    by_count.legend(loc="upper right")


STUDY = Study(
    name="mca-bounds",
    title="Errors of sampled values: as measured, as their variance predicts them, and the bounds",
    paper="mca",
    where="Lemma 1, Theorem 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("seeds", "model"),
    claims=(
        Claim(
            "lemma", "Lemma 1, eq. 7",
            "the mean error of a token projected from r samples is at most |x| |W| / sqrt(r)",
            "E|H - xW| <= |x| |W| / sqrt(r)",
            f"no head of either layer above its bound by more than {LIMIT} standard errors of the mean, at any r",
            _lemma,
        ),
        Claim(
            "slope", "eq. 7", "the error falls with the square root of the samples", "|x| |W| / sqrt(r)",
            "slope of log error against log r, r = 4 to 256: -0.55 to -0.45", _slope,
        ),
        Claim(
            "variance", "supplement, eqs. 1 to 3", "the mean square error of a token is (|x|^2 |W|^2 - |xW|^2) / r",
            "equality",
            f"tokens, and rows by the sums that follow from it for independent and for shared samples, all within "
            f"{LIMIT} standard errors of the measured mean square; same shape: tokens only", _variance,
        ),
        Claim(
            "theorem", "Theorem 2, eq. 10", "the mean error of a row is at most alpha beta |W|", "alpha beta |W|",
            "the measured mean of every row of every call is within its bound", _theorem,
        ),
        Claim(
            "tail", "Theorem 2, eq. 11", "the error is within the bound / delta with probability 1 - delta",
            "share beyond it <= delta", "in every row of every call, for delta = 0.5, 0.1 and 0.01", _tail,
        ),
        Claim(
            "rounding", "eq. 9", "with r = (n max A / alpha)^2 the bound holds",
            "sqrt(r) = n max A / alpha, a real number",
            "in the worst cases for the bound, r rounded up and r rounded down both stay within it; same shape: only "
            "rounded up", _rounding,
        ),
        Claim(
            "tight", "section 3", "the bounds are tight", "guarantees tight error bounds",
            "on the model's layers, at the paper's alphas, the bound is at most 2 times the measured error; same "
            "shape: at most 10 times", _tight,
        ),
        Claim(
            "linear", "eq. 9", "alpha scales the error bound linearly, and the error with it", "bound ~ alpha^1",
            "exponent of the measured error against alpha 0.8 to 1.2 in every layer, n = 128, alphas of the paper; "
            "same shape: the error grows with each alpha", _linear,
        ),
        Claim(
            "length", "section 3, eq. 10", "the bound is free of the input's length, and the error does not grow",
            "bounds independent of the input length",
            f"error / bound at alpha = {ALPHA:g} and 256 tokens at most 1.1 times that at 32, for both kinds of "
            "samples; same shape: for independent ones", _length,
        ),
    ),
)  # fmt: skip
