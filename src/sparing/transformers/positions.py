"""Longer inputs for models with learned positions: repeat the pretrained rows, as Longformer and YOSO did."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparing.contract import Unsupported
from sparing.models.sentences import is_sentence_model, parts_of

_FIELD = "max_position_embeddings"  # families with another name (n_positions) map this one to it
_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe")
_POSITION = re.compile(r"(^|_)(pos|positions?|positional|wpe)(_|$)")
_POSITION_CLASS = re.compile(r"Position(al)?(Embedding|Encoding)")
_ELSEWHERE = re.compile(r"(^|_)(rel|relative|rotary)(_|$)|Rel(ative)?[A-Z]|Rotary")  # inside the attention


class _Table(NamedTuple):
    """A position embedding: `reserved` rows for other uses (padding, offset), then one row per position."""

    name: str
    module: nn.Embedding
    reserved: int
    fixed: bool  # computed by a formula, not learned

    @property
    def positions(self) -> int:
        return self.module.weight.shape[0] - self.reserved


def extend_positions(model: Any, length: int) -> Any:
    """Make a Hugging Face model with learned position embeddings run on inputs of `length` tokens, in place.

        row[p] = pretrained row[p mod n]      for positions p = 0 ... length - 1, n of them pretrained

    Longformer was made from RoBERTa in this way (Beltagy et al. 2020), and YOSO-4096 from YOSO-512 (Zeng et al. 2021).
    Inputs of the old length give the same output, bit for bit. Longer inputs run, but need further training for good
    results.

    Rows that are not positions stay first: RoBERTa's two, which `config.max_position_embeddings` counts (4098 for a
    length of 4096), and the two of BART, OPT and YOSO, which it does not count. Both tables of an encoder-decoder are
    extended; a sinusoidal table is continued by its own formula. The config, and everything else whose size depends on
    it (position ids, token types, causal masks), are changed too, so `save_pretrained` and `from_pretrained` agree.
    Models without a position table (rotary as in Llama and ModernBERT, T5's relative ones) are returned unchanged. Any
    other layout, such as an image's grid, raises `Unsupported` with the name of the module, and nothing is changed.

    The tables become new parameters: create the optimizer afterwards. The tokenizer keeps its limit; for truncation at
    the new length set `tokenizer.model_max_length = length` too.

    model: a `transformers.PreTrainedModel`; of a model made of several, such as CLIP, the part that reads the text. Of
        a model of sentence-transformers the encoder inside is extended, and `max_seq_length` is set to the new length.
    length: tokens per input. The model's present length changes nothing, a smaller one raises.
    Returns the model.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    >>> model = sparing.extend_positions(BertModel(BertConfig(**sizes)), 2048)
    >>> model(torch.ones(1, 2048, dtype=torch.long)).last_hidden_state.shape
    torch.Size([1, 2048, 32])
    """
    if is_sentence_model(model):
        extend_positions(parts_of(model).model, length)
        model.max_seq_length = length
        return model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, got {type(model).__name__}; pass the one inside"
        )
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise TypeError(f"length={length!r} must be a positive integer, the number of tokens")
    tables = [_table(model, name, part) for name, part in _position_parts(model)]
    if not tables:
        if not _needs_no_table(model):
            raise Unsupported(_without_table(model))
        return model
    present = min(table.positions for table in tables)
    if length == present:
        return model
    if length < present:
        raise ValueError(f"length={length} is below the {present} positions of {tables[0].name}; rows are only added")
    for apply in _changes(model, tables, length):
        apply()
    return model


def check_learned_positions(model: nn.Module) -> Callable[[], None]:
    """Let tables of learned positions raise an error that names them, where torch's says no more than "out of range".

    Returns a function that removes the checks.
    """
    parts = [(name, part) for name, part in _position_parts(model) if type(part) is nn.Embedding]
    hooks = [part.register_forward_pre_hook(partial(_check_rows, name)) for name, part in parts]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def is_position_check(hook: Any) -> bool:
    """Return whether a hook is one of `check_learned_positions`."""
    return isinstance(hook, partial) and hook.func is _check_rows


def _check_rows(name: str, table: Any, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor) or not args[0].numel():
        return
    if args[0].device.type == "cpu" and (last := int(args[0].max())) >= table.num_embeddings:
        raise ValueError(
            f"{name}: position {last}, but the model has {table.num_embeddings} learned positions; shorten the text, "
            "or call sparing.extend_positions(model, length)"
        )


def _position_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield everything that looks like a table of positions: modules, and bare parameters or buffers."""
    seen: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(seen):
            continue
        kind, attribute = type(module).__name__, name.rpartition(".")[2]
        if _ELSEWHERE.search(attribute) or _ELSEWHERE.search(kind):
            continue
        tensors = (*module.parameters(), *module.buffers())
        if _POSITION.search(attribute) or _POSITION_CLASS.search(kind):
            seen += (f"{name}.",)
            if any(tensor.is_floating_point() for tensor in tensors) and not _grows(module):
                yield name, module
            continue
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor.is_floating_point() and _POSITION.search(key) and not _ELSEWHERE.search(key):
                yield f"{name}.{key}".lstrip("."), tensor


def _grows(module: nn.Module) -> bool:
    """Return whether the module is a sinusoidal table that its own forward lengthens (FSMT, M2M100, XGLM)."""
    return "Sinusoid" in type(module).__name__ and (hasattr(module, "make_weight") or hasattr(module, "make_weights"))


def _needs_no_table(model: nn.Module) -> bool:
    """Return whether the model computes its positions for any length."""
    return any(
        "Rotary" in type(part).__name__ or name.endswith("relative_attention_bias") or _grows(part)
        for name, part in model.named_modules()
    )


def _without_table(model: nn.Module) -> str:
    parts = [f"{name} ({type(m).__name__})" for name, m in model.named_modules() if _ELSEWHERE.search(type(m).__name__)]
    seen = f"; its positions seem to be in {parts[0]}" if parts else ""
    return f"{type(model).__name__} has no learned position table that extend_positions knows{seen}; use it as it is"


def _table(model: Any, name: str, part: Any) -> _Table:
    """Return the table, or raise an error with its name if its layout is unknown."""
    label = f"{name} ({type(part).__name__})"
    path, _, attribute = name.rpartition(".")
    kind, parent = type(part), model.get_submodule(path)
    fixed = "Sinusoid" in kind.__name__ or any(
        getattr(model.config, flag, False) for flag in ("sinusoidal_pos_embds", "sinusoidal_embeddings")
    )
    if not (
        attribute in _TABLES
        and isinstance(part, nn.Embedding)
        and (kind is nn.Embedding or fixed or kind.__name__.endswith("LearnedPositionalEmbedding"))
    ):
        raise Unsupported(f"{label} is not a table with one learned row per token; extend_positions cannot lengthen it")
    if part.weight.is_meta:
        raise Unsupported(f"{label} is on the meta device; load its weights first")
    stored = getattr(model.config, _FIELD, None)
    if not isinstance(stored, int):
        raise Unsupported(
            f"{label} is not sized by {_FIELD}, which {type(model.config).__name__} does not have; pass the part of "
            "the model that reads the text, if there is one"
        )
    offset = getattr(part, "offset", None)
    if isinstance(offset, int):
        reserved = offset
    elif part.padding_idx is not None and part.padding_idx == getattr(parent, "padding_idx", None):
        reserved = part.padding_idx + 1  # positions start after the padding row
    elif part.padding_idx is None:
        ids = getattr(parent, "position_ids", None)
        reserved = int(ids.flatten()[0]) if isinstance(ids, Tensor) else 0
    else:
        raise Unsupported(
            f"{label} has padding_idx={part.padding_idx}, which {type(parent).__name__} does not count from"
        )
    rows = part.weight.shape[0]
    if rows not in (stored, stored + reserved) or rows <= reserved:
        raise Unsupported(
            f"{label} has {rows} rows, {reserved} of them reserved, which does not fit config.{_FIELD}={stored}"
        )
    return _Table(name, part, reserved, fixed)


def _changes(model: Any, tables: list[_Table], length: int) -> list[Callable[[], object]]:
    """Return all assignments, ready to run; every check and every allocation comes before the first of them.

    What depends on the length is found by the model's own constructor: two models without storage, one with the old
    config and one with the new, differ in nothing else.
    """
    stored = getattr(model.config, _FIELD)
    longer = stored + length - tables[0].positions
    old, new = _skeleton(model, stored), _skeleton(model, longer)
    here, before, after = _tensors(model), _tensors(old), _tensors(new)
    for name in before.keys() ^ after.keys():
        raise Unsupported(f"{type(model).__name__} is built differently for {_FIELD}={longer}: see {name}")
    sized = [name for name in after if name in here and before[name].shape != after[name].shape]
    table_of = {id(table.module.weight): table for table in tables}
    grown: dict[int, Tensor] = {}  # by the old tensor's id, so that tied tensors stay tied
    for name in sized:
        tensor, table = here[name], table_of.get(id(here[name]))
        if tensor.shape != before[name].shape:
            raise Unsupported(f"{name} has shape {list(tensor.shape)}, and by its config {list(before[name].shape)}")
        if id(tensor) not in grown:
            if table is not None and not table.fixed:
                value = _tiled(table, length)
            else:
                value = _computed(new, name, tensor, fixed=table is not None)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            grown[id(tensor)] = value
        rows, expected = grown[id(tensor)].shape[0], after[name].shape[0]
        if rows != expected:
            raise Unsupported(
                f"{name} would have {rows} rows where the model expects {expected}: its tables count positions "
                "differently; extend_positions cannot lengthen it"
            )
    for table in tables:
        if id(table.module.weight) not in grown:
            raise Unsupported(f"{table.name} does not follow config.{_FIELD}; extend_positions cannot lengthen it")
    for name in here.keys() - set(sized):
        if id(here[name]) in grown:
            raise Unsupported(f"{name} shares the memory of a position table but is not one; untie it first")
    changes = [_setting(*_owner(model, name), grown[id(here[name])]) for name in sized]
    return changes + _numbers(model, old, new) + _configs(model, stored, longer)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _skeleton(model: Any, stored: int) -> Any:
    config = copy.deepcopy(model.config)
    setattr(config, _FIELD, stored)
    config._attn_implementation = "eager"  # no shape depends on it, and others may need a GPU
    try:
        with torch.device("meta"):
            return type(model)(config)
    except Exception as error:
        raise Unsupported(
            f"{type(model).__name__} cannot be made from its config with {_FIELD}={stored}: {error}"
        ) from error


def _tiled(table: _Table, length: int) -> Tensor:
    weight = table.module.weight.detach()
    positions = torch.arange(length, device=weight.device) % table.positions
    return torch.cat([weight[: table.reserved], weight[table.reserved :][positions]])


def _computed(skeleton: Any, name: str, old: Tensor, *, fixed: bool) -> Tensor:
    """Return a longer buffer or fixed table, computed by the model's own code; it must start with the present one."""
    if isinstance(old, nn.Parameter) and not fixed:
        raise Unsupported(f"{name} depends on the length too; extend_positions cannot lengthen it")
    owner, key = _owner(skeleton, name)
    empty = torch.zeros(getattr(owner, key).shape, dtype=old.dtype)
    setattr(owner, key, nn.Parameter(empty, requires_grad=False) if fixed else empty)
    # `from_pretrained` calls this for what a checkpoint lacks; some tables are filled by the module around them.
    path = name.rpartition(".")[0]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for part in (path, path.rpartition(".")[0]) if fixed else (path,):
            skeleton._init_weights(skeleton.get_submodule(part))
    value = getattr(owner, key).detach().to(old.device)
    present = tuple(slice(size) for size in old.shape)
    # A checkpoint's sines may differ in the last bit; its own rows are kept.
    slack = 2 * torch.finfo(old.dtype).eps if fixed else 0
    if not torch.allclose(value[present], old, rtol=0, atol=slack):
        raise Unsupported(f"{name} differs from what {type(skeleton).__name__} computes; it cannot be continued")
    value[present] = old.detach()
    return value


def _numbers(model: nn.Module, old: nn.Module, new: nn.Module) -> list[Callable[[], object]]:
    """Return changes of integers that modules copied from the config, as `num_embeddings` or BigBird's `max_seqlen`."""
    changes: list[Callable[[], object]] = []
    before, after = dict(old.named_modules()), dict(new.named_modules())
    for path, module in model.named_modules():
        if path not in before or path not in after:
            continue
        for key, value in vars(after[path]).items():
            was = vars(before[path]).get(key)
            if type(value) is int and type(was) is int and value != was and vars(module).get(key) == was:
                changes.append(_setting(module, key, value))
    return changes


def _configs(model: nn.Module, stored: int, longer: int) -> list[Callable[[], object]]:
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [_setting(config, _FIELD, longer) for config in configs.values() if getattr(config, _FIELD, None) == stored]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _setting(owner: Any, key: str, value: Any) -> Callable[[], object]:
    return lambda: setattr(owner, key, value)
