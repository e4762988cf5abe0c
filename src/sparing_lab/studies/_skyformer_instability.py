"""How far the states of a model move in its first steps of training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sparing.nn import MultiheadAttention
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from sparing_lab.training.objectives import inputs_of

FIRST = 20  #: the number of steps in the paper
#: The states that f can stand for. The paper says only "the embedding after two layers".
AFTER, BEFORE, RELATIVE, REDRAWN = "after LayerNorm", "before LayerNorm", "before, relative", "new landmarks"
READ = (AFTER, BEFORE, RELATIVE, REDRAWN)


def plain_start(model: Any, seed: int) -> None:
    """Initialise attention's projections and biases like torch's linear layers, as in the paper's code."""
    random = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, MultiheadAttention):
            most = layer.embed_dim**-0.5
            for weight in (layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias):
                assert weight is not None
                with torch.no_grad():
                    weight.uniform_(-most, most, generator=random)


class _EnoughError(Exception):
    """Raised to stop a run after the steps that are measured."""


def scores(config: Config, first: int = FIRST) -> dict[str, list[float]]:
    """Return |f(x, W) - f(x, W')|^2 / |W - W'|^2 of each step, by read-out; W': the weights before the step.

    x is the batch of the step. Dropout is off, and both models use the same random numbers, except for
    "new landmarks", where the second draws its own.
    """
    found: dict[str, list[float]] = {read: [] for read in READ}

    def see(text: str, done: int, steps: int) -> None:
        numbers = training.batches.batch(done - 1)
        inputs = inputs_of(training.task, [training.task.train[number] for number in numbers], [0] * len(numbers))
        model = copy.deepcopy(training.bare).eval()
        moved = moved_by(old, model)
        first_, second = (states(each, inputs.arguments) for each in (old, model))
        found[AFTER].append(apart(first_[0], second[0]) / moved)
        found[BEFORE].append(apart(first_[1], second[1]) / moved)
        found[RELATIVE].append(apart(first_[1], second[1]) / size(first_[1]) / moved)
        if redraw(model):
            second = states(model, inputs.arguments)
        found[REDRAWN].append(apart(first_[0], second[0]) / moved)
        old.load_state_dict(training.bare.state_dict())
        if done == first:
            raise _EnoughError

    training = Training(config, tell=see)
    plain_start(training.bare, config.seed)
    old = copy.deepcopy(training.bare).eval()
    with suppress(_EnoughError):
        training.run()
    return found


@torch.no_grad()
def states(model: Any, arguments: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the encoder's states of each text, after and before the last normalisation; zero for padding."""
    after: list[Tensor] = []
    before: list[Tensor] = []
    encoder = model.encoder
    hooks = [
        encoder.norm.register_forward_hook(lambda module, given, made: before.append(given[0])),
        encoder.register_forward_hook(lambda module, given, made: after.append(made)),
        encoder.register_forward_pre_hook(lambda module, given: masks.append(given[1])),
    ]
    masks: list[Tensor] = []
    try:
        model(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return after, [each * mask[..., None] for each, mask in zip(before, masks, strict=True)]


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the squared distance of two lists of states."""
    return size([b.double() - a.double() for a, b in zip(one, other, strict=True)])


def size(found: Sequence[Tensor]) -> float:
    """Return the squared norm of a list of states."""
    return sum(float(each.double().square().sum()) for each in found)


def moved_by(old: Any, new: Any) -> float:
    """Return the squared distance of two models' weights."""
    return apart([each.detach() for each in old.parameters()], [each.detach() for each in new.parameters()])


def redraw(model: Any) -> bool:
    """Change the random numbers of evaluation in every layer that has some; return False where none has."""
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("evaluation_seed")]
    for buffer in found:
        buffer.add_(1)
    return bool(found)
