"""Ranks of one thread against one process with as many threads, on the same work.

    cargo build --release -p longspan-cli --features mpi
    python3 benches/ring/against_one.py target/release/longspan --mpirun

Every round runs each side once: attention without a ring (`longspan bench`), a ring of one rank with
all threads, ranks that are threads of one process, with --mpirun ranks that are processes, and each
of the rings again in the reproducible order. Best of rounds, forward + backward, and the ratio to
attention without a ring; hidden shares are those of the round that was best. Run it on a quiet
machine: all cores are needed.
"""

import argparse
import json
import subprocess

SHAPES = [
    ("causal", 8192, "balanced"),
    ("causal & (window(1024, 0) | sinks(64))", 32768, "balanced"),
    ("full", 4096, "contiguous"),
]


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{done.returncode} from {' '.join(command)}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def bench(arguments, pattern, tokens):
    command = [arguments.longspan, "bench", pattern, "--tokens", str(tokens), "--json", "--head-dim", str(arguments.dim)]
    command += ["--heads", str(arguments.heads), "--threads", str(arguments.ranks), "--repeat", str(arguments.repeat)]
    return {"ms": sum(each["ms"] for each in run(command)), "hidden_share": None}


def ring(arguments, pattern, tokens, shards, ranks, launcher, fold):
    command = [*launcher, arguments.longspan, "ring", pattern, "--tokens", str(tokens), "--json"]
    command += ["--heads", str(arguments.heads), "--head-dim", str(arguments.dim), "--repeat", str(arguments.repeat)]
    command += ["--threads", str(arguments.ranks // ranks), "--shards", shards, "--fold", fold]
    if not launcher:
        command += ["--ranks", str(ranks)]
    return run(command)[0]


def sides(arguments, pattern, tokens, shards):
    every = {"no ring": lambda: bench(arguments, pattern, tokens)}
    launchers = [("one rank", 1, []), ("ranks of threads", arguments.ranks, [])]
    if arguments.mpirun:
        mpirun = f"mpirun --allow-run-as-root --bind-to none -n {arguments.ranks} --mca pml ob1 --mca btl self,sm"
        launchers.append(("ranks of MPI", arguments.ranks, mpirun.split()))
    for fold in arguments.folds:
        for name, ranks, launcher in launchers:
            shape = (pattern, tokens, shards, ranks, launcher, fold)
            every[f"{name}, {fold}"] = lambda shape=shape: ring(arguments, *shape)
    return every


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("longspan", help="the command")
    parser.add_argument("--mpirun", action="store_true", help="ranks of MPI too; needs Open MPI, and a build with it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--folds", nargs="+", default=["overlapped", "reproducible"], metavar="FOLD")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="one of them alone")
    arguments = parser.parse_args()

    shapes = SHAPES if arguments.shape is None else [SHAPES[arguments.shape]]
    print("| pattern | tokens | side | ms | ÷ no ring | hidden |\n|---|---|---|---|---|---|")
    for pattern, tokens, shards in shapes:
        every = sides(arguments, pattern, tokens, shards)
        best = {}
        for _ in range(arguments.rounds):
            for name, side in every.items():
                found = side()
                if name not in best or found["ms"] < best[name]["ms"]:
                    best[name] = found
        for name, found in best.items():
            ratio = found["ms"] / best["no ring"]["ms"]
            hidden = "" if found["hidden_share"] is None else f"{100 * found['hidden_share']:.0f} %"
            print(f"| `{pattern}` | {tokens:,} | {name} | {found['ms']:.1f} | {ratio:.3f} | {hidden} |", flush=True)


if __name__ == "__main__":
    main()
