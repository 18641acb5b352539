"""Shardings that the user fixed: a pytree prefix of PartitionSpec, None where free."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import PinError
from autoshard.sharding import MeshShape, Sharding


def resolve(
    pins: Any, tree: Any, names: Sequence[str], shapes: Sequence[tuple[int, ...]], mesh: MeshShape,
    top_names: Sequence[str] = (),
) -> list[Sharding | None]:  # fmt: skip
    """Returns the pin of each leaf of `tree`, in order.

    A pin applies to every leaf below it. Dicts may name only some keys; at the top, arguments may
    be given by position or, in a dict, by parameter name.

    Args:
      names: the leaves' names, for errors.
      top_names: parameter names of a tuple of arguments.

    Raises:
      PinError: a pin that belongs to no leaf, or that the array cannot take.
    """
    leaf_paths = [_keys(p) for p, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    found: list[Sharding | None] = [None] * len(leaf_paths)
    for path, pin in jax.tree_util.tree_flatten_with_path(pins, is_leaf=_is_pin)[0]:
        if pin is None:
            continue
        keys = _keys(path)
        if keys and keys[0] in top_names:
            keys = (str(list(top_names).index(keys[0])),) + keys[1:]
        hits = [i for i, leaf in enumerate(leaf_paths) if leaf[: len(keys)] == keys]
        if not hits:
            where = jax.tree_util.keystr(path)
            raise PinError(
                f"pin {where or 'at the top'}: {pin} names no array; the arrays are {_some(names)}"
            )
        for i in hits:
            found[i] = _sharding(pin, names[i], shapes[i], mesh)
    return found


def _is_pin(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def _keys(path) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def _sharding(pin: Any, name: str, shape: tuple[int, ...], mesh: MeshShape) -> Sharding:
    if not isinstance(pin, (PartitionSpec, NamedSharding)):
        raise PinError(f"pin of {name} is {pin!r}, wanted a PartitionSpec or None (free)")
    spec = pin.spec if isinstance(pin, NamedSharding) else pin
    if len(spec) > len(shape):
        raise PinError(
            f"pin of {name}: {spec} has {len(spec)} entries, the array has {len(shape)} dims"
        )
    sharding = Sharding.from_spec(spec, len(shape))
    wrong = sharding.check(shape, mesh)
    if wrong:
        raise PinError(f"pin of {name}, shape {list(shape)}: {spec} cannot be taken: {wrong}")
    return sharding


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 8 else shown or "none"
