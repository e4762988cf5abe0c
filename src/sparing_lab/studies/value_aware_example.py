"""Three values for which the largest weight is the worst choice, and how kernels differ in that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing.oracles.convex import ova_objective
from sparing.workbench.estimate import exponent
from sparing_lab.report.figure import panels, style
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.study import Claim, Settings, Study, judged
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = (0.25, 0.35, 0.40)
LENGTHS = tuple(3.0 * 2**power for power in range(13))  #: of the third value, 3 and more
DEGREES = tuple(range(0, 33, 2))  #: of a polynomial kernel
SPREADS = (1.0, 2.0, 4.0)  #: standard deviations of the inner products, in an exponential kernel
KEYS = 32
DRAWS = 2000


def _cells(settings: Settings) -> list[Cell]:
    draws = (settings.seeds or 1) * DRAWS
    return [
        {"what": "example"},
        *({"what": "growing", "length": length} for length in LENGTHS),
        *({"what": "kernel", "degree": degree, "draws": draws} for degree in DEGREES),
        *({"what": "exp", "spread": spread, "draws": draws} for spread in SPREADS),
    ]


def _measure(settings: Settings, cell: Cell) -> Row:
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    if cell["what"] == "kernel":
        return _rankings(lambda products: products ** cell["degree"], cell["draws"])
    if cell["what"] == "exp":
        return _rankings(lambda products: (cell["spread"] * products).exp(), cell["draws"])
    values = torch.diag(torch.tensor([1.0, 2.0, cell.get("length", 3.0)], dtype=torch.float64))
    distances = ova_objective(weights, values)
    if cell["what"] == "growing":
        return {"oblivious": float(distances[weights.argmax()]), "aware": float(distances.min())}
    norms = weights * values.norm(dim=-1)
    return {
        "distances": distances.tolist(),
        "by_distance": distances.argsort().tolist(),
        "by_weight": weights.argsort(descending=True).tolist(),
        "by_norm": norms.argsort(descending=True).tolist(),
    }


def _rankings(kernel: Callable[[Tensor], Tensor], draws: int) -> Row:
    """How skewed the weights of a kernel are, and how often the largest is the best choice for one value.

    Orthogonal values with log-normal lengths, and random inner products of unit spread, as in the paper's argument.
    """
    random = torch.Generator().manual_seed(0)  # the same products and values for all kernels
    products = torch.randn(draws, KEYS, generator=random, dtype=torch.float64)
    lengths = torch.randn(draws, KEYS, generator=random, dtype=torch.float64).exp()
    found = kernel(products)
    weights = found / found.sum(-1, keepdim=True)
    best = (lengths.square() * (0.5 - weights)).argmin(-1)
    return {
        "agree": float((best == weights.argmax(-1)).double().mean()),
        "skew": float(weights.max(-1).values.mean()),
    }


def _example(rows: Rows) -> Judgement:
    found = the(rows, what="example")
    close = all(abs(x - y) < 0.005 for x, y in zip(found["distances"], (2.4925, 3.1925, 3.7925), strict=True))
    reverse = found["by_distance"] == [0, 1, 2] and found["by_weight"] == [2, 1, 0]
    return judged(close and reverse, reverse, ours=", ".join(f"{x:.4f}" for x in found["distances"]))


def _norms(rows: Rows) -> Judgement:
    found = the(rows, what="example")
    order = " > ".join(f"v{index + 1}" for index in found["by_norm"])
    return judged(found["by_norm"] != found["by_distance"], ours=order)


def _growing(rows: Rows) -> Judgement:
    found = sorted(pick(rows, what="growing"), key=lambda row: row["length"])
    first, last = found[0], found[-1]
    grows = all(a["oblivious"] < b["oblivious"] for a, b in pairwise(found))
    slope = exponent([row["length"] for row in found[-4:]], [row["oblivious"] for row in found[-4:]])
    ours = f"{first['oblivious']:.2f} at {first['length']:g}, {last['oblivious']:.3g} at {last['length']:g}"
    ours += f", exponent {slope:.2f}; the nearest value's error, too: {last['aware']:.3g}"
    return judged(grows and 1.9 < slope < 2.1, grows, ours=ours)


def _skew(rows: Rows) -> Judgement:
    powers = sorted(pick(rows, what="kernel"), key=lambda row: row["degree"])
    agree = [row["agree"] for row in powers]
    rises = agree[-1] > agree[0] and all(later > earlier - 0.02 for earlier, later in pairwise(agree))
    skewed = powers[-1]["skew"] >= 0.5
    ours = f"largest weight is best: degree 0 {agree[0]:.0%}, {powers[-1]['degree']} {agree[-1]:.0%}"
    return judged(rises and skewed, rises, ours=f"{ours} (largest weight {powers[-1]['skew']:.2f})")


def _exponential(rows: Rows) -> Judgement:
    low, soft = the(rows, what="kernel", degree=2), pick(rows, what="exp")
    less = [low["skew"] < row["skew"] and low["agree"] < row["agree"] for row in soft]
    shown = ", ".join(f"exp at spread {row['spread']:g} {row['skew']:.2f}" for row in soft)
    return judged(all(less), less[-1], ours=f"largest weight: degree 2 {low['skew']:.2f}, {shown}")


def _tables(rows: Rows) -> list[Table]:
    found = the(rows, what="example")
    three = [
        [f"v{i + 1}", f"{i + 1}", f"{WEIGHTS[i]:.2f}", f"{found['distances'][i]:.4f}",
         *(str(found[ranking].index(i) + 1) for ranking in ("by_distance", "by_weight", "by_norm"))]
        for i in range(3)
    ]  # fmt: skip
    columns = ["value", "length", "weight", "squared distance", "rank: distance", "weight", "weight x length"]
    named = {row["degree"]: row for row in pick(rows, what="kernel")}
    named |= {f"exp, spread {row['spread']:g}": row for row in pick(rows, what="exp")}
    kernels = [[str(name), f"{row['skew']:.3f}", f"{row['agree']:.1%}"] for name, row in named.items()]
    return [
        Table("Three orthogonal values", columns, three),
        Table("Kernels", ["degree", "largest weight, mean", "is the best choice"], kernels),
    ]


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2)
    growing = pick(rows, what="growing")
    lengths = [row["length"] for row in growing]
    left.plot(lengths, [row["oblivious"] for row in growing], label="largest weight (OVO-1)", **style(0))
    left.plot(lengths, [row["aware"] for row in growing], label="nearest value (OVA-1)", **style(1))
    left.plot([3, 3], [3.79, 2.49], "x", color="black", label="paper: 3.79 and 2.49")
    left.set(xscale="log", yscale="log", xlabel="length of v3", ylabel="squared error", title="The example, v3 growing")
    powers = pick(rows, what="kernel")
    degrees = [row["degree"] for row in powers]
    right.plot(degrees, [row["agree"] for row in powers], label="largest weight is the best choice", **style(0))
    right.plot(degrees, [row["skew"] for row in powers], label="largest weight, mean", **style(1))
    for row, line in zip(pick(rows, what="exp"), ("--", "-.", (0, (1, 3))), strict=True):
        label = f"largest weight, exp at spread {row['spread']:g}"
        right.axhline(row["skew"], color=style(2)["color"], linestyle=line, label=label)
    right.axhline(0.5, color="black", linestyle=":", label="1/2: from here on values do not matter")
    right.set(xlabel="degree of the polynomial kernel", ylabel="share", title=f"{KEYS} orthogonal values", ylim=(0, 1))
    for axes in (left, right):
        axes.legend()


STUDY = Study(
    name="value-aware-example",
    title="Three values whose largest weight is the worst choice; why flat kernels need their values",
    paper="value-aware",
    where="section 3",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("seeds",),
    claims=(
        Claim(
            "example", "section 3", "the value with the least weight is nearest, that with the largest farthest",
            "2.49 for v1, 3.79 for v3", "all three squared distances within 0.005, ranking reversed", _example,
        ),
        Claim(
            "norms", "section 3", "weight x length, too, ranks them wrongly", "v3 first",
            "its ranking differs from that by distance", _norms,
        ),
        Claim(
            "unbounded", "section 3", "the error of the largest weight grows without bound with v3", "to infinity",
            "grows at every step, in the end as the square of the length (exponent 1.9 to 2.1)", _growing,
        ),
        Claim(
            "skew", "section 3", "the higher the degree, the less values matter: the largest weight passes 1/2",
            "degree 0: only lengths count; high degrees: only weights do",
            "the largest weight is best in ever more draws (no step back by 2 points), and is at least 1/2 on average "
            "at the highest degree; same shape: only the first", _skew,
        ),
        Claim(
            "exponential", "section 3", "a polynomial of degree 2 is less skewed than exp", "likely less skewed",
            "smaller mean of the largest weight, and that is less often the best choice, at every spread of the inner "
            "products; same shape: at the largest", _exponential,
        ),
    ),
)  # fmt: skip
