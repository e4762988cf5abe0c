"""Models that studies train: a run of `sparing.training`, and what a row says of it."""

from __future__ import annotations

from typing import Any

from sparing.studies.study import Row
from sparing.training.config import Config
from sparing.training.loop import Trained, Training


def trained(config: Config) -> tuple[Any, Trained]:
    """The model as it is behind the last step, and what came of the run."""
    training = Training(config)
    found = training.run()
    return training.bare.eval(), found


def row_of(found: Trained) -> Row:
    """What is kept of a run."""
    return {
        "metric": found.metric, "chance": found.task.chance(), "last": found.records[-1], "seconds": found.seconds,
        "steps": found.config.steps,
        "curve": [
            {"seconds": seconds, **record} for record, seconds in zip(found.records, found.times, strict=True)
        ],
    }  # fmt: skip
