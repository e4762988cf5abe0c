"""All methods: each is a file, or a folder whose `method.py` has the class. Importing this package registers them."""

import sys
from types import ModuleType
from typing import NoReturn

from sparing.methods.exact import Exact
from sparing.methods.kernel import Kernel
from sparing.methods.key_clusters import KeyClusters
from sparing.methods.linformer import Linformer
from sparing.methods.lsh import Lsh
from sparing.methods.monte_carlo import MonteCarlo
from sparing.methods.multipole import Multipole
from sparing.methods.nystrom import Nystrom
from sparing.methods.random_features import RandomFeatures
from sparing.methods.skip import Skip
from sparing.methods.skyformer import Skyformer
from sparing.methods.window import Window
from sparing.methods.yoso import Yoso

__all__ = [
    "Exact",
    "Kernel",
    "KeyClusters",
    "Linformer",
    "Lsh",
    "MonteCarlo",
    "Multipole",
    "Nystrom",
    "RandomFeatures",
    "Skip",
    "Skyformer",
    "Window",
    "Yoso",
]


class _Package(ModuleType):
    """The type of this package, which makes `sparing.methods()`, a call of old versions, raise with the new name."""

    def __call__(self) -> NoReturn:
        raise TypeError("sparing.methods is the package of all methods; sparing.list_methods() lists them")


sys.modules[__name__].__class__ = _Package
