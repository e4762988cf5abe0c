"""An attention layer that owns the learned state of its method, where it has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.compiled import for_length
from sparing.contract import Method, Projection, Unsupported
from sparing.contract import method as _method
from sparing.draws import check_seed
from sparing.functional import attention
from sparing.mask import hides


class MultiheadAttention(nn.Module):
    """A drop-in for `torch.nn.MultiheadAttention`, with any method.

    The constructor takes the same names, and parameters have the same names and shapes, so that a `state_dict` of
    torch's module loads here; learned state of the method (Linformer's projection, a convolution) is in `state`.
    Differences: `need_weights` is False by default and only `exact` can return weights; a causal call needs
    `is_causal=True` alone, no mask. Inside `torch.nn.TransformerEncoderLayer` it runs as itself: torch's fused
    inference path, which would replace the method, is not taken.

    method: a `Method` or its spec string.
    max_length: the longest key sequence that the layer is made for: methods whose learned state depends on it need it
        (linformer), and `yoso` takes the number of its bits from it.
    seed: fixes all random choices, those of dropout too. None makes new choices at each call in training; in evaluation
        it uses one number, `evaluation_seed`, which is drawn from torch's generator when the layer is made, and saved
        with it. Layers of one model should not share a seed; copies of a layer do.

    >>> layer = sparing.nn.MultiheadAttention(64, 4, batch_first=True, method="nystrom(landmarks=16)")
    >>> x = torch.randn(2, 128, 64)
    >>> layer(x, x, x)[0].shape
    torch.Size([2, 128, 64])
    """

    #: False keeps torch's fused encoder layer, which looks here, from replacing the method by exact attention.
    _qkv_same_embed_dim = False
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    evaluation_seed: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str | Method = "exact",
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        self.method = _method(method)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout!r} must be a number from 0 to 1")
        check_seed(seed)
        if dropout > 0 and not self.method.supports.dropout:
            raise Unsupported(f"{self.method.name} has no attention dropout; set dropout=0.0 (got {dropout})")
        if (add_bias_kv or add_zero_attn) and self.method.supports.projection:
            raise Unsupported(
                f"{self.method.name} needs all values to come from one projection; set add_bias_kv=False and "
                "add_zero_attn=False"
            )
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn, self.seed = dropout, batch_first, add_zero_attn, seed
        self.max_length = max_length

        def weight(rows: int, width: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, width, **made))

        if self.kdim == embed_dim and self.vdim == embed_dim:
            self.in_proj_weight = weight(3 * embed_dim, embed_dim)
            for name in ("q", "k", "v"):
                self.register_parameter(f"{name}_proj_weight", None)
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = weight(embed_dim, embed_dim)
            self.k_proj_weight = weight(embed_dim, self.kdim)
            self.v_proj_weight = weight(embed_dim, self.vdim)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(3 * embed_dim, **made)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **made)
        extra = nn.Parameter(torch.empty(1, 1, embed_dim, **made)) if add_bias_kv else None
        self.register_parameter("bias_k", extra)
        self.register_parameter("bias_v", None if extra is None else nn.Parameter(torch.empty_like(extra)))
        self.reset_parameters()
        state = self.method.learned(num_heads, self.head_dim, self.head_dim, max_length)
        self.state = None if state is None else state.to(device=device, dtype=dtype)
        if self.method.supports.stochastic:
            with torch.random.fork_rng(devices=[]):  # later modules get the same initial weights with any method
                self.register_buffer("evaluation_seed", torch.randint(2**63 - 1, ()))

    def reset_parameters(self) -> None:
        """Initialise parameters as torch's module does."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(self, name) is not None:
                nn.init.xavier_uniform_(getattr(self, name))
        for tensor in (self.in_proj_bias, self.out_proj.bias):
            if tensor is not None:
                nn.init.zeros_(tensor)
        for tensor in (self.bias_k, self.bias_v):
            if tensor is not None:
                nn.init.xavier_normal_(tensor)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights or None). As in torch, masks are True (or -inf) where attention is *not* allowed.

        key_padding_mask is [B, n_k], attn_mask [n_q, n_k] or [B * H, n_q, n_k].
        """
        ranks = {t.ndim for t in (query, key, value)}
        if ranks not in ({2}, {3}):
            shapes = [list(t.shape) for t in (query, key, value)]
            raise ValueError(f"query, key and value must all have 3 dimensions (2 without a batch), got {shapes}")
        self_attention, unbatched = key is query, query.ndim == 2
        if unbatched or not self.batch_first:
            query, key, value = (t.unsqueeze(0) if unbatched else t.transpose(0, 1) for t in (query, key, value))
        if unbatched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)

        wq, wk, wv = self._weights()
        bq, bk, bv = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k = self._split(F.linear(query, wq, bq)), F.linear(key, wk, bk)
        projection = self.method.supports.projection
        v = value if projection else F.linear(value, wv, bv)
        extra = 0
        if self.bias_k is not None:
            pairs = ((k, self.bias_k), (v, self.bias_v))
            k, v = (torch.cat([t, b.to(t).expand(len(t), -1, -1)], dim=1) for t, b in pairs if b is not None)
            extra += 1
        if self.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(t.shape[0], 1, t.shape[2])], dim=1) for t in (k, v))
            extra += 1
        k = self._split(k)
        mask, is_causal = self._mask(key_padding_mask, attn_mask, is_causal, q, k, extra)
        seed = self.seed
        if seed is None and not self.training and self.method.supports.stochastic:
            seed = int(self.evaluation_seed)
        call: dict[str, Any] = {
            "attn_mask": mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "method": for_length(self.method, self.max_length),
            "seed": seed if seed is not None or not need_weights else int(torch.randint(2**63 - 1, ())),
        }
        if not self_attention and q.shape[2] == k.shape[2]:
            call["query_mask"] = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        if self_attention and extra and key_padding_mask is not None and self.method.name != "exact":
            # With extra keys n_q != n_k, so attention() cannot infer padded queries from padded keys.
            padded = key_padding_mask if key_padding_mask.dtype == torch.bool else hides(key_padding_mask)
            call["query_mask"] = ~padded
        given = Projection(v, wv, bv).map(lambda t: t.to(q)) if projection else self._split(v)
        out = attention(q, k, given, state=self.state, **call)
        weights = None
        if need_weights:
            if self.method.name != "exact":
                raise Unsupported(f"{self.method.name} has no attention weights to return; set need_weights=False")
            rows = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
            weights = attention(q, k, rows, **call)  # attending to the rows of the identity yields the weights
            weights = weights.mean(1) if average_attn_weights else weights
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        missing = lists[0]
        if f"{prefix}evaluation_seed" in missing:  # a state_dict of torch's module has none: the layer keeps its own
            missing.remove(f"{prefix}evaluation_seed")

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            wq, wk, wv = self.in_proj_weight.chunk(3)
            return wq, wk, wv
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _split(self, x: Tensor) -> Tensor:
        """Split heads: [B, n, H * d] -> [B, H, n, d]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor, extra: int
    ) -> tuple[Tensor | None, bool]:
        """Turn torch's masks (True or -inf hides) into ours (True shows, or additive); all see the `extra` keys."""
        batch, n_q, n_k = q.shape[0], q.shape[2], k.shape[2] - extra
        causal = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril() if is_causal else None
        if attn_mask is not None:
            shapes = [(n_q, n_k), (batch * self.num_heads, n_q, n_k)]
            if tuple(attn_mask.shape) not in shapes:
                raise ValueError(f"attn_mask {list(attn_mask.shape)} must have one of the shapes {shapes}")
            attn_mask = attn_mask.view(-1, 1, n_q, n_k) if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, -1))
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
            if causal is not None:
                shown = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
                hidden = ~shown if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
                if not bool(((shown == causal) & (hidden == ~causal)).all()):
                    raise ValueError("is_causal=True, but attn_mask is not the causal mask; pass one of the two")
                attn_mask = None
        if padding is not None:
            if tuple(padding.shape) != (batch, n_k):
                raise ValueError(f"key_padding_mask {list(padding.shape)} must be [{batch}, {n_k}]")
            if padding.dtype != torch.bool and not padding.is_floating_point():
                raise TypeError(f"key_padding_mask has dtype {padding.dtype}; use boolean (True = padded) or additive")
            padding = (~padding if padding.dtype == torch.bool else padding)[:, None, None, :]
        if causal is not None and extra:  # the extra keys stand after the last token, and every query sees them
            attn_mask, is_causal = causal[None, None], False
        parts = [_show_extra(m, extra) for m in (padding, attn_mask) if m is not None]
        if len(parts) == 2 and any(m.dtype != torch.bool for m in parts):
            parts = [m if m.dtype != torch.bool else q.new_zeros(m.shape).masked_fill(~m, -torch.inf) for m in parts]
            return parts[0] + parts[1], is_causal
        return (parts[0] & parts[1] if len(parts) == 2 else parts[0] if parts else None), is_causal

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, method={self.method}"


def _show_extra(mask: Tensor, extra: int) -> Tensor:
    return F.pad(mask, (0, extra), value=True if mask.dtype == torch.bool else 0.0)
