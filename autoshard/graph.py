"""The program to plan: operations over values, with nested bodies, in execution order.

A call (jit, checkpoint, custom_jvp, ...) shares its values with its surroundings, so its body
needs no borders. A loop or branch body is a world of its own, joined to the outside by *border*
operations, which say what a
plan may change there:

    ENTER   outside value -> the same value inside a loop       once, before the loop
    SLICE   scanned operand -> its slice of this iteration      the scanned dim stays whole
    CARRY   (initial, next) -> carry                            one sharding for all iterations
    EXIT    carry -> the loop's result                          once, after the loop
    STACK   value of an iteration -> stacked result             the scanned dim stays whole
    JOIN    the branches' results -> result
    INPUT   () or (next call's value) -> argument
    OUTPUT  value -> result of the program
    CONST   () -> closed-over constant                          replicated
    READ    value -> the form in which all its readers get it   so that one gather serves several
    readers

Invariants: every value is defined by exactly one operation; operations stand in execution order;
only a CARRY or INPUT reads a value that is defined later.
"""

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any


class Kind(enum.Enum):
    """What an operation is; everything but LEAF, CALL, LOOP and BRANCH is a border."""

    __hash__ = object.__hash__  # an Enum's own is of its name, in Python

    LEAF = "leaf"
    CALL = "call"
    LOOP = "loop"
    BRANCH = "branch"
    ENTER = "enter"
    SLICE = "slice"
    CARRY = "carry"
    EXIT = "exit"
    STACK = "stack"
    JOIN = "join"
    INPUT = "input"
    OUTPUT = "output"
    CONST = "const"
    READ = "read"


NESTED = (Kind.CALL, Kind.LOOP, Kind.BRANCH)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program; compared by identity."""

    shape: tuple[int, ...]
    dtype: str  # NumPy name, "float32"
    itemsize: float  # bytes per element
    name: str  # argument path, or the path of the defining operation
    size_bytes: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.size_bytes = self.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One operation.

    `operands` has None where the operand is a literal. `trips` is how often the operation runs in
    one step;
    `operand_trips` how often each operand is brought into the sharding that the operation wants.
    `eqn` is the jaxpr equation of a LEAF or nested operation; `contracted` how many products a
    `dot_general` sums for each element, 1 for everything else.
    """

    path: str
    kind: Kind
    primitive: str
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    source: str
    trips: int = 1
    operand_trips: tuple[int, ...] = ()
    eqn: Any = None
    bodies: "tuple[Graph, ...]" = ()

    contracted: int = dataclasses.field(init=False, default=1)

    def __post_init__(self):
        self.operand_trips = self.operand_trips or (self.trips,) * len(self.operands)
        if self.primitive == "dot_general":
            ((contracted, _), _) = self.eqn.params["dimension_numbers"]
            self.contracted = math.prod(self.eqn.invars[0].aval.shape[d] for d in contracted)

    def __str__(self) -> str:
        read = ", ".join("literal" if v is None else v.name for v in self.operands)
        trips = f" x{self.trips}" if self.trips > 1 else ""
        made = ", ".join(map(str, self.results))
        return f"{made} = {self.primitive}({read}){trips}"


@dataclasses.dataclass(eq=False)
class Graph:
    """A list of operations in execution order; `name` says which body this is."""

    name: str
    ops: list[Op]

    def walk(self) -> Iterator[Op]:
        """Yields every operation, a nested one before its bodies."""
        for op in self.ops:
            yield op
            for body in op.bodies:
                yield from body.walk()

    def leaves(self) -> Iterator[Op]:
        """Yields every operation that makes a sharding choice: leaves and borders."""
        return (op for op in self.walk() if op.kind not in NESTED)

    def text(self, indent: str = "") -> str:
        lines = []
        for op in self.ops:
            lines.append(f"{indent}{op}")
            for body in op.bodies:
                lines.append(f"{indent}  {body.name}:")
                lines.append(body.text(indent + "    "))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def share_reads(graph: Graph) -> None:
    """Puts a READ behind every value with several readers; they then read its result."""
    readers: dict[int, list[tuple[Op, int]]] = {}
    for op in graph.leaves():
        for k, value in enumerate(op.operands):
            if value is not None and op.kind is not Kind.EXIT:
                readers.setdefault(id(value), []).append((op, k))
    _share_reads(graph, readers)


def _share_reads(graph: Graph, readers: dict[int, list[tuple[Op, int]]]) -> None:
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(op)
        for body in op.bodies:
            _share_reads(body, readers)
        for k, value in enumerate(op.results):
            uses = readers.get(id(value), [])
            if len(uses) < 2 or not value.shape or op.kind is Kind.CONST:
                continue
            shared = Value(value.shape, value.dtype, value.itemsize, f"{value.name}")
            ops.append(
                Op(
                    read_path(op.path, k),
                    Kind.READ,
                    "read",
                    (value,),
                    (shared,),
                    op.source,
                    op.trips,
                )
            )
            for reader, i in uses:
                reader.operands = reader.operands[:i] + (shared,) + reader.operands[i + 1 :]
    graph.ops = ops


def read_path(path: str, result: int) -> str:
    """Returns the path of the READ behind a result of the operation at `path`."""
    return f"{path}.read{result}"


def check(graph: Graph) -> None:
    """Checks the invariants above.

    Raises:
      ValueError: names the operation that breaks one.
    """
    defined: set[int] = set()
    later: list[tuple[Op, Value]] = []
    for op in graph.leaves():
        for k, value in enumerate(op.operands):
            if value is None or id(value) in defined:
                continue
            if op.kind is Kind.INPUT or (op.kind is Kind.CARRY and k == 1):
                later.append((op, value))
            else:
                raise ValueError(f"{op.path}: reads {value} before it is defined")
        for value in op.results:
            if id(value) in defined:
                raise ValueError(f"{op.path}: defines {value} a second time")
            defined.add(id(value))
    for op, value in later:
        if id(value) not in defined:
            raise ValueError(f"{op.path}: {value} is never defined")
