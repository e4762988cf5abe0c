from collections import deque
from itertools import islice

import pytest
import torch

from sparing_lab.tasks.pathfinder import pictures


def some(count, seed=0, **options):
    return list(islice(pictures(seed, **options), count))


def dots(pixels):
    """Blobs of the brightest pixels."""
    bright = {tuple(place) for place in (pixels >= 230).nonzero().tolist()}
    blobs = []
    while bright:
        blob, queue = set(), deque([bright.pop()])
        while queue:
            y, x = queue.popleft()
            blob.add((y, x))
            near = {(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & bright
            bright -= near
            queue.extend(near)
        if len(blob) >= 4:
            blobs.append(tuple(sum(part) / len(blob) for part in zip(*blob)))
    return blobs


def joined_by_eye(pixels):
    """Whether lit pixels lead from one dot to the other, over gaps of up to three pixels."""
    first, second = dots(pixels)
    lit = {tuple(place) for place in (pixels >= 60).nonzero().tolist()}
    start = min(lit, key=lambda p: (p[0] - first[0]) ** 2 + (p[1] - first[1]) ** 2)
    goal = min(lit, key=lambda p: (p[0] - second[0]) ** 2 + (p[1] - second[1]) ** 2)
    seen, queue = {start}, deque([start])
    while queue:
        y, x = queue.popleft()
        for place in lit - seen:
            if (place[0] - y) ** 2 + (place[1] - x) ** 2 <= 9:
                seen.add(place)
                queue.append(place)
    return goal in seen


def test_pictures_have_two_dots_and_both_answers():
    found = some(60)
    assert all(picture.pixels.shape == (32, 32) and picture.pixels.dtype == torch.uint8 for picture in found)
    assert all(len(dots(picture.pixels)) == 2 for picture in found)
    # Of 60 fair throws fewer than 15 or more than 45 have a probability of 4e-5; the seed is fixed.
    assert 15 <= sum(picture.joined for picture in found) <= 45


def test_the_label_is_what_an_eye_sees():
    found = some(60, seed=1)
    right = sum(joined_by_eye(picture.pixels) == picture.joined for picture in found)
    assert right >= 51  # paths come close to each other now and then; guessing gets 30, and 51 with probability 2e-8


def test_the_amount_of_light_does_not_tell_the_classes_apart():
    found = some(80, seed=2)
    light = {joined: [float(p.pixels.float().mean()) for p in found if p.joined == joined] for joined in (True, False)}
    means = {joined: sum(values) / len(values) for joined, values in light.items()}
    spread = torch.tensor([x for values in light.values() for x in values]).std()
    assert abs(means[True] - means[False]) < 0.5 * float(spread)


def test_the_same_seed_gives_the_same_pictures():
    one, again, other = some(3, "train"), some(3, "train"), some(3, "valid")
    assert all(torch.equal(a.pixels, b.pixels) and a.joined == b.joined for a, b in zip(one, again))
    assert not torch.equal(one[0].pixels, other[0].pixels)


@pytest.mark.parametrize("options", [{"size": 8}, {"length": 3}, {"length": 40}, {"distractors": -1}])
def test_impossible_pictures_are_refused(options):
    with pytest.raises(ValueError, match="size must be at least 16"):
        next(pictures(0, **options))


def test_a_picture_without_room_is_refused():
    with pytest.raises(ValueError, match="no room for so many paths"):
        next(pictures(0, size=16, length=16, distractors=40))
