"""The plans that everyone knows, in the same model: a yardstick for ours, and hints for the solver.

Each fixes how arguments lie and along which axes the batch is split, then walks the program once:
what carries the batch keeps it split, everything else takes what is cheapest after its operands.
Data parallel, FSDP and their mixes with a free axis (which the walk fills as it likes) come out.
"""

import dataclasses
import itertools

import numpy as np

from autoshard.cost import Choices, peak
from autoshard.graph import Kind, Op
from autoshard.sharding import Axes, Sharding
from autoshard.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A known plan: its choices, objective and peak in our model."""

    name: str
    choices: tuple[int, ...]
    objective_s: float
    peak_bytes: float

    def __str__(self) -> str:
        return f"{self.name}: {self.objective_s:.6g} s, {self.peak_bytes:.6g} bytes"


def baselines(choices: Choices, carried: tuple[int | None, ...]) -> list[Baseline]:
    """Returns the distinct known plans of a program, in a fixed order.

    Args:
      carried: for each argument, the result that becomes it, or None: what is not carried is the
        batch.
    """
    mesh = choices.topology.mesh
    names = tuple(name for name, size in mesh.axes if size > 1)
    found: dict[tuple[int, ...], Baseline] = {}
    wiring = _Wiring(choices)
    for count in range(len(names), 0, -1):
        for batch in itertools.combinations(names, count):
            rest = tuple(a for a in names if a not in batch)
            for state in dict.fromkeys(((), batch, names)):
                picked = _Walk(choices, carried, wiring, batch, state).run()
                if picked not in found:
                    problem = choices.problem
                    found[picked] = Baseline(
                        _name(batch, state, rest),
                        picked,
                        problem.objective_s(picked),
                        peak(choices, picked)[0],
                    )
    return list(found.values())


def _name(batch: Axes, state: Axes, rest: Axes) -> str:
    kind = f"FSDP over {','.join(state)}" if state else "replicated state"
    return f"batch over {','.join(batch)}, {kind}" + (f", {','.join(rest)} free" if rest else "")


class _Wiring:
    """What every walk asks of each operation; of those that share a choice, of the first."""

    def __init__(self, choices: Choices):
        self.choices, fold = choices, choices.fold
        count = len(choices.ops)
        self.members = list(range(count)) if fold is None else fold.members.tolist()
        self.classes = list(range(count)) if fold is None else fold.classes.tolist()
        problem = choices.problem
        edges: dict[int, list[tuple[int, np.ndarray, bool]]] = {i: [] for i in self.members}
        for k in np.flatnonzero(np.isin(np.maximum(*problem.ends), self.members)).tolist():
            edge = problem.edges[k]
            source, reader = min(edge.a, edge.b), max(edge.a, edge.b)
            edges[reader].append((self.classes[source], edge.costs_s, edge.a < edge.b))
        # Edges to earlier classes: (class, costs, whether it is the edge's first).
        self.incoming = list(edges.values())
        self.sources = [[c for c, _, _ in near] for near in self.incoming]
        self.operands = [self._operands(choices.ops[i]) for i in self.members]
        numbers: dict[tuple, int] = {}
        forms = (
            (id(choices.strategies[i]), id(problem.nodes[i].costs_s), *(id(m) for _, m, _ in near))
            for i, near in edges.items()
        )
        # The same number for classes with equal strategies and costs.
        self.alike = [numbers.setdefault(form, len(numbers)) for form in forms]

    def _operands(self, op: Op) -> list[tuple[int, tuple[int, int]]]:
        """Returns (operand number, (class, result number)) of each operand."""
        found = []
        for k, value in enumerate(op.operands):
            if value is not None:
                i, r = self.choices.producer[value]
                found.append((k, (self.classes[i], r)))
        return found

    def all(self, picked: list[int]) -> tuple[int, ...]:
        """Returns the choices of all operations from those of the classes."""
        return tuple([picked[c] for c in self.classes])


class _Walk:
    """One pass in execution order; `batch_dim` holds the batch dim of each value, by class and
    result number, that has one."""

    def __init__(self, choices: Choices, carried, wiring: _Wiring, batch: Axes, state: Axes):
        self.choices, self.carried, self.batch, self.state = choices, carried, batch, state
        self.batch_dim: dict[tuple[int, int], int] = {}
        self.splits: dict[tuple[int, int, int], np.ndarray] = {}
        self.picked: list[int] = []
        self.wiring = wiring
        self.known: dict[tuple, int] = {}  # what operations that are alike pick

    def run(self) -> tuple[int, ...]:
        picked, wiring = self.picked, self.wiring
        for c, i in enumerate(wiring.members):
            op, strategies = self.choices.ops[i], self.choices.strategies[i]
            if op.kind is Kind.INPUT:
                picked.append(self._best(c, self._input(op, strategies)))
                if self.carried[int(op.path.removeprefix("in"))] is None:
                    self._label(c, strategies[picked[c]])
                continue
            known = self.batch_dim
            labels = tuple([(k, known[v]) for k, v in wiring.operands[c] if v in known])
            key = (wiring.alike[c], labels, *[picked[s] for s in wiring.sources[c]])
            if key not in self.known:
                self.known[key] = self._best(c, self._kept(strategies, labels))
            picked.append(self.known[key])
            if labels:
                self._label(c, strategies[picked[c]])
        return wiring.all(picked)

    def _best(self, c: int, allowed: np.ndarray) -> int:
        costs = self.choices.problem.nodes[self.wiring.members[c]].costs_s
        for j, matrix, is_ahead in self.wiring.incoming[c]:
            costs = costs + (matrix[self.picked[j]] if is_ahead else matrix[:, self.picked[j]])
        positions = np.flatnonzero(allowed) if allowed.any() else np.arange(len(costs))
        return int(positions[np.argmin(costs[positions])])

    def _input(self, op: Op, strategies: tuple[Strategy, ...]) -> np.ndarray:
        """The state lies whole or is split along its largest dim, the batch along its first."""
        index, shape = int(op.path.removeprefix("in")), op.results[0].shape
        is_state = self.carried[index] is not None
        axes = self.state if is_state else self.batch
        order = sorted(range(len(shape)), key=lambda d: (-shape[d], -d)) if is_state else [0]
        for d in order if shape else []:
            dims: list[Axes] = [()] * len(shape)
            dims[d] = axes
            wanted = [s.results[0] == Sharding(tuple(dims)) for s in strategies]
            if any(wanted):
                return np.array(wanted)
        return np.array([s.results[0].is_replicated for s in strategies])

    def _kept(self, strategies: tuple[Strategy, ...], labels) -> np.ndarray:
        """Which strategies split each operand's batch dim, and no other, along the batch axes."""
        kept = np.ones(len(strategies), bool)
        for k, d in labels:
            key = (id(strategies), k, d)
            if key not in self.splits:
                self.splits[key] = np.array([self._splits(s.operands[k], d) for s in strategies])
            kept &= self.splits[key]
        return kept

    def _splits(self, sharding: Sharding, dim: int) -> bool:
        """Whether the batch axes, all of them, split this dim and no other."""
        return sharding.dims[dim] == self.batch and not any(
            a in axes for e, axes in enumerate(sharding.dims) if e != dim for a in self.batch
        )

    def _label(self, c: int, strategy: Strategy) -> None:
        for k, partial in enumerate(strategy.partial):
            for d, axes in enumerate(partial.dims):
                if axes == self.batch:
                    self.batch_dim[c, k] = d
