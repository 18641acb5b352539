"""Strategy class -> collectives priced -> collectives compiled: makes docs/strategies.md.

    python -m benchmarks.strategy_conformance

Small programs, each with the strategy of one operation or the shardings of its arguments fixed,
are planned and compiled for `TARGET` ahead of time. A row matches where the compiled bytes by
kind are within a tenth of the priced ones. An all-reduce counts as a reduce-scatter and an
all-gather, permutes that nobody priced as what they are a part of: the compiler ends some
reduce-scatters, and makes some gathers, with them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402 (after the platform is set)
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from autoshard import aot, cost, emit, inspect, planning  # noqa: E402
from autoshard.fitting import fitted  # noqa: E402
from autoshard.plan import Plan  # noqa: E402
from autoshard.rules import rules_for  # noqa: E402
from autoshard.sharding import MeshShape  # noqa: E402
from autoshard.stages import Stages  # noqa: E402
from autoshard.strategies import Strategy  # noqa: E402
from autoshard.trace import trace  # noqa: E402

TARGET, MESH = "v5e:2x4", "data=4,model=2"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "strategies.md"
SMALL_BYTES = 1024  # counters and losses
TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row: a program, and what is fixed of its plan.

    `primitive` has its strategies tried one by one: those that use exactly `axes`. Without it the
    shardings of arguments and results decide.
    """

    name: str
    fn: Callable
    args: tuple
    primitive: str = ""
    axes: tuple[str, ...] = ("data",)
    in_specs: tuple[Any, ...] | None = None
    out_specs: Any = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was priced and what was compiled: bytes sent by a device, by kind."""

    name: str
    strategy: str
    priced: dict[str, float]
    compiled: dict[str, float]

    @property
    def matches(self) -> bool:
        have, made = _basic(self.priced), _basic(self.compiled)
        if "collective-permute" not in have and made.get("collective-permute"):
            whole = max(("reduce-scatter", "all-gather"), key=lambda k: have.get(k, 0.0))
            made[whole] = made.get(whole, 0.0) + made.pop("collective-permute")
        return all(
            abs(have.get(k, 0.0) - made.get(k, 0.0)) <= TOLERANCE * made.get(k, 0.0) + SMALL_BYTES
            for k in {**have, **made}
        )

    def __str__(self) -> str:
        sign = "yes" if self.matches else "**no**"
        return (
            f"| {self.name} | {self.strategy} | {_text(self.priced)} | {_text(self.compiled)} | "
            f"{sign} |"
        )


def _basic(sent: dict[str, float]) -> dict[str, float]:
    """Takes all-reduces apart."""
    found = {k: v for k, v in sent.items() if k != "all-reduce"}
    for part in ("reduce-scatter", "all-gather"):
        found[part] = found.get(part, 0.0) + sent.get("all-reduce", 0.0) / 2
    return found


def _text(sent: dict[str, float]) -> str:
    large = {k: v for k, v in sorted(sent.items()) if v > SMALL_BYTES}
    return ", ".join(f"{k} {v / 2**20:.2f} MiB" for k, v in large.items()) or "nothing"


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def cross_entropy(x, w, targets):
    logits = x @ w
    picked = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def scanned(x, weights):
    def loss(weights):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(layer, x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def adam(state, grad):
    m = 0.9 * state["m"] + 0.1 * grad
    v = 0.99 * state["v"] + 0.01 * grad * grad
    return {"m": m, "v": v, "w": state["w"] - m / (jnp.sqrt(v) + 1e-5)}


def dispatch(x, gates, w):
    routed = jnp.einsum("bsec,bsd->ebcd", gates, x)
    hidden = jnp.einsum("ebcd,edf->ebcf", routed, w)
    return jnp.einsum("bsec,ebcf->bsf", gates, hidden)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def normed(x, w):
    return (x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


conv = functools.partial(
    lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)  # fmt: skip
HEADS = f32(8, 512, 8, 128)
STATE = {"m": f32(2048, 2048), "v": f32(2048, 2048), "w": f32(2048, 2048)}
STATE_SPLIT = dict.fromkeys(STATE, P("data"))
ENTRIES = (
    Entry("dot", jnp.matmul, (f32(2048, 1024), f32(1024, 2048)), "dot_general"),
    Entry("dot", jnp.matmul, (f32(2048, 1024), f32(1024, 2048)), "dot_general",
          ("data", "model")),
    Entry("3-D matmul", lambda x, w: jnp.einsum("bsd,dkh->bskh", x, w),
          (f32(8, 512, 1024), f32(1024, 8, 128)), "dot_general"),
    Entry("attention scores", lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
          (HEADS, HEADS), "dot_general"),
    Entry("sum", lambda x: jnp.sum(x, 0), (f32(2048, 4096),), "reduce_sum"),
    Entry("max", lambda x: jnp.max(x, 0), (f32(2048, 65_536),), "reduce_max"),
    Entry("embedding", lambda table, i: table[i], (f32(32_768, 512), i32(4096)), "gather"),
    Entry("embedding gradient", lambda d, i: jnp.zeros((32_768, 512)).at[i].add(d),
          (f32(4096, 512), i32(4096)), "scatter-add"),
    Entry("convolution", conv, (f32(32, 16, 16, 256), f32(3, 3, 256, 256)),
          "conv_general_dilated"),
    Entry("attention, heads split", attention, (HEADS,) * 3, in_specs=(P(None, None, "data"),) * 3),
    Entry("attention, queries split", attention, (HEADS,) * 3,
          in_specs=(P(None, "data"), P(None, "data"), P(None, "data"))),
    Entry("loss, vocabulary split", cross_entropy, (f32(4096, 512), f32(512, 32_768), i32(4096)),
          in_specs=(P(), P(None, "data"), P())),
    Entry("loss, batch split", cross_entropy, (f32(4096, 512), f32(512, 32_768), i32(4096)),
          in_specs=(P("data"), P(), P("data"))),
    Entry("norm, features split", normed, (f32(4096, 2048), f32(2048, 512)),
          in_specs=(P(None, "data"), P("data")), out_specs=P()),
    Entry("experts split", dispatch, (f32(8, 512, 512), f32(8, 512, 8, 80), f32(8, 512, 2048)),
          in_specs=(P("data"), P("data"), P("data")), out_specs=P("data")),
    Entry("scanned layers, FSDP", scanned, (f32(4096, 1024), f32(4, 1024, 1024)),
          in_specs=(P("data"), P(None, "data")), out_specs=P(None, "data")),
    Entry("scanned layers, data parallel", scanned, (f32(4096, 1024), f32(4, 1024, 1024)),
          in_specs=(P("data"), P()), out_specs=P()),
    Entry("optimizer, state split", adam, (STATE, f32(2048, 2048)),
          in_specs=(STATE_SPLIT, P()), out_specs=STATE_SPLIT),
    Entry("optimizer, ZeRO-1", adam, (STATE, f32(2048, 2048)),
          in_specs=({**STATE_SPLIT, "w": P()}, P("data")),
          out_specs={**STATE_SPLIT, "w": P()}),
)  # fmt: skip


def outcomes(entry: Entry) -> Iterator[Outcome]:
    """Yields one outcome for each strategy that the entry names."""
    mesh = aot.mesh(TARGET, MeshShape.parse(MESH))
    options = planning.Options(
        hardware=TARGET.split(":")[0], in_shardings=entry.in_specs, out_shardings=entry.out_specs
    )
    program = trace(entry.fn, entry.args)
    target = planning.target(mesh, options)
    program, pins = planning.pinned(program, target, options)
    rules = rules_for([op.eqn for op in planning.leaf_ops(program)])
    strategies = planning.strategies(program, rules, target, pins)
    ops = list(program.graph.leaves())
    numbers = [i for i, op in enumerate(ops) if op.primitive == entry.primitive]
    tried = [s for s in strategies[numbers[0]] if _uses(s, entry.axes)] if numbers else [None]
    for strategy in tried:
        fixed = list(strategies)
        if strategy is not None:
            fixed[numbers[0]] = (strategy,)
        choices = cost.build(program.graph, fixed, target.topology, program.donated, None)
        solution = fitted(choices, (), 10.0)
        plan = planning.assemble(
            planning.Priced(program, target, choices, ()), solution,
            emit.constraints(choices, solution.choices),
            emit.planned_collectives(choices, solution.choices), Stages("", show=False),
        )  # fmt: skip
        priced, compiled = _sent(plan, entry, mesh)
        yield Outcome(entry.name, str(strategy or _specs(entry)), priced, compiled)


def _uses(strategy: Strategy, axes: tuple[str, ...]) -> bool:
    shardings = (*strategy.operands, *strategy.partial)
    return {a for s in shardings for a in s.axes} == set(axes)


def _specs(entry: Entry) -> str:
    return " ".join(str(tuple(s)) for s in entry.in_specs or () if isinstance(s, P))


def _sent(plan: Plan, entry: Entry, mesh) -> tuple[dict[str, float], dict[str, float]]:
    compiled = plan.jit(entry.fn, mesh).lower(*entry.args).compile()
    found = inspect.unplanned(inspect.inspect(compiled, mesh), plan.collectives)
    priced, made = {}, {}
    for c in found.planned:
        kind = {"permute": "collective-permute"}.get(c.kind, c.kind)
        sent = inspect.wire_bytes(kind, c.bytes, plan.mesh.size(c.axes)) * c.trips
        priced[kind] = priced.get(kind, 0.0) + sent
    for c in found.compiled:
        made[c.kind] = made.get(c.kind, 0.0) + c.wire_bytes
    return priced, made


def page(rows: list[Outcome]) -> str:
    matching = sum(r.matches for r in rows)
    lines = [
        "# Strategies: collectives priced and compiled",
        "",
        f"Made by `python -m benchmarks.strategy_conformance` for {TARGET}, mesh `{MESH}`. Bytes "
        "are those that each device sends; an all-reduce counts as a reduce-scatter and an "
        f"all-gather. {matching} of {len(rows)} rows match within {TOLERANCE:.0%}.",
        "",
        "| class | strategy | priced | compiled | match |",
        "| --- | --- | --- | --- | --- |",
        *map(str, rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for entry in ENTRIES:
        for outcome in outcomes(entry):
            rows.append(outcome)
            print(outcome, flush=True)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
