"""A recipe from a tolerance: small models with a clock in the test's hands, runs that go on, and the command."""

import json
import math
import random

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import sparing
from sparing.cli.main import main
from sparing.documents import Documents
from sparing.models import Subject
from sparing.workbench.binomial import upper_bound
from sparing.workbench.memory import can_measure
from sparing.workbench.planning import clock, runs
from sparing.workbench.planning.plan import plan
from sparing.workbench.planning.promise import Promise
from sparing.workbench.timing import Interval
from tests.support.model_zoo import SMALL, TOKENS, build

SPEEDS = {"window(size=2)": 2.0, "window(size=16)": 1.5, "nystrom(landmarks=4)": 0.8}


class Bytes:
    """A tokenizer of sorts."""

    def __call__(self, text, truncation=False, max_length=None, **options):
        ids = [3 + b % 90 for b in text.encode()]
        return {"input_ids": ids[:max_length] if truncation else ids}


def texts(count=14):
    draw = random.Random(1)
    return ["".join(draw.choice("abcdefgh ijkl") for _ in range(draw.randint(40, 70))) for _ in range(count)]


def subject(name="llama", **options):
    return Subject(name, build(name, **{"num_hidden_layers": 4, **options}), Bytes())


def same(ratio):
    return Interval(ratio, ratio, ratio)


@pytest.fixture
def times(monkeypatch):
    """The clock, in the test's hands: ratios of calls by spec, and what each layer that runs one adds to the model's."""
    told = {"calls": dict(SPEEDS), "layer": 0.1, "models": []}

    def model_gain(subject, ids, recipe, objective, rounds):
        told["models"].append(dict(recipe.layers))
        return same(1 + told["layer"] * len(recipe.layers))

    monkeypatch.setattr(
        clock, "call_gains", lambda subject, ids, specs, objective: {x: same(told["calls"][x]) for x in specs}
    )
    monkeypatch.setattr(clock, "model_gain", model_gain)
    return told


def run(one, **options):
    """Few documents: nine held out, of which none may be beyond."""
    given = {"methods": list(SPEEDS), "tolerance": 0.3, "coverage": 0.8, "confidence": 0.8, "jobs": 1}
    return plan(one, options.pop("texts", texts()), **{**given, **options})


# Plans of small models, with a clock in our hands


def test_a_plan_of_a_small_model(times, tmp_path):
    one = subject()
    found = run(one)
    assert found.holds
    assert 0 < found.step < found.steps
    assert "nystrom(landmarks=4)" not in {*found.recipe.layers.values(), *found.damages["layers.0.self_attn"]}
    assert [one.used for one in found.candidates] == [True, True, False]
    assert list(found.layers) == [f"layers.{i}.self_attn" for i in range(4)]
    assert {name: spec for name, spec in found.layers.items() if spec != "exact"} == found.recipe.layers
    assert found.gain == same(1 + 0.1 * len(found.recipe.layers))
    assert found.ceiling == same(1.4)
    assert (found.documents, found.calibration.documents, found.held_out.documents) == (14, 5, 9)
    assert found.held_out.step == found.step
    assert found.reason == (
        f"Approximate {len(found.recipe.layers)} of 4 attention layers: all 9 held-out documents stay within 30.00% "
        f"(change of the perplexity), and the model is {found.gain.median:.2f}x as fast (quartiles "
        f"{found.gain.low:.2f}x and {found.gain.high:.2f}x)."
    )
    # The figures are those of the recipe, in the model.
    rows = one.encode(random_order(texts())[5:], 1024)[0]
    changes = []
    with torch.no_grad():
        for ids in rows:
            losses = [float(one.model(ids[None], labels=ids[None]).loss)]
            with sparing.approximate(one.model, found.recipe):
                losses.append(float(one.model(ids[None], labels=ids[None], use_cache=False).loss))
            changes.append(abs(math.exp(losses[1] - losses[0]) - 1))
    assert found.held_out.worst == pytest.approx(max(changes), rel=1e-3)
    assert found.held_out.mean == pytest.approx(sum(changes) / 9, rel=1e-3)
    assert found.held_out.violations == 0
    assert found.held_out.most == pytest.approx(upper_bound(0, 9, 0.8))
    held = json.loads(found.to_json())
    assert held["holds"]
    assert held["recipe"] == found.recipe.to_dict()
    assert found.records()[0]["layer"] == "layers.0.self_attn"


def random_order(given, seed=0):
    given = list(given)
    random.Random(seed).shuffle(given)
    return given


def test_a_recipe_goes_through_its_file(times, tmp_path, capsys):
    one, file = subject(), tmp_path / "recipe.json"
    found = run(one)
    found.recipe.save(file)
    assert sparing.Recipe.load(file) == found.recipe
    with sparing.approximate(one.model, str(file)) as handle:
        running = {name.removeprefix("model."): spec for name, spec in handle.layers.items()}
        assert running == found.layers
        assert handle.recipe.when == "prefill", "tokens that continue a cache were not measured"
    about = found.recipe.about
    assert (about["tolerance"], about["metric"], about["objective"]) == (0.3, "perplexity", "time")
    assert (about["coverage"], about["confidence"], about["seed"]) == (0.8, 0.8, 0)
    assert about["held_out"]["documents"] == 9
    assert about["gain"]["median"] == found.gain.median
    assert about["model_fingerprint"] == one.fingerprint
    assert about["data_fingerprint"] == Documents("texts", tuple(texts())).fingerprint
    assert about["machine"]["torch"] == torch.__version__
    assert main(["show", str(file)]) == 0
    out = capsys.readouterr().out
    for word in ("for llama", "window(size=16)", "prefill", "tolerance: 0.3", "all 9 held-out documents"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100
    with pytest.raises(ValueError, match="the recipe is for 'llama', but the model is 'bert'"):
        sparing.approximate(build("bert"), file)
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(ValueError, match="version 7 is not known"):
        sparing.approximate(one.model, file)


def test_nothing_is_faster(times, tmp_path):
    times["calls"] = dict.fromkeys(SPEEDS, 1.02) | {"window(size=2)": 1.03}
    one, file = subject(), tmp_path / "recipe.json"
    found = run(one)
    assert not found.holds
    assert found.reason == (
        "Keep exact attention: no candidate's attention is sure to be faster than exact attention at "
        f"{typical()} tokens here: the best, window(size=2), is 1.03x as fast (quartiles 1.03x and 1.03x); the lower "
        "quartile must exceed 1.03x."
    )
    assert times["models"] == [], "no further work"
    found.recipe.save(file)
    ids = one.encode(texts(), 60)[0][0]
    with torch.no_grad():
        before = one.run(ids).logits
        with sparing.approximate(one.model, file) as handle:
            assert torch.equal(one.run(ids).logits, before)
            assert set(handle.layers.values()) == {"exact"}
    assert found.recipe.about["held_out"] is None
    assert found.recipe.about["reason"] == found.reason


def typical():
    return sorted(map(len, texts()))[7]


def test_attention_is_too_small_a_part(times):
    times["layer"] = 0.005
    found = run(subject())
    assert not found.holds
    assert "even with what saves most in every layer the model is 1.02x as fast" in found.reason
    assert times["models"] == [{f"layers.{i}.self_attn": "window(size=2)" for i in range(4)}]


def test_what_is_within_the_tolerance_is_not_faster_end_to_end(times):
    times["layer"] = 0.009  # four layers are a gain, three are none
    found = run(subject())
    assert not found.holds
    assert found.recipe.layers == {}
    assert found.reason == (
        "Keep exact attention: with what stays within the tolerance on the calibration documents the model is "
        f"{found.gain.median:.2f}x as fast (quartiles {found.gain.low:.2f}x and {found.gain.high:.2f}x); the lower "
        "quartile must exceed 1.03x. keep=True (--keep) checks it on held-out documents and returns it all the same."
    )
    assert found.checks == ()
    assert found.recipe.about["gain"] is None, "the recipe that is written has none"
    kept = run(subject(), keep=True)
    assert kept.holds
    assert kept.held_out.violations == 0
    assert "all 9 held-out documents stay within" in kept.reason
    assert kept.reason.endswith("That is no gain for sure: the lower quartile must exceed 1.03x.")


def test_no_step_is_within_the_tolerance(times):
    found = run(subject(), tolerance=0.02)
    assert not found.holds
    assert (
        "no step leaves enough room within 2.00% (change of the perplexity): the first, in one layer, changes 5"
        in found.reason
    )
    assert set(found.layers.values()) == {"exact"}
    assert (found.calibration.step, found.checks) == (1, ())


def test_no_layer_bears_anything(times):
    found = run(subject(), tolerance=0.0001)
    assert (
        "a single layer is too much already for 0.01% (change of the perplexity): the mildest, window(size=16) in layers."
        in found.reason
    )
    assert found.steps == 0


def test_what_is_too_much_by_itself_does_not_bar_the_way(times):
    """The faster method is the better bargain in every layer, but breaks the tolerance in each."""
    times["calls"] = {"window(size=2)": 100.0, "window(size=1000)": 1.1}
    found = run(subject("bert"), methods=list(times["calls"]), tolerance=1e-5)
    assert min(each["window(size=2)"] for each in found.damages.values()) > 1e-5
    assert found.holds
    assert set(found.recipe.layers.values()) == {"window(size=1000)"}


def test_held_out_documents_have_the_last_word(times, monkeypatch):
    monkeypatch.setattr(Promise, "likely", lambda self, changes, held_out: True)  # careless
    found = run(subject(), tolerance=0.02)
    assert not found.holds
    assert found.reason.startswith("Keep exact attention: held-out documents do not show the promise: ")
    assert [one.step for one in found.checks] == [found.steps // 2]
    assert found.held_out.violations > 0


def test_layers_that_are_local_already_are_left_alone(times):
    found = run(subject("mistral"), methods=["window(size=2)"])
    assert found.reason == "Keep exact attention: no attention layer of the model can run a candidate."


def test_methods_that_cannot_run_are_skipped():
    found = run(subject(), methods=["nystrom(landmarks=4)"])
    assert found.reason == "Keep exact attention: no candidate can run in this model."
    assert found.candidates[0].gain is None


def test_layers_of_deep_models_change_one_by_one(times):
    few = {"coverage": 0.5, "confidence": 0.5, "texts": texts(6)}
    found = run(subject("bert", num_hidden_layers=14), methods=["window(size=2)"], tolerance=0.9, **few)
    damage = [found.damages[f"encoder.layer.{i}.attention.self"]["window(size=2)"] for i in range(14)]
    assert len(set(damage)) == 14
    assert found.steps == 14


@pytest.mark.parametrize("metric", ["perplexity", "agreement"])
def test_metrics_of_a_language_model(times, metric):
    found = run(subject(), metric=metric, tolerance=0.9)
    assert found.metric == metric
    assert 0 < found.held_out.worst <= 0.9


def classifier(labels):
    torch.manual_seed(0)
    return Subject("x", BertForSequenceClassification(BertConfig(**TOKENS, **SMALL, num_labels=labels)).eval(), Bytes())


def test_metrics_of_a_classifier(times):
    assert run(classifier(3)).metric == "probability"
    found = run(classifier(3), metric="agreement")
    assert found.held_out.worst in (0.0, 1.0)
    with pytest.raises(ValueError, match=r"metric='agreement' is not one of probability, which"):
        run(classifier(1), metric="agreement")


def test_the_same_texts_count_once(times):
    with pytest.raises(ValueError, match="documents: 13 are too few"):
        run(subject(), texts=texts(13) * 5, coverage=0.9)
    found = run(subject(), texts=[*texts(14), texts()[0] * 3, "x"], length=30)
    assert (found.documents, found.skipped, found.tokens) == (14, 2, 30), "one has one token, one is cut to another"


def test_seeds_draw_other_documents(times):
    given = texts(40)
    found = [run(subject(), texts=given, documents=14, seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0].held_out.mean != found[2].held_out.mean
    assert found[2].recipe.seed == 1


# Runs that go on


def test_a_stopped_plan_resumes(times, tmp_path, monkeypatch):
    one, calls, whole = subject(), [], run(subject())
    kept = runs.digest

    def counted(*given):
        calls.append(1)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return kept(*given)

    monkeypatch.setattr(runs, "digest", counted)
    with pytest.raises(KeyboardInterrupt):
        run(one, cache=tmp_path)
    models = len(times["models"])
    assert run(one, cache=tmp_path) == whole
    repeated = len(calls) - 1  # the one that was stopped
    assert len(times["models"]) == models + 1, "the ceiling was known, the gain was not"
    run(one)
    assert len(calls) - 1 - repeated == repeated, "as many in all as a run without a cache"
    done = len(calls)
    assert run(one, cache=tmp_path) == whole
    assert len(calls) == done, "and now all are known"
    run(one, cache=tmp_path, tolerance=0.2)
    run(one, cache=tmp_path, metric="agreement", tolerance=0.9)
    assert len(calls) - done < repeated, "outputs serve other tolerances and metrics"


def test_two_processes_give_the_same_plan(times):
    one = subject("bert")
    assert run(one, tolerance=0.001, jobs=2) == run(one, tolerance=0.001)


def test_progress_ends_where_it_said(times):
    told = []
    run(subject(), progress=lambda text, done, steps: told.append((text, done, steps)))
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= steps for _, done, steps in told)
    assert told[-1][2] <= 2 * len(told), "the estimate is of the right size"
    assert "held-out documents: step" in told[-2][0]


def test_the_model_is_given_back(times):
    one = subject()
    model = one.model.train()
    assert plan(
        model, texts(), tokenizer=Bytes(), methods=list(SPEEDS), tolerance=0.3, coverage=0.8, confidence=0.8, jobs=1
    ).holds
    assert model.training
    assert model.config._attn_implementation == "sdpa"


# The clock itself: that it measures, not what


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_gains_are_ratios(objective):
    if objective == "memory" and not can_measure():
        pytest.skip("this system does not tell peaks")
    one = subject("bert")
    ids = one.encode(texts(), 60)[0][0]
    calls = clock.call_gains(
        one, ids, ["monte_carlo(alpha=0.4)", "window(size=4)", "lsh(chunk=4, rounds=1)"], objective
    )
    assert all(0 < gain.low <= gain.median <= gain.high for gain in calls.values())
    recipe = sparing.Recipe({"encoder.layer.0.attention.self": "window(size=4)"}, architecture="bert")
    assert clock.model_gain(one, ids, recipe, objective, rounds=2).median > 0
    assert clock.model_gain(one, ids, recipe, objective, rounds=1).median > 0
    assert one.model.config._attn_implementation == "sdpa"


def test_a_gain_is_more_than_noise():
    assert clock.is_gain(Interval(1.2, 1.04, 1.3))
    assert not clock.is_gain(Interval(1.2, 1.03, 1.3))
    assert not clock.is_gain(None)


# The command


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"A text about the number {i * i}, and [bold]more[/] words than one." for i in range(14)))
    return ["--data", str(file), "--length", "24", "--coverage", "0.8", "--confidence", "0.8", "--jobs", "1"]


def test_the_command_writes_a_recipe(times, lines, capsys, tmp_path):
    times["calls"] = {"window(size=4, sinks=1)": 2.0}
    file, cache = tmp_path / "recipe.json", tmp_path / "cache"
    given = ["plan", *lines, "--methods", "window(size=4, sinks=1)", "--tolerance", "0.5", "--out", str(tmp_path)]
    assert main([*given, "--cache", str(cache)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100 + len(str(file)) * 3
    assert max(map(len, out.splitlines()[:-1])) <= 100
    for word in (
        "Approximate 6 of 6 attention layers: all 9 held-out documents stay within 50.00%",
        "minilm (encoder, float32) on mine.txt: 14 documents",
        "with 80% confidence at least 80% of documents like these change by 50% at most",
        "step 6 of 6: 0 of 9 beyond (16.37% of all at most); mean",
        "1.60x (1.60 to 1.60): time of the exact model / with the recipe",
        "encoder.layer.0-5.attention.self",
        "window(size=4, sinks=1)",
        f'wrote {file}, {tmp_path / "plan.json"}; turn it on: sparing.approximate(model, "{file}")',
    ):
        assert word in " ".join(out.split()), f"{word!r} is missing in\n{out}"
    assert len(sparing.Recipe.load(file).layers) == 6
    assert len(list(cache.iterdir())) > 20
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.splitlines() == out.splitlines()[:-1], "the same from the file"


def test_the_command_writes_the_empty_recipe_too(times, lines, capsys, tmp_path):
    times["calls"] = {"window(size=4, sinks=1)": 0.5}
    file = tmp_path / "recipe.json"
    assert main(["plan", *lines, "--methods", "window(size=4, sinks=1)", "--out", str(tmp_path), "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Keep exact attention: no candidate's attention is sure to be faster")
    assert "of documents like these change by" in " ".join(out.split())
    assert f"wrote {file}, {tmp_path / 'plan.json'}; it leaves every layer exact" in out
    assert sparing.Recipe.load(file).layers == {}
    assert main(["show", str(file)]) == 0
    assert "Keep exact attention" in capsys.readouterr().out


def test_an_empty_recipe_replaces_one_with_layers_only_if_told_to(times, lines, capsys, tmp_path):
    times["calls"] = {"window(size=4, sinks=1)": 0.5}
    file = tmp_path / "recipe.json"
    sparing.Recipe({"layers.0.self_attn": "window(size=4)"}).save(file)
    given = ["plan", *lines, "--methods", "window(size=4, sinks=1)", "--out", str(tmp_path), "--no-cache"]
    before = file.read_bytes()
    assert main(given) == 0
    assert f"wrote nothing: {file} holds another recipe" in capsys.readouterr().out
    assert file.read_bytes() == before
    file.write_bytes(before.replace(b'"seed": 0', b'"seed": 1'))  # by hand: the checksum does not match
    assert main(given) == 0
    assert b'"seed": 1' in file.read_bytes()
    assert not (tmp_path / "plan.json").exists()
    assert main([*given, "--replace"]) == 0
    assert sparing.Recipe.load(file).layers == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tolerance", "0"], "tolerance=0.0 must be above 0 and below 1"),
        (["--tolerance", "1"], "tolerance=1.0 must be above 0 and below 1"),
        (["--coverage", "1"], "coverage=1.0 must be above 0 and below 1"),
        (["--confidence", "0"], "confidence=0.0 must be above 0 and below 1"),
        (["--documents", "20"], "documents: 20 are too few for coverage=0.9"),
        (["--documents", "0"], "documents=0 must be at least 1"),
        (["--objective", "speed"], "objective='speed' is not one of 'time', 'memory'"),
        (["--metric", "perplexity"], "metric='perplexity' is not one of cosine"),
        (["--methods", "top_keys(keys=4)"], "top_keys(keys=4) is an oracle"),
        (["--methods", "exact"], "methods is empty"),
        (["--methods", "nystrm"], "unknown name 'nystrm'"),
        (["--jobs", "0"], "jobs=0 must be at least 1"),
        (["--rounds", "0"], "rounds=0 must be at least 1"),
        (["--length", "4096"], "length=4096 is more than the 512 positions"),
        (["--data", "none.txt"], "there is no file none.txt"),
        (["--out", "/proc/none"], "--out=/proc/none cannot be written to"),
        (["--out", __file__], "is a file; name a folder"),
        (["/no/such/model"], "there is no folder /no/such/model"),
    ],
)
def test_mistakes_give_one_line_and_status_2(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_texts_that_are_no_list_of_documents():
    with pytest.raises(ValueError, match="texts: these are pairs"):
        sparing.plan(subject(), Documents("x", ("a", "b"), pairs=("c", "d")))
    with pytest.raises(ValueError, match="texts='hello' must be a list"):
        sparing.plan(subject(), "hello")
    with pytest.raises(ValueError, match=r"methods='window' must be a list"):
        sparing.plan(subject(), texts(), methods="window")
