#!/usr/bin/env python3
"""Longspan against torch's SDPA and FlexAttention, interleaved in one run.

Makes its own environment and builds Longspan where that is needed, checks that all engines agree,
measures, and writes a table, a picture and the raw samples. README.md says what is compared.
"""

import argparse
import re
import sys
import time
from datetime import date
from pathlib import Path

sys.dont_write_bytecode = True  # no caches beside the sources

import environment
from environment import ROOT, say

SECTIONS = ("dense", "causal", "windows", "linear", "threads", "decode")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="4,096 tokens and d 64 only, few rounds")
    some = f"only these of {', '.join(SECTIONS)}"
    add("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=some)
    instead = "these lengths in place of 4,096 and 16,384 (and 65,536 in the linear section)"
    add("--tokens", nargs="+", type=positive, metavar="N", help=instead)
    add("--threads", type=positive, default=2, metavar="N", help="of every engine; 2 if left out")
    patience = "each case may wait so long, in all, for rounds that begin on a quiet machine"
    add("--patience", type=float, default=0.0, metavar="SECONDS", help=patience)
    add("--isa", help="Longspan's instruction set, in place of the fastest")
    kept = "write benches/record/<date>-peers-NAME.*, not target/peers/latest.*"
    add("--record", type=name, metavar="NAME", help=kept)
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number


def name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected small letters, digits and dashes")
    return text


def main() -> int:
    given = arguments()
    environment.prepare(given.threads)

    import torch

    import agreement
    import native
    import plot
    import report
    import sections
    from measure import Budget

    torch.set_num_threads(given.threads)
    settings = sections.Settings(
        tokens=tuple(given.tokens or ((4_096,) if given.quick else (4_096, 16_384))),
        long_tokens=() if given.tokens or given.quick else (sections.LONG,),
        dims=(64,) if given.quick else (64, 128),
        threads=given.threads,
        isa=given.isa,
        flex_blocks=(64,) if given.quick else (64, 128),
        budget=Budget(*((1.0, 3, 10) if given.quick else (4.0, 3, 20)), given.patience),
    )
    bench = sections.Bench(native.Library(environment.library()), settings)
    clock = time.perf_counter()

    try:
        problems = agreement.small_problems(sections.ONE_HEAD, settings.dims)
        checks = (
            agreement.check_small(bench.library, problem, settings.threads, settings.isa)
            for problem in problems
        )
        worst = 100 * max(checks)
        say(f"{len(problems)} small problems agree with f64, within {worst:.0f} % of the tolerance")
        steps = [step for section in given.only for step in sections.steps(section, settings)]
        for number, step in enumerate(steps, 1):
            seconds = int(time.perf_counter() - clock)
            say(f"[{number}/{len(steps)}  {seconds // 60}:{seconds % 60:02}] {step.title}")
            before = len(bench.figures)
            step.run(bench)
            native.give_back_memory()
            for figure in bench.figures[before:]:
                target = f", target {figure.target.show()}" if figure.target else ""
                say(f"    {figure.what}  {figure.kind.show(figure.best)}{target}")
    except (agreement.Disagreement, native.Failed) as error:
        say(f"{sys.argv[0]}: {error}")
        return 1

    stem = destination(given.record)
    command = " ".join(["benches/peers/run.py", *sys.argv[1:]])
    where = report.machine(bench)
    stem.with_suffix(".json").write_text(report.raw(bench, where, command))
    picture = plot.draw(bench.cases, settings.threads, stem)
    stem.with_suffix(".md").write_text(report.markdown(bench, where, command, picture))
    print(report.figure_table(bench.figures))
    seconds = int(time.perf_counter() - clock)
    pictures = ", .png, .svg" if picture else ""
    say(f"wrote {stem.relative_to(ROOT)}.md, .json{pictures} after {seconds} s")
    return 0


def destination(record: str | None) -> Path:
    """Where results go, without a suffix."""
    if record:
        stem = ROOT / "benches" / "record" / f"{date.today().isoformat()}-peers-{record}"
    else:
        stem = ROOT / "target" / "peers" / "latest"
    stem.parent.mkdir(parents=True, exist_ok=True)
    return stem


if __name__ == "__main__":
    sys.exit(main())
