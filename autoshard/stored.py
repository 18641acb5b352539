"""What the blocks of values take in memory."""

import functools

from autoshard.graph import Value
from autoshard.sharding import Sharding
from autoshard.topology import Topology


def stored_bytes(
    topology: Topology, value: Value, sharding: Sharding, majors: tuple[int, ...] = ()
) -> float:
    """Returns what one device's block of a value takes, `majors` being its outermost dims."""
    return _stored_bytes(topology, value.shape, value.itemsize, sharding, majors, None)


def moved_bytes(
    topology: Topology, value: Value, have: Sharding, want: Sharding, given: bool
) -> float:
    """Returns what one device's copy in another sharding takes.

    Blocks of an argument (`given`) lie as JAX gives them, and what is gathered of them keeps that
    order of dims, though another would leave less padding.
    """
    like = have if given else None
    return _stored_bytes(topology, value.shape, value.itemsize, want, (), like)


@functools.lru_cache(maxsize=65536)
def _stored_bytes(topology: Topology, shape, itemsize, sharding: Sharding, majors, like) -> float:
    block = like and like.local_shape(shape, topology.mesh)
    local = sharding.local_shape(shape, topology.mesh)
    return topology.chip.stored_bytes(local, itemsize, majors, block)
