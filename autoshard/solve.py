"""ShardingProblem -> Solution.

The integer program, over one-hot s_i for each node and e_pq for each pair of each edge:

  minimise   sum_i costs_i . s_i + sum_(i,j) costs_ij . e_ij                 `Program._model`
  one-hot    sum_p s_ip = 1                      for each node               `Program._link`
  edge       sum_q e_pq = s_ip                   for each p of (i, j)        `Program._link`
             sum_p e_pq = s_jq                   for each q of (i, j)        `Program._link`
  memory     sum_(live at t) bytes . s <= limit  for each maximal live set   `Program.add_rows`
  integer    s in {0, 1}; e >= 0 is then integer by itself                   `Program._model`

Before that, `Core.reduce` shrinks the problem without losing the optimum. Messages between nodes
(`Dual`) give a bound, and choices that `Search` improves; memory is priced (`Prices`). Bound and
choices together rule out strategies, which shrinks the core further. What is left, if it is small
enough, goes to the relaxation, whose reduced costs rule out more, and to the integer program.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.bound import Program, Relaxed
from autoshard.clock import Clock
from autoshard.dual import Dual, Told, trivial_bound
from autoshard.kernel import solve_kernel
from autoshard.peak import smallest_peak as smallest_peak
from autoshard.prices import Prices
from autoshard.problem import ShardingProblem, Solution, Status
from autoshard.reduce import Core, Infeasible
from autoshard.search import Flat, Search

GAP = 1e-7  # relative; a smaller one counts as proven
ROUNDS = 60  # of messages and pruning
SWEEPS = (2, 3, 5)  # in the first rounds and in all later ones
POLISH = 300  # regions searched at the end
PRICE_STEPS = 60
PRICE_PATIENCE = 4  # steps that may pass without moving the prices
KERNELS = 3
KERNEL_NODES = 2_000  # of the search tree
INTEGER_WORK = 5_000_000  # edge pairs times nodes of the search tree, where effort is fixed
WIDE_PAIRS = 100_000  # edge pairs up to which the search looks at all strategies
PROMISING = 24  # strategies of a node that it looks at beyond
PROGRAM_PAIRS = 150_000  # edge pairs and edge rows up to which the engine solves the programs
PATIENT_PAIRS = 700_000  # the same where there is time to wait
PROGRAM_ROWS = 40_000


def solve(
    problem: ShardingProblem,
    *,
    time_limit_s: float = 60.0,
    hints: Sequence[Sequence[int]] = (),
    deterministic: bool = True,
    gap: float = GAP,
    cutoff_s: float = math.inf,
    prove: bool = True,
) -> Solution:
    """Returns the cheapest choices found within the limit, with a bound.

    Args:
      problem: what to solve.
      time_limit_s: wall-clock limit.
      hints: choices to start from, one strategy a node each; they need not fit.
      deterministic: spend a fixed effort, so that the answer depends on the problem alone. The time
        limit is then a safety net: `stats["time_limit_struck"]` says whether it made a difference.
      gap: between cost and bound, relative to the cost; choices within it count as optimal.
      cutoff_s: choices that cost more are of no use: stop once the bound is above it.
      prove: try to close the gap with the integer program; False: only if nothing else was found.
    """
    return Run(problem, time_limit_s, hints, deterministic).solve(gap, cutoff_s, prove)


class Run:
    """The solving of one problem: the core, the best choices of the whole problem, and the bound.

    Asked again for a smaller gap it goes on from where it stopped. `told`, the `stats["told"]` of a
    solution of a problem with the same nodes, is where its bound starts.
    """

    def __init__(
        self,
        problem: ShardingProblem,
        time_limit_s: float,
        hints: Sequence[Sequence[int]] = (),
        deterministic: bool = True,
        told: Told | None = None,
    ):
        self.problem = problem
        self.gap = GAP
        self.deterministic = deterministic
        self.clock = Clock(time_limit_s)
        self.stats: dict[str, Any] = {}
        self.best: tuple[int, ...] | None = None
        self.objective = math.inf
        self.cutoff, self.prove = math.inf, True
        self.bound = trivial_bound(problem)
        self.told: Told = told or {}
        self._rounds, self._price_steps, self._kernels = ROUNDS, PRICE_STEPS, KERNELS  # left
        self._decoded = 0
        self.ruled_out: dict[int, list[int]] = {}  # strategies of each node, by the bound
        self.exhausted = False  # nothing that is cheaper than the best is left
        self.rng = np.random.default_rng(0)
        self.core: Core
        self.flat: Flat
        self.dual: Dual | None = None
        self._search: Search | None = None
        for hint in hints:
            problem.check_choices(hint)
            self.offer(tuple(int(p) for p in hint))

    def solve(self, gap: float = GAP, cutoff_s: float = math.inf, prove: bool = True) -> Solution:
        """Returns the best choices so far, after looking for better ones if `gap` asks for it."""
        self.gap, self.cutoff, self.prove = gap, cutoff_s, prove
        try:
            if self._search is not None or (
                not self.exhausted and self.stage("reduce", self.reduce)
            ):
                self.improve_and_prove()
        except TimeoutError:
            pass
        except Infeasible:
            self.exhausted = True
        return self.solution()

    def stage(self, name: str, step, *args):
        start = time.monotonic()
        try:
            return step(*args)
        finally:
            times = self.stats.setdefault("stage_s", {})
            times[name] = times.get(name, 0.0) + time.monotonic() - start

    def offer(self, choices: tuple[int, ...]) -> bool:
        objective = self.problem.objective_s(choices)
        if objective >= self.objective:
            return False
        limit = self.problem.usage_limit_bytes
        if limit is not None and self.problem.peak_bytes(choices) > limit:
            return False
        self.best, self.objective = choices, objective
        return True

    def reduce(self) -> bool:
        """Returns whether there is anything left to choose, and time."""
        self.core = Core(self.problem, expired=self.clock.expired)
        self.core.reduce(self.clock.expired)
        if self.clock.expired():
            return False
        self._flatten()
        if not len(self.flat.sizes):
            self.exhaust()
        return not self.exhausted

    def _flatten(self) -> None:
        self.flat = Flat.of(self.core)
        self._seen = np.zeros(len(self.flat.costs), bool)  # strategies that the search came across
        self.stats["removed"] = dict(self.core.removed)
        self.stats["core_nodes"] = len(self.flat.sizes)
        self.stats["core_pairs"] = len(self.flat.edge_costs)

    def exhaust(self) -> None:
        """Takes the only choices left."""
        self.offer(self.core.expand({}))
        self.exhausted = True

    def improve_and_prove(self) -> None:
        """Messages, pruning and prices until they gain little; then the programs."""
        search = self._search or self.stage("search", self._start)
        dual = self.dual if self._search is not None and self.dual else self._dual(search)
        while self._rounds and not self._done():
            self._rounds -= 1
            sweeps = SWEEPS[min(ROUNDS - 1 - self._rounds, 2)]
            before = dual.last_bound
            self.stage("messages", self._pass_messages, dual, search, sweeps)
            if self._done():
                break
            if self.best is not None and self.stage("prune", self._prune_nodes, dual):
                search, dual = self._restart(search, dual)
                continue
            gained = dual.last_bound - before
            left = self.objective - self.bound if self.best is not None else math.inf
            short = self.best is None and self._price_steps  # of memory: nothing is known to fit
            if gained > min(5e-3 * abs(self.bound), 0.1 * left) and not short:
                continue
            if not self._price_steps:
                if not self._kernels or not self.stage("kernel", self._kernel, dual, search):
                    break
                self._kernels -= 1
                continue
            self.stage("prices", self._set_prices, dual, search, self._price_steps)
            self._price_steps = 0
        self._search = search
        if not self._done() and (self.prove or self.best is None):
            self._search = None  # the core is about to shrink
            self._finish(search)

    def _finish(self, search: Search) -> None:
        """Relaxation and integer program where the core is small enough, then polishing."""
        for _ in range(4):
            pairs = len(self.flat.edge_costs)
            if self._done() or not self._is_small() or not self._relax_and_prune(search):
                break
            search = self._resume(search)
            if len(self.flat.edge_costs) > 0.7 * pairs:
                break
        stuck = self.best is None and len(self.flat.edge_costs) <= PATIENT_PAIRS
        if not self._done() and (stuck or self._is_small()):
            self.stage("integer", self._integer)
        while not self._done():
            self.stage("polish", search.polish, POLISH)
            self._take(search)
            if self.deterministic:
                return

    def _is_small(self) -> bool:
        flat = self.flat
        rows = int((flat.sizes[flat.edge_a] + flat.sizes[flat.edge_b]).sum())
        pairs = PROGRAM_PAIRS if self.deterministic else PATIENT_PAIRS
        return len(flat.edge_costs) <= pairs and rows <= PROGRAM_ROWS

    def _done(self) -> bool:
        return self._proven() or self.bound > self.cutoff or self.clock.expired()

    def _start(self) -> Search:
        flat = self.flat
        if self.best is not None:
            x = flat.restart(self.core, self.best)
        else:
            x = np.array([int(np.argmin(c)) for c in flat.split(flat.costs)], np.int64)
        search = self._new_search(x, np.zeros(len(flat.room_bytes)))
        search.fit(1)
        search.prices = np.zeros(len(flat.room_bytes))
        self._take(search)
        return search

    def _new_search(self, x: np.ndarray, prices: np.ndarray) -> Search:
        limit = self.problem.usage_limit_bytes or 1.0
        return Search(self.flat, x, prices, self.rng, limit, self.clock.expired)

    def _restart(self, search: Search, dual: Dual) -> tuple[Search, Dual]:
        """The same search and messages after the core has shrunk."""
        self.told = dual.told()
        search = self._resume(search)
        return search, self._dual(search)

    def _resume(self, old: Search) -> Search:
        names = self.core.row_names
        prices = np.zeros(len(names))
        if len(names):  # the price of a row that is gone goes to the one that follows it
            place = np.minimum(np.searchsorted(names, self._old_rows), len(names) - 1)
            prices = np.bincount(place, old.prices, len(names))
        x = self.flat.restart(self.core, self.best or ())
        search = self._new_search(x, prices)
        search.offer(x)
        if not len(self.flat.sizes):
            self.exhaust()
        return search

    def _dual(self, search: Search) -> Dual:
        self.dual = Dual(self.flat, search.prices)
        self.dual.inherit(self.told, self.core)
        return self.dual

    def _pass_messages(self, dual: Dual, search: Search, sweeps: int) -> None:
        """Sweeps, and reads choices off the messages: after each, or the last one of a wide core,
        where reading takes longer than sweeping."""
        for left in reversed(range(sweeps)):
            if self.clock.expired():
                break
            self._sweep(dual)
            if left and self._is_wide():
                continue
            self._narrow(dual, search)
            search.x = self._decode(dual, search, dual.decode())
        search.polish(5)
        self._take(search)

    def _sweep(self, dual: Dual) -> None:
        bound = self.core.constant_s + dual.sweep()
        self.bound = max(self.bound, min(bound, self.objective))

    def _narrow(self, dual: Dual, search: Search) -> None:
        """Has the search of a wide core look at what the messages like only."""
        if self._is_wide():
            search.narrow(dual.promising(PROMISING))

    def _is_wide(self) -> bool:
        """Whether nodes have so many strategies that eliminating them is slow."""
        pairs = len(self.flat.edge_costs)
        return pairs > max(WIDE_PAIRS, PROMISING**2 * len(self.flat.edge_a))

    def _decode(self, dual: Dual, search: Search, x: np.ndarray) -> np.ndarray:
        """Improves x for the present prices and offers it."""
        costs = self.flat.split(self.flat.priced(dual.prices))
        every = np.arange(len(self.flat.sizes))
        x = search.improve(costs, x, every, search.rank(self._decoded))
        self._decoded += 1
        search.offer(x)
        self._seen[self.flat.start[:-1] + x] = True
        return x

    def _set_prices(self, dual: Dual, search: Search, steps: int) -> None:
        """Finds prices for the memory, unless what is best without any fits."""
        flat = self.flat
        if not len(flat.room_bytes) or (not dual.prices.any() and flat.excess(search.x) <= 0):
            return
        limit = self.problem.usage_limit_bytes or 1.0
        prices = Prices(flat, limit, self._scale(search.x), dual.prices)
        best_prices, highest = dual.prices, -math.inf
        idle = 0
        for _ in range(steps):
            if self.clock.expired() or idle > PRICE_PATIENCE:
                break
            prices.learn(search.x)
            height = prices.move()
            if np.allclose(prices.values, dual.prices, rtol=1e-3, atol=0.0):
                idle += 1
            else:
                idle = 0
                dual.reprice(prices.values)
            self._sweep(dual)
            self._narrow(dual, search)
            found = [self._decode(dual, search, x) for x in (search.x, dual.decode())]
            search.x = min(found, key=prices.lagrangian)
            if dual.last_bound > highest:
                best_prices, highest = dual.prices, dual.last_bound
            if idle and height - highest < 1e-3 * abs(height):
                break
        dual.reprice(best_prices)
        for factor in (0.8, 0.9, 1.1, 1.2, 1.4, 2.0):
            costs = flat.split(flat.priced(dual.prices * factor))
            search.x = search.improve(costs, search.x, np.arange(len(search.x)), search.rank(0))
            search.offer(search.x)
            self._seen[flat.start[:-1] + search.x] = True
        search.prices = dual.prices.copy()
        if search.best is None:
            search.fit(20)
            search.prices = dual.prices.copy()
        if search.best is None:
            self._find_any(search)
        search.polish(60)
        self._take(search)

    def _find_any(self, search: Search) -> None:
        """Starts from the choices of the least peak, or learns that there are none."""
        least = smallest_peak(self.problem, time_limit_s=self.clock.left_s())
        if least.status is Status.INFEASIBLE:
            raise Infeasible
        if least.choices and self.offer(least.choices):
            search.offer(self.flat.restart(self.core, least.choices))
        elif least.stats["peak_bound_bytes"] > (self.problem.usage_limit_bytes or math.inf):
            raise Infeasible

    def _kernel(self, dual: Dual, search: Search) -> bool:
        """Solves exactly over strategies that the search came across; returns whether it gained."""
        flat = self.flat
        if self.objective - self.bound < 1e-4 * abs(self.bound):
            return False
        keep = self._seen.copy()
        if search.best is not None:
            keep[flat.start[:-1] + search.best] = True
        if not keep.any():
            return False
        limit = self.problem.usage_limit_bytes or 1.0
        parts = dict(zip(flat.names.tolist(), flat.split(keep), strict=True))
        before = self.objective
        share = 1.0 if self.deterministic else 0.25
        for choices in solve_kernel(
            self.core, parts, self.best, limit, self.clock, share, KERNEL_NODES
        ):
            if self.offer(choices):
                search.offer(flat.restart(self.core, choices))
        return self.objective < before

    def _prune_nodes(self, dual: Dual) -> bool:
        """Removes strategies that the messages rule out, if they are many."""
        limit = self.objective - self.core.constant_s
        limit += 1e-9 * abs(self.objective)
        hopeless = dual.excess + dual.excess_bound > limit
        held = sum(len(belief) for belief in dual.messages.beliefs.values())
        if np.count_nonzero(hopeless) < 0.2 * held:
            return False
        self._remove(hopeless)
        return True

    def _remove(self, hopeless: np.ndarray) -> None:
        names = self.flat.names.tolist()
        self._old_rows = self.core.row_names
        for i, out in zip(names, self.flat.split(hopeless), strict=True):
            if out.any():
                self.ruled_out.setdefault(i, []).extend(self.core.kept[i][out].tolist())
                self.core.restrict(i, ~out)
        removed = self.core.removed
        removed["pruned"] = removed.get("pruned", 0) + int(np.count_nonzero(hopeless))
        self.core.reduce(self.clock.expired)
        self._flatten()

    def _take(self, search: Search) -> None:
        if search.best is not None:
            self.offer(self.flat.expand(self.core, search.best))

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
            relaxed = program.relax(self.clock.left_s() / (1 if self.deterministic else 2))
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
        """Removes strategies and pairs that would raise the bound above the best cost."""
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
            return self.exhaust()
        start = np.array([int(np.argmin(c)) for c in self.flat.split(self.flat.costs)], np.int64)
        program = Program(self.flat, self._scale(start), self.problem.usage_limit_bytes or 1.0)
        nodes = None
        if self.deterministic:
            nodes = max(100, INTEGER_WORK // max(1, len(self.flat.edge_costs)))
        for _ in range(5):
            answer = program.solve(self.clock.left_s(), nodes, self.gap / 10)
            if answer.infeasible:
                if self.best is not None:  # it is still in the core: only rounding can say so
                    break
                raise Infeasible
            bound = self.core.constant_s + answer.bound
            self.bound = max(self.bound, min(bound, self.objective))
            if answer.choices is None:
                break
            excess = self.flat.excess(answer.choices)
            if excess <= 0:
                self.offer(self.flat.expand(self.core, answer.choices))
                self.exhausted = answer.proven and self.gap <= GAP
                break
            # Only the engine's tolerance can let it exceed a row by so little.
            program.room_bytes = program.room_bytes - 2 * excess
        self.clock.expired()

    def _proven(self) -> bool:
        gap = self.objective - self.bound
        return self.exhausted or (self.best is not None and gap <= self.gap * abs(self.objective))

    def solution(self) -> Solution:
        self.stats["time_limit_struck"] = self.clock.struck
        self.stats["ruled_out"] = self.ruled_out
        self.stats["told"] = {} if self.dual is None else self.dual.told()
        if self.best is not None:
            bound = self.objective if self.exhausted else min(self.bound, self.objective)
            status = Status.OPTIMAL if self._proven() else Status.FEASIBLE
            peak = self.problem.peak_bytes(self.best)
            return Solution(self.best, self.objective, bound, status, peak, self.stats)
        status = Status.INFEASIBLE if self.exhausted else Status.UNKNOWN
        bound = math.inf if self.exhausted else self.bound
        return Solution((), math.inf, bound, status, math.nan, self.stats)
