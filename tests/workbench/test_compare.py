"""The whole question, answered for small models: errors, ends, verdicts, and runs that go on."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import sparing
from sparing.documents import Documents
from sparing.methods import exact as exact_method
from sparing.methods.exact import Exact
from sparing.models import Subject, load
from sparing.report.table import show
from sparing.report.terminal import Terminal
from sparing.store import CHECKSUM, add_checksum
from sparing.workbench import prepare as module
from sparing.workbench.comparison import sweep
from sparing.workbench.comparison.compare import compare
from sparing.workbench.comparison.judgement import FASTER, ORACLE, SLOWER, UNKNOWN, UNSAFE
from sparing.workbench.comparison.ladder import ladder
from sparing.workbench.comparison.quality import LayerError, quality
from sparing.workbench.comparison.rows import verdict
from sparing.workbench.comparison.seconds import Seconds, seconds
from sparing.workbench.comparison.summary import summary
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval
from tests.support.model_zoo import SMALL, TOKENS, build
from tests.support.small_models import TEXTS, Bytes, classifier, saved, subject


@pytest.mark.parametrize(
    "spec", ["nystrom(landmarks=8)", "yoso(hashes=8)", "monte_carlo(alpha=0.4)", "top_keys(keys=4)"]
)
def test_the_errors_of_layers_are_those_of_their_calls(minilm_layers, spec):
    """The layers that an earlier measurement captured give the same split; the model is as before."""
    from sparing.models import minilm
    from sparing.models.preset import Preset

    encoder, method = load("minilm"), sparing.method(spec).for_length(512)
    ids = minilm.token_ids(Preset(encoder.model, encoder.tokenizer), length=128, documents=1)[0]
    before = encoder.run(ids).last_hidden_state
    found = quality(encoder, [ids], spec, seed=3)
    assert torch.equal(encoder.run(ids).last_hidden_state, before)
    assert [layer.layer for layer in found.layers] == [f"encoder.layer.{i}.attention.self" for i in range(6)]
    for number, (layer, given) in enumerate(zip(found.layers, minilm_layers, strict=True)):
        streams = [number * 2**16 + head for head in range(12)]
        q, k, v = given.query, given.key, given.projected
        value = given.value if method.supports.projection else v
        with torch.no_grad():
            exact = sparing.attention(q, k, v)
            target = sparing.attention(q, k, v, method=method.exact_target())
            estimate = sparing.attention(q, k, value, method=method, seed=3, streams=streams)
        parts = ((target, exact), (estimate, target), (estimate, exact))
        wanted = [float((a - b).norm() / exact.norm()) for a, b in parts]
        assert (layer.substitution, layer.approximation, layer.total) == pytest.approx(wanted, rel=1e-3)
        assert len(layer.heads) == 12
        assert min(layer.heads) <= layer.total <= max(layer.heads)
    assert found.errors[0] == pytest.approx(sum(layer.total for layer in found.layers) / 6)
    assert all(layer.bar is None for layer in found.layers)


def test_only_a_method_with_an_error_bar_has_one():
    rows, _ = subject().encode(TEXTS, 60)
    assert all(
        -1 <= layer.bar <= 1 for layer in quality(subject(), rows, "key_clusters(clusters=4, keys=4, window=2)").layers
    )


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_a_budget_of_everything_changes_nothing(name):
    one = subject(name)
    rows, longer = one.encode(TEXTS, 60)
    assert longer == 5
    found = quality(one, rows, "window(size=1000)")
    assert max(found.errors) < 1e-5
    assert max(abs(end["change"]) for end in found.ends) < 1e-5
    small = quality(one, rows, "window(size=2)")
    assert min(small.errors) > 0.01, "control: a small one does"
    assert small.keys_read < found.keys_read


def test_the_end_of_a_language_model():
    one = subject("llama")
    rows, _ = one.encode(TEXTS[:2], 60)
    found = quality(one, rows, "window(size=2)")
    for ids, end in zip(rows, found.ends, strict=True):
        with torch.no_grad():
            exact = one.model(input_ids=ids[None], labels=ids[None]).loss
            with sparing.approximate(one.model, "window(size=2)"):
                other = one.model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        assert end["exact_loss"] == pytest.approx(float(exact), rel=1e-5)
        assert end["loss"] == pytest.approx(float(other), rel=1e-5)
        assert end["change"] == pytest.approx(math.exp(float(other - exact)) - 1, abs=1e-5)
        assert 0 <= end["agreement"] <= 1


def test_the_end_of_an_encoder():
    one = subject()
    rows, _ = one.encode(TEXTS, 60)
    found = quality(one, rows, "window(size=2)")
    with torch.no_grad():
        exact = one.model(rows[0][None]).last_hidden_state.mean(1)
        with sparing.approximate(one.model, "window(size=2)"):
            other = one.model(rows[0][None]).last_hidden_state.mean(1)
    cosine = float(torch.nn.functional.cosine_similarity(exact, other))
    assert found.ends[0]["cosine"] == pytest.approx(cosine, abs=1e-6)
    assert found.ends[0]["change"] == pytest.approx(1 - cosine, abs=1e-6)
    assert {end["neighbour"] for end in found.ends} <= set(range(5))
    assert all(end["exact_neighbour"] != number for number, end in enumerate(found.ends))
    assert "neighbour" not in quality(one, rows[:2], "window(size=2)").ends[0], "two are always each other's"


def test_the_end_of_a_classifier():
    for labels, words in (
        (3, {"exact_class", "class", "agreement", "change", "classes"}),
        (1, {"exact_score", "score", "change"}),
    ):
        one = classifier(labels)
        assert one.kind == "classifier"
        rows, _ = one.encode(TEXTS, 60)
        (end, *_) = quality(one, rows, "window(size=2)").ends
        assert set(end) == words
        assert end["change"] > 0


def run(one, texts=TEXTS, **options):
    given = {
        "methods": ["window(size=4)", "window(size=1000)", "top_keys(keys=4)", "yoso(hashes=4)"],
        "rounds": 1,
        "jobs": 1,
        "lengths": False,
    }
    return compare(one, texts, **{"length": 60, **given, **options})


def test_a_comparison_of_a_small_model():
    found = run(subject(), tolerance=1e-5)  # attention has little to say in a random model
    assert (found.kind, found.documents, found.tokens, found.truncated) == ("encoder", 5, 60, 5)
    verdicts = {row.method: row.verdict for row in found.rows}
    assert verdicts["window(size=1000)"] in (FASTER, SLOWER)
    assert verdicts["top_keys(keys=4)"] == ORACLE
    assert [row.change.count for row in found.rows] == [5, 5, 2, 5], "oracles get two documents"
    assert verdicts["yoso(hashes=4)"] == UNSAFE
    held = json.loads(found.to_json())
    assert held["format"] == 2
    assert [row["method"] for row in held["rows"]] == list(verdicts)
    record = found.records()[0]
    assert record["change_low"] <= record["change"] <= record["change_high"]
    assert record["model_speed"] > 0
    assert record["cosine"] == pytest.approx(1 - record["change"])


def test_json_has_no_nan():
    nothing = Estimate(math.nan, None, None, 2)
    layer = LayerError("0", math.nan, 0.0, math.nan, (math.nan, 1.0))
    row = Row("window(size=8)", UNSAFE, change=nothing, error=nothing, layers=(layer,), end={"loss": math.inf})
    found = replace(run(subject(), methods=["window(size=4)"]), rows=(row,))
    held = json.loads(found.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert held["rows"][0]["change"]["mean"] is None
    assert held["rows"][0]["end"] == {"loss": None}
    again = Comparison.from_json(found.to_json())
    assert math.isnan(again.rows[0].change.mean)
    assert math.isnan(again.rows[0].layers[0].heads[0])
    with (console := Terminal(width=100)).capture() as shown:
        show(again, console=console, layers=True)
    assert "nan" in shown.get()


def test_ratios_above_1_are_savings_and_files_of_the_other_convention_are_refused():
    found = run(subject(), methods=["nystrom(landmarks=4)", "top_keys(keys=4)"])
    few, oracle = found.rows
    assert few.flops_reduction > 1 > oracle.flops_reduction, "4 landmarks for 60 keys; an oracle scores all"
    record = found.records()[0]
    assert record["flops_reduction"] == few.flops_reduction
    assert record["memory_reduction"] == pytest.approx(few.time.exact_bytes / few.time.bytes)
    old = json.loads(found.to_json()) | {"format": 1}
    with pytest.raises(ValueError, match="this sparing reads 2: compare again"):
        Comparison.from_dict(add_checksum({name: part for name, part in old.items() if name != CHECKSUM}))


def test_a_comparison_comes_back_from_json():
    found = run(subject("llama"), methods=["nystrom(landmarks=4)", "window(size=4)", "top_keys(keys=4)"])
    assert Comparison.from_json(found.to_json()) == found


def test_a_method_that_a_layer_cannot_run_is_refused_with_its_reason():
    found = run(subject("llama"), methods=["nystrom(landmarks=4)", "window(size=4, sinks=1)"])
    first, second = found.rows
    assert first.verdict == "refused"
    assert "cannot run nystrom(landmarks=4): it is causal" in first.refused
    assert second.refused is None
    assert found.records()[0]["change"] is None


def numbers(found):
    """All but times and what follows from them."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.endswith(("_speed", "bytes", "memory_reduction")) and name not in ("verdict", "crossover")
        }
        for record in found.records()
    ]


def test_a_run_that_was_stopped_gives_the_same_and_repeats_nothing(tmp_path, monkeypatch):
    whole, one, calls = run(subject()), subject(), []

    def counted(*args, **options):
        calls.append(args[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return quality(*args, **options)

    monkeypatch.setattr(sweep, "quality", counted)
    with pytest.raises(KeyboardInterrupt):
        run(one, cache=tmp_path)
    again = run(one, cache=tmp_path)
    assert numbers(again) == numbers(whole)
    assert len(calls) == 3 + 3, "two of five cells were finished: one seed, one seed, then one, and two of yoso"
    assert run(one, cache=tmp_path) == again, "and now all are known, times too"
    assert len(calls) == 6


def test_what_is_measured_is_keyed_by_model_and_documents():
    one, other = subject(), subject()
    assert one.fingerprint == other.fingerprint
    with torch.no_grad():
        next(other.model.parameters())[5, 0] += 1e-3
    assert one.fingerprint != other.fingerprint
    with sparing.approximate(one.model, "window(size=4)"):
        assert one.fingerprint == subject().fingerprint, "what runs in it is not the model"


def test_a_model_in_training_is_measured_without_dropout_and_given_back():
    one = subject()
    wanted = numbers(run(one))
    model = one.model.train()
    assert numbers(run(model, tokenizer=Bytes(), methods=["window(size=4)"])) == wanted[:1]
    assert model.training


def test_times_are_those_of_the_model():
    one = subject()
    rows, _ = one.encode(TEXTS, 60)
    found = seconds(one, rows[0], "window(size=4)", rounds=2)
    assert found.exact_model > 0
    assert found.model.low <= found.model.median <= found.model.high
    assert found.attention.median > 0
    assert seconds(one, rows[0], "top_keys(keys=4)", rounds=1).model is None, "an oracle's time says nothing"


def timed(ratio):
    return Seconds(None, Interval(ratio, ratio, ratio), 1.0, None, None)


@pytest.mark.parametrize(
    ("spec", "high", "ratio", "word"),
    [
        ("window", 0.009, 1.5, FASTER),
        ("window", 0.01, 0.5, SLOWER),
        ("window", 0.011, 1.5, UNKNOWN),
        ("window", None, 1.5, UNKNOWN),
        ("window", 0.001, 1.01, SLOWER),  # as likely noise
        ("exact", 0.0, 1.5, FASTER),  # sparing's, against the model's own
        ("exact", 0.0, 1.01, SLOWER),
        ("window", math.nan, 1.5, UNSAFE),
        ("top_keys", 0.0, 1.5, ORACLE),
    ],
)
def test_verdicts(spec, high, ratio, word):
    assert verdict(spec, Estimate(0.001, 0.0, high, 4), timed(ratio), 0.01)[0] == word


def test_a_change_for_the_better_is_a_change():
    assert verdict("window", Estimate(-0.15, -0.28, -0.02, 4), timed(1.5), 0.01) == (UNSAFE, "")
    assert verdict("window", Estimate(0.0, -0.009, 0.009, 4), timed(1.5), 0.01) == (FASTER, "")


def test_few_documents_cannot_tell_and_say_how_many_would():
    few, none = Estimate(0.005, -0.005, 0.015, 8), Estimate(0.0, 0.0, 0.37, 8)
    assert verdict("window", few, timed(1.5), 0.01) == (
        UNKNOWN, "change +0.50%, -0.50% to +1.50% in 8 documents; about 32 would do"
    )  # fmt: skip
    assert verdict("window", none, timed(1.5), 0.01)[1].endswith("in 8 documents; about 300 would do")
    assert verdict("window", Estimate(0.01, 0.0, 0.02, 8), timed(1.5), 0.01)[1].endswith("in 8 documents")
    assert verdict("window", Estimate(0.05, None, None, 1), timed(1.5), 0.01) == (
        UNKNOWN, "change +5.00% in 1 document, too few for an interval"
    )  # fmt: skip


def test_identical_outputs_are_safe_however_few_documents_there_are():
    """A count of none in two documents has a wide interval, but exact attention needs no statistics."""
    found = run(subject(), methods=["window(size=500)", "window(size=4)"], metric="neighbours", documents=3)
    assert found.rows[0].error.mean <= 1e-6
    assert found.rows[0].change == Estimate(0.0, 0.0, 0.0, 3)
    assert found.rows[0].verdict in (FASTER, SLOWER)
    assert found.rows[1].verdict in (UNKNOWN, UNSAFE)


def test_a_model_that_is_approximated_already_is_refused():
    one = subject()
    with sparing.approximate(one.model, "window(size=4)"), pytest.raises(ValueError, match="approximated already"):
        run(one)
    with sparing.approximate(one.model, "exact"):
        assert run(one, methods=["window(size=4)"]).rows[0].refused is None


def test_exact_attention_by_sparing_is_a_row_that_is_compared_with_torchs(monkeypatch):
    """Its error is that of rounding, and a kernel that is wrong would show: the rest of the model is its own."""
    one = subject()
    row = run(one, methods=["exact"]).rows[0]
    assert (row.method, row.refused, row.change.mean) == ("exact", None, 0.0)
    assert 0 <= row.error.mean < 1e-6
    assert row.time.attention.median > 0
    assert row.flops_reduction == 1
    original = Exact.fast
    monkeypatch.setattr(exact_method, "_LEAST_QUERIES", {})  # no kernel: `fast` computes the calls of the door
    monkeypatch.setattr(Exact, "fast", lambda self, q, k, v, call: 1.1 * original(self, q, k, v, call))
    assert run(one, methods=["exact"]).rows[0].error.mean == pytest.approx(0.1, rel=1e-3)


def test_a_model_runs_in_the_type_of_its_checkpoint_unless_another_is_named(tmp_path, capsys):
    folder = saved(tmp_path / "half", "llama")
    load(str(folder)).model.to(torch.bfloat16).save_pretrained(folder)
    options = {
        "methods": ["window(size=4)", "multipole(block=16)"],
        "length": 60,
        "rounds": 1,
        "jobs": 1,
        "lengths": False,
    }
    for asked, dtype in (("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        found = compare(str(folder), TEXTS, dtype=asked, metric="perplexity", contexts=[40], documents=2, **options)
        assert found.dtype == dtype
        assert found.rows[0].change.mean != 0
        assert all(row.refused is None for row in found.generation)
    show(found, console=Terminal())
    assert "(language model, float16)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"dtype='float8' is not one of auto, float32, bfloat16, float16"):
        load(str(folder), "float8")
    with pytest.raises(ValueError, match=r"dtype='float16' is for models that are loaded by name; convert this one"):
        compare(subject(), TEXTS, dtype="float16")


def test_a_process_that_is_used_again_loads_what_has_changed(monkeypatch):
    first, second = subject(), subject()
    with torch.no_grad():
        next(second.model.parameters()).mul_(2)
    files = [first, second, first]
    monkeypatch.setattr(module, "load", lambda name, dtype: files.pop(0))
    module._loaded.cache_clear()
    assert module.fetched(("x", "auto", None, first.fingerprint)) is first
    assert module.fetched(("x", "auto", None, first.fingerprint)) is first
    assert module.fetched(("x", "auto", None, second.fingerprint)) is second
    with pytest.raises(ValueError, match="x has changed while it was measured"):
        module.fetched(("x", "auto", None, "another"))
    module._loaded.cache_clear()


def test_labels_of_many_are_judged_one_by_one():
    one = classifier(3)
    one.model.config.problem_type = "multi_label_classification"
    rows, _ = one.encode(TEXTS[:1], 60)
    found = quality(one, rows, "window(size=2)").ends[0]["change"]
    with torch.no_grad():
        exact = one.run(rows[0]).logits.sigmoid()
        with sparing.approximate(one.model, "window(size=2)"):
            other = one.run(rows[0]).logits.sigmoid()
    assert found == pytest.approx(float((exact - other).abs().max()), rel=1e-3)


def test_weights_that_are_missing_are_not_drawn(tmp_path):
    from transformers import AutoTokenizer

    from sparing.models import minilm

    build("bert").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(minilm.weights_folder()).save_pretrained(tmp_path)
    assert load(str(tmp_path)).kind == "encoder"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ValueError, match=r"has no weights for classifier\.bias and others, which would be initialised"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models_load_from_a_folder(name, tmp_path):
    from transformers import AutoTokenizer

    from sparing.models import minilm

    model = build(name)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(minilm.weights_folder()).save_pretrained(tmp_path)
    assert load(str(tmp_path)).fingerprint == Subject("x", model, None).fingerprint


def test_a_classifier_that_cannot_tell_padding_runs_documents_alone():
    one = classifier(3)
    one.model.config.pad_token_id = None
    found = run(one, methods=["window(size=4)"], batch_size=4)
    assert found.batch == 1
    assert found.rows[0].time.batched is None


def test_positions_behind_those_of_padding_are_not_counted():
    model = build("roberta", pad_token_id=3)
    assert Subject("x", model, None).positions == model.config.max_position_embeddings - 4
    with torch.no_grad():
        model(torch.ones(1, 508, dtype=torch.long) * 5)
    assert subject().positions == 512


def test_pairs_are_not_the_same_as_documents(tmp_path):
    """The same four texts as two pairs, after they were measured as four documents."""
    methods = {"methods": ["top_keys(keys=2)"], "cache": tmp_path}
    pairs = Documents("pairs", tuple(TEXTS[:2]), pairs=tuple(TEXTS[2:4]))
    run(subject(), TEXTS[:4], **methods)
    assert numbers(run(subject(), pairs, **methods)) == numbers(run(subject(), pairs, methods=["top_keys(keys=2)"]))


def test_positions_are_repeated_where_the_user_says_so():
    one = subject()
    texts = [TEXTS[0] * 8, TEXTS[1] * 8]
    found = run(one, texts, methods=["window(size=4)"], length=600, extend_positions=True)
    assert (found.tokens, found.truncated) == (600, 2)
    assert one.positions == 512, "of a copy"
    short = run(one, methods=["window(size=4)"], extend_positions=True)
    assert numbers(short) == numbers(run(one, methods=["window(size=4)"])), "nothing to do"


def test_a_head_that_has_no_end_leaves_the_encoder():
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**TOKENS, **SMALL)).eval()
    model.bert.embeddings.train()
    found = run(model, [*TEXTS, "x"], tokenizer=Bytes(), methods=["window(size=4)"])
    assert found.kind == "encoder"
    assert (found.documents, found.skipped) == (5, 1)
    assert model.bert.embeddings.training
    assert not model.bert.encoder.training


def test_the_sentence_on_top():
    def row(word, ratio):
        return Row("window(size=8)", word, change=Estimate(0.002, 0.0, 0.004, 4), time=timed(ratio))

    assert summary([row(UNSAFE, 2.0)], 4, 99, 0.01, "m") == (
        "On 4 documents of up to 99 tokens keep exact attention: no setting stays within 1.00% (m)."
    )
    assert "1 of 2 settings stays within 1.00% (m), but none is faster here" in summary(
        [row(UNSAFE, 2.0), row(SLOWER, 0.5)], 4, 99, 0.01, "m"
    )
    assert summary([row(FASTER, 1.25), row(FASTER, 1.5)], 4, 99, 0.01, "m") == (
        "On 4 documents of up to 99 tokens, window(size=8) is 1.50x as fast as the exact model here, and within 1.00% "
        "(m): 0.20% on average."
    )
    quick = replace(row(FASTER, 1.3), method="exact")
    assert summary([row(UNSAFE, 2.0), row(FASTER, 1.32), row(SLOWER, 0.5), quick], 4, 99, 0.01, "m") == (
        "On 4 documents of up to 99 tokens, sparing's exact attention is 1.30x as fast as the model's own here, with the "
        "same results but for rounding. Of the approximations, 2 of 3 settings stay within 1.00% (m), and none is faster "
        "than that."
    ), "1.32x is no more than noise above 1.30x"
    assert "no setting is known to stay within 1.00% (m) and is faster than that" in summary(
        [row(UNSAFE, 2.0), quick], 4, 99, 0.01, "m"
    )
    assert summary([quick], 4, 99, 0.01, "m").endswith("but for rounding.")
    assert "window(size=8) is 1.50x" in summary([row(FASTER, 1.5), quick], 4, 99, 0.01, "m")
    exact = replace(row(SLOWER, 1.0), method="exact")
    assert "no setting stays" in summary([row(UNSAFE, 2.0), exact], 4, 99, 0.01, "m"), "exact attention is no setting"
    assert "within 0.0002%" in summary([row(UNSAFE, 2.0)], 4, 99, 2e-6, "m")
    assert "nothing that could replace it was measured" in summary([row(ORACLE, 1.0)], 4, 99, 0.01, "m")
    unknown = replace(row(UNKNOWN, 2.0), method="lsh", reason="too few")
    assert summary([row(UNSAFE, 2.0), unknown], 1, 99, 0.01, "m") == (
        "On 1 document of up to 99 tokens one cannot tell yet whether lsh, 2.00x as fast as the exact model here, stays "
        "within 1.00% (m): too few. Until then keep exact attention: none is known to."
    )
    assert summary([row(SLOWER, 0.5), unknown, replace(unknown, time=timed(0.9))], 4, 99, 0.01, "m").endswith(
        "Until then keep exact attention: 1 of 3 settings stays within it, and none of these is faster."
    )
    assert summary([replace(unknown, time=timed(0.9))], 4, 99, 0.01, "m").endswith(
        "no setting is known to stay within 1.00% (m), and none that may is faster here. lsh: too few."
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 40, 512, 8192])
def test_the_ladder_holds_training_free_methods_and_oracles(causal, length):
    found = [sparing.method(spec) for spec in ladder(length, causal=causal)]
    assert len(set(found)) == len(found)
    for method in found:
        assert method.supports.training_free or method.oracle
        assert method.supports.causal or not causal
    assert found[0] == sparing.method("exact")
    assert {method.name for method in found} >= {"window", "key_clusters", "top_keys"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance=0.0 must be above 0"),
        ({"tolerance": 1.5}, "tolerance=1.5 must be above 0 and below 1"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"jobs": 0}, "jobs=0 must be at least 1"),
        ({"length": 1}, "length=1 must be at least 2"),
        ({"length": 9999}, "length=9999 is more than the 512 positions of the model; shorten it, or repeat"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"documents": 0}, "documents=0 must be at least 1"),
        ({"methods": []}, "methods is empty"),
        ({"methods": "window(size=8)"}, "must be a list, not one string"),
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"methods": ["nystrm"]}, "unknown name 'nystrm'"),
        ({"progress": "yes"}, "progress='yes' must be True, False, or a function"),
        ({"texts": ["one", 2]}, r"texts\[1\]=2 must be a text, not int"),
        ({"texts": 3}, "texts=3 must be a list of texts"),
        ({"model": 3}, "model=3 must be a preset, a folder, a name on the hub, or a model object"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        compare(**{"model": subject(), "texts": TEXTS, "jobs": 1, "lengths": False, **options})


def test_models_and_texts_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="tokenizer: BertModel came without one"):
        compare(subject().model, TEXTS)
    with pytest.raises(ValueError, match="texts: none has two tokens"):
        compare(subject(), Documents("few", ("x",)))
    with pytest.raises(ValueError, match=r"model: there is no folder /no/such/place"):
        load("/no/such/place")
    with pytest.raises(ValueError, match=r"model: .* has no tokenizer; save it there: tokenizer"):
        load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model: .* cannot be loaded"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match=r"texts='hello' must be a list"):
        compare(subject(), "hello")
