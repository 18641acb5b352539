"""Closing the loop: compile the best plans, correct the costs that were off, and solve again.

What the compiler makes of a plan is set beside its prediction, line by line of the user's program.
Where compute took longer than predicted, or something moved that was not planned, the strategies
that were chosen there become as much dearer, and the next solve looks elsewhere unless they are
still the best. The plan whose compiled schedule is the fastest wins, whatever was predicted.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autoshard import inspect
from autoshard.check import Check
from autoshard.cost import Choices
from autoshard.plan import Plan
from autoshard.planning import Priced
from autoshard.problem import Solution
from autoshard.schedule import Branches, Compute, Loop, Node

FEW = 3  # different plans compiled before the first correction
SMALL = 0.02  # of the step: less than this is noise of fusion
SHRINK = 0.92  # of the memory, after the compiler refused a plan


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A plan and what it was made from."""

    priced: Priced
    solution: Solution
    plan: Plan


@dataclasses.dataclass(frozen=True)
class Judged:
    """An attempt, compiled; `step_s` is inf where it does not fit."""

    attempt: Attempt
    check: Check
    step_s: float

    def __str__(self) -> str:
        return f"{self.attempt.plan.mesh}: {self.step_s:.6g} s"


def refined(
    attempts: Sequence[Attempt],
    rounds: int,
    compile_: Callable[[Plan], Check],
    solve: Callable[[Priced], Attempt],
) -> Plan:
    """Returns the plan with the fastest compiled step.

    Args:
      attempts: plans to start from, the best predicted first.
      rounds: how often to correct and solve again at most.
      compile_: compiles a plan for its devices.
      solve: plans again under changed prices.
    """
    judged: list[Judged] = []
    for attempt in _different(attempts)[:FEW]:
        judged.append(_judge(attempt, compile_(attempt.plan)))
    latest = min(judged, key=lambda j: (j.step_s, j.attempt.plan.objective_s))
    for _ in range(rounds):
        corrected = _corrected(latest)
        if corrected is None:
            break
        attempt = solve(corrected)
        if any(attempt.plan.constraints == j.attempt.plan.constraints for j in judged):
            break
        latest = _judge(attempt, compile_(attempt.plan))
        judged.append(latest)
    best = min(judged, key=lambda j: (j.step_s, j.attempt.plan.objective_s))
    compiled = tuple(
        (str(j.attempt.plan.mesh), j.attempt.plan.step_time_s, j.step_s) for j in judged
    )
    return dataclasses.replace(best.attempt.plan, compiled=compiled)


def _different(attempts: Sequence[Attempt]) -> list[Attempt]:
    kept: list[Attempt] = []
    for a in attempts:
        if all(a.plan.constraints != k.plan.constraints for k in kept):
            kept.append(a)
    return kept


def _judge(attempt: Attempt, check: Check) -> Judged:
    """Takes the step of the compiled schedule; where there is none, what nobody planned counts."""
    limit = attempt.plan.memory_limit_bytes
    if check.refused or (check.memory and limit and check.memory.peak_bytes > limit):
        return Judged(attempt, check, math.inf)
    if check.times is not None:
        return Judged(attempt, check, check.times.step_s)
    unplanned_s = sum(_unplanned(attempt, check).values())
    return Judged(attempt, check, attempt.plan.step_time_s + unplanned_s)


def _corrected(judged: Judged) -> Priced | None:
    """Returns the prices with what was off put right, or None where nothing was."""
    priced, choices = judged.attempt.priced, judged.attempt.priced.choices
    if judged.step_s == math.inf:
        limit = SHRINK * judged.attempt.solution.peak_bytes
        problem = dataclasses.replace(choices.problem, usage_limit_bytes=limit)
        return dataclasses.replace(priced, choices=dataclasses.replace(choices, problem=problem))
    excess = _excess(judged)
    if not excess:
        return None
    return dataclasses.replace(
        priced, choices=_dearer(choices, judged.attempt.solution.choices, excess)
    )


def _excess(judged: Judged) -> dict[str, float]:
    """Returns by source line the seconds that the compiled program takes beyond the predicted.

    Fusion blurs lines, so only what is large beside the step counts.
    """
    check, attempt = judged.check, judged.attempt
    found = dict(_unplanned(attempt, check))
    step = check.step
    if step is not None and step.clock is not None and check.times is not None:
        made: dict[str, float] = {}
        for source, cycles in _cycles(step.schedule.nodes, 1):
            made[source] = made.get(source, 0.0) + cycles / step.clock.cycles_per_s
        promised = _promised(attempt)
        for source, seconds in made.items():
            over = seconds - promised.get(source, 0.0)
            found[source] = found.get(source, 0.0) + max(over, 0.0)
    least = SMALL * attempt.plan.step_time_s
    return {source: s for source, s in sorted(found.items()) if s > least}


def _unplanned(attempt: Attempt, check: Check) -> dict[str, float]:
    """Returns by source line the seconds of collectives that no plan explains."""
    found: dict[str, float] = {}
    price = inspect.price_on(attempt.priced.target.topology)
    for collective, alone_bytes in check.comparison.unplanned if check.comparison else ():
        sent = getattr(collective, "wire_bytes", 0.0)
        share = min(1.0, alone_bytes / sent) if sent else 1.0
        seconds = price(collective) * collective.trips * share
        source = collective.source or ""
        found[source] = found.get(source, 0.0) + seconds
    return found


def _cycles(nodes: Sequence[Node], trips: int) -> Iterator[tuple[str, float]]:
    for node in nodes:
        if isinstance(node, Compute):
            yield node.source or "", node.cycles * trips
        elif isinstance(node, Loop):
            yield from _cycles(node.body, trips * node.trips)
        elif isinstance(node, Branches):
            for body in node.bodies:
                yield from _cycles(body, trips)


def _promised(attempt: Attempt) -> dict[str, float]:
    """Returns by source line the seconds that the chosen strategies cost in the model."""
    choices, picked = attempt.priced.choices, attempt.solution.choices
    found: dict[str, float] = {}
    for i, op in enumerate(choices.ops):
        cost = float(choices.problem.nodes[i].costs_s[picked[i]])
        found[op.source] = found.get(op.source, 0.0) + cost
    return found


def _dearer(choices: Choices, picked: Sequence[int], excess: dict[str, float]) -> Choices:
    """Adds each line's excess to what was chosen there, in proportion to the bytes that it moves.

    Strategies that leave their results in the same shardings are charged alike: it is where data
    lies that the compiler made dear.
    """
    members: dict[str, list[int]] = {}
    for i, op in enumerate(choices.ops):
        members.setdefault(op.source, []).append(i)
    nodes = list(choices.problem.nodes)
    for source, seconds in excess.items():
        ops = members.get(source, [])
        weights = [
            choices.ops[i].trips * sum(v.size_bytes for v in choices.ops[i].results) for i in ops
        ]
        total = sum(weights)
        for i, weight in zip(ops, weights, strict=True):
            if not total or not weight:
                continue
            chosen = choices.strategies[i][picked[i]].results
            alike = np.array([s.results == chosen for s in choices.strategies[i]])
            costs = nodes[i].costs_s + alike * (seconds * weight / total)
            nodes[i] = dataclasses.replace(nodes[i], costs_s=costs)
    problem = dataclasses.replace(choices.problem, nodes=tuple(nodes))
    return dataclasses.replace(choices, problem=problem)
