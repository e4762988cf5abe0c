"""Skyformer's theory: what Theorem 2 and Lemma 3 promise of the landmarks, and the iteration for their inverse."""

from __future__ import annotations

import functools
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparing.maths.linalg import degree_scaled
from sparing.workbench.binomial import at_most
from sparing_lab.report.figure import panels, style
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.skyformer_lift import (
    STARTS,
    call_of,
    circle,
    eigenvalues,
    iterated,
    kernel_matrix,
    lifted,
    promise,
    skyformer,
)
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = (0, 2, 5)  #: of MiniLM
HEADS = 4  #: of a layer
DATA = ("circle", "normal", *(f"minilm layer {layer}" for layer in LAYERS))
GAMMAS = (0.0, 1e-3, 0.1)
DAMPING = 1e-6  #: of a matrix that the iteration is to invert, where gamma is less
STEPS = (1, 2, 4, 6, 8)
LONGEST = 12  #: steps of the iteration
ORDER, SWEEP, PROMISED = 96, 256, 400  #: queries, and as many keys
LANDMARKS = 48  #: where the order is looked at
SWEPT = (4, 8, 16, 32, 64, 128, 256)
EPS, DELTA = 0.1, 0.1
LEVEL = 1e-6  #: of the binomial test
CONTROL = 2  #: landmarks that cannot be enough
TOLERANCE = -1e-9  #: an eigenvalue that rounding may have made negative
FINE = 0.1  #: the norm of I - AZ that counts as an inverse

#: Which landmarks: as many as Theorem 2 asks for, as the halved bound asks for, and too few; with the damping.
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
    return _WORK[cell["what"]](cell)


def points(data: str, n: int) -> tuple[Tensor, Tensor, float]:
    """Queries and keys [1, H, n, d] in float64, and their scale."""
    if data == "circle":
        return *circle(n), 1.0
    if data == "normal":
        q, k = 0.58 * torch.randn(2, 1, 1, n, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return q, k, 32**-0.5
    layer = _layers(n)[int(data.rpartition(" ")[2])]
    q, k = (x[:, :HEADS].double() for x in (layer.query, layer.key))
    return q, k, float(q.shape[-1] ** -0.5)


@functools.lru_cache(maxsize=4)
def _layers(n: int) -> list[Any]:
    """What MiniLM's layers were given for a help topic."""
    from sparing import minilm
    from sparing.workbench.capture import capture

    encoder = _minilm()
    return capture(encoder.model, input_ids=minilm.token_ids(encoder, length=n, documents=1))


@functools.lru_cache(maxsize=1)
def _minilm() -> Any:
    from sparing import minilm

    return minilm.load()


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def _missing(exact: Tensor, found: Tensor, n: int) -> Row:
    """Of C-bar - C-bar-tilde: its least eigenvalue, and norms of it and of its query-key block; a number per head."""
    error = exact - found
    values = eigenvalues(error)
    return {
        "lowest": float(values[..., 0].min()),
        "whole": values[..., -1].flatten().tolist(),
        "block": _norm(error[..., :n, n:]).flatten().tolist(),
    }


def _order(cell: Cell) -> list[Row]:
    """The Loewner order, whichever way (M + gamma I)^-1 is found."""
    n, gamma = cell["n"], cell["gamma"]
    q, k, scale = points(cell["data"], n)
    exact = kernel_matrix(q, k, scale)
    chosen = skyformer(f"skyformer(landmarks={LANDMARKS}, gamma={gamma}, sampling=iid)")
    rows = []
    for seed in range(cell["seeds"]):
        columns, middle, _ = chosen.lift(q, k, call_of(q, seed=seed, scale=scale))
        solved = columns @ chosen.solve(middle, columns.mT)
        rows.append({"seed": seed, "solver": "exact", "steps": 0, **_missing(exact, solved, n)})
        damped = middle + max(gamma, DAMPING) * torch.eye(LANDMARKS, dtype=middle.dtype)
        tried = [(start, 1.0, steps) for start in STARTS for steps in STEPS]
        for start, factor, steps in [*tried, ("identity", 2.0, 2)]:
            found = columns @ iterated(damped, steps, start=start, factor=factor)[0] @ columns.mT
            name = start if factor == 1 else "too far"
            rows.append({"seed": seed, "solver": name, "steps": steps, **_missing(exact, found, n)})
    return rows


def _scaled(cell: Cell) -> Row:
    """The eigenvalues of the scaled M + gamma I, of the head whose least is least."""
    q, k, scale = points(cell["data"], cell["n"])
    chosen = skyformer(f"skyformer(landmarks={cell['landmarks']}, sampling=iid)")
    middle = chosen.lift(q, k, call_of(q, scale=scale)).middle
    a, _ = degree_scaled(middle + cell["gamma"] * torch.eye(cell["landmarks"], dtype=middle.dtype))
    values = eigenvalues(a).flatten(0, -2)
    return {
        "least": float(values.min()), "most": values[:, -1].tolist(),
        "values": values[values[:, 0].argmin()].flip(-1).tolist(),
    }  # fmt: skip


def _sweep(cell: Cell) -> list[Row]:
    """The error for one number of landmarks."""
    n = cell["n"]
    q, k, scale = points(cell["data"], n)
    size = _norm(kernel_matrix(q, k, scale)[..., :n, n:]).flatten().tolist()
    rows = []
    for seed in range(cell["seeds"]):
        spec = f"skyformer(landmarks={cell['landmarks']}, gamma=0, sampling=iid)"
        rows.append({"seed": seed, "size": size, **_missing(*lifted(spec, q, k, seed=seed, scale=scale), n)})
    return rows


def _asked(cell: Cell) -> Row:
    """What Theorem 2 asks for: the median of the heads."""
    q, k, scale = points(cell["data"], cell["n"])
    found = [
        promise(exact, cell["n"], cell["eps"], cell["delta"]) for exact in kernel_matrix(q, k, scale).flatten(0, 1)
    ]
    middle = sorted(found, key=lambda each: each.landmarks)[len(found) // 2]
    return {"dimension": middle.dimension, "asked": middle.landmarks}


def _promise(cell: Cell) -> Row:
    """Draws of the landmarks that Theorem 2 asks for, where it asks for fewer than there are rows."""
    n, gamma = cell["n"], cell["gamma"]
    q, k, scale = points("circle", n)
    exact = kernel_matrix(q, k, scale)
    found = promise(exact[0, 0], n, cell["eps"], cell["delta"], factor=2 if cell["landmarks"] == "halved" else 1)
    count = CONTROL if cell["landmarks"] == "control" else found.landmarks
    spec = f"skyformer(landmarks={count}, gamma={gamma}, sampling=iid)"
    drawn = [_missing(exact, lifted(spec, q, k, seed=seed, scale=scale).found, n) for seed in range(cell["draws"])]
    return {
        "count": count, "slack": found.slack, "size": float(_norm(exact[0, 0, :n, n:])),
        "lowest": min(each["lowest"] for each in drawn), "whole": [each["whole"][0] for each in drawn],
        "block": [each["block"][0] for each in drawn],
    }  # fmt: skip


def _steps(cell: Cell) -> list[Row]:
    """The iteration from both starts, step by step: the mean over heads."""
    n = cell["n"]
    q, k, scale = points(cell["data"], n)
    chosen = skyformer(f"skyformer(landmarks={cell['landmarks']}, gamma={cell['gamma']}, sampling=iid)")
    columns, middle, _ = chosen.lift(q, k, call_of(q, scale=scale))
    damped = middle + cell["gamma"] * torch.eye(cell["landmarks"], dtype=middle.dtype)
    target = kernel_matrix(q, k, scale)[..., :n, n:]
    left, right = columns.split([n, n], dim=-2)

    def error(inverse: Tensor) -> float:
        return float((_norm(target - left @ inverse @ right.mT) / _norm(target)).mean())

    best = error(torch.linalg.inv(damped))
    rows = []
    for start in STARTS:
        for steps in range(LONGEST + 1):
            inverse, missing = iterated(damped, steps, start=start)
            rows.append({
                "start": start, "steps": steps, "residual": float(_norm(missing).max()), "error": error(inverse),
                "best": best,
            })  # fmt: skip
    return rows


_WORK: dict[str, Any] = {
    "order": _order, "scaled": _scaled, "sweep": _sweep, "asked": _asked, "promise": _promise, "steps": _steps,
}  # fmt: skip


def _failures(row: Row, *, factor: float = 4.0) -> dict[str, int]:
    """Draws that break C-bar <= C-bar-tilde + lambda I, and |C - C-tilde| <= eps |C|."""
    allowed = max(row["slack"], factor * row["n"] * row["gamma"] / row["count"])
    share = max(row["eps"] * row["size"], allowed / 2 if row["gamma"] else 0.0)
    return {
        "whole": sum(each > allowed for each in row["whole"]), "block": sum(each > share for each in row["block"]),
    }  # fmt: skip


def _too_many(failed: int, row: Row) -> bool:
    """Whether a rate of failures of at most delta gives so many, or more, too rarely."""
    return failed > 0 and 1 - at_most(failed - 1, len(row["whole"]), row["delta"]) < LEVEL


def _lower(rows: Rows) -> Judgement:
    found = pick(rows, what="order", solver="exact") + pick(rows, what="sweep") + pick(rows, what="promise")
    least = min(row["lowest"] for row in found)
    return judged(least >= TOLERANCE, ours=f"least eigenvalue {least:.0e} in {len(found)} cases")


def _early(rows: Rows) -> Judgement:
    stopped = [row for start in STARTS for row in pick(rows, what="order", solver=start)]
    far = pick(rows, what="order", solver="too far")
    least, control = min(row["lowest"] for row in stopped), max(row["lowest"] for row in far)
    ours = f"least eigenvalue {least:.0e} in {len(stopped)} cases; from twice the identity {control:.2g} or less"
    return judged(least >= TOLERANCE and control < TOLERANCE, ours=ours)


def _eigenvalues(rows: Rows) -> Judgement:
    found = pick(rows, what="scaled")
    least, most = min(row["least"] for row in found), max(max(row["most"]) for row in found)
    floor = all(row["least"] >= row["gamma"] / (row["landmarks"] + row["gamma"]) - 1e-12 for row in found)
    attained = all(abs(value - 1) < 1e-9 for row in found for value in row["most"])
    inside = least > 0 and floor
    ours = f"{least:.1e} to {most:.12g}{', and 1 every time' if attained else ''}"
    return judged(inside and most < 1 - 1e-9, inside and most <= 1 + 1e-9, ours=ours)


def _theorem(rows: Rows) -> Judgement:
    row, control = (
        the(rows, what="promise", landmarks="theorem", gamma=0.0),
        the(rows, what="promise", landmarks="control"),
    )
    failed, broken = _failures(row), _failures(control)
    fits = not any(_too_many(each, row) for each in failed.values()) and row["count"] < 2 * row["n"]
    draws = len(row["whole"])
    ours = f"{row['count']} of {2 * row['n']} rows: {failed['block']} of {draws} draws fail, worst "
    ours += (
        f"{max(row['block']) / row['size']:.1g} of |C|; {CONTROL} rows: {broken['block']} of {len(control['whole'])}"
    )
    return judged(fits and _too_many(broken["block"], control), ours=ours)


def _halved(rows: Rows) -> Judgement:
    found = pick(rows, what="sweep") + pick(rows, what="promise", landmarks="control")
    ratios = [b / w for row in found for b, w in zip(row["block"], row["whole"], strict=True) if w > 1e-9]
    row = the(rows, what="promise", landmarks="halved")
    full = the(rows, what="promise", landmarks="theorem", gamma=0.0)
    failed = _failures(row)["block"]
    ours = f"at most {max(ratios):.3f}; {row['count']} rows do in place of {full['count']}: {failed} of "
    ours += f"{len(row['block'])} draws fail"
    half = max(ratios) <= 0.5 + 1e-9 and not _too_many(failed, row) and row["count"] < full["count"]
    return judged(half, max(ratios) <= 1 + 1e-9, ours=ours)


def _damped(rows: Rows) -> Judgement:
    found = [row for row in pick(rows, what="promise", landmarks="theorem") if row["gamma"] > 0]
    failed = [_failures(row)["whole"] for row in found]
    without = _failures(found[-1], factor=0.0)["whole"]
    shown = ", ".join(
        f"gamma {row['gamma']:g}: {each} of {len(row['whole'])}" for row, each in zip(found, failed, strict=True)
    )
    fits = not any(_too_many(each, row) for each, row in zip(failed, found, strict=True))
    return judged(
        fits and _too_many(without, found[-1]), fits,
        ours=f"draws that fail: {shown}; without its second term {without} at gamma {found[-1]['gamma']:g}",
    )  # fmt: skip


def _six(rows: Rows, start: str) -> list[Row]:
    return pick(rows, what="steps", start=start, steps=6, gamma=0.1)


def _authors(rows: Rows) -> Judgement:
    found = _six(rows, "transpose")
    residual, worse = [row["residual"] for row in found], max(row["error"] / row["best"] for row in found)
    ours = (
        f"|I - AZ| {min(residual):.2f} to {max(residual):.2f}; error of C~ up to {worse:.2f} times the exact inverse's"
    )
    return judged(max(residual) <= FINE, worse <= 1.1, ours=ours)


def _identity(rows: Rows) -> Judgement:
    found, other = _six(rows, "identity"), _six(rows, "transpose")
    residual, worse = [row["residual"] for row in found], max(row["error"] / row["best"] for row in found)
    ours = (
        f"|I - AZ| {min(residual):.1g} to {max(residual):.2g}; error of C~ up to {worse:.3f} times the exact inverse's"
    )
    nearer = all(a["residual"] < b["residual"] for a, b in zip(found, other, strict=True))
    return judged(nearer and max(residual) <= FINE, nearer and worse <= 1.1, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    asked = [
        [row["data"], f"{row['dimension']:.1f}", str(row["asked"]), str(2 * row["n"]),
         "yes" if row["asked"] < 2 * row["n"] else "no"]
        for row in pick(rows, what="asked")
    ]  # fmt: skip
    promised = [
        [f"{row['landmarks']}, gamma {row['gamma']:g}", str(row["count"]), f"{max(row['whole']) / row['slack']:.2g}",
         f"{max(row['block']) / row['size']:.2g}", f"{_failures(row)['whole']}", f"{_failures(row)['block']}",
         str(len(row["whole"]))]
        for row in pick(rows, what="promise")
    ]  # fmt: skip
    steps = [
        [data, f"{gamma:g}", start, *(
            f"{each['residual']:.2g} {each['error']:.2g}"
            for each in (the(rows, what="steps", data=data, gamma=gamma, start=start, steps=s) for s in (2, 4, 6, 8))
        ), f"{the(rows, what='steps', data=data, gamma=gamma, start=start, steps=0)['best']:.2g}"]
        for data in DATA for gamma in GAMMAS[1:] for start in STARTS
        if pick(rows, what="steps", data=data, gamma=gamma)
    ]  # fmt: skip
    return [
        Table(
            f"Landmarks that Theorem 2 asks for (eps {EPS:g}, delta {DELTA:g})",
            ["queries and keys", "d_stat", "asked for", "rows", "fewer"], asked,
        ),
        Table(
            f"Draws of landmarks on a circle, {2 * PROMISED} rows: the worst, and how many break the promise",
            ["landmarks", "number", "worst |E|/lambda", "worst |C - C~|/|C|", "E fails", "C~ fails", "draws"], promised,
        ),
        Table(
            "The iteration: |I - AZ| and error of C~ after 2, 4, 6 and 8 steps",
            ["queries and keys", "gamma", "start", "2", "4", "6", "8", "exact"], steps,
        ),
    ]  # fmt: skip


def _mean_share(rows: Rows, count: int, name: str) -> float:
    """Of |C|."""
    return fmean(
        x / size for row in pick(rows, landmarks=count) for x, size in zip(row[name], row["size"], strict=True)
    )


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(4.7, 4.6))
    for number, data in enumerate(("circle", "normal", DATA[-1], DATA[-2])):
        found = pick(rows, what="sweep", data=data)
        counts = sorted({row["landmarks"] for row in found})
        left.plot(counts, [_mean_share(found, count, "block") for count in counts], label=data, **style(number))
        bound = [_mean_share(found, count, "whole") / 2 for count in counts]
        left.plot(counts, bound, linestyle="--", color=style(number)["color"])
        values = the(rows, what="scaled", data=data, gamma=0.1)["values"]
        middle.plot(range(1, len(values) + 1), values, label=data, markevery=8, **style(number))
        for start, line in zip(STARTS, ("-", ":"), strict=True):
            steps = pick(rows, what="steps", data=data, gamma=0.1, start=start)
            right.plot(
                [row["steps"] for row in steps], [max(row["residual"], 1e-16) for row in steps], linestyle=line,
                label=f"{data}, {'I' if start == 'identity' else 'A^T'}", **style(number),
            )  # fmt: skip
    asked = the(rows, what="promise", landmarks="theorem", gamma=0.0)
    left.plot([asked["count"]], [asked["eps"]], **{**style(0), "marker": "*", "color": "black", "markersize": 10},
              linestyle="none", label=f"Theorem 2 for the circle: {asked['eps']:g} at {asked['count']}")  # fmt: skip
    left.plot([], [], linestyle="--", color="black", label="its bound, |E| / 2")
    left.set(
        xscale="log", yscale="log", xlabel="landmarks d", ylabel="|C - C~| / |C|, mean of draws and heads",
        title="Error and bound", ylim=(1e-9, None),
    )  # fmt: skip
    middle.axhline(1.0, color="black", linewidth=0.8)
    middle.axhline(0.1 / 128.1, color="black", linestyle="--", label="gamma / (d + gamma)")
    middle.set(
        yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue",
        title="Lemma 3: the scaled M, d = 128, gamma = 0.1",
    )  # fmt: skip
    right.axvline(6, color="black", linewidth=0.8, linestyle="--", label="the authors' 6 steps")
    right.set(
        yscale="log",
        xlabel="steps of the iteration",
        ylabel="|I - AZ|",
        title="From the identity, and from A^T / |A|_1",
    )
    for axes in (left, middle, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7)


STUDY = Study(
    name="skyformer-theory",
    title="Landmarks never give too much, and how many are enough; the iteration for their inverse",
    paper="skyformer",
    where="Theorem 2, Lemma 3",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("seeds",),
    claims=(
        Claim(
            "lower", "Theorem 2", "the approximation of the lifted matrix never exceeds it, for any landmarks",
            "C-bar - C-bar-tilde is positive semidefinite",
            "least eigenvalue at least -1e-9 for every draw, number of landmarks and gamma", _lower,
        ),
        Claim(
            "theorem", "Theorem 2, appendices C and D",
            "with its landmarks |C - C~| <= eps |C|, but for a share delta of draws",
            "d >= 56/3 d_stat/beta log(4n/delta), with the constants of the proof",
            f"eps = delta = {EPS:g}; a failure rate of at most delta is not rejected (binomial, level 1e-6), the "
            f"landmarks are fewer than the rows, and with {CONTROL} landmarks it is rejected", _theorem,
        ),
        Claim(
            "halved", "appendix D, last step", "the error of C~ is at most that of the lifted matrix",
            "|C - C~| <= |E|; E = C-bar - C-bar-tilde",
            "at most |E| / 2, which follows from E being positive semidefinite, and the landmarks for "
            "lambda = 2 eps |C| do, too; same shape: at most |E|", _halved,
        ),
        Claim(
            "damped", "section 4.4", "damping M by gamma costs little: |E| <= max(lambda, 4 n gamma / d)",
            "gamma is not in the theorem; the bound was derived from its proof",
            "a failure rate of at most delta is not rejected for gamma > 0, and without the second term it is for the "
            "largest gamma", _damped, ours=True,
        ),
        Claim(
            "eigenvalues", "Lemma 3", "the eigenvalues of the scaled M + gamma I lie between 0 and 1", "in (0, 1)",
            "all above 0 and at least gamma / (d + gamma), all below 1; same shape: all in (0, 1]", _eigenvalues,
        ),
        Claim(
            "early", "follows from Lemma 3", "an iteration that is stopped early still never gives too much",
            "not stated",
            "least eigenvalue of C-bar - C-bar-tilde at least -1e-9 after every number of steps from both starts, and "
            "below that from twice the identity", _early, ours=True,
        ),
        Claim(
            "authors", "section 4.4, the authors' code", "six steps from A^T / |A|_1 at gamma = 0.1 give the inverse",
            "6 steps",
            "|I - AZ| <= 0.1 on all data; same shape: the error of C~ is at most a tenth above that of the exact "
            "inverse", _authors,
        ),
        Claim(
            "identity", "follows from Lemma 3", "six steps from the identity at gamma = 0.1 give the inverse",
            "not tried",
            "|I - AZ| <= 0.1 on all data, and less than from the authors' start; same shape: less than that, and the "
            "error of C~ at most a tenth above that of the exact inverse", _identity,
            ours=True,
        ),
    ),
)  # fmt: skip
