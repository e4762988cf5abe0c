"""Every method passes every common check that applies to it."""

from contextlib import nullcontext

import pytest

import sparing
from sparing import native
from tests.support.common_checks import CHECKS
from tests.support.common_checks.numbers import fast_equals_reference_on_every_shape_and_mask
from tests.support.method_table import ROWS

CASES = [
    pytest.param(row, name, impl, id=f"{row.spec}-{name}-{impl}")
    for row in ROWS
    for name, check in CHECKS.items()
    if name not in row.skip
    for impl in check.implementations(row)
]


def by(impl):
    """The context that a check of this implementation runs in."""
    if impl == "native" and not native.info().loaded:
        pytest.skip("no kernels were built on this machine")
    return native.switched_off() if impl == "torch" else nullcontext()


@pytest.mark.common
@pytest.mark.parametrize(("row", "name", "impl"), CASES)
def test_common(row, name, impl):
    with by(impl):
        CHECKS[name](row, "reference" if impl == "reference" else "auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "impl"),
    [pytest.param(row, impl, id=f"{row.spec}-{impl}") for row in ROWS for impl in row.impls[1:]],
)
def test_fast_equals_reference_on_every_shape_and_mask(row, impl):
    with by(impl):
        fast_equals_reference_on_every_shape_and_mask(row)


def test_every_method_has_a_row():
    assert {row.method.name for row in ROWS} == set(sparing.list_methods())


def test_skips_name_real_checks_and_give_reasons():
    for row in ROWS:
        for name, reason in row.skip.items():
            assert name.partition(":")[0] in CHECKS, f"{row.spec} skips an unknown check {name!r}"
            assert len(reason) > 15, f"{row.spec} skips {name!r} without a reason"
