#!/usr/bin/env python3
"""Trains a LongNet on the bytes of a text, to say what comes next; with torch, on the CPU.

    examples/longnet/fetch text      # Perl's manual, from Debian's package perl-doc
    python examples/longnet/train.py --directory run --steps 500 text/text.txt
    examples/longnet/plot curve.png run

The twin of candle's example (`cargo run --release -p longspan-candle --example longnet`): settings,
data, optimizer, schedule and files are the same, so from the same weights both make the same curve,
to rounding (`examples/longnet/compare`), and either goes on with a checkpoint of the other.

The same command goes on where it was stopped, be it by Ctrl-C or by `kill -9`, and makes the same
curve: a checkpoint has weights, moments and the number of steps, from which everything else follows.

| file | what |
|---|---|
| `run.json` | the settings; a resumed training must have the same |
| `checkpoint.safetensors` | weights, moments, the number of steps done |
| `losses.csv` | one line per step |
| `model/` | the model, once it is done |
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from longspan.torch import LongNetConfig, LongNetLM
from safetensors.torch import load_file, save_file

BETAS, EPSILON = (0.9, 0.98), 1e-8
#: Of weights; biases and norms don't decay.
DECAY = 0.01
#: Gradients longer than this are cut to it.
LONGEST = 1.0
WINDOW = 1_024
HEADER = "step,tokens,bits_per_byte,validation,seconds"
WORD = (1 << 64) - 1


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    kinds = ("dense", "window", "dilated", "dilated-window")
    add("--attention", choices=kinds, default="dilated", help="which queries attend to which keys; causal all of it")
    add("--context", type=int, default=16_384, help="bytes per sequence")
    add("--batch", type=int, default=1, help="sequences a step")
    add("--hidden", type=int, default=256, help="elements per token")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--window", type=int, help=f"bytes that a window sees [{WINDOW}]")
    add("--segments", type=numbers, help="of the branches, by commas [context / 16 to all of it]")
    add("--rates", type=numbers, help="of the branches [1,2,4,8,8, as far as there are heads]")
    add("--steps", type=int, required=True)
    add("--rate", type=float, default=2e-3, help="once it is warm; it falls to a tenth")
    add("--warmup", type=int, default=20, help="steps until it is")
    add("--validation", type=int, default=262_144, help="bytes at the end, a multiple of the context")
    add("--validate-every", type=int, default=50)
    add("--seed", type=int, default=1)
    add("--directory", type=Path, required=True, help="one that is there already goes on")
    add("--checkpoint-every", type=int, default=10)
    add("text", type=Path, nargs="+", help="files, read one after the other")
    return parser.parse_args(given)


def branches(given: argparse.Namespace) -> tuple[list[int], list[int]]:
    if (given.segments is None) != (given.rates is None):
        raise SystemExit("--segments and --rates: expected both or neither")
    if given.segments is not None:
        return given.segments, given.rates
    # With more rate than heads there would be tokens that no head has.
    rates = [min(rate, given.heads) for rate in (1, 2, 4, 8, 8)]
    return [max(given.context >> shift, 1) for shift in (4, 3, 2, 1, 0)], rates


def config(given: argparse.Namespace) -> LongNetConfig:
    """The model's."""
    kind = given.attention
    if given.window is not None and kind in ("dense", "dilated"):
        raise SystemExit("--window with an attention that has none: expected window or dilated-window")
    if given.segments is not None and kind in ("dense", "window"):
        raise SystemExit("--segments with an attention that has none: expected a dilated one")
    segments, rates = branches(given)
    attention: dict[str, Any]
    window = f"sliding_window({WINDOW if given.window is None else given.window})"
    if kind in ("dilated", "dilated-window"):
        both = {"also": window, "overlap": "union"} if kind == "dilated-window" else {}
        attention = {"dilated": {"segment_lengths": segments, "dilation_rates": rates} | both}
    else:
        attention = {"pattern": window if kind == "window" else "full"}
    return LongNetConfig(
        vocab_size=256,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        intermediate_size=4 * given.hidden,
        attention=attention,
    )


def splitmix(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


class Text:
    """Bytes of files, the last of them for validation."""

    def __init__(self, files: list[Path], context: int, validation: int):
        data = b"".join(file.read_bytes() for file in files)
        if validation < 1 or validation % context:
            raise SystemExit(
                f"{validation} bytes for validation, expected a multiple of the context, {context}"
            )
        least = validation + 1 + context + 1
        if len(data) < least:
            raise SystemExit(
                f"{len(data)} bytes of text, expected at least {least}: {validation} for validation "
                f"and {context} to learn from"
            )
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.learnt, self.context = len(data) - validation - 1, context

    def name(self) -> str:
        """What tells one text from another: its length, and FNV-1a of its bytes."""
        found = 0xCBF29CE484222325
        for byte in bytes(self.data.numpy()):
            found = ((found ^ byte) * 0x100000001B3) & WORD
        return f"{len(self.data)} bytes, {found:016x}"

    def batch(self, seed: int, step: int, size: int) -> torch.Tensor:
        """Random places, which follow from the seed and the step alone."""
        places = self.learnt - self.context
        entries = range(step * size, (step + 1) * size)
        return self.sequences([splitmix(splitmix(seed) ^ entry) % places for entry in entries])

    def validation(self) -> Iterator[torch.Tensor]:
        """All of the validation text, a sequence at a time."""
        for start in range(self.learnt, len(self.data) - 1, self.context):
            yield self.sequences([start])

    def sequences(self, starts: list[int]) -> torch.Tensor:
        """Ids, and one more that the last of them predicts."""
        return torch.stack([self.data[s : s + self.context + 1].long() for s in starts])


def nats(model: LongNetLM, sequences: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def validate(model: LongNetLM, text: Text) -> float:
    """Bits a byte over all of the validation text."""
    losses = [float(nats(model, sequences).item()) for sequences in text.validation()]
    return sum(loss / math.log(2) for loss in losses) / len(losses)


def rate_at(step: int, given: argparse.Namespace) -> float:
    """Up in a line, down in a cosine to a tenth."""
    rate: float = given.rate
    if step < given.warmup:
        return rate * (step + 1) / float(given.warmup)
    done = (step - given.warmup) / max(given.steps - given.warmup, 1)
    return rate * (0.55 + 0.45 * math.cos(math.pi * done))


class Optimizer:
    """AdamW over a model, and both as they are kept in a checkpoint."""

    def __init__(self, model: LongNetLM):
        self.model = model
        weights = [x for x in model.parameters() if x.ndim > 1]
        others = [x for x in model.parameters() if x.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, weight_decay=DECAY)

    def step(self, rate: float) -> float:
        """Returns the length of the gradient before it was cut."""
        gradients = [x.grad for x in self.model.parameters() if x.grad is not None]
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        if not math.isfinite(length):
            raise SystemExit(f"the gradient's length is {length}")
        if length > LONGEST:
            for gradient in gradients:
                gradient.mul_(LONGEST / length)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad()
        return length

    def save(self, path: Path, steps: int) -> None:
        """Weights, moments and the number of steps: beside its place, then moved there."""
        state = {"steps": torch.tensor([steps])}
        for name, x in self.model.named_parameters():
            known = self.adamw.state.get(x, {})
            state[name] = x.detach()
            for moment, own in (("first", "exp_avg"), ("second", "exp_avg_sq")):
                state[f"adamw.{moment}.{name}"] = known.get(own, torch.zeros_like(x.detach()))
        beside = path.with_suffix(".new")
        save_file(state, beside)
        put(beside, path)

    def load(self, path: Path) -> int:
        """The number of steps that were done."""
        state = load_file(path)
        steps = state.pop("steps")
        with torch.no_grad():
            for name, x in self.model.named_parameters():
                x.copy_(state[name])
                self.adamw.state[x] = {
                    "step": steps[0].float(),
                    "exp_avg": state[f"adamw.first.{name}"],
                    "exp_avg_sq": state[f"adamw.second.{name}"],
                }
        return int(steps)


def put(beside: Path, path: Path) -> None:
    """Moves a file to its place, whole whenever the process is killed."""
    for which in (beside, path.parent):
        opened = os.open(which, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
        if which is beside:
            os.rename(beside, path)


def write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    put(beside, path)


def settings(given: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Everything that the curve depends on."""
    apart = ("directory", "checkpoint_every", "text")
    known = {name: value for name, value in vars(given).items() if name not in apart}
    return known | {"budget": None, "text": text.name()}


def open_run(given: argparse.Namespace, text: Text, optimizer: Optimizer) -> int:
    """Begins a training, or goes on with the one that is there; returns the steps that are done."""
    directory: Path = given.directory
    directory.mkdir(parents=True, exist_ok=True)
    path, now = directory / "run.json", settings(given, text)
    if path.exists():
        before = json.loads(path.read_text())
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                raise SystemExit(
                    f"{path}: this training has {name} = {before.get(name)}, asked for "
                    f"{now.get(name)}: another training needs another directory"
                )
    else:
        write(path, json.dumps(now, indent=2))
    checkpoint = directory / "checkpoint.safetensors"
    done = optimizer.load(checkpoint) if checkpoint.exists() else 0
    losses = directory / "losses.csv"
    lines = losses.read_text().splitlines()[1 : done + 1] if losses.exists() else []
    if [line.split(",")[0] for line in lines] != [str(step) for step in range(done)]:
        raise SystemExit(f"{losses}: expected a line for each of {done} steps")
    write(losses, "\n".join([HEADER, *lines]) + "\n")
    return done


def train(given: argparse.Namespace) -> None:
    text = Text(given.text, given.context, given.validation)
    torch.manual_seed(given.seed)
    model = LongNetLM(config(given))
    optimizer = Optimizer(model)
    done = open_run(given, text, optimizer)
    weights, tokens = sum(x.numel() for x in model.parameters()), given.context * given.batch
    print(f"{weights} weights, steps {done} to {given.steps}", flush=True)
    with (given.directory / "losses.csv").open("a") as losses:
        for step in range(done, given.steps):
            start = time.perf_counter()
            loss = nats(model, text.batch(given.seed, step, given.batch))
            torch.autograd.backward(loss)
            length = optimizer.step(rate_at(step, given))
            seconds, bits = time.perf_counter() - start, loss.item() / math.log(2)
            last = step + 1 == given.steps
            due = (step + 1) % given.validate_every == 0 or last
            validation = validate(model, text) if due else ""
            losses.write(f"{step},{(step + 1) * tokens},{bits},{validation},{seconds:.3f}\n")
            losses.flush()
            if (step + 1) % given.checkpoint_every == 0 or last:
                # Lines before the checkpoint that says that they are there.
                os.fsync(losses.fileno())
                optimizer.save(given.directory / "checkpoint.safetensors", step + 1)
            print(
                f"step {step + 1:>5} of {given.steps}: {bits:.4f} bits a byte, gradient {length:.2f}, "
                f"{tokens / seconds:.0f} tokens per second",
                flush=True,
            )
            if due:
                print(f"validation: {validation:.4f} bits a byte", flush=True)
    model.save(given.directory / "model")
    print(f"the model is in {given.directory / 'model'}")


if __name__ == "__main__":
    train(arguments())
