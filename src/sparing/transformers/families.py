"""Models whose modules compute attention by their own code, and what sparing can run in their place.

Classes are recognised by name: the code of a model is imported when one of its modules is approximated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from sparing.contract import Method
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.methods.yoso.method import Yoso

#: The families that have an adapter, as error messages list them.
KNOWN = "MPNet, YOSO, Nystromformer and Longformer"


@dataclass(frozen=True)
class Family:
    """One kind of attention module that has an adapter in `runtime/adapters`."""

    name: str  #: of the model in transformers, and of the adapter's file
    attention: str  #: the class of its attention modules
    target: str = "softmax"  #: the attention that such models are trained with
    biased: bool = False  #: it adds a position bias to the scores
    takes_exact: bool = False  #: it computes softmax attention, so that sparing's exact attention can replace it

    def refusal(self, module: nn.Module, method: Method) -> str | None:
        """Return why such a module cannot run the method, for reasons of this family; None if it can."""
        return None

    def own_method(self, module: nn.Module, name: str) -> Method | None:
        """Return the method of that name with the module's own settings, or None if it has none."""
        return None


class _YosoFamily(Family):
    def own_method(self, module: nn.Module, name: str) -> Method | None:
        """Return the settings of the model's config for the name "yoso"."""
        given: Any = module
        if name != "yoso":
            return None
        if given.use_expectation:
            return Yoso(expectation=True, bits=given.hash_code_len)
        kind: Any = "hadamard" if given.use_fast_hash else "gaussian"
        return Yoso(hashes=given.num_hash, bits=given.hash_code_len, hash=kind)


class _LongformerFamily(Family):
    def refusal(self, module: nn.Module, method: Method) -> str | None:
        """Refuse methods that change the weights of the window."""
        if not isinstance(method, MonteCarlo):
            return f"{self.attention} attends within a window by its own code; only monte_carlo can run there"
        if method.importance != "max":
            return f"{method.name} reads off {self.attention} the largest weight alone; take importance='max'"
        odd = [name for name in ("value", "value_global") if type(module._modules.get(name)) is not nn.Linear]
        return f"{method.name} needs linear layers of the values, and {odd[0]} is not one" if odd else None


MPNET = Family("mpnet", "MPNetSelfAttention", biased=True, takes_exact=True)
YOSO = _YosoFamily("yoso", "YosoSelfAttention", target="angular")
NYSTROMFORMER = Family("nystromformer", "NystromformerSelfAttention")
LONGFORMER = _LongformerFamily("longformer", "LongformerSelfAttention")

_BY_CLASS = {
    f"transformers.models.{family.name}.modeling_{family.name}.{family.attention}": family
    for family in (MPNET, YOSO, NYSTROMFORMER, LONGFORMER)
}


def family_of(module: nn.Module) -> Family | None:
    """Return the family of an attention module, adapted or not; None for all other modules."""
    kind = type(module)
    found = getattr(kind, "family", None)  # of an adapted class
    return found if isinstance(found, Family) else _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")


@cache
def misreads_masks(config: type) -> bool:
    """Return whether models of this config class compute attention by their own code, from other kinds of masks."""
    modeling = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any(
        "Attention" in name and isinstance(member, type) and member.__module__ == modeling.__name__
        for name, member in vars(modeling).items()
    )
