"""How often hash codes collide: the law, how near it is to an exponential, and whether hashes obey it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.maths.hashing import hadamard_rotations, hyperplanes, sign_codes
from sparing.methods.yoso.method import agreement
from sparing.workbench.estimate import estimate
from sparing_lab.figure import Figure, level, panels, style
from sparing_lab.studies.judges import Criterion, Judge, above, at_least, at_most, each
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot

BITS = 8  #: bits of a code, as in the paper
WIDTH = 64  #: width of a head of BERT
CODES = 64  #: codes in one draw
PAIRS = 8  #: pairs of vectors in each draw
DRAWS = {"small": 2000, "paper": 20000}
AT_ONCE = 250
POINTS = 401  #: points of the curves
COSINES = (-0.5, -0.25, 0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
HASHES = {
    "hadamard": "Hadamard, a rotation for each bit (ours)",
    "gaussian": "Gaussian hyperplanes (eq. 20)",
    "contiguous": "Hadamard, consecutive coordinates (eq. 21)",
}
LEVEL = 1 - 0.01 / (2 * len(COSINES))  #: so that all intervals of two hashes hold in 99 % of runs


def _cells(settings: Settings) -> list[Cell]:
    draws = (settings.seeds or 1) * DRAWS[settings.scale]
    of = {"bits": BITS, "width": WIDTH}
    return [
        {"what": "curves", "bits": BITS},
        *({"what": "hash", "hash": name, "draws": draws, **of} for name in HASHES),
    ]


def _measure(settings: Settings, cell: Cell) -> Row | list[Row]:
    if cell["what"] == "curves":
        return curves(cell["bits"])
    return rates(**{name: value for name, value in cell.items() if name != "what"})


def curves(bits: int) -> Row:
    """Return both kernels and their derivatives on (-1, 1), by automatic differentiation, and the lower bound."""
    # The points are evenly spaced in the angle: the derivative of the collision probability is steep at both ends.
    x = -(torch.arange(1, POINTS - 1, dtype=torch.float64) * math.pi / (POINTS - 1)).cos()
    found: dict[str, list[float]] = {"at": x.tolist()}
    for name, kernel in (
        ("collision", lambda x: agreement(x) ** bits),
        ("exponential", lambda x: (bits * (x - 1)).exp()),
    ):
        at: Any = x.clone().requires_grad_()
        value = kernel(at)
        (first,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), at)
        found |= {name: value.tolist(), f"{name} first": first.tolist(), f"{name} second": second.tolist()}
    found["bound"] = (bits / 2 * agreement(x) ** bits).tolist()
    ends = agreement(torch.tensor([-1.0, 1.0], dtype=torch.float64)) ** bits
    return {**found, "collision at the ends": ends.tolist(), "exponential at the ends": [math.exp(-2 * bits), 1.0]}


def rates(hash: str, draws: int, bits: int, width: int) -> list[Row]:
    """Measure how often vectors of each cosine have equal codes. Codes of a draw are dependent: a draw counts once."""
    shares = []
    for seed, start in enumerate(range(0, draws, AT_ONCE)):
        count = min(AT_ONCE, draws - start)
        normals = _normals(hash, Draws(seed, torch.arange(count)), bits, width)
        codes = sign_codes(vectors(count, width, seed).flatten(1, 2)[None], normals)[0]
        first, *others = codes.unflatten(1, (-1, PAIRS)).unbind(1)  # (draws, PAIRS, CODES) each
        shares.append(torch.stack([(first == other).double().mean((1, 2)) for other in others]))
    law = agreement(torch.tensor(COSINES, dtype=torch.float64)) ** bits
    found = [estimate(each, level=LEVEL) for each in torch.cat(shares, dim=1).tolist()]
    return [
        {"x": x, "law": wanted, "rate": mean.mean, "low": mean.low, "high": mean.high}
        for x, wanted, mean in zip(COSINES, law.tolist(), found, strict=True)
    ]


def _normals(hash: str, draws: Draws, bits: int, width: int) -> Tensor:
    """Return the normals of the hyperplanes, (draws, bits, CODES, width)."""
    if hash != "contiguous":
        family: Any = hash
        return torch.cat(list(hyperplanes(family, draws, "study", bits=bits, hashes=CODES, width=width)), dim=2)
    blocks = -(-bits * CODES // width)
    rows = hadamard_rotations(draws, "study", blocks, width).flatten(1, 2)[:, : bits * CODES]
    return rows.unflatten(1, (CODES, bits)).transpose(1, 2)


def vectors(draws: int, width: int, seed: int) -> Tensor:
    """Return unit vectors (draws, 1 + cosines, PAIRS, width): in random directions, then with each cosine to these."""
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, draws, 1, PAIRS, width, generator=random, dtype=torch.float64).unbind(0)
    a = a / a.norm(dim=-1, keepdim=True)
    b = b - (a * b).sum(-1, keepdim=True) * a
    x = torch.tensor(COSINES, dtype=torch.float64).view(-1, 1, 1)
    return torch.cat([a, x * a + (1 - x.square()).sqrt() * b / b.norm(dim=-1, keepdim=True)], dim=1)


def _on_curves(of: Callable[[Row], Any]) -> Callable[[Rows], Any]:
    """Return a function that takes figures from the row with both curves."""
    return lambda rows: of(the(rows, what="curves"))


def _least(found: Row) -> dict[str, Any]:
    """Return the least value of each function and derivative inside the interval, and of the functions at its ends."""
    names = [f"{kernel}{order}" for kernel in ("collision", "exponential") for order in ("", " first", " second")]
    ends = found["collision at the ends"] + found["exponential at the ends"]
    return {"inside": {name: min(found[name]) for name in names}, "ends": min(ends), "points": len(found["at"])}


def _distance(found: Row) -> dict[str, Any]:
    """Return the differences and the correlation between the collision probability and the exponential."""
    both = found["collision"], found["exponential"]
    apart = [a - b for a, b in zip(*both, strict=True)]
    correlation = float(torch.tensor(both).corrcoef()[0, 1])
    return {"low": min(apart), "high": max(apart), "size": max(map(abs, apart)), "correlation": correlation}


def _end(found: Row) -> dict[str, Any]:
    """Return the derivative of the collision probability at three of the last points before x = 1, and the bound."""
    last = [(math.acos(found["at"][place]), found["collision first"][place]) for place in (-4, -2, -1)]
    angles, values = zip(*last, strict=True)
    return {"angles": angles, "values": values, "bound": found["bound"][-1]}


def _signs(found: dict[str, Any]) -> str:
    wrong = ", ".join(name for name, value in found["inside"].items() if value <= 0)
    inside = f"not positive: {wrong}" if wrong else f"positive at {found['points']} points of (-1, 1)"
    return f"{inside}; at x = -1 the probability is {found['ends']:g}"


def _steep(found: dict[str, Any]) -> bool:
    """Return whether the derivative grows like tau / (pi sin(angle)) towards x = 1, and the bound does not."""
    pairs = zip(found["values"], found["angles"], strict=True)
    return all(abs(value * math.pi * math.sin(angle) / BITS - 1) < 0.1 for value, angle in pairs) and (
        found["values"][0] < found["values"][1] < found["values"][2] and found["bound"] <= BITS / 2
    )


def _bounded(found: dict[float, float]) -> str:
    most, (first, *_, last) = max(found, key=found.__getitem__), found.values()
    return f"bound / derivative at most {found[most]:.3f} (at x = {most:.2f}), {first:.3f} and {last:.3f} at the ends"


def _law(*names: str) -> Judge:
    """Judge whether the collision rates of these hashes agree with the collision probability."""

    def shows(found: list[Row]) -> str:
        held = sum(row["low"] <= row["law"] <= row["high"] for row in found)
        worst = max(found, key=lambda row: abs(row["rate"] - row["law"]) / (row["high"] - row["low"]))
        farthest = f"{worst['rate'] / worst['law']:.3f} of it at x = {worst['x']:g}"
        return f"{held} of {len(found)} intervals hold it; farthest: {farthest}"

    return Judge(
        lambda rows: [row for name in names for row in pick(rows, what="hash", hash=name)],
        each("at all cosines, within intervals over draws that hold together in 99 % of all runs",
             lambda row: row["low"] <= row["law"] <= row["high"]),
        each("within 10 %", lambda row: 0.9 < row["rate"] / row["law"] < 1.1), shows,
        of=" and ".join(HASHES[name] for name in names),
    )  # fmt: skip


def _tables(rows: Rows) -> list[Table]:
    def entry(x: float, what: str) -> str:
        if what == "exponential":
            return f"{math.exp(BITS * (x - 1)):.5f}"
        row = the(rows, what="hash", hash=what or "hadamard", x=x)
        law = row["law"]
        return f"{row['rate'] / law:.3f} +- {(row['high'] - row['low']) / 2 / law:.3f}" if what else f"{law:.5f}"

    heads = {"probability": "", "exponential": "exponential", "Hadamard": "hadamard", "Gaussian": "gaussian"}
    title = f"Codes of {BITS} bits, {WIDTH} coordinates; of hashes, their collisions / probability"
    return [pivot(title, "cosine", COSINES, {**heads, "consecutive": "contiguous"}, entry, "{:g}".format)]


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3)
    found = the(rows, what="curves")
    x, colours = found["at"], [style(number)["color"] for number in range(3)]
    names = {
        "": (f"(1 - arccos(x) / pi)^{BITS}", f"exp({BITS} (x - 1))", "weight", "Weights"),
        " first": ("of the collision probability", "of the exponential", "derivative", "Derivatives"),
    }
    for axes, (order, (law, exponential, words, title)) in zip((left, middle), names.items(), strict=True):
        axes.plot(x, found[f"collision{order}"], label=law, color=colours[0])
        axes.plot(x, found[f"exponential{order}"], "--", label=exponential, color=colours[1])
        axes.set(xlabel="x, cosine of query and key", ylabel=words, title=title)
    middle.plot(x, found["bound"], "-.", label="lower bound of the former, for the backward pass", color=colours[2])
    middle.set(ylim=(0, 12))
    short = {"hadamard": "Hadamard, a rotation for each bit", "contiguous": "consecutive coordinates"}
    for number, (name, words) in enumerate(HASHES.items()):
        mine = pick(rows, what="hash", hash=name)
        at = [row["x"] for row in mine]
        if name in short:  # the third one would hide the first
            left.plot(at, [row["rate"] for row in mine], linestyle="none", label=f"found: {short[name]}",
                      **{**style(3 + number), "fillstyle": "none"})  # fmt: skip
        right.errorbar(
            [value + 0.012 * (number - 1) for value in at], [row["rate"] / row["law"] for row in mine],
            yerr=[(row["high"] - row["low"]) / 2 / row["law"] for row in mine], label=words, capsize=2, linewidth=1,
            **style(3 + number),
        )  # fmt: skip
    level(right, 1)
    right.set(xlabel="x, cosine of query and key", ylabel="rate of collisions / probability", ylim=(0.4, 1.5),
              title="Hashes against the law, intervals over draws")  # fmt: skip
    for axes in (left, middle, right):
        axes.legend(loc="upper left")


STUDY = Study(
    name="yoso-collision", title="Collision probability against the exponential, and whether hashes have it",
    paper="yoso", where="figure 1", cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("seeds",),
    claims=(
        Claim("positive", "section 4", "both functions and their first two derivatives are positive on [-1, 1]",
              "positive", judge=Judge(
                  _on_curves(_least), above(0).of("inside", "at all points of the open interval, by automatic "
                                                  "differentiation") & above(0).of("ends", "at both ends"),
                  above(0).of("inside", "at all points but the ends"), _signs)),
        Claim("aligned", "figure 1", "the collision probability is a biased approximation of exp(8 (x - 1))",
              "two curves close to each other", judge=Judge(
                  _on_curves(_distance), at_most(0.2).of("size", "apart")
                  & at_least(0.95).of("correlation", "in correlation"),
                  at_least(0.8).of("correlation", "in correlation"),
                  "difference {low:+.3f} to {high:+.3f}, correlation {correlation:.3f}".format_map)),
        Claim("infinite", "section 4", "the derivative of the collision probability goes to infinity at x = 1",
              "infinity; the bound stays finite", judge=Judge(
                  _on_curves(_end), Criterion("grows as 8 / (pi sin(angle)), within 10 %, at the last points before 1, "
                                              "where the bound is at most 4", _steep),
                  shows=lambda found: (
                      "{:.0f}, {:.0f}, {:.0f} at angles {:.3f}, {:.3f}, {:.3f}; the bound {:.2f}".format(
                          *found["values"], *found["angles"], found["bound"])))),
        Claim("bound", "appendix", "half the probability of a bit is at most 1 / (pi sqrt(1 - x^2))",
              "a lower bound on [-1, 1]", judge=Judge(
                  _on_curves(lambda curves: {x: bound / true for x, bound, true in zip(
                      curves["at"], curves["bound"], curves["collision first"], strict=True)}),
                  at_most(1), shows=_bounded, of="bound / derivative at all points")),
        Claim("law", "eqs. 5, 20", "codes collide with probability (1 - arccos(x) / pi)^8", "the probability",
              judge=_law("hadamard", "gaussian")),
        Claim("contiguous", "eq. 21", "so do codes of consecutive coordinates of one Hadamard rotation",
              "approximates random projection", judge=_law("contiguous")),
    ),
)  # fmt: skip
