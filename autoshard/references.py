"""Mutable references inside a program (`jax.new_ref`) -> the values that they hold.

A reference has no sharding; the values that are read from it and written to it have. JAX does the
same before it compiles. Uses a private function of JAX, as `shardy` does.
"""

from jax._src.state.discharge import discharge_state
from jax.extend import core as jex

_MADE_BY = ("ref", "new_ref")


def without_references(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns the jaxpr with its references as values; itself if it makes none."""
    return discharge_state(closed) if _makes_one(closed.jaxpr) else closed


def _makes_one(jaxpr: jex.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in _MADE_BY or any(map(_makes_one, _bodies(eqn))) for eqn in jaxpr.eqns
    )


def _bodies(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, jex.ClosedJaxpr):
                found.append(x.jaxpr)
            elif isinstance(x, jex.Jaxpr):
                found.append(x)
    return found
