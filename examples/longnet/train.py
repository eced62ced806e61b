#!/usr/bin/env python3
"""Trains a byte-level LongNet language model with torch, on the CPU; stops and resumes anywhere.

    python examples/longnet/train.py --text corpus.txt --out run --context 16384 --steps 2000

The twin of `cargo run --release -p longspan-candle --example longnet`: the same weights, bytes,
optimizer and schedule give the same losses, to rounding (`examples/longnet/compare`).

- The last twentieth of the text is for validation, the rest for training.
- Entry `b` of step `s` begins at `splitmix64(splitmix64(seed) + s * batch + b)` modulo the number of
  places where a window of `context + 1` bytes fits. So a step's data depends on its number alone,
  and a run that was killed goes on as if it hadn't been.
- AdamW, 0.9 and 0.98, decay 0.01 on all weights; gradients cut to norm 1; the rate rises linearly
  over `--warmup` steps, then falls as a cosine to a tenth at the last step.

`--out` has `config.json` and `model.safetensors`, which candle's modules load, `optimizer.pt` and
`log.jsonl`. All are replaced together, every `--every` steps and at the end.
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from longspan.torch import LongNetConfig, LongNetLM

BETAS, DECAY, CLIP, LAST = (0.9, 0.98), 0.01, 1.0, 0.1
HELD_OUT = 20
WORD = (1 << 64) - 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a file of bytes to learn")
    add("--out", type=Path, required=True, help="where the run is kept; goes on where one is there")
    add("--config", type=Path, help="config.json of a model; the example's own where left out")
    add("--weights", type=Path, help="model.safetensors to begin with")
    add("--context", type=int, default=16_384)
    add("--batch", type=int, default=1)
    add("--steps", type=int, default=1_000)
    add("--rate", type=float, default=1e-3)
    add("--warmup", type=int, default=100)
    add("--seed", type=int, default=1)
    add("--every", type=int, default=50, help="steps between checkpoints")
    add("--windows", type=int, default=4, help="windows of the validation")
    return parser.parse_args()


def small() -> LongNetConfig:
    """A few million weights: a step of 16 k bytes takes seconds."""
    return LongNetConfig.of(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        segment_lengths=[512, 1024, 2048, 4096, 8192],
        dilation_rates=[1, 2, 4, 8, 16],
    )


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


class Text:
    """Windows of a file."""

    def __init__(self, path: Path, context: int):
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        held_out = len(data) // HELD_OUT
        self.train, self.valid = data[: len(data) - held_out], data[len(data) - held_out :]
        self.context = context
        if len(self.valid) <= context:
            raise SystemExit(
                f"{path} has {len(data):,} bytes, expected at least {HELD_OUT * (context + 2):,}: "
                f"its last twentieth has to hold a window of {context:,}"
            )

    def batch(self, seed: int, step: int, size: int) -> torch.Tensor:
        places = len(self.train) - self.context
        first = splitmix64(seed)
        starts = [splitmix64((first + step * size + b) & WORD) % places for b in range(size)]
        return self.stack(self.train, starts)

    def validation(self, windows: int) -> torch.Tensor:
        """Windows side by side, as many as there are of those asked for."""
        fit = min(windows, (len(self.valid) - 1) // self.context)
        return self.stack(self.valid, [i * self.context for i in range(fit)])

    def stack(self, data: torch.Tensor, starts: list[int]) -> torch.Tensor:
        return torch.stack([data[s : s + self.context + 1].long() for s in starts])


def rate_at(step: int, given: argparse.Namespace) -> float:
    """Of the step with this number, from 0."""
    if step < given.warmup:
        return given.rate * (step + 1) / given.warmup
    share = (step - given.warmup) / max(1, given.steps - given.warmup)
    return given.rate * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * share)))


def loss_of(model: LongNetLM, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


class Run:
    """A model, its optimizer and what was seen so far, as they are kept in a directory."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.step, self.log = given, 0, []
        recover(given.out)
        resumed = (given.out / "optimizer.pt").exists()
        if resumed:
            self.model = LongNetLM.load(given.out)
        else:
            torch.manual_seed(given.seed)
            config = small()
            if given.config is not None:
                config = LongNetConfig.from_fields(json.loads(given.config.read_text()))
            self.model = LongNetLM(config)
            if given.weights is not None:
                from safetensors.torch import load_file

                self.model.load_state_dict(load_file(given.weights))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=given.rate, betas=BETAS, eps=1e-8, weight_decay=DECAY
        )
        if resumed:
            kept = torch.load(given.out / "optimizer.pt", weights_only=True)
            if kept["settings"] != self.settings():
                changed = {k: v for k, v in kept["settings"].items() if self.settings()[k] != v}
                raise SystemExit(
                    f"{given.out} was made with {changed}, expected the same settings: give these, or "
                    "another --out"
                )
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step = kept["step"]
            lines = (given.out / "log.jsonl").read_text().splitlines()
            self.log = [json.loads(line) for line in lines]

    def settings(self) -> dict:
        """What a run can't change on its way; more steps would be another schedule."""
        names = ("context", "batch", "steps", "rate", "warmup", "seed")
        return {name: getattr(self.given, name) for name in names}

    def save(self) -> None:
        """A directory beside it takes its place, so that there is always a whole one."""
        out = self.given.out
        new, old = beside(out, "new"), beside(out, "old")
        shutil.rmtree(new, ignore_errors=True)
        self.model.save(new)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "settings": self.settings(),
        }
        torch.save(state, new / "optimizer.pt")
        (new / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.log))
        if out.exists():
            os.rename(out, old)
        os.rename(new, out)
        shutil.rmtree(old, ignore_errors=True)

    def train_step(self, ids: torch.Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, self.given)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def bits(self, windows: torch.Tensor) -> float:
        """Bits a byte."""
        losses = [loss_of(self.model, ids[None]).item() for ids in windows]
        return sum(losses) / len(losses) / math.log(2)


def beside(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}")


def recover(out: Path) -> None:
    """A run that was killed between the two renames has its last checkpoint under the old name."""
    if not out.exists() and beside(out, "old").exists():
        os.rename(beside(out, "old"), out)
    for kind in ("new", "old"):
        shutil.rmtree(beside(out, kind), ignore_errors=True)


def main() -> None:
    given = arguments()
    text, run = Text(given.text, given.context), Run(given)
    weights = sum(x.numel() for x in run.model.parameters())
    print(f"{weights:,} weights, step {run.step} of {given.steps}", flush=True)
    while run.step < given.steps:
        start = time.perf_counter()
        loss = run.train_step(text.batch(given.seed, run.step, given.batch))
        seconds = time.perf_counter() - start
        line = {"step": run.step, "loss": loss, "bits": loss / math.log(2), "seconds": seconds}
        last = run.step == given.steps
        if run.step % given.every == 0 or last:
            line["validation_bits"] = run.bits(text.validation(given.windows))
        run.log.append(line)
        if run.step % given.every == 0 or last:
            run.save()
        speed = given.batch * given.context / seconds
        print(
            f"step {run.step}: {line['bits']:.4f} bits a byte, {speed:,.0f} bytes a second"
            + (f", validation {line['validation_bits']:.4f}" if "validation_bits" in line else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
