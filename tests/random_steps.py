"""What random programs are made of: steps over values, and the table of operations to draw from.

Values stay near 1, so that errors show and rounding does not. A value is *exact* when its bits do
not depend on the order of a sum; only such values are compared, ordered by index or rounded.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

F32, I32, BOOL = np.dtype("float32"), np.dtype("int32"), np.dtype("bool")
MAX_SIZE, MAX_RANK = 4096, 5


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: `fn` of the values numbered `operands` gives the next values."""

    text: str
    fn: Callable
    operands: tuple[int, ...]


class RandomProgram:
    """A list of steps over values; calling it runs them and returns every unread value."""

    def __init__(self, rng: random.Random, avals: Sequence[Any], exact: Sequence[bool], depth: int):
        self.rng, self.depth = rng, depth
        self.differentiable = False
        self.avals, self.exact = list(avals), list(exact)
        self.arity = len(avals)
        self.steps: list[Step] = []

    def add(self, text: str, fn: Callable, operands: Sequence[Any], exact: bool = False) -> bool:
        """Appends a step unless an operand is missing or a result too large."""
        if None in operands:
            return False
        made = jax.eval_shape(fn, *(self.avals[i] for i in operands))
        made = made if isinstance(made, tuple) else (made,)
        if any(math.prod(a.shape) > MAX_SIZE or len(a.shape) > MAX_RANK for a in made):
            return False
        self.steps.append(Step(text, fn, tuple(operands)))
        self.avals += made
        self.exact += [exact and all(self.exact[i] for i in operands)] * len(made)
        return True

    def pick(
        self, dtype: Any = F32, rank: int = 0, exact: bool = False, also: Callable | None = None
    ) -> Any:
        """Returns the number of a fitting value, a late one more often, or None."""
        fitting = [
            i
            for i, a in enumerate(self.avals)
            if a.dtype == dtype
            and len(a.shape) >= rank
            and (self.exact[i] or not exact)
            and (also is None or also(a))
        ]
        if not fitting:
            return None
        late = fitting[-4:]
        return self.rng.choice(late if self.rng.random() < 0.7 else fitting)

    def grow(self, count: int) -> "RandomProgram":
        names = list(OPERATIONS)
        weights = [3 if name in COMMON else 1 for name in names]
        while len(self.steps) < count:
            OPERATIONS[self.rng.choices(names, weights)[0]](self)
        return self

    def near_ties_matter(self, *operands: int) -> bool:
        """Whether a maximum of some values may be differentiated, and rounding choose among them.

        Their gradient is not continuous: a loop that converges makes many values almost equal.
        """
        return self.differentiable and not all(self.exact[i] for i in operands)

    def body(
        self, operands: Sequence[int], avals: Sequence[Any] = (), differentiable: bool = False
    ) -> "RandomProgram":
        """Returns a program of a few steps over some values, and arguments of its own."""
        inner = [*avals, *(self.avals[i] for i in operands)]
        exact = [False] * len(avals) + [self.exact[i] for i in operands]
        body = RandomProgram(self.rng, inner, exact, self.depth + 1)
        body.differentiable = self.differentiable or differentiable
        return body.grow(self.rng.randint(2, 5))

    def __call__(self, *args: Any) -> tuple:
        values, read = list(args), set()
        for step in self.steps:
            made = step.fn(*(values[i] for i in step.operands))
            values += made if isinstance(made, tuple) else (made,)
            read |= set(step.operands)
        unread = [v for i, v in enumerate(values) if i not in read and i >= self.arity]
        return tuple(unread) or tuple(values[-1:])

    def __str__(self) -> str:
        lines = [f"v{i} = {a.str_short()}" for i, a in enumerate(map(jax.typeof, self.arguments()))]
        n = self.arity
        for step in self.steps:
            made = jax.eval_shape(step.fn, *(self.avals[i] for i in step.operands))
            count = len(made) if isinstance(made, tuple) else 1
            names = ", ".join(f"v{n + k}" for k in range(count))
            shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in self.avals[n : n + count])
            lines.append(f"{names} = {step.text}{step.operands} : {shapes}")
            n += count
        return "\n".join(lines)

    def steps_text(self) -> str:
        return "; ".join(f"{s.text}{s.operands}" for s in self.steps)

    def arguments(self) -> list[np.ndarray]:
        rng = np.random.default_rng(len(self.steps))
        made = []
        for a in self.avals[: self.arity]:
            if a.dtype == F32:
                made.append(rng.uniform(-1, 1, a.shape).astype(F32))
            else:
                made.append(rng.integers(0, 7, a.shape, dtype=I32))
        return made


OPERATIONS: dict[str, Callable[[RandomProgram], Any]] = {}
COMMON = ("unary", "binary", "contract", "reshape", "transpose", "reduce", "broadcast", "gather")


def operation(draw: Callable[[RandomProgram], Any]):
    OPERATIONS[draw.__name__] = draw
    return draw
