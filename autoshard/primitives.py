"""Where Shardy's own rule is not enough: rules written by hand, corrections, and what stays whole.

RULES are whole rules, for primitives whose lowering hides what they do.
CORRECTIONS change the kinds of Shardy's rule where the compiled program says otherwise: a factor
that is sharded by gathering the operand needs replication, one without exchange passes.
REPLICATED are primitives declared replicated, each with its reason.
"""

import dataclasses
from collections.abc import Callable

from jax.extend.core import JaxprEqn

from autoshard.factors import Kind, Rule, parse_rule, same_arrays


def _shapes(atoms) -> list[tuple[int, ...]]:
    return [tuple(getattr(v.aval, "shape", ())) for v in atoms]


def _written(text: str, **kinds: Kind) -> Callable[[JaxprEqn], Rule]:
    """Returns what makes the rule `text` for an equation's shapes."""

    def rule(eqn: JaxprEqn) -> Rule:
        return parse_rule(text, _shapes(eqn.invars), _shapes(eqn.outvars), kinds)

    return rule


def _identity(eqn: JaxprEqn) -> Rule:
    """Result k is operand k."""
    return same_arrays(_shapes(eqn.outvars), operand_count=len(eqn.invars))


def _pointwise(eqn: JaxprEqn) -> Rule:
    """All arrays are indexed alike, a scalar (a key) by nothing."""
    shapes = _shapes(eqn.invars)
    operands = ", ".join("..." if shape else "." for shape in shapes)
    return parse_rule(f"{operands} -> ...", shapes, _shapes(eqn.outvars))


def _random_gamma(eqn: JaxprEqn) -> Rule:
    """Elements are drawn from one flat array of keys, so only its major dim is split in blocks."""
    rule = _pointwise(eqn)
    return _with_kinds(rule, dict.fromkeys(range(1, len(rule.kinds)), Kind.REPLICATE))


def _ragged_dot(eqn: JaxprEqn) -> Rule | None:
    """`m k, g k n, g -> m n`: rows of all groups are in one ragged dim, which is whole."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracting, batch = numbers.dot_dimension_numbers
    usual = (contracting, batch) == (((1,), (1,)), ((), ()))
    if not usual or (numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions) != ((0,), (0,)):
        return None
    return _written("m k, g k n, g -> m n", m=Kind.REPLICATE, g=Kind.REPLICATE)(eqn)


RULES: dict[str, Callable[[JaxprEqn], Rule | None]] = {
    "top_k": _written("... j -> ... k, ... k", j=Kind.REPLICATE, k=Kind.REPLICATE),
    "ragged_dot_general": _ragged_dot,
    "optimization_barrier": _identity,
    "sharding_constraint": _identity,
    "device_put": _identity,
    # Their lowering iterates until every element has converged: one scalar is reduced a round.
    "igamma": _pointwise,
    "igammac": _pointwise,
    "igamma_grad_a": _pointwise,
    "regularized_incomplete_beta": _pointwise,
    "random_gamma": _random_gamma,
}


def _with_kinds(rule: Rule, kinds: dict[int, Kind]) -> Rule:
    return dataclasses.replace(
        rule, kinds=tuple(kinds.get(f, kind) for f, kind in enumerate(rule.kinds))
    )


def _whole_along_axis(eqn: JaxprEqn, rule: Rule) -> Rule:
    """A running sum over a sharded dim is compiled to a gather of the operand."""
    return _with_kinds(rule, dict.fromkeys(rule.operands[0][eqn.params["axis"]], Kind.REPLICATE))


def _whole_where_updated(eqn: JaxprEqn, rule: Rule) -> Rule:
    """A window narrower than a sharded dim is written in place only if it is one element wide."""
    kinds = {}
    operand, update = _shapes(eqn.invars[:2])
    for dim, n, width in zip(rule.operands[0], operand, update, strict=True):
        if 1 < width < n:
            kinds.update(dict.fromkeys(dim, Kind.REPLICATE))
    return _with_kinds(rule, kinds)


def _convolution(eqn: JaxprEqn, rule: Rule) -> Rule:
    """A sharded sum over space is compiled to a sum over too many devices, so space is whole there.

    A 1 x 1 kernel has no halo. With a stride it has none either, but sharding the output features
    beside it is then compiled to an exchange of the operand.
    """
    p = eqn.params
    numbers = p["dimension_numbers"]
    kernel = _shapes(eqn.invars)[1]
    for n, (lhs, out) in enumerate(zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)):
        if p["lhs_dilation"][n] == p["window_strides"][n] == 1 and p["padding"][n] == (0, 0):
            rule = _align(eqn, rule, lhs, out, kernel[numbers.rhs_spec[2 + n]], 1)
    if p["batch_group_count"] > 1:  # the partitioner aborts on some shardings of the groups
        return _with_kinds(rule, dict.fromkeys(range(len(rule.kinds)), Kind.REPLICATE))
    space = {f for d in numbers.lhs_spec[2:] for f in rule.operands[0][d]}
    wrong = [f for f, kind in enumerate(rule.kinds) if kind is Kind.REDUCE and f in space]
    groups = p["feature_group_count"]
    if 1 < groups < kernel[numbers.rhs_spec[0]] and kernel[numbers.rhs_spec[1]] == 1:
        wrong += rule.results[0][numbers.out_spec[1]][:1]  # TPUs gather the operand of this one
    return _with_kinds(rule, dict.fromkeys(wrong, Kind.REPLICATE))


def _aligned_window(eqn: JaxprEqn, rule: Rule) -> Rule:
    p = eqn.params
    for d, window in enumerate(p["window_dimensions"]):
        plain = p["base_dilation"][d] == p["window_dilation"][d] == 1
        if plain and p["padding"][d][0] == 0:
            rule = _align(eqn, rule, d, d, window, p["window_strides"][d])
    return rule


def _shifted_where_padded(eqn: JaxprEqn, rule: Rule) -> Rule:
    """Padding that leaves a dim's size as it was (-1 before, 1 behind) still moves its elements."""
    padded = [d for d, p in enumerate(eqn.params["padding_config"]) if tuple(p) != (0, 0, 0)]
    factors = [f for d in padded for f in (*rule.operands[0][d], *rule.results[0][d])]
    return _with_kinds(
        rule, {f: Kind.PERMUTE for f in factors if rule.kinds[f] is not Kind.REPLICATE}
    )


def _aligned_slice(eqn: JaxprEqn, rule: Rule) -> Rule:
    for d, start in enumerate(eqn.params["start_indices"]):
        stride = (eqn.params["strides"] or [1] * (d + 1))[d]
        if stride > 1:
            rule = _align(eqn, rule, d, d, start + 1, stride)
    return rule


def _align(eqn: JaxprEqn, rule: Rule, source: int, result: int, window: int, stride: int) -> Rule:
    """Lets a strided dim pass where no window crosses into the next one's stride.

    Operand dim `source` is then (window position, place in the stride): blocks of it are blocks of
    result dim `result`, and no halo is exchanged.
    """
    n, windows = _shapes(eqn.invars)[0][source], _shapes(eqn.outvars)[0][result]
    if window > stride or n != windows * stride or len(rule.operands[0][source]) != 1:
        return rule
    (positions,) = rule.operands[0][source]
    if rule.results[0][result] != (positions,) or rule.kinds[positions] is not Kind.PERMUTE:
        return rule
    rule = _with_kinds(rule, {positions: Kind.PASS})
    sizes = list(rule.sizes)
    sizes[positions] = windows
    if stride == 1:
        return dataclasses.replace(rule, sizes=tuple(sizes))
    dims = list(rule.operands[0])
    dims[source] = (positions, len(sizes))
    return dataclasses.replace(
        rule,
        operands=(tuple(dims), *rule.operands[1:]),
        sizes=(*sizes, stride),
        kinds=(*rule.kinds, Kind.REPLICATE),
    )


CORRECTIONS: dict[str, Callable[[JaxprEqn, Rule], Rule]] = {
    "cumsum": _whole_along_axis,
    "cumprod": _whole_along_axis,
    "cummax": _whole_along_axis,
    "cummin": _whole_along_axis,
    "cumlogsumexp": _whole_along_axis,
    "dynamic_update_slice": _whole_where_updated,
    "conv_general_dilated": _convolution,
    "pad": _shifted_where_padded,
    "reduce_window": _aligned_window,
    "reduce_window_sum": _aligned_window,
    "reduce_window_max": _aligned_window,
    "reduce_window_min": _aligned_window,
    "slice": _aligned_slice,
}

_CALL = (
    "one library call on some platforms, which the partitioner does not enter: it gathers the batch"
)
_CALLBACK = "runs on the host, once, on whole arrays"
_REFERENCE = "a mutable reference becomes the values it holds before a program is planned"
_TOKEN = "orders effects, holds no array"
_TYPING = "checks types while tracing, leaves nothing to run"
_FOREIGN = "foreign code, which declares no sharding rule"

REPLICATED: dict[str, str] = {
    "eig": _CALL,
    "eigh": _CALL,
    "hessenberg": _CALL,
    "lu": _CALL,
    "schur": _CALL,
    "svd": _CALL,
    "symmetric_product": _CALL,
    "tridiagonal": _CALL,
    "custom_linear_solve": "solves by functions that call a matrix decomposition",
    "cholesky_update": "rotates one column after another",
    "rng_uniform": "the numbers drawn depend on how they are sharded",
    "select_and_scatter": "bound by no public function",
    "shard_map": "its in_specs and out_specs say how it is sharded",
    "pallas_call": _FOREIGN,
    "ffi_call": _FOREIGN,
    "debug_callback": _CALLBACK,
    "debug_print": _CALLBACK,
    "io_callback": _CALLBACK,
    "pure_callback": _CALLBACK,
    "addupdate": _REFERENCE,
    "get": _REFERENCE,
    "swap": _REFERENCE,
    "after_all": _TOKEN,
    "create_token": _TOKEN,
    "custom_lin": _TYPING,
    "empty2": _TYPING,
    "eq_to": "a comparison inside the lowering of sort",
    "le_to": "a comparison inside the lowering of sort",
}
# The user can do something about these: wrap them in shard_map, or declare a rule.
WARNED = ("pallas_call", "ffi_call")
