"""A recipe travels with its model: saved, loaded elsewhere, the same outputs."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BertForSequenceClassification

import sparing
from tests.support.model_zoo import build, inputs, run

CASES = [
    ("bert", "random_features(features=8)", AutoModel),
    ("distilbert", "random_features(features=8)", AutoModel),
    ("vit", "random_features(features=8)", AutoModel),
    ("gpt2", "lsh(rounds=1, chunk=4)", AutoModelForCausalLM),
    ("llama", {1: "lsh(rounds=1, chunk=4)"}, AutoModelForCausalLM),
    ("modernbert", "nystrom(landmarks=4)", AutoModel),
]


def switch(model, name):
    """transformers 5.4 warns that ModernBERT cannot be switched, and leaves it; the config is all that it reads."""
    model.set_attn_implementation(name)
    if model.config.model_type == "modernbert":
        model.config._attn_implementation = name
    assert model.config._attn_implementation == name


@pytest.mark.parametrize(("name", "what", "kind"), CASES, ids=[case[0] for case in CASES])
def test_a_saved_model_loads_with_its_recipe(name, what, kind, tmp_path):
    model, given = build(name), inputs(name)
    exact = run(model, given)
    with sparing.approximate(model, what, seed=7):
        out = run(model, given)
        model.save_pretrained(tmp_path)
    assert not torch.allclose(out, exact, atol=1e-4)
    sparing.transformers.register()

    loaded = kind.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    assert torch.equal(run(loaded, given), out)
    switch(loaded, "sdpa")
    assert torch.equal(run(loaded, given), exact)
    switch(loaded, "sparing")
    assert torch.equal(run(loaded, given), out)

    plain = kind.from_pretrained(tmp_path).eval()
    assert torch.equal(run(plain, given), exact), "a recipe in the config alone changes nothing"
    switch(plain, "sparing")
    assert torch.equal(run(plain, given), out)

    applied = kind.from_pretrained(tmp_path).eval()
    with sparing.approximate(applied) as handle:
        assert torch.equal(run(applied, given), out)
        assert handle.recipe == sparing.Recipe.of(applied.config.sparing)
    assert torch.equal(run(applied, given), exact)
    assert applied.config.sparing["seed"] == 7, "the recipe that came with the config is still there"


def test_another_process_gives_the_same_bits(tmp_path):
    model, given = build("distilbert"), inputs("distilbert")
    with sparing.approximate(model, {0: "random_features(features=8)", 1: "window(size=4)"}):
        model.save_pretrained(tmp_path / "model")
        torch.save((given, run(model, given)), tmp_path / "wanted.pt")
    code = """if True:
        import sys, torch, sparing, transformers
        given, wanted = torch.load(sys.argv[2])
        sparing.transformers.register()
        model = transformers.AutoModel.from_pretrained(sys.argv[1], attn_implementation="sparing").eval()
        with torch.no_grad():
            assert torch.equal(model(**given)[0], wanted)
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "model", tmp_path / "wanted.pt"], check=True)


def test_methods_on_the_value_layer_are_applied_by_hand(tmp_path):
    model, given = build("bert"), inputs("bert")
    with sparing.approximate(model, "monte_carlo(alpha=1.0)"):
        out = run(model, given)
        model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.0.*value layer; call sparing\.approximate\(model\)"):
        run(loaded, given)
    sparing.approximate(loaded)
    assert torch.equal(run(loaded, given), out)


def test_a_recipe_fits_with_and_without_a_head(tmp_path):
    model, given = build("bert"), inputs("bert")
    with sparing.approximate(model, "window(size=4)", layers=1) as handle:
        out = run(model, given)
        handle.recipe.save(tmp_path / "recipe.json")
        model.save_pretrained(tmp_path / "model")
    with_head = BertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with sparing.approximate(with_head, tmp_path / "recipe.json") as handle:
        assert torch.equal(run(with_head.bert, given), out)
        assert list(handle.recipe.layers) == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    with sparing.approximate(model, str(tmp_path / "recipe.json")):
        assert torch.equal(run(model, given), out)


def test_a_pattern_in_the_config_serves_every_layer(tmp_path):
    model, given = build("bert"), inputs("bert")
    model.save_pretrained(tmp_path)
    with sparing.approximate(model, "nystrom(landmarks=4)"):
        out = run(model, given)
    config = AutoConfig.from_pretrained(tmp_path)
    config.sparing = sparing.Recipe({"*": "nystrom(landmarks=4)"}).to_dict()
    loaded = AutoModel.from_pretrained(tmp_path, config=config, attn_implementation="sparing").eval()
    assert torch.equal(run(loaded, given), out)


@pytest.mark.parametrize("held", ["recipe.json", "nystrom", ["nystrom"], 3], ids=str)
def test_a_config_cannot_name_a_file(held, tmp_path, monkeypatch):
    """A config comes from elsewhere: what it names is not read from this machine, and a spec is not a recipe either."""
    monkeypatch.chdir(tmp_path)
    sparing.Recipe({"*": "nystrom"}).save("recipe.json")
    model = build("bert")
    model.config.sparing = held
    message = (
        r"the model's config has sparing=.*a config holds the recipe's JSON itself; del model.config.sparing, and pass"
    )
    with pytest.raises(ValueError, match=message):
        sparing.approximate(model)
    sparing.transformers.register()
    model.set_attn_implementation("sparing")
    with pytest.raises(ValueError, match=message):
        run(model, inputs("bert"))
    del model.config.sparing  # the way out
    with sparing.approximate(model, "recipe.json") as handle:
        assert set(handle.layers.values()) == {"nystrom(landmarks=64)"}


def test_a_name_without_a_recipe_is_an_error():
    model = build("bert")
    sparing.transformers.register()
    model.set_attn_implementation("sparing")
    with pytest.raises(RuntimeError, match=r"the config holds no recipe; call sparing\.approximate\(model, method\)"):
        run(model, inputs("bert"))


def test_layers_without_numbers_are_not_guessed(tmp_path):
    """Encoder and decoder in one config, a training run that may skip layers, a second model on the same config."""
    model = build("bart")
    with sparing.approximate(model, "window(size=4)", layers="encoder.*"):
        model.save_pretrained(tmp_path / "bart")
    loaded = AutoModel.from_pretrained(tmp_path / "bart", attn_implementation="sparing").eval()
    with pytest.raises(RuntimeError, match=r"call sparing\.approximate\(model\) once after loading"):
        run(loaded, inputs("bart"))

    everywhere = build("bart")
    everywhere.config.sparing = sparing.Recipe({"*": "nystrom"}).to_dict()
    everywhere.set_attn_implementation("sparing")
    with pytest.raises(RuntimeError, match="does not tell whether it is in the encoder or the decoder"):
        run(everywhere, inputs("bart"))

    model = build("distilbert")
    with sparing.approximate(model, "window(size=4)"):
        model.save_pretrained(tmp_path / "distilbert")
    loaded = AutoModel.from_pretrained(tmp_path / "distilbert", attn_implementation="sparing")
    with pytest.raises(RuntimeError, match="may be skipped in training"):
        run(loaded.train(), inputs("distilbert"))
    run(loaded.eval(), inputs("distilbert"))
    second = type(loaded)(loaded.config).eval()
    with pytest.raises(RuntimeError, match="more layers without a layer_idx share the config than it has"):
        run(second, inputs("distilbert"))


def test_a_recipe_without_a_seed_is_seeded():
    assert sparing.Recipe.of({"version": 1, "layers": {}}) == sparing.Recipe({})


def test_seeds_of_nested_calls_are_kept(tmp_path):
    model, given = build("bert"), inputs("bert")
    spec = "random_features(features=8)"
    with sparing.approximate(model, spec, seed=1), sparing.approximate(model, spec, seed=2, layers=1) as handle:
        out = run(model, given)
        recipe = handle.recipe
    with sparing.approximate(model, recipe):
        assert torch.equal(run(model, given), out)


BAD = [
    ({"version": 2, "layers": {}}, "version 2 is not known; this sparing reads 1"),
    ({"layers": {}}, "version None is not known"),
    ({"version": 1}, "JSON object with 'version' and 'layers'"),
    ([1], "JSON object with 'version' and 'layers'"),
    ({"version": 1, "layers": {}, "speed": 3}, "unknown entries 'speed'"),
    ({"version": 1, "layers": {"*": "windowed"}}, "unknown name 'windowed'"),
    ({"version": 1, "layers": {"*": 3}}, "must map names to spec strings"),
    ({"version": 1, "layers": {"*": "exact"}, "seed": "x"}, "seed='x'"),
    ({"version": 1, "layers": {"*": "nystrom(landmarks=0)"}}, r"recipe.json': recipe: layers\['\*'\]: nystrom: landmarks=0"),
    ({"version": True, "layers": {}}, "version True is not known"),
    ({"version": 1, "layers": ["exact"]}, r"recipe.json': recipe: layers=\['exact'\] must map"),
    ({"version": 1, "layers": {}, "seed": [1]}, r"recipe.json': recipe: seed=\[1\] must be an integer"),
    ({"version": 1, "layers": {}, "seed": {"*": 1.5}}, r"recipe.json': recipe: seed=1.5 must be an integer"),
    ({"version": 1, "layers": {}, "when": ["always"]}, r"recipe.json': recipe: when=\['always'\] is not one of"),
    ({"version": 1, "layers": {}, "when": {"*": {}}}, r"recipe.json': recipe: when=\{\} is not one of"),
    ({"version": 1, "layers": {}, "architecture": 3}, "recipe.json': recipe: architecture=3 must be a model_type"),
    ({"version": 1, "layers": {}, "about": "mine"}, "recipe.json': recipe: about='mine' must be a mapping"),
    ({"version": 1, "layers": {"encoder.layer.9*": "exact"}}, r"names 'encoder\.layer\.9\*', which is not an attention layer"),
    ({"version": 1, "layers": {"*": "exact"}, "architecture": "llama"}, "the recipe is for 'llama', but the model is 'bert'"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_recipes_are_refused(content, message, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    model = build("bert")
    with pytest.raises((ValueError, TypeError), match=message):
        sparing.approximate(model, path)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "sparing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "column 2"),
        ("\xff", "can't decode"),
        ('{"version": 1, "layers": {}, "about": ' + "[" * 200_000, "nested more than 64 levels deep"),
        (
            '{"version": 1, "layers": {}, "about": {"a": ' + "[" * 80 + "]" * 80 + "}}",
            "nested more than 64 levels deep",
        ),
        ('{"version": 1, "layers": {}, "seed": ' + "9" * 10_000 + "}", "an integer of thousands of digits"),
    ],
    ids=range(5),
)
def test_a_file_that_is_not_json_is_refused(text, message, tmp_path):
    (tmp_path / "recipe.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"recipe: .*recipe.json' is not JSON: .*{message}"):
        sparing.Recipe.load(tmp_path / "recipe.json")


def test_a_recipe_in_python_is_checked_as_well():
    with pytest.raises(TypeError, match="seed must map names of layers, got 3"):
        sparing.Recipe({}, seed={3: 1})
    with pytest.raises(ValueError, match="unknown entries 'speed', 3; known: version"):
        sparing.Recipe.of({"version": 1, "layers": {}, 3: 3, "speed": 4})


def test_saving_is_whole_or_nothing(tmp_path, monkeypatch):
    recipe = sparing.Recipe({"*": "nystrom"}, about={"data": "mine"})
    recipe.save(tmp_path / "recipe.json")
    assert sparing.Recipe.load(tmp_path / "recipe.json") == recipe

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        sparing.Recipe({"*": "exact"}).save(tmp_path / "recipe.json")
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.json"]
    assert sparing.Recipe.load(tmp_path / "recipe.json") == recipe
