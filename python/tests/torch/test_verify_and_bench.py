"""The commands for machines with a GPU, on Longspan's own kernels."""

import re

import pytest
import torch

from longspan.torch import bench, verify

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_verify_compares_every_case(capsys):
    before = torch.get_float32_matmul_precision()
    assert verify.main(["--device", "cpu", "--quick"]) == 0
    assert torch.get_float32_matmul_precision() == before
    out = capsys.readouterr().out
    names = [case.name for case in verify.cases(300)]
    assert len(names) == 14 and all(re.search(rf"\d+/14 +{name} +(f32|bf16) ", out) for name in names)
    assert "kernels: Longspan" in out and "14 cases, none failed" in out


def test_verify_in_one_dtype(capsys):
    assert verify.main(["--device", "cpu", "--tokens", "200", "--dtype", "f16", "--case", "one query"]) == 0
    assert "1/1     one query           f16 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda out, lse: (out * (1 + 1e-5), lse), r"\d\.\d+ \(out\) .* FAILED"),
        (lambda out, lse: (out, lse * torch.nan), r"inf \(lse\) .* FAILED"),
        (lambda out, lse: (out, torch.where(lse == -torch.inf, -1e30, lse)), r"inf \(lse\) .* FAILED"),
        (lambda out, lse: 1 / 0, "FAILED  ZeroDivisionError: division by zero"),
    ],
    ids=["scaled", "nan", "empty rows", "raises"],
)
def test_verify_fails_where_results_are_wrong(monkeypatch, capsys, change, told):
    right = verify.longspan.torch.attention
    monkeypatch.setattr(
        verify.longspan.torch, "attention", lambda *args, **options: change(*right(*args, **options))
    )
    arguments = ["--device", "cpu", "--tokens", "200", "--dtype", "f32", "--case", "empty rows"]
    assert verify.main(arguments) == 1
    out = capsys.readouterr().out
    assert re.search(told, out) and "1 cases, 1 failed" in out


def test_wrong_gradients_are_seen():
    (case,) = (case for case in verify.cases(200) if case.name == "sink logits")
    references = verify.dense(case, verify.inputs_of(case, torch.float32))
    for name, reference in references.items():
        right, wrong = reference.truth, reference.truth * (1 + 1e-4)
        assert verify.share_of_bound(name, right.float(), reference, torch.float32) <= 1
        assert verify.share_of_bound(name, wrong, reference, torch.float32) > 1, name


@pytest.mark.filterwarnings("default")
def test_bench(capsys):
    # Without a compiler: this FlexAttention materializes scores.
    with torch.compiler.set_stance("force_eager"):
        assert bench.main(["--device", "cpu", "--quick", "--tokens", "256", "--head-dim", "16"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r" +256 ", line)]
    assert len(rows) == 6
    for forward, backward in zip(rows[::2], rows[1::2]):
        assert (forward[2], backward[2]) == ("forward", "backward")
        # Times, two of them with a ratio; on the CPU FlexAttention has no backward pass.
        assert len(forward) == 11 and "-" not in forward
        assert [backward[place] for place in (3, -2, -1)] == ["-"] * 3


def test_masks_of_the_bench_are_its_patterns():
    tokens = torch.arange(200)
    for subject in bench.subjects(20):
        pattern = bench.longspan.Pattern(subject.counted)
        active = subject.mask_mod(torch.tensor(0), torch.tensor(0), tokens[:, None], tokens)
        assert pattern.compile(200, 200).active_pairs == int(active.sum())


@pytest.mark.parametrize("command", [verify, bench])
def test_devices_that_are_not_there(command, capsys):
    absent = f"cuda:{torch.cuda.device_count()}"
    for device, told in ((absent, "no such CUDA device: torch"), ("meta", "expected the CPU or a CUDA device")):
        with pytest.raises(SystemExit) as ended:
            command.main(["--device", device])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
