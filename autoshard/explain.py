"""A plan as text: who is sharded how, what it costs, what moves, where memory peaks."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.plan import Array, Plan

COLLECTIVES_SHOWN = 12
VALUES_SHOWN = 8
STRUCK = (
    "  the time limit cut the search short: a longer one may find a better plan, "
    "and another run another plan"
)


def headline(plan: "Plan") -> str:
    """Returns the plan in one line."""
    limit = (
        f" of {bytes_text(plan.memory_limit_bytes)}" if plan.memory_limit_bytes is not None else ""
    )
    return (
        f"{plan.program} on {plan.mesh} ({plan.hardware}): step {seconds_text(plan.step_time_s)}, "
        f"peak {bytes_text(plan.peak_bytes)}{limit}, {plan.status.name.lower()}"
    )


def text(plan: "Plan") -> str:
    gap = (plan.objective_s - plan.bound_s) / plan.objective_s if plan.objective_s > 0 else 0.0
    lines = [
        headline(plan),
        f"  objective {seconds_text(plan.objective_s)}, "
        f"proven bound {seconds_text(plan.bound_s)}, gap {gap:.2%}",
        *([STRUCK] if plan.time_limit_struck else []),
        "",
        "arguments",
        *_arrays(plan.arguments),
        "",
        "results",
        *_arrays(plan.results),
        "",
        f"collectives, predicted: {seconds_text(sum(c.seconds for c in plan.collectives))} a step, "
        f"{seconds_text(sum(c.hidden_s for c in plan.collectives))} of it beside compute",
        *_collectives(plan),
        "",
        "largest live values at the memory peak, predicted per device",
        *(f"  {bytes_text(size):>10}  {name}" for name, size in plan.live_at_peak[:VALUES_SHOWN]),
    ]
    if plan.known:
        lines += ["", "known plans in the same model", *_known(plan)]
    idle = [f"{n}={s}" for n, s in plan.mesh.axes if s > 1 and n not in plan.used_axes]
    if idle:
        lines += ["", f"nothing is split over {', '.join(idle)}: fewer devices would do as well"]
    if plan.tried:
        lines += ["", "other meshes", *(f"  {name}: {why}" for name, why in plan.tried)]
    if plan.compiled:
        lines += ["", "plans compiled, step predicted and from the compiled schedule"]
        lines += [
            f"  {seconds_text(a):>10}  {seconds_text(b) if b < math.inf else 'refused':>10}  {name}"
            for name, a, b in plan.compiled
        ]
    if plan.stages:
        lines += ["", "planning: " + ", ".join(f"{name} {s:.2f} s" for name, s in plan.stages)]
    return "\n".join(lines)


def _arrays(arrays: "Iterable[Array]") -> list[str]:
    rows = [(a.name, a.sharding.text(a.shape, a.dtype)) for a in arrays]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {form}" for name, form in rows] or ["  none"]


def _known(plan: "Plan") -> list[str]:
    lines = []
    for name, objective, peak in sorted(plan.known, key=lambda entry: entry[1]):
        ratio = f"{objective / plan.objective_s:.3f} x ours" if plan.objective_s > 0 else ""
        fits = plan.memory_limit_bytes is None or peak <= plan.memory_limit_bytes
        lines.append(
            f"  {seconds_text(objective):>10}  {ratio}  {name}, peak {bytes_text(peak)}"
            f"{'' if fits else ', does not fit'}"
        )
    return lines


def _collectives(plan: "Plan") -> list[str]:
    groups: dict[tuple, list] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, c.axes, c.bytes, c.trips, c.reason, c.source), []).append(c)
    ranked = sorted(groups.items(), key=lambda item: -sum(c.seconds for c in item[1]))
    lines = []
    for (kind, axes, size, trips, reason, source), members in ranked[:COLLECTIVES_SHOWN]:
        total = sum(c.seconds for c in members)
        times = len(members) * trips
        lines.append(
            f"  {seconds_text(total):>10}  {kind}({','.join(axes)})  {bytes_text(size)}"
            f"{f' x{times}' if times > 1 else ''}  {members[0].value}: {reason}, {source}"
        )
    if len(ranked) > COLLECTIVES_SHOWN:
        rest = sum(c.seconds for _, members in ranked[COLLECTIVES_SHOWN:] for c in members)
        lines.append(f"  {seconds_text(rest):>10}  {len(ranked) - COLLECTIVES_SHOWN} smaller kinds")
    return lines or ["  none"]


def seconds_text(seconds: float) -> str:
    """Returns `12.3 us`, `408 ms`, `1.20 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(size: float) -> str:
    """Returns `12 B`, `3.50 MiB`, `15.8 GiB`."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
