"""Cases of ``longspan.torch.verify`` by FlexAttention's kernels in the interpreter: what the command runs on a GPU."""

import pytest
import torch
from interpreter import InterpretedCuda
from operators import TILES

from longspan.torch import verify
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("other lengths", torch.float32), ("dilated, weighted", torch.bfloat16)],
    ids=str,
)
def test_cases(name, dtype):
    (case,) = (case for case in verify.cases(200) if case.name == name)
    backend = InterpretedCuda()
    engine = FlexEngine(backend=backend, dynamic=False, options=dict.fromkeys(TILES, 64))
    with in_place_of("cpu", engine), backend.watch() as launches:
        worst, share = verify.check(case, dtype, torch.device("cpu"))
    assert share <= 1, worst
    assert {"forward", "backward"} <= {launch.attention for launch in launches}
