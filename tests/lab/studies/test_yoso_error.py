import math
from types import SimpleNamespace

import pytest
import torch

from sparing.transformers.watch import ObservedCall
from sparing_lab.studies import _yoso
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_error import FIXED, HASHES, MODEL, NORMS, STUDY, SYNTHETIC, errors, synthetic
from tests.support import small_models
from tests.support.verdicts import changed, shown, verdict

NAME = "yoso-error"


@pytest.fixture
def rows():
    """Errors that fall with the hashes and not with the length, but for synthetic data with a fixed number of bits."""
    found = []
    for cell in STUDY.cells(Settings()):
        grow = 0.3 if cell["bits"] == FIXED else 0.0
        found += [{**cell, "hash": m, **dict.fromkeys(NORMS, m**-0.5 * cell["length"] ** grow)} for m in HASHES]
    return found


def test_a_flat_error_is_flat(rows):
    for key in ("minilm", "minilm-l2", "smollm2", "smollm2-l2", "independent", "bits", "hashes"):
        assert verdict(NAME, key, rows) == "reproduces"
    assert verdict(NAME, "paper", rows) == "not run"
    named = [{**row, "data": "hub/model"} if row["data"] == "minilm" else row for row in rows]
    assert verdict(NAME, "paper", named) == "reproduces"
    assert verdict(NAME, "minilm", named) == "not run"


@pytest.mark.parametrize(
    ("key", "data", "norm", "power", "said"),
    [
        ("minilm", "minilm", "L-infinity", 0.3, "does not"),
        ("minilm", "minilm", "L-infinity", 0.1, "same shape"),
        ("minilm", "minilm", "L-infinity", -0.1, "same shape"),
        ("minilm-l2", "minilm", "L2", 0.3, "does not"),
        ("smollm2", "smollm2", "L-infinity", 0.3, "does not"),
        ("smollm2-l2", "smollm2", "L2", 0.3, "does not"),
        ("independent", "independent", "L2", 0.3, "does not"),
        ("paper", "hub/model", "L-infinity", 0.3, "does not"),
    ],
)
def test_an_error_that_grows_with_the_length_is_not(rows, key, data, norm, power, said):
    if data == "hub/model":
        rows = [{**row, "data": data} if row["data"] == "minilm" else row for row in rows]
    grown = [
        {**row, norm: row[norm] * row["length"] ** power} if row["data"] == data and row["hash"] == 64 else row
        for row in rows
    ]
    assert verdict(NAME, key, grown) == said


def test_bits_that_do_not_help_are_told(rows):
    def fixed(row):
        return row["data"] in SYNTHETIC and row["bits"] == FIXED

    assert verdict(NAME, "bits", changed(rows, fixed, L2=0.5)) == "does not"
    one = [{**row, "L2": 0.5} if fixed(row) and row["data"] != "topics, cosine 0.7" else row for row in rows]
    assert verdict(NAME, "bits", one) == "same shape", "they help at one similarity"
    grown = [{**row, "L2": row["L2"] * row["length"] ** 0.2} for row in rows]
    assert verdict(NAME, "bits", grown) == "same shape"


def test_hashes_that_do_not_help_are_told(rows):
    assert verdict(NAME, "hashes", changed(rows, lambda row: row["length"] == 256, L2=0.5)) == "does not"
    slow = [{**row, "L2": row["hash"] ** -0.3} for row in rows]
    assert verdict(NAME, "hashes", slow) == "same shape"


def test_errors_are_those_of_the_formula():
    """A single key: every query that collides with it has its direction, all others give zero."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 32, generator=random) for n in (40, 1))
    v = torch.ones(1, 1, 1, 32)
    (row,) = errors([ObservedCall("one", q, k, v, {})], [4], 1, 4)
    share = row["L2"] ** 2  # of the queries that collide with nothing: each is wrong by its whole length
    assert 0 < share < 1
    assert share * 40 == pytest.approx(round(share * 40), abs=1e-3)
    assert row["L-infinity"] == pytest.approx(1.0)


def test_more_hashes_and_the_expectation_come_together():
    few, many = errors([synthetic(0.7, 64)], [8, 512], 1, None)
    assert many["L2"] < 0.4 * few["L2"]
    same = errors([synthetic(0.0, 64)._replace(key=synthetic(0.0, 64).query)], [4096], 1, 16)
    assert same[0]["L2"] < 0.05, "every query finds itself, and with 16 bits nothing else"


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.7, 0.9])
def test_topics_have_the_similarity_that_they_name(cosine):
    seen = synthetic(cosine, 2048)
    x = torch.nn.functional.cosine_similarity(seen.query, seen.key, dim=-1)  # of the same topic, token by token
    assert float(x.mean()) == pytest.approx(cosine, abs=0.05)
    others = torch.nn.functional.cosine_similarity(seen.query, seen.key.roll(1, 2), dim=-1)
    assert float(others.mean()) < 0.15


def test_a_model_keeps_its_bits_at_any_length(monkeypatch):
    """The paper sets them once; log2(n) of each length is beside them."""
    small = small_models.subject()
    monkeypatch.setattr(_yoso, "loaded", lambda name: small)
    layer = _yoso.layers("another small one", 16)[0]
    assert _yoso.bits_of(layer) == round(math.log2(small.model.config.max_position_embeddings))
    assert _yoso.bits_of(layer) != 4
    assert _yoso.bits_of(layer._replace(call={})) == 4, "the control: a bare call"
    cells = [cell for cell in STUDY.cells(Settings()) if cell["data"] == "minilm"]
    assert {cell["bits"] for cell in cells} == {MODEL, None}


def test_the_scales_name_their_models_and_lengths():
    paper = [cell for cell in STUDY.cells(Settings("paper")) if cell["trained"]]
    assert {cell["data"] for cell in paper} == {"uw-madison/yoso-4096"}
    assert {cell["length"] for cell in paper} == {128, 256, 512, 1024, 2048, 4096}
    assert {c["data"] for c in STUDY.cells(Settings(model="my/model")) if c["trained"]} == {"my/model"}


def test_a_model_with_too_few_positions_is_refused(monkeypatch):
    monkeypatch.setattr(_yoso, "loaded", lambda name: SimpleNamespace(positions=512))
    with pytest.raises(ValueError, match="minilm has 512 positions, and the study needs 1024"):
        _yoso.layers("minilm", 1024)


def test_layers_are_those_of_the_first_tokens(monkeypatch):
    small = small_models.subject()
    monkeypatch.setattr(_yoso, "loaded", lambda name: small)
    found = _yoso.layers("a small one", 32)
    assert len(found) == small.model.config.num_hidden_layers
    assert {seen.query.shape[-2] for seen in found} == {32}
    assert [number for number, _ in _yoso.spread(found * 5, 3)] == [0, (5 * len(found) - 1) // 2, 5 * len(found) - 1]


def test_relative_errors():
    wanted = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = torch.tensor([[3.0, 1.0], [2.0, 4.0]])
    assert float(_yoso.relative(found, wanted, 2)) == pytest.approx(5**0.5 / 5)
    assert float(_yoso.relative(found, wanted, float("inf"))) == pytest.approx(0.5)


def test_tables_and_figure_take_all_rows(rows):
    tables, figure = shown(NAME, rows)
    assert all(table.rows for table in tables)
    assert all(axes.get_xlabel() and axes.get_title() for axes in figure.axes)
