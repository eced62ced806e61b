"""The process that measures: its packages, its variables, and the library it loads.

Standard library only, because it runs before anything is installed.
"""

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"

# Set in the process that has been prepared, so that it isn't prepared again.
PREPARED = "LONGSPAN_PEERS_PREPARED"

# Whatever a shell has set for these would change one engine and not the others.
FOREIGN = ("OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "ATEN_", "LONGSPAN_")


def prepare(threads: int) -> None:
    """Returns only in a process with the pinned packages and our variables; else becomes one."""
    if os.environ.get(PREPARED):
        return
    python = interpreter()
    os.execve(python, [python, *sys.argv], variables(threads))


def interpreter() -> str:
    """This interpreter where it has what is pinned, else one that gets it."""
    if satisfied():
        return sys.executable
    home = ROOT / "target" / "peers-env"
    python, stamp = home / "bin" / "python", home / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing {', '.join(wanted.split())} into {home.relative_to(ROOT)}")
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--requirement"]
        subprocess.run([*pip, str(REQUIREMENTS)], check=True)
        stamp.write_text(wanted)
    return str(python)


def satisfied() -> bool:
    pins = (line.split("==") for line in REQUIREMENTS.read_text().split())
    try:
        return all(metadata.version(name) == version for name, version in pins)
    except metadata.PackageNotFoundError:
        return False


def variables(threads: int) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return own | {
        PREPARED: "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # glibc keeps what is freed: a result of 32 MiB would otherwise be 8,192 page faults at
        # every call, which no engine is to blame for and which weigh as much as a sparse call.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        # What FlexAttention compiles is found again by the next run.
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "target" / "peers-inductor"),
    }


def install_longspan() -> str:
    """Builds this checkout's wheel, and has this process import it; the commit it was built from."""
    say("building Longspan")
    # Now: by the end of a run the checkout may have moved on.
    commit = output("git", "rev-parse", "--short", "HEAD")
    if output("git", "status", "--porcelain", "--", "crates", "python"):
        commit += " with changes"
    target = ROOT / "target" / "peers-wheel"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    command = [*pip, "--target", str(target / "site"), str(ROOT / "python")]
    subprocess.run(command, check=True, env=os.environ | {"CARGO_TARGET_DIR": str(target)})
    sys.path.insert(0, str(target / "site"))
    return commit


def output(*command: str) -> str:
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
