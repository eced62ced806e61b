"""The examples of data × context parallel training, and the loops of the guide, under the real ``torchrun``.

All run in one launch of 4 ranks, one after the other: starting torch takes longer than what they compute.
"""

import pathlib
import re
import sys

import pytest
import torch
import torch.distributed as dist
from launching import launched

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torchrun and Gloo"
)

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "context_parallel"
GUIDE = (ROOT / "docs" / "context-parallel.md").read_text()
#: FSDP2 records events of streams, which torch 2.6 has none of on the CPU.
FSDP = hasattr(torch.cpu.Stream, "record_event")
#: What every rank runs: scripts, one after the other, in one process group.
RUN = """
import runpy, sys
import torch.distributed as dist
dist.init_process_group("gloo")
destroy, dist.destroy_process_group = dist.destroy_process_group, dist.barrier
dist.init_process_group = lambda backend: None
for script in sys.argv[1:]:
    sys.argv = [script, "--check"]
    runpy.run_path(script, run_name="__main__")
destroy()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    (folder / "run.py").write_text(RUN)
    scripts = [EXAMPLES / "ddp.py"] + [EXAMPLES / "fsdp.py"] * FSDP
    blocks = [x for x in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "transformers" not in x]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        scripts.append(folder / f"guide{number}.py")
        scripts[-1].write_text(block)
    return launched(4, folder / "run.py", *scripts)


def test_examples_are_one_process(output):
    assert output.count("all 20 losses are within 1e-4 of one process") == 1 + FSDP, output
    assert len(set(re.findall(r"loss (\S+) to (\S+) in 20 steps on 2 × 2 ranks", output))) == 1, output


def test_guide(output):
    losses = [float(loss) for loss in re.findall(r"step \d: (\S+)", output)]
    assert len(losses) == 3 and losses[2] < losses[0], output


def test_commands_of_the_guide():
    commands = re.findall(r"^torchrun .*?(examples/\S+)", GUIDE, re.MULTILINE)
    assert len(commands) == 3
    assert all((ROOT / path).is_file() for path in commands)


def test_check_can_fail(monkeypatch):
    """Gradients that are averaged where they have to be summed give other losses."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ddp

    monkeypatch.setattr(ddp, "STEPS", 3)
    right = ddp.one_process()
    monkeypatch.setattr(ddp, "RATE", ddp.RATE / ddp.CONTEXT)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            torch.tensor(right), torch.tensor(ddp.one_process()), rtol=1e-4, atol=0
        )
