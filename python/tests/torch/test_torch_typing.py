"""The typed sample for torch runs."""

import runpy
from pathlib import Path


def test_sample():
    sample = Path(__file__).parent.parent / "typed" / "torch_sample.py"
    runpy.run_path(str(sample), run_name="__main__")
