"""Three values for which the largest weight is the worst choice, and how often it is the best one, by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparing.oracles.convex import ova_objective
from sparing_lab.figure import Figure, line, panels, style
from sparing_lab.studies.judges import Criterion, Judge, each, exponent, rises
from sparing_lab.studies.rows import Cell, Row, Rows, curve, pick, power, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing

WEIGHTS = (0.25, 0.35, 0.40)
LENGTHS = tuple(3.0 * 2**power for power in range(13))  #: lengths of the third value
DEGREES = tuple(range(0, 33, 2))  #: degrees of a polynomial kernel
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
    """Measure how skewed the weights of a kernel are, and how often the largest is the best choice of one value.

    Values are orthogonal, of log-normal lengths, inner products standard normal, as in the paper's argument.
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


def _example(rows: Rows) -> Row:
    return the(rows, what="example")


def _growing(rows: Rows) -> dict[str, Any]:
    """Return the errors by the length of v3, and the oblivious ones at its four largest lengths."""
    both = {name: curve(pick(rows, what="growing"), "length", name) for name in ("oblivious", "aware")}
    return {**both, "end": dict(list(both["oblivious"].items())[-4:])}


def _grown(found: dict[str, Any]) -> str:
    (low, first), *_, (high, last) = found["oblivious"].items()
    aware = found["aware"][high]
    return (
        f"{first:.2f} at {low:g}, {last:.3g} at {high:g}, exponent {power(found['end']):.2f}; the nearest value's "
        f"error, too: {aware:.3g}"
    )


def _powers(rows: Rows) -> dict[str, Any]:
    """Return, by degree, how often the largest weight is the best choice, and how large it is."""
    return {name: curve(pick(rows, what="kernel"), "degree", name) for name in ("agree", "skew")}


def _ends(found: dict[str, Any]) -> tuple[float, float, int]:
    first, *_, last = found["agree"].values()
    return first, last, list(found["agree"])[-1]


def _less(rows: Rows) -> list[Row]:
    """Return the rows of exponential kernels, each compared with the polynomial kernel of degree 2."""
    low = the(rows, what="kernel", degree=2)
    return [{**row, "low": low["skew"], "less": all(low[of] < row[of] for of in ("skew", "agree"))}
            for row in pick(rows, what="exp")]  # fmt: skip


_REVERSED = Criterion("ranking reversed", lambda row: (row["by_distance"], row["by_weight"]) == ([0, 1, 2], [2, 1, 0]))
_RISES = Criterion(
    "the largest weight is best in ever more draws (no step back by 2 points)",
    lambda found: _ends(found)[1] > _ends(found)[0] and rises(room=0.02).holds(found["agree"]),
)


def _tables(rows: Rows) -> list[Table]:
    found = _example(rows)
    three = [
        [f"v{i + 1}", f"{i + 1}", f"{WEIGHTS[i]:.2f}", f"{found['distances'][i]:.4f}",
         *(str(found[ranking].index(i) + 1) for ranking in ("by_distance", "by_weight", "by_norm"))]
        for i in range(3)
    ]  # fmt: skip
    columns = ["value", "length", "weight", "squared distance", "rank: distance", "weight", "weight x length"]
    named = [{**row, "name": str(row["degree"])} for row in pick(rows, what="kernel")]
    named += [{**row, "name": f"exp, spread {row['spread']:g}"} for row in pick(rows, what="exp")]
    return [
        Table("Three orthogonal values", columns, three),
        listing("Kernels", named, {"degree": "{name}", "largest weight, mean": "{skew:.3f}",
                                   "is the best choice": "{agree:.1%}"}),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    left, right = panels(figure, 1, 2)
    growing, powers = _growing(rows), _powers(rows)
    line(left, growing["oblivious"], "largest weight (OVO-1)", 0)
    line(left, growing["aware"], "nearest value (OVA-1)", 1)
    left.plot([3, 3], [3.79, 2.49], "x", color="black", label="paper: 3.79 and 2.49")
    left.set(xscale="log", yscale="log", xlabel="length of v3", ylabel="squared error", title="The example, v3 growing")
    line(right, powers["agree"], "largest weight is the best choice", 0)
    line(right, powers["skew"], "largest weight, mean", 1)
    for row, dash in zip(pick(rows, what="exp"), ("--", "-.", (0, (1, 3))), strict=True):
        label = f"largest weight, exp at spread {row['spread']:g}"
        right.axhline(row["skew"], color=style(2)["color"], linestyle=dash, label=label)
    right.axhline(0.5, color="black", linestyle=":", label="1/2: from here on values do not matter")
    right.set(xlabel="degree of the polynomial kernel", ylabel="share", title=f"{KEYS} orthogonal values", ylim=(0, 1))
    for axes in (left, right):
        axes.legend()


STUDY = Study(
    name="value-aware-example",
    title="Three values whose largest weight is the worst choice; why flat kernels need their values",
    paper="value-aware", where="section 3", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("seeds",),
    claims=(
        Claim("example", "section 3", "the value with the least weight is nearest, that with the largest farthest",
              "2.49 for v1, 3.79 for v3", judge=Judge(
                  _example, Criterion("all three squared distances within 0.005", lambda row: all(
                      abs(x - y) < 0.005 for x, y in zip(row["distances"], (2.4925, 3.1925, 3.7925), strict=True)))
                  & _REVERSED, _REVERSED, lambda row: ", ".join(f"{x:.4f}" for x in row["distances"]))),
        Claim("norms", "section 3", "weight x length, too, ranks them wrongly", "v3 first", judge=Judge(
            _example, Criterion("its ranking differs from that by distance",
                                lambda row: row["by_norm"] != row["by_distance"]),
            shows=lambda row: " > ".join(f"v{index + 1}" for index in row["by_norm"]))),
        Claim("unbounded", "section 3", "the error of the largest weight grows without bound with v3", "to infinity",
              judge=Judge(_growing, rises().of("oblivious") & exponent(1.9, 2.1).of("end", "of the length, in the end"),
                          rises().of("oblivious"), _grown, of="error over the length of v3")),
        Claim("skew", "section 3", "the higher the degree, the less values matter: the largest weight passes 1/2",
              "degree 0: only lengths count; high degrees: only weights do", judge=Judge(
                  _powers, _RISES & Criterion("is at least 1/2 on average at the highest degree",
                                              lambda found: list(found["skew"].values())[-1] >= 0.5), _RISES,
                  lambda found: "largest weight is best: degree 0 {:.0%}, {} {:.0%} (largest weight {:.2f})".format(
                      _ends(found)[0], _ends(found)[2], _ends(found)[1], found["skew"][_ends(found)[2]]))),
        Claim("exponential", "section 3", "a polynomial of degree 2 is less skewed than exp", "likely less skewed",
              judge=Judge(
                  _less, each("smaller mean of the largest weight, and that is less often the best choice, at every "
                              "spread of the inner products", lambda row: row["less"]),
                  Criterion("at the largest", lambda found: found[-1]["less"]),
                  lambda found: f"largest weight: degree 2 {found[0]['low']:.2f}, " + ", ".join(
                      f"exp at spread {row['spread']:g} {row['skew']:.2f}" for row in found))),
    ),
)  # fmt: skip
