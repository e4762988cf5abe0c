import math
from random import Random

import pytest
import torch

import sparing
from sparing.contract import method
from sparing.nn import CausalLM, Decoder
from sparing.oracles.kernels import OracleOf
from sparing_lab.studies import value_aware_kernels as kernels
from sparing_lab.studies._trained import running, tried
from sparing_lab.studies.study import Settings
from sparing_lab.studies.value_aware_kernels import KINDS, STUDY, TABLE_2
from sparing_lab.tasks.language import causal_task
from tests.support.verdicts import changed, others, shown, verdict

NAME = "value-aware-kernels"
LARGEST = {"exp": 0.6, "elu": 0.3, "poly": 0.2}


def rows_of_the_paper():
    """Its Table 2 as if measured here, with steps in between; 65 keys are 17."""
    rows = []
    for cell in STUDY.cells(Settings()):
        kind = cell["kind"]
        of = TABLE_2[kind]
        last = {"perplexity": of["exact"]}
        rows.append({**cell, "what": "trained", "largest": LARGEST[kind], "held": 0.9, "chance": 259.0, "last": last})
        rows.append({**cell, "what": "swap", "oracle": "exact", "r": None, **losses(of["exact"], of["exact"])})
        for oracle in ("top_keys", "value_aware"):
            one, many = of[oracle][1], of[oracle][65]
            values = {1: one, 4: math.sqrt(one * many) * (1.1 if oracle == "top_keys" else 1.0), 17: many}
            rows += [
                {**cell, "what": "swap", "oracle": oracle, "r": r, **losses(value, of["exact"])}
                for r, value in values.items()
            ]
    return rows


def losses(value, exact):
    return {"loss": math.log(value), "gap": math.log(value / exact), "error": 0.01}


ROWS = rows_of_the_paper()


def of(kind, oracle, r):
    return lambda row: row["what"] == "swap" and (row["kind"], row["oracle"], row["r"]) == (kind, oracle, r)


def test_what_the_paper_says_is_what_it_says():
    assert others(NAME, ROWS) == {}


@pytest.mark.parametrize(
    ("key", "where", "value", "expected"),
    [
        ("aware", of("poly", "value_aware", 1), 6800.0, "same shape"),
        ("aware", of("poly", "value_aware", 4), 6800.0, "does not"),
        ("aware", of("exp", "top_keys", 17), 30.5, "does not"),
        ("exact", of("elu", "value_aware", 17), 35.31, "same shape"),
        ("exact", of("elu", "value_aware", 17), 36.0, "does not"),
        ("oblivious", of("exp", "top_keys", 17), 31.0, "same shape"),
        ("oblivious", of("exp", "top_keys", 17), 30.6, "does not"),
        ("single", of("exp", "value_aware", 1), 80.0, "same shape"),
        ("single", of("exp", "value_aware", 1), 1040.0, "does not"),
        ("slower", of("poly", "top_keys", 17), 60.0, "same shape"),
        ("slower", of("elu", "top_keys", 17), 36.0, "does not"),
        ("skew", of("poly", "top_keys", 17), 60.0, "same shape"),
    ],
)
def test_other_results_are_another_verdict(key, where, value, expected):
    kind = next(row["kind"] for row in ROWS if where(row))
    rows = changed(ROWS, where, **losses(value, TABLE_2[kind]["exact"]))
    assert verdict(NAME, key, rows) == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [("elu", 40.0, "same shape"), ("poly", 30.0, "does not"), ("elu", 31.0, "reproduces")],
)
def test_kernels_are_close_or_not(kind, value, expected):
    rows = changed(ROWS, of(kind, "exact", None), loss=math.log(value))
    assert verdict(NAME, "alike", rows) == expected


def test_another_kernel_is_the_most_skewed():
    rows = changed(ROWS, lambda row: row["what"] == "trained" and row["kind"] == "elu", largest=0.7)
    assert verdict(NAME, "skew", rows) == "does not"


@pytest.mark.parametrize("key", ["aware", "slower", "single", "skew"])
def test_differences_within_the_noise_do_not_count(key):
    rows = changed(ROWS, lambda row: row["what"] == "swap", error=3.0)
    assert verdict(NAME, key, rows) == "does not"


def test_seeds_count_together():
    twice = ROWS + [
        {**row, "seed": 1, **({"gap": row["gap"] + 0.2, "loss": row["loss"] + 0.2} if "gap" in row else {})}
        for row in ROWS
    ]
    loss, gap, error = kernels._of(twice, "exp", "top_keys", 17)
    assert loss == pytest.approx(math.log(33.5) + 0.1)
    assert gap == pytest.approx(math.log(33.5 / 30.5) + 0.1)
    assert error == pytest.approx(0.01 / math.sqrt(2))


@pytest.fixture
def inputs():
    return torch.randn(3, 2, 2, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)


def weights(kind, q, k):
    """By hand."""
    found = q @ k.mT / math.sqrt(6)
    if kind == "elu":
        found = (1 + torch.nn.functional.elu(q)) @ (1 + torch.nn.functional.elu(k)).mT
    found = found.exp() if kind == "exp" else found.square() if kind == "poly" else found
    found = found.tril()
    return found / found.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_oracle_takes_the_weights_of_its_kernel(kind, inputs):
    q, k, v = inputs
    kernel = method(f"kernel(kind={kind})")

    def run(spec):
        return sparing.attention(q, k, v, is_causal=True, method=OracleOf(kernel=kernel, choice=method(spec)))

    alpha = weights(kind, q, k)
    exact = alpha @ v
    torch.testing.assert_close(run("top_keys(keys=40)"), exact)
    torch.testing.assert_close(run("value_aware(keys=7)"), exact)
    top = alpha.topk(3)
    kept = torch.zeros_like(alpha).scatter(-1, top.indices, top.values)
    torch.testing.assert_close(run("top_keys(keys=3)"), kept / kept.sum(-1, keepdim=True) @ v)
    far = torch.cdist(exact, v).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), torch.inf)
    torch.testing.assert_close((run("value_aware(keys=1)") - exact).norm(dim=-1), far.amin(-1))
    if kind != "exp":  # softmax's largest weights are other keys
        softmax = sparing.attention(q, k, v, is_causal=True, method="top_keys(keys=3)")
        assert not torch.allclose(softmax, run("top_keys(keys=3)"), atol=0.1)


def test_a_method_runs_in_the_model_only_as_long_as_it_is_asked_for():
    torch.manual_seed(0)
    model = CausalLM(Decoder(50, length=32, width=16, heads=2, layers=2, method="kernel(kind=elu)")).eval()
    ids = torch.randint(50, (2, 32))
    before = model(ids)
    with running(model, "window(size=2)"):
        assert not torch.allclose(model(ids), before)
    assert torch.equal(model(ids), before)
    with running(model, "random_features(features=4)", seed=1):
        one, again = model(ids), model(ids)
    with running(model, "random_features(features=4)", seed=2):
        other = model(ids)
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)


class Next:
    """Puts the byte that follows in the alphabet first, by so many nats before all others."""

    def __init__(self, nats):
        self.nats = nats

    def __call__(self, tokens, mask):
        return self.nats * torch.nn.functional.one_hot((tokens + 1) % 260, 260).float()


@pytest.fixture
def alphabet(tmp_path):
    """A text that goes through the alphabet, and goes wrong at every space."""
    (tmp_path / "wikitext2").mkdir()
    path = tmp_path / "wikitext2" / "valid.txt"
    random = Random(0)
    path.write_text(" ".join("abcdefghijk"[: random.randint(2, 11)] for _ in range(4000)))
    return path


def test_answers_are_counted_behind_the_context(alphabet):
    task = causal_task(32, 0, [alphabet])
    whole, late = (tried(Next(50.0), task, range(20), context=context) for context in (0, 24))
    assert whole.asked.tolist() == [31.0] * 20
    assert late.asked.tolist() == [7.0] * 20
    texts = torch.stack([task.valid[number].tokens for number in range(20)])
    assert late.wrong.tolist() == (texts[:, 25:] != texts[:, 24:-1] + 1).sum(-1).tolist()
    assert 0 < late.error < 0.5
    assert late.loss == pytest.approx(50 * late.error, rel=1e-3)
    gap, error = tried(Next(0.0), task, range(20)).beyond(whole)
    assert gap == pytest.approx(math.log(260) - whole.loss, rel=1e-5)
    assert error == pytest.approx(float((whole.losses / 31).std()) / math.sqrt(20), rel=1e-4)
    assert whole.beyond(whole) == (0.0, 0.0)


def test_a_small_model_is_trained_and_tried(tmp_path):
    random = Random(0)
    (tmp_path / "wikitext2").mkdir()
    words = ["alpha", "beta", "gamma", "delta"]
    (tmp_path / "wikitext2" / "valid.txt").write_text(" ".join(random.choice(words) for _ in range(8000)))
    settings = Settings(data=tmp_path)
    cell = {
        **STUDY.cells(settings)[2], "max_length": 24, "hidden_size": 16, "num_heads": 2, "num_layers": 1, "intermediate_size": 16, "max_steps": 40,
        "batch_size": 8, "learning_rate": 0.01, "eval_steps": 40, "examples": 12, "searched": 2, "budgets": {"top_keys": [2], "value_aware": [2, 9]},
    }  # fmt: skip
    first, exact, oblivious, aware, same = STUDY.measure(settings, cell)
    assert first["metric"] < 0.2 * 256  # that of a guess
    assert 1 / 24 < first["largest"] < first["held"] < 1
    assert exact["gap"] == 0.0
    assert math.exp(exact["loss"]) == pytest.approx(first["metric"], rel=0.3)  # the same pieces, their ends only
    assert abs(same["gap"]) < 1e-5
    assert oblivious["loss"] - exact["loss"] == pytest.approx(oblivious["gap"])
    assert abs(aware["gap"]) < abs(oblivious["gap"])


def test_cells_hold_what_their_results_depend_on(tmp_path):
    cells = STUDY.cells(Settings(seeds=2))
    assert [(cell["kind"], cell["seed"]) for cell in cells] == [(kind, seed) for seed in (0, 1) for kind in KINDS]
    assert kernels._config(cells[1], None).method == "kernel(kind=poly)"
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "train.txt").write_text("another text")
    assert STUDY.cells(Settings(data=tmp_path))[0]["text"] != cells[0]["text"]


def test_the_papers_scale_is_its_model_and_wants_its_text(tmp_path):
    with pytest.raises(ValueError, match=r"wikitext103/wiki\.train\.tokens.*wikitext-103-v1"):
        STUDY.cells(Settings("paper", data=tmp_path))
    (tmp_path / "wikitext103").mkdir()
    (tmp_path / "wikitext103" / "wiki.train.tokens").write_text("a text")
    cell = STUDY.cells(Settings("paper", data=tmp_path))[0]
    assert (cell["num_layers"], cell["hidden_size"], cell["num_heads"], cell["max_length"], cell["max_steps"]) == (
        6,
        512,
        8,
        512,
        31520,
    )
    assert 65 in cell["budgets"]["top_keys"]
    assert kernels.head(cell) + 1 == 65


def test_tables_and_figure_hold_all_kernels():
    tables, figure = shown(NAME, ROWS)
    assert tables[0].rows[0] == ["exponential", "30.50", "1031.10", "33.50", "280.30", "30.50"]
    assert [row[0] for row in tables[2].rows] == list(KINDS)
    assert len(figure.axes) == 3
