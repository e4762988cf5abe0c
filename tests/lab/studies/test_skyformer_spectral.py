import lzma

import pytest
import torch

import sparing
from sparing.models import Subject
from sparing_lab.studies import skyformer_spectral, study
from sparing_lab.studies._layers import untrained
from sparing_lab.studies._skyformer_spectral import SPECS, layer_inputs, spectral_errors
from sparing_lab.studies.rows import pick
from sparing_lab.studies.skyformer_spectral import BUDGETS, READ
from sparing_lab.studies.study import Settings
from sparing_lab.tasks import wikitext
from tests.support.verdicts import changed, verdict

NAME = "skyformer-spectral"


def between(low, high):
    """Nystromformer's values where only the first and the last can be read."""
    return dict(zip(BUDGETS, (low + (high - low) * share for share in (0, 0.2, 0.4, 0.7, 1)), strict=True))


@pytest.fixture(scope="module")
def rows():
    """What the paper's figure shows."""
    found = []
    for (weights, length), curves in READ.items():
        given = {"weights": weights, "length": length, "model": "bert-base-cased", "text": "valid.txt", "seed": 0}
        for name, curve in curves.items():
            for d, error in (curve if name != "Nystromformer" else between(curve[16], curve[256])).items():
                found.append({**given, "method": name, "budget": d, "error": error})
    return found


def at(*, weights=None, length=None, method=None, budget=None):
    wanted = {"weights": weights, "length": length, "method": method, "budget": budget}
    return lambda row: all(value is None or row[name] == value for name, value in wanted.items())


@pytest.mark.parametrize("key", [claim.key for claim in study(NAME).claims if claim.key != "from-64"])
def test_the_paper_s_own_figure_passes(rows, key):
    assert verdict(NAME, key, rows) == "reproduces"


def test_the_least_error_at_256(rows):
    one = changed(rows, at(weights="pretrained", length=512, method="Performer", budget=256), error=0.1)
    assert verdict(NAME, "best", one) == "same shape"
    two = changed(one, at(weights="initialised", length=512, method="Nystromformer", budget=256), error=0.1)
    assert verdict(NAME, "best", two) == "does not"


def test_ahead_from_64(rows):
    ahead = changed(rows, at(method="Nystromformer"), error=9.0)
    assert verdict(NAME, "from-64", ahead) == "reproduces"
    late = changed(ahead, at(method="Performer", budget=64), error=0.1)
    assert verdict(NAME, "from-64", late) == "same shape"
    one = changed(ahead, at(weights="pretrained", length=512, method="Performer"), error=0.1)
    assert verdict(NAME, "from-64", one) == "same shape"
    assert verdict(NAME, "from-64", changed(ahead, at(method="Performer"), error=0.1)) == "does not"


def test_the_worst_at_16(rows):
    one = changed(rows, at(weights="pretrained", length=512, method="Performer", budget=16), error=3.0)
    assert verdict(NAME, "worst-16", one) == "same shape"
    assert verdict(NAME, "worst-16", changed(rows, at(method="Performer", budget=16), error=9.0)) == "does not"


def test_falling_with_landmarks(rows):
    assert verdict(NAME, "falls", changed(rows, at(method="Skyformer", budget=16), error=1.5)) == "does not"
    little = changed(rows, at(weights="pretrained", length=4096, method="Skyformer", budget=256), error=1.7)
    assert verdict(NAME, "falls", little) == "same shape"
    up = changed(rows, at(weights="pretrained", length=4096, method="Skyformer", budget=256), error=1.8)
    assert verdict(NAME, "falls", up) == "does not"


def test_nystromformer_that_gains(rows):
    def last(error):
        return changed(rows, at(weights="pretrained", length=4096, method="Nystromformer", budget=256), error=error)

    assert verdict(NAME, "flat", last(2.2)) == "same shape"  # 12 %, against 43 % at 512
    assert verdict(NAME, "flat", last(1.8)) == "does not"


def test_errors_that_shrink_with_the_length(rows):
    one = changed(rows, at(length=4096, weights="pretrained", method="Performer", budget=16), error=0.1)
    assert verdict(NAME, "grows", one) == "same shape"
    assert verdict(NAME, "grows", changed(rows, at(length=4096, method="Performer"), error=0.1)) == "does not"


def test_values_are_compared_for_the_paper_s_model_alone(rows):
    assert verdict(NAME, "values", changed(rows, at(), model="minilm")) == "not run"
    assert verdict(NAME, "values", changed(rows, at(), text="Python help topics")) == "not run"
    assert verdict(NAME, "values", changed(rows, at(method="Performer", budget=16), error=9.0)) == "same shape"
    assert verdict(NAME, "values", changed(rows, at(), error=9.0)) == "does not"


@pytest.fixture(scope="module")
def inputs():
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    return [layer_inputs(q, k, v)]


def test_the_spectral_error_is_that_of_each_head(inputs):
    q, k, v, exact, _ = inputs[0]
    found = spectral_errors("Performer", 16, inputs, 3)
    out = sparing.attention(q, k, v, method="random_features(features=16)", seed=3)
    heads = [float(torch.linalg.svdvals(out[0, h] - exact[0, h])[0]) for h in range(2)]
    sizes = [float(torch.linalg.svdvals(exact[0, h])[0]) for h in range(2)]
    assert found["heads"] == 2
    assert found["error"] == pytest.approx(sum(heads) / 2, rel=1e-5)
    assert found["relative"] == pytest.approx((heads[0] / sizes[0] + heads[1] / sizes[1]) / 2, rel=1e-5)


def test_what_has_every_row_is_exact(inputs):
    for name in ("Skyformer", "Nystromformer", "own"):
        assert spectral_errors(name, 128, inputs, 0)["relative"] < 1e-5
    assert spectral_errors("own", 8, inputs, 0)["relative"] > 1e-2


def test_facts_of_equal_queries_and_keys():
    """All rows equal: the kernel is 1, key factors do not differ, and all keys count."""
    one = torch.ones(1, 1, 20, 8)
    found = spectral_errors("values", 0, [layer_inputs(one, one, one)], 0)
    assert found["kernel"] == pytest.approx(1)
    assert found["spread"] == pytest.approx(0)
    assert found["keys"] == pytest.approx(20)
    assert found["error"] == pytest.approx(0, abs=1e-5)


def words(text, **options):
    """A tokenizer that knows lengths of words alone."""
    return {"input_ids": [len(word) for word in text.split()][: options.get("max_length")]}


@pytest.fixture(scope="module")
def small():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=200, max_position_embeddings=64, **sizes)).eval()
    with torch.no_grad():  # as if it were trained
        for weight in model.parameters():
            weight.mul_(3)
    return Subject("small", model, words)


def test_untrained_weights_depend_on_the_seed_alone(small):
    state = torch.random.get_rng_state()
    first, again, other = (untrained(small, seed=seed).model for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [model.encoder.layer[0].attention.self.query.weight for model in (small.model, first, again, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[1], weights[3])
    assert not untrained(small).model.training


def test_a_model_is_measured_beyond_its_positions(small, monkeypatch):
    monkeypatch.setattr(skyformer_spectral, "loaded", lambda name: small)
    cell = {"model": "small", "seed": 0, "fingerprint": "x", "method": "Nystromformer", "budget": 16}
    found = {
        (weights, length): study(NAME).measure(Settings(), {**cell, "weights": weights, "length": length})["error"]
        for weights in ("initialised", "pretrained")
        for length in (64, 100)
    }
    assert len(set(found.values())) == 4
    assert min(found.values()) > 0
    assert small.positions == 64
    with pytest.raises(ValueError, match="each takes a text of 200000 tokens, and there are only 0"):
        study(NAME).measure(Settings(), {**cell, "weights": "pretrained", "length": 200_000})


TEXT = " \n = Lobster = \n \n A lobster . \n \n = = Habitat = = \n \n The sea . \n = Fish = \n \n A fish . \n"


@pytest.mark.parametrize("name", ["valid.txt", "valid.txt.xz", "wiki.test.tokens"])
def test_articles_of_wikitext(tmp_path, name):
    (tmp_path / "wikitext2").mkdir()
    raw = TEXT.encode()
    (tmp_path / "wikitext2" / name).write_bytes(lzma.compress(raw) if name.endswith(".xz") else raw)
    found = wikitext.read(tmp_path, wanted_by="x")
    assert [text.split("\n")[0].strip() for text in found.texts] == ["= Lobster =", "= Fish ="]
    assert "The sea" in found.texts[0]
    cells = study(NAME).cells(Settings(data=tmp_path))
    assert {cell["fingerprint"] for cell in cells} == {found.fingerprint}


def test_text_without_articles_is_refused(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text("no title")
    with pytest.raises(ValueError, match=r"valid\.txt has no article"):
        wikitext.read(tmp_path, wanted_by="x")


def test_the_paper_s_scale_names_its_model_and_lengths_and_wants_its_text(tmp_path):
    with pytest.raises(ValueError, match=r"needs WikiText-2, FOLDER/wikitext2/valid\.txt"):
        study(NAME).cells(Settings("paper"))
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text(TEXT)
    cells = study(NAME).cells(Settings("paper", data=tmp_path, seeds=1))
    assert {cell["model"] for cell in cells} == {"bert-base-cased"}
    assert {cell["length"] for cell in cells} == {512, 1024, 2048, 4096}
    assert {cell["budget"] for cell in pick(cells, method="Skyformer")} == set(BUDGETS)
    assert {cell["method"] for cell in cells} == {*SPECS, "own", "values"}
