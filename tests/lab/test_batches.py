from random import Random

import pytest
import torch

from sparing_lab.tasks.batches import Batches, padded

LENGTHS = [Random(i).randrange(10, 500) for i in range(1000)]


def test_an_epoch_has_every_example_once():
    batches = Batches(100, 8, seed=3)
    for epoch in range(2):
        seen = [number for step in range(batches.in_epoch) for number in batches.batch(epoch * batches.in_epoch + step)]
        assert len(seen) == len(set(seen)) == 96
        assert set(seen) <= set(range(100))


def test_epochs_and_seeds_differ_and_a_step_asked_alone_is_the_same():
    batches = Batches(100, 10, seed=3)
    assert batches.batch(0) != batches.batch(10)
    assert batches.batch(0) != Batches(100, 10, seed=4).batch(0)
    in_order = [batches.batch(step) for step in range(25)]
    assert Batches(100, 10, seed=3).batch(17) == in_order[17]


def test_batches_of_like_length_waste_little():
    def waste(batches):
        steps = [[LENGTHS[i] for i in batches.batch(step)] for step in range(batches.in_epoch)]
        return 1 - sum(map(sum, steps)) / sum(max(lengths) * len(lengths) for lengths in steps)

    plain, sorted_ = Batches(1000, 8, seed=0), Batches(1000, 8, seed=0, lengths=LENGTHS)
    assert waste(sorted_) < 0.1 < 0.3 < waste(plain)
    assert sorted(i for step in range(125) for i in sorted_.batch(step)) == list(range(1000))
    means = [sum(LENGTHS[i] for i in sorted_.batch(step)) for step in range(125)]
    assert means != sorted(means)  # short ones do not all come first


def test_processes_share_a_batch_without_gap_or_overlap():
    batches = Batches(100, 8, seed=1, lengths=LENGTHS[:100])
    parts = [batches.part(5, rank, 4) for rank in range(4)]
    assert sorted(number for part in parts for number in part) == sorted(batches.batch(5))
    assert {len(part) for part in parts} == {2}
    with pytest.raises(ValueError, match="cannot be divided among 3 processes"):
        batches.part(0, 0, 3)


def test_rows_are_padded_on_the_right():
    tokens, mask = padded([torch.tensor([1, 2, 3]), torch.tensor([4])], padding=9, multiple=4)
    assert tokens.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert mask.tolist() == [[True, True, True, False], [True, False, False, False]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Batches(3, 4), "size=4 must be"),
        (lambda: Batches(3, 0), "size=0 must be"),
        (lambda: Batches(3, 1, lengths=[1]), "lengths has 1 entries for 3"),
        (lambda: Batches(3, 1, window=0), "window=0"),
        (lambda: Batches(3, 1).batch(-1), "step=-1"),
    ],
)
def test_bad_input_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
