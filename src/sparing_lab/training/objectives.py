"""The model for a task, and its loss on examples."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.nn import CausalLM, Classifier, Decoder, DualTower, Encoder, MaskedLM, Pretraining
from sparing_lab.tasks.batches import padded
from sparing_lab.tasks.language import hide
from sparing_lab.tasks.trainable import Example, Split, Task
from sparing_lab.training.config import Config
from sparing_lab.training.tuned import freeze, tuned


def model_for(task: Task, config: Config) -> nn.Module:
    """Return a model for the task, with the method in every layer."""
    model = tuned(task, config) if config.tuned else _own(task, config)
    freeze(model, config.frozen)
    return model


def _own(task: Task, config: Config) -> nn.Module:
    kind = Decoder if task.causal else Encoder
    encoder = kind(
        task.vocabulary, length=task.length, width=config.hidden_size, heads=config.num_heads,
        layers=config.num_layers, hidden=config.intermediate_size, method=config.method, dropout=config.dropout,
        norm=config.norm,
        segments=2 if task.objective == "order" else 0,
    )  # fmt: skip
    if task.objective == "class":
        return Classifier(encoder, task.classes)
    if task.objective == "pair":
        return DualTower(encoder, task.classes)
    if isinstance(encoder, Decoder):
        return CausalLM(encoder)
    return Pretraining(encoder) if task.objective == "order" else MaskedLM(encoder)


class Inputs(NamedTuple):
    """Examples as tensors: the arguments of a model, and its targets."""

    arguments: dict[str, Tensor]
    targets: Tensor  #: -100 where no answer is wanted
    order: Tensor | None = None  #: labels of sentence order

    @property
    def asked(self) -> int:
        """The number of answers that are wanted."""
        return int((self.targets != -100).sum())

    def to(self, device: torch.device) -> Inputs:
        """Return the same inputs on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.arguments.items()}
        return Inputs(moved, self.targets.to(device), None if self.order is None else self.order.to(device))


def inputs_of(task: Task, examples: Sequence[Example], seeds: Sequence[int]) -> Inputs:
    """Return examples as tensors; seeds: one for each example, which choose the tokens that are hidden."""
    kind = torch.float32 if task.objective == "score" else torch.long
    labels = torch.tensor([example.label for example in examples], dtype=kind)
    tokens, mask = padded([example.tokens for example in examples], padding=task.padding)
    kinds = [example.segments for example in examples if example.segments is not None]
    segments = {"segments": padded(kinds)[0]} if kinds else {}
    if task.objective in ("class", "score"):
        return Inputs({"tokens": tokens, "mask": mask, **segments}, labels)
    if task.objective == "pair":
        others, other_mask = padded([_other(example) for example in examples])
        return Inputs({"tokens": tokens, "other": others, "mask": mask, "other_mask": other_mask}, labels)
    if task.objective == "next":
        targets = torch.where(mask, tokens, -100)
        return Inputs({"tokens": tokens[:, :-1], "mask": mask[:, :-1]}, targets[:, 1:])
    rows = [
        hide(example.tokens[None], task, torch.Generator().manual_seed(seed))
        for example, seed in zip(examples, seeds, strict=True)
    ]
    targets, _ = padded(
        [torch.where(asked[0], example.tokens, -100) for example, (_, asked) in zip(examples, rows, strict=True)],
        padding=-100,
    )
    arguments = {"tokens": padded([given[0] for given, _ in rows])[0], "mask": mask}
    if task.objective == "masked":
        return Inputs(arguments, targets)
    return Inputs({**arguments, **segments}, targets, labels)


def make_inputs(task: Task, split: Split, numbers: Sequence[int], key: str) -> Inputs:
    """Return the examples of these numbers as tensors; what is hidden in each depends on its number and the key."""
    seeds = [Random(f"hide {key} {number}").getrandbits(63) for number in numbers]
    return inputs_of(task, [split[number] for number in numbers], seeds)


def _other(example: Example) -> Tensor:
    assert example.other is not None
    return example.other


class Losses(NamedTuple):
    """Sums over the answers that were wanted."""

    loss: Tensor  #: of the tokens or classes
    right: Tensor  #: answers that were right
    scores: Tensor  #: output of the model
    order: Tensor | None = None  #: the loss of sentence order, over the examples
    ordered: Tensor | None = None  #: examples whose order was right


def losses(model: Any, inputs: Inputs) -> Losses:
    """Return the summed cross-entropy, or the summed squared error of scores."""
    found = model(**inputs.arguments)
    scores, order = (found.tokens, found.order) if inputs.order is not None else (found, None)
    scores = scores.float()
    if inputs.targets.is_floating_point():
        loss = F.mse_loss(scores.flatten(), inputs.targets, reduction="sum")
        return Losses(loss, torch.zeros_like(loss), scores)
    loss = F.cross_entropy(scores.flatten(0, -2), inputs.targets.flatten(), ignore_index=-100, reduction="sum")
    right = (scores.argmax(-1) == inputs.targets).sum()
    if order is None or inputs.order is None:
        return Losses(loss, right, scores)
    ordered = (order.argmax(-1) == inputs.order).sum()
    return Losses(loss, right, scores, F.cross_entropy(order.float(), inputs.order, reduction="sum"), ordered)
