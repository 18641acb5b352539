"""Plans by hand, as an expert writes them: which kind of dim goes over which mesh axes.

A `HandPlan` says it twice: how the state is stored, and how a step computes. The names of the dims
of arguments are carried through the program along the rules of its operations, and constraints go
where an expert puts them: on both operands and the result of every matrix product, convolution and
gather, on what a loop carries, on the gradients of weights. Between those Shardy decides.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.apply import Constraints, constrained
from autoshard.factors import Kind as FactorKind
from autoshard.factors import Rule
from autoshard.graph import Kind, Op, Value
from autoshard.meshes import concrete_mesh, mesh_shape
from autoshard.rules import rules_for
from autoshard.sharding import Axes, MeshShape, Sharding
from autoshard.trace import Program
from benchmarks.dims import names_of

Names = tuple[str | None, ...]
Where = tuple[tuple[str, Axes], ...]  # first come, first served: a mesh axis is used once an array

_HEAVY = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
_BATCH = ("B", "S", "T")
_SAME = ("T", "S")  # positions attended to, positions
_WHOLE_OPERANDS = ("gather", "scatter-add", "scatter_add")


@dataclasses.dataclass(frozen=True)
class HandPlan:
    """A plan on one mesh.

    Attributes:
      compute: dims split while computing, by priority.
      storage: dims split of the parameters, and of gradients and optimizer state unless `states`.
      states: dims split of the optimizer state, if otherwise than the parameters.
      least: arrays with fewer elements than this are stored whole.
      experts: dims split over axes only where a weight with such a dim takes part.
      outside: dims split only where no weight takes part, as heads in attention between split
        sequences.
      inside: dims split only where a weight takes part, as the positions of keys and values that
        are gathered for attention.
      windowed: whether XLA may turn products with split weights into loops of permutes; experts
        forbid it by a compiler option where the slower products cost more than the overlap gains.
    """

    name: str
    mesh: str
    compute: Where
    storage: Where = ()
    states: Where | None = None
    least: int = 0
    experts: tuple[str, ...] = ("E",)
    outside: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    windowed: bool = True

    @property
    def compiler_options(self) -> dict[str, str]:
        return {} if self.windowed else {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

    def __str__(self) -> str:
        return f"{self.name} on {self.mesh}"


class HandJit:
    """A traced program under a hand plan, to be lowered for a mesh."""

    def __init__(self, program: Program, model: str, plan: HandPlan, mesh: Mesh):
        self.program, self.plan, self.mesh = program, plan, concrete_mesh(mesh)
        self.shape = mesh_shape(mesh)
        self.names = _Names(program, model)

    def lower(self) -> Any:
        program, plan = self.program, self.plan
        stored = [self._stored(i, v) for i, v in enumerate(program.inputs)]
        kept = {k: stored[i] for i, k in enumerate(program.carried) if k is not None}
        results = [
            kept.get(k) or self._spread(self.names.of(v, a.aval.shape), a.aval.shape, plan.compute)
            for k, (v, a) in enumerate(
                zip(program.outputs, program.jaxpr.jaxpr.outvars, strict=True)
            )
        ]
        run = constrained(program.jaxpr, self.constraints(), self.mesh, program.carried)
        jitted = jax.jit(
            lambda *xs: run(*xs),
            in_shardings=[self._named(s) for s in stored],
            out_shardings=[self._named(s) for s in results],
            donate_argnums=[i for i, donated in enumerate(program.donated) if donated],
        )
        return jitted.lower(
            *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.jaxpr.jaxpr.invars)
        )

    def constraints(self) -> Constraints:
        operands, results = {}, {}
        for op, rule in self.names.ops:
            if rule is None:
                if op.kind is Kind.CARRY and (spread := self._carried(op.results[0])):
                    results[op.path, 0] = (spread,)
                continue
            if op.primitive not in _HEAVY + _WHOLE_OPERANDS:
                continue
            axes = self._factor_axes(op, rule)
            if op.primitive in _WHOLE_OPERANDS:
                self._look_up(op, rule, axes, operands, results)
                continue
            for k, value in enumerate(op.operands):
                if value is not None and value.shape:
                    operands[op.path, k] = (self._projected(rule.operands[k], rule, axes),)
            made = op.results[0]
            if self._is_gradient(op, rule):
                where = self.plan.storage if self.plan.states is None else self.plan.states
                spread = self._spread(self.names.of(made), made.shape, where, self.plan.least)
                results[op.path, 0] = (spread,)
            else:
                results[op.path, 0] = (self._result(op, rule, axes),)
        return Constraints(operands, results)

    def _look_up(self, op: Op, rule: Rule, axes, operands: dict, results: dict) -> None:
        """Rows are looked up and added where the table lies, then go to who needs them.

        With columns split that is one all-to-all of the rows; with rows split or a whole table the
        partitioner's way is the usual one.
        """
        table = op.operands[0] if op.primitive == "gather" else op.results[0]
        if table is None or len(table.shape) != 2:
            return
        where = self.plan.storage
        if op.primitive != "gather" and self.plan.states is not None:
            where = self.plan.states
        names = self.names.of(op.operands[0])
        if op.primitive != "gather":
            names = ("V", "D")
        stored = self._spread(names, table.shape, where, self.plan.least)
        rows = op.results[0] if op.primitive == "gather" else op.operands[2]
        if rows is None:
            return
        column: tuple[Axes, ...] = (*((),) * (len(rows.shape) - 1), stored.dims[1])
        if op.primitive == "gather":
            made = self._result(op, rule, axes)
            split = (Sharding(column), made) if any(column) else (made,)
            results[op.path, 0] = split
        elif not stored.is_replicated:
            operands[op.path, 2] = (Sharding(column),)
            results[op.path, 0] = (stored,)

    def _stored(self, i: int, value: Value) -> Sharding:
        """State is split as it is stored, the batch as it is computed with."""
        plan, names = self.plan, self.names.of(value)
        if "B" in names:
            return self._spread(names, value.shape, plan.compute)
        is_state = "opt_state" in value.name
        where = plan.states if is_state and plan.states is not None else plan.storage
        return self._spread(names, value.shape, where, plan.least)

    def _carried(self, value: Value) -> Sharding | None:
        names = self.names.of(value)
        return self._spread(names, value.shape, self.plan.compute) if "B" in names else None

    def _spread(self, names: Names, shape: Sequence[int], where: Where, least: int = 0) -> Sharding:
        dims: list[Axes] = [()] * len(shape)
        size = 1
        for n in shape:
            size *= n
        for letter, axes in where if size >= least else ():
            for d, name in enumerate(names):
                if name == letter and not dims[d]:
                    used = {a for taken in dims for a in taken}
                    dims[d] = _fitting(axes, used, shape[d], self.shape)
                    if dims[d]:
                        break
        return Sharding(tuple(dims))

    def _factor_axes(self, op: Op, rule: Rule) -> list[Axes]:
        """Returns the axes of each factor of an operation."""
        letters = self.names.factors(op, rule)
        found: list[Axes] = [()] * len(rule.sizes)
        has_weight = any(
            v is not None and v.shape and "B" not in self.names.of(v) for v in op.operands
        )
        plan = self.plan
        for letter, axes in plan.compute:
            if letter in (plan.outside if has_weight else (*plan.experts, *plan.inside)):
                continue
            for f, name in enumerate(letters):
                splits = rule.kinds[f] in (FactorKind.PASS, FactorKind.REDUCE)
                if name == letter and splits and not found[f]:
                    used = {a for taken in found for a in taken}
                    found[f] = _fitting(axes, used, rule.sizes[f], self.shape)
                    if found[f]:
                        break
        return found

    def _projected(self, dims: Any, rule: Rule, axes: Sequence[Axes]) -> Sharding:
        """A dim takes the axes of its major factor."""
        return Sharding(tuple(axes[dim[0]] if dim else () for dim in dims))

    def _result(self, op: Op, rule: Rule, axes: Sequence[Axes]) -> Sharding:
        """As computed; axes that a sum has used up may be scattered onto another dim."""
        made, names = op.results[0], self.names.of(op.results[0])
        dims = list(self._projected(rule.results[0], rule, axes).dims)
        summed = {
            a for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCE for a in axes[f]
        }
        for letter, wanted in self.plan.compute:
            for d, name in enumerate(names):
                used = {a for taken in dims for a in taken}
                if name == letter and not dims[d] and set(wanted) <= summed - used:
                    dims[d] = _fitting(wanted, used, made.shape[d], self.shape)
        return Sharding(tuple(dims))

    def _is_gradient(self, op: Op, rule: Rule) -> bool:
        """Whether the result is a weight's gradient: the batch was summed over."""
        letters = self.names.factors(op, rule)
        summed = {letters[f] for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCE}
        made = self.names.of(op.results[0])
        return "B" in summed and not any(b in made for b in _BATCH)

    def _named(self, sharding: Sharding) -> NamedSharding:
        return NamedSharding(self.mesh, sharding.to_spec())


def _fitting(axes: Axes, used: set[str], size: int, mesh: MeshShape) -> Axes:
    """Returns the longest prefix of the free axes that divides a dim."""
    free = tuple(a for a in axes if a in mesh.names and a not in used and mesh.size(a) > 1)
    while free and size % mesh.size(free):
        free = free[:-1]
    return free


class _Names:
    """The names of the dims of every value of a program."""

    def __init__(self, program: Program, model: str):
        self._of: dict[int, Names] = {}
        self.ops: list[tuple[Op, Rule | None]] = []
        inputs = {f"in{i}": v for i, v in enumerate(program.inputs)}
        leaves = [op for op in program.graph.leaves() if op.kind is Kind.LEAF]
        rules = dict(
            zip((op.path for op in leaves), rules_for([o.eqn for o in leaves]), strict=True)
        )
        for op in program.graph.leaves():
            rule = rules[op.path] if op.kind is Kind.LEAF else None
            self.ops.append((op, rule))
            if op.kind is Kind.INPUT:
                value = inputs[op.path]
                names = names_of(model, value.name, len(value.shape))
                self._of[id(value)] = self._of[id(op.results[0])] = names
            elif rule is None:
                self._border(op)
            else:
                letters = self.factors(op, rule)
                for dims, made in zip(rule.results, op.results, strict=True):
                    names = tuple(_first(letters, dim) for dim in dims)
                    self._of[id(made)] = self._attended(op, names)

    def of(self, value: Value | None, shape: Sequence[int] = ()) -> Names:
        if value is None:
            return (None,) * len(shape)
        return self._of.get(id(value), (None,) * len(value.shape))

    def factors(self, op: Op, rule: Rule) -> list[str | None]:
        """Returns the letter of each factor: what any operand calls it, S rather than T."""
        letters: list[str | None] = [None] * len(rule.sizes)
        for dims, value in zip(rule.operands, op.operands, strict=True):
            for dim, name in zip(dims, self.of(value), strict=False):
                if dim and name and (letters[dim[0]] is None or (letters[dim[0]], name) == _SAME):
                    letters[dim[0]] = name
        return letters

    def _attended(self, op: Op, names: Names) -> Names:
        """Keys and values have positions attended to, T; what they are made of has S."""
        weights = [set(self.of(v)) for v in op.operands if v is not None]
        if op.primitive != "dot_general" or set("DKH") not in weights:
            return names
        old, new = _SAME if "D" in names else reversed(_SAME)
        return tuple(new if n == old else n for n in names)

    def _border(self, op: Op) -> None:
        known = [self.of(v) for v in op.operands if v is not None]
        names: Names = next((n for n in known if any(n)), known[0] if known else ())
        (made,) = op.results
        if op.kind is Kind.SLICE:
            names = names[1:]
        elif op.kind is Kind.STACK:
            names = ("L", *names)
        self._of[id(made)] = names if len(names) == len(made.shape) else (None,) * len(made.shape)


def _first(letters: Sequence[str | None], dim: Sequence[int]) -> str | None:
    return letters[dim[0]] if dim else None


def unnamed(program: Program, model: str) -> Iterator[str]:
    """Yields the matrix products one of whose larger dims nobody named, to see what is missing."""
    names = _Names(program, model)
    for op, rule in names.ops:
        if rule is not None and op.primitive in _HEAVY:
            letters = names.factors(op, rule)
            lost = [
                n for n, letter in zip(rule.sizes, letters, strict=True) if not letter and n > 1
            ]
            if lost:
                yield f"{op.path} {op.primitive} {rule} {lost} {letters} at {op.source}"
