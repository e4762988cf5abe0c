"""Evaluation on held-out examples, which the processes of a run share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.workbench.metrics import End, metrics_of
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.objectives import losses, make_inputs
from sparing_lab.training.result import Record

_BATCH_SIZE = 32


@torch.no_grad()
def evaluate(model: Any, task: Task, accelerator: Any, seed: int) -> Record:
    """Return loss and metrics of the model on all held-out examples; each process runs its share of them.

    The random numbers of training do not depend on how often a model is evaluated.
    """
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model.eval()
    mine = list(range(accelerator.process_index, len(task.valid), accelerator.num_processes))
    if task.valid.lengths is not None:
        mine.sort(key=task.valid.lengths.__getitem__)  # to pad little
    ends: list[End] = []
    device = accelerator.device
    sums = torch.zeros(6, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for at in range(0, len(mine), _BATCH_SIZE):
        part = make_inputs(task, task.valid, mine[at : at + _BATCH_SIZE], f"{seed} valid").to(device)
        with accelerator.autocast():
            found = losses(model, part)
        order = [0.0 if each is None else float(each) for each in (found.order, found.ordered)]
        each = (float(found.loss), float(found.right), part.asked, *order, len(part.targets))
        sums += torch.tensor(each, dtype=sums.dtype, device=device)
        if task.judged:
            ends += _ends(found.scores, part.targets)
    torch.set_rng_state(state)
    return _record(task, accelerator.reduce(sums, reduction="sum").tolist(), ends)


def _record(task: Task, sums: Sequence[float], ends: list[End]) -> Record:
    """Return the metrics of sums over all processes, and of the answers of this one."""
    from accelerate.utils import gather_object

    loss, right, asked, order_loss, ordered, examples = sums
    found: Record = {"valid_loss": loss / asked}
    if task.objective != "score":
        found["accuracy"] = right / asked
    if task.judged:
        score = metrics_of("classifier")[task.judged].score
        assert score is not None
        found[task.judged] = score(gather_object(ends), "")
    if task.metric == "perplexity":
        found["perplexity"] = math.exp(min(loss / asked, 50))
    if task.objective == "order":
        found["order_loss"], found["order_accuracy"] = order_loss / examples, ordered / examples
    return found


def _ends(scores: Tensor, targets: Tensor) -> list[End]:
    """Return the model's answers in the form that `sparing.workbench.metrics` scores."""
    if targets.is_floating_point():
        return [{"score": float(s), "label": float(y)} for s, y in zip(scores.flatten(), targets, strict=True)]
    return [
        {"class": float(found), "label": float(wanted), "classes": float(scores.shape[-1])}
        for found, wanted in zip(scores.argmax(-1), targets, strict=True)
    ]
