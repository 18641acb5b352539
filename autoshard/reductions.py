"""The collectives that combine an operation's partial sums, and how often they run."""

import functools

from autoshard import collectives
from autoshard.graph import Op
from autoshard.liveness import Liveness, Total
from autoshard.sharding import Sharding
from autoshard.strategies import Strategy
from autoshard.topology import Topology


@functools.lru_cache(maxsize=65536)
def _reduction(kind: collectives.Kind, axes, size: float, topology: Topology) -> float:
    return float(collectives.seconds(kind, topology, axes, size))


def differ(summed: Total, result: Sharding, total: Sharding) -> bool:
    """Whether a total is known to be sharded otherwise than what is added to it."""
    return summed.dims is not None and tuple(result.dims[d] for d in summed.dims) != total.dims


def reduction_trips(
    op: Op, strategy: Strategy, live: Liveness, total: Sharding | None = None
) -> int:
    """Returns how often a strategy's partial sums are combined in a step; `total`: the sharding of
    the carry that they are added to."""
    if strategy.scattered:
        return op.trips
    summed = live.summed.get(op)
    if summed is not None and total is not None and differ(summed, strategy.results[0], total):
        return op.trips
    return live.reduction_trips(op)


def reductions(op: Op, strategy: Strategy, topology: Topology):
    """Yields (kind, axes, bytes, seconds) of each collective that combines a strategy's partial
    sums."""
    if not strategy.reduced:
        return
    mesh = topology.mesh
    for value, partial, result in zip(op.results, strategy.partial, strategy.results, strict=True):
        size = partial.local_bytes(value.shape, value.itemsize, mesh)
        if strategy.scattered:
            kind, axes = collectives.Kind.REDUCE_SCATTER, strategy.scattered
            # The TPU compiler sums a vector everywhere and slices it.
            vector = topology.chip.sublane_bytes and sum(n > 1 for n in value.shape) < 2
            if vector or not collectives.scatters(topology, axes):
                kind = collectives.Kind.ALL_REDUCE
            yield kind, axes, size, _reduction(kind, axes, size, topology)
        rest = tuple(a for a in strategy.reduced if a not in strategy.scattered)
        if rest:
            kind = collectives.Kind.ALL_REDUCE
            size = result.local_bytes(value.shape, value.itemsize, mesh)
            yield kind, rest, size, _reduction(kind, rest, size, topology)


def asynchronous_s(op: Op, strategy: Strategy, topology: Topology) -> dict[str, float]:
    """Returns by kind of link the seconds of those that run beside compute."""
    found: dict[str, float] = {}
    for kind, axes, _, seconds in reductions(op, strategy, topology):
        if link := collectives.beside(kind, topology, axes):
            found[link] = found.get(link, 0.0) + seconds
    return found
