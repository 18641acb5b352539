"""What XLA is told when it compiles a plan."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The TPU compiler packs temporaries into one heap; by default a fast packing may stand although
# its gaps make it much larger than what is alive at once: temporaries of seven plans took 0 to 34 %
# more with it, at the same schedule (libtpu 0.0.42). Compiling takes as long either way.
PACKED: Mapping[str, Any] = {"xla_tpu_buffer_assignment_enable_fast_merge_fallback": False}


def compiler_options(mesh: Mesh, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the options to compile a plan with on a mesh's devices, those `given` last.

    The predicted peak counts on them; a compiler that does not know them is told none.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return dict(given or {})
    if not accepted(mesh, tuple(PACKED.items())):
        warnings.warn(
            f"this TPU compiler refuses {', '.join(PACKED)}: the temporaries of a plan may take up "
            "to a third more than predicted; update libtpu, or leave room in "
            "memory_limit_bytes",
            stacklevel=2,
        )
        return dict(given or {})
    return {**PACKED, **(given or {})}


@functools.lru_cache(maxsize=64)
def accepted(mesh: Mesh, options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether the compiler for a mesh's devices takes some options: tried on a program that does
    nothing."""
    one = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(lambda x: x + 1).lower(one).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return False
    return True
