"""The command line.

    python -m autoshard plan models.gpt:train_step --size 1b --mesh data=4,model=4 --hardware v5e
    --save plan.json
    python -m autoshard plan models.gpt:train_step --size 1b --mesh v5e:4x4 --refine 2
    python -m autoshard pareto models.gpt:train_step --size 1b --mesh v5e:4x4
    python -m autoshard explain plan.json
    python -m autoshard check plan.json models.gpt:train_step --size 1b --topology v5e:4x4
    python -m autoshard problem models.gpt:train_step --mesh data=4,model=2 --hardware v5e
    --output problem.json.gz
    python -m autoshard solve problem.json.gz --time-limit 60 --output solution.json

A module names its example arguments in a function `example_arguments(size)`, which returns a tuple
of pytrees of arrays or jax.ShapeDtypeStruct (without --size it is called with no argument), and
the arguments that the step may overwrite in `donate_argnums`.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

import autoshard
from autoshard.errors import AutoshardError
from autoshard.meshes import concrete_mesh

UNITS = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class UsageError(AutoshardError):
    """A command line that names something that does not exist."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 with a message for anything the user can mend."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except AutoshardError as e:
        Console(stderr=True).print(f"autoshard: {e}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Decides how a JAX program is sharded."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    plan = commands.add_parser("plan", help="plan a function and print the explanation")
    plan.add_argument("function", metavar="module:function")
    _add_target(plan)
    plan.add_argument("--save", metavar="plan.json", help="write the plan")
    plan.add_argument(
        "--refine",
        type=int,
        default=0,
        metavar="N",
        help="compile the best plans, correct their costs and solve again, N times at most",
    )
    plan.set_defaults(run=_plan)
    problem = commands.add_parser("problem", help="write the integer program behind a plan")
    problem.add_argument("function", metavar="module:function")
    _add_target(problem)
    problem.add_argument(
        "--output", required=True, metavar="problem.json.gz", help="for `solve`, on any machine"
    )
    problem.set_defaults(run=_problem)
    pareto = commands.add_parser("pareto", help="the fastest plan for each of several limits")
    pareto.add_argument("function", metavar="module:function")
    _add_target(pareto)
    pareto.add_argument("--points", type=int, default=6, help="plans at most")
    pareto.set_defaults(run=_pareto)
    explain = commands.add_parser("explain", help="print the explanation of a saved plan")
    explain.add_argument("plan", metavar="plan.json")
    explain.set_defaults(run=_explain)
    check = commands.add_parser(
        "check", help="compile a saved plan and set what XLA made of it beside the prediction"
    )
    check.add_argument("plan", metavar="plan.json")
    check.add_argument("function", metavar="module:function")
    check.add_argument("--size", help="passed to the module's example_arguments")
    check.add_argument(
        "--topology", help="a machine to compile for ahead of time, v5e:4x4; default: local devices"
    )
    check.set_defaults(run=_check)
    solve = commands.add_parser(
        "solve", help="solve a sharding problem file (IOPDDL JSON, plain or gzip)"
    )
    solve.add_argument("problem", metavar="problem.json")
    solve.add_argument("--time-limit", type=float, default=60.0, help="seconds")
    solve.add_argument(
        "--output", metavar="solution.json", help="write the choices, one index a node"
    )
    solve.set_defaults(run=_solve)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh",
        required=True,
        help="axis names and sizes, data=4,model=2; or a number of devices, 16, or a machine, "
        "v5e:4x4, whose best mesh is then searched",
    )
    parser.add_argument("--hardware", help="a preset: v5e, v5p, v6e, h100, ...; a machine has one")
    parser.add_argument("--size", help="passed to the module's example_arguments")
    parser.add_argument(
        "--memory-limit", type=_bytes, help="per device, e.g. 12GiB; default: what the chip has"
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds for the solver, a safety net"
    )


def _target(args: argparse.Namespace) -> dict[str, Any]:
    mesh = int(args.mesh) if args.mesh.isdigit() else args.mesh
    if args.hardware is None and ":" not in args.mesh:
        raise UsageError(f"no hardware for mesh {args.mesh}: pass --hardware v5e or another preset")
    return {
        "mesh": mesh,
        "hardware": args.hardware,
        "memory_limit_bytes": args.memory_limit,
        "time_limit_s": args.time_limit,
    }


def _pareto(args: argparse.Namespace) -> None:
    function, arguments, donated = load_example(args.function, args.size)
    plans = autoshard.pareto(
        function, *arguments, points=args.points, donate_argnums=donated, **_target(args)
    )
    for plan in plans:
        print(plan)


def _plan(args: argparse.Namespace) -> None:
    function, arguments, donated = load_example(args.function, args.size)
    plan = autoshard.plan(
        function, *arguments, donate_argnums=donated, refine=args.refine, **_target(args)
    )
    print(plan.explain())
    if args.save:
        plan.save(args.save)


def _problem(args: argparse.Namespace) -> None:
    from autoshard import problem as problems

    function, arguments, donated = load_example(args.function, args.size)
    target = {k: v for k, v in _target(args).items() if k != "time_limit_s"}
    problem = autoshard.sharding_problem(function, *arguments, donate_argnums=donated, **target)
    problems.write(problem, args.output)
    print(problem)


def _explain(args: argparse.Namespace) -> None:
    print(_read(args.plan, autoshard.load).explain())


def _check(args: argparse.Namespace) -> None:
    plan = _read(args.plan, autoshard.load)
    function, arguments, _ = load_example(args.function, args.size)
    mesh = None if args.topology else concrete_mesh(plan.mesh)
    print(plan.check(function, *arguments, mesh=mesh, topology=args.topology))


def _solve(args: argparse.Namespace) -> None:
    from autoshard import problem as problems
    from autoshard import solve

    problem = _read(args.problem, problems.read)
    solution = solve.solve(problem, time_limit_s=args.time_limit, deterministic=False)
    print(problem)
    print(solution)
    if args.output and solution.choices:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(json.dumps(list(solution.choices)) + "\n")
    if problem.nodes and not solution.choices:
        raise UsageError(f"no solution: {solution.status}")


def _read(path: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(path)
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from None


def load_example(name: str, size: str | None) -> tuple[Callable, tuple, tuple[int, ...]]:
    """Returns the function `module:function`, its module's example arguments, and which of them
    are donated.

    Raises:
      UsageError: no such module, function or size.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UsageError(f"got {name!r}, wanted module:function, as in models.gpt:train_step")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise UsageError(f"cannot import {module_name!r}: {e}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"module {module_name} has no function {function_name!r}")
    example = getattr(module, "example_arguments", None)
    if not callable(example):
        raise UsageError(
            f"module {module_name} has no function example_arguments(size): write one that "
            f"returns the arguments of {function_name} as jax.ShapeDtypeStruct"
        )
    try:
        arguments: Any = example() if size is None else example(size)
    except KeyError as e:
        raise UsageError(f"{module_name}.example_arguments knows no size {e}") from None
    donated = getattr(module, "donate_argnums", ())
    return function, tuple(arguments), (donated,) if isinstance(donated, int) else tuple(donated)


def _bytes(text: str) -> float:
    """Reads `12GiB`, `500MB` or a plain number of bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 12GiB or 500MB")
    return float(match[1]) * UNITS[match[2] or ""]
