"""Every method passes every common check that applies to it."""

from contextlib import nullcontext

import pytest

import sparing
from sparing import native
from tests.support.common_checks import CHECKS
from tests.support.method_table import ROWS

CASES = [
    pytest.param(row, name, impl, id=f"{row.spec}-{name}-{impl}")
    for row in ROWS
    for name, check in CHECKS.items()
    if check.applies(row) and name not in row.skip
    for impl in row.impls
    if not (name in ("fast equals reference", "spec and cost") and impl == "reference" and len(row.impls) > 1)
]


@pytest.mark.common
@pytest.mark.parametrize(("row", "name", "impl"), CASES)
def test_common(row, name, impl):
    if impl == "native" and not native.info().loaded:
        pytest.skip("no kernels were built on this machine")
    with native.switched_off() if impl == "torch" else nullcontext():
        CHECKS[name](row, "reference" if impl == "reference" else "auto")


def test_every_method_has_a_row():
    assert {row.method.name for row in ROWS} == set(sparing.list_methods())


def test_skips_name_real_checks_and_give_reasons():
    for row in ROWS:
        for name, reason in row.skip.items():
            assert name.partition(":")[0] in CHECKS, f"{row.spec} skips an unknown check {name!r}"
            assert len(reason) > 15, f"{row.spec} skips {name!r} without a reason"
