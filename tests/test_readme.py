"""The README's example runs word for word, and its commands are the ones that CI runs."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs(capsys):
    scope: dict = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), scope)
    assert "train_step on data=4,model=2" in capsys.readouterr().out
    assert float(scope["loss"]) > 0
    assert len(scope["params"]["w_in"].sharding.device_set) == 8


def test_ci_runs_the_second_command():
    first, second = blocks("sh")[:2]
    assert "benchmarks.train_gpt" in first
    assert second.strip() in (ROOT / ".ci" / "run").read_text()
