"""Pathfinder: two dots in an image of dashed paths. Does one path join them?

This generator follows the description of Linsley et al. (2018) and the 32 x 32 images of the Long Range Arena (Tay et
al. 2021). Images of both classes have two long paths and some short distractors. The dots are either the two ends of
one long path, or one end of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

CHANCE = 0.5
Point = tuple[float, float]
_MARGIN = 1.5  # pixels to the edge
_APART = 3.2  # pixels between paths, and between parts of one that are not neighbours
_BEND = 0.18  # radians per pixel
_DASH, _GAP = 3, 2  # pixels
_TRIES = 200  # to draw a path
_STARTS = 50  # to draw a picture


class Picture(NamedTuple):
    """A picture, and whether a path joins its two dots."""

    pixels: Tensor  #: [size, size] uint8
    joined: bool


def pictures(seed: int | str, *, size: int = 32, length: int = 20, distractors: int = 4) -> Iterator[Picture]:
    """Yield pictures without end, the same for the same seed.

    length: that of the two long paths, in pixels. Distractors have a third of it.
    """
    if size < 16 or not 6 <= length <= size or distractors < 0:
        raise ValueError(
            f"size={size}, length={length}, distractors={distractors}: size must be at least 16, length "
            "between 6 and size, and distractors not negative"
        )
    random = Random(f"pathfinder {seed}")
    failed = 0
    while True:
        found = _picture(random, size, length, distractors)
        if found is not None:
            failed = 0
            yield found
        elif (failed := failed + 1) == _STARTS:
            raise ValueError(
                f"size={size}, length={length}, distractors={distractors}: no room for so many paths; take fewer"
            )


def _picture(random: Random, size: int, length: int, distractors: int) -> Picture | None:
    paths: list[list[Point]] = []
    taken: set[tuple[int, int]] = set()
    for wanted in (length, length, *[max(length // 3, 4)] * distractors):
        found = next((path for _ in range(_TRIES) if (path := _path(random, size, wanted, taken)) is not None), None)
        if found is None:
            return None  # no room left: start another picture
        paths.append(found)
        taken |= {pixel for point in found for pixel in _around(point, _APART, size)}
    joined = random.random() < 0.5
    first, second = paths[:2]
    dots = (first[0], first[-1]) if joined else (first[0], second[-1])
    pixels = torch.zeros(size, size)
    for path in paths:
        start = random.randrange(_DASH + _GAP)
        for number, point in enumerate(path):
            if (number + start) % (_DASH + _GAP) < _DASH:
                _splat(pixels, point, 0.8)
    for dot in dots:
        for y, x in _around(dot, 1.3, size):
            pixels[y, x] = 1
    return Picture((pixels.clamp(max=1) * 255).round().to(torch.uint8), joined)


def _path(random: Random, size: int, length: int, taken: Set[tuple[int, int]]) -> list[Point] | None:
    """Return points one pixel apart, on a curve that keeps away from others, from itself and from the edge, or None."""
    y, x = (random.uniform(_MARGIN, size - 1 - _MARGIN) for _ in range(2))
    heading = random.uniform(0, 2 * math.pi)
    path: list[Point] = []
    for _ in range(length):
        if not (_MARGIN <= y <= size - 1 - _MARGIN and _MARGIN <= x <= size - 1 - _MARGIN):
            return None
        if (round(y), round(x)) in taken or any(math.dist((y, x), point) < _APART for point in path[:-4]):
            return None
        path.append((y, x))
        heading += random.gauss(0, _BEND)
        y, x = y + math.sin(heading), x + math.cos(heading)
    return path


def _around(point: Point, distance: float, size: int) -> list[tuple[int, int]]:
    """Return the pixels within a distance of a point."""
    rows, columns = (
        range(max(0, math.ceil(middle - distance)), min(size - 1, math.floor(middle + distance)) + 1)
        for middle in point
    )
    return [(y, x) for y in rows for x in columns if math.dist((y, x), point) <= distance]


def _splat(pixels: Tensor, point: Point, light: float) -> None:
    """Add light to the four pixels around a point; none gets darker."""
    top, left = math.floor(point[0]), math.floor(point[1])
    for y, x in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        share = max(0.0, 1 - abs(point[0] - y)) * max(0.0, 1 - abs(point[1] - x))
        pixels[y, x] = max(float(pixels[y, x]), light * min(1.0, 1.6 * share))
