"""What a LongNet is made of: ``config.json`` of a saved model."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from longspan.torch._dilated import DilatedAttention, PatternAttention, one_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

    def make_attention(
        self, group: ProcessGroup | None = None, shards: str = "contiguous"
    ) -> DilatedAttention | PatternAttention:
        """What a layer attends with."""
        over = {"group": group, "shards": shards}
        if isinstance(self.attention, dict) and list(self.attention) == ["pattern"]:
            return PatternAttention(self.attention["pattern"], **over)
        if isinstance(self.attention, dict) and list(self.attention) == ["dilated"]:
            inner = self.attention["dilated"]
            if isinstance(inner, dict):
                inner = {_RENAMED.get(name, name): value for name, value in inner.items()}
            if isinstance(inner, dict) and set(inner) <= _NAMES:
                if inner.get("overlap") in _RENAMED:
                    inner["overlap"] = _RENAMED[inner["overlap"]]
                return DilatedAttention(**_dilated()["dilated"] | inner, **over)
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
