"""The table that drives the common checks. A new method gets all of them by adding a row here."""

from __future__ import annotations

from dataclasses import dataclass, field

import sparing


@dataclass(frozen=True)
class Row:
    """One setting of a method under test.

    spec: the setting (a string, or a Method in negative controls); its budget should be well below the lengths of the checks (33 to 100 tokens).
    budgets: specs of growing budget, each about four times the one before; their mean error must fall.
    beats_mean: on peaked attention the last of `budgets` is closer to exact than the plain mean of the values.
    skip: check name -> reason. Only for checks that cannot have a meaning for the method.
    """

    spec: str | sparing.Method
    budgets: tuple[str, ...] = ()
    beats_mean: bool = False
    skip: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> sparing.Method:
        return sparing.method(self.spec)

    @property
    def supports(self) -> sparing.Supports:
        return self.method.supports

    @property
    def impls(self) -> tuple[str, ...]:
        """How it can run: by its specification, by plain PyTorch, by kernels."""
        cls = type(self.method)
        has = {"torch": cls.fast is not sparing.Method.fast, "native": cls.native is not sparing.Method.native}
        return ("reference", *(name for name, there in has.items() if there))


_OWN_LISTS = "every token samples by its own list, numbered by its place; test_sampling.py permutes the lists too"
_OTHER_SAMPLES = "sample counts depend on the number of keys, so parts hold other estimates of the same values"
_FIRST_VALID = "sinks and global tokens are the first valid tokens: a mask that hides them makes other tokens special"
_BY_RANK = "landmarks are drawn by rank among valid tokens: a permutation moves them; test_skyformer_theory.py does so"

_NO_DERIVATIVE = {
    "gradient": "the gradient of q and k is the paper's estimate, not a derivative; test_yoso.py has its brute force"
}
_OTHER_BUCKETS = "which keys a query sees depends on the other valid keys, so that parts see other keys than the whole"
_CONSTANT_CHANCE = "the hit probability is a constant of the gradient, which is then unbiased; test_lsh.py checks that"

_OTHER_CLUSTERS = "parts of the keys have other clusters than the whole; key_clusters(keys=200) runs it with all keys"
_FIXED_PLAN = (
    "clusters, expansions and the mean query are constants of the gradient; test_key_clusters.py holds them fixed"
)

_OTHER_BLOCKS = "parts of the keys have other blocks, and so other copies, than the whole; tolerance=0 reads all keys"
_COPIES_FOR_KEYS = "copies count as the keys themselves in the gradient; test_multipole.py has its formula"

_OTHER_GROUPS = "in parts of the keys, other keys stand for those that are left out; threshold=0 leaves out none"
_MOVING_LAW = "p follows the hidden states and is a constant in the gradient; test_monte_carlo.py freezes it"

_LOST_DISTANCES = "|q - k|^2 of the specification rounds small keys away; the paths without |q|^2 keep them"

ROWS = [
    Row("exact", beats_mean=True),
    Row("nystrom(landmarks=3)", budgets=("nystrom(landmarks=4)", "nystrom(landmarks=16)", "nystrom(landmarks=64)")),
    Row("nystrom(landmarks=3, solver=exact)"),
    Row(
        "random_features(features=32)",
        budgets=(
            "random_features(features=16)",
            "random_features(features=256)",
            "random_features(features=4096)",
        ),
    ),
    Row("random_features(features=32, orthogonal=False)"),
    Row("kernel", beats_mean=True),
    Row("kernel(kind=poly)"),
    Row("kernel(kind=poly, degree=4)"),
    Row("kernel(kind=elu)"),
    Row("kernel(kind=elu, normalize=none)"),
    Row("kernel(kind=elu, normalize=length)"),
    Row("kernel(kind=gaussian)", skip={"range: q large, k small": _LOST_DISTANCES}),
    Row("kernelized"),
    Row("kernel(kind=gaussian, normalize=length)"),
    Row("linformer(rank=8)"),
    Row(
        "linformer(rank=8, projection=pooled)",
        # The tokens of this check have no order, so pooling neighbours gains nothing until it is exact at 64;
        # test_linformer.py shows the error fall on smooth sequences.
        budgets=("linformer(rank=16, projection=pooled)", "linformer(rank=64, projection=pooled)"),
    ),
    Row(
        "monte_carlo(alpha=2.0)",
        budgets=("monte_carlo(alpha=4.0)", "monte_carlo(alpha=1.0)", "monte_carlo(alpha=0.25)"),
        beats_mean=True,
        skip={"permutation": _OWN_LISTS, "lse merge": _OTHER_SAMPLES},
    ),
    Row("monte_carlo(alpha=2.0, samples=shared)", skip={"lse merge": _OTHER_SAMPLES}),
    Row(
        "monte_carlo(alpha=2.0, estimator=stratified)",
        skip={"permutation": _OWN_LISTS, "lse merge": _OTHER_SAMPLES},
    ),
    Row("monte_carlo(alpha=2.0, estimator=stratified, samples=shared)", skip={"lse merge": _OTHER_SAMPLES}),
    Row("monte_carlo(alpha=2.0, estimator=drop)", skip={"lse merge": _OTHER_SAMPLES}),
    Row(
        "monte_carlo(alpha=2.0, estimator=mean)",
        budgets=tuple(f"monte_carlo(alpha={alpha}, estimator=mean)" for alpha in (4.0, 1.0, 0.25)),
        beats_mean=True,
        skip={"lse merge": _OTHER_SAMPLES},
    ),
    Row("monte_carlo(alpha=0.0)"),
    Row("monte_carlo(alpha=2.0, importance=mean)", skip={"permutation": _OWN_LISTS, "lse merge": _OTHER_SAMPLES}),
    Row(
        "monte_carlo(alpha=2.0, importance=median, probabilities=input)",
        skip={
            "permutation": _OWN_LISTS,
            "lse merge": _OTHER_SAMPLES,
            **dict.fromkeys(("gradient", "second derivative", "forward mode"), _MOVING_LAW),
        },
    ),
    Row("window(size=8)", budgets=("window(size=4)", "window(size=16)", "window(size=64)")),
    Row("window(size=0)"),
    Row("window(size=6, sinks=3)", skip={"lse merge": _FIRST_VALID}),
    Row("window(size=10, sinks=1, global_tokens=2)", skip={"lse merge": _FIRST_VALID}),
    Row(
        "key_clusters(clusters=6, keys=8, window=4, chunk=16)",
        budgets=tuple(f"key_clusters(clusters=8, keys={keys}, window=0)" for keys in (0, 16, 64)),
        beats_mean=True,
        skip={"lse merge": _OTHER_CLUSTERS, "gradient": _FIXED_PLAN},
    ),
    Row(
        "key_clusters(clusters=0.25, keys=5, window=0, sinks=0, order=1, select=mass, chunk=12, steps=1)",
        skip={"lse merge": _OTHER_CLUSTERS, "gradient": _FIXED_PLAN},
    ),
    Row(
        "key_clusters(clusters=6, keys=40, window=0, cap=8.0, tolerance=0.05, chunk=16)",
        skip={"lse merge": _OTHER_CLUSTERS, "gradient": _FIXED_PLAN},
    ),
    Row("key_clusters(keys=200)", skip={"seed": "all keys are exact, and nothing random is left"}),
    Row(
        "multipole(tolerance=0.043, sinks=1, block=16)",  # 1 / tolerance is no whole number: equal weights would tie with it
        budgets=tuple(f"multipole(tolerance={t}, sinks=0, block=16)" for t in (0.5, 0.05, 0.005)),
        beats_mean=True,
        skip={"lse merge": _OTHER_BLOCKS, "gradient": _COPIES_FOR_KEYS},
    ),
    Row("multipole(tolerance=1.0, sinks=0, block=32)", skip={"lse merge": _OTHER_BLOCKS, "gradient": _COPIES_FOR_KEYS}),
    Row("multipole(tolerance=0.0)"),
    Row(
        "skip(threshold=0.3, stride=3)",
        budgets=("skip(threshold=1.0, stride=16)", "skip(threshold=0.5)", "skip(threshold=0.05)"),
        beats_mean=True,
        skip={"lse merge": _OTHER_GROUPS},
    ),
    Row("skip(threshold=0.7, stride=64)", skip={"lse merge": _OTHER_GROUPS}),
    Row("skip(threshold=0.0)"),
    Row(
        "skyformer(landmarks=6)",
        budgets=("skyformer(landmarks=8)", "skyformer(landmarks=32)", "skyformer(landmarks=127)"),
        skip={"permutation": _BY_RANK},
    ),
    Row(
        "skyformer(landmarks=6, gamma=0.0, sampling=iid)",
        budgets=tuple(f"skyformer(landmarks={m}, gamma=0.0, sampling=iid)" for m in (8, 32, 127)),
        skip={"permutation": _BY_RANK},
    ),
    Row("skyformer(landmarks=5, solver=newton_schulz, sampling=half)", skip={"permutation": _BY_RANK}),
    Row(
        "skyformer(landmarks=6, kernel=softmax)",
        budgets=tuple(f"skyformer(landmarks={m}, kernel=softmax)" for m in (8, 32, 127)),
        skip={"permutation": _BY_RANK},
    ),
    Row("skyformer(gamma=0.0, sampling=all)"),
    Row("yoso(hashes=8)", budgets=("yoso(hashes=4)", "yoso(hashes=16)", "yoso(hashes=64)"), skip=_NO_DERIVATIVE),
    Row("yoso(hashes=8, bits=3, normalize=sum, hash=gaussian)", skip=_NO_DERIVATIVE),
    Row("yoso(hashes=7, bits=4, normalize=none, gradient=exact)", skip=_NO_DERIVATIVE),
    Row("yoso(expectation=True)", skip=_NO_DERIVATIVE),
    Row("yoso(expectation=True, bits=5, normalize=none, gradient=exact)"),
    Row("yoso(expectation=True, normalize=sum, gradient=exact)"),
    Row("yoso(hashes=8, unit=lift)", skip=_NO_DERIVATIVE),
    Row("yoso(hashes=7, bits=4, unit=lift, temperature=5.0, normalize=none)", skip=_NO_DERIVATIVE),
    Row("yoso(expectation=True, bits=5, unit=lift, normalize=none, gradient=exact)"),
    Row("yoso(expectation=True, bits=5, unit=lift, temperature=9.0, normalize=sum, gradient=exact)"),
    Row(
        "lsh(rounds=2, chunk=4)",
        budgets=("lsh(rounds=1, chunk=4)", "lsh(rounds=4, chunk=4)", "lsh(rounds=16, chunk=4)"),
        beats_mean=True,
        skip={"lse merge": _OTHER_BUCKETS},
    ),
    Row("lsh(rounds=2, chunk=5, combine=sum)", skip={"lse merge": _OTHER_BUCKETS}),
    Row("lsh(rounds=2, chunk=8, buckets=6, combine=sum, align=rank)", skip={"lse merge": _OTHER_BUCKETS}),
    Row(
        "lsh(rounds=3, chunk=6, combine=ips)",
        budgets=tuple(f"lsh(rounds={rounds}, chunk=4, combine=ips)" for rounds in (1, 4)),
        skip={"lse merge": _OTHER_BUCKETS, "gradient": _CONSTANT_CHANCE},
    ),
    Row(
        "top_keys(keys=4)",
        budgets=("top_keys(keys=1)", "top_keys(keys=4)", "top_keys(keys=16)"),
        beats_mean=True,
        skip={"lse merge": "each part of the keys has its own largest ones; top_keys(keys=200) runs it with all keys"},
    ),
    Row("top_keys(keys=200)"),
    Row(
        "value_aware(keys=4)",
        budgets=("value_aware(keys=1)", "value_aware(keys=4)", "value_aware(keys=16)"),
        beats_mean=True,
    ),
    Row("value_aware(keys=1)"),
    Row("value_aware(keys=16)"),
    Row("value_aware(keys=4, corrective=False)"),
    *(
        Row(
            f"sampled(samples=16, {setting})",
            budgets=tuple(f"sampled(samples={m}, {setting})" for m in (4, 16, 64)),
            beats_mean=True,
            skip={"permutation": "a draw finds its key by the running sum over the keys, so their order matters"},
        )
        for setting in (
            "proposal=attention",
            "proposal=value_norm",
            "proposal=value_norm, form=self_normalized",
            "proposal=deviation, form=self_normalized",
        )
    ),
]
