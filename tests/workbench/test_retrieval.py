"""How many facts survive, and how sure that is."""

from __future__ import annotations

import random

import pytest

from sparing.workbench.retrieval import measure
from sparing.workbench.retrieval.measure import survival


def test_only_what_exact_attention_finds_counts():
    found = survival([((True, True, False), (True, False, True)), ((False,), (True,)), ((True,), (True,))])
    assert (found.solved, found.kept, found.contexts) == (3, 2, 2)
    assert found.share == pytest.approx(2 / 3)
    assert 0 < found.low < found.share < found.high < 1
    assert survival([((False,), (True,))]).contexts == 0


def test_more_contexts_narrow_the_interval_more_than_more_questions():
    few = survival([((True,) * 40, (True,) * 36 + (False,) * 4)] * 5)
    many = survival([((True,) * 4, (True,) * 4)] * 45 + [((True,) * 4, (False,) * 4)] * 5)
    assert few.share == many.share == 0.9
    assert many.high - many.low > 0.1, "whole contexts fail together"
    assert survival([((True,) * 4, (True,) * 4)] * 50).low > 0.95
    assert survival([((True,) * 50, (True,) * 50)] * 4).low < 0.93, "four contexts cannot tell as much"


@pytest.mark.statistical
def test_the_interval_covers_the_truth_where_contexts_differ(monkeypatch):
    """600 samples of 25 contexts with 8 questions each, whose own rate is 0.6 or 1.0: the truth is 0.9.

    A 95 % interval misses in about 30 of 600; more than 60 have a probability below 1e-6 under that rate. Intervals for
    independent questions miss in more than 60: the control.
    """
    gen = random.Random(0)
    samples = []
    for _ in range(600):
        rates = [0.6 if gen.random() < 0.25 else 1.0 for _ in range(25)]
        samples.append([((True,) * 8, tuple(gen.random() < rate for _ in range(8))) for rate in rates])

    def misses():
        return sum(not each.low <= 0.9 <= each.high for each in map(survival, samples))

    assert misses() <= 60
    singly = [[((True,), (b,)) for _, found in sample for b in found] for sample in samples]
    monkeypatch.setattr(measure, "_CORRELATION", 0.0)
    samples = singly
    assert misses() > 60
