#!/usr/bin/env python3
"""SmolLM2-135M with Longspan's attention beside SDPA: prefill, generation and fine-tuning, in one run.

    examples/smollm2/run DIRECTORY                              # fetches weights and a text, then runs this
    python examples/smollm2/smollm2.py WEIGHTS TEXT… --out DIRECTORY

Four attentions in turn: the model's own (`attn_implementation="sdpa"`) and three names that Longspan registers with
transformers: dense, a window with sinks, and a selector that chooses key blocks by content.

| file | what |
|---|---|
| `results.json` | everything measured |
| `results.md` | its tables |
| `smollm2.svg` | its plot |

Over 500 lines, in one file: an example is read and copied as a whole, and is run by its path.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import longspan
import longspan.transformers
import torch
import transformers  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

#: Most of transformers is untyped, which strict checking refuses to call.
hf: Any = transformers
SDPA, DENSE, WINDOW, SELECTOR = "sdpa", "longspan", "longspan_window", "longspan_selector"
ATTENTIONS = (SDPA, DENSE, WINDOW, SELECTOR)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PATTERN = "window(1024, 0) | sinks(64)"
#: Of a row's attention mass: key blocks that hold less are left out, three quarters of them at 8,192 tokens.
SMALLEST_SHARE = 0.005
#: Dense f32 logits of Longspan may differ from SDPA's by this much.
TOLERANCE = 1e-3
#: Characters that are read per token wanted; these texts have three to five.
CHARACTERS = 8
#: Positions whose logits (49,152 each) are in memory at a time.
CHUNK = 512
#: Positions that count as one observation, since neighbors depend on each other.
STRETCH = 64
#: Sequences of the validation loss.
VALIDATION = 4
#: A dtype and an attention.
Key: TypeAlias = tuple[str, str]
#: What a run can leave out.
PARTS = ("bf16", "prefill", "steps", "fine-tune")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("weights", type=Path, help="a directory with one GGUF file")
    add("text", type=Path, nargs="+", help="each gives a prompt, and its share of the sequences for fine-tuning")
    add("--out", type=Path, required=True, help="a directory for results.json, results.md and smollm2.svg")
    add("--tokens", type=int, default=8_192, help="per prompt [8192]")
    add("--generate", type=int, default=64, help="tokens generated after each prompt [64]")
    add("--rounds", type=int, default=3, help="of which the best time is reported [3]")
    add("--steps", type=int, default=50, help="of fine-tuning [50]")
    add("--fine-tune-tokens", type=int, default=4_096, help="per step [4096]")
    add("--rate", type=float, default=1e-4, help="the highest learning rate [1e-4]")
    add("--without", choices=PARTS, action="append", default=[], help="leaves a part out; may be repeated")
    given = parser.parse_intermixed_args()
    for name, least in (("tokens", 64), ("fine_tune_tokens", 64), ("generate", 2), ("rounds", 1), ("steps", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}, expected at least {least}")
    if {"prefill", "steps", "fine-tune"} <= set(given.without):
        parser.error("--without names every part, expected one to be left")
    return given


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Prefill:
    """One attention in one dtype: means over the texts."""

    dtype: str
    attention: str
    tokens: int
    blocks: float
    """The share of causal blocks that is computed."""
    seconds: float
    attention_seconds: float
    decode_tokens_per_second: float
    peak_bytes: int | None
    loss: float
    kl: float
    """Of the f32 logits of SDPA to these logits, in nats."""
    largest_difference: float
    """Of any logit, to the f32 logits of SDPA."""
    rms_difference: float
    rms_beside_sdpa: tuple[float, float, float] | None
    """Its ratio to SDPA's of the same dtype, with the ends of its 95 % interval; none in f32, where SDPA's is 0."""
    equal_tokens: int
    """Generated tokens of the first text before the first one that differs from SDPA's of this dtype."""
    generated: str


@dataclass(frozen=True)
class Step:
    dtype: str
    attention: str
    tokens: int
    seconds: float
    attention_seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class FineTuning:
    tokens: int
    losses: list[float]
    seconds: float
    validation_tokens: int
    before: dict[str, float]
    """The validation loss with each attention."""
    after: dict[str, float]


@dataclass
class Results:
    about: dict[str, str | int]
    prefill: list[Prefill] = field(default_factory=list[Prefill])
    steps: list[Step] = field(default_factory=list[Step])
    fine_tuning: FineTuning | None = None


class _Mark(torch.autograd.Function):
    """Tensors as they are; calls a function when all of their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.reached()
        return None, *gradients


_mark: Callable[..., tuple[Tensor, ...]] = _Mark.apply


class TimedAttention:
    """An attention function of transformers, with the seconds that it has taken.

    The backward pass is timed between two marks in autograd's graph, behind and before attention. Autograd runs what
    was made last first, so nothing else runs between them.
    """

    def __init__(self, attention: Callable[..., tuple[Tensor, Any]]) -> None:
        self.attention = attention
        self.seconds = 0.0

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        trains = torch.is_grad_enabled() and query.requires_grad
        if trains:
            query, key, value = _mark(self._end, query, key, value)
        self._begin()
        out, weights = self.attention(module, query, key, value, *args, **options)
        self._end()
        if trains:
            (out,) = _mark(self._begin, out)
        return out, weights

    def _begin(self) -> None:
        self.seconds -= time.perf_counter()

    def _end(self) -> None:
        self.seconds += time.perf_counter()


class Peak:
    """The most memory that a block of code has resident, beyond what was resident before it; Linux only.

    Memory that the allocator holds but no tensor uses is returned to the system first: it would count as resident
    before, and what is put there as nothing.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> Peak:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        try:
            # Sets the high-water mark of resident memory to what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
        except OSError:
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self.bytes = _status("VmHWM") - self._before


def _status(field: str) -> int:
    """Bytes, of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def largest(peaks: list[int | None]) -> int | None:
    """The largest of the peaks, or none where one was not measured."""
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None


class Texts:
    """Token sequences, `[1, tokens]` each, of text files. The last tenth of each file is for validation."""

    def __init__(self, files: list[Path], tokenizer: Any) -> None:
        self.files = files
        self.texts = [file.read_text("utf-8", "ignore") for file in files]
        self.tokenizer = tokenizer

    def prompts(self, tokens: int) -> list[Tensor]:
        """One per file, from its middle."""
        return [self._sequence(index, 0.5, tokens) for index in range(len(self.files))]

    def training(self, count: int, tokens: int) -> Iterator[Tensor]:
        """From random places, the same in every run; files in turn."""
        places: list[float] = torch.rand(count, generator=torch.Generator().manual_seed(1)).tolist()
        for number, place in enumerate(places):
            index = number % len(self.files)
            last = 0.9 - CHARACTERS * tokens / len(self.texts[index])
            if last < 0:
                raise SystemExit(f"{self.files[index]} is too short to learn sequences of {tokens} tokens from")
            yield self._sequence(index, last * place, tokens)

    def validation(self, count: int, tokens: int) -> list[Tensor]:
        """Evenly spread; files in turn."""
        per_file = math.ceil(count / len(self.files))
        numbers = (divmod(number, len(self.files)) for number in range(count))
        return [self._sequence(index, 0.9 + 0.1 * place / per_file, tokens) for place, index in numbers]

    def _sequence(self, index: int, place: float, tokens: int) -> Tensor:
        text = self.texts[index]
        part = text[int(place * len(text)) :][: CHARACTERS * tokens]
        ids = self.tokenizer(part, add_special_tokens=False).input_ids[:tokens]
        if len(ids) < tokens:
            raise SystemExit(f"{self.files[index]} has {len(ids)} tokens from {place:.0%} on, expected {tokens}")
        return torch.tensor([ids])


def gguf_file(weights: Path) -> str:
    found = [path.name for path in weights.glob("*.gguf")]
    if len(found) != 1:
        raise SystemExit(f"{weights} has {len(found)} GGUF files, expected one")
    return found[0]


def load_model(weights: Path, dtype: str) -> Any:
    say(f"loading the weights in {dtype}")
    return hf.AutoModelForCausalLM.from_pretrained(
        weights,
        gguf_file=gguf_file(weights),
        dtype=DTYPES[dtype],
        # Products with packed weights are several times slower.
        quantization_config=hf.GgufConfig(dequantize=True),
        attn_implementation=SDPA,
    )


def load_texts(weights: Path, files: list[Path]) -> Texts:
    say("loading the tokenizer and the texts")
    return Texts(files, hf.AutoTokenizer.from_pretrained(weights, gguf_file=gguf_file(weights)))


class Attentions:
    """The four attentions, known to transformers by their names, and timed."""

    def __init__(self) -> None:
        self.selector = longspan.BlockSelector(
            "causal", always="window(64, 0) | sinks(1)", mass=1.0, block_mass=SMALLEST_SHARE
        )
        longspan.transformers.register(DENSE)
        longspan.transformers.register(WINDOW, PATTERN)
        longspan.transformers.register(SELECTOR, selector=self.selector)
        known = hf.AttentionInterface()
        self.timed = {name: TimedAttention(known[name]) for name in ATTENTIONS}
        for name, attention in self.timed.items():
            hf.AttentionInterface.register(name, attention)

    def use(self, model: Any, name: str) -> TimedAttention:
        """Changes a model over; the attention's seconds restart at 0."""
        model.set_attn_implementation(name)
        self.timed[name].seconds = 0.0
        return self.timed[name]

    def blocks(self, name: str, model: Any, prompts: list[Tensor]) -> float:
        """The share of causal blocks that an attention computes. A selector's are counted in a pass of their own."""
        if name == SELECTOR:
            shares = [share for ids in prompts for share in self._selected(model, ids)]
            return sum(shares) / len(shares)
        if name == WINDOW:
            tokens = prompts[0].shape[1]
            layouts = [longspan.Pattern(text).compile(tokens) for text in (f"causal & ({PATTERN})", "causal")]
            return layouts[0].active_blocks / layouts[1].active_blocks
        return 1.0

    @torch.no_grad()
    def _selected(self, model: Any, ids: Tensor) -> list[float]:
        """Per layer."""
        shares: list[float] = []

        def counted(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
            shares.append(self.selector.select(query, key, scale=options["scaling"]).density)
            return self.timed[SELECTOR](module, query, key, *args, **options)

        self.use(model, SELECTOR)
        hf.AttentionInterface.register(SELECTOR, counted)
        model.model(ids)
        hf.AttentionInterface.register(SELECTOR, self.timed[SELECTOR])
        return shares


@dataclass
class Pass:
    """A prompt read and continued."""

    hidden: Tensor
    """Of all positions, before the output embedding: `[tokens, hidden size]`."""
    generated: Tensor
    seconds: float
    attention_seconds: float
    decode_seconds: float
    peak_bytes: int | None


@torch.no_grad()
def read(model: Any, attention: TimedAttention, ids: Tensor, generate: int) -> Pass:
    """What `generate` does with a prompt, in two parts that are timed apart."""
    with Peak() as peak:
        start = time.perf_counter()
        out = model.model(ids, use_cache=True)
        first = model.lm_head(out.last_hidden_state[:, -1:]).argmax(-1)
        seconds, attention_seconds = time.perf_counter() - start, attention.seconds
        start = time.perf_counter()
        generated = model.generate(
            torch.cat([ids, first], 1),
            past_key_values=out.past_key_values,
            do_sample=False,
            max_new_tokens=generate - 1,
            min_new_tokens=generate - 1,
        )
        decode_seconds = time.perf_counter() - start
    found = generated[0, ids.shape[1] :]
    return Pass(out.last_hidden_state[0], found, seconds, attention_seconds, decode_seconds, peak.bytes)


def best(passes: list[Pass]) -> Pass:
    """Of the same prompt with the same attention: the best times, the largest peak."""
    found = min(passes, key=lambda one: one.seconds)
    found.decode_seconds = min(one.decode_seconds for one in passes)
    found.peak_bytes = largest([one.peak_bytes for one in passes])
    return found


def read_in_turn(
    model: Any, dtype: str, attentions: Attentions, prompts: list[Tensor], given: argparse.Namespace
) -> dict[str, list[Pass]]:
    """Every prompt with every attention in turn, in several rounds."""
    for name in ATTENTIONS:
        # Starts threads and fills caches of compiled kernels and layouts.
        read(model, attentions.use(model, name), prompts[0][:, :256], 2)
    found: dict[str, list[Pass]] = {name: [] for name in ATTENTIONS}
    for number, ids in enumerate(prompts):
        passes: dict[str, list[Pass]] = {name: [] for name in ATTENTIONS}
        for turn in range(given.rounds):
            for name, own in passes.items():
                own.append(read(model, attentions.use(model, name), ids, given.generate))
                say(
                    f"{dtype}, prompt {number + 1} of {len(prompts)}, round {turn + 1} of {given.rounds}, "
                    f"{name}: prefill {own[-1].seconds:.1f} s, of that attention "
                    f"{own[-1].attention_seconds:.1f} s; generation {own[-1].decode_seconds:.1f} s"
                )
        for name, own in passes.items():
            found[name].append(best(own))
    return found


@torch.no_grad()
def compare(models: dict[str, Any], hidden: dict[Key, Tensor], target: Tensor) -> dict[Key, Tensor]:
    """Per position: loss, divergence from SDPA's f32 logits, and the largest and the mean square difference of logits
    to them; `[4, tokens]` for each dtype and attention."""
    found: dict[Key, list[Tensor]] = {key: [] for key in hidden}
    for start in range(0, len(target), CHUNK):
        part = slice(start, start + CHUNK)
        exact = models["f32"].lm_head(hidden["f32", SDPA][part])
        log_exact = exact.log_softmax(-1)
        for (dtype, name), states in hidden.items():
            logits = models[dtype].lm_head(states[part]).float()
            log_ours = logits.log_softmax(-1)
            loss = -log_ours.gather(1, target[part, None])[:, 0]
            divergence = (log_exact.exp() * (log_exact - log_ours)).sum(-1)
            difference = (logits - exact).abs()
            values = [loss, divergence, difference.amax(-1), difference.square().mean(-1)]
            found[dtype, name].append(torch.stack(values))
    return {key: torch.cat(parts, 1) for key, parts in found.items()}


def measure_prefill(
    models: dict[str, Any], attentions: Attentions, texts: Texts, given: argparse.Namespace
) -> list[Prefill]:
    sequences = texts.prompts(given.tokens + 1)
    prompts = [ids[:, :-1] for ids in sequences]
    passes: dict[Key, list[Pass]] = {}
    blocks: dict[Key, float] = {}
    for dtype, model in models.items():
        for name, own in read_in_turn(model, dtype, attentions, prompts, given).items():
            passes[dtype, name] = own
        say(f"{dtype}: counting blocks")
        for name in ATTENTIONS:
            blocks[dtype, name] = attentions.blocks(name, model, prompts)
    scores: dict[Key, list[Tensor]] = {key: [] for key in passes}
    for number, ids in enumerate(sequences):
        say(f"comparing logits, prompt {number + 1} of {len(sequences)}")
        hidden = {key: own[number].hidden for key, own in passes.items()}
        for key, values in compare(models, hidden, ids[0, 1:]).items():
            scores[key].append(values)
    read_by = {key: Reading(own, torch.stack(scores[key])) for key, own in passes.items()}
    return [
        summary(key, blocks[key], reading, read_by[key[0], SDPA], texts.tokenizer) for key, reading in read_by.items()
    ]


@dataclass
class Reading:
    """All prompts with one attention."""

    passes: list[Pass]
    scores: Tensor
    """What `compare` found: `[prompts, 4, tokens]`."""


def ratio_of_rms(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """Of mean squares per position, with a 95 % interval: a bootstrap over stretches of positions."""
    whole = ours.shape[1] // STRETCH * STRETCH
    both = torch.stack([ours, theirs])[..., :whole].reshape(2, -1, STRETCH).mean(2)
    count = both.shape[1]
    picks = torch.randint(count, (4_000, count), generator=torch.Generator().manual_seed(1))
    means = both[:, picks].mean(2)
    ratios = (means[0] / means[1]).sqrt()
    low, high = (ratios.quantile(share).item() for share in (0.025, 0.975))
    return math.sqrt(ours.mean().item() / theirs.mean().item()), low, high


def summary(key: Key, blocks: float, reading: Reading, sdpa: Reading, tokenizer: Any) -> Prefill:
    """Loss and divergence are those of positions behind the first eighth, which have keys to leave out."""
    passes, scores = reading.passes, reading.scores
    tokens = scores.shape[2]
    means: list[float] = scores[:, :2, tokens // 8 :].mean((0, 2)).tolist()
    made = len(passes[0].generated)
    equal = (passes[0].generated == sdpa.passes[0].generated).int().cumprod(0).sum()
    return Prefill(
        dtype=key[0],
        attention=key[1],
        tokens=tokens,
        blocks=blocks,
        seconds=sum(own.seconds for own in passes) / len(passes),
        attention_seconds=sum(own.attention_seconds for own in passes) / len(passes),
        # The first token is the prefill's.
        decode_tokens_per_second=(made - 1) * len(passes) / sum(own.decode_seconds for own in passes),
        peak_bytes=largest([own.peak_bytes for own in passes]),
        loss=means[0],
        kl=means[1],
        largest_difference=scores[:, 2].max().item(),
        rms_difference=math.sqrt(scores[:, 3].mean().item()),
        rms_beside_sdpa=None if key[0] == "f32" else ratio_of_rms(scores[:, 3], sdpa.scores[:, 3]),
        equal_tokens=int(equal.item()),
        generated=tokenizer.decode(passes[0].generated),
    )


def step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, dtype: str) -> float:
    """One step of fine-tuning; bf16 is autocast, with weights in f32."""
    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "f32"):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def measure_steps(
    model: Any, attentions: Attentions, texts: Texts, dtypes: list[str], given: argparse.Namespace
) -> list[Step]:
    """Steps with SDPA, dense and with the window in turn."""
    ids = next(texts.training(1, given.fine_tune_tokens))
    # With a rate of 0 a step does all of its work and leaves the weights as they are.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    found: list[Step] = []
    for dtype in dtypes:
        for name in (SDPA, DENSE, WINDOW):
            attentions.use(model, name)
            step(model, optimizer, ids[:, :256], dtype)
        rounds: dict[str, list[Step]] = {SDPA: [], DENSE: [], WINDOW: []}
        for turn in range(given.rounds):
            for name, own in rounds.items():
                attention = attentions.use(model, name)
                with Peak() as peak:
                    start = time.perf_counter()
                    step(model, optimizer, ids, dtype)
                    seconds = time.perf_counter() - start
                own.append(Step(dtype, name, ids.shape[1], seconds, attention.seconds, peak.bytes))
                say(
                    f"{dtype}, round {turn + 1} of {given.rounds}, {name}: step {seconds:.1f} s, of that "
                    f"attention {attention.seconds:.1f} s"
                )
        for own in rounds.values():
            fastest = min(own, key=lambda one: one.seconds)
            found.append(replace(fastest, peak_bytes=largest([one.peak_bytes for one in own])))
    return found


def rate_at(number: int, steps: int, highest: float) -> float:
    """Up in a line over the first tenth, down to 0 in a cosine."""
    warm = max(steps // 10, 1)
    if number < warm:
        return highest * (number + 1) / warm
    return highest * (0.5 + 0.5 * math.cos(math.pi * (number - warm) / max(steps - warm, 1)))


@torch.no_grad()
def validation_losses(model: Any, attentions: Attentions, sequences: list[Tensor]) -> dict[str, float]:
    """Means over all positions, by attention."""
    found: dict[str, float] = {}
    for name in (DENSE, WINDOW):
        attentions.use(model, name)
        losses = [model(ids, labels=ids, use_cache=False).loss.item() for ids in sequences]
        found[name] = sum(losses) / len(losses)
        say(f"validation, {name}: loss {found[name]:.4f}")
    return found


def fine_tune(model: Any, attentions: Attentions, texts: Texts, given: argparse.Namespace) -> FineTuning:
    """With the window, in f32."""
    held = texts.validation(VALIDATION, given.fine_tune_tokens)
    before = validation_losses(model, attentions, held)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    attentions.use(model, WINDOW)
    losses: list[float] = []
    seconds = 0.0
    for number, ids in enumerate(texts.training(given.steps, given.fine_tune_tokens)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number, given.steps, given.rate)
        start = time.perf_counter()
        losses.append(step(model, optimizer, ids, "f32"))
        seconds += time.perf_counter() - start
        say(f"step {number + 1} of {given.steps}: loss {losses[-1]:.4f}, {seconds / len(losses):.1f} s per step")
    after = validation_losses(model, attentions, held)
    return FineTuning(given.fine_tune_tokens, losses, seconds, sum(ids.shape[1] for ids in held), before, after)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def about(given: argparse.Namespace) -> dict[str, str | int]:
    return {
        "model": gguf_file(given.weights),
        "texts": " ".join(file.name for file in given.text),
        "CPU": cpu_name(),
        "threads": torch.get_num_threads(),
        "longspan": longspan.__version__,
        "torch": torch.__version__,
        "transformers": hf.__version__,
    }


def write(results: Results, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    subprocess.run([sys.executable, Path(__file__).with_name("report.py"), directory], check=True)


def run(given: argparse.Namespace) -> Results:
    """All parts; results are written after each of them."""
    results = Results(about(given))
    dtypes = [dtype for dtype in DTYPES if dtype not in given.without]
    attentions = Attentions()
    texts = load_texts(given.weights, given.text)
    models = {"f32": load_model(given.weights, "f32")}
    if "prefill" not in given.without:
        if "bf16" in dtypes:
            models["bf16"] = load_model(given.weights, "bf16")
        results.prefill = measure_prefill(models, attentions, texts, given)
        write(results, given.out)
    model = models["f32"].train()
    models.clear()
    if "steps" not in given.without:
        results.steps = measure_steps(model, attentions, texts, dtypes, given)
        write(results, given.out)
    if "fine-tune" not in given.without:
        results.fine_tuning = fine_tune(model, attentions, texts, given)
        write(results, given.out)
    return results


def main() -> None:
    given = arguments()
    # No warning of each generation that it goes past the positions that the model was trained with.
    hf.utils.logging.set_verbosity_error()
    try:
        results = run(given)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print((given.out / "results.md").read_text(), end="")
    for row in results.prefill:
        if (row.dtype, row.attention) == ("f32", DENSE) and not row.largest_difference <= TOLERANCE:
            sys.exit(f"dense logits differ from SDPA's by {row.largest_difference:.1e}, expected {TOLERANCE} at most")


if __name__ == "__main__":
    main()
