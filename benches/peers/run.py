#!/usr/bin/env python3
"""Longspan against torch's SDPA and FlexAttention, interleaved in one run.

Makes its own environment and builds Longspan where that is needed, checks that all engines agree,
measures, and writes a table, a picture and the raw samples. README.md says what is compared.
"""

import argparse
import ctypes
import re
import sys
import time
from datetime import date
from pathlib import Path

sys.dont_write_bytecode = True  # no caches beside the sources

import environment
from environment import ROOT, say

# By what tensors hold.
SECTIONS = {
    "f32": ("dense", "causal", "windows", "linear", "threads", "decode"),
    "bf16": ("dense", "causal", "windows", "errors"),
}
ALL_SECTIONS = tuple(dict.fromkeys(name for names in SECTIONS.values() for name in names))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="4,096 tokens and d 64 only, few rounds")
    some = f"only these of {', '.join(ALL_SECTIONS)}"
    add("--only", nargs="+", choices=ALL_SECTIONS, metavar="SECTION", help=some)
    dtypes = "what tensors hold, f32 or bf16, a run each; f32 if left out"
    add("--dtype", nargs="+", choices=SECTIONS, default=["f32"], metavar="TYPE", help=dtypes)
    instead = "these lengths in place of 4,096 and 16,384 (and 65,536 in the linear section)"
    add("--tokens", nargs="+", type=positive, metavar="N", help=instead)
    add("--threads", type=positive, default=2, metavar="N", help="of every engine; 2 if left out")
    patience = "each case may wait so long, in all, for rounds that begin on a quiet machine"
    add("--patience", type=float, default=0.0, metavar="SECONDS", help=patience)
    add("--isa", help="Longspan's instruction set, in place of the fastest: avx512 is without AMX")
    kept = "write benches/record/<date>-peers-NAME-TYPE.*, not target/peers/latest-TYPE.*"
    add("--record", type=name, metavar="NAME", help=kept)
    given = parser.parse_args()
    for dtype in given.dtype:
        for section in given.only or ():
            if section not in SECTIONS[dtype]:
                has = ", ".join(SECTIONS[dtype])
                parser.error(f"no section {section} for {dtype}, which has {has}")
    return given


def positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number


def name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected small letters, digits and dashes")
    return text


def give_back_memory() -> None:
    """Has glibc return what it was told to keep: what a step leaves free is gigabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def main() -> int:
    given = arguments()
    environment.prepare(given.threads)

    import torch

    torch.set_num_threads(given.threads)
    commit = environment.install_longspan()

    import agreement

    try:
        for dtype in dict.fromkeys(given.dtype):
            compare(given, dtype, commit)
    except (agreement.Disagreement, ValueError) as error:
        say(f"{sys.argv[0]}: {error}")
        return 1
    return 0


def compare(given: argparse.Namespace, dtype: str, commit: str) -> None:
    """All that is asked for with tensors of one type, and its files."""
    import agreement
    import plot
    import report
    import sections
    from measure import Budget

    settings = sections.Settings(
        tokens=tuple(given.tokens or ((4_096,) if given.quick else (4_096, 16_384))),
        long_tokens=() if given.tokens or given.quick else (sections.LONG,),
        dims=(64,) if given.quick else (64, 128),
        threads=given.threads,
        isa=given.isa,
        dtype=dtype,
        flex_blocks=(64,) if given.quick else (64, 128),
        budget=Budget(*((1.0, 3, 10) if given.quick else (4.0, 3, 20)), given.patience),
    )
    bench = sections.Bench(settings)
    clock = time.perf_counter()

    problems = agreement.small_problems(sections.ONE_HEAD, settings.dims, dtype)
    checks = (
        agreement.check_small(problem, settings.threads, settings.isa)
        for problem in problems
    )
    worst = 100 * max(checks)
    say(
        f"{len(problems)} small problems of {dtype} agree with f64, "
        f"within {worst:.0f} % of the tolerance"
    )
    chosen = given.only or SECTIONS[dtype]
    steps = [step for section in chosen for step in sections.steps(section, settings)]
    for number, step in enumerate(steps, 1):
        seconds = int(time.perf_counter() - clock)
        say(f"[{number}/{len(steps)}  {seconds // 60}:{seconds % 60:02}] {dtype}: {step.title}")
        before = len(bench.figures)
        step.run(bench)
        give_back_memory()
        for figure in bench.figures[before:]:
            target = f", target {figure.target.show()}" if figure.target else ""
            say(f"    {figure.what}  {figure.kind.show(figure.best)}{target}")

    stem = destination(given.record, dtype)
    command = " ".join(["benches/peers/run.py", *sys.argv[1:]])
    where = report.machine(bench, commit)
    stem.with_suffix(".json").write_text(report.raw(bench, where, command))
    picture = plot.draw(bench.cases, dtype, settings.threads, stem)
    stem.with_suffix(".md").write_text(report.markdown(bench, where, command, picture))
    print(report.figure_table(bench.figures))
    seconds = int(time.perf_counter() - clock)
    pictures = ", .png, .svg" if picture else ""
    say(f"wrote {stem.relative_to(ROOT)}.md, .json{pictures} after {seconds} s")


def destination(record: str | None, dtype: str) -> Path:
    """Where results go, without a suffix."""
    if record:
        stem = ROOT / "benches" / "record" / f"{date.today().isoformat()}-peers-{record}-{dtype}"
    else:
        stem = ROOT / "target" / "peers" / f"latest-{dtype}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    return stem


if __name__ == "__main__":
    sys.exit(main())
