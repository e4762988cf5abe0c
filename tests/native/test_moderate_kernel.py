"""The kernel that finds entries which are not finite, or too large, agrees with the path that norms them."""

import pytest
import torch

from sparing import native
from sparing.quarantine import are_moderate, limit_of
from tests.support.kernel_checks import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_entry_is_found_wherever_it_may_be_read(dtype):
    bad = [torch.nan, torch.inf, -torch.inf]
    limit = limit_of(torch.promote_types(dtype, torch.float32))
    if dtype != torch.float16:  # whose largest number is smaller
        bad += [1.1 * limit, -1.1 * limit]
    q, k, v = (torch.full((2, n, 3, 5), 0.5, dtype=dtype).transpose(1, 2) for n in (4, 9, 9))
    assert are_moderate(q, k, v, 5)
    for entry in bad:
        for x, place in ((q, 0), (q, 3), (k, 5), (v, 8)):
            x[1, 2, place, 4] = entry
            found = are_moderate(q, k, v, 5)
            with native.switched_off():
                assert found == are_moderate(q, k, v, 5)
            assert not found
            x[1, 2, place, 4] = 0.5
        k[0, 0, 4] = v[1, 2, 0] = entry  # before `start`
        assert are_moderate(q, k, v, 5)
        k[0, 0, 4] = v[1, 2, 0] = 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [1.5, 40000.0, 2.0**-14, 2.0**-20])
def test_entries_up_to_the_limit_are_moderate(dtype, limit):
    q = torch.full((1, 1, 1, 2), -limit, dtype=dtype)
    limit = -float(q[0, 0, 0, 0])  # as it is rounded
    assert torch.ops.sparing.are_moderate(q, q, q, 0, limit)
    assert not torch.ops.sparing.are_moderate(q, q, q, 0, 0.99 * limit)


@pytest.mark.parametrize(("start", "message"), [(-1, "start must be"), (3, "start must be from 0 to the number")])
def test_a_start_beyond_the_tokens_is_refused(start, message):
    q = torch.ones(1, 1, 2, 2)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.sparing.are_moderate(q, q, q, start, 1.0)
