"""Public implementations of the same methods, if they are installed: never a dependency.

They are modules with projections of their own. What is timed is their attention alone, on the same q, k and v: each
projection is replaced by a stand-in that hands out a tensor which was laid out for it beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from sparing.contract import Method
from sparing.methods.linformer.method import Linformer
from sparing.methods.lsh.method import Lsh
from sparing.methods.nystrom.method import Nystrom
from sparing.methods.random_features import RandomFeatures
from sparing.methods.window.method import Window
from sparing.workbench.benchmark.workload import AttentionInputs, Workload


class CannotRun(Exception):
    """The implementation does not cover these sizes, or this machine lacks what it needs."""


@dataclass(frozen=True)
class Peer:
    """One implementation: `build` makes it compute a method of sparing on given inputs."""

    name: str
    package: str  #: the distribution that holds it
    covers: Callable[[Method], bool]
    build: Callable[[Any, AttentionInputs], Workload]
    backward: bool = True

    def version(self) -> str | None:
        """Return the version of the installed package, or None."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


class Given(nn.Module):
    """A stand-in for a projection: return the prepared tensor for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | None:
        return self.tensor


def tokens_first(x: Tensor) -> Tensor:
    """Return [B, H, n, d] as [B, n, H d], as a projection returns it."""
    return x.transpose(1, 2).flatten(2)


def _replace(module: nn.Module, *names: str) -> list[Given]:
    """Replace projections by stand-ins; the other projections have no part in the attention."""
    stand_ins = [Given() for _ in names]
    for name, stand_in in zip(names, stand_ins, strict=True):
        setattr(module, name, stand_in)
    return stand_ins


def _divides(length: int, by: int) -> None:
    if length % by:
        raise CannotRun(f"it needs a multiple of {by} tokens")


def _hf_nystrom(method: Nystrom, inputs: AttentionInputs) -> Workload:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    _, heads, length, width = inputs.q.shape
    _divides(length, method.landmarks)
    config = NystromformerConfig(
        hidden_size=heads * width, num_attention_heads=heads, num_landmarks=method.landmarks,
        segment_means_seq_len=length, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = NystromformerSelfAttention(config).eval()
    module.conv_kernel_size = None
    return _by_stand_ins(module, _replace(module, "query", "key", "value"), inputs)


def _by_stand_ins(module: nn.Module, stand_ins: list[Given], inputs: AttentionInputs, **arguments: Any) -> Workload:
    """Return the workload of a module whose stand-ins take q, k and v as [B, n, H d]."""
    x = tokens_first(inputs.q)  # only its sizes are used

    def compute(*leaves: Tensor) -> Tensor:
        for stand_in, leaf in zip(stand_ins, leaves, strict=True):
            stand_in.tensor = leaf
        out = module(x, **arguments)
        return out if isinstance(out, Tensor) else out[0]

    return Workload(compute, tuple(tokens_first(y) for y in (inputs.q, inputs.k, inputs.v)))


def _package_nystrom(method: Nystrom, inputs: AttentionInputs) -> Workload:
    from nystrom_attention import NystromAttention

    _, heads, length, width = inputs.q.shape
    _divides(length, method.landmarks)  # else it computes on padding too
    module = NystromAttention(
        heads * width, dim_head=width, heads=heads, num_landmarks=method.landmarks,
        pinv_iterations=method.iterations, residual=False,
    ).eval()  # fmt: skip
    module.to_out = nn.Identity()
    (stand_in,) = _replace(module, "to_qkv")
    x = tokens_first(inputs.q)

    def compute(qkv: Tensor) -> Tensor:
        stand_in.tensor = qkv
        return module(x)

    return Workload(compute, (torch.cat([tokens_first(y) for y in (inputs.q, inputs.k, inputs.v)], dim=-1),))


def _hf_longformer(method: Window, inputs: AttentionInputs) -> Workload:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    batch, heads, length, width = inputs.q.shape
    _divides(length, method.size)
    config = LongformerConfig(
        hidden_size=heads * width, num_attention_heads=heads, attention_window=[method.size],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = LongformerSelfAttention(config, layer_id=0).eval()
    stand_ins = _replace(module, "query", "key", "value")
    x = tokens_first(inputs.q)
    nothing = torch.zeros(batch, length)

    def compute(*leaves: Tensor) -> Tensor:
        for stand_in, leaf in zip(stand_ins, leaves, strict=True):
            stand_in.tensor = leaf.transpose(0, 1)  # it works on [n, B, H d]
        stand_ins[0].tensor = leaves[0].transpose(0, 1).clone()  # it scales its queries in place
        return module(
            x, attention_mask=nothing, is_index_masked=nothing > 0, is_index_global_attn=nothing > 0,
            is_global_attn=False,
        )[0]  # fmt: skip

    return Workload(compute, tuple(tokens_first(y) for y in (inputs.q, inputs.k, inputs.v)))


def _flex(method: Window, inputs: AttentionInputs) -> Workload:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    length, half, block = inputs.q.shape[-2], method.size // 2, 128
    _divides(length, block)
    count, reach = length // block, -(-half // block)
    near = torch.arange(count)[:, None] + torch.arange(-reach, reach + 1)  # blocks of keys for each block of queries
    inside = (near >= 0) & (near < count)
    order = (~inside).long().argsort(dim=-1, stable=True)  # those that exist come first
    index = torch.zeros(count, count, dtype=torch.int32)
    chosen = near.clamp(0, count - 1).gather(-1, order).int()[:, :count]
    index[:, : chosen.shape[-1]] = chosen

    def in_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= half

    mask = BlockMask.from_kv_blocks(
        inside.sum(-1).int()[None, None], index[None, None], BLOCK_SIZE=block, mask_mod=in_window,
        seq_lengths=(length, length),
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask)

    try:
        with torch.no_grad():
            compute(inputs.q, inputs.k, inputs.v)  # compiles
    except Exception as error:
        raise CannotRun(f"torch.compile failed: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    return Workload(compute, (inputs.q, inputs.k, inputs.v))


def _hf_reformer(method: Lsh, inputs: AttentionInputs) -> Workload:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    _, heads, length, width = inputs.q.shape
    _divides(length, method.chunk)
    config = ReformerConfig(
        hidden_size=heads * width, num_attention_heads=heads, attention_head_size=width, num_hashes=method.rounds,
        lsh_attn_chunk_length=method.chunk, lsh_num_chunks_before=1, lsh_num_chunks_after=0, num_buckets=None,
        lsh_attention_probs_dropout_prob=0.0, max_position_embeddings=length, is_decoder=False, hash_seed=0,
    )  # fmt: skip
    module = LSHSelfAttention(config, layer_idx=0).eval()
    log = logging.getLogger(LSHSelfAttention.__module__)
    before = log.level
    log.setLevel(logging.ERROR)  # it warns that it chooses the number of buckets, as it should
    module._set_num_buckets(length)
    log.setLevel(before)
    stand_ins = _replace(module, "query_key", "value")
    x = tokens_first(inputs.q)

    def compute(*leaves: Tensor) -> Tensor:
        for stand_in, leaf in zip(stand_ins, leaves, strict=True):
            stand_in.tensor = leaf
        return module(x).hidden_states

    return Workload(compute, (tokens_first(inputs.q), tokens_first(inputs.v)))  # queries are its keys


def _package_reformer(method: Lsh, inputs: AttentionInputs) -> Workload:
    from reformer_pytorch import LSHAttention

    _divides(inputs.q.shape[-2], 2 * method.chunk)
    module = LSHAttention(bucket_size=method.chunk, n_hashes=method.rounds, causal=False).eval()
    return Workload(lambda qk, v: module(qk, v)[0], (inputs.q.flatten(0, 1), inputs.v.flatten(0, 1)))


def _package_performer(method: RandomFeatures, inputs: AttentionInputs) -> Workload:
    from performer_pytorch import FastAttention

    module = FastAttention(dim_heads=inputs.q.shape[-1], nb_features=method.features, causal=False).eval()
    return Workload(module, (inputs.q, inputs.k, inputs.v))


def _package_linformer(method: Linformer, inputs: AttentionInputs) -> Workload:
    from linformer import LinformerSelfAttention

    _, heads, length, width = inputs.q.shape
    module = LinformerSelfAttention(heads * width, length, k=method.rank, heads=heads, dim_head=width).eval()
    module.to_out = nn.Identity()
    work = _by_stand_ins(module, _replace(module, "to_q", "to_k", "to_v"), inputs)
    return work._replace(parameters=(module.proj_k, module.proj_v))


def _is_window(method: Method) -> bool:
    return isinstance(method, Window) and method.size > 0 and not method.sinks and not method.global_tokens


def _is_nystrom(method: Method, steps: int | None = None) -> bool:
    plain = isinstance(method, Nystrom) and method.solver == "iterative" and method.convolution is None
    return plain and (steps is None or getattr(method, "iterations", None) == steps)


PEERS: tuple[Peer, ...] = (
    Peer("transformers Nystromformer", "transformers", lambda m: _is_nystrom(m, steps=6), _hf_nystrom),
    Peer("nystrom-attention", "nystrom-attention", _is_nystrom, _package_nystrom),
    Peer("transformers Longformer", "transformers", _is_window, _hf_longformer),
    Peer("FlexAttention", "torch", _is_window, _flex, backward=False),
    Peer("transformers Reformer", "transformers", lambda m: isinstance(m, Lsh) and m.buckets is None, _hf_reformer),
    Peer("reformer-pytorch", "reformer-pytorch", lambda m: isinstance(m, Lsh) and m.buckets is None, _package_reformer),
    Peer("performer-pytorch", "performer-pytorch", lambda m: isinstance(m, RandomFeatures) and m.orthogonal,
         _package_performer),
    Peer("linformer", "linformer", lambda m: isinstance(m, Linformer) and m.projection == "random", _package_linformer),
)  # fmt: skip


def peers_of(method: Method) -> list[Peer]:
    """Return the public implementations of the same method, installed or not."""
    return [peer for peer in PEERS if peer.covers(method)]
