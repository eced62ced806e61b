"""The typed sample runs."""

import runpy
from pathlib import Path


def test_sample():
    runpy.run_path(str(Path(__file__).parent / "typed" / "sample.py"), run_name="__main__")
