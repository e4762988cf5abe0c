"""Methods that are wrong about derivatives."""

import torch

from tests.support.broken_methods import Broken


class DetachedKeys(Broken):
    name = "_detached_keys"

    def reference(self, q, k, v, call):
        return super().reference(q, k.detach() + 0 * k, v, call)


class GradientToPaddedQueries(Broken):
    """The numbers are right, but every query gets a share of the gradient."""

    name = "_gradient_to_padded_queries"

    def reference(self, q, k, v, call):
        return super().reference(q, k, v, call) + (q - q.detach()).mean((-2, -1), keepdim=True)


class GradientOfEmptyRows(Broken):
    """Rows that see nothing are zeros, but not constants."""

    name = "_gradient_of_empty_rows"

    def reference(self, q, k, v, call):
        out = super().reference(q, k, v, call)
        visible = call.mask.visible(q.shape[-2], k.shape[-2], q.device)
        if visible is None:
            return out
        return out + (q - q.detach()).mean(-1, keepdim=True) * ~visible.any(-1, keepdim=True)


class FirstDerivativeOnly(torch.autograd.Function):
    """x, marked by torch's own decorator, which refuses second derivatives in `backward()` alone."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad


class SilentSecondDerivative(Broken):
    name = "_silent_second_derivative"

    def reference(self, q, k, v, call):
        return FirstDerivativeOnly.apply(super().reference(q, k, v, call))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + 0 * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0]


class SavedTensorsReadTwice(Broken):
    """Harmless by itself, but a checkpoint hands out saved tensors once."""

    name = "_saved_tensors_read_twice"

    def reference(self, q, k, v, call):
        return ReadsTwice.apply(super().reference(q, k, v, call)) / 2


class LosesTangents(Broken):
    name = "_loses_tangents"

    def reference(self, q, k, v, call):
        return torch.autograd.forward_ad.unpack_dual(super().reference(q, k, v, call)).primal
