"""The tables of `benchmarks.conformance`: memory, communication and order, misses included."""

import dataclasses
from collections.abc import Sequence

from autoshard.sharding import Axes

MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan of a case: predicted and compiled, per device; times in seconds."""

    model: str
    case: str
    plan: str
    predicted_bytes: float
    predicted_s: float
    compiled_bytes: float | None = None  # None: refused
    compiled_s: float | None = None
    sent_bytes: tuple[tuple[Axes, float, float], ...] = ()  # axes, planned, compiled
    unplanned_bytes: float = 0.0
    refused: str = ""

    @property
    def planned_sent_bytes(self) -> float:
        return sum(planned for _, planned, _ in self.sent_bytes)

    @property
    def compiled_sent_bytes(self) -> float:
        return sum(compiled for _, _, compiled in self.sent_bytes)

    @property
    def peak_ratio(self) -> float | None:
        return self.predicted_bytes / self.compiled_bytes if self.compiled_bytes else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation of two columns; equal values share their ranks."""
    if len(pairs) < 2:
        return 1.0
    a, b = (_ranks([pair[c] for pair in pairs]) for c in (0, 1))
    mean = (len(pairs) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = [sum((x - mean) ** 2 for x in ranks) for ranks in (a, b)]
    return both / (spread[0] * spread[1]) ** 0.5 if min(spread) else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(v < w for v in values) for w in values]
    equal = [sum(v == w for v in values) for w in values]
    return [b + (e - 1) / 2 for b, e in zip(below, equal, strict=True)]


LARGE_BYTES = 2**30


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the texts of memory.md, communication.md and order.md."""
    return {
        "memory.md": memory(rows),
        "communication.md": communication([r for r in rows if r.compiled_bytes]),
        "order.md": order([r for r in rows if r.compiled_s]),
    }


def memory(rows: Sequence[Row]) -> str:
    large = [r for r in rows if (r.compiled_bytes or 0) >= LARGE_BYTES]
    parts = [("all", rows), ("of at least 1 GiB", large)]
    lines = [
        "# Predicted peak memory against the TPU compiler's",
        "",
        "Per device; compiled is arguments, outputs and temporaries of `memory_analysis()`, which",
        "counts the gaps in the heap, those beside loops too. A plan that the compiler",
        "refuses for its memory counts as a miss. The constants were fitted on these plans.",
        "",
        "| | plans | compiled | within 10 % | within 20 % | too low by more than 10 % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, part in parts:
        ratios = [r.peak_ratio for r in part if r.peak_ratio]
        counts = [sum(abs(x - 1) <= t for x in ratios) for t in (0.1, 0.2)]
        low = sum(x < 0.9 for x in ratios)
        cells = (name, len(part), len(ratios), *counts, low)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| case | plan | predicted, MiB | compiled, MiB | ratio |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for r in rows:
        made = f"{r.compiled_bytes / MIB:.0f}" if r.compiled_bytes else f"refused: {r.refused}"
        ratio = f"{r.peak_ratio:.2f}" if r.peak_ratio else ""
        lines.append(f"| {r.case} | {r.plan} | {r.predicted_bytes / MIB:.0f} | {made} | {ratio} |")
    return "\n".join(lines) + "\n"


def communication(rows: Sequence[Row]) -> str:
    total = sum(r.compiled_sent_bytes for r in rows)
    unplanned = sum(r.unplanned_bytes for r in rows) / total if total else 0.0
    groups = [(p, c) for r in rows for _, p, c in r.sent_bytes if max(p, c) > MIB]
    near = sum(abs(p - c) <= 0.1 * c for p, c in groups)
    shares = [r.unplanned_bytes / r.compiled_sent_bytes for r in rows if r.compiled_sent_bytes]
    lines = [
        "# Predicted bytes sent by each device against the compiled program's",
        "",
        f"Unplanned: {unplanned:.2%} of all bytes of {len(rows)} plans; under 2 % in "
        f"{sum(s < 0.02 for s in shares)} of {len(shares)}. By mesh axes (groups of axes of at "
        f"least 1 MiB): {near} of {len(groups)} within 10 %.",
        "",
        "Per step, MiB.",
        "",
        "| case | plan | axes | predicted | compiled | ratio | unplanned of all |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        share = r.unplanned_bytes / r.compiled_sent_bytes if r.compiled_sent_bytes else 0.0
        for axes, planned, compiled in r.sent_bytes:
            ratio = f"{planned / compiled:.2f}" if compiled else ""
            lines.append(
                f"| {r.case} | {r.plan} | {'*'.join(axes)} | {planned / MIB:.1f} | "
                f"{compiled / MIB:.1f} | {ratio} | {share:.1%} |"
            )
    return "\n".join(lines) + "\n"


def order(rows: Sequence[Row]) -> str:
    cases = [[r for r in rows if r.case == case] for case in dict.fromkeys(r.case for r in rows)]
    pairs = [(r.predicted_s, r.compiled_s or 0.0) for r in rows]
    worse = [_worse(group) for group in cases if len(group) > 1]
    lines = [
        "# Predicted step time against the estimate from the compiled schedule",
        "",
        f"Spearman correlation over {len(pairs)} plans of "
        f"{len(dict.fromkeys(r.model for r in rows))} models: {spearman(pairs):.3f}. The plan "
        f"predicted to be the fastest of its case is within 3 % of the fastest compiled in "
        f"{sum(w <= 0.03 for w in worse)} of {len(worse)} cases.",
        "",
        "| case | plans | Spearman | predicted best is worse by |",
        "| --- | --- | --- | --- |",
    ]
    for group in cases:
        within = spearman([(r.predicted_s, r.compiled_s or 0.0) for r in group])
        lines.append(f"| {group[0].case} | {len(group)} | {within:.2f} | {_worse(group):.1%} |")
    lines += ["", "| case | plan | predicted, ms | compiled, ms | ratio |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for r in rows:
        have, made = r.predicted_s * 1e3, (r.compiled_s or 0.0) * 1e3
        lines.append(f"| {r.case} | {r.plan} | {have:.2f} | {made:.2f} | {have / made:.2f} |")
    return "\n".join(lines) + "\n"


def _worse(group: Sequence[Row]) -> float:
    """Returns by how much the plan predicted to be the fastest is slower than the fastest."""
    chosen = min(group, key=lambda r: r.predicted_s)
    return (chosen.compiled_s or 0.0) / min(r.compiled_s or 0.0 for r in group) - 1
