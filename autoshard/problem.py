"""The sharding problem as numbers and labels, its solution, and its file form.

Choose one strategy p_i for every node i, so as to minimise

    sum_i costs_s[i][p_i]  +  sum_(a,b) costs_s[a,b][p_a, p_b]            (seconds)

while at every time t the usages of the live choices fit: sum_(live at t) bytes[p] <= limit.

Files are IOPDDL JSON, the form of the ASPLOS 2025 contest on intra-operator parallelism (plain or
gzip), where a cost of 10^18 forbids. Two extensions keep what is ours:

* Each usage after a node's first is written as one more node at the end of the list, with one
  strategy for each distinct size and an edge that forbids every pair but the right ones.
  `followers` lists them, and `read` folds them back. Other readers see an equal problem with more
  nodes.
* `name`, `labels` and `strategies` hold the texts.
"""

import dataclasses
import enum
import functools
import gzip
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.errors import ProblemError
from autoshard.fields import integers, member, vector, vectors
from autoshard.packed import Packed, packed
from autoshard.spans import Spans

FORBIDDEN = 10**18  # the cost by which an IOPDDL file forbids a choice


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One choice. `S` is the number of its strategies."""

    costs_s: np.ndarray  # [S] float64, finite
    label: str = ""
    strategies: tuple[str, ...] = ()  # S texts, or none

    def __str__(self) -> str:
        return f"{self.label or 'node'}: {len(self.costs_s)} strategies"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Edge:
    """A cost for each pair of strategies of nodes `a` and `b`, which may be one node."""

    a: int
    b: int
    costs_s: np.ndarray  # [S of a, S of b] float64; inf forbids the pair

    def __str__(self) -> str:
        return f"{self.a}-{self.b}: {'x'.join(map(str, self.costs_s.shape))}"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Usage:
    """Memory that `node` holds at the times `start <= t < end`."""

    node: int
    start: int
    end: int
    bytes: np.ndarray  # [S of node] float64, finite, not negative
    label: str = ""

    def __str__(self) -> str:
        return f"{self.label or f'node {self.node}'} live in [{self.start}, {self.end})"


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingProblem:
    """Nodes, edges, usages and the limit that no time may exceed; `None` is no limit."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...]
    usage_limit_bytes: float | None
    name: str = ""

    def __str__(self) -> str:
        limit = (
            "no limit" if self.usage_limit_bytes is None else f"{self.usage_limit_bytes:.6g} bytes"
        )
        counts = f"{len(self.nodes)} nodes, {len(self.edges)} edges, {len(self.usages)} usages"
        return f"{self.name or 'problem'}: {counts}, {limit}"

    def check(self) -> None:
        """Raises a ProblemError that names the first field that is wrong."""
        _check(self)

    def check_choices(self, choices: Sequence[int]) -> None:
        """Raises a ProblemError unless `choices` names one existing strategy a node."""
        if len(choices) != len(self.nodes):
            raise ProblemError(
                f"choices: got {len(choices)}, wanted one for each of {len(self.nodes)} nodes"
            )
        for i, (node, p) in enumerate(zip(self.nodes, choices, strict=True)):
            if not 0 <= p < len(node.costs_s):
                raise ProblemError(
                    f"choices[{i}] = {p}, node {i} has {len(node.costs_s)} strategies"
                )

    def objective_s(self, choices: Sequence[int]) -> float:
        """Returns the cost of `choices` (one strategy a node); inf where a pair is forbidden."""
        picked = np.asarray(choices, np.int64)
        if len(picked) != len(self.nodes):
            raise ValueError(f"{len(picked)} choices for {len(self.nodes)} nodes")
        (a, b), own, pairs = self.ends, self.node_costs, self.edge_costs
        columns = np.array([m.shape[1] for m in pairs.distinct], np.int64)[pairs.numbers]
        costs = np.concatenate(
            [
                own.values[own.starts + picked],
                pairs.values[pairs.starts + picked[a] * columns + picked[b]],
            ]
        )
        return math.fsum(costs[costs != 0.0].tolist())

    @functools.cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """`a` and `b` of all edges."""
        a, b = [edge.a for edge in self.edges], [edge.b for edge in self.edges]
        return np.array(a, np.int64), np.array(b, np.int64)

    @functools.cached_property
    def spans(self) -> Spans:
        return Spans.of(self.usages)

    @functools.cached_property
    def node_costs(self) -> Packed:
        return packed(node.costs_s for node in self.nodes)

    @functools.cached_property
    def edge_costs(self) -> Packed:
        return packed(edge.costs_s for edge in self.edges)

    def usage_bytes(self, choices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times [T] at which the usage changes and the bytes [T] from then on."""
        return self.spans.used(choices)

    def peak_bytes(self, choices: Sequence[int]) -> float:
        """Returns the largest usage over time, 0 without usages."""
        _, used = self.usage_bytes(choices)
        return float(used.max(initial=0.0))

    def live_at_peak(self, choices: Sequence[int]) -> list[tuple[Usage, float]]:
        """Returns what is live where the usage peaks first, with its bytes, largest first."""
        times, used = self.usage_bytes(choices)
        if not len(times):
            return []
        t = times[int(np.argmax(used))]
        live = [(u, float(u.bytes[choices[u.node]])) for u in self.usages if u.start <= t < u.end]
        return sorted(live, key=lambda item: -item[1])

    def is_feasible(self, choices: Sequence[int]) -> bool:
        """Whether no forbidden pair is taken and the limit is kept."""
        limit = self.usage_limit_bytes
        return self.objective_s(choices) < math.inf and (
            limit is None or self.peak_bytes(choices) <= limit
        )

    def maximal_live_sets(self) -> list[tuple[int, ...]]:
        """Returns the memory rows: sets of indices into `usages`, none contained in another.

        Only usages that can be above zero count.
        """
        start, end = self.spans.rows()
        rows = int(end.max(initial=0))
        members: list[list[int]] = [[] for _ in range(rows)]
        for u in range(len(self.usages)):
            for r in range(start[u], end[u]):
                members[r].append(u)
        return [tuple(m) for m in members]


class Status(enum.Enum):
    """How a solve ended; the value is what to tell the user."""

    OPTIMAL = "optimal: no choice costs less"
    FEASIBLE = "feasible: not proven that no choice costs less"
    INFEASIBLE = "infeasible: no choice keeps the memory limit and avoids every forbidden pair"
    UNKNOWN = "none found yet: the limit struck first"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Solution:
    """The best choices found and a proof of how good they are."""

    choices: tuple[int, ...]  # one strategy a node; empty when none was found
    objective_s: float  # inf when none was found
    bound_s: float  # no feasible choice costs less
    status: Status
    peak_bytes: float
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, at least 0."""
        if self.objective_s - self.bound_s <= 0:
            return 0.0
        scale = max(abs(self.objective_s), 1e-300)
        return (self.objective_s - self.bound_s) / scale if math.isfinite(scale) else math.inf

    def __str__(self) -> str:
        if not self.choices and self.status in (Status.INFEASIBLE, Status.UNKNOWN):
            return f"{self.status} (bound {self.bound_s:.6g})"
        cost = f"cost {self.objective_s:.9g}, bound {self.bound_s:.9g}, gap {self.gap:.3%}"
        return f"{cost}, peak {self.peak_bytes:.6g} bytes; {self.status}"


def _check(problem: ShardingProblem) -> None:
    sizes = [
        _check_vector(node.costs_s, f"nodes[{i}].costs_s") for i, node in enumerate(problem.nodes)
    ]
    for i, (node, size) in enumerate(zip(problem.nodes, sizes, strict=True)):
        if size == 0:
            raise ProblemError(f"nodes[{i}].costs_s is empty, wanted at least one strategy")
        if node.strategies and len(node.strategies) != size:
            raise ProblemError(
                f"nodes[{i}].strategies has {len(node.strategies)} texts, wanted {size}"
            )
    for k, edge in enumerate(problem.edges):
        for end in (edge.a, edge.b):
            if not 0 <= end < len(sizes):
                raise ProblemError(f"edges[{k}] names node {end}, there are {len(sizes)} nodes")
        wanted = (sizes[edge.a], sizes[edge.b])
        if edge.costs_s.shape != wanted:
            raise ProblemError(
                f"edges[{k}].costs_s has shape {edge.costs_s.shape}, wanted {wanted}"
            )
        if not np.all(edge.costs_s > -math.inf):
            raise ProblemError(
                f"edges[{k}].costs_s holds NaN or -inf, wanted numbers or inf to forbid"
            )
    for k, usage in enumerate(problem.usages):
        if not 0 <= usage.node < len(sizes):
            raise ProblemError(f"usages[{k}].node is {usage.node}, there are {len(sizes)} nodes")
        size = _check_vector(usage.bytes, f"usages[{k}].bytes")
        if size != sizes[usage.node]:
            raise ProblemError(
                f"usages[{k}].bytes has {size} sizes, node {usage.node} has {sizes[usage.node]}"
            )
        if np.any(usage.bytes < 0):
            raise ProblemError(f"usages[{k}].bytes holds {usage.bytes.min():g}, wanted sizes >= 0")
        if usage.start > usage.end:
            raise ProblemError(f"usages[{k}] starts at {usage.start}, after its end {usage.end}")
    limit = problem.usage_limit_bytes
    if limit is not None and not 0 <= limit < math.inf:
        raise ProblemError(f"usage_limit_bytes is {limit}, wanted a finite size >= 0 or None")


def _check_vector(values: np.ndarray, field: str) -> int:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != np.float64:
        raise ProblemError(f"{field}: wanted a float64 vector, got {values!r:.80}")
    if not np.all(np.isfinite(values)):
        raise ProblemError(
            f"{field} holds {values[~np.isfinite(values)][0]}, wanted finite numbers"
        )
    return len(values)


def read(path: str | os.PathLike) -> ShardingProblem:
    """Reads an IOPDDL problem, plain or gzip, with our extensions if present.

    Raises:
      ProblemError: the file is not such a problem; the message names the field.
    """
    try:
        with open(path, "rb") as f:
            data = f.read()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        tree = json.loads(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ProblemError(f"{path}: damaged gzip file ({e}); fetch it again") from None
    except (ValueError, RecursionError) as e:
        raise ProblemError(f"{path}: not JSON ({e})") from None
    try:
        problem = _from_tree(tree)
        problem.check()
    except ProblemError as e:
        raise ProblemError(f"{path}: {e}") from None
    return problem


def write(problem: ShardingProblem, path: str | os.PathLike) -> None:
    """Writes the IOPDDL form with our extensions; gzip when the name ends in `.gz`."""
    problem.check()
    data = json.dumps(_to_tree(problem), separators=(",", ":")).encode()
    with open(path, "wb") as f:
        f.write(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _from_tree(tree: Any) -> ShardingProblem:
    body = member(tree, "problem", dict, "")
    nodes, edges = (member(body, k, dict, "problem.") for k in ("nodes", "edges"))
    intervals = member(nodes, "intervals", list, "problem.nodes.")
    costs = vectors(nodes, "costs", "problem.nodes.")
    sizes = vectors(nodes, "usages", "problem.nodes.")
    for name, values in (("intervals", intervals), ("usages", sizes)):
        if len(values) != len(costs):
            raise ProblemError(
                f"problem.nodes.{name} has {len(values)} entries, problem.nodes.costs {len(costs)}"
            )
    ends = member(edges, "nodes", list, "problem.edges.")
    pairs = vectors(edges, "costs", "problem.edges.")
    if len(ends) != len(pairs):
        raise ProblemError(
            f"problem.edges.nodes has {len(ends)} entries, problem.edges.costs {len(pairs)}"
        )
    spans = [integers(s, 2, f"problem.nodes.intervals[{i}]") for i, s in enumerate(intervals)]
    texts = _texts(body, len(costs))
    read_nodes, read_edges = _read_nodes(costs, texts)
    for k, (end, cost) in enumerate(zip(ends, pairs, strict=True)):
        read_edges.append(_read_edge(k, integers(end, 2, f"problem.edges.nodes[{k}]"), cost, costs))
    usages = _read_usages(spans, sizes, costs, texts["usages"])
    limit = body.get("usage_limit")
    if limit is not None:
        limit = float(vector([limit], "problem.usage_limit")[0])
    name = body.get("name", "")
    if not isinstance(name, str):
        raise ProblemError(f"problem.name is {name!r:.40}, wanted a text")
    problem = ShardingProblem(tuple(read_nodes), tuple(read_edges), tuple(usages), limit, name)
    return _fold_followers(problem, body.get("followers", []))


def _read_nodes(costs: list[np.ndarray], texts: dict[str, list]) -> tuple[list[Node], list[Edge]]:
    """Node costs are finite: a forbidden strategy becomes a self edge with inf on the diagonal."""
    nodes, edges = [], []
    for i, cost in enumerate(costs):
        forbidden = cost >= FORBIDDEN
        if forbidden.any():
            edges.append(Edge(i, i, np.diag(np.where(forbidden, np.inf, 0.0))))
            cost = np.where(forbidden, 0.0, cost)
        nodes.append(Node(cost, texts["nodes"][i], tuple(texts["strategies"][i])))
    return nodes, edges


def _read_edge(k: int, ends: tuple[int, ...], cost: np.ndarray, costs: list[np.ndarray]) -> Edge:
    a, b = ends
    for end in ends:
        if not 0 <= end < len(costs):
            raise ProblemError(f"problem.edges.nodes[{k}] names node {end}, there are {len(costs)}")
    wanted = len(costs[a]) * len(costs[b])
    if len(cost) != wanted:
        raise ProblemError(f"problem.edges.costs[{k}] has {len(cost)} entries, wanted {wanted}")
    return Edge(
        a, b, np.where(cost >= FORBIDDEN, np.inf, cost).reshape(len(costs[a]), len(costs[b]))
    )


def _read_usages(spans: list, sizes: list, costs: list, labels: list) -> list[Usage]:
    usages = []
    for i, ((start, end), size) in enumerate(zip(spans, sizes, strict=True)):
        if len(size) != len(costs[i]):
            raise ProblemError(
                f"problem.nodes.usages[{i}] has {len(size)} entries, wanted {len(costs[i])}"
            )
        if np.any(size < 0):
            raise ProblemError(f"problem.nodes.usages[{i}] holds {size.min():g}, wanted sizes >= 0")
        if start > end or start < 0:
            raise ProblemError(
                f"problem.nodes.intervals[{i}] is [{start}, {end}], wanted 0 <= start <= end"
            )
        if start < end:
            usages.append(Usage(i, start, end, size, labels[i]))
    return usages


def _fold_followers(problem: ShardingProblem, followers: Any) -> ShardingProblem:
    """Undoes what `_unfold_followers` did: the last nodes become usages of their leaders."""
    if not isinstance(followers, list):
        raise ProblemError(f"problem.followers is {followers!r:.40}, wanted a list of pairs")
    count = len(problem.nodes) - len(followers)
    leaders = [integers(f, 1, f"problem.followers[{k}]")[0] for k, f in enumerate(followers)]
    edges = list(problem.edges)
    maps: dict[int, np.ndarray] = {}
    for k, leader in reversed(list(enumerate(leaders))):
        edge = edges.pop() if edges else None
        if edge is None or (edge.a, edge.b) != (leader, count + k) or leader >= count:
            raise ProblemError(
                f"problem.followers[{k}]: edge {len(edges)} must join {leader} and {count + k}"
            )
        if np.any((edge.costs_s == 0).sum(axis=1) != 1):
            raise ProblemError(
                f"problem.edges.costs[{len(edges)}]: a follower's edge must allow one pair a row"
            )
        maps[count + k] = np.argmin(edge.costs_s, axis=1)
    usages = []
    for u in problem.usages:
        if u.node >= count:
            leader = leaders[u.node - count]
            u = Usage(leader, u.start, u.end, u.bytes[maps[u.node]], u.label)
        usages.append(u)
    return dataclasses.replace(
        problem, nodes=problem.nodes[:count], edges=tuple(edges), usages=tuple(usages)
    )


def _to_tree(problem: ShardingProblem) -> dict:
    intervals, sizes, usage_labels = [], [], []
    own: dict[int, Usage] = {}
    extra: list[Usage] = []
    for usage in problem.usages:
        if own.setdefault(usage.node, usage) is not usage:
            extra.append(usage)
    costs: list[list[float]] = [_numbers(node.costs_s) for node in problem.nodes]
    for i, cost in enumerate(costs):
        usage = own.get(i)
        intervals.append([usage.start, usage.end] if usage else [0, 0])
        sizes.append(_numbers(usage.bytes) if usage else [0] * len(cost))
        usage_labels.append(usage.label if usage else "")
    ends = [[edge.a, edge.b] for edge in problem.edges]
    pairs = [_numbers(edge.costs_s.ravel()) for edge in problem.edges]
    for usage in extra:
        distinct, which = np.unique(usage.bytes, return_inverse=True)
        ends.append([usage.node, len(costs)])
        allowed = which[:, None] == np.arange(len(distinct))
        pairs.append(_numbers(np.where(allowed, 0.0, np.inf).ravel()))
        costs.append([0] * len(distinct))
        sizes.append(_numbers(distinct))
        intervals.append([usage.start, usage.end])
        usage_labels.append(usage.label)
    body: dict[str, Any] = {"nodes": {"intervals": intervals, "costs": costs, "usages": sizes}}
    body["edges"] = {"nodes": ends, "costs": pairs}
    limit = problem.usage_limit_bytes
    body |= {} if limit is None else {"usage_limit": _numbers(np.array([limit]))[0]}
    body |= {"name": problem.name} if problem.name else {}
    body |= {"followers": [[usage.node] for usage in extra]} if extra else {}
    empty = [""] * len(extra)
    body["labels"] = {"nodes": [n.label for n in problem.nodes] + empty, "usages": usage_labels}
    body["strategies"] = [list(n.strategies) for n in problem.nodes] + [[] for _ in extra]
    return {"problem": body}


def _numbers(values: np.ndarray) -> list:
    """JSON numbers: integers where exact, as IOPDDL wants, and 10^18 for inf."""
    return [FORBIDDEN if v == math.inf else int(v) if v == int(v) else v for v in values.tolist()]


def _texts(body: dict, count: int) -> dict[str, list]:
    """Labels of nodes and usages and the strategies' texts, empty where the file has none."""
    labels = member({"labels": {}} | body, "labels", dict, "problem.")
    found = {
        "nodes": member({"nodes": [""] * count} | labels, "nodes", list, "problem.labels."),
        "usages": member({"usages": [""] * count} | labels, "usages", list, "problem.labels."),
        "strategies": body.get("strategies", [()] * count),
    }
    for key, texts in found.items():
        if not isinstance(texts, list) or len(texts) != count:
            raise ProblemError(f"problem.labels.{key}: wanted {count} entries, got {texts!r:.40}")
    return found
