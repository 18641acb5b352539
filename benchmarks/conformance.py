"""What is predicted against what the TPU compiler makes of it: memory, communication, order.

    python -m benchmarks.conformance                  all cases: hours on two cores; resumes
    python -m benchmarks.conformance --only gpt,mlp   some families

Every case is a model on an ahead-of-time machine under several plans: ours, with ample and with
tight memory, and the plans everyone knows. What was compiled is kept in `--cache` by plan, so that
a change of the cost model alone needs no compiler. The tables go to benchmarks/results.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

from autoshard import aot, cost, emit, inspect, planning  # noqa: E402 (after the platform is set)
from autoshard.baselines import baselines  # noqa: E402
from autoshard.errors import AutoshardError, InfeasibleError  # noqa: E402
from autoshard.fitting import fitted  # noqa: E402
from autoshard.hardware import preset  # noqa: E402
from autoshard.plan import Plan  # noqa: E402
from autoshard.problem import Solution, Status  # noqa: E402
from autoshard.rules import rules_for  # noqa: E402
from autoshard.sharding import MeshShape  # noqa: E402
from autoshard.stages import Stages  # noqa: E402
from autoshard.topology import topology  # noqa: E402
from autoshard.trace import Program, trace  # noqa: E402

HERE = pathlib.Path(__file__).parent
CACHE = pathlib.Path.home() / ".cache" / "autoshard" / "conformance"
KNOWN_PLANS = 3  # of those everyone knows, in a case
TIGHT = 0.8  # of the peak of the ample plan


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


BF16 = {"compute_dtype": "bfloat16"}
GPT = {"layers": 2, "width": 1024, "hidden": 4096, "heads": 8, "kv_heads": 8, "length": 1024}
CASES = (
    Case("mlp", {"layers": 4, "width": 2048, "hidden": 8192, "batch": 65_536, "scan": True,
                 "remat": True, **BF16}, "v5e:4x4", "data=4,model=4"),
    Case("mlp", {"layers": 3, "width": 2048, "hidden": 8192, "batch": 16_384, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("mlp", {"layers": 3, "width": 4096, "hidden": 8192, "batch": 8192, **BF16},
         "v5p:2x2x2", "data=8"),
    Case("gpt", {**GPT, "batch": 32, "vocab": 32_000, "remat": True, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("gpt", {**GPT, "batch": 32, "vocab": 32_000, "remat": False, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("gpt", {"layers": 2}, "v5e:4x4", "data=4,model=4", "1b"),
    Case("gpt", {"layers": 2, "scan": False}, "v6e:4x4", "data=16", "1b"),
    Case("moe", {**GPT, "hidden": 2048, "batch": 32, "vocab": 8192, "remat": True, **BF16},
         "v5e:2x4", "data=4,model=2"),
    Case("vit", {"layers": 2}, "v5e:4x4", "data=4,model=4", "l16"),
    Case("lora", {"layers": 2}, "v5p:2x2x2", "data=4,model=2", "1b"),
    Case("encdec", {"layers": 2}, "v6e:4x4", "data=4,model=4", "big"),
    Case("ssm", {"layers": 2}, "v5e:2x4", "data=4,model=2", "130m"),
    Case("lstm", {"batch": 1024}, "v5e:2x4", "data=8", "large"),
    Case("unet", {"channels": (128, 256), "batch": 512}, "v5e:2x4", "data=8", "cifar"),
    Case("gan", {}, "v5e:2x4", "data=4,model=2", "64"),
    Case("dpsgd", {}, "v5e:2x4", "data=8", "small"),
    Case("gnn", {}, "v5e:2x4", "data=8", "arxiv"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan of a case: predicted and compiled, per device; times in seconds."""

    case: str
    plan: str
    predicted_bytes: float
    predicted_s: float
    compiled_bytes: float | None = None  # None: refused
    compiled_s: float | None = None
    planned_sent_bytes: float = 0.0
    compiled_sent_bytes: float = 0.0
    unplanned_bytes: float = 0.0
    refused: str = ""


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
    options = planning.Options(hardware=case.target.split(":")[0], donate_argnums=(0,))
    program = trace(module.train_step, args, donate_argnums=(0,))
    target = planning.target(aot.mesh(case.target, MeshShape.parse(case.mesh)), options)
    program, pins = planning.pinned(program, target, options)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = planning.strategies(program, rules, target, pins)
    choices = cost.build(
        program.graph, strategies, target.topology, program.donated, target.memory_limit_bytes
    )
    return Prepared(case, module.train_step, args, program, target, choices)


def solutions(p: Prepared, time_limit_s: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields named plans: ours with all the memory and with less, and known ones."""
    known = baselines(p.choices, p.program.carried)
    problem = p.choices.problem
    found = fitted(p.choices, known, time_limit_s)
    yield "ours", found.choices
    tight = dataclasses.replace(problem, usage_limit_bytes=TIGHT * found.peak_bytes)
    try:
        squeezed = fitted(dataclasses.replace(p.choices, problem=tight), known, time_limit_s)
        if squeezed.choices != found.choices:
            yield f"ours in {TIGHT:.0%} of its memory", squeezed.choices
    except InfeasibleError:
        pass  # nothing smaller fits: the ample plan is the only one
    for b in known[:KNOWN_PLANS]:
        if b.peak_bytes < 1.2 * (problem.usage_limit_bytes or float("inf")):
            yield b.name, b.choices


def plan_of(p: Prepared, choices: Sequence[int]) -> Plan:
    problem = p.choices.problem
    cost_s, peak = problem.objective_s(choices), cost.peak(p.choices, choices)[0]
    solution = Solution(tuple(choices), cost_s, 0.0, Status.FEASIBLE, peak)
    return planning.assemble(
        planning.Priced(p.program, p.target, p.choices, ()), solution,
        emit.constraints(p.choices, choices), emit.planned_collectives(p.choices, choices),
        Stages("conformance", show=False),
    )  # fmt: skip


def measure(p: Prepared, name: str, plan: Plan, cache: pathlib.Path) -> Row:
    row = Row(p.case.name, name, plan.peak_bytes, plan.objective_s)
    compiled = compile_once(p, plan, cache)
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
        planned_sent_bytes=found.planned_bytes,
        compiled_sent_bytes=found.compiled_bytes,
        unplanned_bytes=found.unplanned_bytes,
    )


def compile_once(p: Prepared, plan: Plan, cache: pathlib.Path) -> dict[str, Any]:
    """Compiles, or reads what an earlier run compiled for the same constraints."""
    emitted = (p.case.name, str(plan.constraints.operands), str(plan.constraints.results),
               str(plan.constraints.scatters), [str(a) for a in plan.arguments])  # fmt: skip
    path = cache / f"{hashlib.sha256(repr(emitted).encode()).hexdigest()[:24]}.json"
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


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation of two columns without ties."""
    n = len(pairs)
    ranks = [
        {k: r for r, k in enumerate(sorted(range(n), key=lambda k: pairs[k][c]))} for c in (0, 1)
    ]
    return 1 - 6 * sum((ranks[0][k] - ranks[1][k]) ** 2 for k in range(n)) / max(1, n * (n * n - 1))


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the texts of memory.md, communication.md and order.md."""
    fitting = [r for r in rows if r.compiled_bytes is not None]
    return {
        "memory.md": _memory(rows, fitting),
        "communication.md": _communication(fitting),
        "order.md": _order(fitting),
    }


def _memory(rows: Sequence[Row], fitting: Sequence[Row]) -> str:
    ratios = [r.predicted_bytes / r.compiled_bytes for r in fitting if r.compiled_bytes]
    within = [sum(abs(x - 1) <= t for x in ratios) for t in (0.1, 0.2)]
    lines = [
        "# Predicted peak memory against the TPU compiler's",
        "",
        f"{len(fitting)} of {len(rows)} plans compiled. Within 10 %: {within[0]}, within 20 %: "
        f"{within[1]}. Per device, MiB.",
        "",
        "| case | plan | predicted | compiled | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        made = "refused" if r.compiled_bytes is None else f"{r.compiled_bytes / 2**20:.0f}"
        ratio = f"{r.predicted_bytes / r.compiled_bytes:.2f}" if r.compiled_bytes else ""
        lines.append(
            f"| {r.case} | {r.plan} | {r.predicted_bytes / 2**20:.0f} | {made} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def _communication(rows: Sequence[Row]) -> str:
    total = sum(r.compiled_sent_bytes for r in rows)
    unplanned = sum(r.unplanned_bytes for r in rows) / total if total else 0.0
    lines = [
        "# Predicted bytes sent by each device against the compiled program's",
        "",
        f"Unplanned: {unplanned:.2%} of all bytes. Per step, MiB.",
        "",
        "| case | plan | predicted | compiled | ratio | unplanned |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        have, made = r.planned_sent_bytes / 2**20, r.compiled_sent_bytes / 2**20
        ratio = f"{have / made:.2f}" if made else ""
        share = r.unplanned_bytes / r.compiled_sent_bytes if r.compiled_sent_bytes else 0.0
        lines.append(f"| {r.case} | {r.plan} | {have:.0f} | {made:.0f} | {ratio} | {share:.1%} |")
    return "\n".join(lines) + "\n"


def _order(rows: Sequence[Row]) -> str:
    pairs = [(r.predicted_s, r.compiled_s) for r in rows if r.compiled_s]
    lines = [
        "# Predicted step time against the estimate from the compiled schedule",
        "",
        f"Spearman correlation over {len(pairs)} plans: {spearman(pairs):.3f}. Milliseconds.",
        "",
        "| case | plan | predicted | compiled | best predicted is worse than the best by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in dict.fromkeys(r.case for r in rows):
        group = [r for r in rows if r.case == case and r.compiled_s]
        if not group:
            continue
        best = min(r.compiled_s or 0.0 for r in group)
        chosen = min(group, key=lambda r: r.predicted_s)
        for r in group:
            worse = f"{(r.compiled_s or 0.0) / best - 1:.1%}" if r is chosen else ""
            lines.append(
                f"| {case} | {r.plan} | {r.predicted_s * 1e3:.2f} | {(r.compiled_s or 0) * 1e3:.2f}"
                f" | {worse} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="families, comma-separated")
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    (HERE / "results").mkdir(exist_ok=True)
    wanted = [name for name in args.only.split(",") if name]
    rows: list[Row] = []
    for case in CASES:
        if wanted and case.model not in wanted:
            continue
        try:
            prepared = prepare(case)
        except AutoshardError as e:
            print(f"{case.name}: {e}", flush=True)
            continue
        for name, choices in solutions(prepared, args.time_limit):
            start = time.perf_counter()
            rows.append(measure(prepared, name, plan_of(prepared, choices), args.cache))
            print(f"{rows[-1]} {time.perf_counter() - start:.0f} s", flush=True)
            for file, text in tables(rows).items():
                (HERE / "results" / file).write_text(text)


if __name__ == "__main__":
    main()
