"""Random bits of the kernel against those in plain PyTorch."""

import pytest
import torch

from sparing import native
from sparing.draws import Draws
from tests.support.kernel_checks import needs_kernels, same_for_any_threads

pytestmark = needs_kernels

STREAMS = torch.tensor([0, 7, 2**32 - 1, 2**40 + 3, -1])


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 1, 2**64 - 1])
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (5, 7), (2, 3, 4)])
def test_the_bits_of_plain_torch(seed, shape):
    draws = Draws(seed, STREAMS)
    for draw, dtype in ((draws.bits, torch.int64), (draws.uniform, torch.float64)):
        found = draw("purpose", *shape)
        with native.switched_off():
            wanted = draw("purpose", *shape)
        assert torch.equal(found, wanted)
        assert found.dtype == dtype
        assert not torch.equal(found, draw("other", *shape))


def test_every_bit_of_a_stream_counts():
    streams = torch.tensor([2**i for i in range(32)])
    found = Draws(1, streams).bits("purpose", 2)
    assert len(found.unique(dim=0)) == 32


def test_thread_counts_change_nothing():
    same_for_any_threads(lambda: [Draws(3, STREAMS).bits("purpose", 40000)])


def test_opcheck():
    torch.library.opcheck(torch.ops.sparing.random_bits, (STREAMS, 1, 3, 10))
    torch.library.opcheck(torch.ops.sparing.random_uniform, (STREAMS, 1, 3, 10))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"streams": torch.zeros(2, 2, dtype=torch.int64)}, "streams"),
        ({"streams": torch.zeros(2)}, "streams"),
        ({"streams": torch.arange(4)[::2]}, "streams"),
        ({"count": -1}, "count"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    call = {"streams": STREAMS, "seed": -2, "purpose": 3, "count": 4}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.random_bits(**{**call, **change})
