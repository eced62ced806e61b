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
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.torch._context import (
    Context,
    checkpointed,
    context_of,
    own_part,
    sharding,
    whole_length,
)
from longspan.torch._dilated import KeysAndValues, Multihead, begin_linear
from longspan.torch._lengths import one_of_both, placed, places_in_sequences
from longspan.torch._longnet_config import LongNetConfig
from longspan.torch._rotary import Table, rotary_at
from longspan.torch._shards import Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T", bound="Stack")


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

    def __init__(self, config: LongNetConfig, context: Context | None):
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.self_attn_layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.self_attn = Multihead(
            hidden,
            config.num_attention_heads,
            config.make_attention(*(() if context is None else (context.group, context.shards))),
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
        cache: KeysAndValues | None,
        key_padding: Tensor | None,
        cu_seqlens: Tensor | None,
        tokens: int | None,
    ) -> Tensor:
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(
            y,
            y,
            y,
            is_causal,
            rotary=rotary,
            cache=cache,
            key_padding=key_padding,
            cu_seqlens=cu_seqlens,
            tokens=tokens,
        )[0]
        return x + self.ffn(self.final_layer_norm(x))


class Stack(nn.Module):
    """What encoder and language model have in common."""

    def __init__(
        self,
        config: LongNetConfig | None = None,
        *,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
        **names: Any,
    ):
        super().__init__()
        if config is not None and names:
            raise ValueError(
                f"config and {', '.join(names)}: expected one of both; dataclasses.replace changes "
                "a configuration"
            )
        self.config = config = LongNetConfig.of(**names) if config is None else config
        self.context, self.checkpoint = context_of(group, shards), checkpoint
        self.layers = nn.ModuleList(
            Layer(config, self.context) for _ in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def run(
        self,
        x: Tensor,
        is_causal: bool,
        caches: list[KeysAndValues] | None = None,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        """``caches`` of the layers have the tokens before these."""
        before = caches[0].length if caches else 0
        if self.context is None:
            one_of_both(key_padding, cu_seqlens)
            whole_length(x.shape[1], tokens)
            places = places_in_sequences(x.shape[1], key_padding, cu_seqlens, x.device) + before
        else:
            tokens = self.context.length(x.shape[1], tokens)
            places = self.context.own_part(
                self._places, x, is_causal, key_padding, cu_seqlens, tokens
            )
        config, rotary = self.config, None
        if config.rotary_base is not None:
            rotary = rotary_at(places, config.head_dim, config.rotary_base)
        for index, layer in enumerate(self.layers):
            cache = caches[index] if caches else None
            given = (x, is_causal, rotary, cache, key_padding, cu_seqlens, tokens)
            x = checkpointed(self.checkpoint, layer, *given)
        return self.layer_norm(x)

    def _places(
        self,
        x: Tensor,
        is_causal: bool,
        key_padding: Tensor | None,
        cu_seqlens: Tensor | None,
        tokens: int,
    ) -> Tensor:
        """Positions of this rank's tokens in their sequences."""
        over = self.layers[0].self_attn.attention.over(is_causal)
        over = placed(over, key_padding, cu_seqlens, x.shape[0], tokens)
        mine = self.context.positions(tokens, over)
        if len(mine) != x.shape[1]:
            raise ValueError(
                f"x has {x.shape[1]} tokens, expected {len(mine)}, this rank's of {tokens} with "
                f"{self.context.shards} shards: cut the sequence with the model's sharding(…)"
            )
        return places_in_sequences(tokens, key_padding, cu_seqlens, x.device)[..., mine]

    def _sharding(self, tokens: int, is_causal: bool, *lengths: Tensor | None) -> Shards:
        over = self.layers[0].self_attn.attention.over(is_causal)
        return sharding(self.context, tokens, over, *lengths)

    def extra_repr(self) -> str:
        shown = [] if self.context is None else [str(self.context)]
        return ", ".join([*shown, "checkpoint=True"] if self.checkpoint else shown)

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
    def load(
        cls: type[T],
        directory: str | pathlib.Path,
        *,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
    ) -> T:
        """The model of a directory that ``save`` wrote, or ``longspan-candle``."""
        from safetensors.torch import load_file

        directory = pathlib.Path(directory)
        config = json.loads((directory / "config.json").read_text())
        options = {"group": group, "shards": shards, "checkpoint": checkpoint}
        model = cls(LongNetConfig.from_fields(config), **options)
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

    Batches may hold sequences of different lengths: ``key_padding`` or ``cu_seqlens`` of ``attention``. Branches
    and rotary positions count from the first token of each. Rows of padding hold what the layers make of
    zeros from attention: mask them in the loss.

    With a ``group`` the input is this rank's tokens, those that ``sharding(tokens)`` says, with ``shards`` as
    in ``ring_attention``. ``checkpoint=True`` keeps the activations of no layer: the backward pass computes
    them once more. None of the three is saved.
    """

    def forward(
        self,
        x: Tensor,
        is_causal: bool = False,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        """With a group ``tokens`` is the length of the whole sequence; left out, ranks tell each other.
        ``key_padding`` and ``cu_seqlens`` are those of the whole sequence."""
        return self.run(x, is_causal, None, key_padding, cu_seqlens, tokens)

    def sharding(
        self,
        tokens: int,
        is_causal: bool = False,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Shards:
        """Which of so many tokens this rank of the group holds, for calls with these arguments."""
        return self._sharding(tokens, is_causal, key_padding, cu_seqlens)


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

    Batches may hold sequences of different lengths: ``key_padding`` or ``cu_seqlens`` of ``attention``. Branches
    and rotary positions count from the first token of each. Rows of padding hold what the layers make of
    zeros from attention: mask them in the loss.

    With a ``group`` the input is this rank's tokens, those that ``sharding(tokens)`` says, with ``shards`` as
    in ``ring_attention``. ``checkpoint=True`` keeps the activations of no layer: the backward pass computes
    them once more. None of the three is saved.
    """

    def __init__(
        self,
        config: LongNetConfig | None = None,
        *,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
        **names: Any,
    ):
        super().__init__(config, group=group, shards=shards, checkpoint=checkpoint, **names)
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.output_projection = nn.Linear(hidden, vocab, bias=False)
        for weight in (self.embed_tokens.weight, self.output_projection.weight):
            nn.init.normal_(weight, std=hidden**-0.5)

    def forward(
        self,
        ids: Tensor,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        """With a group ``tokens`` is the length of the whole sequence; left out, ranks tell each other.
        ``key_padding`` and ``cu_seqlens`` are those of the whole sequence."""
        x = own_part(self.context, self.embed_tokens, ids)
        return self.output_projection(self.run(x, True, None, key_padding, cu_seqlens, tokens))

    def sharding(
        self,
        tokens: int,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Shards:
        """Which of so many tokens this rank of the group holds, for calls with these arguments."""
        return self._sharding(tokens, True, key_padding, cu_seqlens)

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
        if self.context is not None:
            raise ValueError(
                "generate: this model has a group, expected one process: load its state_dict() into a "
                "LongNetLM without group"
            )
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
