"""What the studies of trained YOSO models share: their names, and runs that start from another model's weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

EXPECTATION = "yoso(expectation=True)"
#: As the paper calls them.
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
    """A run that begins with the weights of another, whose method may differ: to try them with it, or to go on."""
    training = Training(config, task=task)
    training.bare.load_state_dict({n: w for n, w in weights.items() if not n.endswith("evaluation_seed")})
    return training
