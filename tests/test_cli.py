import json

import pytest

import autoshard
from autoshard import cli, fitting
from autoshard import problem as problems
from models import mlp


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_saves_what_explain_prints(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    argv = ("plan", "models.mlp:train_step", "--mesh", "data=4,model=2", "--hardware", "v5e")
    status, planned, _ = run(capsys, *argv, "--size", "tiny", "--save", path)
    assert status == 0
    assert planned.startswith("train_step on data=4,model=2 (v5e): step ")
    status, explained, _ = run(capsys, "explain", path)
    assert status == 0
    assert planned.startswith(explained.rstrip())


def test_the_memory_limit_is_read_with_units(capsys):
    argv = ("plan", "models.mlp:train_step", "--mesh", "x=8", "--hardware", "v5e")
    assert " of 2 MiB" in run(capsys, *argv, "--memory-limit", "2MiB")[1]
    status, _, error = run(capsys, *argv, "--memory-limit", "1kB")
    assert status == 2 and "the smallest limit that would is" in error
    with pytest.raises(SystemExit):
        run(capsys, *argv, "--memory-limit", "much")
    assert "'much' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models.mlp", "wanted module:function"),
        ("models.nothing:train_step", "cannot import 'models.nothing'"),
        ("models.mlp:nothing", "has no function 'nothing'"),
        ("json:dumps", "has no function example_arguments(size)"),
    ],
)
def test_names_that_do_not_exist(capsys, name, message):
    status, _, error = run(capsys, "plan", name, "--mesh", "x=8", "--hardware", "v5e")
    assert status == 2 and message in error


def test_sizes_meshes_hardware_and_files_that_do_not_exist(capsys):
    name = "models.mlp:train_step"
    plan = ("plan", name, "--mesh", "x=8", "--hardware", "v5e")
    assert "knows no size 'huge'" in run(capsys, *plan, "--size", "huge")[2]
    assert (
        "write data=4,model=2" in run(capsys, "plan", name, "--mesh", "x8", "--hardware", "v5e")[2]
    )
    assert "v5e" in run(capsys, "plan", name, "--mesh", "x=8", "--hardware", "v99")[2]
    assert "cannot read nothing.json" in run(capsys, "explain", "nothing.json")[2]


def test_a_written_problem_solves_to_the_plans_step_time(capsys, tmp_path):
    path, output = str(tmp_path / "problem.json.gz"), str(tmp_path / "solution.json")
    target = ("models.mlp:train_step", "--mesh", "data=4,model=2", "--hardware", "v5e")
    assert run(capsys, "problem", *target, "--output", path)[0] == 0
    status, solved, _ = run(capsys, "solve", path, "--output", output)
    assert status == 0 and "optimal" in solved
    problem = problems.read(path)
    with open(output) as file:
        objective_s = problem.objective_s(json.load(file))
    plan = autoshard.plan(
        mlp.train_step, *mlp.example_arguments(), mesh="data=4,model=2", hardware="v5e",
        donate_argnums=mlp.donate_argnums,
    )  # fmt: skip
    assert objective_s == pytest.approx(plan.objective_s, rel=2 * fitting.GAP)


def test_solve_writes_one_choice_a_node(capsys, tmp_path):
    problem = {
        "nodes": {
            "intervals": [[0, 2], [1, 3]],
            "costs": [[5, 1], [4, 2]],
            "usages": [[1, 9], [1, 9]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 3, 3, 0]]},
        "usage_limit": 10,
    }
    path, output = tmp_path / "problem.json", tmp_path / "solution.json"
    path.write_text(json.dumps({"problem": problem}))
    status, out, _ = run(capsys, "solve", str(path), "--output", str(output))
    assert status == 0 and "optimal" in out
    # [1, 1] costs 3 but uses 18 of 10; the rest: [1, 0] 8, [0, 1] 10, [0, 0] 9
    assert json.loads(output.read_text()) == [1, 0]


def test_a_number_of_devices_leaves_the_mesh_to_the_planner(capsys):
    argv = ("models.mlp:train_step", "--mesh", "8")
    status, text, _ = run(capsys, "plan", *argv, "--hardware", "v5e")
    assert status == 0 and "other meshes" in text and "x=4,y=2" in text
    status, text, _ = run(capsys, "pareto", *argv, "--hardware", "v5e", "--points", "3")
    assert status == 0 and 1 <= len(text.splitlines()) <= 3
    status, _, error = run(capsys, "plan", *argv)
    assert status == 2 and "pass --hardware" in error
