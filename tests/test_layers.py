"""The shape of the code: imports run one way, files and functions stay small, secrets stay in
their module."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "autoshard"

# A module may import only modules that stand above it.
ORDER = """
errors leading loads packed
sharding hardware fields factors clock references
spans
problem
graph topology
collectives
fusion reads stored
resharding roofline liveness moves
compose shardy primitives rules
coarsen overlap reductions strategies trace vmem
copying held sizes
cost
copies
baselines answer bound dual kernel lifted peak prices reduce search solve
apply emit explicit explain opened plan
fitting meshes pins stages
compiling
pareto jitted planning
hlo hlo_loops hlo_collectives schedule inspect aot calibrate
shapes check
refine
api
__init__
cli
__main__
"""

# What a module must not import, whatever stands above it.
FOREIGN = {
    "sharding": {"graph", "hardware", "trace"},
    "hardware": {"jax", "sharding"},
    "graph": {"jax", "sharding", "hardware"},
    "problem": {"jax", "graph", "ortools", "sharding"},
    "trace": {"sharding", "rules", "cost"},
    "strategies": {"hardware", "topology", "collectives", "cost"},
    "roofline": {"sharding", "meshes"},
    "liveness": {"sharding", "topology"},
    "apply": {"cost", "strategies", "solve"},
    "explicit": {"cost", "strategies", "solve"},
    "plan": {"ortools", "solve"},
    "inspect": {"strategies", "solve"},
    "solve": {"jax", "graph", "cost", "strategies", "plan"},
}


def modules():
    return sorted(p.stem for p in PACKAGE.glob("*.py"))


def imports(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Returns the autoshard modules and the outside packages that a file imports."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                child.names = []  # type: ignore[attr-defined]
        if isinstance(node, ast.Import):
            outside |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.names:
            parts = node.module.split(".")
            if parts[0] != "autoshard":
                outside.add(parts[0])
            elif len(parts) > 1:
                inside.add(parts[1])
            else:
                inside |= {a.name for a in node.names}
    return inside, outside


def test_every_module_has_its_place():
    assert set(modules()) <= set(ORDER.split())


@pytest.mark.parametrize("name", modules())
def test_imports_run_one_way(name):
    layers = [line.split() for line in ORDER.strip().splitlines()]
    depth = {module: i for i, layer in enumerate(layers) for module in layer}
    used = {m for m in imports(PACKAGE / f"{name}.py")[0] if m in depth and m != name}
    lazy = {"jitted", "check"} if name == "plan" else set()
    above = {m for m in used - lazy if depth[m] > depth[name]}
    assert not above, f"{name} imports {above}, which stand below it"


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_modules_do_not_know(name):
    inside, outside = imports(PACKAGE / f"{name}.py")
    assert not (inside | outside) & FOREIGN[name]


def test_only_the_solver_knows_ortools():
    users = {n for n in modules() if "ortools" in imports(PACKAGE / f"{n}.py")[1]}
    assert users and users <= {"bound", "prices"}


@pytest.mark.parametrize(
    "path",
    [
        p
        for d in ("autoshard", "models", "benchmarks", "tests")
        for p in sorted((ROOT / d).glob("*.py"))
    ],
    ids=str,
)
def test_files_and_functions_are_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 100, f"{node.name} has {length} lines"
