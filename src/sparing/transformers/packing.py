"""Remove padding from the batches of an encoder.

The valid tokens of a padded batch [B, n] run through the encoder's blocks as one packed sequence [1, total], in which
no text sees another; behind the last block they are padded again. Embeddings, poolers and heads run as ever, on padded
batches. Nothing of a model is replaced: forward hooks of the encoder and of its blocks do all of this.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparing.contract import Unsupported
from sparing.mask import hides
from sparing.transformers.find import AttentionLayer

#: Encoders whose blocks treat every token alike but for attention, by class name. Tests compare each with itself.
ENCODERS = (
    "BertModel", "CamembertModel", "DistilBertModel", "ElectraModel", "MPNetModel", "ModernBertModel", "RobertaModel",
    "XLMRobertaModel",
)  # fmt: skip
_IMAGES = ("ViTModel", "DeiTModel", "BeitModel", "Dinov2Model")


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Where the valid tokens of a padded batch are."""

    keep: Tensor  #: [B, n] boolean
    places: Tensor  #: [total] of valid tokens among the B * n positions
    items: tuple[int, ...]  #: of the batch, for each sequence of the pack; an item without tokens has none
    offsets: tuple[int, ...]  #: of the sequences, and the total

    @classmethod
    def of(cls, keep: Tensor) -> PackedBatch:
        """Find the tokens of a mask [B, n]."""
        lengths = keep.sum(1).tolist()
        ends = keep.new_tensor(lengths, dtype=torch.long, device="cpu").cumsum(0).tolist()
        items = tuple(item for item, length in enumerate(lengths) if length)
        return cls(keep, keep.flatten().nonzero()[:, 0], items, (0, *(ends[item] for item in items)))

    def is_in(self, query: Tensor) -> bool:
        """Return whether queries [1, H, total, d] are of this batch."""
        return query.shape[0] == 1 and query.shape[2] == self.offsets[-1]

    @property
    def cu_seqlens(self) -> Tensor:
        """The offsets as `sparing.attention` takes them."""
        return torch.tensor(self.offsets)

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows [1, total, ...] of valid tokens of x [B or 1, n, ...]."""
        x = x.expand(len(self.keep), *x.shape[1:])
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Return x [1, total, ...] as [B, n, ...], with zeros at padding."""
        batch, n = self.keep.shape
        padded = x.new_zeros(batch * n, *x.shape[2:]).index_copy(0, self.places, x[0])
        return padded.view(batch, n, *x.shape[2:])

    def cut_mask(self, mask: Tensor, number: int) -> Tensor:
        """Return the part [1, 1 or H, n_i, n_i] of a mask or bias [B or 1, 1 or H, n, n] that is about one sequence."""
        item = self.items[number]
        own = mask[item : item + 1] if mask.shape[0] > 1 else mask
        rows = self.keep[item].nonzero()[:, 0]
        return own[:, :, rows[:, None], rows]


class HasPacking(Protocol):
    """The state of an attention layer."""

    packing: list[Packing]


class Packing:
    """The hooks of one encoder. Each thread has a batch of its own.

    They are hooks of the blocks, and of the module that runs them: sentence-transformers calls `forward` of the
    encoder, whose own hooks do not run then.
    """

    def __init__(self, owner: PreTrainedModel, blocks: list[nn.Module]) -> None:
        self._owner, self._first, self._last = owner, blocks[0], blocks[-1]
        self._local = threading.local()

    @property
    def batch(self) -> PackedBatch | None:
        """The batch that runs through the blocks now; None: it is padded."""
        return getattr(self._local, "batch", None)

    def install(self, runner: nn.Module, blocks: list[nn.Module]) -> list[Callable[[], None]]:
        """Register the hooks, and return functions that remove them. runner: the module that runs the blocks."""
        added = [
            runner.register_forward_pre_hook(self.before_blocks, with_kwargs=True),
            runner.register_forward_hook(self.after_blocks, always_call=True),
        ]
        for block in blocks:
            added.append(block.register_forward_pre_hook(self.before_block, with_kwargs=True))
        added.append(self._last.register_forward_hook(self.after_last_block))
        return [each.remove for each in added]

    def before_blocks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether the hidden states of each block are wanted: they would be packed ones."""
        self._local.batch, self._local.wanted = None, bool(kwargs.get("output_hidden_states"))

    def after_blocks(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget the batch, also after an error."""
        self._local.batch, self._local.wanted = None, False

    def before_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pack the hidden states before the first block, and rotary embeddings before each."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if module is self._first:
            mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
            wanted = self._owner.config.output_hidden_states or kwargs.get("output_hidden_states")
            padded = wanted or getattr(self._local, "wanted", False)
            self._local.batch, self._local.rotary = None if padded else self._find(mask, hidden), {}
        batch = self.batch
        if batch is None:
            return None
        if module is self._first and args:
            args = (batch.pack(hidden), *args[1:])
        elif module is self._first:
            kwargs = {**kwargs, "hidden_states": batch.pack(hidden)}
        rotary = kwargs.get("position_embeddings")
        if rotary is not None:
            known: dict[int, Any] = self._local.rotary  # by the id of the padded ones, which the model holds on to
            if id(rotary) not in known:
                known[id(rotary)] = tuple(map(batch.pack, rotary))
            kwargs = {**kwargs, "position_embeddings": known[id(rotary)]}
        return args, kwargs

    def after_last_block(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Pad the hidden states again."""
        batch, self._local.batch = self.batch, None
        if batch is None:
            return None
        return (batch.unpack(output[0]), *output[1:]) if isinstance(output, tuple) else batch.unpack(output)

    def _find(self, mask: Any, hidden: Tensor) -> PackedBatch | None:
        """Return where the valid tokens are, by the mask that the first block gets; None: nothing is to be packed."""
        if not isinstance(mask, Tensor) or mask.ndim != 4 or torch.compiler.is_compiling():
            return None
        if self._owner.training and self._owner.is_gradient_checkpointing:  # blocks run again in the backward pass
            return None
        # A token that no query may see is padding.
        seen = mask[:, 0, 0] if mask.stride(-2) == 0 or mask.shape[-2] == 1 else mask.amax((1, 2))
        keep = (~hides(seen)).expand(hidden.shape[:2])
        return PackedBatch.of(keep) if bool(keep.any()) and not bool(keep.all()) else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in vars(self).items() if name != "_local"}  # of a copy, nothing runs

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())


class PackableEncoder(NamedTuple):
    """An encoder whose batches can run without padding."""

    owner: PreTrainedModel
    runner: nn.Module  #: runs the blocks: the owner, or a part of it
    blocks: dict[int, nn.Module]  #: by id, in the order in which they run
    layers: list[int]  #: numbers of its attention layers in the model

    def install(self, states: Sequence[HasPacking], undo: list[Callable[[], None]]) -> None:
        """Remove padding; add functions to `undo` that end that. states: of all attention layers of the model."""
        blocks = list(self.blocks.values())
        packing = Packing(self.owner, blocks)

        def remove(held: list[Packing]) -> None:
            if packing in held:  # `restore(model)` may have been faster
                held.remove(packing)

        for number in self.layers:
            held = states[number].packing
            undo.append(functools.partial(remove, held))
            held.append(packing)
        undo += packing.install(self.runner, blocks)


def packable_encoders(model: nn.Module, layers: list[AttentionLayer]) -> list[PackableEncoder]:
    """Return the encoders in a model, or raise where padding cannot be removed from one of its attention layers."""
    found: dict[int, PackableEncoder] = {}
    for layer in layers:
        owner, runner, block = _around(model, layer.name)
        if owner is None or runner is None or block is None or type(owner).__name__ not in ENCODERS:
            raise Unsupported(_refusal(model if owner is None else owner, layer))
        if layer.causal or layer.cross or layer.unsupported is not None:
            why = layer.unsupported or ("it is causal" if layer.causal else "it is cross attention")
            raise Unsupported(f"padding='remove': {layer.name}: {why}; use padding='keep'")
        if getattr(owner.config, "chunk_size_feed_forward", 0):
            raise Unsupported(
                "padding='remove': the model's config sets chunk_size_feed_forward, and a pack has any number of "
                "tokens; set it to 0, or use padding='keep'"
            )
        encoder = found.setdefault(id(owner), PackableEncoder(owner, runner, {}, []))
        encoder.blocks[id(block)] = block
        encoder.layers.append(layer.index)
    return list(found.values())


def is_packing(hook: Any) -> bool:
    """Return whether a hook is one of `Packing`."""
    return isinstance(getattr(hook, "__self__", None), Packing)


def _around(model: nn.Module, name: str) -> tuple[PreTrainedModel | None, nn.Module | None, nn.Module | None]:
    """Return what is around an attention layer: the innermost pretrained model, what runs its blocks, and the block."""
    owner = model if isinstance(model, PreTrainedModel) else None
    runner, block, before, parent = None, None, None, model
    for part in name.split("."):
        inner = getattr(parent, part)
        if isinstance(inner, PreTrainedModel):
            owner, runner, block = inner, None, None
        elif block is None and isinstance(parent, nn.ModuleList):
            runner, block = before, inner
        before, parent = parent, inner
    return owner, runner, block


def _refusal(owner: nn.Module, layer: AttentionLayer) -> str:
    kind = type(owner).__name__
    if kind in _IMAGES:
        return f"padding='remove': {kind} reads images, which have no padding; use padding='keep'"
    return (
        f"padding='remove': {layer.name} is in {kind}, whose other layers may look at the batch too; padding can be "
        f"removed from {', '.join(ENCODERS)}; use padding='keep'"
    )
