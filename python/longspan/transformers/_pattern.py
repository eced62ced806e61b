"""User patterns: which one a layer has, and how it joins the model's own mask.

A pattern counts the positions that the model's mask counts: those of the whole sequence, with keys that a cache holds
or has dropped, and with padding. With packed sequences both count within each sequence.

A pattern is kept as text, which ``torch.compile`` takes as a constant. ``set_pattern`` puts it on the layers
themselves, so that copies of a model have it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from longspan import Pattern
from longspan.torch._dilated import of_heads

#: What ``register`` and ``set_pattern`` take; a function is given the layer index, the layer type and the config.
UserPattern: TypeAlias = Pattern | str | Callable[[int, str | None, Any], Pattern | str | None] | None

#: The attribute of a layer that has a pattern of its own: ``(text,)``, or ``(None,)`` for the model's own mask alone.
ATTRIBUTE = "_longspan_pattern"

#: The layer type that a function is given for cross-attention.
CROSS = "cross_attention"


class Registered(NamedTuple):
    """The pattern of a name."""

    pattern: str | Callable
    key: str
    """A text that no other call of ``register`` has, in any process."""

    def __str__(self) -> str:
        if isinstance(self.pattern, str):
            return self.pattern
        return f"of {getattr(self.pattern, '__qualname__', repr(self.pattern))}"


#: The attribute of a layer with what a function returned for it: ``(key, text)``. So a function is called once per
#: layer, and outside of graphs that ``torch.compile`` makes.
_RETURNED = "_longspan_returned"


def checked(pattern: Any) -> str | Callable | None:
    """A pattern as text, a function as it is, or an error."""
    if pattern is None or isinstance(pattern, Pattern):
        return None if pattern is None else str(pattern)
    if isinstance(pattern, str):
        return str(Pattern(pattern))
    if callable(pattern) and not isinstance(pattern, type):
        return pattern
    raise TypeError(
        f"pattern is a {type(pattern).__name__}, expected a longspan.Pattern, its text, None, or a function of "
        "(layer_idx, layer_type, config) that returns one of these"
    )


def of_layer(module: torch.nn.Module, registered: Registered | None) -> str | None:
    """The text of the pattern that a layer has: its own, or the one that was registered."""
    own = getattr(module, ATTRIBUTE, None)
    if own is not None:
        return own[0]
    if registered is None:
        return None
    returned = getattr(module, _RETURNED, None)
    if returned is not None and returned[0] == registered.key:
        return returned[1]
    return resolved(module, registered.pattern)


def remember(module: torch.nn.Module, registered: Registered) -> None:
    """Resolves the pattern of a name for one layer, once."""
    setattr(module, _RETURNED, (registered.key, resolved(module, registered.pattern)))


def resolved(module: torch.nn.Module, pattern: str | Callable | None) -> str | None:
    """The text of the pattern for one layer."""
    if not callable(pattern):
        return _not_across(module, pattern)
    index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    if index is None or config is None:
        missing = "layer_idx" if index is None else "config"
        raise ValueError(
            f"pattern is a function, and {type(module).__name__} has no {missing} to call it with: give one pattern "
            "for all layers, or use longspan.transformers.set_pattern on the parts of the model one by one"
        )
    given = pattern(index, layer_type(module), config)
    if given is None or isinstance(given, (str, Pattern)):
        return _not_across(module, checked(given))
    raise TypeError(
        f"the function for patterns returned a {type(given).__name__} for layer {index}, expected a longspan.Pattern, "
        "its text, or None"
    )


def layer_type(module: torch.nn.Module) -> str | None:
    """``config.layer_types`` of a layer, if there are any; cross-attention has a type of its own."""
    if is_cross(module):
        return CROSS
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types and module.layer_idx < len(types) else None


def is_cross(module: torch.nn.Module) -> bool:
    """Whether a layer's keys are those of another sequence. An encoder's layer that can't be told from
    cross-attention counts as such."""
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(module, "is_decoder", True) and getattr(module, "is_causal", None) is False


def _not_across(module: torch.nn.Module, text: str | None) -> str | None:
    """transformers counts queries of cross-attention from 0 in each pass, so a pattern would move while decoding."""
    if text is not None and is_cross(module):
        raise NotImplementedError(
            f"the pattern {text} for {type(module).__name__}, which is cross-attention: its queries have no position "
            f'among its keys. Expected a function that returns None where layer_type is "{CROSS}", or '
            "longspan.transformers.set_pattern on other parts of the model, such as model.get_encoder()"
        )
    return text


def joined(own: str, user: str) -> str:
    """The pairs that both allow. ``heads([…])`` is outermost, so the model's own mask goes inside."""
    if own == "full":
        return user
    if not user.startswith("heads("):
        return f"({own}) & ({user})"
    return f"heads([{', '.join(f'({own}) & ({head})' for head in of_heads(user))}])"
