"""The records that the steps of a plan share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparing.store import Store
from sparing.transformers.recipe import Recipe
from sparing.workbench.metrics import Metric
from sparing.workbench.planning.promise import Promise
from sparing.workbench.prepare import Prepared


@dataclass(frozen=True)
class PlanGoal:
    """What a plan is asked for."""

    promise: Promise
    metric: Metric
    objective: str  #: "time" or "memory"
    seed: int
    rounds: int  #: of the timings of the model
    keep: bool  #: return a recipe that keeps the promise though its gain is not shown


@dataclass(frozen=True, eq=False)
class PlanContext:
    """What every measurement of a plan needs."""

    given: Prepared
    store: Store
    blank: Recipe  #: the recipe without layers
    of: Mapping[str, Any]  #: entries of every cell: the model and the versions
    tell: Callable[[], None]  #: called for each finished measurement
