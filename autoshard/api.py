"""The public functions; `plan` is the line from a function to a plan."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard import cost, emit, planning, shapes
from autoshard.baselines import baselines
from autoshard.check import Check, check
from autoshard.explicit import explicit_mesh, traced
from autoshard.fitting import fitted
from autoshard.hardware import Hardware
from autoshard.jitted import JittedFunction, PlannedFunction
from autoshard.meshes import MeshLike
from autoshard.pareto import frontier
from autoshard.plan import Plan
from autoshard.problem import ShardingProblem, Solution
from autoshard.refine import Attempt, refined
from autoshard.rules import rules_for
from autoshard.stages import Stages
from autoshard.trace import Program, auto_axes


def plan(
    fn: Callable,
    *args: Any,
    mesh: MeshLike | int | None = None,
    hardware: str | Hardware | None = None,
    memory_limit_bytes: float | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    time_limit_s: float = 60.0,
    refine: int = 0,
    kwargs: dict[str, Any] | None = None,
) -> Plan:
    """Decides how `fn(*args, **kwargs)` is sharded; nothing is allocated or run.

    Args:
      args: pytrees of arrays or jax.ShapeDtypeStruct.
      mesh: a Mesh, an AbstractMesh, dict(data=4, model=2) or "data=4,model=2"; or a number of
        devices or a machine such as "v5e:4x4", whose best mesh is then searched; None: that of all
        local devices.
      hardware: a preset's name, a Hardware, or None: read from the mesh's devices.
      memory_limit_bytes: per device; None: the hardware's memory less the runtime's reserve.
      in_shardings, out_shardings: pins: pytree prefixes of PartitionSpec, None where the planner
        is free.
      donate_argnums, static_argnums: as of jax.jit.
      time_limit_s: a safety net for the solver; plans do not depend on it unless it strikes.
      refine: compile the best few plans, correct the costs that were off and solve again, so many
        times at most; the fastest compiled plan is returned. Needs devices, real or of a machine
        named by `mesh`. 0: nothing is compiled.

    Raises:
      MeshError, HardwareError, PinError, ArgumentError: bad input; the message says what was
      wanted.
      InfeasibleError: nothing fits; names the smallest limit that would, and the largest values
      alive at the peak.
    """
    options = planning.Options(
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=planning.numbers(donate_argnums),
        static_argnums=planning.numbers(static_argnums),
        time_limit_s=time_limit_s,
    )
    return _planned(fn, args, kwargs or {}, mesh, options, refine).plan


def jit(
    fn: Callable | None = None,
    *,
    mesh: MeshLike | int | None = None,
    hardware: str | Hardware | None = None,
    memory_limit_bytes: float | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    time_limit_s: float = 60.0,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Like jax.jit, but sharded over `mesh` as planned for the arguments' shapes; a decorator with
    or without arguments.

    The first call with new shapes traces, plans and compiles; later calls run. Arguments that live
    elsewhere are moved.
    `f.plan(*args)` returns the Plan. `compiler_options` go to XLA, as of jax.jit. The other
    arguments are those of `autoshard.plan`.
    """
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(jit, **given)
    names = planning.names

    def make(fn: Callable, args: tuple, kwargs: dict, static: tuple[int, ...]) -> PlannedFunction:
        options = planning.Options(
            hardware=hardware,
            memory_limit_bytes=memory_limit_bytes,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=planning.numbers(donate_argnums),
            donate_argnames=names(donate_argnames),
            static_argnums=static,
            time_limit_s=time_limit_s,
            compiler_options=compiler_options,
        )
        return _planned(fn, args, kwargs, mesh, options).function()

    return JittedFunction(fn, make, planning.numbers(static_argnums) + names(static_argnames))


def sharding_problem(
    fn: Callable,
    *args: Any,
    mesh: MeshLike,
    hardware: str | Hardware | None = None,
    memory_limit_bytes: float | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    kwargs: dict[str, Any] | None = None,
) -> ShardingProblem:
    """Returns the integer program that `plan` solves, without its second objective.

    `autoshard.problem.write` saves it, `python -m autoshard solve` solves it on any machine: what
    to attach to a report about a plan that took long. Arguments and errors are those of `plan`.
    """
    options = planning.Options(
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=planning.numbers(donate_argnums),
        static_argnums=planning.numbers(static_argnums),
    )
    stages = Stages(f"pricing {getattr(fn, '__name__', 'function')}")
    with stages.line(), auto_axes():
        with stages.stage("trace"):
            program = _traced(fn, args, kwargs or {}, mesh, options)
        return _priced(program, planning.target(mesh, options), options, stages).choices.problem


def pareto(
    fn: Callable,
    *args: Any,
    points: int = 6,
    mesh: MeshLike | int | None = None,
    hardware: str | Hardware | None = None,
    memory_limit_bytes: float | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    time_limit_s: float = 60.0,
    kwargs: dict[str, Any] | None = None,
) -> list[Plan]:
    """Returns what memory buys: the fastest plan for each of several memory limits.

    The list runs from the limit given, or what it needs of it, down to the least memory that any
    plan was found for; peaks fall and steps get slower along it. Also `autoshard.plan.pareto`.

    Args:
      points: at most that many plans; limits stand in a geometric row.

    The others, and what is raised, are those of `autoshard.plan`.
    """
    options = planning.Options(
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=planning.numbers(donate_argnums),
        static_argnums=planning.numbers(static_argnums),
        time_limit_s=time_limit_s,
    )
    fastest = _planned(fn, args, kwargs or {}, mesh, options)
    stages = Stages(f"memory against time of {fastest.plan.program}")
    with stages.line(), auto_axes():
        where = fastest.plan.devices if fastest.plan.devices is not None else fastest.plan.mesh
        priced = _priced(fastest.program, planning.target(where, options), options, stages)
        with stages.stage("solve"):
            found = frontier(priced.choices, priced.known, points, time_limit_s)
        plans = [_plan_of(priced, solution, stages) for _, solution in found]
    return [
        dataclasses.replace(p, memory_limit_bytes=limit)
        for p, (limit, _) in zip(plans, found, strict=True)
    ]


setattr(plan, "pareto", pareto)  # noqa: B010 (a function's attribute, which types do not know)


def _planned(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    mesh: MeshLike | int | None,
    options: planning.Options,
    refine: int = 0,
) -> planning.Planned:
    """Plans for the mesh, or for every candidate, keeping the fastest, or the fastest compiled."""
    stages = Stages(f"planning {getattr(fn, '__name__', 'function')}")
    with stages.line(), auto_axes():
        with stages.stage("trace"):
            program = _traced(fn, args, kwargs, mesh, options)
        attempts: list[Attempt] = []

        def plan_on(target: planning.Target, cutoff_s: float) -> planning.Planned:
            priced = _priced(program, target, options, stages)
            attempt = _solved(priced, options, stages, cutoff_s)
            attempts.append(attempt)
            return planning.Planned(attempt.plan, fn, priced.program, options)

        def check_of(plan: Plan) -> Check:
            with stages.stage("compile"):
                return check(plan, fn, args, kwargs, static_argnums=options.static_argnums)

        fastest = shapes.fastest(
            mesh, options, plan_on if not refine else lambda t, _: plan_on(t, math.inf)
        )
        if not refine:
            return fastest
        attempts.sort(key=lambda a: a.plan.objective_s)
        best = refined(attempts, refine, check_of, lambda p: _solved(p, options, stages))
        best = dataclasses.replace(
            best, tried=fastest.plan.tried, stages=tuple(stages.times.items())
        )
        return dataclasses.replace(fastest, plan=best)


def _traced(fn: Callable, args: tuple, kwargs: dict, mesh, options: planning.Options) -> Program:
    return traced(
        fn,
        args,
        kwargs,
        explicit_mesh(mesh),
        static_argnums=options.static_argnums,
        donate_argnums=options.donate_argnums,
        donate_argnames=options.donate_argnames,
    )


def _solved(
    priced: planning.Priced,
    options: planning.Options,
    stages: Stages,
    cutoff_s: float = math.inf,
) -> Attempt:
    with stages.stage("solve"):
        solution = fitted(priced.choices, priced.known, options.time_limit_s, cutoff_s)
    return Attempt(priced, solution, _plan_of(priced, solution, stages))


def _priced(
    program: Program, target: planning.Target, options: planning.Options, stages: Stages
) -> planning.Priced:
    """Lists and prices the strategies of a program on one target."""
    program, pins = planning.pinned(program, target, options)
    with stages.stage("rules"):
        rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    with stages.stage("strategies"):
        strategies = planning.strategies(program, rules, target, pins)
    with stages.stage("costs"):
        choices = cost.build(
            program.graph,
            strategies,
            target.topology,
            program.donated,
            target.memory_limit_bytes,
            program.name,
        )
    with stages.stage("known plans"):
        known = baselines(choices, program.carried)
    return planning.Priced(program, target, choices, known)


def _plan_of(priced: planning.Priced, solution: Solution, stages: Stages) -> Plan:
    choices = priced.choices
    with stages.stage("emit"):
        constraints = emit.constraints(choices, solution.choices)
        collectives = emit.planned_collectives(choices, solution.choices)
    return planning.assemble(priced, solution, constraints, collectives, stages)
