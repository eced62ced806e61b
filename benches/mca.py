#!/usr/bin/env python3
"""Share of the multiply-add throughput that LLVM's models of CPUs predict for the hot loops.

    cargo build --release -p longspan-cli
    benches/mca.py target/release/longspan
    benches/mca.py target/aarch64-unknown-linux-gnu/release/lib_longspan.so

The file needs its symbols, `llvm-mca-19` is Debian's `llvm-19`. A loop ends with a jump back to its
first instruction and has no other jump. Products are those of the functions of register tiles. Peak:
independent multiply-adds on registers in the same model. The models know no caches and no fusion of a
comparison with its jump.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MCA = "llvm-mca-19"
# Per instruction set: what multiplies and adds, its registers, and the CPUs whose models are asked.
SETS = {
    "avx2": (r"vfmadd\d+ps", "%ymm", ("znver3", "alderlake", "skylake-avx512")),
    "avx512": (r"vfmadd\d+ps", "%zmm", ("znver4", "skylake-avx512", "sapphirerapids")),
    "neon": (r"fmla", ".4s", ("neoverse-n1", "neoverse-v1")),
}
JUMP = re.compile(r"^(j\w+|b|b\.\w+|cbn?z|tbn?z)\s")
ITERATIONS = 300


class Loop(NamedTuple):
    function: str
    code: tuple[str, ...]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(sys.argv[1])
    arm = "AArch64" in output("readelf", "-h", str(file))
    disassembler = "aarch64-linux-gnu-objdump" if arm else "objdump"
    loops = list(find_loops(output(disassembler, "-d", "-C", "--no-show-raw-insn", str(file))))
    for name in ["neon"] if arm else ["avx2", "avx512"]:
        report(name, loops, "aarch64" if arm else "x86-64")
    return 0


def find_loops(text: str):
    """Loops without another jump inside."""
    function, lines = "", []
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:", line):
            function, lines = head[1], []
        elif at := re.match(r"\s+([0-9a-f]+):\s+(.*)", line):
            address, code = int(at[1], 16), re.sub(r"\s*(# |//|<).*", "", at[2]).strip()
            lines.append((address, code))
            if not JUMP.match(code):
                continue
            target = re.search(r"(?:0x)?([0-9a-f]+)$", code)
            first = int(target[1], 16) if target else address + 1
            # Without another jump inside: what is after the last one.
            if lines[0][0] <= first < address:
                body = [c for a, c in lines if a >= first]
                # The jump itself, to a label.
                yield Loop(function, (*body[:-1], re.sub(r"(0x)?[0-9a-f]+$", "top", body[-1])))
            lines = []


def report(name: str, loops: list[Loop], architecture: str) -> None:
    multiply, register, cpus = SETS[name]

    def count(loop: Loop) -> int:
        return sum(bool(re.match(multiply, c)) and register in c for c in loop.code)

    def is_exponential(loop: Loop) -> bool:
        return any(re.search(r"vscalefps|vpslld\s+\$0x17|shl\s.*#23", c) for c in loop.code)

    ours = [x for x in loops if name in x.function or name == "neon"]
    products, exponentials = {}, {}
    for loop in ours:
        if is_exponential(loop):
            exponentials.setdefault((count(loop), len(loop.code)), loop)
        elif "tiles_of" in loop.function:
            several = len(sums(loop, multiply, register))
            what = f"{loop.function.split('::')[-1]}, {several} sums"
            products.setdefault((what, len(loop.code)), loop)
    rows = [(what, loop) for (what, _), loop in sorted(products.items())]
    if exponentials:
        most = max(exponentials)
        rows.append((f"exponentials ({most[0]} multiply-adds)", exponentials[most]))
    print(f"\n| {name} | instructions | " + " | ".join(cpus) + " |\n|---|---|" + "---|" * len(cpus))
    for what, loop in rows:
        cells = []
        for cpu in cpus:
            cycles = predicted(loop.code, architecture, cpu)
            share = count(loop) / cycles / peak(name, architecture, cpu)
            cells.append(f"{share:.0%} ({cycles:.1f} cycles)")
        print(f"| {what} | {len(loop.code)} | " + " | ".join(cells) + " |")


def sums(loop: Loop, multiply: str, register: str) -> set[str]:
    """The registers that a loop adds products to."""
    adding = [c for c in loop.code if re.match(multiply, c) and register in c]
    return {c.split()[1] if "fmla" in c else c.split(",")[-1] for c in adding}


def peak(name: str, architecture: str, cpu: str) -> float:
    """Multiply-adds per cycle, independent and on registers."""
    if name == "neon":
        code = [f"fmla v{n}.4s, v30.4s, v31.4s" for n in range(24)]
    else:
        register = SETS[name][1]
        code = [f"vfmadd231ps {register}15, {register}14, {register}{n}" for n in range(14)]
    return len(code) / predicted(tuple(code), architecture, cpu)


def predicted(code: tuple[str, ...], architecture: str, cpu: str) -> float:
    """Cycles per iteration."""
    text = "top:\n" + "\n".join(code) + "\n"
    command = [MCA, f"-march={architecture}", f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(command)}:\n{ran.stderr}\n{text}")
    return int(re.search(r"Total Cycles:\s+(\d+)", ran.stdout)[1]) / ITERATIONS


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
