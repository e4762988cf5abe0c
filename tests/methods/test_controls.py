"""Negative controls: deliberately broken methods must fail the common checks. A check that lets one pass has no power."""

from dataclasses import replace

import pytest

from sparing import native
from sparing.contract import _REGISTRY
from sparing.methods.nystrom.method import Nystrom
from tests.support import broken_methods as broken
from tests.support.common_checks import CHECKS
from tests.support.method_table import Row

CONTROLS = [
    (broken.FutureThroughLandmarks(landmarks=4), "causal leak"),
    (broken.KeyShiftWithEpsilon(features=32), "causal leak"),
    (broken.MaskDropped(), "padded equals packed"),
    (broken.MaskDropped(), "mask formats"),
    (broken.ZeroKeyInsteadOfZeroFeature(features=32), "padded equals packed"),
    (broken.PaddingInLandmarks(landmarks=4), "padded equals packed"),
    (broken.FutureThroughLandmarks(landmarks=4), "separate rows"),
    (broken.BatchWideNorm(landmarks=8), "batch invariance"),
    (broken.SlotKeyedDraws(features=32), "batch invariance"),
    (broken.LastTokensDropped(), "exact at full budget"),
    (broken.LastTokensDropped(), "permutation"),
    (broken.TemperatureTwice(), "exact at full budget"),
    (broken.PaddedCount(), "padded equals packed"),
    (broken.GlobalGenerator(), "seed"),
    (broken.ChangesItsInput(), "strides"),
    (broken.DetachedKeys(), "gradient"),
    (broken.NanRows(), "finite"),
    (broken.WrongLse(), "lse merge"),
    (broken.MeanOfValues(), "beats the mean"),
    (broken.MeanOfValues(), "exact at full budget"),
    (broken.OtherFastPath(), "fast equals reference"),
    (broken.LooksAtTheDiagonal(), "permutation"),
    (broken.HalfPrecision(), "exact at full budget"),
    (broken.ClaimsTooLittle(), "capabilities"),
    (broken.BudgetIgnored(), "budget"),
    (broken.KeyedByQueryHead(features=32), "gqa equals repeat"),
    (broken.GradientToPaddedQueries(), "gradient stays out"),
    (broken.GradientOfEmptyRows(), "gradient stays out"),
    (broken.SilentSecondDerivative(), "second derivative"),
    (broken.LosesTangents(), "forward mode"),
    (broken.SavedTensorsReadTwice(), "checkpointing"),
    (broken.FutureGradient(), "causal leak"),
    (broken.DetachedKeys(), "gradient at full budget"),
    (broken.ReachesNothing(), "nan stays"),
    (broken.PaddedQueriesInMaximum(), "padding invariance"),
    (broken.QueryMaskIgnored(landmarks=4), "query mask"),
    (broken.SixteenBitsInside(), "precision"),
    (broken.FloatInside(), "precision"),
    (broken.HidesBeforeScaling(), "range"),
    (broken.FlatCost(), "spec and cost"),
    (broken.UndocumentedField(), "spec and cost"),
    (broken.ThreadCount(), "threads"),
    (broken.SmallSeeds(features=32), "seed"),
    (broken.BatchWideClamp(), "batch invariance"),
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
    # The methods are broken in plain PyTorch; the kernels that they inherit are not.
    with native.switched_off(), pytest.raises(AssertionError, match=method.name):
        CHECKS[check](row, "auto")


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_the_unbroken_method_passes_the_check(check, monkeypatch):
    monkeypatch.setitem(_REGISTRY, "_broken", broken.Broken)
    row = row_of(Nystrom() if check == "budget" else broken.Broken(), check)
    assert CHECKS[check].applies(row)
    CHECKS[check](row, "auto")
