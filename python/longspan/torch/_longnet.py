"""LongNet as modules of torch: an encoder over vectors, a language model over ids.

``docs/longnet-weights.md`` is the contract with the modules of ``longspan-candle``: configuration,
names of weights, arithmetic and initialisation are the same, so a directory that one of them saved
is loaded by the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.torch._dilated import (
    DilatedAttention,
    KeysAndValues,
    Multihead,
    PatternAttention,
    Table,
    begin_linear,
    one_of,
    rotary_table,
)

#: The paper's five branches.
SEGMENT_LENGTHS = (2048, 4096, 8192, 16384, 32768)
DILATION_RATES = (1, 2, 4, 6, 12)


#: What can be said of branches.
_NAMES = {"segment_lengths", "dilation_rates", "also", "overlap"}
#: Names and values of earlier files.
_RENAMED = {"counting": "overlap", "each branch": "weighted", "once": "union"}


def _dilated(segment_lengths=SEGMENT_LENGTHS, dilation_rates=DILATION_RATES) -> dict[str, Any]:
    lists = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    return {"dilated": {name: list(value) for name, value in lists.items()}}


@dataclasses.dataclass(frozen=True)
class LongNetConfig:
    """What a LongNet is made of; the defaults are the paper's, and bytes as its vocabulary.

    >>> from longspan.torch import LongNetConfig
    >>> LongNetConfig(hidden_size=96, num_attention_heads=4).head_dim
    24

    ``positions`` is ``{"rotary": {"base": 10000.0}}`` or ``"none"``. ``attention`` is
    ``{"dilated": {"segment_lengths": […], "dilation_rates": […]}}``, with ``"also"`` and
    ``"overlap"`` if need be, or ``{"pattern": "…"}`` with the text of a pattern.
    """

    vocab_size: int = 256
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    layer_norm_eps: float = 1e-5
    positions: dict[str, Any] | str = dataclasses.field(
        default_factory=lambda: {"rotary": {"base": 10000.0}}
    )
    attention: dict[str, Any] = dataclasses.field(default_factory=_dilated)

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}, expected 1 or more")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, expected a multiple of num_attention_heads, "
                f"which is {self.num_attention_heads}"
            )
        if self.rotary_base is not None and self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {self.head_dim}, expected an even number "
                'with rotary positions, or positions="none"'
            )
        self.make_attention()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def gamma(self) -> float:
        """MAGNETO's gain for a stack of so many layers."""
        return math.sqrt(math.log(2 * self.num_hidden_layers))

    @property
    def rotary_base(self) -> float | None:
        if self.positions == "none":
            return None
        if isinstance(self.positions, dict) and list(self.positions) == ["rotary"]:
            inner = self.positions["rotary"]
            if isinstance(inner, dict) and set(inner) <= {"base"}:
                return float(inner.get("base", 10000.0))
        raise ValueError(
            f'positions is {self.positions!r}, expected {{"rotary": {{"base": 10000.0}}}} or "none"'
        )

    def make_attention(self) -> nn.Module:
        """What a layer attends with."""
        if isinstance(self.attention, dict) and list(self.attention) == ["pattern"]:
            return PatternAttention(self.attention["pattern"])
        if isinstance(self.attention, dict) and list(self.attention) == ["dilated"]:
            inner = self.attention["dilated"]
            if isinstance(inner, dict):
                inner = {_RENAMED.get(name, name): value for name, value in inner.items()}
            if isinstance(inner, dict) and set(inner) <= _NAMES:
                if inner.get("overlap") in _RENAMED:
                    inner["overlap"] = _RENAMED[inner["overlap"]]
                return DilatedAttention(**_dilated()["dilated"] | inner)
        raise ValueError(
            f'attention is {self.attention!r}, expected {{"dilated": {{"segment_lengths": […], '
            '"dilation_rates": […]}} or {"pattern": "…"}'
        )

    @classmethod
    def of(cls, **names: Any) -> LongNetConfig:
        """From fields, with ``segment_lengths`` and ``dilation_rates`` (or ``segment_length`` and
        ``dilated_ratio``) as a short way to write ``attention``."""
        spelled = ("segment_lengths", "segment_length", "dilation_rates", "dilated_ratio")
        lists = [names.pop(name, None) for name in spelled]
        given = [name for name, value in zip(spelled, lists) if value is not None]
        if given:
            if "attention" in names:
                raise ValueError(
                    f"attention and {', '.join(given)}: expected one of both, they say the same"
                )
            segments = one_of(spelled[0], lists[0], spelled[1], lists[1])
            names["attention"] = _dilated(segments, one_of(spelled[2], lists[2], spelled[3], lists[3]))
        return cls.from_fields(names)

    @classmethod
    def from_fields(cls, names: dict[str, Any]) -> LongNetConfig:
        """From what ``config.json`` holds; a name that isn't a field is refused."""
        known = sorted(field.name for field in dataclasses.fields(cls))
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{name}: LongNet has no such setting, expected {', '.join(known)}"
                )
        return cls(**names)


class FeedForward(nn.Module):
    """Two projections with MAGNETO's norm between them."""

    def __init__(self, config: LongNetConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.fc1 = nn.Linear(hidden, inner)
        self.ffn_layernorm = nn.LayerNorm(inner, eps=config.layer_norm_eps)
        self.fc2 = nn.Linear(inner, hidden)
        begin_linear(self.fc1, config.gamma)
        begin_linear(self.fc2, config.gamma)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ffn_layernorm(F.gelu(self.fc1(x))))


class Layer(nn.Module):
    """A pre-norm block."""

    def __init__(self, config: LongNetConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.self_attn = Multihead(
            hidden,
            config.num_attention_heads,
            config.make_attention(),
            bias=True,
            layer_norm=True,
            layer_norm_eps=eps,
            gamma_init=config.gamma,
            device=None,
            dtype=None,
        )
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.ffn = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        is_causal: bool,
        rotary: Table | None,
        cache: KeysAndValues | None = None,
    ) -> Tensor:
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, y, is_causal, rotary=rotary, cache=cache)[0]
        return x + self.ffn(self.final_layer_norm(x))


class Stack(nn.Module):
    """What encoder and language model have in common."""

    def __init__(self, config: LongNetConfig | None = None, **names: Any):
        super().__init__()
        if config is not None and names:
            raise ValueError(
                f"config and {', '.join(names)}: expected one of both; dataclasses.replace changes "
                "a configuration"
            )
        self.config = config = LongNetConfig.of(**names) if config is None else config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def run(
        self, x: Tensor, is_causal: bool, caches: list[KeysAndValues] | None = None
    ) -> Tensor:
        """``caches`` of the layers have the tokens before these."""
        config, rotary = self.config, None
        if config.rotary_base is not None:
            before = caches[0].length if caches else 0
            base, dim = config.rotary_base, config.head_dim
            rotary = rotary_table(x.shape[1], dim, base, x.device, first=before)
        for index, layer in enumerate(self.layers):
            x = layer(x, is_causal, rotary, caches[index] if caches else None)
        return self.layer_norm(x)

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes ``config.json`` and ``model.safetensors``, which ``longspan-candle`` loads too."""
        from safetensors.torch import save_file

        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = json.dumps(dataclasses.asdict(self.config), indent=2)
        (directory / "config.json").write_text(config + "\n")
        tensors = {name: x.detach().contiguous() for name, x in self.state_dict().items()}
        save_file(tensors, directory / "model.safetensors")

    @classmethod
    def load(cls, directory: str | pathlib.Path) -> Stack:
        """The model of a directory that ``save`` wrote, or ``longspan-candle``."""
        from safetensors.torch import load_file

        directory = pathlib.Path(directory)
        config = json.loads((directory / "config.json").read_text())
        model = cls(LongNetConfig.from_fields(config))
        model.load_state_dict(load_file(directory / "model.safetensors"))
        return model


class LongNetEncoder(Stack):
    """LongNet over vectors, ``(batch, token, hidden_size)`` in and out; every token sees both sides.

    >>> import torch, longspan.torch
    >>> encoder = longspan.torch.LongNetEncoder(
    ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    ...     segment_lengths=[64, 128], dilation_rates=[1, 2],
    ... )
    >>> encoder(torch.randn(1, 300, 32)).shape
    torch.Size([1, 300, 32])

    Arguments are a ``LongNetConfig``, or its fields. ``save`` and ``load`` are for a directory with
    ``config.json`` and ``model.safetensors``.
    """

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        return self.run(x, is_causal)


class LongNetLM(Stack):
    """LongNet as a language model: ids, ``(batch, token)``, to logits, ``(batch, token, vocab)``.

    >>> import torch, longspan.torch
    >>> model = longspan.torch.LongNetLM(
    ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    ...     segment_lengths=[64, 128], dilation_rates=[1, 2],
    ... )
    >>> text = torch.frombuffer(bytearray(b"Attention for sequences " * 20), dtype=torch.uint8)
    >>> logits = model(text[None].long())
    >>> logits.shape
    torch.Size([1, 480, 256])
    >>> loss = torch.nn.functional.cross_entropy(logits[0, :-1], text[1:].long())
    >>> loss.backward()

    Arguments are a ``LongNetConfig``, or its fields. ``save`` and ``load`` are for a directory with
    ``config.json`` and ``model.safetensors``.
    """

    def __init__(self, config: LongNetConfig | None = None, **names: Any):
        super().__init__(config, **names)
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.output_projection = nn.Linear(hidden, vocab, bias=False)
        for weight in (self.embed_tokens.weight, self.output_projection.weight):
            nn.init.normal_(weight, std=hidden**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output_projection(self.run(self.embed_tokens(ids), is_causal=True))

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """``ids``, ``(batch, token)``, and ``max_new_tokens`` more, one after the other.

        Each is the most likely one at ``temperature`` 0, else drawn from the softmax of the logits
        divided by it, of the ``top_k`` most likely ones where that is given. ``callback`` gets every new
        column, ``(batch, 1)``. Keys and values of all tokens are kept: a step reads those that its
        query attends to.

        >>> import torch, longspan.torch
        >>> model = longspan.torch.LongNetLM(
        ...     hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        ...     segment_lengths=[64, 128], dilation_rates=[1, 2],
        ... )
        >>> model.generate(torch.randint(256, (1, 100)), 20).shape
        torch.Size([1, 120])
        """
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(
                f"ids have shape {tuple(ids.shape)}, expected (batch, token) with one token or more"
            )
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected 0 or more")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}, expected 0 or more")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}, expected 1 or more, or None")
        if temperature == 0 and (top_k is not None or generator is not None):
            raise ValueError("top_k and generator are for drawing: give a temperature above 0")
        caches = [KeysAndValues(ids.shape[1] + max_new_tokens) for _ in self.layers]
        found, new = [ids], ids
        for _ in range(max_new_tokens):
            last = self.run(self.embed_tokens(new), is_causal=True, caches=caches)[:, -1]
            new = _next(self.output_projection(last).float(), temperature, top_k, generator)
            if callback is not None:
                callback(new)
            found.append(new)
        return torch.cat(found, 1)


def _next(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """The next ids, ``(batch, 1)``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
