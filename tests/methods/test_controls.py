"""Negative controls: deliberately broken methods must fail the common checks. A check that lets one pass has no power."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from sparing import native
from sparing.contract import _REGISTRY
from sparing.methods.nystrom.method import Nystrom
from tests.support.broken_methods import Broken, calls, gradients, masks, numbers
from tests.support.common_checks import CHECKS
from tests.support.method_table import Row

CONTROLS = [
    (masks.FutureThroughLandmarks(landmarks=4), "causal leak"),
    (masks.KeyShiftWithEpsilon(features=32), "causal leak"),
    (masks.MaskDropped(), "padded equals packed"),
    (masks.MaskDropped(), "mask formats"),
    (masks.SequencesSeeEachOther(), "packed sequences"),
    (masks.ZeroKeyInsteadOfZeroFeature(features=32), "padded equals packed"),
    (masks.PaddingInLandmarks(landmarks=4), "padded equals packed"),
    (masks.FutureThroughLandmarks(landmarks=4), "separate rows"),
    (calls.BatchWideNorm(landmarks=8), "batch invariance"),
    (calls.SlotKeyedDraws(features=32), "batch invariance"),
    (numbers.LastTokensDropped(), "exact at full budget"),
    (numbers.LastTokensDropped(), "permutation"),
    (numbers.TemperatureTwice(), "exact at full budget"),
    (masks.PaddedCount(), "padded equals packed"),
    (calls.GlobalGenerator(), "seed"),
    (calls.ChangesItsInput(), "strides"),
    (gradients.DetachedKeys(), "gradient"),
    (numbers.NanRows(), "finite"),
    (masks.WrongLse(), "lse merge"),
    (numbers.MeanOfValues(), "beats the mean"),
    (numbers.MeanOfValues(), "exact at full budget"),
    (numbers.OtherFastPath(), "fast equals reference"),
    (numbers.LooksAtTheDiagonal(), "permutation"),
    (numbers.HalfPrecision(), "exact at full budget"),
    (calls.ClaimsTooLittle(), "capabilities"),
    (numbers.BudgetIgnored(), "budget"),
    (calls.KeyedByQueryHead(features=32), "gqa equals repeat"),
    (gradients.GradientToPaddedQueries(), "gradient stays out"),
    (gradients.GradientOfEmptyRows(), "gradient stays out"),
    (gradients.SilentSecondDerivative(), "second derivative"),
    (gradients.LosesTangents(), "forward mode"),
    (gradients.SavedTensorsReadTwice(), "checkpointing"),
    (masks.FutureGradient(), "causal leak"),
    (gradients.DetachedKeys(), "gradient at full budget"),
    (masks.ReachesNothing(), "nan stays"),
    (masks.PaddedQueriesInMaximum(), "padding invariance"),
    (masks.QueryMaskIgnored(landmarks=4), "query mask"),
    (numbers.SixteenBitsInside(), "precision"),
    (numbers.FloatInside(), "precision"),
    (numbers.HidesBeforeScaling(), "range"),
    (calls.FlatCost(), "spec and cost"),
    (calls.UndocumentedField(), "spec and cost"),
    (calls.ThreadCount(), "threads"),
    (calls.SmallSeeds(features=32), "seed"),
    (calls.BatchWideClamp(), "batch invariance"),
]


def row_of(method, check):
    budgets = tuple(replace(method, landmarks=m) for m in (4, 16, 64)) if check == "budget" else ()
    return Row(method, budgets=budgets, beats_mean=True)


def test_every_check_has_a_control():
    assert {check for _, check in CONTROLS} == set(CHECKS)


@pytest.mark.parametrize(("method", "check"), CONTROLS, ids=lambda x: getattr(x, "name", x))
def test_a_broken_method_fails_the_check(method, check, monkeypatch):
    monkeypatch.setitem(_REGISTRY, method.name, type(method))  # so that its spec parses
    row = row_of(method, check)
    assert CHECKS[check].applies(row)
    # Most methods are broken in plain PyTorch; the kernels that they inherit are not.
    own = "native" in vars(type(method))
    if own and not native.info().loaded:
        pytest.skip("it is broken where kernels run, and none were built on this machine")
    with nullcontext() if own else native.switched_off(), pytest.raises(AssertionError, match=method.name):
        CHECKS[check](row, "auto")


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_the_unbroken_method_passes_the_check(check, monkeypatch):
    monkeypatch.setitem(_REGISTRY, "_broken", Broken)
    row = row_of(Nystrom() if check == "budget" else Broken(), check)
    assert CHECKS[check].applies(row)
    CHECKS[check](row, "auto")
