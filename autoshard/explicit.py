"""Programs that use JAX's explicit sharding inside: traced as they want, then freed of it.

On Explicit axes JAX decides shardings while it traces, and a plan has nothing to say. So such a
program is traced once under the user's mesh, and its jaxpr is evaluated again on Auto axes, where
every sharding that the user wrote (`reshard`, `out_sharding=`) is a constraint, a pin, and every
one that JAX inferred is free.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autoshard.apply import Constraints, Evaluation
from autoshard.trace import Program, as_closed, body_params, trace

# Parameters by which operations take the sharding of their result.
_PARAMETERS = ("out_sharding", "sharding", "dst_sharding")
_NOTE = (
    "autoshard traced this program on the Explicit axes of {mesh}, as it uses explicit sharding; "
    "arguments have the shardings they were passed with, whole ones where they had none"
)


def explicit_mesh(mesh: Any) -> Mesh | AbstractMesh | None:
    """Returns the mesh with Explicit axes that the caller is in or, failing that, gave."""
    context = jax.sharding.get_abstract_mesh()
    for candidate in (context, mesh):
        if isinstance(candidate, Mesh | AbstractMesh) and _is_explicit(candidate):
            return candidate
    return None


def traced(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    explicit: Mesh | AbstractMesh | None,
    **options: Any,
) -> Program:
    """Traces like `trace`; a program that Auto axes refuse is traced on those of `explicit`.

    Raises:
      ArgumentError: as `trace` does. What JAX raises comes through, with a note.
    """
    try:
        program = trace(fn, args, kwargs, **options)
        explicit = _explicit_inside(program.jaxpr.jaxpr)
        if explicit is None:
            return program
    except Exception:
        if explicit is None:
            raise
    try:
        return trace(_implicit(fn, args, kwargs or {}, explicit), args, kwargs, **options)
    except Exception as e:
        e.add_note(_NOTE.format(mesh=explicit))
        raise


def _explicit_inside(jaxpr: jex.Jaxpr) -> AbstractMesh | None:
    """Returns the mesh with Explicit axes of the first equation that has one."""
    for eqn in jaxpr.eqns:
        meshes = [eqn.ctx.cur_abstract_mesh]
        meshes += [s.mesh for s in eqn.params.values() if isinstance(s, NamedSharding)]
        for mesh in meshes:
            if _is_explicit(mesh):
                return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        for name in body_params(eqn):
            for body in jax.tree.leaves(eqn.params[name], is_leaf=lambda x: hasattr(x, "eqns")):
                found = _explicit_inside(as_closed(body).jaxpr)
                if found is not None:
                    return found
    return None


def _implicit(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any], mesh) -> Callable:
    """Returns `fn` without explicit sharding; called with arguments like these only."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    auto = _auto(mesh)
    shardings = [_explicit_sharding(x, abstract) for x in jax.tree.leaves((tuple(args), kwargs))]

    @functools.wraps(fn)
    def implicit(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [k for k, x in enumerate(leaves) if isinstance(x, Tracer)]

        def of_dynamic(*xs):
            filled = list(leaves)
            for k, x in zip(dynamic, xs, strict=True):
                filled[k] = x
            args, kwargs = jax.tree.unflatten(tree, filled)
            return fn(*args, **kwargs)

        structs = [
            jax.ShapeDtypeStruct(
                leaves[k].shape, leaves[k].dtype, weak_type=leaves[k].weak_type,
                sharding=shardings[k],
            )
            for k in dynamic
        ]  # fmt: skip
        with jax.sharding.use_abstract_mesh(abstract):
            closed, result = jax.make_jaxpr(of_dynamic, return_shape=True)(*structs)
        flat = _Freed(auto).body(closed, [leaves[k] for k in dynamic], "")
        return jax.tree.unflatten(jax.tree.structure(result), flat)

    return implicit


class _Freed(Evaluation):
    """Evaluates a jaxpr on a mesh of Auto axes, with the user's shardings as constraints."""

    def __init__(self, mesh: Any):
        super().__init__(Constraints({}, {}), mesh)
        self.abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

    def equation(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        with jax.sharding.use_abstract_mesh(self.abstract):  # the equation's own is Explicit
            return self._equation(eqn, args, path)

    def _equation(self, eqn: jex.JaxprEqn, args: list[Any], path: str) -> list[Any]:
        if eqn.primitive.name == "mesh_cast":
            return args
        given = {k: v for k in _PARAMETERS if isinstance(v := eqn.params.get(k), NamedSharding)}
        if eqn.primitive.name == "reshard":
            return [self._pinned(x, s) for x in args for s in given.values()]
        written = {k: s for k, s in given.items() if _is_explicit(s.mesh)}
        if written:
            eqn = eqn.replace(params={**eqn.params, **dict.fromkeys(written)})
        if eqn.primitive.name == "shard_map":
            eqn = eqn.replace(params={**eqn.params, "mesh": self.mesh})
        outs = super().equation(eqn, args, path)
        for sharding in written.values():
            outs = [self._pinned(x, sharding) for x in outs]
        return outs

    def _pinned(self, x: Any, sharding: NamedSharding) -> Any:
        if not _is_explicit(sharding.mesh) or not x.shape:
            return x  # on Auto axes it says nothing
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, sharding.spec))


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return any(kind is AxisType.Explicit for kind in mesh.axis_types)


def _auto(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """Returns the mesh with Auto axes, with its devices if they are known."""
    concrete = mesh if isinstance(mesh, Mesh) else jax.sharding.get_mesh()
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if not concrete.empty and concrete.axis_names == mesh.axis_names:
        return Mesh(concrete.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def _explicit_sharding(x: Any, mesh: AbstractMesh) -> NamedSharding | None:
    """Returns an argument's sharding as its type holds it, on the abstract mesh."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _is_explicit(sharding.mesh):
        return None
    if sharding.mesh.axis_names != mesh.axis_names:
        return None
    return NamedSharding(mesh, sharding.spec)
