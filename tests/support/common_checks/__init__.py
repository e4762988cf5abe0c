"""The common checks: what every method must pass. Each raises AssertionError with the method, the shapes and the error.

`CHECKS` maps a name to a function of (row, impl). `tests/methods/test_common.py` runs them over `method_table.py`, and
`tests/methods/test_controls.py` shows that the methods of `broken_methods/` fail them, module by module.
"""

from tests.support.common_checks import calls, gradients, masks, numbers  # noqa: F401  (they register their checks)
from tests.support.common_checks.tools import CHECKS

__all__ = ["CHECKS"]
