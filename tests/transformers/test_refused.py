"""What is refused, and when: before anything changes, or at the call whose mask or argument cannot be served."""

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sparing
from tests.support.model_zoo import build, inputs, run, state, tokens


class Ignores(nn.Module):
    """Asks for the registry and then goes its own way, as some models do under names they do not know."""

    def __init__(self, inner):
        super().__init__()
        self.config, self.inner, self.is_causal = inner.config, [inner], False
        self.query = self.key = self.value = nn.Linear(64, 64)

    def forward(self, hidden_states, **others):
        if self.config._attn_implementation == "never":
            return ALL_ATTENTION_FUNCTIONS["never"]
        return (hidden_states, None)


def test_a_layer_that_ignores_the_registry_is_found_out(bert):
    attention = bert.encoder.layer[1].attention
    attention.self = Ignores(attention.self)
    before = state(bert)
    told = pytest.raises(RuntimeError, match=r"encoder\.layer\.1\.attention\.self: Ignores did not call sparing")
    with sparing.approximate(bert, "window(size=4)"), told:
        run(bert, inputs("bert"))
    assert state(bert) == before


@pytest.mark.parametrize("name", ["bigbird", "reformer"])
def test_models_with_attention_of_their_own_are_refused(name):
    model = build(name)
    before = state(model)
    with pytest.raises(
        sparing.Unsupported, match=r"layer.*computes its own attention, for which sparing has no adapter"
    ):
        sparing.approximate(model, "nystrom")
    with pytest.raises(sparing.Unsupported, match="computes its own attention"):
        sparing.approximate(model, "exact")
    assert state(model) == before


REFUSED = [
    ("bert", {"what": "window", "layers": "decoder.*"}, ValueError, r"layers: no attention layer is named 'decoder\.\*'; there are 'encoder"),
    ("bert", {"what": "window", "layers": 7}, ValueError, r"layers: there is no layer 7; the model has 2"),
    ("bert", {"what": "window", "layers": -3}, ValueError, r"layers: there is no layer -3"),
    ("bert", {"what": "window", "layers": []}, ValueError, "layers: an empty list"),
    ("bert", {"what": "window", "layers": 1.5}, TypeError, "layers: 1.5 must be a layer's number or name"),
    ("bert", {"what": {9: "window"}}, ValueError, "what: there is no layer 9"),
    ("bert", {"what": {0: "window", "encoder.layer.0*": "exact"}}, ValueError, "what: .*named twice"),
    ("bert", {"what": {0: "window"}, "layers": [0]}, ValueError, "layers: the mapping names the layers already"),
    ("bert", {"what": "windows"}, ValueError, "method: unknown name 'windows'"),
    ("bert", {"what": "window(size=-1)"}, ValueError, "size=-1"),
    ("bert", {"what": 3}, TypeError, "method must be a Method or a spec string"),
    ("bert", {"what": "window", "seed": "zero"}, TypeError, "seed='zero'"),
    ("bert", {}, ValueError, "what: the model's config holds no recipe; pass a method"),
    ("bert", {"what": "there_is_none.json"}, FileNotFoundError, "there_is_none.json"),
    ("gpt2", {"what": "nystrom"}, sparing.Unsupported, r"transformer\.h\.0\.attn \(and 1 more layers\) cannot run nystrom.*causal"),
    ("gpt2", {"what": "monte_carlo", "layers": 1}, sparing.Unsupported, r"transformer\.h\.1\.attn cannot run monte_carlo"),
    ("bart", {"what": "nystrom"}, sparing.Unsupported, r"decoder\.layers\.0\.self_attn.*layers=\['encoder\.layers\.0\.self_attn'\]"),
    ("bart", {"what": {"decoder.*.encoder_attn": "nystrom"}}, sparing.Unsupported, "encoder_attn.*later tokens of the target"),
    ("whisper", {"what": "window"}, sparing.Unsupported, r"encoder_attn.*cross attention, which window does not support"),
    ("modernbert", {"what": "monte_carlo"}, sparing.Unsupported, "linear layer of the values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "kind", "message"), REFUSED)
def test_bad_input_is_refused_before_anything_changes(name, arguments, kind, message):
    model = build(name)
    before = state(model)
    with pytest.raises(kind, match=message):
        sparing.approximate(model, **arguments)
    assert state(model) == before


def test_models_without_attention_are_refused():
    with pytest.raises(ValueError, match="model: Sequential has no attention modules"):
        sparing.approximate(nn.Sequential(nn.Linear(3, 3)), "exact")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        sparing.approximate("bert", "exact")


def test_a_sliding_layer_honours_its_window_where_the_method_can():
    model, given = build("modernbert"), inputs("modernbert")
    before = run(model, given)
    rows = given["attention_mask"].bool()
    with sparing.approximate(model, "value_aware(keys=40)", layers=1):
        torch.testing.assert_close(run(model, given)[rows], before[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "spec"), [("modernbert", "nystrom(landmarks=3)"), ("mistral", "window(size=2)")])
def test_a_sliding_layer_runs_any_method_on_inputs_within_its_window(name, spec):
    """Padding and causality are honoured there; longer inputs, which the layer's mask would cut, are refused."""
    model = build(name)
    window = {"modernbert": 5, "mistral": 8}[name]
    if name == "mistral":
        with pytest.raises(
            sparing.Unsupported, match="within a window of 8 tokens already; name the layers in `layers`"
        ):
            sparing.approximate(model, spec)
    short = {"input_ids": tokens(window - 1), "attention_mask": torch.ones(2, window - 1, dtype=torch.long)}
    short["attention_mask"][0, :2] = 0
    keep = short["attention_mask"].bool()
    exact = run(model, short)
    with sparing.approximate(model, "top_keys(keys=99)", layers=[0, 1]):
        torch.testing.assert_close(run(model, short)[keep], exact[keep], rtol=0, atol=1e-5)
    with sparing.approximate(model, spec, layers=1) as handle:
        assert f"on inputs within the layer's own window of {window} tokens" in repr(handle)
        out = run(model, short)
        assert not torch.allclose(out[keep], exact[keep], atol=1e-4)
        other = dict(short, input_ids=torch.where(keep, short["input_ids"], 97))
        assert torch.equal(run(model, other)[keep], out[keep])
        with pytest.raises(
            sparing.Unsupported, match=rf"layers\.1\..*does not support.*attends within {window} tokens"
        ):
            run(model, {"input_ids": tokens(24)})


def test_custom_and_packed_masks_reach_the_method_or_are_refused():
    model = build("llama")
    ids = tokens(12)
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    block = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()[None, None].expand(2, 1, 12, 12)
    for given in (
        {"input_ids": ids, "position_ids": packed, "use_cache": False},
        {"input_ids": ids, "attention_mask": block},
    ):
        before = run(model, given)
        with sparing.approximate(model, "value_aware(keys=40)"):
            torch.testing.assert_close(run(model, given), before, rtol=0, atol=1e-5)
        with (
            sparing.approximate(model, "window(size=4)"),
            pytest.raises(sparing.Unsupported, match=r"model\.layers\.0\.self_attn: window does not support attn_mask"),
        ):
            run(model, given)


def test_a_causal_mask_that_was_written_out_is_recognised():
    model, given = build("llama"), inputs("llama")
    keep = given["attention_mask"].bool()
    square = torch.ones(24, 24).tril().bool() & keep[:, None, None, :]
    added = torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)
    bent = square.clone()
    bent[:, :, 20, 10] = False
    with sparing.approximate(model, "window(size=6)"):
        out = run(model, given)
        for mask in (square, added):
            assert torch.equal(run(model, {**given, "attention_mask": mask})[keep], out[keep])
        with pytest.raises(sparing.Unsupported, match="attn_mask"):
            run(model, {**given, "attention_mask": bent})
        with pytest.raises(sparing.Unsupported, match="attn_mask"):
            run(model, {**given, "attention_mask": added.clamp_min(-5.0)})


def test_arguments_that_nobody_knows_are_refused(bert):
    with sparing.approximate(bert, "window(size=4)"):
        layer = bert.encoder.layer[0].attention.self
        for name in ("s_aux", "softcap", "indices", "something_new"):
            with pytest.raises(sparing.Unsupported, match=rf"encoder\.layer\.0.*the model passes {name}"):
                layer(torch.randn(1, 8, 64), **{name: torch.ones(1)})
    with sparing.approximate(bert, "exact"), pytest.raises(sparing.Unsupported, match="the model passes s_aux"):
        layer(torch.randn(1, 8, 64), s_aux=torch.ones(1))


def test_dropout_in_training_is_applied_or_refused(bert):
    given = inputs("bert")
    bert.train()
    with (
        sparing.approximate(bert, "nystrom(landmarks=4)"),
        pytest.raises(sparing.Unsupported, match=r"encoder\.layer\.0.*drops attention weights in training \(p=0\.1\)"),
    ):
        run(bert, given)
    with sparing.approximate(bert, "exact"):
        assert not torch.equal(run(bert, given), run(bert, given))


class PackedWeight(torch.Tensor):
    """A weight that is not plain numbers, as of packages that quantise."""


def test_whatever_hangs_on_a_value_layer_is_not_passed_by(bert):
    attention = bert.encoder.layer[0].attention.self
    hook = attention.value.register_forward_hook(lambda module, args, output: 3 * output)
    with pytest.raises(sparing.Unsupported, match=r"layer\.0.*has no plain one of its own"):
        sparing.approximate(bert, "monte_carlo")
    hook.remove()
    attention.value.forward = lambda x: 2 * x
    with pytest.raises(sparing.Unsupported, match=r"layer\.0.*has no plain one of its own"):
        sparing.approximate(bert, "monte_carlo")
    del attention.value.forward
    plain = attention.value.weight
    attention.value.weight = nn.Parameter(plain.detach().as_subclass(PackedWeight))
    with pytest.raises(sparing.Unsupported, match=r"layer\.0.*has no plain one of its own"):
        sparing.approximate(bert, "monte_carlo")
    attention.value.weight = plain
    with sparing.approximate(bert, "monte_carlo"):
        attention.value = nn.Sequential(attention.value)
        with pytest.raises(sparing.Unsupported, match=r"layer\.0\.attention\.self\.value is another layer"):
            run(bert, inputs("bert"))


def test_causality_is_seen_where_the_module_does_not_tell():
    """The attention of CLIP's text model is causal by its mask alone; that of its image model is not."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=100, **sizes))
    with pytest.raises(sparing.Unsupported, match="it is causal, and nystrom is not"):
        sparing.approximate(text, "nystrom")
    image = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes))
    sparing.approximate(image, "nystrom").restore()


def test_values_in_another_order_are_found_out(bert):
    """A module that splits its values into heads in a way of its own must not get those of another head."""
    attention = bert.encoder.layer[0].attention.self

    class Interleaved(type(attention)):
        def forward(self, hidden_states, attention_mask=None, **others):
            q, k = (part(hidden_states).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key))
            v = self.value(hidden_states).unflatten(-1, (16, 4)).permute(0, 3, 1, 2)
            out, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, q, k, v, attention_mask)
            return out.flatten(2), None

    attention.__class__ = Interleaved
    with (
        sparing.approximate(bert, "monte_carlo"),
        pytest.raises(sparing.Unsupported, match=r"layer\.0.*splits its values into heads in a way of its own"),
    ):
        run(bert, inputs("bert"))
    with sparing.approximate(bert, "window(size=4)"):
        run(bert, inputs("bert"))
