"""How often hash codes collide: the law, how near it is to an exponential, and whether hashes obey it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.maths.hashing import hadamard_rotations, hyperplanes, sign_codes
from sparing.methods.yoso.method import agreement
from sparing.workbench.estimate import estimate
from sparing_lab.report.figure import panels, style
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = 8  #: of a code: the paper's
WIDTH = 64  #: of a head of BERT
CODES = 64  #: of one draw
PAIRS = 8  #: of vectors that each draw is shown
DRAWS = {"small": 2000, "paper": 20000}
AT_ONCE = 250
POINTS = 401  #: of the curves
COSINES = (-0.5, -0.25, 0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
HASHES = {
    "hadamard": "Hadamard, a rotation for each bit (ours)",
    "gaussian": "Gaussian hyperplanes (eq. 20)",
    "contiguous": "Hadamard, consecutive coordinates (eq. 21)",
}
LEVEL = 1 - 0.01 / (2 * len(COSINES))  #: of an interval, so that all of two hashes hold together in 99 % of all runs


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
    """Both kernels and their derivatives on (-1, 1), taken by automatic differentiation, and the lower bound."""
    # Evenly in the angle: the derivative of the collision probability is steep at both ends.
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
    """How often vectors of each cosine have equal codes. Codes of a draw are related: a draw is one measurement."""
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
    """(draws, bits, CODES, width)"""
    if hash != "contiguous":
        family: Any = hash
        return torch.cat(list(hyperplanes(family, draws, "study", bits=bits, hashes=CODES, width=width)), dim=2)
    blocks = -(-bits * CODES // width)
    rows = hadamard_rotations(draws, "study", blocks, width).flatten(1, 2)[:, : bits * CODES]
    return rows.unflatten(1, (CODES, bits)).transpose(1, 2)


def vectors(draws: int, width: int, seed: int) -> Tensor:
    """Unit vectors (draws, 1 + cosines, PAIRS, width): in random directions, then with each cosine to these."""
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, draws, 1, PAIRS, width, generator=random, dtype=torch.float64).unbind(0)
    a = a / a.norm(dim=-1, keepdim=True)
    b = b - (a * b).sum(-1, keepdim=True) * a
    x = torch.tensor(COSINES, dtype=torch.float64).view(-1, 1, 1)
    return torch.cat([a, x * a + (1 - x.square()).sqrt() * b / b.norm(dim=-1, keepdim=True)], dim=1)


def _positive(rows: Rows) -> Judgement:
    found = the(rows, what="curves")
    least = {
        f"{kernel}{order}": min(found[f"{kernel}{order}"])
        for kernel in ("collision", "exponential")
        for order in ("", " first", " second")
    }
    inside = all(value > 0 for value in least.values())
    at_ends = min(found["collision at the ends"] + found["exponential at the ends"])
    wrong = [name for name, value in least.items() if value <= 0]
    ours = f"positive at {len(found['at'])} points of (-1, 1)" if inside else f"not positive: {', '.join(wrong)}"
    return judged(inside and at_ends > 0, inside, ours=f"{ours}; at x = -1 the probability is {at_ends:g}")


def _bound(rows: Rows) -> Judgement:
    found = the(rows, what="curves")
    shares = [bound / true for bound, true in zip(found["bound"], found["collision first"], strict=True)]
    most = max(range(len(shares)), key=shares.__getitem__)
    ours = f"bound / derivative at most {shares[most]:.3f} (at x = {found['at'][most]:.2f})"
    return judged(shares[most] <= 1, ours=f"{ours}, {shares[0]:.3f} and {shares[-1]:.3f} at the ends")


def _infinite(rows: Rows) -> Judgement:
    found = the(rows, what="curves")
    angles = [math.acos(found["at"][place]) for place in (-4, -2, -1)]
    values = [found["collision first"][place] for place in (-4, -2, -1)]
    # tau / (pi sin(angle)) near x = 1
    whole = all(abs(v * math.pi * math.sin(a) / BITS - 1) < 0.1 for v, a in zip(values, angles, strict=True))
    grows = values[0] < values[1] < values[2]
    ours = f"{values[0]:.0f}, {values[1]:.0f}, {values[2]:.0f} at angles {', '.join(f'{a:.3f}' for a in angles)}"
    return judged(
        whole and grows and found["bound"][-1] <= BITS / 2, ours=f"{ours}; the bound {found['bound'][-1]:.2f}"
    )


def _aligned(rows: Rows) -> Judgement:
    found = the(rows, what="curves")
    apart = [a - b for a, b in zip(found["collision"], found["exponential"], strict=True)]
    below, above = min(apart), max(apart)
    correlation = float(torch.tensor([found["collision"], found["exponential"]]).corrcoef()[0, 1])
    ours = f"difference {below:+.3f} to {above:+.3f}, correlation {correlation:.3f}"
    return judged(max(-below, above) <= 0.2 and correlation >= 0.95, correlation >= 0.8, ours=ours)


def _law(*names: str) -> Any:
    def judge(rows: Rows) -> Judgement:
        found = [row for name in names for row in pick(rows, what="hash", hash=name)]
        missed = [row for row in found if not row["low"] <= row["law"] <= row["high"]]
        worst = max(found, key=lambda row: abs(row["rate"] - row["law"]) / (row["high"] - row["low"]))
        ours = f"{len(found) - len(missed)} of {len(found)} intervals hold it; farthest: {_share(worst)}"
        return judged(not missed, all(0.9 < row["rate"] / row["law"] < 1.1 for row in found), ours=ours)

    return judge


def _share(row: Row) -> str:
    return f"{row['rate'] / row['law']:.3f} of it at x = {row['x']:g}"


def _tables(rows: Rows) -> list[Table]:
    found = [
        [f"{x:g}", f"{pick(rows, what='hash', x=x)[0]['law']:.5f}", f"{math.exp(BITS * (x - 1)):.5f}",
         *(_cell(the(rows, what="hash", hash=name, x=x)) for name in HASHES)]
        for x in COSINES
    ]  # fmt: skip
    columns = ["cosine", "probability", "exponential", "Hadamard", "Gaussian", "consecutive"]
    return [
        Table(f"Codes of {BITS} bits, {WIDTH} coordinates; of hashes, their collisions / probability", columns, found)
    ]


def _cell(row: Row) -> str:
    return f"{row['rate'] / row['law']:.3f} +- {(row['high'] - row['low']) / 2 / row['law']:.3f}"


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3)
    found = the(rows, what="curves")
    x = found["at"]
    for axes, order, title in ((left, "", "Weights"), (middle, " first", "Derivatives")):
        law = f"(1 - arccos(x) / pi)^{BITS}" if not order else "of the collision probability"
        axes.plot(x, found[f"collision{order}"], label=law, color=style(0)["color"])
        label = f"exp({BITS} (x - 1))" if not order else "of the exponential"
        axes.plot(x, found[f"exponential{order}"], "--", label=label, color=style(1)["color"])
        axes.set(xlabel="x, cosine of query and key", ylabel="weight" if not order else "derivative", title=title)
    middle.plot(
        x, found["bound"], "-.", label="lower bound of the former, for the backward pass", color=style(2)["color"]
    )
    middle.set(ylim=(0, 12))
    for number, name in enumerate(HASHES):
        mine = pick(rows, what="hash", hash=name)
        at = [row["x"] for row in mine]
        if name != "gaussian":  # the third one would hide the first
            left.plot(at, [row["rate"] for row in mine], linestyle="none", label=f"found: {_short(name)}",
                      **{**style(3 + number), "fillstyle": "none"})  # fmt: skip
        right.errorbar(
            [value + 0.012 * (number - 1) for value in at], [row["rate"] / row["law"] for row in mine],
            yerr=[(row["high"] - row["low"]) / 2 / row["law"] for row in mine], label=HASHES[name], capsize=2,
            linewidth=1, **style(3 + number),
        )  # fmt: skip
    right.axhline(1, color="black", linewidth=0.8)
    right.set(xlabel="x, cosine of query and key", ylabel="rate of collisions / probability", ylim=(0.4, 1.5),
              title="Hashes against the law, intervals over draws")  # fmt: skip
    for axes in (left, middle, right):
        axes.legend(loc="upper left")


def _short(name: str) -> str:
    return {"hadamard": "Hadamard, a rotation for each bit", "contiguous": "consecutive coordinates"}[name]


STUDY = Study(
    name="yoso-collision",
    title="Collision probability against the exponential, and whether hashes have it",
    paper="yoso",
    where="figure 1",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("seeds",),
    claims=(
        Claim(
            "positive", "section 4", "both functions and their first two derivatives are positive on [-1, 1]",
            "positive", "at all points of the open interval, by automatic differentiation, and the values at both "
            "ends; same shape: all but the ends", _positive,
        ),
        Claim(
            "aligned", "figure 1", "the collision probability is a biased approximation of exp(8 (x - 1))",
            "two curves close to each other", "nowhere more than 0.2 apart, correlation of the curves at least 0.95; "
            "same shape: correlation at least 0.8", _aligned,
        ),
        Claim(
            "infinite", "section 4", "the derivative of the collision probability goes to infinity at x = 1",
            "infinity; the bound stays finite", "grows as 8 / (pi sin(angle)), within 10 %, at the last points before "
            "1, where the bound is at most 4", _infinite,
        ),
        Claim(
            "bound", "appendix", "half the probability of a bit is at most 1 / (pi sqrt(1 - x^2))",
            "a lower bound on [-1, 1]", "bound / derivative at most 1 at all points", _bound,
        ),
        Claim(
            "law", "eqs. 5, 20", "codes collide with probability (1 - arccos(x) / pi)^8", "the probability",
            "at all cosines, for both hashes of the library, intervals over draws that hold together in 99 % of all "
            "runs; same shape: within 10 %", _law("hadamard", "gaussian"),
        ),
        Claim(
            "contiguous", "eq. 21", "so do codes of consecutive coordinates of one Hadamard rotation",
            "approximates random projection", "as above; same shape: within 10 %", _law("contiguous"),
        ),
    ),
)  # fmt: skip
