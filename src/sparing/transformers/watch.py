"""Observe the tensors that the attention layers of a model get as it runs, for measurements."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sparing.contract import Method
from sparing.transformers.arguments import What
from sparing.transformers.handle import Handle, approximate
from sparing.transformers.state import ObservedCall, state_of

__all__ = ["ObservedCall", "approximate_prompts", "is_approximated", "observe_calls", "record_calls"]


def is_approximated(model: nn.Module) -> bool:
    """Return whether any layer of the model runs a method now."""
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    return any(state.active and state.settings is not None and not state.settings.exact for state in states)


def approximate_prompts(model: nn.Module, what: What, *, seed: int | None = 0) -> Handle:
    """Approximate a model for a measurement: prompts only, and without warnings of what should not be used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(needs further training|is an oracle)")
        return approximate(model, what, seed=seed, when="prefill")


@contextmanager
def observe_calls(
    model: nn.Module, what: str | Method, see: Callable[[ObservedCall], None], *, seed: int = 0
) -> Iterator[None]:
    """Pass every call that would be approximated to `see`, while the model stays exact.

    Only prompts and other calls without a cache are passed. Raises where `approximate` would.
    """
    with approximate_prompts(model, what, seed=seed) as handle:
        for settings in handle._settings.values():
            settings.observer = see
        yield


@torch.no_grad()
def record_calls(
    model: nn.Module, what: str | Method, run: Callable[[], object], *, seed: int = 0
) -> list[ObservedCall]:  # fmt: skip
    """Run the exact model by `run()` and return the calls that `what` would approximate, in their order.

    A method that works on the value layer, such as "monte_carlo", records each value as a `Projection`.
    """
    calls: list[ObservedCall] = []
    with observe_calls(model, what, calls.append, seed=seed):
        run()
    return calls
