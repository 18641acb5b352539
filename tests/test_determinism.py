"""Same program, same plan, byte for byte, in any process."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import autoshard
from models import gpt
where = dict(mesh="data=4,model=2", hardware="v5e", donate_argnums=0)
ample = autoshard.plan(gpt.train_step, *gpt.example_arguments("tiny"), **where)
sys.stdout.write(ample.to_json())
state = gpt.example_arguments("tiny")
limit = ample.peak_bytes * 0.7
tight = autoshard.plan(gpt.train_step, *state, memory_limit_bytes=limit, **where)
sys.stdout.write(tight.to_json())
"""


def test_three_processes_with_different_hash_seeds_agree():
    texts = []
    for seed in ("0", "1", "4321"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    assert texts[0] == texts[1] == texts[2]
    assert '"autoshard_plan": 2' in texts[0]
