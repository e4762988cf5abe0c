"""Skyformer's theory: what Theorem 2 and Lemma 3 guarantee for the landmarks, and the iteration for their inverse."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from sparing.workbench.binomial import at_most as binomial_at_most
from sparing_lab.figure import Figure, legends, level, line, panels, style
from sparing_lab.studies._skyformer_theory import CONTROL, DATA, GAMMAS, MEASUREMENTS
from sparing_lab.studies.judges import Criterion, Judge, at_least, at_most, each
from sparing_lab.studies.rows import Cell, Row, Rows, curve, ends, pick, the
from sparing_lab.studies.skyformer_lift import STARTS
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing

ORDER, SWEEP, PROMISED = 96, 256, 400  #: number of queries, and of keys
SWEPT = (4, 8, 16, 32, 64, 128, 256)
EPS, DELTA = 0.1, 0.1
LEVEL = 1e-6  #: level of the binomial test
TOLERANCE = -1e-9  #: least eigenvalue that counts as 0 with rounding
FINE = 0.1  #: largest norm of I - AZ that counts as an inverse

#: Number of landmarks, with the damping: as Theorem 2 asks for, as its halved bound asks for, and too few.
DRAWN = (
    ("theorem", 0.0), ("theorem", 0.1), ("theorem", 50.0), ("halved", 0.0), ("control", 0.0),
)  # fmt: skip


def _cells(settings: Settings) -> list[Cell]:
    seeds = settings.seeds or (5 if settings.small else 20)
    draws = settings.seeds or (20 if settings.small else 100)
    return [
        *({"what": "order", "data": data, "gamma": gamma, "n": ORDER, "seeds": min(seeds, 3)}
          for data in DATA for gamma in GAMMAS),
        *({"what": "scaled", "data": data, "gamma": gamma, "n": SWEEP, "landmarks": 128}
          for data in DATA for gamma in GAMMAS[1:]),
        *({"what": "sweep", "data": data, "n": SWEEP, "landmarks": count, "seeds": seeds}
          for data in DATA for count in SWEPT),
        *({"what": "asked", "data": data, "n": PROMISED, "eps": EPS, "delta": DELTA} for data in DATA),
        *({"what": "promise", "n": PROMISED, "eps": EPS, "delta": DELTA, "landmarks": landmarks, "gamma": gamma,
           "draws": draws} for landmarks, gamma in DRAWN),
        *({"what": "steps", "data": data, "n": SWEEP, "landmarks": 128, "gamma": gamma}
          for data in DATA for gamma in GAMMAS[1:]),
    ]  # fmt: skip


def _measure(settings: Settings, cell: Cell) -> Row | list[Row]:
    return MEASUREMENTS[cell["what"]](cell)


def _failed(row: Row, of: str, *, factor: float = 4.0) -> int:
    """Count draws that break C-bar <= C-bar-tilde + lambda I ("whole"), or |C - C-tilde| <= eps |C| ("block")."""
    allowed = max(row["slack"], factor * row["n"] * row["gamma"] / row["count"])
    if of == "block":
        allowed = max(row["eps"] * row["size"], allowed / 2 if row["gamma"] else 0.0)
    return sum(each > allowed for each in row[of])


def _too_many(failed: int, row: Row) -> bool:
    """Return whether that many failures are too unlikely, by a binomial test, for a rate of at most delta."""
    return failed > 0 and 1 - binomial_at_most(failed - 1, len(row["whole"]), row["delta"]) < LEVEL


def _fits(row: Row, of: str) -> bool:
    return not _too_many(_failed(row, of), row)


def _promised(rows: Rows) -> dict[str, Row]:
    """Return the rows with as many landmarks as Theorem 2 asks for, as its halved bound asks for, and too few."""
    drawn = {name: the(rows, what="promise", landmarks=name) for name in ("halved", "control")}
    return {**drawn, "theorem": the(rows, what="promise", landmarks="theorem", gamma=0.0)}


def _lowest(rows: Rows) -> list[float]:
    found = pick(rows, what="order", solver="exact") + pick(rows, what="sweep") + pick(rows, what="promise")
    return [row["lowest"] for row in found]


def _theorem(found: dict[str, Row]) -> str:
    row, control = found["theorem"], found["control"]
    return (
        f"{row['count']} of {2 * row['n']} rows: {_failed(row, 'block')} of {len(row['whole'])} draws fail, worst "
        f"{max(row['block']) / row['size']:.1g} of |C|; {CONTROL} rows: {_failed(control, 'block')} of "
        f"{len(control['whole'])}"
    )


def _halves(rows: Rows) -> dict[str, Any]:
    """Return the largest error of C~ / error of the lifted matrix, and the rows of `_promised`."""
    found = pick(rows, what="sweep") + pick(rows, what="promise", landmarks="control")
    ratios = [b / w for row in found for b, w in zip(row["block"], row["whole"], strict=True) if w > 1e-9]
    return {**_promised(rows), "most": max(ratios)}


def _halved(found: dict[str, Any]) -> bool:
    row, enough = found["halved"], found["most"] <= 0.5 + 1e-9
    return enough and _fits(row, "block") and row["count"] < found["theorem"]["count"]


def _damped(rows: Rows) -> list[Row]:
    return [row for row in pick(rows, what="promise", landmarks="theorem") if row["gamma"] > 0]


def _damped_words(found: list[Row]) -> str:
    shown = ", ".join(f"gamma {row['gamma']:g}: {_failed(row, 'whole')} of {len(row['whole'])}" for row in found)
    without = _failed(found[-1], "whole", factor=0.0)
    return f"draws that fail: {shown}; without its second term {without} at gamma {found[-1]['gamma']:g}"


_DAMPED = each("a failure rate of at most delta is not rejected for gamma > 0", lambda row: _fits(row, "whole"))


def _scaled_ends(rows: Rows) -> dict[str, Any]:
    """Return the least and the largest eigenvalue, and the least distance of a least one from its lower bound."""
    found = pick(rows, what="scaled")
    most = [value for row in found for value in row["most"]]
    floors = [row["least"] - row["gamma"] / (row["landmarks"] + row["gamma"]) for row in found]
    return {"least": min(row["least"] for row in found), "most": max(most), "floor": min(floors),
            "attained": all(abs(value - 1) < 1e-9 for value in most)}  # fmt: skip


_INSIDE = Criterion("all above 0 and at least gamma / (d + gamma)",
                    lambda found: found["least"] > 0 and found["floor"] >= -1e-12)  # fmt: skip


def _early(rows: Rows) -> dict[str, list[float]]:
    names = {"stopped": STARTS, "too far": ("too far",)}
    return {name: [row["lowest"] for solver in solvers for row in pick(rows, what="order", solver=solver)]
            for name, solvers in names.items()}  # fmt: skip


def _six(rows: Rows) -> dict[str, Any]:
    """Return |I - AZ| after six steps at gamma = 0.1, by start, and error of C~ / error with the exact inverse."""
    found = {start: pick(rows, what="steps", start=start, steps=6, gamma=0.1) for start in STARTS}
    return {
        start: {"residual": [row["residual"] for row in some], "worse": max(row["error"] / row["best"] for row in some)}
        for start, some in found.items()
    }


def _after_six(start: str, form: str) -> Any:
    return lambda found: form.format(*ends(found[start]["residual"]), found[start]["worse"])


_NEARER = Criterion("|I - AZ| less than from the authors' start", lambda found: all(
    a < b for a, b in zip(found["identity"]["residual"], found["transpose"]["residual"], strict=True)))  # fmt: skip


def _inverse(start: str) -> Criterion:
    return at_most(FINE).of("residual").of(start, "for |I - AZ| on all data")


def _good_enough(start: str) -> Criterion:
    return Criterion("the error of C~ is at most a tenth above that of the exact inverse",
                     lambda found: found[start]["worse"] <= 1.1)  # fmt: skip


def _tables(rows: Rows) -> list[Table]:
    asked = [{**row, "rows": 2 * row["n"]} for row in pick(rows, what="asked")]
    promised = [
        {**row, "E": max(row["whole"]) / row["slack"], "C": max(row["block"]) / row["size"],
         "E fails": _failed(row, "whole"), "C fails": _failed(row, "block"), "drawn": len(row["whole"])}
        for row in pick(rows, what="promise")
    ]  # fmt: skip
    steps = [
        [data, f"{gamma:g}", start, *(f"{found[s]['residual']:.2g} {found[s]['error']:.2g}" for s in (2, 4, 6, 8)),
         f"{found[0]['best']:.2g}"]
        for data in DATA for gamma in GAMMAS[1:] for start in STARTS
        if (found := {row["steps"]: row for row in pick(rows, what="steps", data=data, gamma=gamma, start=start)})
    ]  # fmt: skip
    return [
        listing(f"Landmarks that Theorem 2 asks for (eps {EPS:g}, delta {DELTA:g})", asked,
                {"queries and keys": "{data}", "d_stat": "{dimension:.1f}", "asked for": "{asked}", "rows": "{rows}",
                 "fewer": lambda row: "yes" if row["asked"] < row["rows"] else "no"}),
        listing(f"Draws of landmarks on a circle, {2 * PROMISED} rows: the worst, and how many break the promise",
                promised,
                {"landmarks": "{landmarks}, gamma {gamma:g}", "number": "{count}", "worst |E|/lambda": "{E:.2g}",
                 "worst |C - C~|/|C|": "{C:.2g}", "E fails": "{E fails}", "C~ fails": "{C fails}", "draws": "{drawn}"}),
        Table("The iteration: |I - AZ| and error of C~ after 2, 4, 6 and 8 steps",
              ["queries and keys", "gamma", "start", "2", "4", "6", "8", "exact"], steps),
    ]  # fmt: skip


def _share(of: str) -> Any:
    """Return a function for a row's error / |C|, averaged over heads."""
    return lambda row: fmean(x / size for x, size in zip(row[of], row["size"], strict=True))


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(4.7, 4.6))
    for number, data in enumerate(("circle", "normal", DATA[-1], DATA[-2])):
        found = pick(rows, what="sweep", data=data)
        line(left, curve(found, "landmarks", _share("block")), data, number)
        bound = {count: share / 2 for count, share in curve(found, "landmarks", _share("whole")).items()}
        line(left, bound, linestyle="--", color=style(number)["color"])
        values = the(rows, what="scaled", data=data, gamma=0.1)["values"]
        line(middle, dict(enumerate(values, 1)), data, number, markevery=8)
        for start, dash, name in zip(STARTS, ("-", ":"), ("I", "A^T"), strict=True):
            steps = pick(rows, what="steps", data=data, gamma=0.1, start=start)
            residuals = curve(steps, "steps", lambda row: max(row["residual"], 1e-16))
            line(right, residuals, f"{data}, {name}", number, linestyle=dash)
    asked = the(rows, what="promise", landmarks="theorem", gamma=0.0)
    left.plot([asked["count"]], [asked["eps"]], marker="*", color="black", markersize=10, linestyle="none",
              label=f"Theorem 2 for the circle: {asked['eps']:g} at {asked['count']}")  # fmt: skip
    left.plot([], [], linestyle="--", color="black", label="its bound, |E| / 2")
    left.set(
        xscale="log", yscale="log", xlabel="landmarks d", ylabel="|C - C~| / |C|, mean of draws and heads",
        title="Error and bound", ylim=(1e-9, None),
    )  # fmt: skip
    level(middle, 1.0)
    middle.axhline(0.1 / 128.1, color="black", linestyle="--", label="gamma / (d + gamma)")
    middle.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue",
               title="Lemma 3: the scaled M, d = 128, gamma = 0.1")  # fmt: skip
    right.axvline(6, color="black", linewidth=0.8, linestyle="--", label="the authors' 6 steps")
    title = "From the identity, and from A^T / |A|_1"
    right.set(yscale="log", xlabel="steps of the iteration", ylabel="|I - AZ|", title=title)
    legends((left, middle, right), 2, 0.16, fontsize=7)


_NEVER = at_least(TOLERANCE)
STUDY = Study(
    name="skyformer-theory", paper="skyformer", where="Theorem 2, Lemma 3",
    title="Landmarks never give too much, and how many are enough; the iteration for their inverse",
    cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("seeds",),
    claims=(
        Claim("lower", "Theorem 2", "the approximation of the lifted matrix never exceeds it, for any landmarks",
              "C-bar - C-bar-tilde is positive semidefinite", judge=Judge(
                  _lowest, _NEVER, shows=lambda found: f"least eigenvalue {min(found):.0e} in {len(found)} cases",
                  of="least eigenvalue, for every draw, number of landmarks and gamma")),
        Claim("theorem", "Theorem 2, appendices C and D",
              "with its landmarks |C - C~| <= eps |C|, but for a share delta of draws",
              "d >= 56/3 d_stat/beta log(4n/delta), with the constants of the proof", judge=Judge(
                  _promised, Criterion(
                      f"eps = delta = {EPS:g}; a failure rate of at most delta is not rejected (binomial, level 1e-6), "
                      f"the landmarks are fewer than the rows, and with {CONTROL} landmarks it is rejected",
                      lambda found: (_fits(row := found["theorem"], "whole") and _fits(row, "block")
                                     and row["count"] < 2 * row["n"] and not _fits(found["control"], "block"))),
                  shows=_theorem)),
        Claim("halved", "appendix D, last step", "the error of C~ is at most that of the lifted matrix",
              "|C - C~| <= |E|; E = C-bar - C-bar-tilde", judge=Judge(
                  _halves, Criterion("at most |E| / 2, which follows from E being positive semidefinite, and the "
                                     "landmarks for lambda = 2 eps |C| do, too", _halved),
                  Criterion("at most |E|", lambda found: found["most"] <= 1 + 1e-9), lambda found: (
                      f"at most {found['most']:.3f}; {found['halved']['count']} rows do in place of "
                      f"{found['theorem']['count']}: {_failed(found['halved'], 'block')} of "
                      f"{len(found['halved']['block'])} draws fail"))),
        Claim("damped", "section 4.4", "damping M by gamma costs little: |E| <= max(lambda, 4 n gamma / d)",
              "gamma is not in the theorem; the bound was derived from its proof", judge=Judge(
                  _damped, _DAMPED & Criterion(
                      "without the second term it is for the largest gamma",
                      lambda found: _too_many(_failed(found[-1], "whole", factor=0.0), found[-1])), _DAMPED,
                  _damped_words), ours=True),
        Claim("eigenvalues", "Lemma 3", "the eigenvalues of the scaled M + gamma I lie between 0 and 1", "in (0, 1)",
              judge=Judge(
                  _scaled_ends, _INSIDE & Criterion("all below 1", lambda found: found["most"] < 1 - 1e-9),
                  _INSIDE & Criterion("at most 1", lambda found: found["most"] <= 1 + 1e-9), lambda found: (
                      f"{found['least']:.1e} to {found['most']:.12g}"
                      + (", and 1 every time" if found["attained"] else "")))),
        Claim("early", "follows from Lemma 3", "an iteration that is stopped early still never gives too much",
              "not stated", judge=Judge(
                  _early, _NEVER.of("stopped", "after every number of steps from both starts") & Criterion(
                      "below that from twice the identity", lambda found: max(found["too far"]) < TOLERANCE),
                  shows=lambda found: f"least eigenvalue {min(found['stopped']):.0e} in {len(found['stopped'])} cases; "
                  f"from twice the identity {max(found['too far']):.2g} or less",
                  of="least eigenvalue of C-bar - C-bar-tilde"), ours=True),
        Claim("authors", "section 4.4, the authors' code", "six steps from A^T / |A|_1 at gamma = 0.1 give the inverse",
              "6 steps", judge=Judge(
                  _six, _inverse("transpose"), _good_enough("transpose"), _after_six(
                      "transpose", "|I - AZ| {:.2f} to {:.2f}; error of C~ up to {:.2f} times the exact inverse's"))),
        Claim("identity", "follows from Lemma 3", "six steps from the identity at gamma = 0.1 give the inverse",
              "not tried", judge=Judge(
                  _six, _inverse("identity") & _NEARER, _NEARER & _good_enough("identity"), _after_six(
                      "identity", "|I - AZ| {:.1g} to {:.2g}; error of C~ up to {:.3f} times the exact inverse's")),
              ours=True),
    ),
)  # fmt: skip
