"""Lemma 1 and Theorem 2 of Monte-Carlo attention: errors as measured, as the variance predicts them, and the bounds."""

from __future__ import annotations

from typing import Any

from sparing.contract import Projection
from sparing.transformers.watch import ObservedCall
from sparing_lab.figure import Figure, line, log_ticks, panels, style
from sparing_lab.studies._layers import topic_layers
from sparing_lab.studies._mca_bounds import DELTAS, GAUSSIAN, gaussian, row_error, token_error, worst
from sparing_lab.studies.judges import Criterion, Judge, at_most, each, exponent, listed, rises, within
from sparing_lab.studies.rows import Cell, Row, Rows, curve, curves, distinct, ends, grouped, over, pick, power
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing

ALPHAS = (0.1, 0.2, 0.4, 0.6, 1.0)  #: the paper's four, and a smaller one
LENGTHS = (32, 64, 128, 256)
ALPHA, LENGTH = 0.4, 128  #: the one that is fixed while the other varies
SAMPLES = ("independent", "shared")
COUNTS = tuple(2**power for power in range(9))  #: numbers of samples r of a single token
PAPER_MODEL = "textattack/bert-base-uncased-SST-2"  #: one of the models that the supplement names
LIMIT = 4.5  #: standard errors; over all cells with 60 draws, at most one false alarm in some hundred runs


def _cells(settings: Settings) -> list[Cell]:
    draws = settings.seeds or (60 if settings.small else 1000)
    if draws < 10:
        raise ValueError(f"seeds={draws}: a mean square error needs 10 draws at least")
    model = settings.model or ("minilm" if settings.small else PAPER_MODEL)
    sources = [(model, "first"), (model, "last"), (GAUSSIAN, "")]
    pairs = [(alpha, LENGTH) for alpha in ALPHAS] + [(ALPHA, n) for n in LENGTHS if n != LENGTH]
    # Tokens that share their samples have dependent errors, so that a mean square needs more draws.
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
    assert isinstance(layer.value, Projection)
    if cell["what"] == "token":
        return token_error(layer.value, layer.key.shape[1], cell["r"], cell["draws"])
    return row_error(layer.query, layer.key, layer.value, cell["alpha"], cell["samples"], cell["draws"])


def _layer(source: str, which: str, n: int) -> ObservedCall:
    """Return a layer's inputs without the bias of values, which is exact and would make errors look smaller."""
    if source == GAUSSIAN:
        return gaussian(n)
    layers = topic_layers(source, n)
    found = layers[0 if which == "first" else -1]
    assert isinstance(found.value, Projection)
    return found._replace(value=found.value._replace(bias=None))


def _calls(rows: Rows, *, real: bool = False, **wanted: Any) -> list[Row]:
    """Return the rows of calls in which some token is sampled; real: only calls of the model."""
    found = pick(rows, what="rows", **wanted)
    return [row for row in found if row["predicted"] > 0 and not (real and row["source"] == GAUSSIAN)]


def _off(rows: Rows) -> dict[str, Any]:
    """Return measured / predicted errors of tokens and rows, and how many standard errors they are from 1."""
    groups = {"tokens": pick(rows, what="token"), **{kind: _calls(rows, samples=kind) for kind in SAMPLES}}
    return {
        "ratios": {name: [row["rms"] / row["predicted"] for row in some] for name, some in groups.items()},
        "errors": {name: [abs(row["z"]) for row in some] for name, some in groups.items()},
    }


def _far(found: dict[str, Any]) -> str:
    largest = max(max(some, default=0.0) for some in found["errors"].values())
    ratios = ", ".join(f"{name} {min(some):.3f} to {max(some):.3f}" for name, some in found["ratios"].items())
    return f"measured / predicted: {ratios}; at most {largest:.1f} standard errors apart"


def _tails(rows: Rows) -> dict[float, list[float]]:
    """Return, by delta, the worst row's share of draws beyond bound / delta, and beyond bound / sqrt(delta)."""
    calls = pick(rows, what="rows")
    return {
        delta: [max(row["tails"][number][form] for row in calls) for form in (0, 1)]
        for number, delta in enumerate(DELTAS)
    }


def _over_alpha(rows: Rows) -> dict[Any, dict[float, float]]:
    """Return the error over the paper's alphas, for each source, layer and kind of samples."""
    calls = [row for row in _calls(rows, n=LENGTH) if row["alpha"] in ALPHAS[1:]]
    return curves(calls, "alpha", "rms", "source", "layer", "samples")


def _over_length(rows: Rows) -> dict[str, list[float]]:
    """Return, for each kind of samples, error / bound at the longest text over that at the shortest."""
    found: dict[str, list[float]] = {kind: [] for kind in SAMPLES}
    shares = curves(_calls(rows, alpha=ALPHA), "n", over("rms", "bound"), "source", "layer", "samples")
    for key, errors in shares.items():
        first, *_, last = errors.values()
        found[key[-1]].append(last / first)
    return found


def _all_at_most(words: str, limit: float) -> Criterion:
    return each(words, lambda some: max(some) <= limit)


def _name(row: Row) -> str:
    return f"{row['source'].rpartition('/')[2]} {row['layer']}".strip()


def _tables(rows: Rows) -> list[Table]:
    calls = sorted(pick(rows, what="rows"), key=lambda row: (_name(row), row["samples"], row["n"], row["alpha"]))
    shares = {name: over(name, "output") for name in ("rms", "predicted", "other", "bound")}
    calls = [{**row, **{f"{name} share": of(row) for name, of in shares.items()}} for row in calls]
    return [
        listing(
            "Rows, beside the root mean square of the output (other: the formula of the other kind of lists; worst: "
            "the largest mean error / bound)", calls,
            {"layer": _name, "lists": lambda row: "own" if row["samples"] == "independent" else row["samples"],
             "n": "{n}", "alpha": "{alpha:g}", "r/d": "{rate:.2f}", "rms": "{rms share:.3g}",
             "exact": "{predicted share:.3g}", "other": "{other share:.3g}", "bound": "{bound share:.3g}",
             "z": "{z:+.1f}",
             "bound/rms": lambda row: f"{row['bound'] / row['rms']:.1f}" if row["rms"] else "",
             "worst": "{worst_mean:.2f}"},
        ),
        listing("One token from r samples, over heads", pick(rows, what="token"),
                {"layer": _name, "r": "{r}", "rms": "{rms:.4g}", "exact": "{predicted:.4g}", "bound": "{bound:.4g}",
                 "z": "{z:+.1f}", "worst mean/bound": "{worst_mean:.3f}"}),
        listing("Where the bound is reached", pick(rows, what="worst"),
                {"case": "{case}, rounded {rounding}", "eq. 9": "{wanted:.2f}", "r": "{r}", "mean/bound": "{ratio:.3f}",
                 "rms/bound": "{rms_ratio:.3f}"}),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    by_alpha, by_length, by_count = panels(figure, 1, 3, size=(4.4, 4.2))
    real = next(row for row in pick(rows, what="rows", layer="last") if row["source"] != GAUSSIAN)["source"]
    last = pick(rows, what="rows", source=real, layer="last")
    for axes, name, chosen in ((by_alpha, "alpha", pick(last, n=LENGTH)), (by_length, "n", pick(last, alpha=ALPHA))):
        found = {of: curves(chosen, name, over(of, "output"), "samples") for of in ("predicted", "rms", "bound")}
        for number, kind in enumerate(SAMPLES):
            line(axes, found["predicted"][kind], f"{kind} samples: exact variance", color=style(number)["color"])
            line(axes, found["rms"][kind], f"{kind}: measured", number, linestyle="none")
        line(axes, found["bound"][kind], "bound of Theorem 2", color="black", linestyle="--")
        axes.axhline(1, color="black", linestyle=":", label="as large as the output")
        axes.set(yscale="log", ylabel="root mean square error / that of the output")
        log_ticks(axes, list(found["rms"][kind]))
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * 20)
        axes.legend(loc="upper left")
    by_alpha.set(xlabel="alpha", title=f"Rows of the last layer ({real.rpartition('/')[2]}), n = {LENGTH}")
    by_length.set(xlabel="length n [tokens]", title=f"The same, alpha = {ALPHA:g}")
    for number, (source, some) in enumerate(grouped(pick(rows, what="token"), "source").items()):
        look = {**style(number + 2), "markersize": 9 - 4 * number}  # the markers overlap
        unit, name = some[0]["bound"], source.rpartition("/")[2]
        exact, errors = ({row["r"]: row[of] / unit for row in some} for of in ("predicted", "rms"))
        line(by_count, exact, f"{name}: exact variance", color=look["color"])
        line(by_count, errors, f"{name}: measured", linestyle="none", **look)
    root = {r: r**-0.5 for r in distinct(pick(rows, what="token"), "r")}
    line(by_count, root, "bound of Lemma 1: slope -1/2", color="black", linestyle="--")
    by_count.set(
        xscale="log", yscale="log", xlabel="samples r of one token", title="One token",
        ylabel="root mean square error / (|x| |W|)", ylim=(None, 8),
    )  # fmt: skip
    by_count.legend(loc="upper right")


STUDY = Study(
    name="mca-bounds", title="Errors of sampled values: as measured, as their variance predicts them, and the bounds",
    paper="mca", where="Lemma 1, Theorem 2", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("seeds", "model"),
    claims=(
        Claim("lemma", "Lemma 1, eq. 7",
              "the mean error of a token projected from r samples is at most |x| |W| / sqrt(r)",
              "E|H - xW| <= |x| |W| / sqrt(r)", judge=Judge(
                  lambda rows: {of: max(row[of] for row in pick(rows, what="token"))
                                for of in ("worst_mean", "excess")},
                  at_most(LIMIT, " standard errors").of("excess"), shows=lambda found: (
                      f"at most {found['worst_mean']:.3f} of the bound ({found['excess']:+.1f} standard errors), r = "
                      f"{COUNTS[0]} to {COUNTS[-1]}"), of="mean error above its bound, in every head, at any r")),
        Claim("slope", "eq. 7", "the error falls with the square root of the samples", "|x| |W| / sqrt(r)", judge=Judge(
            lambda rows: {source: power(curve([row for row in some if row["r"] >= 4], "r", "rms"))
                          for source, some in grouped(pick(rows, what="token"), "source").items()},
            within(-0.55, -0.45), shows="{key} {value:.3f}", of="slope of log error against log r, r = 4 to 256")),
        Claim("variance", "supplement, eqs. 1 to 3", "the mean square error of a token is (|x|^2 |W|^2 - |xW|^2) / r",
              "equality", judge=Judge(
                  _off, _all_at_most(f"within {LIMIT} standard errors of the measured mean square, for tokens, and for "
                                     "rows by the sums that follow from it, for independent and for shared samples",
                                     LIMIT).of("errors"),
                  Criterion("for tokens only", lambda found: max(found["errors"]["tokens"]) <= LIMIT), _far)),
        Claim("theorem", "Theorem 2, eq. 10", "the mean error of a row is at most alpha beta |W|", "alpha beta |W|",
              judge=Judge(lambda rows: [row["worst_mean"] for row in pick(rows, what="rows")], at_most(1),
                          shows=lambda found: f"worst row of {len(found)} calls: {max(found):.2f} of its bound",
                          of="measured mean / bound, in every row of every call")),
        Claim("tail", "Theorem 2, eq. 11", "the error is within the bound / delta with probability 1 - delta",
              "share beyond it <= delta", judge=Judge(
                  _tails, Criterion("in every row of every call, for delta = 0.5, 0.1 and 0.01",
                                    lambda found: all(share <= delta for delta, (share, _) in found.items())),
                  shows=lambda found: "worst row beyond bound / delta (/ sqrt delta): "
                  + listed(found, "delta {key:g}: {value[0]:.1%} ({value[1]:.1%})"))),
        Claim("rounding", "eq. 9", "with r = (n max A / alpha)^2 the bound holds",
              "sqrt(r) = n max A / alpha, a real number", judge=Judge(
                  lambda rows: {name: {of: max(row[of] for row in some) for of in ("rms_ratio", "ratio")}
                                for name, some in grouped(pick(rows, what="worst"), "rounding").items()},
                  each("in the worst cases for the bound, r rounded up and r rounded down stay within it",
                                 lambda some: max(some.values()) <= 1 + 1e-6),
                  at_most(1 + 1e-6).of("up", "where r is rounded up"), lambda found: (
                      f"worst cases, root mean square / bound: rounded up {found['up']['rms_ratio']:.3f}, down "
                      f"{found['down']['rms_ratio']:.3f}"))),
        Claim("tight", "section 3", "the bounds are tight", "guarantees tight error bounds", judge=Judge(
            lambda rows: {of: [row["bound"] / row[of] for row in _calls(rows, real=True)
                               if row["alpha"] in ALPHAS[1:] and row["rms"] > 0] for of in ("rms", "output")},
            at_most(2).of("rms"), at_most(10).of("rms"), lambda found: (
                f"bound / error {min(found['rms']):.1f} to {max(found['rms']):.0f}; bound / output "
                f"{min(found['output']):.1f} to {max(found['output']):.0f}"),
            of="bound / measured error on the model's layers, at the paper's alphas")),
        Claim("linear", "eq. 9", "alpha scales the error bound linearly, and the error with it", "bound ~ alpha^1",
              judge=Judge(_over_alpha, exponent(0.8, 1.2), rises("alpha"), lambda found: (
                  "error ~ alpha^p, p = {:.2f} to {:.2f}".format(*ends(map(power, found.values())))),
                  of="measured error in every layer, n = 128, alphas of the paper")),
        Claim("length", "section 3, eq. 10", "the bound is free of the input's length, and the error does not grow",
              "bounds independent of the input length", judge=Judge(
                  _over_length, _all_at_most("at most 1.1 for both kinds of samples", 1.1),
                  at_most(1.1).of("independent", "for independent ones"), lambda found: (
                      f"error / bound at {LENGTHS[-1]} tokens beside {LENGTHS[0]}: "
                      + ", ".join(f"{kind} {min(some):.2f} to {max(some):.2f}" for kind, some in found.items())
                      + " times"),
                  of=f"error / bound at alpha = {ALPHA:g} and 256 tokens / that at 32")),
    ),
)  # fmt: skip
