"""Hash families: random functions under which similar vectors collide.

Hyperplane hashing (Charikar 2002): one bit is the side of a random hyperplane on which a vector lies. Two vectors at
angle t agree in a bit with probability 1 - t/pi, and in a code of independent bits with that probability to the power
of the number of bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from sparing.draws import Draws

HASHES_AT_ONCE = 32  #: hashes whose codes exist at the same time, so that memory does not grow with their number
_NARROWEST = 16  # narrower vectors get Gaussian hyperplanes, which cost no more
_COORDINATES = 64  # rotations of fewer coordinates are visibly not Gaussian for sparse vectors
_TIE = 1e-9  # a projection this small counts as zero, so that no tie is broken by the order of a sum


def hadamard_rotations(draws: Draws, purpose: str, blocks: int, size: int) -> Tensor:
    """Return random rotations H D3 H D2 H D1 without their scale, (heads, blocks, size, size) in float64.

    H is the Hadamard matrix of a power of two; D are random signs. Three rounds: with two, the coordinates of a sparse
    vector are far from Gaussian.
    """
    signs = draws.signs(purpose, blocks, 3, size)
    matrix = _hadamard(size).to(signs.device)
    out = matrix * signs[:, :, 0, None]
    for turn in (1, 2):
        out = matrix * signs[:, :, turn, None] @ out
    return out


def hyperplanes(
    family: Literal["hadamard", "gaussian"], draws: Draws, purpose: str, *, bits: int, hashes: int, width: int
) -> Iterator[Tensor]:
    """Yield normals of random hyperplanes, a few of `hashes` codes at a time: (heads, bits, few, width), float64.

    "hadamard": the bits of a code come from independent rotations, and different codes from different coordinates.
    Bits that share a rotation depend on each other: codes made of them collide too rarely. Widths below 16 use
    "gaussian": independent normal entries. The first bits do not depend on how many are asked for.
    """
    names = draw_names(family, purpose, hashes=hashes, width=width)
    if is_gaussian(family, width):
        for first, name in names.items():
            yield draws.normal(name, bits, min(HASHES_AT_ONCE, hashes - first), width)
        return
    group = _group(family, width)
    for start, name in names.items():
        rotations = hadamard_rotations(draws, name, bits, group)[..., :width]  # x counts as padded with zeros
        for first in range(0, min(group, hashes - start), HASHES_AT_ONCE):
            yield rotations[:, :, first : min(first + HASHES_AT_ONCE, hashes - start)]


def is_gaussian(family: Literal["hadamard", "gaussian"], width: int) -> bool:
    """Return whether hyperplanes of this width have independent normal entries."""
    return family == "gaussian" or width < _NARROWEST


def draw_names(family: Literal["hadamard", "gaussian"], purpose: str, *, hashes: int, width: int) -> dict[int, str]:
    """Return the purposes of the draws for `hashes` codes: each with the first hash that it serves."""
    return {first: f"{purpose}.{first}" for first in range(0, hashes, _group(family, width))}


def _group(family: Literal["hadamard", "gaussian"], width: int) -> int:
    """Return how many codes one draw makes: of a rotation as many as its coordinates, never wrapped around."""
    return HASHES_AT_ONCE if is_gaussian(family, width) else max(1 << (width - 1).bit_length(), _COORDINATES)


def sign_codes(x: Tensor, normals: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return codes (B, H, n, few) as int64: bit b of code h is 1 where x (B, H, n, d) . normals[:, b, h] > 0.

    x: unit vectors, or zeros, whose code is 0.
    bits: (B or 1,), how many of the bits an item keeps; None for all.
    """
    x = x.detach().double()  # a sign must not depend on how a library orders a float32 sum
    codes = torch.zeros(*x.shape[:3], normals.shape[2], dtype=torch.int64, device=x.device)
    for bit, planes in enumerate(normals.unbind(1)):
        codes |= (x @ planes.mT > _TIE).long() << bit
    return codes if bits is None else codes & ((1 << bits) - 1)[:, None, None, None]


def rotation_buckets(x: Tensor, rotations: Tensor, buckets: Tensor) -> Tensor:
    """Return buckets (B, H, n) as int64 of argmax([-R x; R x]) (Andoni et al. 2015; Value-aware A.1).

    rotations: R, (H, rows, d). buckets: (B or 1,), how many an item uses: 1, or an even number up to twice the rows.
    A zero vector falls into bucket 0.
    """
    x = x.detach().double()  # a bucket must not depend on how a library orders a float32 sum
    rows = buckets[:, None, None, None] // 2
    along = x @ rotations.double().mT  # (B, H, n, rows)
    unused = torch.arange(rotations.shape[1], device=x.device) >= rows
    best = along.abs().masked_fill(unused, -1.0).argmax(-1, keepdim=True)
    return torch.where(along.gather(-1, best) > 0, rows + best, best).squeeze(-1)


def _hadamard(size: int) -> Tensor:
    """Return the Hadamard matrix of a power of two, entries +-1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, step)
    return matrix
