"""How often a compiled loop runs, read from the integers that steer it.

The TPU compiler drops `known_trip_count`: the count then follows from the first value of the
counter, its stride in the body and the constant in the condition, each of which may stand behind
fusions, copies and constants carried in the loop's tuple.
"""

import dataclasses
import re
from collections.abc import Mapping

from autoshard.hlo import Computation, Instruction, Module

_SCALAR = re.compile(r"\(?[su]\d+\[\]")  # or the tuple that a copy of one starts with


def trip_count(module: Module, loop: Instruction, scope: "Scope") -> int | None:
    """Returns how often the body of a `while` runs, or None where the text does not tell.

    The TPU compiler drops `known_trip_count`: the count then follows from the counter's first
    value, its stride in the body and the constant in the condition.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    inside = Scope(module, condition, scope.invariants(loop))
    compare = _compare(inside)
    if compare is None:
        return None
    direction, counter, limit = compare
    first = scope.element(scope.computation.operand(loop, 0), counter.element)
    step = Scope(module, body).element(body.root, counter.element)
    if first is None or first.element is not None or step is None:
        return None
    if step.element != counter.element or step.offset == 0:
        return None
    return _trips(direction, limit - counter.offset - first.offset, step.offset)


@dataclasses.dataclass(frozen=True)
class Linear:
    """An integer known up to one element of the loop's tuple: element + offset, or offset."""

    element: int | None
    offset: int


@dataclasses.dataclass(frozen=True)
class Scope:
    """A computation with what is known of its parameters: constants of the loop around it."""

    module: Module
    computation: Computation
    constants: Mapping[int, int] = dataclasses.field(default_factory=dict)
    caller: "tuple[Scope, Instruction] | None" = None  # of a fusion: where its operands are
    known: dict[str, Linear | None] = dataclasses.field(default_factory=dict)  # values read so far

    def invariants(self, loop: Instruction) -> dict[int, int]:
        """Returns the elements of a loop's tuple that are constants all along."""
        body = self.module.computations[loop.called["body"][0]]
        before = self.computation.operand(loop, 0)
        inside = Scope(self.module, body)
        found = {}
        for index in range(len(body.root.operands)):
            if inside.element(body.root, index) == Linear(index, 0):
                value = self.element(before, index)
                if value is not None and value.element is None:
                    found[index] = value.offset
        return found

    def element(self, source: Instruction | None, index: int | None) -> Linear | None:
        """Returns the value of one element of a tuple."""
        if source is None or index is None:
            return None
        if source.opcode == "tuple":
            return self.value(self.computation.operand(source, index))
        if source.opcode == "parameter" and self.caller is None:
            known = self.constants.get(index)
            return Linear(index, 0) if known is None else Linear(None, known)
        if source.opcode in ("opt-barrier", "copy"):
            return self.element(self.computation.operand(source, 0), index)
        if source.opcode in ("fusion", "call"):
            inside = self.called(source)
            return inside.element(inside.computation.root, index)
        return None

    def value(self, source: Instruction | None) -> Linear | None:
        """Returns the value of a scalar integer."""
        if source is None or not _SCALAR.match(source.type_text):
            return None
        if source.name not in self.known:
            self.known[source.name] = self._value(source)
        return self.known[source.name]

    def _value(self, source: Instruction) -> Linear | None:
        operands = [self.computation.operand(source, i) for i in range(len(source.operands))]
        match source.opcode:
            case "constant":
                return _constant(source.arguments)
            case "parameter":
                return self._parameter(int(source.arguments))
            case "get-tuple-element":
                return self.element(operands[0], source.integer("index"))
            case "copy" | "bitcast" | "convert" | "reshape" | "copy-start" | "copy-done":
                return self.value(operands[0])
            case "add" | "subtract" | "multiply":
                return _arithmetic(source.opcode, *map(self.value, operands))
            case "fusion" | "call":
                inside = self.called(source)
                return inside.value(inside.computation.root)
        return None

    def _parameter(self, number: int) -> Linear | None:
        if self.caller is None:
            return None
        outside, call = self.caller
        return outside.value(outside.computation.operand(call, number))

    def called(self, source: Instruction) -> "Scope":
        name = (source.called.get("calls") or source.called["to_apply"])[0]
        return Scope(self.module, self.module.computations[name], caller=(self, source))


def _constant(text: str) -> Linear | None:
    return Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None


def _arithmetic(opcode: str, a: Linear | None, b: Linear | None) -> Linear | None:
    if a is None or b is None:
        return None
    if opcode == "multiply":
        both = a.element is None and b.element is None
        return Linear(None, a.offset * b.offset) if both else None
    if opcode == "subtract":
        return Linear(a.element, a.offset - b.offset) if b.element is None else None
    if a.element is not None and b.element is not None:
        return None
    return Linear(a.element if b.element is None else b.element, a.offset + b.offset)


def _compare(inside: Scope) -> tuple[str, Linear, int] | None:
    """Returns a condition as (direction, counter, limit), the counter on the left."""
    root = inside.computation.root
    while root.opcode in ("fusion", "call"):
        inside = inside.called(root)
        root = inside.computation.root
    if root.opcode != "compare":
        return None
    left = inside.value(inside.computation.operand(root, 0))
    right = inside.value(inside.computation.operand(root, 1))
    direction = re.search(r"direction=(\w\w)", root.attributes)
    if left is None or right is None or direction is None:
        return None
    if left.element is not None and right.element is None:
        return direction[1], left, right.offset
    if right.element is not None and left.element is None:
        flipped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
        return flipped.get(direction[1], direction[1]), right, left.offset
    return None


def _trips(direction: str, distance: int, step: int) -> int | None:
    """Returns how many steps a counter takes while it is on the near side of `distance`."""
    if direction in ("GT", "GE"):
        direction, distance, step = {"GT": "LT", "GE": "LE"}[direction], -distance, -step
    if direction == "LE":
        direction, distance = "LT", distance + 1
    if direction == "NE" and distance % step == 0 and distance // step >= 0:
        return distance // step
    if direction == "LT" and distance <= 0:
        return 0
    if direction == "LT" and step > 0:
        return -(-distance // step)
    return None
