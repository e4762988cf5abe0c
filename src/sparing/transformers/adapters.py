"""Which modules with attention of their own have an adapter; their models are only imported where one is used."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

from torch import nn

from sparing.transformers.slot import Slot

if TYPE_CHECKING:
    from sparing.transformers.own import Served

#: Model families, in the words of a message.
KNOWN = "MPNet, YOSO, Nystromformer and Longformer"

_PLACES = (
    *(f"transformers.models.{family}." for family in ("mpnet", "yoso", "nystromformer", "longformer")),
    "sparing.transformers.own",
    "sparing.transformers.longformer",
)


def adapter_of(module: nn.Module) -> type[Served] | None:
    """The class that the module takes on to run methods, or has taken on; None where there is none."""
    if not type(module).__module__.startswith(_PLACES):
        return None
    from sparing.transformers.longformer import ServedLongformer
    from sparing.transformers.own import Served, ServedMPNet, ServedNystromformer, ServedYoso

    if isinstance(module, Served):
        return type(module)
    served: tuple[type[Served], ...] = (ServedMPNet, ServedYoso, ServedNystromformer, ServedLongformer)
    return next((cls for cls in served if type(module) is cls.stock), None)


def settle(module: nn.Module, slot: Slot, adapter: type[Served] | None) -> None:
    """Give the module the class that its choices need: its own, where sparing computes none of them."""
    if adapter is not None:
        module.__class__ = adapter if any(adapter.serves(choice) for choice in slot.choices) else adapter.stock


@cache
def misreads_masks(config: type) -> bool:
    """Whether models of this config class compute all attention by themselves, with masks of another kind than ours."""
    modeling = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any(
        "Attention" in name and isinstance(member, type) and member.__module__ == modeling.__name__
        for name, member in vars(modeling).items()
    )
