"""A rule and a mesh -> the strategies of an operation: which mesh axes split which factor.

The rule `i k, k j -> i j` on the mesh `data=4,model=2` has, among others, the strategies

    i:data            [data,-], [-,-] -> [data,-]                        data parallel
    k:model           [-,model], [model,-] -> [-,-]  all-reduce(model)   row parallel
    k:model>i         [-,model], [model,-] -> [model,-]  reduce-scatter  the same, result scattered
    over i

Partial sums never leave an operation: they are all-reduced, or reduce-scattered onto a dim of the
result.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from autoshard.factors import Kind, Rule
from autoshard.graph import Kind as OpKind
from autoshard.graph import Op
from autoshard.sharding import Axes, MeshShape, Sharding, all_shardings

ORDERED_AXES = (
    2  # with more mesh axes than this, several axes on one factor stand in the mesh's order only
)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to run an operation on the mesh.

    `partial` are the results before their partial sums are combined over the axes `reduced`; the
    axes `scattered`, a subset of `reduced`, end up on dims of the result. `shards` counts the
    devices that share the computation.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    partial: tuple[Sharding, ...]
    reduced: Axes = ()
    scattered: Axes = ()
    shards: int = 1

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"
        gathered = [a for a in self.reduced if a not in self.scattered]
        if self.scattered:
            text += f" reduce-scatter({','.join(self.scattered)})"
        if gathered:
            text += f" all-reduce({','.join(gathered)})"
        return text


@functools.lru_cache(maxsize=65536)
def strategies(rule: Rule, mesh: MeshShape) -> tuple[Strategy, ...]:
    """Returns every legal strategy, simplest first, in a fixed order."""
    found: dict[Strategy, None] = {}
    for factor_axes in _assignments(rule, mesh):
        strategy = _strategy(rule, mesh, factor_axes)
        if strategy is not None:
            found[strategy] = None
            for scattered in _scatters(rule, mesh, strategy):
                found[scattered] = None
    return tuple(sorted(found, key=_simplicity))


def border_strategies(op: Op, mesh: MeshShape) -> tuple[Strategy, ...]:
    """Returns the strategies of a border operation: one for each sharding of its value."""
    (value,) = op.results
    return _border_strategies(op.kind, len(op.operands), value.shape, mesh)


@functools.lru_cache(maxsize=65536)
def _border_strategies(
    kind: OpKind, operand_count: int, shape: tuple[int, ...], mesh: MeshShape
) -> tuple[Strategy, ...]:
    if kind is OpKind.CONST:
        return (pinned_border(Sharding.replicated(len(shape)), 0),)
    shape = shape[1:] if kind is OpKind.STACK else shape
    scanned = Sharding(((),))
    found = []
    for sharding in all_shardings(shape, mesh, ordered=is_ordered(mesh)):
        stacked = Sharding(scanned.dims + sharding.dims)
        operand = stacked if kind is OpKind.SLICE else sharding
        result = stacked if kind is OpKind.STACK else sharding
        found.append(Strategy((operand,) * operand_count, (result,), (result,)))
    return tuple(found)


def pinned_border(sharding: Sharding, operand_count: int) -> Strategy:
    """Returns the one strategy of a border whose sharding the user fixed."""
    return Strategy((sharding,) * operand_count, (sharding,), (sharding,))


def is_ordered(mesh: MeshShape) -> bool:
    """Returns whether both orders of two axes on one dim are worth listing."""
    return sum(size > 1 for _, size in mesh.axes) <= ORDERED_AXES


def _assignments(rule: Rule, mesh: MeshShape) -> Iterator[tuple[Axes, ...]]:
    """Yields the axes of each factor: every way to give some axes to factors that can be split."""
    axes = [name for name, size in mesh.axes if size > 1]
    open_factors = [
        f for f, kind in enumerate(rule.kinds)
        if kind in (Kind.PASS, Kind.REDUCE) and rule.sizes[f] > 1
    ]  # fmt: skip
    orders = itertools.permutations if is_ordered(mesh) else itertools.combinations
    for count in range(len(axes) + 1):
        for order in orders(axes, count):
            for chosen in itertools.product(open_factors, repeat=count):
                factor_axes: list[Axes] = [()] * len(rule.sizes)
                for axis, f in zip(order, chosen, strict=True):
                    factor_axes[f] += (axis,)
                if all(rule.sizes[f] % mesh.size(a) == 0 for f, a in enumerate(factor_axes) if a):
                    yield tuple(factor_axes)


def _strategy(rule: Rule, mesh: MeshShape, factor_axes: tuple[Axes, ...]) -> Strategy | None:
    operands = [_project(dims, rule, mesh, factor_axes) for dims in rule.operands]
    results = [_project(dims, rule, mesh, factor_axes) for dims in rule.results]
    if any(s is None for s in operands + results):
        return None
    reduced = tuple(
        a for f, axes in enumerate(factor_axes) if rule.kinds[f] is Kind.REDUCE for a in axes
    )
    shards = mesh.size(tuple(itertools.chain.from_iterable(factor_axes)))
    done = tuple(s for s in results if s is not None)
    return Strategy(tuple(s for s in operands if s is not None), done, done, reduced, (), shards)


def _project(dims, rule: Rule, mesh: MeshShape, factor_axes: tuple[Axes, ...]) -> Sharding | None:
    """Returns the sharding of one array, None if blocks of a merged dim are not contiguous."""
    sharded = []
    for factors in dims:
        axes: Axes = ()
        whole = False  # a factor to the left is not split to single elements
        for f in factors:
            if factor_axes[f] and whole:
                return None
            axes += factor_axes[f]
            whole = whole or mesh.size(factor_axes[f]) != rule.sizes[f]
        sharded.append(axes)
    sharding = _shared(tuple(sharded))
    return sharding if len(set(sharding.axes)) == len(sharding.axes) else None


@functools.lru_cache(maxsize=65536)
def _shared(dims: tuple[Axes, ...]) -> Sharding:
    """Returns one object for equal shardings, so that what it remembers is worked out once."""
    return Sharding(dims)


def _scatters(rule: Rule, mesh: MeshShape, strategy: Strategy) -> Iterator[Strategy]:
    """Yields the variants that scatter some of the reduced axes onto dims of the result."""
    if not strategy.reduced or len(strategy.results) != 1 or rule.reduction != "add":
        return
    (result,) = strategy.results
    # A dim that only a window of a factor reaches (a slice, a convolution's space) takes no blocks,
    # nor does an empty one.
    shape = tuple(
        max(1, _size(rule, factors)) if all(rule.kinds[f] is Kind.PASS for f in factors) else 1
        for factors in rule.results[0]
    )
    for sharding, scattered in _scattered(result, strategy.reduced, shape, mesh):
        yield dataclasses.replace(strategy, results=(sharding,), scattered=scattered)


@functools.lru_cache(maxsize=65536)
def _scattered(
    result: Sharding, reduced: Axes, shape: tuple[int, ...], mesh: MeshShape
) -> tuple[tuple[Sharding, Axes], ...]:
    """Returns the shardings that a result can be scattered to, each with the axes scattered."""
    found = []
    for choice in _scatter_choices(len(reduced), len(shape), is_ordered(mesh)):
        dims = list(result.dims)
        for axis, d in zip(reduced, choice, strict=True):
            if d is not None:
                dims[d] += (axis,)
        if all(n % mesh.size(axes) == 0 for n, axes in zip(shape, dims, strict=True)):
            scattered = tuple(a for a, d in zip(reduced, choice, strict=True) if d is not None)
            if scattered:
                found.append((_shared(tuple(dims)), scattered))
    return tuple(found)


def _scatter_choices(axis_count: int, rank: int, free: bool) -> list[tuple[int | None, ...]]:
    """Returns the dim, or None, that each reduced axis is scattered onto.

    Unless `free`: one axis, or all of them, onto one dim.
    """
    if free:
        return list(itertools.product([None, *range(rank)], repeat=axis_count))
    masks = itertools.product([False, True], repeat=axis_count)
    few = [m for m in masks if sum(m) in (1, axis_count)]
    return [tuple(d if m else None for m in mask) for mask in few for d in range(rank)]


def _size(rule: Rule, factors: tuple[int, ...]) -> int:
    size = 1
    for f in factors:
        size *= rule.sizes[f]
    return size


def _simplicity(strategy: Strategy) -> tuple:
    shardings = strategy.operands + strategy.results
    return (
        len(strategy.reduced),
        sum(len(s.axes) for s in shardings),
        [s.dims for s in shardings],
        strategy.reduced,
    )
