"""Sampling keys by hash tables: YOSO's Bernoulli variables against the two importance samplers of section 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.functional import attention, inspect
from sparing.oracles import bernoulli_weights, one_per_table_weights, union_weights
from sparing.transformers.watch import ObservedCall
from sparing_lab.figure import Figure, legend_below, level, line, log_ticks, panels
from sparing_lab.studies._yoso import bits_of, layers, models, spread, text
from sparing_lab.studies.judges import Criterion, Judge, above, at_most, within
from sparing_lab.studies.rows import Cell, Row, Rows, curves, distinct, mean, pick, span
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot

LENGTH = 128
HASHES = (8, 16, 32, 64)
DRAWS = {"small": 8, "paper": 32}
LAYERS = {"small": 3, "paper": 12}
SAMPLERS = {"union": "union of the tables", "one": "one key per table", "bernoulli": "Bernoulli"}
#: What the weights of the keys are: softmax of unit queries and keys, or the chance of a collision, as in YOSO.
TARGETS = {"softmax": "softmax", "chance": "collision probability"}


def _cells(settings: Settings) -> list[Cell]:
    of = {"length": LENGTH, "hashes": list(HASHES), "draws": settings.seeds or DRAWS[settings.scale]}
    return [
        {"model": name, "layers": LAYERS[settings.scale], "text": text()[1], **of}
        for name in models(settings, "minilm")
    ]


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    rows: list[Row] = []
    for number, seen in spread(layers(cell["model"], cell["length"]), cell["layers"]):
        rows += [{"layer": number, **row} for row in compare(seen, tuple(cell["hashes"]), cell["draws"])]
    return rows


@torch.no_grad()
def compare(seen: ObservedCall, hashes: tuple[int, ...], draws: int) -> list[Row]:
    """Return the variance of each sampler by target and hashes, as a share of the squared output.

    `independent`: the variance of Bernoulli variables with these chances, if they were independent of each other.
    `keys`: how many keys a query gives a weight to.
    """
    bits = bits_of(seen)
    q, k, values = seen.query.double(), seen.key.double(), seen.projected.double()
    eye = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    chance = attention(q, k, eye, method=f"yoso(expectation=True, normalize=none, bits={bits})")
    x = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    wanted = {"softmax": (bits * x).softmax(-1), "chance": chance}
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for seed in range(draws):
        spec = f"yoso(hashes={max(hashes)}, bits={bits}, hash=gaussian)"
        facts = inspect(q, k, values, method=spec, seed=seed).statistics
        same = facts["query_codes"].unsqueeze(-2) == facts["key_codes"].unsqueeze(-3)  # (B, H, n, n, hashes)
        picks = Draws(seed, torch.arange(q.shape[1])).uniform("study", q.shape[-2], max(hashes))
        for many in hashes:
            for target, p in wanted.items():
                collided = same[..., :many]
                weights = {
                    "union": union_weights(p, chance, collided),
                    "one": one_per_table_weights(p, chance, collided, picks[..., :many]),
                    "bernoulli": bernoulli_weights(p, chance, collided),
                }
                for sampler, drawn in weights.items():
                    error = float(((drawn - p) @ values).square().sum())
                    found.setdefault((target, sampler, many), []).append(
                        (error, float((drawn > 0).sum(-1).double().mean()))
                    )
    rows: list[Row] = []
    for (target, sampler, many), each in found.items():
        whole = float((wanted[target] @ values).square().sum())
        errors, keys = (sum(column) / len(each) for column in zip(*each, strict=True))
        alone = _independent(wanted[target], chance, values) / many
        rows.append(
            {"target": target, "sampler": sampler, "hash": many, "variance": errors / whole, "keys": keys,
             "independent": alone / whole}
        )  # fmt: skip
    return rows


def _independent(p: Tensor, chance: Tensor, values: Tensor) -> float:
    """Return the variance of one hash if keys collided independently: sum of (p / q)^2 q (1 - q) |v|^2."""
    each = p.square() * (1 / chance.clamp_min(1e-300) - 1)
    return float((each @ values.square().sum(-1, keepdim=True)).sum())


def _ratios(sampler: str, to: str) -> Any:
    """Return a function for the variance of a sampler / that of another, by target and hashes, means over layers."""

    def figures(rows: Rows) -> dict[str, float]:
        one, other = (curves(pick(rows, sampler=each), "hash", "variance", "target") for each in (sampler, to))
        return {f"{TARGETS[t]}, {m}": one[t][m] / other[t][m] for t in TARGETS for m in HASHES}

    return figures


def _shared(rows: Rows) -> dict[str, float]:
    """Return the variance of Bernoulli sampling / that of independent keys."""
    mine = pick(rows, sampler="bernoulli")
    return {
        f"{TARGETS[t]}, {m}": mean(some, "variance") / mean(some, "independent")
        for t in TARGETS for m in HASHES for some in [pick(mine, target=t, hash=m)]
    }  # fmt: skip


def _range(found: dict[str, float]) -> str:
    return f"{span(found.values())} times"


def _keys(rows: Rows) -> dict[str, dict[int, float]]:
    return {name: {m: mean(pick(rows, sampler=name, hash=m), "keys") for m in HASHES} for name in SAMPLERS}


def _tables(rows: Rows) -> list[Table]:
    lines = [(target, sampler) for target in TARGETS for sampler in SAMPLERS]
    variance = {
        key: curves(pick(rows, target=key[0]), "hash", "variance", "sampler")[key[1]] for key in lines
    }  # fmt: skip
    keys = _keys(rows)
    names = [f"{m}" for m in HASHES]
    return [
        pivot("Variance / squared output, mean over layers, heads, queries and draws", ["target", "sampler"], lines,
              names, lambda of, m: f"{variance[of][int(m)]:.3f}", lambda of: [TARGETS[of[0]], SAMPLERS[of[1]]]),
        pivot("Keys with a weight, for each query", "sampler", list(SAMPLERS), names,
              lambda name, m: f"{keys[name][int(m)]:.1f}", lambda name: SAMPLERS[name]),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    both = panels(figure, 1, 2, size=(5.0, 4.2))
    for axes, target in zip(both, TARGETS, strict=True):
        found = curves(pick(rows, target=target), "hash", "variance", "sampler")
        for number, name in enumerate(SAMPLERS):
            line(axes, found[name], SAMPLERS[name], number)
        alone = curves(pick(rows, target=target, sampler="bernoulli"), "hash", "independent", "sampler")["bernoulli"]
        line(axes, alone, "Bernoulli, if keys were independent", linestyle=":", color="black")
        log_ticks(axes, distinct(rows, "hash"))
        axes.set(xlabel="hashes", ylabel="variance / squared output", yscale="log", title=f"Weights: {TARGETS[target]}")
        level(axes, 1, linestyle="--")
    legend_below(figure, both[:1], 4)


_OF = "variance at equal hashes, for softmax weights and for collision probabilities, every number of hashes: "
STUDY = Study(
    name="yoso-sampling", title="Bernoulli sampling by hash tables, against the two importance samplers of section 3",
    paper="yoso", where="section 3, remark 1", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("seeds", "model"),
    claims=(
        Claim("one", "section 3 b",
              "that one key per table depends on the other keys of its bucket costs variance", "not measured",
              judge=Judge(
                  _ratios("one", "bernoulli"), above(1), above(1).mostly(), _range,
                  of=_OF + "one key per table / Bernoulli"), ours=True),
        Claim("bounded", "section 3 b", "one key per table weighs at most one more key with each hash",
              "bounded by the number of hashes", judge=Judge(
                  _keys,
                  Criterion("at most as many keys as hashes, and fewer than Bernoulli sampling", lambda found: all(
                      found["one"][m] <= m and found["one"][m] < found["bernoulli"][m] for m in HASHES)),
                  Criterion("fewer than Bernoulli sampling", lambda found: all(
                      found["one"][m] < found["bernoulli"][m] for m in HASHES)),
                  lambda found: "; ".join(f"{m} hashes: {found['one'][m]:.1f}, Bernoulli {found['bernoulli'][m]:.1f}"
                                          for m in (HASHES[0], HASHES[-1])), of="keys with a weight for each query")),
        Claim("union", "remark 1", "Bernoulli sampling varies no more than sampling from the union of the tables",
              "not measured", judge=Judge(
                  _ratios("bernoulli", "union"), at_most(1), at_most(1).mostly(), _range,
                  of=_OF + "Bernoulli / union"), ours=True),
        Claim("independent", "section 4", "Bernoulli variables of one query do not depend on each other",
              "its probability is not based on other keys", judge=Judge(
                  _shared, within(0.9, 1.1), within(0.5, 2), _range,
                  of="variance of the sum / that of independent variables with the same chances"), ours=True),
    ),
)  # fmt: skip
