"""extend_positions: tiled tables, unchanged old outputs, round trips through a folder, and refusals by name."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from sparing import Unsupported
from sparing.models import minilm
from sparing.transformers.positions import extend_positions

transformers = pytest.importorskip("transformers")

OLD, NEW = 24, 61  # not a multiple: the last copy is cut
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ENCODER = {**SMALL, "vocab_size": 99, "pad_token_id": 1}
CLIP_TEXT = {**ENCODER, "bos_token_id": 0, "eos_token_id": 2}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 2, "eos_token_id": 2}
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
TRANSLATOR = {
    **{f"encoder_{part}": size for part, size in SIDES.items()},
    **{f"decoder_{part}": size for part, size in SIDES.items()},
    "d_model": 32,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
SEQ2SEQ = {**TRANSLATOR, "vocab_size": 99}
MODERNBERT = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
DISTILBERT = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
GPT_NEO = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": OLD + 6,
}

#: model: (settings, rows before position 0, whether config.max_position_embeddings counts them)
LEARNED = {
    "BertModel": (ENCODER, 0, False),
    "BertForMaskedLM": (ENCODER, 0, False),
    "ElectraModel": ({**ENCODER, "embedding_size": 16}, 0, False),
    "AlbertModel": ({**ENCODER, "embedding_size": 16}, 0, False),
    "BigBirdModel": ({**ENCODER, "attention_type": "original_full"}, 0, False),
    "DistilBertModel": (DISTILBERT, 0, False),
    "RobertaModel": (ENCODER, 2, True),
    "XLMRobertaModel": ({**ENCODER, "pad_token_id": 4}, 5, True),
    "CamembertModel": (ENCODER, 2, True),
    "MPNetModel": (ENCODER, 2, True),
    "LongformerModel": ({**ENCODER, "attention_window": 8}, 2, True),
    "YosoModel": (ENCODER, 2, False),
    "NystromformerModel": (ENCODER, 2, False),
    "GPT2LMHeadModel": (GPT, 0, False),
    "OpenAIGPTModel": (GPT, 0, False),
    "GPTNeoModel": (GPT_NEO, 0, False),
    "OPTModel": ({**ENCODER, "word_embed_proj_dim": 32, "ffn_dim": 48}, 2, False),
    "BartModel": (SEQ2SEQ, 2, False),
    "BlenderbotModel": (SEQ2SEQ, 0, False),
    "CLIPTextModel": (CLIP_TEXT, 0, False),
}
FIXED = {
    "DistilBertModel": {**DISTILBERT, "sinusoidal_pos_embds": True},
    "MarianModel": SEQ2SEQ,
    "PegasusModel": SEQ2SEQ,
    "RoFormerModel": {**ENCODER, "embedding_size": 32},
}
TABLES = ("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe")


def make(name: str, settings: dict, rows: int = OLD):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**settings, max_position_embeddings=rows)).eval()


def learned(name: str):
    settings, reserved, counted = LEARNED[name]
    model = make(name, settings, OLD + reserved * counted)
    for table in position_tables(model).values():
        table.weight.data.mul_(20)  # as large as in trained models: a wrong row must show
    return model


def position_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    return {name: m for name, m in model.named_modules() if name.rpartition(".")[2] in TABLES}


def inputs(model, length: int, padded: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        ids[1, -padded:], mask[1, -padded:] = getattr(model.config, "pad_token_id", None) or 0, 0
    found = {"input_ids": ids, "attention_mask": mask}
    return {**found, "decoder_input_ids": ids} if model.config.is_encoder_decoder else found


@torch.no_grad()
def run(model, length: int, padded: int = 0) -> torch.Tensor:
    return model(**inputs(model, length, padded))[0]


def looked_up(model, length: int) -> list[torch.Tensor]:
    """What each table gives for the tokens of an unpadded input, in the model's own counting of positions."""
    rows: list[torch.Tensor] = []
    hooks = [
        table.register_forward_hook(
            lambda module, args, out: rows.append(out.reshape(-1, *out.shape[-2:])[-1, :length])
        )
        for table in position_tables(model).values()
    ]
    run(model, length)
    for hook in hooks:
        hook.remove()
    return rows


def assert_repeats(model, before: list[torch.Tensor]) -> None:
    after = looked_up(model, NEW)
    assert len(after) == len(before) > 0
    for new, old in zip(after, before):
        assert len(old.unique(dim=0)) == len(old) == OLD
        assert torch.equal(new, old[torch.arange(NEW) % OLD])


@pytest.mark.parametrize("name", LEARNED)
def test_longer_inputs_see_the_pretrained_positions_again_and_again(name):
    model = learned(name)
    before, output, padded = looked_up(model, OLD), run(model, OLD), run(model, OLD, padded=5)
    old = {path: table.weight.clone() for path, table in position_tables(model).items()}
    assert extend_positions(model, NEW) is model
    assert torch.equal(run(model, OLD), output)
    assert torch.equal(run(model, OLD, padded=5), padded)
    assert run(model, NEW).isfinite().all()
    assert_repeats(model, before)
    _, reserved, counted = LEARNED[name]
    for path, table in position_tables(model).items():
        assert table.num_embeddings == len(table.weight) == NEW + reserved
        assert torch.equal(table.weight[: len(old[path])], old[path])
    assert model.config.max_position_embeddings == NEW + reserved * counted


def test_the_check_of_repeats_rejects_other_extensions():
    """Rows counted from the table's start instead of the first position; and fresh rows, as a resize gives."""
    for broken in (lambda w: w[torch.arange(NEW + 2) % len(w)], lambda w: torch.cat([w, torch.randn(NEW - OLD, 32)])):
        model = learned("RobertaModel")
        before = looked_up(model, OLD)
        weight = model.embeddings.position_embeddings.weight.detach()
        extend_positions(model, NEW)
        model.embeddings.position_embeddings.weight.data = broken(weight)
        with pytest.raises(AssertionError):
            assert_repeats(model, before)


@pytest.mark.parametrize("name", [*LEARNED, "MarianModel"])
def test_saved_and_loaded_it_is_the_same_model(name, tmp_path):
    model = extend_positions(learned(name) if name in LEARNED else make(name, FIXED[name]), NEW)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    assert_same_parts(model, loaded)
    assert torch.equal(run(model, NEW), run(loaded.eval(), NEW))


def assert_same_parts(model, other) -> None:
    """All parameters, all buffers (those that are not saved too) and all numbers that modules keep."""
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        ours, theirs = dict(tensors(model)), dict(tensors(other))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
            assert tensor.dtype == theirs[name].dtype, name
    for (name, mine), (_, yours) in zip(model.named_modules(), other.named_modules()):
        numbers = [{k: v for k, v in vars(m).items() if type(v) is int} for m in (mine, yours)]
        assert numbers[0] == numbers[1], name
        assert mine._non_persistent_buffers_set == yours._non_persistent_buffers_set, name


def test_the_check_of_parts_sees_a_stale_buffer_and_a_stale_number():
    model = extend_positions(learned("BertModel"), NEW)
    for stale in ("position_ids", "token_type_ids"):
        other = copy.deepcopy(model)
        setattr(other.embeddings, stale, getattr(other.embeddings, stale)[:, :OLD])
        with pytest.raises(AssertionError):
            assert_same_parts(model, other)
    other = copy.deepcopy(model)
    other.embeddings.position_embeddings.num_embeddings = OLD
    with pytest.raises(AssertionError):
        assert_same_parts(model, other)


def test_a_local_window_wider_than_the_old_length_still_cuts():
    """GPT-Neo's local layers: the old mask shows no edge of the window, the new one must."""
    model = extend_positions(learned("GPTNeoModel"), NEW)
    mask, gap = model.h[1].attn.attention.bias[0, 0], torch.arange(NEW)[:, None] - torch.arange(NEW)
    assert torch.equal(mask, (gap >= 0) & (gap < OLD + 6))


@pytest.mark.parametrize("name", FIXED)
def test_sines_go_on_by_their_formula(name):
    model, long = make(name, FIXED[name]), make(name, FIXED[name], NEW)
    output, state = run(model, OLD), torch.get_rng_state()
    extend_positions(model, NEW)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(model, OLD), output)
    assert run(model, NEW).isfinite().all()
    for table, wanted in zip(position_tables(model).values(), position_tables(long).values()):
        assert torch.equal(table.weight, wanted.weight)
        assert not torch.equal(table.weight[OLD:NEW], table.weight[torch.arange(OLD, NEW) % OLD])


def test_sines_that_differ_in_the_last_bit_are_kept():
    """Another machine's sines: what there is stays, so that old outputs stay, and the formula adds the rest."""
    model = make("MarianModel", FIXED["MarianModel"])
    weight = model.encoder.embed_positions.weight
    weight.data[3] = torch.nextafter(weight.data[3], torch.tensor(2.0))
    kept, output = weight.clone(), run(model, OLD)
    extend_positions(model, NEW)
    assert torch.equal(model.encoder.embed_positions.weight[:OLD], kept)
    assert torch.equal(run(model, OLD), output)


def test_sines_that_were_trained_are_refused():
    model = make("DistilBertModel", FIXED["DistilBertModel"])
    model.embeddings.position_embeddings.weight.data[3, 3] += 1e-3
    refused(model, "embeddings.position_embeddings")


def snapshot(model) -> tuple[dict, dict, list]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ids = {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}
    return ids, model.config.to_dict(), [len(vars(m)) for m in model.modules()]


def refused(model, *names: str, length: int = 10_000, error: type[Exception] = Unsupported) -> None:
    before = snapshot(model)
    with pytest.raises(error) as caught:
        extend_positions(model, length)
    for name in names:
        assert name in str(caught.value)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", {**ENCODER, "max_position_embeddings": OLD}),
        ("ModernBertModel", {**ENCODER, **MODERNBERT, "max_position_embeddings": OLD}),
        ("T5Model", {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}),
        ("FSMTModel", {**TRANSLATOR, "src_vocab_size": 99, "tgt_vocab_size": 99, "max_position_embeddings": OLD}),
    ],
)
def test_models_without_a_table_come_back_unchanged(name, settings):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).eval()
    before = snapshot(model)
    assert extend_positions(model, NEW) is model
    assert snapshot(model) == before
    assert run(model, NEW).isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings", "part"),
    [
        ("ViTModel", {**ENCODER, "image_size": 8, "patch_size": 4}, "embeddings.position_embeddings"),
        (
            "CLIPModel",
            {"text_config": CLIP_TEXT, "vision_config": {**SMALL, "image_size": 8, "patch_size": 4}},
            "text_model.embeddings.position_embedding",
        ),
        ("WhisperModel", {**SEQ2SEQ, "bos_token_id": 2, "eos_token_id": 2}, "encoder.embed_positions"),
        ("ReformerModel", {"hidden_size": 32, "axial_pos_embds_dim": [8, 24]}, "embeddings.position_embeddings (Axial"),
        ("FunnelModel", {"vocab_size": 99, "d_model": 32, "block_sizes": [1]}, "encoder.blocks.0.0.attention"),
        ("XLNetModel", {"vocab_size": 99, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48}, "layer.0.rel_attn"),
        ("DebertaModel", {**ENCODER, "relative_attention": True, "pos_att_type": []}, "encoder.rel_embeddings"),
        ("LayoutLMModel", ENCODER, "embeddings.x_position_embeddings"),
        ("LxmertModel", {"hidden_size": 32, "num_attention_heads": 2}, "embeddings.position_embeddings"),
        ("ProphetNetModel", {"vocab_size": 99, "hidden_size": 32}, "encoder.position_embeddings"),
        ("GPTJModel", {**GPT, "rotary_dim": 8}, "h.0.attn.embed_positions"),
        (
            "LukeModel",
            {**ENCODER, "entity_vocab_size": 9, "entity_emb_size": 8},
            "entity_embeddings.position_embeddings",
        ),
        ("MambaModel", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1}, "MambaModel"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # DeBERTa's module, when it is imported
def test_other_layouts_are_refused_by_name(name, settings, part):
    kind = getattr(transformers, name)
    refused(kind(kind.config_class(**settings)), part)


def test_lengths_that_add_nothing_change_nothing_or_are_refused():
    model = learned("RobertaModel")
    before = snapshot(model)
    assert extend_positions(model, OLD) is model
    assert snapshot(model) == before
    refused(model, f"length={OLD - 1}", f"{OLD} positions", length=OLD - 1, error=ValueError)
    for length in (0, -3, 48.0, True, "48", None):
        refused(model, f"length={length!r}", length=length, error=TypeError)
    with pytest.raises(TypeError, match=re.escape("transformers.PreTrainedModel, got Linear")):
        extend_positions(nn.Linear(2, 2), NEW)


def test_dtype_gradient_and_padding_row_are_kept():
    model = learned("RobertaModel").to(torch.bfloat16)
    table = model.embeddings.position_embeddings
    table.weight.requires_grad_(False)
    extend_positions(model, NEW)
    assert (table.weight.dtype, table.weight.requires_grad, table.padding_idx) == (torch.bfloat16, False, 1)
    trained = extend_positions(learned("RobertaModel"), NEW).train()
    trained(**inputs(trained, NEW)).last_hidden_state.square().sum().backward()
    gradient = trained.embeddings.position_embeddings.weight.grad
    assert (gradient[:2] == 0).all()
    assert (gradient[2:] != 0).any(-1).all()


def test_extending_twice_repeats_the_table_of_the_first_time():
    once = extend_positions(learned("OPTModel"), 2 * OLD)
    twice = extend_positions(copy.deepcopy(once), 4 * OLD)
    direct = extend_positions(learned("OPTModel"), 4 * OLD)
    assert_same_parts(twice, direct)


def test_shared_tables_stay_shared():
    by_module, by_weight = learned("BartModel"), learned("BartModel")
    by_module.decoder.embed_positions = by_module.encoder.embed_positions
    by_weight.decoder.embed_positions.weight = by_weight.encoder.embed_positions.weight
    for model in (by_module, by_weight):
        before = looked_up(model, OLD)
        extend_positions(model, NEW)
        assert model.decoder.embed_positions.weight is model.encoder.embed_positions.weight
        assert len(looked_up(model, NEW)) == len(before)
        assert model.decoder.embed_positions.num_embeddings == NEW + 2
        assert run(model, NEW).isfinite().all()


def test_a_table_tied_to_something_else_is_refused():
    model = learned("BertModel")
    model.pooler.extra = nn.Embedding(OLD, 32)
    model.pooler.extra.weight = model.embeddings.position_embeddings.weight
    refused(model, "pooler.extra.weight")


def test_a_model_that_left_its_config_is_refused():
    model = learned("BertModel")
    model.config.max_position_embeddings = OLD + 1
    refused(model, "embeddings.position_embeddings", f"{OLD} rows", f"{OLD + 1}")


def test_an_error_while_building_changes_nothing(monkeypatch):
    model = learned("BartModel")
    monkeypatch.setattr("sparing.transformers.positions._numbers", lambda *models: 1 / 0)
    refused(model, error=ZeroDivisionError)


def test_the_parts_of_a_composite_model_are_extended_one_by_one(tmp_path):
    parts = (
        learned("RobertaModel"),
        make("BertLMHeadModel", {**ENCODER, "is_decoder": True, "add_cross_attention": True}),
    )
    model = transformers.EncoderDecoderModel(encoder=parts[0], decoder=parts[1]).eval()
    refused(model, "encoder.embeddings.position_embeddings", "EncoderDecoderConfig")
    extend_positions(model.encoder, NEW)
    extend_positions(model.decoder, NEW)
    assert run(model, NEW).isfinite().all()
    model.save_pretrained(tmp_path)
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert torch.equal(run(model, NEW), run(loaded, NEW))


def test_longformer_is_roberta_extended():
    """The recipe of the Longformer paper: 514 rows become 4098, by copies of the 512 that are positions."""
    model = make("RobertaModel", {**ENCODER, "num_hidden_layers": 1}, 514)
    old = model.embeddings.position_embeddings.weight.clone()
    extend_positions(model, 4096)
    assert model.config.max_position_embeddings == 4098
    new = model.embeddings.position_embeddings.weight
    assert torch.equal(new, torch.cat([old[:2]] + [old[2:]] * 8))
    extend_positions(make("LongformerModel", {**ENCODER, "attention_window": 8}, 4098), 8192)


def test_pretrained_weights_read_a_longer_text():
    encoder = minilm.load()
    ids = minilm.token_ids(encoder, documents=2)  # (2, 512)
    short = encoder.model(ids).last_hidden_state
    old = encoder.model.embeddings.position_embeddings.weight.clone()
    model = extend_positions(encoder.model, 1024)
    assert torch.equal(model.embeddings.position_embeddings.weight, torch.cat([old, old]))
    assert torch.equal(model(ids).last_hidden_state, short)
    joined = torch.cat([ids[:1], ids[1:]], 1)
    with torch.no_grad():
        long = model(joined).last_hidden_state
        shifted = model(joined, position_ids=torch.arange(1024)[None] % 512).last_hidden_state
    assert torch.equal(long, shifted)
