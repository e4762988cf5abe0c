import json

import pytest
import torch

import sparing
from sparing.sample_text import python_sources
from sparing_lab.studies._layers import encoder_layers
from sparing_lab.studies.skyformer_spectrum import STUDY, blocks, mean_row, outputs, ratio, spectrum
from sparing_lab.studies.study import Settings
from tests.support.small_models import subject
from tests.support.verdicts import changed, verdict

NAME = "skyformer-spectrum"


def row(model="minilm", weights="pretrained", text="help topics", tenth=5e-3, last=1e-5, **more):
    values = [1.0] * 64
    values[9:] = [tenth] * 55
    values[63] = last
    return {"model": model, "weights": weights, "text": text, "values": values, **more}


ROWS = [row(model, weights) for model in ("minilm", "smollm2") for weights in ("pretrained", "random")]


def test_a_fast_decay_is_one_in_every_model():
    def small(row):
        return row["model"] == "minilm" and row["weights"] == "pretrained"

    def learned(row):
        return row["weights"] == "pretrained"

    slow = row(tenth=0.02, last=1e-3)["values"]
    for key in ("fast", "tail"):
        assert verdict(NAME, key, ROWS) == "reproduces"
        assert verdict(NAME, key, changed(ROWS, small, values=slow)) == "same shape"
        assert verdict(NAME, key, changed(ROWS, learned, values=slow)) == "does not"
        assert verdict(NAME, key, changed(ROWS, lambda row: not learned(row), values=slow)) == "reproduces"


def test_tasks_are_ranked_only_by_models_that_were_trained_on_them():
    tasks = {"Retrieval": 6e-3, "Pathfinder": 4e-3, "Text": 1e-3, "ListOps": 4e-4}
    rows = [row(tenth=tenth, trained_on=task) for task, tenth in tasks.items()]
    assert verdict(NAME, "order", ROWS) == "not run"
    assert verdict(NAME, "order", rows[:3]) == "not run"
    assert verdict(NAME, "order", rows) == "reproduces"
    easy = row(tenth=5e-4)["values"]
    assert (
        verdict(NAME, "order", changed(rows, lambda row: row["trained_on"] == "Pathfinder", values=easy)) == "does not"
    )


def test_singular_values_of_matrices_that_are_known():
    left, _ = torch.linalg.qr(torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0)))
    found = spectrum([left * torch.tensor([8.0, 4.0, 2.0, 1e-3])])
    assert found["values"] == pytest.approx([8, 4, 2, 1e-3], rel=1e-3)
    assert found["stable_rank"] == pytest.approx((64 + 16 + 4) / 64, rel=1e-4)
    assert found["above"] == 3
    assert found["matrices"] == 2
    assert 0 < found["mean_row"] < 0.5


def test_rows_that_are_all_alike_are_their_mean():
    alike = torch.randn(1, 1, 8, dtype=torch.float64).expand(1, 20, 8)
    assert float(mean_row(alike)) == pytest.approx(1)
    apart = torch.cat([alike[:, :10], -alike[:, :10]], dim=1)
    assert float(mean_row(apart)) == pytest.approx(0, abs=1e-12)
    assert float(mean_row(torch.cat([2 * alike, 0 * alike], dim=1))) == pytest.approx(0.5)


def test_a_ratio_of_means():
    found = spectrum([torch.diag(torch.tensor([8.0, 4.0]))[None], torch.diag(torch.tensor([4.0, 1.0]))[None]])
    assert found["values"] == pytest.approx([6, 2.5])
    assert ratio(found, 2) == pytest.approx(2.5 / 6)


def test_heads_stand_side_by_side_up_to_64_columns():
    heads = torch.arange(5 * 3 * 32.0).view(5, 3, 32)
    found = blocks(heads)
    assert found.shape == (2, 3, 64)
    assert torch.equal(found[1], torch.cat([heads[2], heads[3]], dim=-1))
    assert blocks(torch.zeros(3, 7, 64)).shape == (3, 7, 64)
    assert blocks(torch.zeros(2, 7, 8)).shape == (1, 7, 16)


def test_the_second_layer_is_looked_at():
    model = subject("bert")
    ids = torch.arange(3, 43)[None]
    (found,) = outputs(model, ids)
    layers = encoder_layers(model.model, ids)
    exact = [sparing.attention(layer.query, layer.key, layer.value) for layer in layers]
    assert torch.allclose(found, blocks(exact[1][0]), atol=1e-6)
    assert not torch.allclose(found, blocks(exact[0][0]), atol=1e-3)


def test_a_causal_model_keeps_its_mask():
    model = subject("llama")
    ids = torch.arange(3, 43)
    (whole,), (part,) = outputs(model, ids[None]), outputs(model, ids[None, :20])
    assert torch.allclose(whole[:, :20], part, atol=1e-6)


def test_a_model_of_one_layer_is_refused():
    with pytest.raises(ValueError, match="has 1 attention layers"):
        outputs(subject("bert", num_hidden_layers=1), torch.arange(3, 43)[None])


def test_reviews_are_read_where_they_are(tmp_path):
    texts = {cell["text"] for cell in STUDY.cells(Settings(data=tmp_path, together=True))}
    assert texts == {"help topics", "ListOps", "Python source"}
    (tmp_path / "imdb").mkdir()
    (tmp_path / "imdb" / "test.jsonl").write_text(json.dumps({"text": "a film", "label": 1}) + "\n")
    cells = STUDY.cells(Settings(data=tmp_path))
    assert {cell["text"] for cell in cells} == texts | {"film reviews"}
    (tmp_path / "imdb" / "test.jsonl").write_text(json.dumps({"text": "another film", "label": 1}) + "\n")
    assert STUDY.cells(Settings(data=tmp_path)) != cells


def test_the_papers_models_have_to_be_named():
    with pytest.raises(ValueError, match=r"Long Range Arena.*--model"):
        STUDY.cells(Settings("paper"))
    assert {cell["model"] for cell in STUDY.cells(Settings("paper", model="here"))} == {"here"}


def test_sources_are_long_enough():
    assert len(python_sources()) >= 8
