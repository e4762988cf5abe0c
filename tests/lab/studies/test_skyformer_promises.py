import pytest
import torch

from sparing_lab.studies import skyformer_theory, study
from sparing_lab.studies._skyformer_theory import points
from sparing_lab.studies.rows import pick, the
from sparing_lab.studies.skyformer_lift import circle, iterated, kernel_matrix, promise
from sparing_lab.studies.study import Settings
from tests.support.verdicts import changed, verdict

NAME = "skyformer-theory"


def measured(**cell):
    found = study(NAME).measure(Settings(), cell)
    return [{**cell, **row} for row in (found if isinstance(found, list) else [found])]


@pytest.fixture(scope="module")
def rows():
    """Small pieces of every kind, without MiniLM; the theorem's draws on few points, where its landmarks are given."""
    found = []
    for data in ("circle", "normal"):
        found += measured(what="order", data=data, gamma=0.1, n=40, seeds=1)
        found += measured(what="scaled", data=data, gamma=0.1, n=40, landmarks=32)
        found += measured(what="sweep", data=data, n=40, landmarks=16, seeds=2)
        found += measured(what="steps", data=data, n=40, landmarks=16, gamma=0.1)
    kinds = (("theorem", 0.0), ("theorem", 0.1), ("theorem", 50.0), ("halved", 0.0), ("control", 0.0))
    for landmarks, gamma in kinds:
        found += measured(what="promise", n=60, eps=0.1, delta=0.1, landmarks=landmarks, gamma=gamma, draws=9)
    # So few rows are fewer than the theorem's landmarks, and all of them are taken; in the study they are not.
    found = changed(found, lambda row: row.get("landmarks") == "theorem" and row["gamma"] > 0, count=120)
    return changed(found, lambda row: row.get("landmarks") == "theorem" and row["gamma"] == 0, n=400)


@pytest.mark.parametrize(
    "key", [claim.key for claim in study(NAME).claims if claim.key not in ("eigenvalues", "authors")]
)
def test_what_is_proved_is_found(rows, key):
    assert verdict(NAME, key, rows) == "reproduces"


def test_an_eigenvalue_below_zero_breaks_the_order(rows):
    def exact(row):
        return row["what"] == "order" and row["solver"] == "exact"

    assert verdict(NAME, "lower", changed(rows, exact, lowest=-1e-6)) == "does not"
    assert verdict(NAME, "lower", changed(rows, lambda row: row["what"] == "promise", lowest=-1e-6)) == "does not"


def test_a_stopped_iteration_must_stay_below_and_the_control_must_not(rows):
    def of(*names):
        return lambda row: row["what"] == "order" and row["solver"] in names

    assert verdict(NAME, "early", changed(rows, of("transpose"), lowest=-1e-6)) == "does not"
    assert verdict(NAME, "early", changed(rows, of("too far"), lowest=0.0)) == "does not"


def test_eigenvalues_of_one_are_not_below_one(rows):
    assert verdict(NAME, "eigenvalues", rows) == "same shape"
    assert "and 1 every time" in next(c for c in study(NAME).claims if c.key == "eigenvalues").judge(rows).ours

    def scaled(row):
        return row["what"] == "scaled"

    assert verdict(NAME, "eigenvalues", changed(rows, scaled, most=[0.99])) == "reproduces"
    assert verdict(NAME, "eigenvalues", changed(rows, scaled, most=[1.01])) == "does not"
    assert verdict(NAME, "eigenvalues", changed(rows, scaled, least=1e-4)) == "does not"  # below gamma / (d + gamma)


def test_failures_beyond_chance_and_a_promise_without_power_refute_the_theorem(rows):
    def draws(kind, gamma=0.0):
        return lambda row: row["what"] == "promise" and row["landmarks"] == kind and row["gamma"] == gamma

    size = the(rows, what="promise", landmarks="control")["size"]
    most = [0.2 * size] * 8 + [0.0]
    assert verdict(NAME, "theorem", changed(rows, draws("theorem"), block=most)) == "does not"
    assert verdict(NAME, "theorem", changed(rows, draws("theorem"), whole=most)) == "does not"
    assert verdict(NAME, "theorem", changed(rows, draws("theorem"), block=[0.2 * size] + [0.0] * 8)) == "reproduces"
    assert verdict(NAME, "theorem", changed(rows, draws("theorem"), n=60)) == "does not"  # asks for more than all rows
    assert verdict(NAME, "theorem", changed(rows, draws("control"), block=[0.0] * 9)) == "does not"
    assert verdict(NAME, "halved", changed(rows, draws("halved"), block=most)) == "same shape"
    assert verdict(NAME, "damped", changed(rows, draws("theorem", 0.1), whole=most)) == "does not"
    assert verdict(NAME, "damped", changed(rows, draws("theorem", 50.0), whole=[0.0] * 9)) == "same shape"


def test_a_block_of_more_than_half_is_not_halved(rows):
    def sweep(row):
        return row["what"] == "sweep"

    assert verdict(NAME, "halved", changed(rows, sweep, block=[0.6], whole=[1.0])) == "same shape"
    assert verdict(NAME, "halved", changed(rows, sweep, block=[1.1], whole=[1.0])) == "does not"


def test_an_inverse_is_one_when_little_is_missing(rows):
    def six(start):
        return lambda row: row["what"] == "steps" and row["start"] == start and row["steps"] == 6

    for start, key in (("transpose", "authors"), ("identity", "identity")):
        fine = changed(changed(rows, six("transpose"), residual=0.05), six("identity"), residual=0.01)
        assert verdict(NAME, key, fine) == "reproduces"
        rough = changed(changed(rows, six("transpose"), residual=0.9), six("identity"), residual=0.5)
        assert verdict(NAME, key, changed(rough, six(start), error=1.05, best=1.0)) == "same shape"
        assert verdict(NAME, key, changed(rough, six(start), error=2.0, best=1.0)) == "does not"
    swapped = changed(changed(rows, six("transpose"), residual=0.01), six("identity"), residual=0.05)
    assert verdict(NAME, "identity", swapped) == "does not"


def test_the_convergence_of_both_starts():
    """256 normal queries and keys, 128 landmarks, gamma 0.1: known to about the draw of the landmarks."""
    found = measured(what="steps", data="normal", n=256, landmarks=128, gamma=0.1)
    steps = (2, 4, 6, 8)
    ours = {start: [the(found, start=start, steps=s) for s in steps] for start in ("identity", "transpose")}
    assert [row["residual"] for row in ours["identity"]] == pytest.approx([0.96, 0.64, 0.0115, 0], abs=0.06)
    assert [row["residual"] for row in ours["transpose"]] == pytest.approx([1, 0.999, 0.985, 0.85], abs=0.06)
    assert [row["error"] for row in ours["identity"]] == pytest.approx([0.0533, 0.0365, 0.036, 0.036], rel=0.15)
    assert [row["error"] for row in ours["transpose"]] == pytest.approx([0.0804, 0.0595, 0.0401, 0.0361], rel=0.15)


def test_the_promise_of_a_rank_one_kernel():
    """Equal rows: one eigenvalue 2n, equal leverages."""
    n = 5
    slack, dimension, landmarks = promise(torch.ones(2 * n, 2 * n, dtype=torch.float64), n, eps=0.1, delta=0.1)
    assert slack == pytest.approx(0.1 * n)
    assert dimension == pytest.approx(2 * n / (2 * n + 0.5))
    assert landmarks == 95  # 56/3 x 10/10.5 x log(200), rounded up


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match="start='zero' is not one of identity, transpose"):
        iterated(torch.eye(2), 1, start="zero")


def test_all_landmarks_leave_nothing(rows):
    """A negative control of the sweep: 16 landmarks leave something on normal data, nearly nothing on a circle."""
    left = {
        data: max(max(row["block"]) for row in pick(rows, what="sweep", data=data)) for data in ("circle", "normal")
    }
    assert left["circle"] < 1e-3 < left["normal"]
    q, k, scale = points("circle", 40)
    torch.testing.assert_close(kernel_matrix(q, k, scale), kernel_matrix(*circle(40), 1.0))


def test_the_cells_cover_real_and_made_up_data():
    cells = study(NAME).cells(Settings())
    for what in ("order", "scaled", "sweep", "asked", "steps"):
        assert {cell["data"] for cell in pick(cells, what=what)} == set(skyformer_theory.DATA)
    assert any("minilm" in data for data in skyformer_theory.DATA)
    assert {cell["draws"] for cell in pick(study(NAME).cells(Settings("paper")), what="promise")} == {100}
