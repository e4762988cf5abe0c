"""Measurements of Skyformer's theory: the lifted matrix from landmarks, and the iteration for their inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.maths.linalg import degree_scaled
from sparing_lab.studies import skyformer_lift as lift
from sparing_lab.studies._layers import topic_layers
from sparing_lab.studies.rows import Cell, Row
from sparing_lab.studies.skyformer_lift import STARTS, call_of, eigenvalues, iterated, kernel_matrix, lifted, skyformer

LAYERS = (0, 2, 5)  #: layers of MiniLM
HEADS = 4  #: heads of a layer
DATA = ("circle", "normal", *(f"minilm layer {layer}" for layer in LAYERS))
GAMMAS = (0.0, 1e-3, 0.1)
DAMPING = 1e-6  #: least damping of a matrix that the iteration inverts
STEPS = (1, 2, 4, 6, 8)
LONGEST = 12  #: most steps of the iteration
LANDMARKS = 48  #: number of landmarks where the Loewner order is tested
CONTROL = 2  #: number of landmarks that cannot be enough


def points(data: str, n: int) -> tuple[Tensor, Tensor, float]:
    """Return queries and keys [1, H, n, d] in float64, and their scale."""
    if data == "circle":
        return *lift.circle(n), 1.0
    if data == "normal":
        q, k = 0.58 * torch.randn(2, 1, 1, n, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return q, k, 32**-0.5
    layer = topic_layers("minilm", n)[int(data.rpartition(" ")[2])]
    q, k = (x[:, :HEADS].double() for x in (layer.query, layer.key))
    return q, k, float(q.shape[-1] ** -0.5)


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def _missing(exact: Tensor, found: Tensor, n: int) -> Row:
    """Return extreme eigenvalues of C-bar - C-bar-tilde, the largest per head, and norms of its query-key block."""
    error = exact - found
    values = eigenvalues(error)
    return {
        "lowest": float(values[..., 0].min()),
        "whole": values[..., -1].flatten().tolist(),
        "block": _norm(error[..., :n, n:]).flatten().tolist(),
    }


def _order(cell: Cell) -> list[Row]:
    """Measure the Loewner order with (M + gamma I)^-1 from an exact solver and from the iteration."""
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
    """Return the extreme eigenvalues of the scaled M + gamma I, and all of them for the head with the least one."""
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
    """Measure the error for one number of landmarks."""
    n = cell["n"]
    q, k, scale = points(cell["data"], n)
    size = _norm(kernel_matrix(q, k, scale)[..., :n, n:]).flatten().tolist()
    rows = []
    for seed in range(cell["seeds"]):
        spec = f"skyformer(landmarks={cell['landmarks']}, gamma=0, sampling=iid)"
        rows.append({"seed": seed, "size": size, **_missing(*lifted(spec, q, k, seed=seed, scale=scale), n)})
    return rows


def _asked(cell: Cell) -> Row:
    """Return the number of landmarks that Theorem 2 asks for: the median over heads."""
    q, k, scale = points(cell["data"], cell["n"])
    found = [
        lift.promise(exact, cell["n"], cell["eps"], cell["delta"]) for exact in kernel_matrix(q, k, scale).flatten(0, 1)
    ]
    middle = sorted(found, key=lambda each: each.landmarks)[len(found) // 2]
    return {"dimension": middle.dimension, "asked": middle.landmarks}


def _promise(cell: Cell) -> Row:
    """Measure draws of as many landmarks as Theorem 2 asks for, on a circle, where those are fewer than rows."""
    n, gamma = cell["n"], cell["gamma"]
    q, k, scale = points("circle", n)
    exact = kernel_matrix(q, k, scale)
    found = lift.promise(exact[0, 0], n, cell["eps"], cell["delta"], factor=2 if cell["landmarks"] == "halved" else 1)
    count = CONTROL if cell["landmarks"] == "control" else found.landmarks
    spec = f"skyformer(landmarks={count}, gamma={gamma}, sampling=iid)"
    drawn = [_missing(exact, lifted(spec, q, k, seed=seed, scale=scale).found, n) for seed in range(cell["draws"])]
    return {
        "count": count, "slack": found.slack, "size": float(_norm(exact[0, 0, :n, n:])),
        "lowest": min(each["lowest"] for each in drawn), "whole": [each["whole"][0] for each in drawn],
        "block": [each["block"][0] for each in drawn],
    }  # fmt: skip


def _steps(cell: Cell) -> list[Row]:
    """Measure the iteration from both starts after each step: the largest residual and the mean error over heads."""
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


MEASUREMENTS: dict[str, Any] = {
    "order": _order, "scaled": _scaled, "sweep": _sweep, "asked": _asked, "promise": _promise, "steps": _steps,
}  # fmt: skip
