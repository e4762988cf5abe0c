"""Models of sentence-transformers: the same embeddings without padding, measured with their own pooling.

Beside the tests of transformers, of which the oldest runs too: sentence-transformers is promised on the newest alone.
"""

import importlib.util

import numpy as np
import pytest
import torch

import sparing
from sparing.models import load, sentences
from sparing.workbench.outputs import digest
from sparing.workbench.prepare import prepare
from tests.support.small_models import TEXTS, saved

if importlib.util.find_spec("sentence_transformers") is None:
    pytest.skip("sentence-transformers is not installed", allow_module_level=True)

MIXED = [text[: 3 + 17 * i % 70] for i, text in enumerate(TEXTS * 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder that is pooled at its first token, with a prompt."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    path = tmp_path_factory.mktemp("sentences")
    encoder = Transformer(str(saved(path / "encoder")), max_seq_length=60)
    made = SentenceTransformer(modules=[encoder, Pooling(64, "cls"), Normalize()], prompts={"query": "query: "})
    made.save(str(path / "model"))
    return str(path / "model")


@pytest.fixture
def model(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu")


def shapes_of(model):
    """Shapes that the second block of the encoder gets, as they come."""
    seen = []
    model[0].auto_model.encoder.layer[1].register_forward_pre_hook(lambda part, args: seen.append(tuple(args[0].shape)))
    return seen


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 4}, {"prompt_name": "query"}, {"normalize_embeddings": True}, {"truncate_dim": 16},
     {"output_value": "token_embeddings"}],
    ids=str,
)  # fmt: skip
def test_encode_gives_the_same_without_padding(model, options):
    wanted, seen = model.encode(MIXED, **options), shapes_of(model)
    with sparing.approximate(model, "exact", padding="remove"):
        found = model.encode(MIXED, **options)
    assert {shape[0] for shape in seen} == {1}, "valid tokens alone"
    for a, b in zip(found, wanted, strict=True):
        assert np.allclose(np.asarray(a), np.asarray(b), atol=1e-5)
    assert np.array_equal(model.encode(MIXED[:2]), model.encode(MIXED[:2])), "restored"


@pytest.mark.slow  # two processes that import everything anew
def test_encode_by_several_processes(model):
    wanted = model.encode(MIXED)
    with sparing.approximate(model, "exact", padding="remove"):
        found = model.encode(MIXED, device=["cpu", "cpu"], chunk_size=4)
    assert np.allclose(found, wanted, atol=1e-5)


def test_a_cross_encoder_scores_the_same(folder):
    from sentence_transformers import CrossEncoder

    scorer = CrossEncoder(folder, device="cpu", num_labels=1)
    pairs = list(zip(MIXED[:6], MIXED[6:12], strict=True))
    wanted = scorer.predict(pairs)
    with sparing.approximate(scorer, "exact", padding="remove") as handle:
        found = scorer.predict(pairs)
        ran = handle.statistics().total
        assert (ran.calls, ran.exact_calls, ran.reduction) == (2, 0, 1.0)
    assert np.allclose(found, wanted, atol=1e-5)
    compared = sparing.compare(
        scorer, MIXED[:4], methods=["window(size=4)"], length=32, rounds=1, jobs=1, lengths=False, progress=False
    )
    assert (compared.kind, compared.rows[0].refused) == ("classifier", None)


def test_a_comparison_pools_as_the_model_does(model, folder):
    given = prepare(model, MIXED[:3], documents=3)
    for text, ids in zip(MIXED[:3], given.rows, strict=True):
        with torch.no_grad():
            found = digest(given.subject, ids, given.subject.run(ids))["embedding"]
        assert np.allclose(found, model.encode(text), atol=1e-6), "at the first token, not the mean"
    assert load(folder).fingerprint == given.subject.fingerprint
    compared = sparing.compare(
        model,
        [*MIXED[:4], "many words " * 9],
        methods=["window(size=4)"],
        length=64,
        rounds=1,
        jobs=2,
        lengths=False,
        progress=False,
    )
    assert (compared.kind, compared.rows[0].refused) == ("encoder", None)
    assert compared.notes[-1].startswith("sentence-transformers cuts texts at 60 tokens for this model")


def test_prompts_of_the_model_come_before_every_text(model):
    model.default_prompt_name = "query"
    with_prompt = prepare(model, ["some words"], documents=1)
    model.default_prompt_name = None
    assert len(with_prompt.rows[0]) == len(prepare(model, ["some words"], documents=1).rows[0]) + len("query: ")


def test_a_plan_takes_such_a_model(model):
    found = sparing.plan(
        model, [f"text {n} of many, with words" for n in range(70)], tolerance=0.5, rounds=1, jobs=1,
        methods=["window(size=4)"], length=40, progress=False,
    )  # fmt: skip
    assert found.kind == "encoder"


def test_positions_are_extended_inside(model):
    assert sparing.extend_positions(model, 1024) is model
    assert model.max_seq_length == 1024
    assert model[0].auto_model.config.max_position_embeddings == 1024
    assert model.encode("words " * 150).shape == (64,)


def test_without_the_package_another_pooling_is_said(folder, monkeypatch):
    monkeypatch.setattr(sentences, "find_spec", lambda name: None)
    found = load(folder)
    assert found.pooling is None
    assert found.note.startswith("This model makes embeddings in its own way")
    assert prepare(found, MIXED[:3], documents=3).notes[0] == found.note


def test_models_without_an_encoder_in_front_are_refused():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    with pytest.raises(ValueError, match="SentenceTransformer holds no model of transformers in its first module"):
        sparing.compare(SentenceTransformer(modules=[Normalize()]), MIXED)
