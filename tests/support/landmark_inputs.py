"""Queries and keys of several kinds for tests of landmarks."""

import torch

import sparing
from tests.support.inputs import peaked

EYE = torch.eye(64, dtype=torch.float64)
GAMMAS = (0.0, 1e-3, 0.1, 5.0)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(kind, n_q=20, n_k=24, seed=0):
    """q (1, 2, n_q, d), k (1, 2, n_k, d): attention as it occurs, numerically singular, nearly diagonal, repeated."""
    if kind == "clusters":
        q, k = (
            t[:, :, i]
            for t, i in zip(
                peaked(sparing.method("exact"), 6, seed=seed).leaves()[:2], (range(n_q), range(n_k)), strict=True
            )
        )
        return q, k
    width, size = {"narrow": (2, 0.3), "wide": (8, 6.0), "repeated": (4, 1.0)}[kind]
    q, k = size * draw(1, 2, n_q, width, seed=seed), size * draw(1, 2, n_k, width, seed=seed + 1)
    if kind == "repeated":
        q, k = (t[:, :, :3].repeat(1, 1, 9, 1)[:, :, : t.shape[2]] for t in (q, k))
    return q, k


KINDS = ("clusters", "narrow", "wide", "repeated")


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)
