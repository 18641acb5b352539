"""Our rules beside what Shardy gives for the lowered operation.

`python -m tests.shardy_table > docs/shardy.md` makes the table anew.
"""

import dataclasses
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from autoshard import primitives, shardy
from autoshard.factors import Kind, Rule
from tests.rule_programs import ruled_equations

NO_RULE = "it is lowered to an operation that Shardy has no rule for"
CONVERGES = "it is lowered to a loop until all converge, which hides that elements are independent"
GATHERED = "a running sum over a sharded dim is compiled to a gather of the operand"
ALIGNED = "no window crosses a block where it fits its stride: nothing is exchanged"
# Why we wrote or changed the rule of a primitive.
BECAUSE = {
    "top_k": NO_RULE,
    "ragged_dot_general": NO_RULE,
    "optimization_barrier": "Shardy lets shardings through without a rule",
    "igamma": CONVERGES,
    "igammac": CONVERGES,
    "igamma_grad_a": CONVERGES,
    "regularized_incomplete_beta": CONVERGES,
    "random_gamma": CONVERGES,
    "cumsum": GATHERED,
    "cumprod": GATHERED,
    "cummax": GATHERED,
    "cummin": GATHERED,
    "cumlogsumexp": GATHERED,
    "dynamic_update_slice": "a window narrower than a sharded dim is written in place only if it "
    "is one element wide",
    "conv_general_dilated": "a kernel without halo lets space pass; sums over sharded space, and "
    "batch groups, are compiled wrongly",
    "pad": "padding that keeps a dim's size still moves its elements",
    "reduce_window": ALIGNED,
    "reduce_window_sum": ALIGNED,
    "reduce_window_max": ALIGNED,
    "reduce_window_min": ALIGNED,
    "slice": ALIGNED,
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One operation whose rule we wrote or changed; `theirs` is None where Shardy has no rule."""

    primitive: str
    ours: Rule
    theirs: Rule | None

    @property
    def verdict(self) -> str:
        """How our factors relate to Shardy's."""
        if self.theirs is None:
            return "no rule"
        if self.ours == self.theirs:
            return "the same"
        if self.theirs.is_replicated:
            return "replicated"
        same = (self.ours.operands, self.ours.results, self.ours.sizes)
        if same == (self.theirs.operands, self.theirs.results, self.theirs.sizes):
            return "other kinds: " + ", ".join(_changes(self.ours, self.theirs))
        return "other factors"


def _changes(ours: Rule, theirs: Rule) -> list[str]:
    changed = {
        f"{b.value} to {a.value}"
        for a, b in zip(ours.kinds, theirs.kinds, strict=True)
        if a is not b
    }
    return sorted(changed)


def is_ours(name: str) -> bool:
    return name in primitives.RULES or name in primitives.CORRECTIONS


def lines(eqns: Sequence[tuple[JaxprEqn, Rule]] | None = None) -> list[Line]:
    """Returns each distinct pair of rules, ours and Shardy's."""
    eqns = [(e, r) for e, r in eqns or ruled_equations() if is_ours(e.primitive.name)]
    theirs = shardy.lowered_rules([eqn for eqn, _ in eqns])
    found = [Line(e.primitive.name, r, t) for (e, r), t in zip(eqns, theirs, strict=True)]
    return sorted(dict.fromkeys(found), key=lambda line: line.primitive)


def frees(line: Line) -> bool:
    """Whether we open a factor to sharding that Shardy has and does not let pass."""
    if line.theirs is None or line.theirs.is_replicated:
        return False
    return any(
        a is Kind.PASS and b is not Kind.PASS
        for a, b in zip(line.ours.kinds, line.theirs.kinds, strict=False)
    )


def table_text(found: Sequence[Line]) -> str:
    """Returns docs/shardy.md."""
    counts: dict[str, int] = {}
    for line in found:
        verdict = line.verdict.partition(":")[0]
        counts[verdict] = counts.get(verdict, 0) + 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    rows = [
        "# Our rules beside Shardy's",
        "",
        "Made by `python -m tests.shardy_table > docs/shardy.md`; a test compares. For every rule",
        "that we wrote or changed: what Shardy gives for the operation as it is lowered. All other",
        "rules are Shardy's own. A factor of a strided dim that we split has the place in the",
        "stride as a second one.",
        "",
        f"{len(found)} rules: {summary}.",
        "",
        "| primitive | ours | Shardy's | so | because |",
        "| --- | --- | --- | --- | --- |",
    ]
    for line in found:
        theirs = "-" if line.theirs is None else f"`{line.theirs}`"
        why = "" if line.verdict == "the same" else BECAUSE[line.primitive]
        rows.append(f"| {line.primitive} | `{line.ours}` | {theirs} | {line.verdict} | {why} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  the devices

    print(table_text(lines()), end="")
