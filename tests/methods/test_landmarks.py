"""Landmark rows: valid, halved, nested, keyed by rank, uniform."""

import pytest
import torch
from scipy import stats

from sparing.methods.skyformer.landmarks import draw_landmarks
from sparing_lab.studies.skyformer_lift import call_of
from tests.support.inputs import padding
from tests.support.landmark_inputs import draw

SAMPLINGS = ("without_replacement", "half", "iid", "all")
Q = draw(1, 3, 40, 4)  # three heads


def landmarks(sampling, count, n_q=40, n_k=40, keep=None, influence=None, seed=0):
    return draw_landmarks(sampling, count, n_q, n_k, call_of(Q, seed=seed, keep=keep, influence=influence), Q.device)


def assert_valid(index, used, valid):
    """Every used landmark is a valid row."""
    hit = valid[:, None, :].expand(*index.shape[:2], -1).gather(-1, index)
    assert bool((hit | ~used).all()), "a landmark fell on a padded row"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_landmarks_are_valid_rows_under_any_mask(sampling):
    for kind in ("left", "right", "both", "holes"):
        keep, influence = padding(kind, 3, 40), padding(kind, 3, 40, seed=9)
        found = landmarks(sampling, 12, keep=keep, influence=influence)
        assert torch.equal(found.valid, torch.cat([influence, keep], -1))
        assert_valid(found.rows.expand(3, 3, -1), found.used, found.valid)
        rows = found.valid.sum(-1)
        assert torch.equal(found.used.sum(-1).squeeze(-1), rows if sampling == "all" else torch.full_like(rows, 12))


def test_the_published_rule_hits_padding_unless_the_mask_is_a_prefix():
    """Negative control: floor(length * u) as a position."""
    u = call_of(Q).draws.uniform("control", 12)
    for kind, fails in (("right", False), ("holes", True), ("left", True)):
        keep = padding(kind, 3, 40)
        index = (keep.sum(-1).view(-1, 1, 1) * u).long()
        used = torch.ones(3, 1, 12, dtype=torch.bool)
        if fails:
            with pytest.raises(AssertionError, match="padded row"):
                assert_valid(index, used, keep)
        else:
            assert_valid(index, used, keep)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_padding_and_batch_do_not_change_the_draw(sampling):
    keep = torch.cat([padding(kind, 1, 40, seed=i) for i, kind in enumerate(("holes", "left", "right"))])
    padded = landmarks(sampling, 12, keep=keep, influence=keep)
    for b in range(3):
        places = keep[b].nonzero().squeeze(-1)
        n = len(places)
        alone = landmarks(sampling, 12, n_q=n, n_k=n)
        rows = torch.cat([places, places + 40])
        wanted = rows[alone.rows[0]][..., : int(alone.used.sum())].expand(padded.rows.shape[1], -1)
        assert torch.equal(padded.rows[b][:, padded.used[b, 0]], wanted)


def test_half_of_the_landmarks_are_queries():
    for sampling in ("without_replacement", "half"):
        for count in (1, 2, 7, 12):
            index = landmarks(sampling, count).rows
            assert bool(((index < 40).sum(-1) == count // 2).all())
    index = landmarks("without_replacement", 12, n_q=3).rows  # three queries only: the rest are keys
    assert bool(((index < 3).sum(-1) == 3).all())
    index = landmarks("without_replacement", 12, n_k=2).rows
    assert bool(((index >= 40).sum(-1) == 2).all())
    for sampling in ("without_replacement", "half", "iid"):
        none = torch.zeros(1, 40, dtype=torch.bool)
        assert bool((landmarks(sampling, 12, influence=none).rows >= 40).all())
        assert bool((landmarks(sampling, 12, keep=none).rows < 40).all())


def test_draws_differ_by_head_and_seed_and_repeat():
    for sampling in ("without_replacement", "half", "iid"):
        first, again, other = (landmarks(sampling, 12, seed=s).rows[0] for s in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first[0], first[1])


def test_without_replacement_is_distinct_and_nested():
    before = None
    for count in (1, 2, 3, 8, 30, 79, 80, 200):
        found = landmarks("without_replacement", count)
        for head in range(found.rows.shape[1]):
            assert len(set(found.rows[0, head].tolist())) == min(count, 80) == int(found.used.sum())
        now = [set(row.tolist()) for row in found.rows[0].expand(3, -1)]
        assert before is None or all(a <= b for a, b in zip(before, now, strict=True))
        before = now


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_few_rows_are_all_taken(sampling):
    keep = torch.zeros(2, 40, dtype=torch.bool)
    keep[0, 3:7] = True
    keep[1] = True
    found = landmarks(sampling, 12, keep=keep, influence=keep)
    taken = found.rows[0, 0][found.used[0, 0]]
    assert taken.tolist() == [3, 4, 5, 6, 43, 44, 45, 46]
    nothing = torch.zeros(2, 40, dtype=torch.bool)
    assert not landmarks(sampling, 12, keep=nothing, influence=nothing).used.any()


@pytest.mark.statistical
@pytest.mark.parametrize("sampling", ["without_replacement", "half", "iid"])
def test_landmarks_are_uniform(sampling):
    """Null hypothesis: every row of a side is equally likely. Statistic: chi-square of counts over 400 seeds and 3
    heads, which overstates the spread of draws without replacement; threshold at a false-alarm rate of 1e-6 each."""
    keep = padding("holes", 1, 40)
    counts = torch.zeros(80)
    for seed in range(400):
        counts += torch.bincount(
            landmarks(sampling, 8, keep=keep, influence=keep, seed=seed).rows.flatten(), minlength=80
        )
    both = torch.cat([keep, keep], -1).squeeze(0)
    assert not counts[~both].any()
    for part in (both, both & (torch.arange(80) < 40)):
        seen = counts[part].double()
        statistic = float(((seen - seen.mean()) ** 2 / seen.mean()).sum())
        assert statistic < stats.chi2.isf(1e-6, len(seen) - 1)
