"""Functions under a plan: `Plan.jit` for one, `autoshard.jit` for one per argument shapes."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import compiling
from autoshard.apply import constrained
from autoshard.errors import MeshError, PlanError
from autoshard.explicit import explicit_mesh, traced
from autoshard.meshes import concrete_mesh, mesh_shape
from autoshard.plan import Plan
from autoshard.trace import Program, auto_axes


class _OtherArguments(Exception):
    """The arguments have other shapes, dtypes or structure than the plan's."""


class PlannedFunction:
    """A function jitted with a plan's constraints; arguments that lie elsewhere are moved."""

    def __init__(
        self,
        plan: Plan,
        fn: Callable,
        mesh: Any,
        static_argnums: Sequence[int],
        program: Program | None,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        self.plan, self.fn, self.given, self.mesh = plan, fn, mesh, concrete_mesh(mesh)
        self.static_argnums = tuple(static_argnums)
        self.program = program
        self.options = compiler_options
        self._jitted: Callable | None = None
        self._nested: Callable | None = None
        self._shardings: tuple = ()
        self._leaf_shardings: list[NamedSharding] = []
        self._structure: Any = None
        self._shapes: list[tuple[int, ...]] = []
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jitted = self._jitted or self._build(args, kwargs)
        if kwargs or self.static_argnums:
            args = self._flat_arguments(args, kwargs)
        leaves, tree = jax.tree.flatten(args)
        if tree != self._structure:
            raise _OtherArguments
        # jax.jit would compile once more for arguments that lie elsewhere, or refuse them.
        if [getattr(x, "sharding", None) for x in leaves] != self._leaf_shardings:
            args = jax.tree.unflatten(tree, self._moved(leaves))
        if jax.sharding.get_abstract_mesh().empty:
            return self._run(jitted, args)
        with jax.sharding.use_abstract_mesh(
            self.mesh.abstract_mesh
        ):  # the caller's may be Explicit
            return self._run(jitted, args)

    def _run(self, jitted: Callable, args: tuple) -> Any:
        try:
            return jitted(*args)
        except ValueError as e:
            # Inside another jit, which alone decides how it is compiled.
            if "compiler_options" not in str(e) or self._nested is None:
                raise
        return self._nested(*args)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers for arrays or jax.ShapeDtypeStructs, as `jax.jit(f).lower` does."""
        jitted: Any = self._jitted or self._build(args, kwargs)
        return jitted.lower(*self._flat_arguments(args, kwargs))

    def _flat_arguments(self, args: tuple, kwargs: dict) -> tuple:
        """Returns the dynamic positional arguments, then the keyword arguments by name."""
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static_argnums)
        return dynamic + tuple(v for _, v in sorted(kwargs.items()))

    def _build(self, args: tuple, kwargs: dict) -> Callable:
        plan = self.plan
        explicit = explicit_mesh(self.given)
        with auto_axes():
            program = self.program or traced(
                self.fn, args, kwargs, explicit, static_argnums=self.static_argnums
            )
        _check_program(plan, program)
        place = functools.partial(_named, self.mesh)
        in_leaves = [place(a.spec) for a in plan.arguments]
        positional, keyword = jax.tree.unflatten(program.in_tree, in_leaves)
        self._shardings = (*positional, *(v for _, v in sorted(keyword.items())))
        positions = jax.tree.unflatten(program.in_tree, list(plan.donated))
        flat_positions = (*positions[0], *(v for _, v in sorted(positions[1].items())))
        donate = tuple(i for i, tree in enumerate(flat_positions) if any(jax.tree.leaves(tree)))
        out_shardings = jax.tree.unflatten(program.out_tree, [place(r.spec) for r in plan.results])
        run = constrained(program.jaxpr, plan.constraints, self.mesh, plan.carried)
        self._leaf_shardings, self._structure = jax.tree.flatten(self._shardings)
        self._shapes = [v.shape for v in program.inputs]
        avals = [
            (v.aval.shape, v.aval.dtype)
            for v in program.jaxpr.jaxpr.invars
            if hasattr(v.aval, "shape")
        ]

        def planned(*xs):
            leaves, tree = jax.tree.flatten(xs)
            if tree != self._structure or [(x.shape, x.dtype) for x in leaves] != avals:
                raise _OtherArguments
            return jax.tree.unflatten(program.out_tree, run(*leaves))

        planned.__name__ = planned.__qualname__ = plan.program
        jitted = functools.partial(
            jax.jit,
            planned,
            in_shardings=self._shardings,
            out_shardings=out_shardings,
            donate_argnums=donate,
        )
        options = compiling.compiler_options(self.mesh, self.options)
        self._nested = jitted()
        self._jitted = jitted(compiler_options=options) if options else self._nested
        return self._jitted

    def _moved(self, leaves: list[Any]) -> list[Any]:
        """Returns the arguments in the plan's shardings; those that lie there already are kept."""
        if any(isinstance(x, Tracer) for x in leaves):
            return leaves  # under another transformation jit moves them itself
        moved = []
        for x, sharding, shape in zip(leaves, self._leaf_shardings, self._shapes, strict=True):
            if np.shape(x) != shape:
                raise _OtherArguments
            if not isinstance(x, jax.Array) or not x.committed or x.sharding != sharding:
                x = jax.device_put(x, sharding)
            moved.append(x)
        return moved


@functools.lru_cache(maxsize=65536)
def _named(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns one object for equal shardings: what one call returns, the next knows at a glance."""
    return NamedSharding(mesh, spec)


def planned_function(
    plan: Plan,
    fn: Callable,
    mesh: Any = None,
    static_argnums: Sequence[int] = (),
    program: Program | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> PlannedFunction:
    """Returns `fn` under `plan`; see `Plan.jit`."""
    target = mesh if mesh is not None else (plan.devices if plan.devices is not None else plan.mesh)
    shape = mesh_shape(target)
    if shape != plan.mesh:
        raise MeshError(f"the plan is for mesh {plan.mesh}, got {shape}: plan again for that mesh")
    return PlannedFunction(plan, fn, target, static_argnums, program, compiler_options)


def _check_program(plan: Plan, program: Program) -> None:
    wanted = [(a.name, a.shape, a.dtype) for a in plan.arguments]
    got = [(v.name, v.shape, v.dtype) for v in program.inputs]
    if len(wanted) != len(got):
        raise PlanError(
            f"the plan is for {len(wanted)} arrays, the call has {len(got)}: plan again"
        )
    for w, g in zip(wanted, got, strict=True):
        if w != g:
            raise PlanError(
                f"the plan is for {_array_text(*w)}, the call has {_array_text(*g)}: plan again"
            )
    if program.fingerprint != plan.fingerprint:
        raise PlanError(
            f"the plan is for another program ({plan.program}, {plan.fingerprint[:8]}), "
            f"got {program.name} ({program.fingerprint[:8]}): plan again"
        )


def _array_text(name: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{name} {dtype}[{','.join(map(str, shape))}]"


class JittedFunction:
    """What `autoshard.jit` returns: plans at the first call with new shapes, then runs as fast as
    `jax.jit`.

    Attributes:
      plan: `f.plan(*args, **kwargs)` returns the Plan for such arguments, without running anything.
    """

    def __init__(self, fn: Callable, make_plan: Callable, static: Iterable[int | str]):
        self.fn = fn
        self._make_plan = make_plan
        names = _positional_names(fn)
        static = set(static)
        self._static_nums = {
            s if isinstance(s, int) else names.index(s)
            for s in static
            if s in names or isinstance(s, int)
        }
        self._static_names = {s for s in static if isinstance(s, str)}
        self._static_names |= {names[i] for i in self._static_nums if i < len(names)}
        self._entries: dict[Any, PlannedFunction] = {}
        self._only: PlannedFunction | None = None
        functools.update_wrapper(self, fn)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        only = self._only
        if only is not None:
            try:
                return only(*args, **kwargs)
            except (_OtherArguments, ValueError, TypeError):
                if self._key(args, kwargs) in self._entries:
                    raise
        return self._entry(args, kwargs)(*args, **self._dynamic(kwargs))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._entry(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry(args, kwargs).lower(*args, **self._dynamic(kwargs))

    def _dynamic(self, kwargs: dict) -> dict:
        return {k: v for k, v in kwargs.items() if k not in self._static_names}

    def _entry(self, args: tuple, kwargs: dict) -> PlannedFunction:
        key = self._key(args, kwargs)
        entry = self._entries.get(key)
        if entry is None:
            static = {k: v for k, v in kwargs.items() if k in self._static_names}
            nums = tuple(i for i in sorted(self._static_nums) if i < len(args))
            fn = functools.partial(self.fn, **static) if static else self.fn
            entry = self._make_plan(fn, args, self._dynamic(kwargs), nums)
            self._entries[key] = entry
            alone = len(self._entries) == 1 and not self._static_nums and not self._static_names
            self._only = entry if alone else None
        return entry

    def _key(self, args: tuple, kwargs: dict) -> Any:
        """Returns what the plan depends on: structure, shapes, dtypes, and the static arguments."""
        static = tuple((i, args[i]) for i in sorted(self._static_nums) if i < len(args))
        static += tuple((k, v) for k, v in sorted(kwargs.items()) if k in self._static_names)
        dynamic = tuple(a for i, a in enumerate(args) if i not in self._static_nums)
        leaves, tree = jax.tree.flatten((dynamic, self._dynamic(kwargs)))
        return tree, tuple(map(_aval_key, leaves)), static


def _aval_key(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return type(leaf)
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)


def _positional_names(fn: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
