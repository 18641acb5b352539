"""Fields of a parsed JSON tree, each checked; the error names the field."""

from typing import Any

import numpy as np

from autoshard.errors import ProblemError

HUGE = 2.0**63  # beyond the integers of other readers


def member(tree: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(tree, dict) or key not in tree:
        raise ProblemError(f"{where}{key} is missing")
    if not isinstance(tree[key], kind):
        raise ProblemError(f"{where}{key} is {tree[key]!r:.40}, wanted a {kind.__name__}")
    return tree[key]


def vectors(tree: dict, key: str, where: str) -> list[np.ndarray]:
    return [vector(v, f"{where}{key}[{i}]") for i, v in enumerate(member(tree, key, list, where))]


def vector(values: Any, field: str) -> np.ndarray:
    try:
        if not isinstance(values, list) or any(isinstance(v, str) for v in values[:1]):
            raise TypeError
        found = np.array(values, np.float64)
    except OverflowError:
        raise ProblemError(f"{field} holds a number beyond 64 bits") from None
    except (TypeError, ValueError):
        raise ProblemError(f"{field} is {values!r:.40}, wanted a list of numbers") from None
    if found.ndim != 1:
        raise ProblemError(f"{field} has {found.ndim} dims, wanted a list of numbers")
    if not np.all(np.isfinite(found)):
        raise ProblemError(f"{field} holds {found[~np.isfinite(found)][0]}, wanted finite numbers")
    if np.any(np.abs(found) >= HUGE):
        raise ProblemError(f"{field} holds {np.abs(found).max():g}, a number beyond 64 bits")
    return found


def integers(values: Any, count: int, field: str) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ProblemError(f"{field} is {values!r:.40}, wanted {count} integers")
    for v in values:
        if type(v) is not int or not 0 <= v < HUGE:
            raise ProblemError(f"{field} is {values!r:.40}, wanted integers from 0 to 2^63")
    return tuple(values)
