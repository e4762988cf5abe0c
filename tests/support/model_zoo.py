"""Small random models of the architectures that sparing names, with inputs that have padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bert": ("BertModel", lambda: transformers.BertConfig(**TOKENS, **SMALL)),
    "roberta": ("RobertaModel", lambda: transformers.RobertaConfig(**TOKENS, **SMALL)),
    "distilbert": (
        "DistilBertModel",
        lambda: transformers.DistilBertConfig(**TOKENS, dim=64, n_heads=4, n_layers=2, hidden_dim=64),
    ),
    "vit": ("ViTModel", lambda: transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)),
    "gpt2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(**TOKENS, n_embd=64, n_head=4, n_layer=2)),
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TOKENS, num_key_value_heads=2, **SMALL)),
    "mistral": (
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**TOKENS, num_key_value_heads=2, sliding_window=8, **SMALL),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            **TOKENS, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], **SMALL,
        ),
    ),
    "modernbert": (
        "ModernBertModel",
        lambda: transformers.ModernBertConfig(
            **TOKENS, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2, **SMALL
        ),
    ),
    "bart": ("BartModel", lambda: transformers.BartConfig(**TOKENS, **ENCODER_DECODER)),
    "whisper": (
        "WhisperModel",
        lambda: transformers.WhisperConfig(**TOKENS, **ENCODER_DECODER, num_mel_bins=8, max_source_positions=50),
    ),
    "t5": (
        "T5Model",
        lambda: transformers.T5Config(
            vocab_size=100, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
    ),
    "mpnet": ("MPNetModel", lambda: transformers.MPNetConfig(**TOKENS, **SMALL)),
    "yoso": ("YosoModel", lambda: transformers.YosoConfig(**TOKENS, **SMALL, max_position_embeddings=128)),
    "longformer": (
        "LongformerModel",
        lambda: transformers.LongformerConfig(**TOKENS, **SMALL, attention_window=8, max_position_embeddings=130),
    ),
    "nystromformer": (
        "NystromformerModel",
        lambda: transformers.NystromformerConfig(**TOKENS, **SMALL, max_position_embeddings=128),
    ),
    "bigbird": ("BigBirdModel", lambda: transformers.BigBirdConfig(**TOKENS, **SMALL, block_size=4)),
    "reformer": (
        "ReformerModel",
        lambda: transformers.ReformerConfig(
            vocab_size=100, hidden_size=64, num_attention_heads=4, attention_head_size=16, feed_forward_size=64,
            attn_layers=["lsh", "local"], axial_pos_shape=(4, 8), axial_pos_embds_dim=(32, 32), is_decoder=False,
        ),
    ),
}  # fmt: skip

CAUSAL = ("gpt2", "llama")
THROUGH_THE_HOOK = (
    "bert", "roberta", "distilbert", "vit", "gpt2", "llama", "modernbert", "bart", "whisper", "t5"
)  # fmt: skip


def build(name: str, **changes: Any) -> nn.Module:
    """The model in evaluation mode, with weights that are large enough for attention to matter."""
    kind, config = CONFIGS[name]
    made = config()
    for key, value in changes.items():
        setattr(made, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    return model


def tokens(length: int = 24, batch: int = 2) -> Tensor:
    return torch.randint(5, 95, (batch, length), generator=torch.Generator().manual_seed(1))


def inputs(name: str, length: int = 24) -> dict[str, Tensor]:
    """A batch of two; the first item has seven padded tokens, on the left for causal models."""
    ids = tokens(length)
    mask = torch.ones_like(ids)
    mask[0, length - 7 :] = 0
    if name in CAUSAL:
        mask = mask.flip(1)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))}
    if name == "whisper":
        sound = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(2))
        return {"input_features": sound, "decoder_input_ids": ids}
    if name in ("bart", "t5"):
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(9)}
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def run(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The first output: hidden states or logits."""
    return model(**given)[0]


def valid(name: str, given: dict[str, Tensor], out: Tensor) -> Tensor:
    """The outputs of tokens that are not padding, one row each."""
    mask = given.get("attention_mask")
    return out[mask.bool()] if mask is not None and mask.shape == out.shape[:2] else out.flatten(0, 1)


def state(model: nn.Module) -> tuple[Any, ...]:
    """Everything that approximate() may touch."""
    return (
        model.config._attn_implementation,
        model.config.to_dict(),
        {name: id(module) for name, module in model.named_modules()},
        {name: sorted(vars(module)) for name, module in model.named_modules()},
        {name: len(module._forward_hooks) for name, module in model.named_modules()},
        list(model.state_dict()),
    )
