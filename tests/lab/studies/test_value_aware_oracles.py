import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from sparing_lab.studies._value_aware import Group, between, budget, built, groups
from sparing_lab.studies.study import Settings
from sparing_lab.studies.value_aware_oracles import MASKED, STUDY
from sparing_lab.tasks import masked
from tests.support.model_zoo import SMALL, TOKENS
from tests.support.small_models import subject
from tests.support.verdicts import changed, others, verdict

NAME = "value-aware-oracles"
FEW, MANY = ("lsh(rounds=4, chunk=4, combine=sum, align=rank)", "lsh(rounds=16, chunk=32, combine=sum, align=rank)")
POLES = "key_clusters(clusters=32, keys=32, window=16)"


def swaps(model, kind, length, values, **read):
    of = {"what": "swap", "model": model, "kind": kind, "length": length, "error": None, "seed": 0}
    return [{**of, "spec": spec, "value": value, "read": read.get(spec)} for spec, value in values.items()]


def built_row(model, keys):
    return {"what": "built", "model": model, "kind": "", "length": 512, "keys": keys, "error": 1e-7, "most": keys,
            "least": 0.0, "off": 1e-15}  # fmt: skip


#: What the paper says, in three models.
ROWS = [
    *swaps(
        "minilm", "encoder", 512,
        {"exact": 0.0, "top_keys(keys=1)": 0.8, "top_keys(keys=8)": 0.4, "top_keys(keys=64)": 0.2,
         "top_keys(keys=256)": 0.05, "value_aware(keys=1)": 0.6, "value_aware(keys=8)": 0.01,
         "value_aware(keys=33)": 0.0, "window(size=8)": 0.5, "window(size=64)": 0.3,
         "random_features(features=256)": 0.7, FEW: 0.7, MANY: 0.02, POLES: 0.03},
        **{POLES: 100.0},
    ),
    *swaps(
        "smollm2", "language model", 512,
        {"exact": 15.0, "top_keys(keys=1)": 4000.0, "top_keys(keys=8)": 40.0, "value_aware(keys=1)": 500.0,
         "value_aware(keys=8)": 16.0, "value_aware(keys=65)": 15.0, "top_keys(keys=65)": 15.5, "window(size=8)": 90.0,
         "random_features(features=256)": 3000.0},
    ),
    *swaps(
        "smollm2", "language model", 2048,
        {"exact": 20.0, "top_keys(keys=8)": 60.0, "top_keys(keys=65)": 24.0, "window(size=8)": 90.0},
    ),
    built_row("minilm", 33), built_row("smollm2", 65),
]  # fmt: skip


def of(spec, model=None, length=None):
    def where(row):
        return row.get("spec") == spec and model in (None, row["model"]) and length in (None, row["length"])

    return where


def test_what_the_paper_says_is_what_it_says():
    assert others(NAME, ROWS) == {}


@pytest.mark.parametrize(
    ("key", "where", "value", "expected"),
    [
        ("aware", of("value_aware(keys=1)", "minilm"), 0.9, "same shape"),
        ("aware", of("value_aware(keys=8)", "smollm2"), 41.0, "does not"),
        ("exact", of("value_aware(keys=65)"), 15.1, "does not"),
        ("exact", of("value_aware(keys=33)"), 0.001, "does not"),
        ("oblivious", of("top_keys(keys=65)", "smollm2", 2048), 21.0, "same shape"),
        ("oblivious", of("top_keys(keys=65)", "smollm2", 2048), 20 * 33.5 / 30.5, "reproduces"),  # the paper's own
        ("oblivious", of("top_keys(keys=65)", "smollm2", 2048), 20.1, "does not"),
        ("single", of("value_aware(keys=1)", "smollm2"), 40.0, "same shape"),
        ("single", of("value_aware(keys=1)", "smollm2"), 5000.0, "does not"),
        ("features", of("random_features(features=256)", "minilm"), 0.1, "same shape"),
        ("lsh", of(MANY), 0.2, "same shape"),
        ("lsh", of(FEW), 0.03, "does not"),
        ("window", of("window(size=8)", "smollm2", 2048), 50.0, "same shape"),
        ("window", of("window(size=8)", "smollm2"), 30.0, "does not"),
        ("key_clusters", of(POLES), 0.18, "does not"),
    ],
)
def test_other_results_are_another_verdict(key, where, value, expected):
    assert verdict(NAME, key, changed(ROWS, where, value=value)) == expected


def test_random_features_that_are_near_exact_attention_everywhere():
    rows = changed(ROWS, of("random_features(features=256)", "minilm"), value=0.1)
    rows = changed(rows, of("random_features(features=256)", "smollm2"), value=15.5)
    assert verdict(NAME, "features", rows) == "does not"


@pytest.mark.parametrize(("name", "value"), [("error", 1e-4), ("most", 66), ("least", -1e-3), ("off", 1e-6)])
def test_values_that_do_not_make_the_output_are_not_exact(name, value):
    rows = changed(ROWS, lambda row: row["what"] == "built" and row["model"] == "smollm2", **{name: value})
    assert verdict(NAME, "exact", rows) == "does not"


def test_a_key_clusters_outside_the_range_is_not_judged():
    assert verdict(NAME, "key_clusters", changed(ROWS, of(POLES), read=400.0)) == "not run"


def test_one_key_clusters_of_two_is_better():
    (first,) = [row for row in ROWS if row.get("spec") == POLES]
    worse = {**first, "spec": "key_clusters(clusters=64, keys=76, window=16)", "value": 0.3}
    assert verdict(NAME, "key_clusters", [*ROWS, worse]) == "same shape"


def test_nothing_is_claimed_without_rows():
    rows = swaps("minilm", "encoder", 512, {"exact": 0.0})
    for claim in STUDY.claims:
        assert verdict(NAME, claim.key, rows) == "not run", claim.key


def test_seeds_count_together():
    rows = swaps("minilm", "encoder", 512, {"exact": 0.0, FEW: 0.2})
    both = Group([*rows, {**rows[1], "seed": 1, "value": 0.4}])
    assert both.values[FEW] == pytest.approx(0.3)


def test_losses_of_a_language_model_are_nats():
    (group,) = groups(swaps("smollm2", "language model", 512, {"exact": 10.0, "top_keys(keys=1)": 10.0 * math.e}))
    assert group.loss("top_keys(keys=1)") == pytest.approx(1.0)
    assert group.curve("top_keys") == pytest.approx({1: 1.0})


def test_r_is_counted_as_in_the_paper():
    assert budget(FEW) == 8
    assert budget("random_features(features=256)") == 256
    assert budget("window(size=64)") == 64


def test_a_curve_between_its_points():
    assert between({1: 1.0, 4: 0.25, 16: 0.01}, 2) == pytest.approx(0.5)
    assert between({1: 1.0, 4: 0.25}, 8) is None


def test_width_and_one_values_make_the_output():
    ids = torch.arange(3, 63)
    for model in (subject("bert"), subject("llama")):  # heads of 16
        found = built(model, ids, 17, rows=2, layers=2)
        assert found["error"] < 1e-5
        assert found["most"] <= 17
        assert found["least"] >= 0
        assert found["off"] < 1e-9
    fewer = built(subject("bert"), ids, 2, rows=2, layers=2)
    assert fewer["error"] > 1e-4
    assert fewer["most"] == 2


def test_the_papers_scale_names_its_model_and_wants_text(tmp_path):
    with pytest.raises(ValueError, match=r"books/\*\.txt.*PG19"):
        STUDY.cells(Settings("paper"))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("a word and another " * 50)
    cells = STUDY.cells(Settings("paper", data=tmp_path))
    specs = {cell["spec"] for cell in cells if cell["model"] == MASKED}
    assert {"top_keys(keys=65)", "value_aware(keys=65)", "random_features(features=256)", FEW, MANY} <= specs
    assert {cell["length"] for cell in cells if cell["model"] == "smollm2" and cell["what"] == "swap"} == {2048}
    assert all(cell["kind"] != "masked" for cell in STUDY.cells(Settings()))
    assert any(cell["model"] == "mine" for cell in STUDY.cells(Settings(model="mine")))


class Words:
    """A tokenizer of numbers: 0 padding, 1 and 2 around a text, 3 the mask."""

    all_special_ids = (0, 1, 2, 3)
    mask_token_id, sep_token_id = 3, 2

    def __len__(self):
        return 100

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}

    def num_special_tokens_to_add(self):
        return 2

    def build_inputs_with_special_tokens(self, ids):
        return [1, *ids, 2]


def test_hidden_tokens_are_hidden_as_in_bert():
    ids = torch.randint(4, 100, (40, 500), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1
    inputs, hidden = masked.hide(ids, Words(), seed=0)
    chosen = hidden != masked.NONE
    assert torch.equal(hidden[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert not chosen[:, 0].any()
    assert float(chosen.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float((inputs[chosen] == 3).float().mean()) == pytest.approx(0.8, abs=0.04)
    assert float((inputs[chosen] == ids[chosen]).float().mean()) == pytest.approx(0.1, abs=0.03)


def test_examples_are_full_pieces_between_their_special_tokens():
    inputs, hidden = masked.examples(["5 6 7 8", "9 10 11 12 13"], Words(), length=5, count=3)
    restored = torch.where(hidden == masked.NONE, inputs, hidden)
    assert restored.tolist() == [[1, 5, 6, 7, 2], [1, 8, 2, 9, 2], [1, 10, 11, 12, 2]]
    with pytest.raises(ValueError, match="too few for 9 pieces"):
        masked.examples(["5 6 7 8"], Words(), length=5, count=9)


class Echo:
    """Puts the token that it sees first."""

    def __call__(self, input_ids):
        return type("Output", (), {"logits": torch.nn.functional.one_hot(input_ids, 100).float()})


def test_the_error_is_the_share_of_hidden_tokens_that_are_missed():
    inputs, hidden = torch.tensor([[1, 3, 6, 9, 2]]), torch.tensor([[-100, 5, 6, 7, -100]])
    assert masked.wrong(Echo(), inputs, hidden) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no token is hidden"):
        masked.wrong(Echo(), inputs, torch.full_like(hidden, -100))


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^model: .*nowhere cannot be loaded as a masked language model: .+$"):
        masked.load(str(tmp_path / "nowhere"))


def test_a_masked_language_model_is_swapped(monkeypatch):
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**TOKENS, **SMALL)).eval()
    monkeypatch.setattr(masked, "load", lambda name: (model, Words()))
    monkeypatch.setattr("sparing_lab.studies.value_aware_oracles._texts", lambda settings: Texts())
    cell = {"model": "tiny", "kind": "masked", "length": 64, "documents": 2, "what": "swap", "seed": 0}
    exact = STUDY.measure(Settings(), {**cell, "spec": "exact"})
    same = STUDY.measure(Settings(), {**cell, "spec": "value_aware(keys=17)"})
    assert 90 < exact["value"] <= 100  # it guesses
    assert same["value"] == exact["value"]
    assert STUDY.measure(Settings(), {**cell, "spec": "top_keys(keys=3)"})["read"] == pytest.approx(3, abs=0.5)


class Texts:
    """Numbers as words."""

    texts = (" ".join(str(4 + 7 * i % 96) for i in range(400)),)
