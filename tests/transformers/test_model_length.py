"""What a method takes from the longest input of a model: the bits of `yoso`, which are then those of every input."""

from __future__ import annotations

import pytest
import torch

import sparing
from sparing.transformers.watch import record_calls
from tests.support.model_zoo import build, inputs

transformers = pytest.importorskip("transformers")

SPEC = "yoso(hashes=8)"
pytestmark = pytest.mark.filterwarnings("ignore:.*needs further training:UserWarning")


def hidden(model, length):
    given = torch.arange(length)[None] + 3
    with torch.no_grad():
        return model(given).last_hidden_state


def runs_with(model, bits, length):
    """Whether SPEC gives the output of that number of bits; None: of the number that a bare call takes."""
    with sparing.approximate(model, SPEC):
        found = hidden(model, length)
    with sparing.approximate(model, f"yoso(hashes=8, bits={bits})"):
        return torch.equal(found, hidden(model, length))


@pytest.mark.parametrize(("name", "stated"), [("bert", 512), ("roberta", 514), ("nystromformer", 512)])
def test_short_and_long_inputs_have_the_bits_of_the_longest(name, stated):
    """RoBERTa counts two rows that are not positions; Nystromformer runs by an adapter."""
    model = build(name, max_position_embeddings=stated)
    for length in (6, 40):
        assert runs_with(model, 9, length)
        assert not runs_with(model, (length - 1).bit_length(), length), "the control: those of a bare call differ"


def test_the_recipe_says_what_the_user_wrote(tmp_path):
    model = build("bert", max_position_embeddings=64)
    with sparing.approximate(model, SPEC) as handle:
        assert set(handle.layers.values()) == {SPEC}
        assert set(handle.recipe.layers.values()) == {SPEC}
        wanted = hidden(model, 12)
        model.save_pretrained(tmp_path)
    sparing.transformers.register()
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    assert torch.equal(hidden(loaded, 12), wanted)
    assert runs_with(model, 6, 12)


@pytest.mark.parametrize("first", ["approximate", "extend"])
def test_longer_positions_change_the_bits(first):
    model = build("bert", max_position_embeddings=64)
    if first == "approximate":
        handle = sparing.approximate(model, SPEC)
    before = hidden(model, 12)
    sparing.extend_positions(model, 1024)
    if first == "extend":
        handle = sparing.approximate(model, SPEC)
    after = hidden(model, 12)
    handle.restore()
    assert not torch.equal(before, after)
    with sparing.approximate(model, "yoso(hashes=8, bits=10)"):
        assert torch.equal(hidden(model, 12), after)


def test_a_model_that_states_no_length_takes_the_keys():
    """A ViT of 8 x 8 pixels in patches of 2: 16 patches and a token of its own are 17 keys, hence 5 bits."""
    model = transformers.ViTModel(
        transformers.ViTConfig(
            image_size=8, patch_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    ).eval()
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for spec in (SPEC, "yoso(hashes=8, bits=5)", "yoso(hashes=8, bits=4)"):
        with sparing.approximate(model, spec), torch.no_grad():
            found.append(model(pixels).last_hidden_state)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("stated", [0, -1])
def test_a_config_that_states_no_length_is_read_as_such(stated):
    model = build("bert", max_position_embeddings=64)
    model.config.max_position_embeddings = stated
    assert runs_with(model, 4, 12)


def test_recorded_calls_know_the_length():
    model = build("bert", max_position_embeddings=64)
    with torch.no_grad():
        calls = record_calls(model, SPEC, lambda: model(**inputs("bert")))
    assert {str(seen.with_method(SPEC)["method"]) for seen in calls} == {"yoso(hashes=8, bits=6)"}
    assert str(calls[0]._replace(max_length=None).with_method(SPEC)["method"]) == SPEC


def test_a_compiled_model_has_the_same_bits():
    model = build("bert", max_position_embeddings=64)
    with sparing.approximate(model, SPEC):
        eager = hidden(model, 12)
        assert torch.equal(hidden(torch.compile(model, backend="aot_eager", fullgraph=True), 12), eager)
