"""What `autoshard.plan` needs around its line: the target, the pins, and the plan put together."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import cost, pins
from autoshard.baselines import Baseline
from autoshard.cost import Choices
from autoshard.emit import PlannedCollective
from autoshard.errors import HardwareError
from autoshard.factors import Rule
from autoshard.graph import Graph, Kind, Op
from autoshard.hardware import Hardware, from_device_kind, preset
from autoshard.jitted import PlannedFunction, planned_function
from autoshard.meshes import MeshLike, devices_of, mesh_shape
from autoshard.plan import Array, Plan, key_path
from autoshard.problem import Solution
from autoshard.sharding import MeshShape, Sharding
from autoshard.stages import Stages
from autoshard.strategies import Strategy, border_strategies, pinned_border
from autoshard.strategies import strategies as rule_strategies
from autoshard.topology import Topology, topology
from autoshard.trace import Program


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `autoshard.plan` and `jit` that are not the program or the mesh."""

    hardware: str | Hardware | None = None
    memory_limit_bytes: float | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    time_limit_s: float = 60.0
    compiler_options: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a program is to run."""

    mesh: MeshShape
    topology: Topology
    hardware: str
    memory_limit_bytes: float | None
    devices: Mesh | None


@dataclasses.dataclass(frozen=True)
class Pins:
    """The user's sharding of each argument and result, None where free."""

    arguments: tuple[Sharding | None, ...]
    results: tuple[Sharding | None, ...]


def numbers(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def target(mesh: MeshLike, options: Options) -> Target:
    """Resolves mesh, hardware and memory limit.

    Raises:
      MeshError, HardwareError: one of them is unknown.
    """
    shape = mesh_shape(mesh)
    devices = devices_of(mesh)
    hardware = options.hardware
    if hardware is None:
        if devices is None:
            raise HardwareError(
                f"mesh {shape} has no devices to read the hardware from: pass hardware='v5e' or "
                "another preset"
            )
        hardware = from_device_kind(devices.flat[0].device_kind)
    elif isinstance(hardware, str):
        hardware = preset(hardware)
    limit = options.memory_limit_bytes
    if limit is None:
        limit = hardware.chip.usable_hbm_bytes
    real = mesh if isinstance(mesh, Mesh) else None
    return Target(shape, topology(shape, hardware, devices), hardware.name, float(limit), real)


def pinned(program: Program, target: Target, options: Options) -> tuple[Program, Pins]:
    """Resolves the pins; a result that they part from its argument is parted in the program."""
    tree = jax.tree.unflatten(program.in_tree, list(program.inputs))
    positional, keyword = tree
    parameters = [v.name.split("[")[0].split(".")[0] for v in program.inputs]
    top = list(dict.fromkeys(parameters))
    arguments = pins.resolve(
        options.in_shardings, (*positional, *(v for _, v in sorted(keyword.items()))),
        [v.name for v in program.inputs], [v.shape for v in program.inputs], target.mesh, top,
    )  # fmt: skip
    result_shapes = [tuple(v.aval.shape) for v in program.jaxpr.jaxpr.outvars]
    results = pins.resolve(
        options.out_shardings, jax.tree.unflatten(program.out_tree, program.output_names),
        program.output_names, result_shapes, target.mesh,
    )  # fmt: skip
    for i, k in enumerate(program.carried):
        if k is None or results[k] is None:
            continue
        if arguments[i] is None or arguments[i] == results[k]:
            arguments[i] = results[k]
        else:
            program = _parted(program, i)
    return program, Pins(tuple(arguments), tuple(results))


def _parted(program: Program, i: int) -> Program:
    """Returns the program with result `carried[i]` no longer argument i of the next call."""
    k = program.carried[i]
    ops: list[Op] = []
    last = []
    for op in program.graph.ops:
        if op.path == f"in{i}" and k is not None and op.operands:
            value = op.operands[0]
            result = dataclasses.replace(op.results[0], name=program.output_names[k])
            ops.append(dataclasses.replace(op, operands=(), operand_trips=()))
            last = [Op(f"out{k}", Kind.OUTPUT, "output", (value,), (result,), "")]
        else:
            ops.append(op)
    carried = tuple(None if j == i else c for j, c in enumerate(program.carried))
    return dataclasses.replace(
        program, graph=Graph(program.graph.name, [*ops, *last]), carried=carried
    )


def leaf_ops(program: Program) -> list[Op]:
    return [op for op in program.graph.leaves() if op.kind is Kind.LEAF]


def strategies(
    program: Program, rules: Sequence[Rule], target: Target, pins: Pins
) -> list[tuple[Strategy, ...]]:
    """Returns the strategies of each of `graph.leaves()`; `rules` are those of `leaf_ops`."""
    rule = iter(rules)
    found = []
    known: dict[int, tuple[Strategy, ...]] = {}  # by id of the rule, which takes long to hash
    for op in program.graph.leaves():
        if op.kind is Kind.LEAF:
            own = next(rule)
            free = known.get(id(own))
            if free is None:
                free = known[id(own)] = rule_strategies(own, target.mesh)
            if op.primitive == "sharding_constraint":
                free = _user_constraint(op, free, target.mesh)
            found.append(free)
            continue
        pin = None
        if op.kind is Kind.INPUT:
            pin = pins.arguments[int(op.path.removeprefix("in"))]
        elif op.kind is Kind.OUTPUT:
            pin = pins.results[int(op.path.removeprefix("out"))]
        free = border_strategies(op, target.mesh)
        found.append(free if pin is None else (pinned_border(pin, len(op.operands)),))
    return found


def _user_constraint(op: Op, free: tuple[Strategy, ...], mesh: MeshShape) -> tuple[Strategy, ...]:
    """Returns only the strategies that keep a `with_sharding_constraint` of the user's program."""
    sharding = op.eqn.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return free
    spec = tuple(sharding.spec) + (None,) * (len(op.results[0].shape) - len(sharding.spec))
    wanted = Sharding.from_spec(sharding.spec, len(op.results[0].shape))
    open_dims = [entry is PartitionSpec.UNCONSTRAINED for entry in spec]
    if wanted.check(op.results[0].shape, mesh) is not None:
        return free
    kept = tuple(
        s for s in free
        if all(
            is_open or have == want
            for have, want, is_open in zip(s.results[0].dims, wanted.dims, open_dims, strict=True)
        )
    )  # fmt: skip
    return kept or (pinned_border(wanted, len(op.operands)),)


@dataclasses.dataclass(frozen=True)
class Priced:
    """A program on a target: every strategy with its price, and the plans everyone knows."""

    program: Program
    target: Target
    choices: Choices
    known: Sequence[Baseline]


def assemble(
    priced: Priced,
    solution: Solution,
    constraints: Any,
    collectives: Sequence[PlannedCollective],
    stages: Stages,
) -> Plan:
    """Returns the Plan of a solution."""
    program, target, choices = priced.program, priced.target, priced.choices
    shardings = {
        op.path: choices.strategies[i][solution.choices[i]].results[0]
        for i, op in enumerate(choices.ops)
        if op.kind in (Kind.INPUT, Kind.OUTPUT)
    }
    borders = {k: f"in{i}" for i, k in enumerate(program.carried) if k is not None}
    tree = jax.tree.unflatten(program.in_tree, list(program.inputs))
    flat = (*tree[0], *(v for _, v in sorted(tree[1].items())))
    paths = [key_path(p) for p, _ in jax.tree_util.tree_flatten_with_path(flat)[0]]
    arguments = tuple(
        Array(v.name, path, v.shape, v.dtype, shardings[f"in{i}"])
        for i, (v, path) in enumerate(zip(program.inputs, paths, strict=True))
    )
    names = jax.tree.unflatten(program.out_tree, program.output_names)
    results = []
    for k, (path, name) in enumerate(jax.tree_util.tree_flatten_with_path(names)[0]):
        aval = program.jaxpr.jaxpr.outvars[k].aval
        whole = Sharding.replicated(len(aval.shape))
        sharding = shardings.get(borders.get(k, f"out{k}"), whole)
        results.append(Array(name, key_path(path), tuple(aval.shape), str(aval.dtype), sharding))
    _, live = cost.peak(choices, solution.choices)
    return Plan(
        program=program.name,
        fingerprint=program.fingerprint,
        mesh=target.mesh,
        hardware=target.hardware,
        arguments=arguments,
        results=tuple(results),
        carried=program.carried,
        donated=program.donated,
        constraints=constraints,
        collectives=tuple(collectives),
        live_at_peak=tuple(live),
        status=solution.status,
        objective_s=solution.objective_s,
        bound_s=solution.bound_s,
        step_time_s=solution.objective_s,
        peak_bytes=solution.peak_bytes,
        memory_limit_bytes=target.memory_limit_bytes,
        known=tuple((b.name, b.objective_s, b.peak_bytes) for b in priced.known),
        time_limit_struck=bool(solution.stats.get("time_limit_struck", False)),
        stages=tuple(stages.times.items()),
        trees=(program.in_tree, program.out_tree),
        devices=target.devices,
    )


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with the traced program that it is for."""

    plan: Plan
    fn: Callable
    program: Program
    options: Options

    def function(self) -> PlannedFunction:
        """Returns the function under the plan, without tracing it again."""
        given = self.options
        return planned_function(
            self.plan, self.fn, None, given.static_argnums, self.program, given.compiler_options
        )
