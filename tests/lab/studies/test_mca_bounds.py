import math

import pytest
import torch

from sparing.contract import Projection
from sparing.methods.monte_carlo.sampling import mean_square_error
from sparing_lab.studies import mca_bounds, study
from sparing_lab.studies._mca_bounds import gaussian, row_error, token_error, worst
from sparing_lab.studies.study import Settings
from tests.support.verdicts import changed, others, shown, verdict

NAME = "mca-bounds"


def token(source, r, **other):
    row = {"what": "token", "source": source, "layer": "", "r": r, "rms": r**-0.5, "predicted": r**-0.5}
    return {**row, "bound": 1.01 * r**-0.5, "worst_mean": 0.95, "z": 0.5, "excess": -3.0, **other}


def call(source, samples, alpha, n):
    error = alpha * n**-0.25
    return {
        "what": "rows", "source": source, "layer": "last", "samples": samples, "alpha": alpha, "n": n, "rms": error,
        "predicted": error, "other": 2 * error, "bound": 1.5 * alpha, "output": 0.5, "z": -1.0, "worst_mean": 0.7,
        "worst_rms": 0.8, "rate": 0.5, "tails": [[0.0, 0.01], [0.0, 0.01], [0.0, 0.0]],
    }  # fmt: skip


@pytest.fixture
def rows():
    pairs = [(alpha, 128) for alpha in mca_bounds.ALPHAS] + [(0.4, n) for n in (32, 64, 256)]
    calls = [
        call(source, samples, *pair) for source in ("minilm", "gaussian") for samples in ("independent", "shared")
        for pair in pairs
    ]  # fmt: skip
    tokens = [token(source, r) for source in ("minilm", "gaussian") for r in mca_bounds.COUNTS]
    worst = [
        {"what": "worst", "case": case, "rounding": rounding, "wanted": 1.0, "r": 1, "ratio": x, "rms_ratio": x}
        for case, rounding, x in (("equal tokens", "up", 1.0), ("one token", "up", 0.7), ("one token", "down", 1.0))
    ]
    return [*tokens, *calls, *worst]


def is_token(row):
    return row["what"] == "token"


def is_call(row):
    return row["what"] == "rows"


def test_rows_that_satisfy_all_claims(rows):
    calls = [row for row in rows if is_call(row)]
    close = [{**row, "bound": 1.5 * row["rms"]} if row in calls else row for row in rows]
    assert others(NAME, close) == {}


def test_a_token_above_its_bound(rows):
    assert verdict(NAME, "lemma", changed(rows, is_token, excess=5.0)) == "does not"


def test_an_error_that_falls_with_the_samples_and_not_their_root(rows):
    linear = [{**row, "rms": 1 / row["r"]} if is_token(row) else row for row in rows]
    assert verdict(NAME, "slope", linear) == "does not"
    assert verdict(NAME, "slope", changed(rows, is_token, rms=1.0)) == "does not"


def test_errors_that_the_formula_does_not_predict(rows):
    assert verdict(NAME, "variance", changed(rows, lambda row: row.get("samples") == "shared", z=-5.0)) == "same shape"
    assert verdict(NAME, "variance", changed(rows, is_token, z=6.0)) == "does not"


def test_a_row_above_its_bound(rows):
    assert verdict(NAME, "theorem", changed(rows, lambda row: row.get("n") == 256, worst_mean=1.01)) == "does not"
    far = [[0.0, 0.0], [0.11, 0.11], [0.0, 0.0]]
    assert verdict(NAME, "tail", changed(rows, lambda row: row.get("n") == 256, tails=far)) == "does not"


def test_rounding_that_breaks_the_bound(rows):
    def down(row):
        return row.get("rounding") == "down"

    def up(row):
        return row.get("rounding") == "up"

    assert verdict(NAME, "rounding", changed(rows, down, rms_ratio=1.41)) == "same shape"
    assert verdict(NAME, "rounding", changed(rows, up, ratio=1.01)) == "does not"


def test_a_bound_far_from_the_error_is_not_tight(rows):
    assert verdict(NAME, "tight", changed(rows, is_call, rms=0.2, bound=1.0)) == "same shape"
    assert verdict(NAME, "tight", changed(rows, is_call, rms=0.05, bound=1.0)) == "does not"
    smooth = changed(rows, is_call, rms=1.0, bound=1.9)
    assert verdict(
        NAME, "tight", changed(smooth, lambda row: is_call(row) and row["source"] == "gaussian", rms=0.1)
    ) == ("reproduces"), "made-up data do not count"


def test_an_error_that_is_not_proportional_to_alpha(rows):
    steep = [{**row, "rms": row["alpha"] ** 2} if is_call(row) else row for row in rows]
    assert verdict(NAME, "linear", steep) == "same shape"
    assert verdict(NAME, "linear", changed(rows, is_call, rms=0.3)) == "does not"


def test_an_error_that_grows_with_the_length(rows):
    def long(samples):
        return lambda row: row.get("n") == 256 and row.get("samples") == samples

    assert verdict(NAME, "length", changed(rows, long("shared"), rms=9.0)) == "same shape"
    assert verdict(NAME, "length", changed(rows, long("independent"), rms=9.0)) == "does not"


def test_calls_in_which_all_tokens_are_exact_say_nothing(rows):
    exact = [{**row, "rms": 0.0, "predicted": 0.0, "z": 0.0} if row.get("alpha") == 0.1 else row for row in rows]
    for claim in study(NAME).claims:
        assert verdict(NAME, claim.key, exact) == verdict(NAME, claim.key, rows)


def test_the_exact_error_of_two_tokens_by_all_their_samples():
    """r = 1 for both: nine pairs of features for lists of their own, three features for a shared list."""
    w = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, -1.0, 0.5], [2.0, 0.5, 0.0]], dtype=torch.float64)
    weights, counts = torch.tensor([[0.3, 0.7]], dtype=torch.float64), torch.tensor([1, 1])
    law = w.square().sum(-1) / w.square().sum()
    one = x[:, :, None] * w / law[:, None]  # (token, feature, e)
    error = weights[0, :, None, None] * (one - (x @ w)[:, None])
    apart = sum(law[a] * law[b] * (error[0, a] + error[1, b]).square().sum() for a in range(3) for b in range(3))
    shared = sum(law[a] * (error[0, a] + error[1, a]).square().sum() for a in range(3))
    found = [float(mean_square_error(weights, x, w, counts, shared=kind)) for kind in (False, True)]
    assert found == pytest.approx([float(apart), float(shared)], rel=1e-12)
    assert found[0] != pytest.approx(found[1], rel=0.05)
    longer = torch.tensor([3, 1])  # r = d is exact, r = 0 is left out
    assert float(mean_square_error(weights, x, w, longer, shared=True)) == pytest.approx(
        float(mean_square_error(weights * torch.tensor([0.0, 1.0]), x, w, counts, shared=False))
    )
    assert float(mean_square_error(weights, x, w, 0 * longer, shared=True)) == 0.0


@pytest.mark.parametrize("samples", ["independent", "shared"])
def test_a_small_call_errs_as_predicted(samples):
    layer = gaussian(12, heads=2, width=8, features=24)
    found = row_error(layer.query, layer.key, layer.value, 1.0, samples, 150)
    assert abs(found["z"]) < mca_bounds.LIMIT
    assert 0 < found["worst_mean"] < found["worst_rms"] < 1
    assert found["bound"] == pytest.approx(
        float(layer.value.x.norm(dim=-1).mean() * layer.value.weight.norm() / math.sqrt(2)), rel=0.05
    )
    # Control: tokens with much in common, where the two kinds of samples differ.
    alike = layer.value.x[:, :1] + 0.1 * layer.value.x
    found = row_error(layer.query, layer.key, Projection(alike, *layer.value[1:]), 1.0, samples, 150)
    assert abs(found["rms"] / found["predicted"] - 1) < 0.25 < abs(found["rms"] / found["other"] - 1)


def test_a_token_errs_by_lemma_1():
    layer = gaussian(4, heads=2, width=8, features=64)
    found = {r: token_error(layer.value, 2, r, 2000) for r in (1, 16)}
    assert all(abs(row["z"]) < mca_bounds.LIMIT > row["excess"] for row in found.values())
    assert found[16]["bound"] == pytest.approx(found[1]["bound"] / 4)
    assert found[16]["rms"] == pytest.approx(found[1]["rms"] / 4, rel=0.1)


def test_the_worst_cases():
    assert worst("equal tokens", "up", 20)["ratio"] == pytest.approx(1.0)
    assert worst("one token", "down", 5)["ratio"] == pytest.approx(math.sqrt(1.99))
    up = worst("one token", "up", 50)
    assert up["r"] == 2
    assert up["rms_ratio"] == pytest.approx(math.sqrt(1.99 / 2))
    assert up["ratio"] < 1


def test_pieces_of_work_name_what_they_depend_on():
    small, paper = (mca_bounds.STUDY.cells(Settings(scale)) for scale in ("small", "paper"))
    assert {cell["source"] for cell in small if "source" in cell} == {"minilm", "gaussian"}
    assert {cell["source"] for cell in paper if "source" in cell} == {"textattack/bert-base-uncased-SST-2", "gaussian"}
    assert {cell["alpha"] for cell in paper if "alpha" in cell} >= {0.2, 0.4, 0.6, 1.0}
    with pytest.raises(ValueError, match="seeds=3: a mean square error needs 10 draws"):
        mca_bounds.STUDY.cells(Settings(seeds=3))


def test_the_figure_and_the_tables_take_all_rows(rows):
    tables, figure = shown(NAME, rows)
    assert [axes.get_xscale() for axes in figure.axes] == ["log"] * 3
    assert [len(table.rows) for table in tables] == [32, 18, 3]
