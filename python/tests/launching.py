"""Starts ranks with the real ``torchrun``, under a time limit: a hang is a failure."""

import os
import pathlib
import subprocess
import sys


def launched(ranks: int, script: pathlib.Path, *arguments: object, limit: float = 300) -> str:
    """What a script writes on so many ranks, which have to end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command,
        cwd=script.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # Torchrun ends its ranks, which a kill would leave behind.
        process.terminate()
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"no end after {limit} s:\n{output}") from None
    assert process.returncode == 0, output
    return output
