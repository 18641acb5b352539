"""Composes the rules of several ops into one, by unifying factors through the values between them.

A factor is a node; two nodes that meet in the same dim of a value become one. A reshape may make a
node meet several smaller ones: then it is split into them. What cannot be matched exactly is marked
as needing replication, which is always right.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence

from autoshard.factors import Kind, Rule, rule_from_arrays

Nodes = list[int]
ArrayNodes = list[Nodes]


class Limit(enum.IntEnum):
    """What an op on the way demands of a factor, the strongest demand wins."""

    NONE = 0
    PERMUTE = 1
    REPLICATE = 2
    UNKNOWN = 3


@dataclasses.dataclass(frozen=True)
class OpFactors:
    """One op's rule: factor ids of each dim, sizes, demands and how it reduces a factor."""

    operands: Sequence[Sequence[Sequence[int]]]
    results: Sequence[Sequence[Sequence[int]]]
    sizes: Sequence[int]
    limits: Sequence[Limit]
    reductions: Sequence[str | None]


class Composition:
    """Factors of many values and which of them are the same."""

    def __init__(self):
        self._parent: list[int] = []
        self._parts: list[Nodes | None] = []
        self._size: list[int] = []
        self._limit: list[Limit] = []
        self._resized: list[bool] = []
        self._reductions: list[tuple[str, ...]] = []

    def new_factor(self, size: int, limit: Limit = Limit.NONE, reduction: str | None = None) -> int:
        self._parent.append(len(self._parent))
        self._parts.append(None)
        self._size.append(size)
        self._limit.append(limit)
        self._resized.append(False)
        self._reductions.append((reduction,) if reduction else ())
        return len(self._parent) - 1

    def new_array(self, shape: Sequence[int], limit: Limit = Limit.NONE) -> ArrayNodes:
        """Returns an array whose dims are factors of their own."""
        return [[] if n == 1 else [self.new_factor(n, limit)] for n in shape]

    def apply(
        self,
        op: OpFactors,
        operands: Sequence[ArrayNodes],
        operand_shapes: Sequence[Sequence[int]],
        result_shapes: Sequence[Sequence[int]],
    ) -> list[ArrayNodes]:
        """Adds an op that reads `operands`, and returns its results."""
        nodes = [
            self.new_factor(size, limit, reduction)
            for size, limit, reduction in zip(op.sizes, op.limits, op.reductions, strict=True)
        ]
        arrays = (*op.operands, *op.results), (*operand_shapes, *result_shapes)
        for dims, shape in zip(*arrays, strict=True):
            for dim, n in zip(dims, shape, strict=True):
                if len(dim) == 1 and n != 1 and op.sizes[dim[0]] != n:
                    self._resize(nodes[dim[0]], n)
        for dims, array, shape in zip(op.operands, operands, operand_shapes, strict=True):
            own = [self._op_dim(nodes, dim, n) for dim, n in zip(dims, shape, strict=True)]
            self.unify(own, array)
        results = [
            [self._op_dim(nodes, dim, n) for dim, n in zip(dims, shape, strict=True)]
            for dims, shape in zip(op.results, result_shapes, strict=True)
        ]
        for array in (*operands, *results):
            self._limit_repeated(array)
        return results

    def unify(self, a: ArrayNodes, b: ArrayNodes) -> None:
        """States that two arrays are the same, dim by dim."""
        for dim_a, dim_b in zip(a, b, strict=True):
            self._unify_dim(dim_a, dim_b)
        self._limit_repeated(a)

    def restrict(self, arrays: Iterable[ArrayNodes], limit: Limit) -> None:
        """Puts a limit on every factor of some arrays."""
        for array in arrays:
            for dim in array:
                for node in self._resolve(dim):
                    self._limit[node] = max(self._limit[node], limit)

    def is_unknown(self, arrays: Iterable[ArrayNodes]) -> bool:
        """Whether an op without a rule touched one of these arrays."""
        return any(
            self._limit[node] is Limit.UNKNOWN
            for array in arrays
            for dim in array
            for node in self._resolve(dim)
        )

    def rule(self, operands: Sequence[ArrayNodes], results: Sequence[ArrayNodes]) -> Rule:
        """Returns the rule from some arrays to others."""
        for array in (*operands, *results):
            self._limit_repeated(array)
        ins = [[self._resolve(dim) for dim in array] for array in operands]
        outs = [[self._resolve(dim) for dim in array] for array in results]
        in_operands = {f for array in ins for dim in array for f in dim}
        in_results = {f for array in outs for dim in array for f in dim}
        order = list(dict.fromkeys(f for array in (*ins, *outs) for dim in array for f in dim))
        reducing = [f for f in order if f in in_operands and f not in in_results]
        reduction = next((self._reductions[f][0] for f in reducing if self._reducible(f)), "add")
        kinds = {f: self._kind(f, f in in_results, reduction) for f in order}
        return rule_from_arrays(ins, outs, {f: self._size[f] for f in order}, kinds, reduction)

    def _reducible(self, node: int) -> bool:
        return self._limit[node] is Limit.NONE and len(self._reductions[node]) == 1

    def _kind(self, node: int, in_results: bool, reduction: str) -> Kind:
        reductions = self._reductions[node]
        if in_results and not reductions:
            return (Kind.PASS, Kind.PERMUTE, Kind.REPLICATE, Kind.REPLICATE)[self._limit[node]]
        if not in_results and reductions == (reduction,) and self._limit[node] is Limit.NONE:
            return Kind.REDUCE
        # Reduced inside and present in a result: the op talks in its middle. In no result and not
        # reduced: sharding it would save nothing.
        return Kind.REPLICATE

    def _op_dim(self, nodes: Nodes, dim: Sequence[int], size: int) -> Nodes:
        if size == 1:
            return []
        found = [nodes[f] for f in dim if self._size[nodes[f]] != 1 or self._resized[nodes[f]]]
        exact = math.prod(self._size[node] for node in found) == size
        if exact and not (len(found) > 1 and any(self._resized[node] for node in found)):
            return found
        # A strided convolution's dim is (window position, kernel position), which overlap unless
        # the kernel fits the stride: then only the first is a block of it.
        self.restrict([[found[1:]]], Limit.REPLICATE)
        for node in found[:1]:
            self._resize(node, size)
        return found[:1]

    def _resize(self, node: int, size: int) -> None:
        self._resized[node] = True
        self._size[node] = max(self._size[node], size)
        self._limit[node] = max(self._limit[node], Limit.PERMUTE)

    def _find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def _resolve(self, dim: Iterable[int]) -> Nodes:
        """Returns the dim's factors as they are now, split and merged."""
        found: Nodes = []
        for node in dim:
            root = self._find(node)
            parts = self._parts[root]
            found.extend([root] if parts is None else self._resolve(parts))
        return found

    def _merge(self, a: int, b: int) -> None:
        if a == b:
            return
        self._parent[b] = a
        self._size[a] = max(self._size[a], self._size[b])
        self._limit[a] = max(self._limit[a], self._limit[b])
        self._resized[a] = self._resized[a] or self._resized[b]
        both = self._reductions[a] + self._reductions[b]
        self._reductions[a] = tuple(dict.fromkeys(both))

    def _split(self, node: int, major: int) -> Nodes:
        if self._size[node] == major:
            return [node]
        parts = [
            self.new_factor(size, self._limit[node]) for size in (major, self._size[node] // major)
        ]
        for part in parts:
            self._reductions[part] = self._reductions[node]
        self._parts[node] = parts
        return parts

    def _unify_dim(self, a: Sequence[int], b: Sequence[int]) -> None:
        left, right = self._resolve(a), self._resolve(b)
        if any(self._resized[node] for node in (*left, *right)):
            if len(left) == len(right) == 1:
                self._merge(left[0], right[0])
            else:
                self.restrict([[left], [right]], Limit.REPLICATE)
            return
        while left and right:
            left, right = self._resolve(left), self._resolve(right)
            p, q = left[0], right[0]
            if p != q:
                major = math.gcd(self._size[p], self._size[q])
                if major in (0, 1) and self._size[p] != self._size[q]:
                    break
                left[:1], right[:1] = self._split(p, major), self._split(q, major)
                self._merge(left[0], right[0])
            left, right = left[1:], right[1:]
        self.restrict([[left], [right]], Limit.REPLICATE)

    def _limit_repeated(self, array: ArrayNodes) -> None:
        """An axis shards one dim of an array only, so a factor on two dims cannot be sharded."""
        seen: set[int] = set()
        for dim in array:
            for node in self._resolve(dim):
                if node in seen:
                    self._limit[node] = max(self._limit[node], Limit.REPLICATE)
                seen.add(node)
