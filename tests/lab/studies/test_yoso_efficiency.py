import pytest
import torch

from sparing.workbench.benchmark.workload import AttentionInputs, Workload, clustered, sdpa_work, softmax_work
from sparing_lab.studies import _yoso_race
from sparing_lab.studies._yoso_race import FUSED, SELF, SPECS, race_at
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_efficiency import LENGTHS, PER_TOKEN, QUANTITIES, STUDY, TABLE, YOSO, ratio
from tests.support.verdicts import changed, others, shown, verdict

NAME = "yoso-efficiency"
CLAIMS = [claim.key for claim in STUDY.claims]


def table4():
    """The paper's table as if it were measured, a fused attention that is slower than all, and a constant time per token."""
    fused = {n: {name: 10 * value for name, value in TABLE[SELF][n].items()} for n in LENGTHS}
    found = []
    for side, by_length in {**TABLE, FUSED: fused}.items():
        for length, values in by_length.items():
            times = {
                f"{part} {rival}": (both[length][part] / values[part],) * 3
                for rival, both in ((SELF, TABLE[SELF]), (FUSED, fused))
                for part in ("forward", "backward")
            }
            found.append({"what": "race", "side": side, "length": length, "why": "", **values, **times})
    per = [{"what": "per token", "side": side, "length": n, "seconds": n * 1e-5} for side in YOSO for n in PER_TOKEN]
    return found + per


def scaled(rows, sides, factor, *quantities, length=None):
    """The rows with other values, and other ratios of times."""
    found = []
    for row in rows:
        mine = row["what"] == "race" and row["side"] in sides and length in (None, row["length"])
        new = {}
        for name in quantities if mine else ():
            by = row["length"] ** factor if isinstance(factor, float) and length is None else factor
            new[name] = row[name] * by
            for rival in (SELF, FUSED):
                if f"{name} {rival}" in row:
                    new[f"{name} {rival}"] = (row[f"{name} {rival}"][0] / by,) * 3
        found.append({**row, **new})
    return found


def test_the_papers_own_table_meets_the_criteria():
    assert others(NAME, table4()) == {}


@pytest.mark.parametrize(
    ("key", "sides", "quantity", "power"),
    [
        ("quadratic", [SELF], "forward", -1.0),
        ("quadratic", [SELF], "cache", -1.0),
        ("linear-time", ["YOSO-64"], "backward", 1.0),
        ("linear-memory", ["YOSO-16"], "testing", 1.0),
        ("linear-memory", ["YOSO-16"], "cache", 1.0),
    ],
)
def test_another_growth_fails(key, sides, quantity, power):
    assert verdict(NAME, key, scaled(table4(), sides, power, quantity)) == "does not"


def test_a_growth_between_the_two_is_the_same_shape():
    assert verdict(NAME, "linear-time", scaled(table4(), YOSO, 0.3, "forward")) == "same shape"
    assert verdict(NAME, "linear-time", scaled(table4(), YOSO, -0.4, "forward")) == "same shape"
    assert verdict(NAME, "linear-memory", scaled(table4(), YOSO, 0.3, "training")) == "same shape"
    assert verdict(NAME, "quadratic", scaled(table4(), [SELF], -0.1, "forward")) == "same shape"


@pytest.mark.parametrize(
    ("key", "sides", "quantity", "length", "times", "said"),
    [
        ("hashes", ["YOSO-128"], "forward", 4096, 10, "does not"),
        ("short", ["YOSO-32"], "backward", 512, 4, "does not"),
        ("short", ["YOSO-32"], "backward", 512, 1 / 8, "same shape"),
        ("speed", ["YOSO-32"], "forward", 4096, 2, "same shape"),
        ("speed", ["YOSO-32"], "forward", 4096, 5, "does not"),
        ("fused", ["YOSO-128"], "backward", 4096, 100, "same shape"),
        ("fused", YOSO, "backward", 4096, 1000, "same shape"),
        ("cache", ["YOSO-16"], "cache", 4096, 2, "same shape"),
        ("cache", ["YOSO-16"], "cache", 4096, 30, "does not"),
        ("peak", ["YOSO-64"], "training", 4096, 1.5, "same shape"),
        ("peak", ["YOSO-64"], "testing", 4096, 30, "does not"),
        ("others-cache", ["YOSO-32"], "cache", 512, 1.5, "same shape"),
        ("others-cache", ["YOSO-32"], "cache", 512, 2.5, "does not"),
        ("others-time", ["YOSO-32"], "forward", 4096, 1.9, "same shape"),
        ("others-time", ["YOSO-32"], "forward", 4096, 5, "does not"),
    ],
)
def test_less_of_a_gain_fails(key, sides, quantity, length, times, said):
    assert verdict(NAME, key, scaled(table4(), sides, times, quantity, length=length)) == said


def test_a_method_that_is_never_faster_than_fused_attention_is_told():
    slow = scaled(table4(), YOSO, 1000, "forward", "backward", length=4096)
    assert verdict(NAME, "fused", slow) == "does not"


@pytest.mark.parametrize(("growth", "said"), [(0.1, "same shape"), (1.5, "same shape"), (3.0, "does not")])
def test_time_per_token_may_grow_by_a_third(growth, said):
    def last(row):
        return row["what"] == "per token" and row["length"] == 4096 and row["side"] == "YOSO-64"

    assert verdict(NAME, "per-token", changed(table4(), last, seconds=4096e-5 * growth)) == said


def test_sides_that_did_not_run_are_not_judged():
    rows = [
        {k: row[k] for k in ("what", "side", "length")} | {"why": "no memory"} if row["what"] == "race" else row
        for row in table4()
    ]
    said = {key: verdict(NAME, key, rows) for key in CLAIMS}
    assert said == dict.fromkeys(CLAIMS, "not run") | {"per-token": "reproduces"}
    assert STUDY.tables(rows)[-1].rows[0][-1] == "no memory"


def test_the_papers_table_is_whole():
    assert set(TABLE) == {SELF, *SPECS}
    assert all(set(values) == set(QUANTITIES) for by_length in TABLE.values() for values in by_length.values())
    assert ratio("YOSO-16", 4096, "forward") == pytest.approx(4.6, abs=0.01)
    assert ratio("YOSO-32", 4096, "cache") == pytest.approx(2589 / 142)
    assert ratio("YOSO-32", 8192, "cache") is None


def test_a_race_measures_every_side(monkeypatch):
    sides = [SELF, FUSED, "YOSO-16", "Linformer-128", "Reformer-2", "Longformer-64"]
    monkeypatch.setattr(_yoso_race, "red", lambda spec: "it is red" if spec == SPECS["Reformer-2"] else "")
    rows = {row["side"]: row for row in race_at(clustered(1, 2, 96, 16), sides, 1e-6)}
    assert rows["Reformer-2"] == {"side": "Reformer-2", "why": "it is red"}, "no figures of a method that is wrong"
    inputs = 4 * 2 * 96 * 16
    assert rows[SELF]["cache"] == 3 * inputs + 4 * 2 * 96 * 96, "q, k, v and the weights"
    assert rows[SELF]["cache"] > rows["YOSO-16"]["cache"] >= 4 * inputs, "q, k, v and the output"
    for side in set(sides) - {"Reformer-2"}:
        assert all(rows[side][name] > 0 for name in ("forward", "backward", "testing", "training"))
    assert rows[FUSED][f"forward {FUSED}"] == (1, 1, 1)


def test_the_gate_is_asked():
    assert _yoso_race.red("window(size=64)") == ""


def test_self_attention_is_left_out_where_its_matrix_does_not_fit(monkeypatch):
    monkeypatch.setattr(_yoso_race.memory, "available_bytes", lambda: 2**20)
    (row,) = race_at(clustered(1, 2, 256, 16), [SELF], 1e-6)
    assert "0 GiB are free" in row["why"]


def test_materialised_attention_is_attention():
    inputs = clustered(1, 2, 40, 16)
    one, other = (work.compute(*work.leaves) for work in (softmax_work(inputs), sdpa_work(inputs, torch.float32)))
    assert torch.allclose(one, other, atol=1e-5)


def test_the_backward_pass_alone_gives_the_gradients_every_time():
    work = softmax_work(clustered(1, 2, 24, 16))
    again, whole = work.gradients(), work.call(backward=True)()
    for _ in range(2):
        assert all(torch.allclose(a, b) for a, b in zip(again(), whole, strict=True))


def test_bytes_that_are_kept_are_counted_once():
    x = torch.ones(8, 4)
    inputs = AttentionInputs(q=x[None, None], k=x[None, None], v=x[None, None])
    assert Workload(lambda q, k, v: q * q * q, (inputs.q, inputs.k, inputs.v)).kept_bytes() == 2 * 128, "q, and q * q"


def test_the_scales_name_their_lengths():
    small, paper = (STUDY.cells(Settings(scale)) for scale in ("small", "paper"))
    assert [cell["length"] for cell in small if cell["what"] == "race"] == [512, 1024, 2048, 4096]
    assert [cell["length"] for cell in paper if cell["what"] == "race"][-1] == 65536
    assert (small[0]["heads"], small[0]["width"]) == (12, 64)


def test_tables_and_figure_take_all_rows():
    tables, figure = shown(NAME, table4())
    assert all(table.rows for table in tables)
    assert all(axes.get_xlabel() and axes.get_title() for axes in figure.axes)
