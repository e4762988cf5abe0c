"""What the studies of trained YOSO models share: their names, and runs that start from another model's weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.nn import Encoder
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

EXPECTATION = "yoso(expectation=True)"
#: Methods by the paper's names.
METHODS = {
    "softmax": "exact",
    "YOSO-16": "yoso(hashes=16)",
    "YOSO-32": "yoso(hashes=32)",
    "YOSO-64": "yoso(hashes=64)",
    "YOSO-E": EXPECTATION,
}
YOSO = tuple(name for name in METHODS if name != "softmax")
SAMPLED = ("YOSO-16", "YOSO-32", "YOSO-64")


def started(config: Config, weights: Mapping[str, Tensor], task: Task | None = None) -> Training:
    """Return a run that starts from the weights of another, whose method may differ."""
    training = Training(config, task=task)
    training.bare.load_state_dict({n: w for n, w in weights.items() if not n.endswith("evaluation_seed")})
    return training


_COUNTED = 2000  # examples whose bytes are counted


@torch.no_grad()
def start(encoder: Encoder, *, tokens: float, positions: float) -> None:
    """Set the initial embeddings: tokens with that standard deviation, positions as sinusoids of that amplitude."""
    encoder.tokens.weight.mul_(tokens / encoder.tokens.weight.std())
    lengths = encoder.length ** torch.linspace(0, 1, encoder.width // 2)  # wavelengths / 2 pi
    angles = torch.arange(encoder.length)[:, None] / lengths
    encoder.positions.weight.copy_(positions * torch.cat([angles.sin(), angles.cos()], dim=-1))


def frequencies(task: Task) -> float:
    """Return the perplexity of a model that knows how often each byte occurs, and nothing else."""
    counts = [torch.zeros(task.vocabulary, dtype=torch.float64) for _ in range(2)]
    for number, split in enumerate((task.train, task.valid)):
        for index in range(min(len(split), _COUNTED)):
            counts[number] += torch.bincount(split[index].tokens, minlength=task.vocabulary)
    for each in counts:
        each[list(task.special)] = 0
    seen, held = counts
    free = task.vocabulary - len(task.special) - 1  # the mask token is not a byte
    nats = -((seen + 1) / (seen.sum() + free)).log()
    return float((held * nats).sum().div(held.sum()).exp())
