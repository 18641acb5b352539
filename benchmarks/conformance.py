"""What is predicted against what the TPU compiler makes of it: memory, communication, order.

    python -m benchmarks.conformance                  all cases: hours on two cores; resumes
    python -m benchmarks.conformance --only gpt,mlp   some families
    python -m benchmarks.conformance --minutes 30     what can be compiled in that time
    python -m benchmarks.conformance --minutes 0      the tables of what was compiled before

Every case is a model on an ahead-of-time machine under several plans: ours, with ample and with
tight memory, one of perturbed costs, and plans that everyone knows. Plans and what was compiled of
them are kept in `--cache`, so that a change of the cost model alone needs no compiler: the plans
are then those that an earlier model chose, the predictions those of the present one. `--again`
plans anew. The tables go to benchmarks/results.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import math
import pathlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

from autoshard import aot, cost, emit, inspect, planning  # noqa: E402 (after the platform is set)
from autoshard.baselines import baselines  # noqa: E402
from autoshard.errors import AutoshardError, InfeasibleError  # noqa: E402
from autoshard.fitting import fitted  # noqa: E402
from autoshard.hardware import preset  # noqa: E402
from autoshard.plan import Plan  # noqa: E402
from autoshard.problem import ShardingProblem, Solution, Status  # noqa: E402
from autoshard.rules import rules_for  # noqa: E402
from autoshard.sharding import MeshShape  # noqa: E402
from autoshard.stages import Stages  # noqa: E402
from autoshard.topology import topology  # noqa: E402
from autoshard.trace import Program, trace  # noqa: E402
from benchmarks.conformance_tables import Row, tables  # noqa: E402

HERE = pathlib.Path(__file__).parent
CACHE = pathlib.Path.home() / ".cache" / "autoshard" / "conformance"
TIGHT = 0.75  # of the peak of the ample plan
KINDS = ("ours", "known 1", "tight", "known 2", "perturbed", "known 3")  # plans of a case


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of some sizes on a machine."""

    model: str
    sizes: dict[str, Any]  # what differs from the model's size `base`
    target: str
    mesh: str
    base: str = "tiny"

    @property
    def name(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"{self.model} {self.base} {sizes} on {self.target} {self.mesh}".replace("  ", " ")

    @property
    def key(self) -> str:
        return f"{self.model}-{hashlib.sha256(self.name.encode()).hexdigest()[:12]}"


BF16 = {"compute_dtype": "bfloat16"}
GPT = {"layers": 2, "width": 1024, "hidden": 4096, "heads": 8, "kv_heads": 8, "length": 1024}
UNET = {"channels": (128, 256), "batch": 512}
CASES = (  # those that compile sooner come first
    Case("mlp", {"layers": 4, "width": 2048, "hidden": 8192, "batch": 65_536, "scan": True,
                 "remat": True, **BF16}, "v5e:4x4", "data=4,model=4"),
    Case("mlp", {"layers": 3, "width": 2048, "hidden": 8192, "batch": 16_384, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("mlp", {"layers": 3, "width": 4096, "hidden": 8192, "batch": 8192, **BF16},
         "v5p:2x2x2", "data=8"),
    Case("lstm", {"batch": 1024}, "v5e:2x4", "data=8", "large"),
    Case("decode", {"layers": 2}, "v5e:2x4", "data=4,model=2", "1b"),
    Case("dpsgd", {"layers": 2}, "v6e:4x4", "data=4,model=4", "large"),
    Case("gnn", {}, "v5e:2x4", "data=8", "arxiv"),
    Case("gpt", {"layers": 2}, "v5e:4x4", "data=4,model=4", "1b"),
    Case("vit", {"layers": 2, "batch": 512}, "v6e:4x4", "data=16", "b16"),
    Case("ssm", {"layers": 2}, "v5e:2x4", "data=4,model=2", "130m"),
    Case("lora", {"layers": 2}, "v5p:2x2x2", "data=4,model=2", "1b"),
    Case("unet", UNET, "v5e:2x4", "data=8", "cifar"),
    Case("moe", {**GPT, "hidden": 2048, "batch": 32, "vocab": 8192, "remat": True, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("encdec", {"layers": 2}, "v6e:4x4", "data=4,model=4", "big"),
    Case("gan", {"batch": 512}, "v5e:2x4", "data=4,model=2", "64"),
    Case("gpt", {**GPT, "batch": 32, "vocab": 32_000, "remat": False, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("vit", {"layers": 2}, "v5e:4x4", "data=4,model=4", "l16"),
    Case("lstm", {"batch": 1024}, "v5p:2x2x2", "data=4,model=2", "large"),
    Case("decode", {"layers": 2, "batch": 64}, "v5e:4x4", "data=4,model=4", "1b"),
    Case("gnn", {}, "v5p:2x2x2", "data=4,model=2", "arxiv"),
    Case("dlrm", {}, "v5e:4x4", "data=4,model=4", "criteo"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case traced and priced."""

    case: Case
    fn: Callable
    args: tuple
    program: Program
    target: planning.Target
    choices: cost.Choices


def prepare(case: Case) -> Prepared:
    module = importlib.import_module(f"models.{case.model}")
    sizes = dataclasses.replace(module.SIZES[case.base], **case.sizes)
    args = module.example_arguments(sizes)
    fn = getattr(module, "train_step", None) or module.serve_step
    donated = module.donate_argnums
    options = planning.Options(hardware=case.target.split(":")[0], donate_argnums=donated)
    program = trace(fn, args, donate_argnums=donated)
    target = planning.target(aot.mesh(case.target, MeshShape.parse(case.mesh)), options)
    program, pins = planning.pinned(program, target, options)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = planning.strategies(program, rules, target, pins)
    choices = cost.build(
        program.graph, strategies, target.topology, program.donated, target.memory_limit_bytes
    )
    return Prepared(case, fn, args, program, target, choices)


def picked(p: Prepared, kind: str, cache: pathlib.Path, time_limit_s: float, again: bool):
    """Returns (name, choices) of one of KINDS, or None where the case has no such plan.

    What was picked before is read from the cache, unless operations have other strategies by now.
    """
    texts = "\n".join(text for node in p.choices.problem.nodes for text in node.strategies)
    print_of = hashlib.sha256(texts.encode()).hexdigest()[:16]
    path = cache / f"{p.case.key}-{kind.replace(' ', '')}.plan.json"
    if path.exists() and not again:
        kept = json.loads(path.read_text())
        if kept["strategies"] == print_of:
            return kept["name"] and (kept["name"], tuple(kept["choices"]))
    name, choices = _pick(p, kind, cache, time_limit_s) or (None, ())
    found = {"name": name, "choices": list(map(int, choices)), "strategies": print_of}
    path.write_text(json.dumps(found))
    return name and (name, choices)


def _pick(p: Prepared, kind: str, cache: pathlib.Path, time_limit_s: float):
    problem = p.choices.problem
    known = baselines(p.choices, p.program.carried)
    limit = problem.usage_limit_bytes or math.inf
    if kind.startswith("known"):
        fitting = [b for b in known if b.peak_bytes < limit]
        number = int(kind.split()[1]) - 1
        return (fitting[number].name, fitting[number].choices) if number < len(fitting) else None
    if kind == "ours":
        return "ours", fitted(p.choices, known, time_limit_s).choices
    if kind == "perturbed":
        other = dataclasses.replace(p.choices, problem=perturbed(problem))
        return "of perturbed costs", fitted(other, (), time_limit_s).choices
    ours = picked(p, "ours", cache, time_limit_s, False)
    size = cost.peak(p.choices, ours[1])[0]
    tight = dataclasses.replace(problem, usage_limit_bytes=TIGHT * size)
    try:
        found = fitted(dataclasses.replace(p.choices, problem=tight), known, time_limit_s)
    except InfeasibleError:
        return None  # nothing smaller fits: the ample plan is the only one
    name = f"ours in {TIGHT:.0%} of its memory"
    return None if tuple(found.choices) == tuple(ours[1]) else (name, found.choices)


def perturbed(problem: ShardingProblem) -> ShardingProblem:
    """Returns the problem with every cost a third to three times as high, by a fixed seed."""
    rng = random.Random(0)

    def scaled(costs):
        return costs * [math.exp(rng.uniform(-1.1, 1.1)) for _ in range(costs.shape[-1])]

    nodes = tuple(dataclasses.replace(n, costs_s=scaled(n.costs_s)) for n in problem.nodes)
    edges = tuple(dataclasses.replace(e, costs_s=scaled(e.costs_s)) for e in problem.edges)
    return dataclasses.replace(problem, nodes=nodes, edges=edges)


def plan_of(p: Prepared, choices: Sequence[int]) -> Plan:
    problem = p.choices.problem
    cost_s, peak = problem.objective_s(choices), cost.peak(p.choices, choices)[0]
    solution = Solution(tuple(choices), cost_s, 0.0, Status.FEASIBLE, peak)
    return planning.assemble(
        planning.Priced(p.program, p.target, p.choices, ()), solution,
        emit.constraints(p.choices, choices), emit.planned_collectives(p.choices, choices),
        Stages("conformance", show=False),
    )  # fmt: skip


def measure(p: Prepared, name: str, plan: Plan, compiled: dict[str, Any]) -> Row:
    row = Row(p.case.model, p.case.name, name, plan.peak_bytes, plan.objective_s)
    if "refused" in compiled:
        return dataclasses.replace(row, refused=compiled["refused"])
    mesh = p.target.devices
    if mesh is None:
        return row
    step = inspect.from_text(
        compiled["text"], plan.mesh, device_ids=compiled["positions"],
        device_kind=mesh.devices.flat[0].device_kind, memory=inspect.Memory(**compiled["memory"]),
    )  # fmt: skip
    found = inspect.unplanned(step, plan.collectives)
    links = topology(plan.mesh, preset(p.case.target.split(":")[0]), mesh.devices)
    times = step.times(inspect.price_on(links))
    return dataclasses.replace(
        row,
        compiled_bytes=step.memory.peak_bytes if step.memory else None,
        compiled_s=times.step_s if times else None,
        sent_bytes=tuple((axes, *sent) for axes, sent in found.sent_bytes().items()),
        unplanned_bytes=found.unplanned_bytes,
    )


def compiled_before(p: Prepared, plan: Plan, cache: pathlib.Path) -> pathlib.Path:
    """Returns where what was compiled for the plan's constraints is kept."""
    emitted = (p.case.name, str(plan.constraints.operands), str(plan.constraints.results),
               str(plan.constraints.scatters), sorted(plan.constraints.again),
               [str(a) for a in plan.arguments])  # fmt: skip
    return cache / f"{p.case.key}-{hashlib.sha256(repr(emitted).encode()).hexdigest()[:16]}.json"


def compile_once(p: Prepared, plan: Plan, path: pathlib.Path) -> dict[str, Any]:
    """Compiles, or reads what an earlier run compiled."""
    if path.exists():
        return json.loads(path.read_text())
    mesh = aot.mesh(p.case.target, plan.mesh)
    try:
        compiled = plan.jit(p.fn, mesh).lower(*p.args).compile()
        stats = compiled.memory_analysis()
        names = ("argument", "output", "alias", "temp")
        memory = {f"{n}_bytes": getattr(stats, f"{n}_size_in_bytes") for n in names}
        found = {
            "text": compiled.as_text(),
            "memory": memory,
            "positions": inspect.positions(compiled, mesh),
        }
    except jax.errors.JaxRuntimeError as e:
        found = {"refused": str(e).splitlines()[0][:300]}
    path.write_text(json.dumps(found))
    return found


def run(cases: Sequence[Case], cache: pathlib.Path, args: argparse.Namespace) -> list[Row]:
    """Returns the rows of all plans that could be compiled in time: first plans of all cases come
    before second plans."""
    prepared: dict[str, Prepared] = {}
    rows: dict[tuple[int, int], Row] = {}
    end = time.monotonic() + 60 * args.minutes
    for k, kind in enumerate(KINDS):
        for i, case in enumerate(cases):
            start = time.perf_counter()
            late = time.monotonic() >= end
            if late and not (cache / f"{case.key}-{kind.replace(' ', '')}.plan.json").exists():
                continue
            try:
                if case.name not in prepared:
                    prepared[case.name] = prepare(case)
                p = prepared[case.name]
                found = picked(p, kind, cache, args.time_limit, args.again)
            except AutoshardError as e:
                print(f"{case.name}: {e}", flush=True)
                continue
            if not found:
                continue
            plan = plan_of(p, found[1])
            path = compiled_before(p, plan, cache)
            if late and not path.exists():
                continue
            rows[i, k] = measure(p, found[0], plan, compile_once(p, plan, path))
            print(f"{rows[i, k]} {time.perf_counter() - start:.0f} s", flush=True)
    return [rows[at] for at in sorted(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="families, comma-separated")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve")
    parser.add_argument("--minutes", type=float, default=math.inf, help="to compile in")
    parser.add_argument("--again", action="store_true", help="plan anew")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    (HERE / "results").mkdir(exist_ok=True)
    wanted = [name for name in args.only.split(",") if name]
    cases = [case for case in CASES if not wanted or case.model in wanted]
    rows = run(cases, args.cache, args)
    if not wanted:
        for file, text in tables(rows).items():
            (HERE / "results" / file).write_text(text)


if __name__ == "__main__":
    main()
