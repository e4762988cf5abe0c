"""The workloads of a benchmark: clustered inputs, and calls on them, forward or forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sparing.call import Impl
from sparing.contract import Method, Projection
from sparing.functional import attention

TOPICS = 16


class Workload(NamedTuple):
    """A computation and its input tensors, for all of which gradients are computed."""

    compute: Callable[..., Tensor]  #: of the leaves
    leaves: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()  #: learned weights that `compute` uses

    def call(self, *, backward: bool) -> Callable[[], object]:
        """Return the computation as a call without arguments; `backward` adds the gradients of a fixed random sum."""
        if not backward:

            def forward() -> Tensor:
                with torch.no_grad():
                    return self.compute(*self.leaves)

            return forward
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        weights: list[Tensor] = []

        def both() -> tuple[Tensor, ...]:
            out = self.compute(*leaves)
            if not weights:
                weights.append(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
            return torch.autograd.grad(out, [*leaves, *self.parameters], weights[0])

        return both

    def gradients(self) -> Callable[[], object]:
        """Return the backward pass alone as a call; the forward pass runs once, now."""
        leaves = [x.detach().requires_grad_() for x in self.leaves]
        out = self.compute(*leaves)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        return lambda: torch.autograd.grad(out, [*leaves, *self.parameters], weights, retain_graph=True)

    def kept_bytes(self) -> int:
        """Return the bytes that the forward pass saves for the backward pass, with inputs and weights, each once."""
        kept: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return x

        leaves = [x.detach().requires_grad_() for x in self.leaves]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = self.compute(*leaves)
        del out  # only now are tensors freed, so that no address was used twice
        return sum(kept.values())


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """The inputs of one layer's self-attention."""

    q: Tensor  # [B, H, n, d]
    k: Tensor
    v: Tensor

    @cached_property
    def projection(self) -> Projection:
        """Values before a square linear layer, for methods that work on one."""
        generator = torch.Generator().manual_seed(2)
        batch, heads, length, width = self.v.shape
        weight = torch.randn(heads * width, heads * width, generator=generator) / (heads * width) ** 0.5
        return Projection(torch.randn(batch, length, heads * width, generator=generator), weight.to(self.v.dtype))


def clustered(batch: int, heads: int, length: int, width: int, *, seed: int = 0) -> AttentionInputs:
    """Draw queries and keys in topics, one random mixture of topics per head, and values of very different norms.

    Independent Gaussian tokens would make attention nearly uniform and every hash bucket equally full, which real
    layers do not.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    topics = normal(batch, heads, TOPICS, width)
    topic = torch.randint(TOPICS, (length,), generator=generator)
    k = 0.7 * topics[:, :, topic] + 0.7 * normal(batch, heads, length, width)
    q = 1.4 * topics[:, :, topic.roll(3)] + 1.4 * normal(batch, heads, length, width)
    v = normal(batch, heads, length, width) * (0.8 * normal(length, 1)).exp()
    return AttentionInputs(q=q, k=k, v=v)


def keys_used(inputs: AttentionInputs) -> float:
    """Return the keys that matter to a query: 1 / sum of squared weights, mean over the queries of the first item."""
    weights = (inputs.q[0] @ inputs.k[0].mT * inputs.q.shape[-1] ** -0.5).softmax(-1)
    return float((1 / weights.square().sum(-1)).mean())


def learned_state(method: Method, inputs: AttentionInputs) -> nn.Module | None:
    """Return the learned state that a module would have for this method, initialised with a fixed seed."""
    _, heads, length, width = inputs.q.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return method.learned(heads, width, width, length)


def method_work(
    method: Method,
    inputs: AttentionInputs,
    *,
    state: nn.Module | None,
    impl: Impl = "auto",
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """Return the workload of a method on the inputs, through `sparing.attention`, with a fixed seed."""
    if state is not None and dtype != torch.float32:
        state = copy.deepcopy(state).to(dtype)
    parameters = () if state is None else tuple(state.parameters())

    def compute(q: Tensor, k: Tensor, *value: Tensor) -> Tensor:
        given = Projection(*value) if method.supports.projection else value[0]
        return attention(q, k, given, method=method, seed=0, impl=impl, state=state)

    value = (inputs.projection.x, inputs.projection.weight) if method.supports.projection else (inputs.v,)
    return Workload(compute, tuple(x.to(dtype) for x in (inputs.q, inputs.k, *value)), parameters)


def sdpa_work(inputs: AttentionInputs, dtype: torch.dtype) -> Workload:
    """Return the workload of SDPA on inputs that were converted beforehand."""
    return Workload(scaled_dot_product_attention, tuple(x.to(dtype) for x in (inputs.q, inputs.k, inputs.v)))


def softmax_work(inputs: AttentionInputs) -> Workload:
    """Return the workload of unfused softmax attention, which stores the whole matrix of weights."""
    scale = inputs.q.shape[-1] ** -0.5
    return Workload(lambda q, k, v: (q @ k.mT * scale).softmax(-1) @ v, (inputs.q, inputs.k, inputs.v))


def sdpa_with_projection(inputs: AttentionInputs) -> Workload:
    """Return the workload of SDPA with the value layer: the baseline of methods that save work of that layer."""
    heads = inputs.k.shape[1]

    def compute(q: Tensor, k: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, Projection(x, weight).project(heads))

    return Workload(compute, (inputs.q, inputs.k, inputs.projection.x, inputs.projection.weight))


def describe(inputs: AttentionInputs) -> str:
    """Describe the inputs in words."""
    length = inputs.q.shape[-2]
    return (
        f"clustered tokens, {TOPICS} topics per head, value norms over an order of magnitude; of {length} keys a query "
        f"uses about {keys_used(inputs):.0f} (1 / sum of squared weights)"
    )
