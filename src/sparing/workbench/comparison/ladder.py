"""Default budgets of every method that fits pretrained weights without training."""

from __future__ import annotations

from sparing.contract import method


def ladder(length: int, *, causal: bool) -> tuple[str, ...]:
    """Return specs for documents of so many tokens: sparing's exact attention first, oracles last."""
    few, some, many = (max(length // part, 1) for part in (32, 8, 2))
    windows = [max(size // 2 * 2, 2) for size in ((some, length // 4, many) if causal else (some, many))]
    if causal:
        specs = [
            "exact",
            *(f"window(size={size}, sinks=4)" for size in windows),
            "key_clusters(clusters=32, keys=300, window=0, sinks=4, cap=8, steps=6, tolerance=0.0036)",
            *(f"multipole(tolerance={tolerance})" for tolerance in (0.01, 0.001)),
            *(f"skip(threshold={threshold})" for threshold in (0.03, 0.01)),
            *(f"random_features(features={count})" for count in (64, 256)),
            *(f"lsh(rounds=4, chunk={size})" for size in (32, 64)),
        ]
    else:
        specs = [
            "exact",
            *(f"window(size={size}, sinks=1)" for size in windows),
            *(f"nystrom(landmarks={count})" for count in (16, 64, 128) if count <= many),
            *(f"lsh(rounds=4, chunk={size})" for size in (16, 32, 64)),
            f"key_clusters(clusters={max(length // 16, 1)}, keys={max(length // 16, 1)}, window=16)",
            f"key_clusters(clusters={some}, keys={max(length * 3 // 20, 1)}, window=16)",
            f"key_clusters(clusters={some}, keys={max(length * 5 // 16, 1)}, window=16)",
            *(f"multipole(tolerance={tolerance})" for tolerance in (0.01, 0.001)),
            *(f"skip(threshold={threshold})" for threshold in (0.03, 0.01)),
            *(f"random_features(features={count})" for count in (64, 256)),
            *(f"monte_carlo(alpha={alpha}, estimator=mean)" for alpha in (0.1, 0.2, 0.4)),
        ]
    specs += [f"top_keys(keys={few})", f"top_keys(keys={some})"]
    if not causal:  # in a language model they take minutes for a document
        specs += ["value_aware(keys=8)", f"sampled(samples={some})"]
    return tuple(dict.fromkeys(str(method(spec)) for spec in specs))


def generation_ladder(context: int) -> tuple[str, ...]:
    """Return specs for tokens that continue so many others; the window shows what losing facts looks like."""
    window = max(context // 8 // 2 * 2, 2)
    specs = [*(f"multipole(tolerance={tolerance})" for tolerance in (0.01, 0.001)), f"window(size={window}, sinks=4)"]
    return tuple(str(method(spec)) for spec in specs)
