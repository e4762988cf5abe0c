"""What the tests of the kernels lean on must itself be able to fail."""

import pytest
import torch

from tests.support.kernel_checks import no_worse, same_for_any_threads

X = torch.linspace(-2, 2, 60).view(3, 20)


def plain(x):
    return x.sin() * 3


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return plain(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0].cos() * (1 + 1e-5)


def test_an_error_beyond_the_rule_is_found():
    no_worse(plain, plain, [X])
    no_worse(lambda x: plain(x) * (1 + 1e-7), plain, [X])
    with pytest.raises(AssertionError, match="output 0: error"):
        no_worse(lambda x: plain(x) * (1 + 1e-5), plain, [X])
    with pytest.raises(AssertionError, match="gradient 0: error"):
        no_worse(WrongGradient.apply, plain, [X])
    with pytest.raises(AssertionError, match="is not finite"):
        no_worse(lambda x: plain(x).masked_fill(x > 1.9, torch.nan), plain, [X], gradients=False)
    with pytest.raises(AssertionError, match="other rows see nothing"):
        no_worse(lambda x: plain(x).masked_fill(x > 1.9, -torch.inf), plain, [X], gradients=False)


def test_a_result_that_hangs_on_the_threads_is_found():
    same_for_any_threads(lambda: [X * 2])
    before = torch.get_num_threads()
    with pytest.raises(AssertionError):
        same_for_any_threads(lambda: [X * torch.get_num_threads()])
    assert torch.get_num_threads() == before
