"""The collision law of the rotation hash."""

import math

import pytest
import torch
from torch import Tensor

from sparing.maths.hashing import rotation_buckets
from sparing.methods.lsh.rotation_law import log_collision, log_collision_law

ANGLES = torch.arange(65, dtype=torch.float64) * math.pi / 64


def test_two_and_four_buckets_have_a_closed_form():
    torch.testing.assert_close(log_collision_law(2).exp()[:-1], (1 - ANGLES / math.pi)[:-1])
    # Quadrature: 7e-4 off at the last angle, where p is 2e-4; far better elsewhere.
    torch.testing.assert_close(log_collision_law(4).exp()[:-1], (1 - ANGLES / math.pi).square()[:-1], rtol=1e-3, atol=0)


def test_limits():
    assert bool((log_collision_law(1) == 0).all())
    for buckets in (2, 6, 32, 300):
        law = log_collision_law(buckets)
        assert law[0] == 0, "equal vectors always collide"
        assert law[32].exp().item() == pytest.approx(1 / buckets, rel=1e-4), "orthogonal vectors know nothing"
        assert bool((law.diff() <= 0).all())
        assert bool(law.isfinite().all())


def test_interpolation_meets_the_law_at_its_angles_and_each_item_has_its_own():
    laws = torch.stack([log_collision_law(2), log_collision_law(16)])
    found = log_collision(ANGLES.cos().expand(2, -1), laws)
    torch.testing.assert_close(found, laws, rtol=1e-6, atol=1e-7)
    between = log_collision(torch.tensor([[0.9, -1.0 - 1e-9, 1.0 + 1e-9]], dtype=torch.float64), laws[1:])
    assert bool(between.isfinite().all())
    assert between[0, 2] == 0


def collisions_follow(law: Tensor, buckets: int, steps: list[int], trials: int) -> None:
    """Null hypothesis: two vectors at a multiple of pi/64 share a bucket with the probability of the law.

    Statistic: the number of collisions among independent rotations, normal approximation with more than 100 expected;
    |z| < 5.33 for each of 8 angles: family-wise false-alarm rate below 1e-6. The seed is fixed. A law that is 10 % off
    at p = 0.2 gives z = 7 with 20 000 trials.
    """
    generator = torch.Generator().manual_seed(buckets)
    rotations = torch.randn(trials, buckets // 2, 6, generator=generator, dtype=torch.float64)
    first = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    other = torch.stack([torch.tensor([math.cos(a), math.sin(a), 0, 0, 0, 0]) for a in ANGLES[steps].tolist()]).double()
    x = torch.cat([first[None], other])[None, None].expand(1, trials, -1, -1)  # a trial per head
    found = rotation_buckets(x, rotations, torch.tensor([buckets]))[0]
    hits = (found[:, 1:] == found[:, :1]).sum(0)
    p = law[steps].exp()
    z = (hits - trials * p) / (trials * p * (1 - p)).sqrt()
    assert bool((trials * p > 100).all())
    assert bool((z.abs() < 5.33).all()), f"{buckets} buckets: {z.tolist()}"


@pytest.mark.statistical
def test_collisions_follow_the_law():
    for buckets, steps in ((2, [8, 40]), (6, [3, 20, 36]), (32, [2, 12, 24])):
        collisions_follow(log_collision_law(buckets), buckets, steps, 20000)
    with pytest.raises(AssertionError):  # control: the law of a single sign
        collisions_follow(log_collision_law(2), 32, [2, 12, 24], 20000)


@pytest.mark.slow
@pytest.mark.statistical
def test_collisions_follow_the_law_with_many_buckets():
    for buckets, steps in ((10, [5, 10, 30]), (64, [5, 16]), (128, [2, 8, 20])):
        collisions_follow(log_collision_law(buckets), buckets, steps, 60000)


def test_buckets_are_the_argmax_of_both_signs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 50, 8, generator=generator)
    rotations = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    along = x.double() @ rotations.mT
    for buckets in (2, 6, 10):
        rows = along[..., : buckets // 2]
        wanted = torch.cat([-rows, rows], dim=-1).argmax(-1)
        assert torch.equal(rotation_buckets(x, rotations, torch.tensor([buckets])), wanted)
    mixed = rotation_buckets(x, rotations, torch.tensor([1, 6]))
    assert bool((mixed[0] == 0).all())
    assert torch.equal(mixed[1:], rotation_buckets(x[1:], rotations, torch.tensor([6])))
    assert bool((rotation_buckets(torch.zeros(1, 3, 4, 8), rotations, torch.tensor([10])) == 0).all())
    opposite = rotation_buckets(-x, rotations, torch.tensor([10]))
    assert torch.equal(opposite, (rotation_buckets(x, rotations, torch.tensor([10])) + 5) % 10)
