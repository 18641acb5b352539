"""The rule of each equation: ours if we wrote one, else Shardy's, else replicated.

Rules are cached for the process by what determines them: primitive, parameters and abstract values.
"""

import collections
import functools
import os
import sys
import warnings
from collections.abc import Hashable, Sequence

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard import primitives, shardy
from autoshard.factors import Kind, Rule, parse_rule, replicated

__all__ = ["Kind", "ReplicatedWarning", "Rule", "parse_rule", "replicated_rule", "rules_for"]

_CACHE_SIZE = 8192
_PACKAGE = os.path.dirname(__file__) + os.sep
_cache: collections.OrderedDict[Hashable, Rule | None] = collections.OrderedDict()


class ReplicatedWarning(UserWarning):
    """An equation that nobody has a rule for is computed whole on every device."""


def rules_for(eqns: Sequence[JaxprEqn]) -> list[Rule]:
    """Returns the rule of each equation, which must be leaves (no nested body to plan).

    Warns with a ReplicatedWarning where an equation has no rule.
    """
    forms: dict[int, tuple] = {}
    numbers: dict[Hashable, int] = {}
    which = [numbers.setdefault(_signature(eqn, forms), len(numbers)) for eqn in eqns]
    example = dict(zip(reversed(which), reversed(eqns), strict=True))
    missing = {key: example[n] for key, n in numbers.items() if key not in _cache}
    new = dict(zip(missing, _new_rules(list(missing.values())), strict=True))
    found = [new[key] if key in new else _cache[key] for key in numbers]
    for key, rule in zip(numbers, found, strict=True):
        _cache[key] = rule
        _cache.move_to_end(key)
    while len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    rules = []
    for n, eqn in zip(which, eqns, strict=True):
        rule = found[n]
        if rule is None:
            rule = replicated_rule(eqn)
            declared = eqn.primitive.name in primitives.REPLICATED
            warned = not declared or eqn.primitive.name in primitives.WARNED
            if rule.sizes and warned and not _is_empty(eqn):
                _warn(eqn)
        rules.append(rule)
    return rules


def replicated_rule(eqn: JaxprEqn) -> Rule:
    """Returns the rule under which every operand and result is whole on every device."""
    return replicated([_shape(v.aval) for v in eqn.invars], [_shape(v.aval) for v in eqn.outvars])


def _new_rules(eqns: Sequence[JaxprEqn]) -> list[Rule | None]:
    rules: list[Rule | None] = [None] * len(eqns)
    asked = []
    for n, eqn in enumerate(eqns):
        name = eqn.primitive.name
        if name in primitives.RULES:
            rules[n] = primitives.RULES[name](eqn)
        if rules[n] is None and name not in primitives.REPLICATED:
            asked.append(n)
    for n, rule in zip(asked, shardy.lowered_rules([eqns[n] for n in asked]), strict=True):
        if rule is not None and eqns[n].primitive.name in primitives.CORRECTIONS:
            rule = primitives.CORRECTIONS[eqns[n].primitive.name](eqns[n], rule)
        rules[n] = rule if rule is None or _fault(rule, eqns[n]) is None else None
    return rules


def _is_empty(eqn: JaxprEqn) -> bool:
    """Whether there is nothing to compute: no rule (a reshape of no elements) costs nothing."""
    return not eqn.effects and all(0 in _shape(v.aval) for v in eqn.outvars)


def _fault(rule: Rule, eqn: JaxprEqn) -> str | None:
    return rule.check([_shape(v.aval) for v in eqn.invars], [_shape(v.aval) for v in eqn.outvars])


def _warn(eqn: JaxprEqn) -> None:
    warnings.warn(
        f"no sharding rule for primitive {eqn.primitive.name!r} at {shardy.source_line(eqn)}: "
        "it runs whole on every device",
        ReplicatedWarning,
        stacklevel=_levels_to_user(),
    )


def _levels_to_user() -> int:
    """Returns the stack level, seen from the caller, of the first frame outside this package."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels


def _shape(aval) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def _signature(eqn: JaxprEqn, forms: dict[int, tuple]) -> Hashable:
    """Returns what determines an equation's rule; equal for equal equations of any trace.

    `forms`: by id, abstract values seen before and their forms.
    """
    avals = []
    for v in (*eqn.invars, *eqn.outvars):
        known = forms.get(id(v.aval))
        if known is None or known[0] is not v.aval:
            known = forms[id(v.aval)] = (v.aval, _form(v.aval))
        avals.append(known[1])
    params = [(k, v if type(v) in _PLAIN else _frozen(v)) for k, v in eqn.params.items()]
    return (eqn.primitive, len(eqn.invars), *params, *avals, eqn.ctx.threefry_partitionable)


def _form(aval) -> Hashable:
    return _shape(aval), _text(getattr(aval, "dtype", aval)), getattr(aval, "weak_type", False)


_text = functools.lru_cache(maxsize=256)(str)  # of a dtype, which takes NumPy long


_PLAIN = frozenset((type(None), bool, int, float, str))


def _frozen(value) -> Hashable:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Jaxpr):
        return str(value)
    if isinstance(value, ClosedJaxpr):
        return str(value.jaxpr), tuple(_frozen(c) for c in value.consts)
    if isinstance(value, dict):
        return tuple((_frozen(k), _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple([_frozen(v) for v in value])
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return value


class _Same:
    """A value that cannot be hashed: equal to itself only, and kept alive while in the cache."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self):
        return id(self.value)
