"""`Recipe`: which layer of a model runs which method, as a small JSON file or an entry of the model's config."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.draws import check_seed
from sparing.from_json import parse, read_text
from sparing.spec import shown
from sparing.store import Damaged, add_checksum, verify_checksum, write_files

#: Which tokens are approximated: both kinds, prompts, or tokens that continue a cache.
WHEN = ("always", "prefill", "decode")
VERSION = 1
_KNOWN = ("version", "architecture", "seed", "when", "layers", "about")


@dataclass(frozen=True)
class Recipe:
    """What each attention layer of a model runs.

    layers: layer name -> spec; names are those of the base model's modules and may hold `*` and `?`. A layer that is
        not named, or has None, runs the model's own attention, to the bit; "exact" is sparing's exact attention.
    seed: fixes all random choices; None draws new ones at each call. A mapping gives layers their own.
    architecture: the `model_type` that the recipe was made for; None fits any model.
    about: anything else worth keeping, such as how the recipe was found, for which data and on which machine.
    when: "always", "prefill" or "decode", as for `approximate()`. A mapping gives layers their own.

    >>> sparing.Recipe({"encoder.layer.*": "nystrom(landmarks=64)"}).to_dict()["layers"]
    {'encoder.layer.*': 'nystrom(landmarks=64)'}
    """

    layers: Mapping[str, str | None]
    seed: int | Mapping[str, int | None] | None = 0
    architecture: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    when: str | Mapping[str, str] = "always"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"recipe: layers={shown(self.layers)} must map layer names to specs")
        for name, spec in self.layers.items():
            if not isinstance(name, str) or not isinstance(spec, str | None):
                raise TypeError(
                    f"recipe: layers must map names to spec strings, or to None, got {shown(name)}: {shown(spec)}"
                )
            try:
                if spec is not None:
                    _method(spec)
            except (TypeError, ValueError) as error:
                raise ValueError(f"recipe: layers[{shown(name)}]: {error}") from None
        for seed in self._values("seed"):
            check_seed(seed, "recipe: seed")
        for when in self._values("when"):
            if when not in WHEN:
                raise ValueError(f"recipe: when={shown(when)} is not one of {', '.join(map(repr, WHEN))}")
        if not isinstance(self.architecture, str | None):
            raise TypeError(f"recipe: architecture={shown(self.architecture)} must be a model_type or None")
        if not isinstance(self.about, Mapping):
            raise TypeError(f"recipe: about={shown(self.about)} must be a mapping")
        object.__setattr__(self, "layers", dict(self.layers))

    def _values(self, field: str) -> Iterable[Any]:
        """Return the values of a field: one for all layers, or those of its mapping."""
        held = getattr(self, field)
        if not isinstance(held, Mapping):
            return (held,)
        for name in held:
            if not isinstance(name, str):
                raise TypeError(f"recipe: {field} must map names of layers, got {shown(name)}")
        return held.values()

    @classmethod
    def of(cls, source: Recipe | Mapping[str, Any] | str | os.PathLike[str]) -> Recipe:
        """Return the recipe of a `Recipe`, its dict, the path of its JSON file, or one spec for every layer."""
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Mapping):
            return cls._read(source)
        if is_path(source):
            return cls.load(source)
        return cls({"*": str(source)})

    @classmethod
    def of_config(cls, config: Any) -> Recipe | None:
        """Return the recipe that a model's config holds, or None.

        A config may come from a stranger, so it must hold the recipe itself: a path would be read on this machine.
        """
        found = getattr(config, "sparing", None)
        if found is not None and not isinstance(found, Mapping):
            raise ValueError(
                f"the model's config has sparing={shown(found)}, which is not a recipe: a config holds the recipe's "
                "JSON itself; del model.config.sparing, and pass a spec or a path to sparing.approximate(model, ...)"
            )
        return None if found is None else cls._read(found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a JSON file."""
        try:
            found = parse(read_text(path, "recipe", "as sparing.Recipe saves it"))
        except ValueError as error:
            raise ValueError(f"recipe: {os.fspath(path)!r} is not JSON: {error}") from None
        try:
            return cls._read(found)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)!r}: {error}") from None

    @classmethod
    def _read(cls, found: Any) -> Recipe:
        if not isinstance(found, Mapping) or "layers" not in found:
            raise ValueError("recipe: it must be a JSON object with 'version' and 'layers'")
        version = found.get("version")
        if type(version) is not int or version != VERSION:
            raise ValueError(f"recipe: version {shown(version)} is not known; this sparing reads {VERSION}")
        try:
            found = verify_checksum(found)
        except Damaged as error:
            raise ValueError(f"recipe: {error}") from None
        unknown = [shown(name) for name in found if name not in _KNOWN]
        if unknown:
            raise ValueError(f"recipe: unknown entries {', '.join(sorted(unknown)[:8])}; known: {', '.join(_KNOWN)}")
        when = found.get("when", "always")
        return cls(found["layers"], found.get("seed", 0), found.get("architecture"), found.get("about", {}), when)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as a JSON-serialisable dict."""
        seed = dict(self.seed) if isinstance(self.seed, Mapping) else self.seed
        layers, about = dict(self.layers), dict(self.about)
        when = {} if self.when == "always" else {"when": self.when if isinstance(self.when, str) else dict(self.when)}
        return {
            "version": VERSION, "architecture": self.architecture, "seed": seed, **when, "layers": layers,
            "about": about,
        }  # fmt: skip

    def with_checksum(self) -> dict[str, Any]:
        """Return the dict that files and configs hold: `to_dict()` and its checksum."""
        return add_checksum(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a JSON file atomically."""
        write_files({Path(path): json.dumps(self.with_checksum(), indent=2) + "\n"})

    def method_of(self, name: str) -> Method | None:
        """Return the method of a layer, or None if the recipe leaves the layer alone."""
        spec = self.spec_of(name)
        return None if spec is None else _method(spec)

    def spec_of(self, name: str) -> str | None:
        """Return the spec of a layer as the recipe has it, or None if the recipe leaves the layer alone."""
        return _named(self.layers, name, None)

    def seed_of(self, name: str) -> int | None:
        """Return the seed of a layer."""
        return _named(self.seed, name, None) if isinstance(self.seed, Mapping) else self.seed

    def when_of(self, name: str) -> str:
        """Return which tokens of a layer are approximated."""
        return _named(self.when, name, "always") if isinstance(self.when, Mapping) else self.when

    def name_at(self, index: int) -> str | None:
        """Return the name of a layer by its number, or None if the layers are not one numbered stack."""
        if list(self.layers) == ["*"]:
            return f"layer {index}"
        matches = [re.fullmatch(r"(\D*)(\d{1,9})(\D*)", name) for name in self.layers]
        if not all(matches) or len({m.group(1, 3) for m in matches if m}) != 1:
            return None
        names = {int(m.group(2)): m.group() for m in matches if m}
        return names.get(index) if sorted(names) == list(range(len(names))) else None


def _named(table: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the entry of a layer: by its name, or else by the first pattern that matches."""
    if name in table:
        return table[name]
    return next((entry for key, entry in table.items() if fnmatchcase(name, key)), otherwise)


def is_path(source: Any) -> bool:
    """Return whether `source` names a file rather than a method: a path object, or text that ends in .json."""
    return isinstance(source, os.PathLike) or (isinstance(source, str) and source.endswith(".json"))
