"""ShardingProblem -> Solution.

The integer program, over one-hot s_i for each node and e_pq for each pair of strategies of each edge:

  minimise   sum_i costs_i . s_i + sum_(i,j) costs_ij . e_ij       `Program._model`
  one-hot    sum_p s_ip = 1                      for each node       `Program._link`
  edge       sum_q e_pq = s_ip                   for each p          `Program._link`
             sum_p e_pq = s_jq                   for each q          `Program._link`
  memory     sum_(live at t) bytes . s <= limit  for each maximal live set t, as needed   `Program.add_rows`
  integer    s in {0, 1}; e >= 0 is then integer by itself           `Program._model`

Before that, `Core.reduce` shrinks the problem without losing the optimum. `Search` finds choices that fit, the
relaxation gives the bound, the two together rule out strategies and pairs (`_prune`), and what is left goes to the
integer program.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.bound import Program, Relaxed
from autoshard.dual import Dual
from autoshard.problem import ShardingProblem, Solution, Status
from autoshard.reduce import Core, Infeasible
from autoshard.search import Flat, Search, improve

GAP = 1e-7  # relative; a smaller one counts as proven
ROUNDS = 20
SWEEPS = (2, 3, 5)  # in the first rounds and in all later ones
KERNEL_PAIRS = 120_000  # the same for part of the strategies
PROGRAM_PAIRS = 250_000  # edge pairs up to which the relaxation is solved by the engine


def solve(
    problem: ShardingProblem,
    *,
    time_limit_s: float = 60.0,
    hints: Sequence[Sequence[int]] = (),
    deterministic: bool = True,
) -> Solution:
    """Returns the cheapest choices found within the limit, with a bound.

    Args:
      problem: what to solve.
      time_limit_s: wall-clock limit.
      hints: choices to start from, one strategy a node each; they need not fit.
      deterministic: spend a fixed effort, so that the answer depends on the problem alone. The time
        limit is then a safety net: `stats["time_limit_struck"]` says whether it made a difference.
    """
    run = _Run(problem, time_limit_s, deterministic)
    try:
        for hint in hints:
            problem.check_choices(hint)
            run.offer(tuple(int(p) for p in hint))
        run.stage("reduce", run.reduce)
        run.improve_and_prove()
    except Infeasible:
        run.exhausted = True
    return run.solution()


def smallest_peak(problem: ShardingProblem, *, time_limit_s: float = 30.0) -> Solution:
    """Returns choices of the least peak usage found, whatever they cost and whatever the limit.

    The bound is that of the cost, -inf; `stats["peak_bound_bytes"]` is the bound of the peak.
    """
    return _smallest_peak(problem, time_limit_s)


class _Clock:
    """A time limit that remembers whether it struck."""

    def __init__(self, limit_s: float):
        self.start = time.monotonic()
        self.limit_s = limit_s
        self.struck = False

    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.start)

    def expired(self) -> bool:
        self.struck = self.struck or self.left_s() <= 0
        return self.struck


class _Run:
    """One solve: the core, the best choices of the whole problem, and the bound."""

    def __init__(self, problem: ShardingProblem, time_limit_s: float, deterministic: bool):
        self.problem = problem
        self.deterministic = deterministic
        self.clock = _Clock(time_limit_s)
        self.stats: dict[str, Any] = {}
        self.best: tuple[int, ...] = ()
        self.objective = math.inf
        self.bound = _trivial_bound(problem)
        self.exhausted = False  # nothing that is cheaper than the best is left
        self.rng = np.random.default_rng(0)
        self.core: Core
        self.flat: Flat

    def stage(self, name: str, step, *args):
        start = time.monotonic()
        result = step(*args)
        times = self.stats.setdefault("stage_s", {})
        times[name] = times.get(name, 0.0) + time.monotonic() - start
        return result

    def offer(self, choices: tuple[int, ...]) -> bool:
        objective = self.problem.objective_s(choices)
        if objective >= self.objective:
            return False
        limit = self.problem.usage_limit_bytes
        if limit is not None and self.problem.peak_bytes(choices) > limit:
            return False
        self.best, self.objective = choices, objective
        return True

    def reduce(self) -> None:
        self.core = Core(self.problem)
        self.core.reduce(self.clock.expired)
        self._flatten()

    def _flatten(self) -> None:
        self.flat = Flat.of(self.core)
        self.stats["removed"] = dict(self.core.removed)
        self.stats["core_nodes"] = len(self.flat.sizes)
        self.stats["core_pairs"] = len(self.flat.edge_costs)

    def improve_and_prove(self) -> None:
        """Messages, pruning and the programs in turn until the gap closes; then polishing."""
        search = self.stage("search", self._start)
        dual = self._dual(search, None)
        stalled = 0
        for k in range(ROUNDS):
            if self._done():
                return
            before = self.bound
            self.stage("messages", self._pass_messages, dual, search, SWEEPS[min(k, 2)])
            self.log(k, dual, search)
            if self._done():
                return
            if self.best and self.stage("prune", self._prune_nodes, dual):
                search, dual = self._restart(search, dual)
                continue
            small = len(self.flat.edge_costs) <= PROGRAM_PAIRS
            stalled = stalled + 1 if self.bound - before < 1e-3 * abs(self.bound) else 0
            if k < 1 or not (stalled or dual.prices.any()):
                continue
            if small:
                break
            if stalled > 3:
                break
            self.stage("kernel", self._kernel, dual, search)
        self._finish(search)

    def _finish(self, search: Search) -> None:
        """Relaxation and integer program where the core is small enough, then polishing."""
        for _ in range(4):
            pairs = len(self.flat.edge_costs)
            if pairs > PROGRAM_PAIRS or not self._relax_and_prune(search):
                break
            if self._done():
                return
            search, _ = self._restart(search, None)
            if len(self.flat.edge_costs) > 0.7 * pairs:
                break
        if self._done():
            return
        if len(self.flat.edge_costs) <= PROGRAM_PAIRS:
            self.stage("integer", self._integer)
        while not self._done():
            self.stage("polish", search.polish, 100)
            self._take(search)
            if self.deterministic:
                break

    def _done(self) -> bool:
        return self._proven() or self.clock.expired()

    def _kernel(self, dual: Dual, search: Search) -> None:
        """Solves the programs over each node's most promising strategies only, for prices and choices."""
        core = self.core.copy()
        keep = self._promising(dual, search)
        for i, part in zip(self.flat.names.tolist(), self.flat.split(keep), strict=True):
            if not part.all():
                core.restrict(i, part)
        try:
            core.reduce(self.clock.expired)
        except Infeasible:
            return
        flat = Flat.of(core)
        if self.clock.expired() or not len(flat.sizes):
            return
        x = flat.restart(core, self.best) if self.best else np.zeros(len(flat.sizes), np.int64)
        scale = self.objective - core.constant_s if self.best else flat.objective(x)
        program = Program(
            flat, scale if math.isfinite(scale) else 1.0, self.problem.usage_limit_bytes or 1.0
        )
        relaxed = program.relax(self.clock.left_s() / 2)
        if relaxed is None or relaxed.objective == math.inf:
            return
        self.log_kernel(flat, relaxed, core)
        rows = np.searchsorted(self.core.row_names, core.row_names)
        prices = np.zeros(len(self.core.row_names))
        prices[rows] = relaxed.prices
        dual.reprice(prices)
        dual.settle()
        search.prices = prices.copy()
        share = self.clock.left_s() / (2 if self.deterministic else 6)
        answer = program.solve(share, 200 if self.deterministic else None, 1e-3)
        for values in (relaxed.values, answer.choices):
            if values is None:
                continue
            x = values
            if values.dtype != np.int64:
                x = np.array([int(np.argmax(v)) for v in flat.split(values)], np.int64)
            search.x = self.flat.restart(self.core, flat.expand(core, x))
            search.offer(search.x)
        search.fit(10)
        search.prices = prices.copy()
        search.polish(20)
        self._take(search)

    def _promising(self, dual: Dual, search: Search) -> np.ndarray:
        """Returns where a strategy [V] is among those of least excess, `KERNEL_PAIRS` pairs in all."""
        flat = self.flat
        chosen = np.zeros(len(flat.costs), bool)
        for x in (search.x, search.best, dual.decode()):
            if x is not None:
                chosen[flat.start[:-1] + x] = True
        order = np.sort(dual.excess)
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            keep = chosen | (dual.excess <= order[middle])
            count = np.add.reduceat(keep, flat.start[:-1])
            if float(count[flat.edge_a] @ count[flat.edge_b]) > KERNEL_PAIRS:
                high = middle
            else:
                low = middle
        return chosen | (dual.excess <= order[low])

    def log_kernel(self, flat, relaxed, core):
        if __import__("os").environ.get("SLOG"):
            print('kernel', round(self.clock.limit_s-self.clock.left_s(),1), len(flat.sizes),len(flat.edge_costs), relaxed.objective+core.constant_s, int(((relaxed.values>1e-6)&(relaxed.values<1-1e-6)).sum()),flush=True)

    def log(self, k, dual, search):
        if __import__("os").environ.get("SLOG"):
            print(k, round(self.clock.limit_s-self.clock.left_s(),1), 'nodes',len(self.flat.sizes),'pairs',len(self.flat.edge_costs),'bound',self.bound,'best',self.objective,'step',dual._step,'rows',len(dual._rows),'x',self.core.constant_s+self.flat.objective(search.x),'over',self.flat.excess(search.x)/(self.problem.usage_limit_bytes or 1), 'prunable', float((dual.excess+dual.excess_bound>self.objective-self.core.constant_s).mean()),flush=True)

    def _start(self) -> Search:
        flat = self.flat
        if self.best:
            x = flat.restart(self.core, self.best)
        else:
            x = np.array([int(np.argmin(c)) for c in flat.split(flat.costs)], np.int64)
        search = self._new_search(x, np.zeros(len(flat.room_bytes)))
        search.fit(1)
        self._take(search)
        return search

    def _new_search(self, x: np.ndarray, prices: np.ndarray) -> Search:
        limit = self.problem.usage_limit_bytes or 1.0
        return Search(self.flat, x, prices, self.rng, limit, self.clock.expired)

    def _restart(self, old: Search, dual: Dual | None) -> tuple[Search, Dual | None]:
        """The same search and messages after the core has shrunk."""
        rows = np.searchsorted(self._old_rows, self.core.row_names)
        x = self.flat.restart(self.core, self.best)
        search = self._new_search(x, old.prices[rows])
        search.offer(x)
        if not len(self.flat.sizes):
            self._take(search)
        return search, None if dual is None else self._dual(search, dual)

    def _dual(self, search: Search, old: Dual | None) -> Dual:
        dual = Dual(self.flat, search.prices)
        names = dual.names(self.core)
        if old is not None:
            dual.inherit(old, self._message_names, names)
        self._message_names = names
        return dual

    def _pass_messages(self, dual: Dual, search: Search, sweeps: int) -> None:
        """Sweeps, each with choices read off, improved, and prices moved after them."""
        every = np.arange(len(self.flat.sizes))
        for k in range(sweeps):
            if self.clock.expired():
                break
            bound = self.core.constant_s + dual.sweep()
            self.bound = max(self.bound, min(bound, self.objective))
            costs = self.flat.split(self.flat.priced(dual.prices))
            x = improve(self.flat, costs, dual.decode(), every, search.rank(k))
            search.x = x
            search.offer(x)
            target = search.best_objective
            if math.isinf(target):
                target = dual.bound + 0.1 * abs(dual.bound)
            if len(dual.prices) and not dual.settled:
                dual.adjust(self.flat.used(x), target)
        search.prices = dual.prices.copy()
        if search.best is None:
            search.fit(10)
        search.polish(5)
        self._take(search)

    def _prune_nodes(self, dual: Dual) -> bool:
        """Removes strategies that the messages rule out, if they are many."""
        limit = self.objective - self.core.constant_s
        limit += 1e-9 * abs(self.objective)
        hopeless = dual.excess + dual.excess_bound > limit
        if hopeless.mean() < 0.1:
            return False
        self._remove(hopeless)
        return True

    def _remove(self, hopeless: np.ndarray) -> None:
        names = self.flat.names.tolist()
        self._old_rows = self.core.row_names
        for i, out in zip(names, self.flat.split(hopeless), strict=True):
            if out.any():
                self.core.restrict(i, ~out)
        removed = self.core.removed
        removed["pruned"] = removed.get("pruned", 0) + int(np.count_nonzero(hopeless))
        self.core.reduce(self.clock.expired)
        self._flatten()

    def _take(self, search: Search) -> None:
        if search.best is not None:
            self.offer(self.flat.expand(self.core, search.best))
        if not len(self.flat.sizes):
            self.exhausted = True

    def _relax_and_prune(self, search: Search) -> bool:
        """Raises the bound; returns whether pruning made the core smaller."""
        relaxed = self.stage("relax", self._relax, search)
        if relaxed is None:
            self.clock.expired()
            return False
        bound = self.core.constant_s + relaxed.objective
        self.bound = max(self.bound, min(bound, self.objective))
        x = np.array([int(np.argmax(v)) for v in self.flat.split(relaxed.values)], np.int64)
        search.x, search.prices = x, relaxed.prices.copy()
        self.stage("search", search.fit, 20)
        self.stage("search", search.polish, 50)
        self._take(search)
        if self.objective == math.inf or self._proven():
            return False
        return self.stage("prune", self._prune, relaxed, self.objective - bound)

    def _relax(self, search: Search) -> Relaxed | None:
        """Solves the relaxation, twice if the cost turns out to be far from the scale guessed."""
        scale = self._scale(search.x)
        while True:
            program = Program(self.flat, scale, self.problem.usage_limit_bytes or 1.0)
            relaxed = program.relax(self.clock.left_s())
            if relaxed is None:
                return None
            if relaxed.objective == math.inf:
                raise Infeasible
            if abs(relaxed.objective) <= 100 * scale:
                return relaxed
            scale = abs(relaxed.objective)

    def _scale(self, x: np.ndarray) -> float:
        """Returns a cost of the size of the core's optimum, as far as is known; 1 if nothing is."""
        known = [self.objective - self.core.constant_s, self.flat.objective(x)]
        known.append(self.bound - self.core.constant_s)
        sizes = [abs(v) for v in known if math.isfinite(v)]
        return max(sizes, default=0.0) or 1.0

    def _prune(self, relaxed: Relaxed, room_s: float) -> bool:
        """Removes strategies and pairs that would raise the bound above the best cost by more than rounding."""
        flat, core = self.flat, self.core
        allowed = room_s + 1e-6 * (abs(self.objective) + abs(room_s))
        names = flat.names.tolist()
        for a, b, start in zip(
            flat.edge_a.tolist(), flat.edge_b.tolist(), flat.edge_start.tolist(), strict=True
        ):
            shape = core.edges[names[a]][names[b]].shape
            pairs = relaxed.pair_excess[start : start + shape[0] * shape[1]] > allowed
            if pairs.any():
                core.forbid(names[a], names[b], pairs.reshape(shape))
        self._remove(relaxed.node_excess > allowed)
        return True

    def _integer(self) -> None:
        if not len(self.flat.sizes):
            self.exhausted = True
            self.offer(self.flat.expand(self.core, np.zeros(0, np.int64)))
            return
        start = np.array([int(np.argmin(c)) for c in self.flat.split(self.flat.costs)], np.int64)
        program = Program(
            self.flat, self._scale(start), self.problem.usage_limit_bytes or 1.0
        )
        for _ in range(5):
            left = self.clock.left_s()
            answer = program.solve(left, 20_000 if self.deterministic else None, GAP / 10)
            if answer.infeasible:
                if self.best:  # the best choices are still in the core: only rounding can say so
                    break
                raise Infeasible
            bound = self.core.constant_s + answer.bound
            self.bound = max(self.bound, min(bound, self.objective))
            if answer.choices is None:
                break
            excess = self.flat.excess(answer.choices)
            if excess <= 0:
                self.offer(self.flat.expand(self.core, answer.choices))
                self.exhausted = answer.proven
                break
            # Only the engine's tolerance can let it exceed a row by so little.
            program.room_bytes = program.room_bytes - 2 * excess
        self.clock.expired()

    def _proven(self) -> bool:
        gap = self.objective - self.bound
        return self.exhausted or (bool(self.best) and gap <= GAP * abs(self.objective))

    def solution(self) -> Solution:
        self.stats["time_limit_struck"] = self.clock.struck
        if self.best:
            bound = self.objective if self.exhausted else min(self.bound, self.objective)
            status = Status.OPTIMAL if self._proven() else Status.FEASIBLE
            peak = self.problem.peak_bytes(self.best)
            return Solution(self.best, self.objective, bound, status, peak, self.stats)
        status = Status.INFEASIBLE if self.exhausted else Status.UNKNOWN
        bound = math.inf if self.exhausted else self.bound
        return Solution((), math.inf, bound, status, math.nan, self.stats)


def _trivial_bound(problem: ShardingProblem) -> float:
    least = [node.costs_s.min() for node in problem.nodes]
    return math.fsum(least + [edge.costs_s.min() for edge in problem.edges])


def _smallest_peak(problem: ShardingProblem, time_limit_s: float) -> Solution:
    """Row weights by multiplicative updates find a low peak, the integer program the lowest."""
    clock = _Clock(time_limit_s)
    most = math.fsum(u.bytes.max() for u in problem.usages) + 1.0
    bare = _without_costs(problem, most)
    try:
        core = Core(bare, every_row=True)
        core.reduce(clock.expired)
    except Infeasible:
        return Solution((), math.inf, math.inf, Status.INFEASIBLE, math.nan)
    flat = Flat.of(core)
    best, growth = _level(flat, clock)
    bound, proven = -math.inf, not len(flat.sizes)
    if not proven and len(flat.edge_costs) <= PROGRAM_PAIRS and not clock.expired():
        size = most + growth if math.isfinite(growth) else most
        program = Program(flat, size, max(size, 1.0), minimise_peak=True)
        answer = program.solve(clock.left_s(), 2_000, 1e-6)
        if answer.infeasible:
            return Solution((), math.inf, math.inf, Status.INFEASIBLE, math.nan)
        bound, proven = answer.bound, answer.proven
        if answer.choices is not None and not flat.excess(answer.choices) > growth:
            best = answer.choices
    choices = flat.expand(core, best)
    objective = problem.objective_s(choices)
    peak = problem.peak_bytes(choices)
    stats = {"peak_bound_bytes": peak if proven else max(0.0, most + bound)}
    stats["time_limit_struck"] = clock.expired()
    if objective == math.inf:  # every way out of the forbidden pairs was missed
        return Solution((), math.inf, -math.inf, Status.UNKNOWN, math.nan, stats)
    status = Status.OPTIMAL if proven else Status.FEASIBLE
    return Solution(choices, objective, -math.inf, status, peak, stats)


def _without_costs(problem: ShardingProblem, limit_bytes: float) -> ShardingProblem:
    """The same choices, forbidden pairs and usages, all costs 0."""
    nodes = [dataclasses.replace(n, costs_s=np.zeros(len(n.costs_s))) for n in problem.nodes]
    edges = [
        dataclasses.replace(e, costs_s=np.where(np.isinf(e.costs_s), np.inf, 0.0))
        for e in problem.edges
    ]
    return dataclasses.replace(
        problem, nodes=tuple(nodes), edges=tuple(edges), usage_limit_bytes=limit_bytes
    )


def _level(flat: Flat, clock: _Clock) -> tuple[np.ndarray, float]:
    """Returns choices of low peak and by how much they exceed the rooms (negative: stay below)."""
    x = np.zeros(len(flat.sizes), np.int64)
    rng = np.random.default_rng(0)
    best, least = x, math.inf
    weights = np.ones(len(flat.room_bytes))
    for _ in range(40):
        if clock.expired() or not len(x):
            break
        costs = flat.split(flat.priced(weights / max(weights.sum(), 1e-30)))
        x = improve(flat, costs, x, np.arange(len(x)), rng.random(len(x)))
        over = flat.used(x) - flat.room_bytes
        peak = float(over.max(initial=-math.inf))
        if math.isfinite(flat.objective(x)) and peak < least:
            best, least = x, peak
        if len(over):
            spread = max(float(np.ptp(over)), 1e-30)
            weights = weights * 0.9 + np.exp(8 * (over - peak) / spread)
    return best, least
