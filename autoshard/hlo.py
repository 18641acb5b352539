"""Reads the text of a compiled XLA program: computations, types, device groups, loop trip counts.

The text of a scheduled module lists the instructions of a computation in the order they run. Only
what a reader of collectives needs is understood; everything else stays text.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from autoshard.errors import AutoshardError

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16, "tf32": 32}
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(calls|to_apply|condition|body|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_GROUPS = re.compile(
    r"replica_groups=(?:(?P<mesh>mesh\[(?P<sizes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))? \{(?P<axes>[^}]*)\})"
    r"|(?P<iota>\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
    r"|(?P<lists>\{(?:\{[\d,]*\},?)*\}))"
)
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a type: `bf16[8,128]`."""

    dtype: str
    shape: tuple[int, ...]
    bits: int  # of one element, as stored

    @property
    def bytes(self) -> float:
        return math.prod(self.shape) * self.bits / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`."""

    name: str
    type_text: str
    opcode: str
    arguments: str  # what stands between the parentheses: operands, or a constant's value
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.arguments))

    @property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.type_text)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations this instruction calls, by attribute."""
        found = _CALLED.finditer(self.attributes)
        return {m[1]: tuple(re.findall(r"%?([\w.\-]+)", m[2])) for m in found}

    def integer(self, attribute: str) -> int | None:
        m = re.search(rf'\b{attribute}"?[=:]"?(-?\d+)', self.attributes)
        return int(m[1]) if m else None

    def text(self, attribute: str) -> str | None:
        m = re.search(rf'\b{attribute}"?[=:]"((?:[^"\\]|\\.)*)"', self.attributes)
        return m[1] if m else None

    def __str__(self) -> str:
        return f"%{self.name} = {self.type_text} {self.opcode}({self.arguments})"


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]  # in scheduled order
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """Instruction name -> the instructions that read it, in scheduled order."""
        found: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                found.setdefault(name, []).append(i)
        return {name: tuple(users) for name, users in found.items()}

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.by_name.get(instruction.operands[index])


@dataclasses.dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: Computation
    partition_count: int
    frames: Mapping[int, str]  # stack frame id -> "file.py:12 (fn)", the innermost user line

    def source(self, instruction: Instruction) -> str | None:
        frame = instruction.integer("stack_frame_id")
        if frame is not None and frame in self.frames:
            return self.frames[frame]
        file, line = instruction.text("source_file"), instruction.integer("source_line")
        return f"{_base(file)}:{line}" if file and line else None


def parse(text: str) -> Module:
    """Reads the text of an XLA module, as `jax.stages.Compiled.as_text` gives it.

    Raises:
      AutoshardError: the text has no ENTRY computation.
    """
    computations, entry = {}, None
    lines = iter(text.splitlines())
    for line in lines:
        header = _HEADER.match(_INDEX_COMMENT.sub("", line))
        if header is None or line.startswith("HloModule"):
            continue
        computation = _computation(header[2], lines)
        computations[computation.name] = computation
        if header[1]:
            entry = computation
    if entry is None:
        raise AutoshardError(
            f"no ENTRY computation in {text[:60]!r}: pass the text that compiled.as_text() gives"
        )
    partitions = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    return Module(computations, entry, int(partitions[1]) if partitions else 1, _frames(text))


def arrays(type_text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, those of a tuple in order."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(type_text):
        packed = re.search(r"E\((\d+)\)", layout)
        shape = tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)
        found.append(Array(dtype, shape, int(packed[1]) if packed else _bits(dtype)))
    return tuple(found)


def pairs(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    """Returns the (source, target) partitions of a permute, none for other collectives."""
    m = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
    return _lists(m[1]) if m else ()


def groups(instruction: Instruction, partition_count: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of partitions that a collective runs in, whatever form they print in.

    The forms: `{{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'a'}` (with the ids of
    its devices where they are not in order), and `source_target_pairs={{0,1},{1,0}}`, which give
    the sets of partitions that pairs connect.
    """
    everyone = (tuple(range(partition_count)),)
    if "source_target_pairs=" in instruction.attributes:
        return _connected(pairs(instruction))
    m = _GROUPS.search(instruction.attributes)
    if m is None:
        return everyone
    if m["lists"]:
        found = _lists(m["lists"])
        # Without global ids the lists name replicas, and one replica holds every partition.
        replicas = "use_global_device_ids=true" not in instruction.attributes
        return everyone if not found or (replicas and found == ((0,),)) else found
    if m["iota"]:
        return _rows(_iota(m["iota"]))
    return _mesh_groups(m)


def _computation(name: str, lines: Iterator[str]) -> Computation:
    instructions, root = [], None
    for line in lines:
        if line.startswith("}"):
            break
        instruction = _instruction(line)
        if instruction is None:
            continue
        instructions.append(instruction)
        if line.lstrip().startswith("ROOT "):
            root = instruction
    if root is None:
        raise AutoshardError(f"computation {name} has no ROOT: the text is cut short")
    return Computation(name, tuple(instructions), root)


def _instruction(line: str) -> Instruction | None:
    head, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    rest = _INDEX_COMMENT.sub("", rest)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    return Instruction(
        name=head.removeprefix("%"),
        type_text=rest[:end],
        opcode=rest[end:opening].strip(),
        arguments=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :].lstrip(", "),
    )


def _closing(text: str, opening: int) -> int:
    """Returns the index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for m in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if m[0] == "(" else -1
        if depth == 0:
            return m.start()
    raise AutoshardError(f"unbalanced parentheses in {text[:80]!r}")


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    m = re.match(r"[a-z](\d+)", dtype)
    if m is None:
        raise AutoshardError(f"unknown XLA element type {dtype!r}")
    return int(m[1])


def _frames(text: str) -> dict[int, str]:
    """Reads the tables of source lines before the first computation."""
    names: dict[str, dict[int, str]] = {"FileNames": {}, "FunctionNames": {}}
    locations: dict[int, tuple[int, int, int]] = {}
    frames: dict[int, tuple[int, int]] = {}
    section = ""
    for line in itertools.takewhile(lambda s: not _HEADER.match(s), text.splitlines()):
        number, _, rest = line.partition(" ")
        fields = [int(n) for n in re.findall(r"=(\d+)", rest)]
        if not number.isdigit():
            section = line.strip()
        elif section in names:
            names[section][int(number)] = rest.strip('"')
        elif section == "FileLocations":
            locations[int(number)] = (fields[0], fields[1], fields[2])
        elif section == "StackFrames":
            frames[int(number)] = (fields[0], fields[1] - 1)  # a parent prints one too high
    return {n: _user_line(n, frames, locations, names) for n in frames}


def _user_line(number, frames, locations, names) -> str:
    """Returns the innermost line outside installed packages, else the innermost line."""
    chain = []
    while number in frames and len(chain) < 1000:
        location, parent = frames[number]
        file, function, line = locations[location]
        chain.append((names["FileNames"][file], names["FunctionNames"][function], line))
        number = parent
    own = [frame for frame in chain if "-packages/" not in frame[0]]
    file, function, line = (own or chain)[0]
    return f"{_base(file)}:{line} ({function.rpartition('.')[2]})"


def _base(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text)
    )


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(text: str) -> np.ndarray:
    """Reads `[4,2]<=[2,4]T(1,0)`: 0.. in shape [2,4], transposed, reshaped to [4,2]."""
    m = _IOTA.fullmatch(text.strip())
    if m is None:
        return np.array(_ints(text.strip("{}[] ")))
    sizes = _ints(m[2])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if m[3]:
        ids = ids.transpose(_ints(m[3]))
    return ids.reshape(_ints(m[1])) if m[1] else ids


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in row) for row in ids)


def _mesh_groups(m: re.Match) -> tuple[tuple[int, ...], ...]:
    """Groups along named axes of a device mesh, whole (`'a'`) or in part (`'a':(2)4`)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", m["sizes"])}
    chosen = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", m["axes"])
    dims, keep, spans = [], [], {}
    for name, size in sizes.items():
        parts = sorted((int(before), int(n)) for a, before, n in chosen if a == name and n)
        whole = any(a == name and not n for a, _, n in chosen)
        position = 1
        for before, n in [(1, size)] if whole else parts:
            keep.append(len(dims))
            dims.append(before // position)
            spans[name, before] = len(dims)
            dims.append(n)
            position = before * n
        keep.append(len(dims))
        dims.append(size // position)
    order = [spans[name, int(before or 1)] for name, before, _ in chosen]
    ids = _iota(m["ids"]) if m["ids"] else np.arange(math.prod(sizes.values()))
    width = math.prod(dims[d] for d in order)
    return _rows(ids.reshape(dims).transpose(keep + order).reshape(-1, width))


def _connected(pairs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of numbers that pairs connect, each sorted, in order of their least."""
    group_of: dict[int, frozenset[int]] = {}
    for pair in pairs:
        joined = frozenset(pair).union(*(group_of.get(n, ()) for n in pair))
        group_of.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))
