import pytest
import torch

from sparing.transformers.watch import ObservedCall
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_sampling import HASHES, SAMPLERS, STUDY, TARGETS, compare
from tests.support.verdicts import changed, others, shown, verdict

NAME = "yoso-sampling"
TIMES = {"union": 1.0, "one": 1.5, "bernoulli": 1.0}


@pytest.fixture
def rows():
    """As remark 1 says: one key per table costs more, and the union is no better."""
    return [
        {**cell, "layer": layer, "target": target, "sampler": sampler, "hash": m, "variance": TIMES[sampler] / m,
         "independent": 1 / m, "keys": m / 4 if sampler == "one" else m / 2}
        for cell in STUDY.cells(Settings()) for layer in range(2)
        for target in TARGETS for sampler in SAMPLERS for m in HASHES
    ]  # fmt: skip


def test_samplers_as_in_the_paper(rows):
    assert others(NAME, rows) == {}


def test_samplers_that_are_otherwise_are_told(rows):
    def few(sampler):
        return lambda row: row["sampler"] == sampler and row["hash"] == 8 and row["target"] == "chance"

    assert verdict(NAME, "one", changed(rows, few("one"), variance=0.1)) == "same shape"
    assert verdict(NAME, "one", changed(rows, lambda row: row["sampler"] == "one", variance=0.001)) == "does not"
    assert verdict(NAME, "union", changed(rows, few("union"), variance=0.1)) == "same shape"
    assert verdict(NAME, "union", changed(rows, lambda row: row["sampler"] == "union", variance=0.001)) == "does not"
    assert verdict(NAME, "bounded", changed(rows, few("one"), keys=30.0)) == "does not"
    many = [{**row, "keys": 2.0 * row["hash"] + (row["sampler"] != "one")} for row in rows]
    assert verdict(NAME, "bounded", many) == "same shape"
    assert verdict(NAME, "independent", changed(rows, lambda row: row["sampler"] == "bernoulli", independent=1e-3)) == (
        "does not"
    )
    assert verdict(NAME, "independent", [{**row, "independent": 0.7 / row["hash"]} for row in rows]) == "same shape"


def test_variances_are_those_of_the_formula():
    """A single key: nothing to depend on, so that all three samplers are one, with the variance q (1 - q) / m."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=random) for n in (40, 1, 1))
    call = ObservedCall("one", q, k.abs() * 0 + q[:, :, :1], v, {})
    found = {row["sampler"]: row for row in compare(call, (8,), 400) if row["target"] == "chance"}
    assert found["one"]["variance"] == pytest.approx(found["bernoulli"]["variance"], rel=1e-9)
    assert found["bernoulli"]["variance"] == pytest.approx(found["bernoulli"]["independent"], rel=0.15)


def test_keys_are_counted():
    q = torch.randn(1, 1, 12, 16, generator=torch.Generator().manual_seed(0))
    found = {
        row["sampler"]: row for row in compare(ObservedCall("one", q, q, q, {}), (1,), 3) if row["target"] == "chance"
    }
    assert found["one"]["keys"] == 1, "each query finds itself or another"
    assert found["union"]["keys"] == found["bernoulli"]["keys"] >= 1


def test_tables_and_figure_take_all_rows(rows):
    tables, figure = shown(NAME, rows)
    assert all(table.rows for table in tables)
    assert all(axes.get_xlabel() and axes.get_title() for axes in figure.axes)
