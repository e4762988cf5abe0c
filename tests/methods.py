"""The table that drives the common checks. A new method gets all of them by adding a row here."""

from __future__ import annotations

from dataclasses import dataclass, field

import sparing


@dataclass(frozen=True)
class Row:
    """One setting of a method under test.

    spec: the setting; its budget should be well below the lengths of the checks (33 to 100 tokens).
    budgets: specs of growing budget, each about four times the one before; their mean error must fall.
    beats_mean: on peaked attention the last of `budgets` is closer to exact than the plain mean of the values.
    skip: check name -> reason. Only for checks that cannot have a meaning for the method.
    """

    spec: str
    budgets: tuple[str, ...] = ()
    beats_mean: bool = False
    skip: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> sparing.Method:
        return sparing.method(self.spec)

    @property
    def supports(self) -> sparing.Supports:
        return self.method.supports

    @property
    def impls(self) -> tuple[str, ...]:
        has_fast = type(self.method).fast is not sparing.Method.fast
        return ("reference", "auto") if has_fast else ("reference",)


ROWS = [
    Row("exact", beats_mean=True),
    Row("nystrom(landmarks=8)", budgets=("nystrom(landmarks=4)", "nystrom(landmarks=16)", "nystrom(landmarks=64)")),
    Row("nystrom(landmarks=8, solver=exact)"),
    Row(
        "random_features(features=32)",
        budgets=(
            "random_features(features=16)",
            "random_features(features=256)",
            "random_features(features=4096)",
        ),
    ),
    Row("random_features(features=32, orthogonal=False)"),
]
