"""Problems as numbers: costs and peaks against their definitions, files there and back."""

import dataclasses
import gzip
import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from autoshard.errors import ProblemError
from autoshard.problem import Edge, Node, ShardingProblem, Solution, Status, Usage, read, write
from tests.random_problems import peak_of, random_problem

DATA = pathlib.Path(__file__).parent / "data"


def some_problems(count: int):
    rng = np.random.default_rng(7)
    for k in range(count):
        yield random_problem(
            rng, int(rng.integers(1, 6)), 6, limited=k % 2 == 0, integers=k % 3 == 0
        )


def two_nodes() -> ShardingProblem:
    """Split or replicate two arrays; the edge forbids both split."""
    return ShardingProblem(
        nodes=(
            Node(np.array([1.0, 2.0]), "w", ("split", "replicated")),
            Node(np.array([3.0, 5.0]), "x", ("split", "replicated")),
        ),
        edges=(Edge(0, 1, np.array([[np.inf, 0.0], [0.5, 0.25]])),),
        usages=(
            Usage(0, 0, 4, np.array([1.0, 8.0]), "w"),
            Usage(1, 2, 6, np.array([2.0, 16.0]), "x"),
        ),
        usage_limit_bytes=20.0,
        name="two nodes",
    )


def test_objective_and_peak_by_hand():
    problem = two_nodes()
    problem.check()
    assert problem.objective_s((1, 0)) == 2 + 3 + 0.5
    assert problem.objective_s((0, 0)) == math.inf
    assert problem.peak_bytes((1, 0)) == 8 + 2
    assert problem.peak_bytes((1, 1)) == 24
    assert not problem.is_feasible((1, 1)) and problem.is_feasible((1, 0))
    live = problem.live_at_peak((1, 1))
    assert [(u.label, b) for u, b in live] == [("x", 16.0), ("w", 8.0)]
    assert str(problem) == "two nodes: 2 nodes, 1 edges, 2 usages, 20 bytes"


def test_peak_is_the_largest_sum_over_time():
    for problem in some_problems(60):
        for choices in itertools.islice(
            itertools.product(*(range(len(n.costs_s)) for n in problem.nodes)), 20
        ):
            assert problem.peak_bytes(choices) == peak_of(problem, choices)
            at_peak = sum(size for _, size in problem.live_at_peak(choices))
            assert at_peak == problem.peak_bytes(choices)


def test_maximal_live_sets_are_the_maximal_ones():
    for problem in some_problems(100):
        sets = set()
        for t in range(20):
            live = [
                k
                for k, u in enumerate(problem.usages)
                if u.start <= t < u.end and u.bytes.max(initial=0.0) > 0
            ]
            sets.add(frozenset(live))
        maximal = [s for s in sets if s and not any(s < other for other in sets)]
        found = problem.maximal_live_sets()
        assert len(found) == len(maximal)
        assert {frozenset(s) for s in found} == set(maximal)


def assert_same(a: ShardingProblem, b: ShardingProblem) -> None:
    assert (a.usage_limit_bytes, a.name) == (b.usage_limit_bytes, b.name)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert (x.label, x.strategies) == (y.label, y.strategies)
        np.testing.assert_array_equal(x.costs_s, y.costs_s)
    for x, y in zip(a.edges, b.edges, strict=True):
        assert (x.a, x.b) == (y.a, y.b)
        np.testing.assert_array_equal(x.costs_s, y.costs_s)

    def key(u: Usage):
        return u.node, u.start, u.end, u.label, u.bytes.tolist()

    live = [u for u in a.usages if u.start < u.end]
    assert sorted(map(key, live)) == sorted(map(key, b.usages))


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_files_there_and_back(tmp_path, name):
    for problem in [two_nodes(), *some_problems(40)]:
        write(problem, tmp_path / name)
        assert_same(problem, read(tmp_path / name))


def test_other_readers_see_an_equal_problem(tmp_path):
    """Without our extensions a node with two usages is two nodes and a forbidding edge."""
    problem = dataclasses.replace(
        two_nodes(), usages=(*two_nodes().usages, Usage(0, 5, 9, np.array([4.0, 4.0]), "again"))
    )
    write(problem, tmp_path / "p.json")
    tree = json.loads((tmp_path / "p.json").read_text())["problem"]
    for key in ("followers", "labels", "strategies", "name"):
        tree.pop(key)
    (tmp_path / "plain.json").write_text(json.dumps({"problem": tree}))
    plain = read(tmp_path / "plain.json")
    assert len(plain.nodes) == 3
    for choices in itertools.product(range(2), range(2)):
        assert plain.objective_s((*choices, 0)) == problem.objective_s(choices)
        assert plain.peak_bytes((*choices, 0)) == problem.peak_bytes(choices)


def test_reads_a_contest_instance():
    problem = read(DATA / "B.json.gz")
    forbidden = [e for e in problem.edges if e.a == e.b]  # one for each node that it bars from one
    assert (len(problem.nodes), len(problem.edges) - len(forbidden)) == (816, 1096)
    assert problem.usage_limit_bytes == 14392528


def plain_tree() -> dict:
    return {
        "nodes": {
            "intervals": [[0, 2], [1, 3]],
            "costs": [[1, 2], [3]],
            "usages": [[1, 2], [3]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 10**18]]},
        "usage_limit": 4,
    }


def changed(*path, to):
    tree = plain_tree()
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return json.dumps({"problem": tree})


def test_plain_tree_is_read(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"problem": plain_tree()}))
    problem = read(path)
    assert problem.objective_s((0, 0)) == 4 and problem.objective_s((1, 0)) == math.inf
    path.write_text(changed("nodes", "costs", to=[[1, 10**18], [3]]))
    assert read(path).objective_s((1, 0)) == math.inf  # a forbidden strategy


@pytest.mark.parametrize(
    "text, field",
    [
        ("[]", "problem is missing"),
        ("{", "not JSON"),
        ('{"problem": 3}', "problem is 3"),
        ('{"problem": {}}', "problem.nodes is missing"),
        (changed("nodes", "usages", to=[[1, 2]]), "problem.nodes.usages has 1 entries"),
        (changed("nodes", "usages", to=[[1], [3]]), r"problem.nodes.usages\[0\] has 1"),
        (changed("nodes", "usages", to=[[1, -2], [3]]), r"problem.nodes.usages\[0\] holds -2"),
        (changed("nodes", "costs", to=[[1, 2], []]), r"nodes\[1\].costs_s is empty|costs\[0\]"),
        (changed("nodes", "costs", to=[[1, "x"], [3]]), r"problem.nodes.costs\[0\]"),
        (changed("nodes", "costs", to=[[1, [2]], [3]]), r"problem.nodes.costs\[0\]"),
        (changed("nodes", "costs", to=[[1, math.nan], [3]]), r"problem.nodes.costs\[0\] holds nan"),
        (changed("nodes", "costs", to=[[1, None], [3]]), r"problem.nodes.costs\[0\]"),
        (changed("nodes", "costs", to=[[1, 10**30], [3]]), r"costs\[0\] holds 1e\+30"),
        (changed("nodes", "costs", to=[[1, 10**400], [3]]), r"problem.nodes.costs\[0\]"),
        (changed("nodes", "intervals", to=[[0, 2]]), "problem.nodes.intervals has 1"),
        (changed("nodes", "intervals", to=[[2, 0], [1, 3]]), r"intervals\[0\] is \[2, 0\]"),
        (changed("nodes", "intervals", to=[[0.5, 2], [1, 3]]), r"intervals\[0\]"),
        (changed("edges", "nodes", to=[[0, 7]]), r"problem.edges.nodes\[0\] names node 7"),
        (changed("edges", "nodes", to=[[0, -1]]), r"problem.edges.nodes\[0\]"),
        (changed("edges", "nodes", to=[[0, 1], [0, 1]]), "problem.edges.nodes has 2"),
        (changed("edges", "costs", to=[[0]]), r"problem.edges.costs\[0\] has 1 entries, wanted 2"),
        (changed("usage_limit", to=-1), "usage_limit"),
        (changed("usage_limit", to="4 GiB"), "problem.usage_limit"),
        (changed("name", to=4), "problem.name"),
        (changed("labels", to=[]), "problem.labels"),
        (changed("labels", to={"nodes": ["a"]}), "problem.labels.nodes"),
        (changed("followers", to=[[0]]), r"problem.edges.costs\[0\]: a follower"),
        (changed("followers", to=7), "problem.followers"),
        (changed("followers", to=[[0]] * 9), "problem.followers"),
    ],
)
def test_malformed_files_name_the_field(tmp_path, text, field):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProblemError, match=field):
        read(path)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "p.json.gz"
    data = gzip.compress(json.dumps({"problem": plain_tree()}).encode())
    for length in (3, 12, len(data) // 2, len(data) - 4):
        path.write_bytes(data[:length])
        with pytest.raises(ProblemError, match="damaged gzip"):
            read(path)
    path.write_bytes(b"")
    with pytest.raises(ProblemError, match="not JSON"):
        read(path)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"nodes": (Node(np.zeros(0)), Node(np.zeros(2)))}, r"nodes\[0\].costs_s is empty"),
        ({"nodes": (Node(np.array([1, 2])), Node(np.zeros(2)))}, r"nodes\[0\].costs_s"),
        ({"nodes": (Node(np.array([1.0, np.inf])), Node(np.zeros(2)))}, "holds inf"),
        ({"edges": (Edge(0, 1, np.zeros((2, 3))),)}, r"edges\[0\].costs_s has shape \(2, 3\)"),
        ({"edges": (Edge(0, 1, np.full((2, 2), np.nan)),)}, r"edges\[0\].costs_s holds NaN"),
        ({"edges": (Edge(0, 2, np.zeros((2, 2))),)}, r"edges\[0\] names node 2"),
        ({"usages": (Usage(3, 0, 1, np.zeros(2)),)}, r"usages\[0\].node is 3"),
        ({"usages": (Usage(0, 0, 1, np.zeros(1)),)}, r"usages\[0\].bytes has 1"),
        ({"usages": (Usage(0, 0, 1, np.array([-1.0, 0.0])),)}, r"usages\[0\].bytes holds -1"),
        ({"usages": (Usage(0, 2, 1, np.zeros(2)),)}, r"usages\[0\] starts at 2"),
        ({"usage_limit_bytes": math.nan}, "usage_limit_bytes is nan"),
    ],
)
def test_check_names_the_field(change, field):
    with pytest.raises(ProblemError, match=field):
        dataclasses.replace(two_nodes(), **change).check()


@pytest.mark.parametrize("choices", [(0,), (0, 2), (-1, 0)])
def test_check_choices(choices):
    with pytest.raises(ProblemError, match="choices"):
        two_nodes().check_choices(choices)


def test_solution_prints_what_it_is():
    good = Solution((0, 1), 2.0, 1.5, Status.FEASIBLE, 10.0)
    assert good.gap == 0.25
    assert str(good).startswith("cost 2, bound 1.5, gap 25.000%, peak 10 bytes; feasible")
    none = Solution((), math.inf, 1.5, Status.UNKNOWN, math.nan)
    assert str(none) == "none found yet: the limit struck first (bound 1.5)"
    assert none.gap == math.inf
