"""Attention matrices of a trained model by hash collisions, against their expectation and against softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.functional import attention
from sparing.maths.dense import divide_rows
from sparing.maths.linalg import unit_rows
from sparing.transformers.watch import ObservedCall
from sparing_lab.figure import Figure, line, log_ticks, style
from sparing_lab.studies._yoso import bits_of, layers, models, relative, spread, text
from sparing_lab.studies.judges import Judge, at_least, exponent, falls
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, mean, pick, power, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot

LENGTH = 128
HASHES = (8, 16, 32, 64, 128, 256)
DRAWS = {"small": 2, "paper": 16}
SHOWN = (8, 32, 128)  #: numbers of hashes of the matrices in the figure
AT = 128  #: number of hashes at which patterns are compared
ALIKE, RELATED = 0.9, 0.7  #: least correlations for "reproduces" and "same shape"
MATRICES = {
    "own": "softmax of the model",
    "softmax": "softmax of unit q, k",
    **{f"YOSO-{m}": f"YOSO-{m}" for m in SHOWN},
    "E": "YOSO-E",
}


def _cells(settings: Settings) -> list[Cell]:
    draws = settings.seeds or DRAWS[settings.scale]
    return [{"model": name, "length": LENGTH, "draws": draws, "text": text()[1]} for name in models(settings, "minilm")]


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    seen = layers(cell["model"], cell["length"])
    rows: list[Row] = []
    for number, layer in enumerate(seen):
        rows += [{"what": "numbers", "layer": number, **row} for row in compare(layer, cell["draws"])]
    for number, layer in spread(seen, 3):  # always the first head, so that none is cherry-picked
        rows.append({"what": "pictures", "layer": number, "head": 0, "pictures": _pictures(layer, 0)})
    return rows


def matrices(seen: ObservedCall, hashes: int | None, seed: int = 0) -> Tensor:
    """Return B of eq. 5 [B, H, n, n], as attention to unit vectors; None: its expectation."""
    kind = "expectation=True" if hashes is None else f"hashes={hashes}"
    spec = f"yoso({kind}, bits={bits_of(seen)}, normalize=none)"
    return attention(seen.query, seen.key, _eye(seen), **{**seen.call, "method": spec, "seed": seed})


def softmax(seen: ObservedCall, *, unit: bool) -> Tensor:
    """Return the matrix of softmax: the model's own, or that of unit queries and keys at YOSO's temperature."""
    q, k = (unit_rows(x, 1e-12) if unit else x for x in (seen.query, seen.key))
    scale = {"scale": float(bits_of(seen))} if unit else {}
    return attention(q, k, _eye(seen), **{**seen.call, "method": "exact", **scale})


def _eye(seen: ObservedCall) -> Tensor:
    return torch.eye(seen.key.shape[-2]).expand(*seen.key.shape[:2], -1, -1)


@torch.no_grad()
def compare(seen: ObservedCall, draws: int) -> list[Row]:
    """Return means over the heads and the draws, for each number of hashes; None stands for the expectation."""
    wanted, soft, own = matrices(seen, None), softmax(seen, unit=True), softmax(seen, unit=False)
    rows: list[Row] = []
    for hashes in (*HASHES, None):
        found = [matrices(seen, hashes, seed) for seed in range(draws if hashes else 1)]
        each = {
            "error": [relative(b, wanted, 2) for b in found],
            "with expectation": [_correlation(b, wanted) for b in found],
            "with softmax": [_correlation(b, soft) for b in found],
            "with own softmax": [_correlation(b, own) for b in found],
        }
        rows.append({"hashes": hashes, **{name: float(torch.stack(values).mean()) for name, values in each.items()}})
    return rows


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the correlation of the entries of each head's matrices, rows divided by their sums."""
    a, b = (divide_rows(x.double(), x.double().sum(-1, keepdim=True)).flatten(-2) for x in (a, b))
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-300)


@torch.no_grad()
def _pictures(seen: ObservedCall, head: int) -> dict[str, list[str]]:
    """Return grey levels, sqrt(weight / the row's largest), as a row of hexadecimal bytes for each query."""
    found = {"own": softmax(seen, unit=False), "softmax": softmax(seen, unit=True), "E": matrices(seen, None)}
    found |= {f"YOSO-{m}": matrices(seen, m) for m in SHOWN}
    drawn = {}
    for name in MATRICES:
        weights = found[name][0, head]
        levels = (255 * (weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)).sqrt()).round().to(torch.uint8)
        drawn[name] = [bytes(row).hex() for row in levels.tolist()]
    return drawn


def _means(rows: Rows, name: str) -> dict[int | None, float]:
    """Return means over the layers, by the number of hashes."""
    return {hashes: mean(pick(rows, what="numbers", hashes=hashes), name) for hashes in (*HASHES, None)}


def _errors(rows: Rows) -> dict[int, float]:
    return {hashes: error for hashes, error in _means(rows, "error").items() if hashes is not None}


def _alike(name: str) -> Judge:
    """Judge whether matrices are correlated with a matrix of softmax."""
    few = HASHES[0]
    return Judge(
        lambda rows: _means(rows, name), at_least(ALIKE).of(AT), at_least(RELATED).of(AT),
        lambda found: f"correlation {found[few]:.2f} with {few} hashes, {found[AT]:.2f} with {AT}, {found[None]:.2f} "
        "of the expectation", of=f"mean correlation {name}, {AT} hashes, rows that sum to 1",
    )  # fmt: skip


def _tables(rows: Rows) -> list[Table]:
    names = {"relative error": "error", "correlation: expectation": "with expectation",
             "softmax, unit q and k": "with softmax", "model's softmax": "with own softmax"}  # fmt: skip
    numbers = sorted(distinct(pick(rows, what="numbers"), "layer"))
    return [
        pivot(f"Attention matrices of {LENGTH} tokens, mean over layers, heads and draws", "hashes", (*HASHES, None),
              names, lambda hashes, name: f"{_means(rows, name)[hashes]:.3f}", lambda hashes: str(hashes or "E")),
        pivot(f"{AT} hashes, by layer", "layer", numbers, names,
              lambda layer, name: f"{the(rows, what='numbers', layer=layer, hashes=AT)[name]:.3f}",
              lambda layer: str(layer + 1)),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    shown = pick(rows, what="pictures")
    figure.set_size_inches(17, 2.3 * len(shown) + 0.4)
    halves: Any = figure.subfigures(1, 2, width_ratios=(3.1, 1))
    left, right = halves
    grid = left.subplots(len(shown), len(MATRICES), squeeze=False)
    for place, row in enumerate(shown):
        for axes, (name, title) in zip(grid[place], MATRICES.items(), strict=True):
            levels = [list(bytes.fromhex(line)) for line in row["pictures"][name]]
            axes.imshow(levels, cmap="viridis", vmin=0, vmax=255, interpolation="nearest")
            axes.set(xticks=[], yticks=[], title=title if place == 0 else "")
        grid[place][0].set_ylabel(f"layer {row['layer'] + 1}, head {row['head'] + 1}\nquery")
    for axes in grid[-1]:
        axes.set_xlabel("key")
    curves = right.subplots()
    curves.grid(alpha=0.25, linewidth=0.6)
    errors = _errors(rows)
    line(curves, errors, "relative error to the expectation", 0)
    root = {hashes: errors[HASHES[0]] * (hashes / HASHES[0]) ** -0.5 for hashes in HASHES}
    line(curves, root, "1 / sqrt(hashes)", linestyle=":", color="black")
    labels = {"with expectation": "with expectation", "with softmax": "with softmax of unit q, k",
              "with own softmax": "with the model's softmax"}  # fmt: skip
    for number, (name, words) in enumerate(labels.items(), 1):
        means = _means(rows, name)
        curves.plot(HASHES, [means[m] for m in HASHES], label=f"correlation {words}", **style(number))
    log_ticks(curves, HASHES)
    curves.set(xlabel="hashes", ylabel="relative error, correlation", ylim=(0, None))
    curves.set_title("Mean over layers, heads and draws")
    curves.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))


STUDY = Study(
    name="yoso-attention", title="Attention matrices by hash collisions, against their expectation and softmax",
    paper="yoso", where="figure 4", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("seeds", "model"), version=2,
    claims=(
        Claim("accuracy", "section 6", "the estimate of the matrix becomes more accurate with the number of hashes",
              "seen in figure 4", judge=Judge(
                  _errors, falls() & exponent(-0.55, -0.45), falls(),
                  lambda found: f"relative error {found[8]:.2f} with 8 hashes, {found[256]:.2f} with 256; exponent "
                  f"{power(found):.2f}", of="relative error to the expectation over the hashes (independent ones: -0.5)"
              )),
        Claim("patterns", "figure 4", "patterns of self-attention are preserved well, queries and keys of length 1",
              "seen in figure 4", judge=_alike("with softmax")),
        Claim("own", "figure 4", "the same against the own softmax of a model trained with it", "not looked at",
              judge=_alike("with own softmax"), ours=True),
    ),
)  # fmt: skip
