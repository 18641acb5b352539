"""What a rule is: an einsum over the factors (loop indices) of one equation.

The running example is a matrix product, whose rule is `i k, k j -> i j {i=32, k=64:reduce, j=128}`.
A dim that is made of several factors is written in parentheses, major first: `(i j) k -> i j k`.

Sharding a factor over mesh axes means that every dim carrying it is split into equal blocks.

Invariants: the sizes of a dim's factors multiply to the dim's size, except that a permutation or
need-replication factor alone in its dim may stand for dims of different sizes (slice, pad);
a factor appears at most once in an array; a dim of size 1 carries no factor.
"""

import dataclasses
import enum
import itertools
import math
import string
from collections.abc import Iterator, Sequence

Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


class Kind(enum.Enum):
    """How a factor may be sharded.

    PASS: each device computes its block alone.
    REDUCE: each device computes a partial result, to be combined over the factor's axes.
    REPLICATE: the op needs the whole extent on every device.
    PERMUTE: blocks can be sharded but exchange data (halo, shift, reversal).
    """

    PASS = "pass"
    REDUCE = "reduce"
    REPLICATE = "replicate"
    PERMUTE = "permute"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Factors of each dim of each operand and result, major to minor within a dim.

    `sizes` and `kinds` have one entry a factor, `reduction` names how partial results combine.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    reduction: str = "add"

    @property
    def is_replicated(self) -> bool:
        """Whether no factor can be sharded."""
        return all(kind is Kind.REPLICATE for kind in self.kinds)

    def check(
        self,
        operand_shapes: Sequence[tuple[int, ...]],
        result_shapes: Sequence[tuple[int, ...]],
    ) -> str | None:
        """Returns what is wrong with this rule for arrays of these shapes, or None."""
        if len(self.sizes) != len(self.kinds):
            return f"{self} has {len(self.sizes)} sizes and {len(self.kinds)} kinds"
        for noun, arrays, shapes in (
            ("operand", self.operands, operand_shapes),
            ("result", self.results, result_shapes),
        ):
            if len(arrays) != len(shapes):
                return f"{self} has {len(arrays)} {noun}s, wanted {len(shapes)}"
            for n, (dims, shape) in enumerate(zip(arrays, shapes, strict=True)):
                fault = self._check_array(dims, shape)
                if fault:
                    return f"{noun} {n} of {self}: {fault}"
        return self._check_kinds()

    def _check_array(self, dims: Dims, shape: tuple[int, ...]) -> str | None:
        if len(dims) != len(shape):
            return f"{len(dims)} dims, wanted {len(shape)}"
        flat = list(itertools.chain.from_iterable(dims))
        if len(set(flat)) != len(flat):
            return "a factor appears twice"
        for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
            if any(not 0 <= f < len(self.sizes) for f in dim):
                return f"dim {d} names a factor that does not exist"
            resized = len(dim) == 1 and self.kinds[dim[0]] in (Kind.PERMUTE, Kind.REPLICATE)
            if math.prod(self.sizes[f] for f in dim) != n and not resized and (dim or n > 1):
                return f"the factors of dim {d} multiply to another size than {n}"
        return None

    def _check_kinds(self) -> str | None:
        in_operands = {f for dims in self.operands for dim in dims for f in dim}
        in_results = {f for dims in self.results for dim in dims for f in dim}
        for f, kind in enumerate(self.kinds):
            name = factor_name(f)
            if f not in in_operands and f not in in_results:
                return f"factor {name} of {self} is in no array"
            if kind is Kind.REDUCE and (f in in_results or f not in in_operands):
                return f"factor {name} of {self} reduces, so it must be in operands only"
            if kind is Kind.PASS and f not in in_results:
                return f"factor {name} of {self} passes through, so it must be in a result"
        return None

    def __str__(self) -> str:
        """`i j, j k -> i k {i=32, j=64:reduce, k=128}`; a scalar is `.`, a size-1 dim `1`."""
        operands = ", ".join(_array_text(dims) for dims in self.operands)
        results = ", ".join(_array_text(dims) for dims in self.results)
        factors = ", ".join(self._factor_text(f) for f in range(len(self.sizes)))
        return f"{operands} -> {results}" + (f" {{{factors}}}" if factors else "")

    def _factor_text(self, factor: int) -> str:
        kind = self.kinds[factor]
        suffix = "" if kind is Kind.PASS else f":{kind.value}"
        if kind is Kind.REDUCE and self.reduction != "add":
            suffix += f"({self.reduction})"
        return f"{factor_name(factor)}={self.sizes[factor]}{suffix}"


def rule_from_arrays(
    operands: Sequence[Sequence[Sequence[int]]],
    results: Sequence[Sequence[Sequence[int]]],
    sizes: dict[int, int],
    kinds: dict[int, Kind],
    reduction: str = "add",
) -> Rule:
    """Returns the rule with the factors renumbered by first appearance, operands first."""
    number: dict[int, int] = {}

    def renumber(arrays) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(number.setdefault(f, len(number)) for f in dim) for dim in dims)
            for dims in arrays
        )

    new_operands, new_results = renumber(operands), renumber(results)
    return Rule(
        new_operands,
        new_results,
        tuple(sizes[f] for f in number),
        tuple(kinds[f] for f in number),
        reduction if Kind.REDUCE in (kinds[f] for f in number) else "add",
    )


def parse_rule(
    text: str,
    operand_shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
    kinds: dict[str, Kind] | None = None,
    reduction: str = "add",
) -> Rule:
    """Reads `i k, k j -> i j` with the sizes from the shapes (dims of one factor).

    `...` at the start of an array stands for the leading dims it does not name, the same in every
    array. A factor named in `kinds` has that kind; another is REDUCE if it is in operands only.
    """
    left, _, right = text.partition("->")
    names: dict[str, int] = {}
    sizes: dict[int, int] = {}

    def read(side: str, shapes: Sequence[tuple[int, ...]]) -> list[list[list[int]]]:
        arrays = []
        for part, shape in zip(side.split(","), shapes, strict=True):
            words = part.split()
            if words and words[0] == "...":
                words = [f"_{d}" for d in range(len(shape) - len(words) + 1)] + words[1:]
            words = [w for w in words if w != "."]
            dims: list[list[int]] = []
            for word, n in zip(words, shape, strict=True):
                if word == "1" or n == 1:
                    dims.append([])
                    continue
                factor = names.setdefault(word, len(names))
                sizes[factor] = max(n, sizes.get(factor, 0))
                dims.append([factor])
            arrays.append(dims)
        return arrays

    operands, results = read(left, operand_shapes), read(right, result_shapes)
    in_results = {f for dims in results for dim in dims for f in dim}
    factor_kinds = {
        f: (kinds or {}).get(name, Kind.PASS if f in in_results else Kind.REDUCE)
        for name, f in names.items()
    }
    return rule_from_arrays(operands, results, sizes, factor_kinds, reduction)


def same_arrays(shapes: Sequence[tuple[int, ...]], operand_count: int) -> Rule:
    """Returns the rule of an identity: result k has the factors of operand k, all pass."""
    counter = itertools.count()
    arrays = [[[] if n == 1 else [next(counter)] for n in shape] for shape in shapes]
    flat = zip(
        itertools.chain.from_iterable(itertools.chain.from_iterable(arrays)),
        (n for shape in shapes for n in shape if n != 1),
        strict=True,
    )
    sizes = dict(flat)
    return rule_from_arrays(arrays[:operand_count], arrays, sizes, dict.fromkeys(sizes, Kind.PASS))


def replicated(
    operand_shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]
) -> Rule:
    """Returns the rule right for any op: each dim is a need-replication factor of its own."""
    counter = itertools.count()
    sizes: dict[int, int] = {}

    def fresh(shape: tuple[int, ...]) -> Iterator[list[int]]:
        for n in shape:
            if n == 1:
                yield []
                continue
            factor = next(counter)
            sizes[factor] = n
            yield [factor]

    operands = [list(fresh(s)) for s in operand_shapes]
    results = [list(fresh(s)) for s in result_shapes]
    return rule_from_arrays(operands, results, sizes, {f: Kind.REPLICATE for f in sizes})


def factor_name(factor: int) -> str:
    """Returns i, j, ..., z, a, ..., h, then i1, j1, ..."""
    letters = string.ascii_lowercase[8:] + string.ascii_lowercase[:8]
    turn, letter = divmod(factor, len(letters))
    return letters[letter] + (str(turn) if turn else "")


def _array_text(dims: Dims) -> str:
    return " ".join(_dim_text(dim) for dim in dims) or "."


def _dim_text(dim: Dim) -> str:
    if not dim:
        return "1"
    names = " ".join(factor_name(f) for f in dim)
    return names if len(dim) == 1 else f"({names})"
