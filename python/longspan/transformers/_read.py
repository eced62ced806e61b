"""What a mask function of transformers means.

transformers composes masks of small functions over ``(batch, head, query, key)``: some of a module,
some closures made by a factory, joined by ``and_masks`` and ``or_masks``. A closure of a known
factory has the very code object that the factory's other closures have, and its variables lie in
its cells. So it is recognised for certain, whatever its name, and what it closes over is read.

| function | pattern |
|---|---|
| ``causal_mask_function`` | ``causal`` |
| ``bidirectional_mask_function`` | ``full`` |
| ``sliding_window_overlay(w)`` | ``window(w - 1, 0)`` beside ``causal``, else open to the right |
| ``sliding_window_bidirectional_overlay(w)`` | ``window(w, w)`` |
| ``chunked_overlay(c, left_padding)`` | ``dilated(c, 1)``, without padding on the left |
| ``packed_sequence_mask_function(ids)`` | sequences side by side |
| ``padding_mask_function(mask)`` | keys that hold tokens |
| ``and_masks``, ``or_masks`` | ``&``, ``\\|`` |
| ``lambda *args: torch.tensor(True, …)`` of EmbeddingGemma | ``full`` |
| ``_bidirectional_window_overlay(w)`` of EmbeddingGemma | ``window(w - 1, w - 1)`` |
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

#: ``window`` to the right without an end: more tokens than any sequence has.
_FAR = 1 << 40


@dataclass
class Reading:
    """What was found in a mask function."""

    pattern: str
    window: int | None = None
    """The ``sliding_window`` that transformers hands to attention beside such a mask."""
    reach: int | None = None
    """What a window both ways was made with, which some models (T5Gemma) hand over in its place."""
    moves: bool = True
    """Whether the pattern looks at distances alone, so that positions may count from anywhere."""
    ids: list[Tensor] = field(default_factory=list)
    """For each packing, the number of the sequence that a token is in, ``(batch, tokens)``."""
    padding: list[Tensor] = field(default_factory=list)
    """For each padding, where keys hold tokens, ``(batch, positions)``."""

    @property
    def plain(self) -> bool:
        return not self.ids and not self.padding


def read(function: Callable) -> Reading:
    """What ``function`` means, or an error that says which part of it is unknown."""
    if function is masking_utils.causal_mask_function:
        return Reading("causal")
    if function is masking_utils.bidirectional_mask_function:
        return Reading("full")
    reader = _READERS.get(getattr(function, "__code__", None))
    if reader is None:
        reader = _OF_MODELS.get(_of_model(getattr(function, "__code__", None), getattr(function, "__module__", "")))
    if reader is None:
        raise NotImplementedError(
            f"mask function {named(function)}: longspan doesn't know which positions it allows, "
            "and would have to ask for every pair. Expected what transformers makes of causal, "
            "bidirectional, sliding-window, chunked, padding and packed-sequence masks; for this "
            'model use attn_implementation="sdpa" or "flex_attention"'
        )
    return reader(_variables(function))


@torch.compiler.assume_constant_result
def _of_model(code: types.CodeType | None, module: str) -> str | None:
    """Which of the functions that models of transformers make themselves a code is, by the names of ``_OF_MODELS``."""
    if code is None:
        return None
    if _is_true(code, module):
        return "everything"
    factory = getattr(sys.modules.get(module), "_bidirectional_window_overlay", None)
    if not module.startswith("transformers.models.") or factory is None:
        return None
    sample = factory(3)
    if sample.__code__ is code and [sample(0, 0, 5, key) for key in range(2, 9)] == [0, 1, 1, 1, 1, 1, 0]:
        return "window both ways"
    return None


def _is_true(code: types.CodeType, module: str) -> bool:
    """Whether a function is ``torch.tensor(True, dtype=torch.bool)``, whatever its arguments, which it doesn't read."""
    if code.co_argcount or code.co_kwonlyargcount or code.co_freevars:
        return False
    if set(code.co_names) != {"torch", "tensor", "bool"}:
        return False
    if any("FAST" in step.opname for step in dis.get_instructions(code)):
        return False
    if getattr(sys.modules.get(module), "torch", None) is not torch:
        return False
    return bool(types.FunctionType(code, {"torch": torch})())


def named(function: Any) -> str:
    """How a message calls a function."""
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(function)
    return f"{function.__module__}.{name}"


def _variables(function: Callable) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


def _sliding(variables: dict[str, Any]) -> Reading:
    width = _width(variables["sliding_window"], 0)
    if width == 0:
        # Of layers that a config has none of: attention refuses it.
        return Reading("!full", window=0)
    return Reading(f"window({width - 1}, {_FAR})", window=width)


def _sliding_bidirectional(variables: dict[str, Any]) -> Reading:
    reach = _width(variables["sliding_window"], 0)
    return Reading(f"window({reach}, {reach})", window=reach + 1, reach=reach)


def _everything(variables: dict[str, Any]) -> Reading:
    return Reading("full")


def _both_ways(variables: dict[str, Any]) -> Reading:
    reach = _width(variables["sliding_window"], 1) - 1
    return Reading(f"window({reach}, {reach})", window=reach + 1)


def _chunked(variables: dict[str, Any]) -> Reading:
    size, left = _width(variables["chunk_size"], 1), variables["left_padding"]
    if left.any():
        raise NotImplementedError(
            f"chunked attention with {left.tolist()} tokens of padding on the left, expected none: "
            'its chunks begin elsewhere in each batch entry. Pad on the right, or use "sdpa"'
        )
    return Reading(f"dilated({size}, 1)", moves=False)


def _packed(variables: dict[str, Any]) -> Reading:
    return Reading("full", ids=[variables["packed_sequence_mask"]])


def _padding(variables: dict[str, Any]) -> Reading:
    return Reading("full", padding=[variables["padding_mask"]])


def _and(variables: dict[str, Any]) -> Reading:
    parts = [read(function) for function in variables["mask_functions"]]
    windows = [part for part in parts if part.window is not None]
    narrowest = min(windows, key=lambda part: part.window, default=None)
    return Reading(
        _joined(parts, " & "),
        window=None if narrowest is None else narrowest.window,
        reach=None if narrowest is None else narrowest.reach,
        moves=all(part.moves for part in parts),
        ids=[ids for part in parts for ids in part.ids],
        padding=[padding for part in parts for padding in part.padding],
    )


def _or(variables: dict[str, Any]) -> Reading:
    functions = variables["mask_functions"]
    parts = [read(function) for function in functions]
    for function, part in zip(functions, parts):
        if not part.plain:
            raise NotImplementedError(
                f"mask function {named(function)} inside or_masks: expected padding and packing "
                'around everything else, by and_masks; use attn_implementation="sdpa"'
            )
    windows = [part.window for part in parts]
    return Reading(
        _joined(parts, " | "),
        window=None if None in windows else max(windows),
        moves=all(part.moves for part in parts),
    )


def _joined(parts: list[Reading], operator: str) -> str:
    """Parts in parentheses. In a conjunction ``full`` is left out, and windows beside ``causal`` have
    no right side."""
    texts = [part.pattern for part in parts]
    if operator == " & ":
        texts = [text for text in texts if text != "full"]
        if "causal" in texts:
            texts = [text.replace(f", {_FAR})", ", 0)") for text in texts]
    elif "full" in texts:
        return "full"
    if len(texts) > 1:
        texts = [f"({text})" if " " in text.replace(", ", "") else text for text in texts]
    return operator.join(texts) or "full"


def _width(value: Any, least: int) -> int:
    if isinstance(value, Tensor) or int(value) != value or value < least:
        raise ValueError(f"a window of {value} tokens, expected a whole number from {least} on")
    return int(value)


def _readers() -> dict[Any, Callable[[dict[str, Any]], Reading]]:
    nothing = torch.zeros((1, 1), dtype=torch.int64)
    some = masking_utils.causal_mask_function
    samples = (
        (masking_utils.and_masks(some), _and),
        (masking_utils.or_masks(some), _or),
        (masking_utils.sliding_window_overlay(1), _sliding),
        (masking_utils.sliding_window_bidirectional_overlay(1), _sliding_bidirectional),
        (masking_utils.chunked_overlay(1, nothing), _chunked),
        (masking_utils.packed_sequence_mask_function(nothing), _packed),
        (masking_utils.padding_mask_function(nothing), _padding),
    )
    return {sample.__code__: reader for sample, reader in samples}


#: By the code of a factory's closures.
_READERS = _readers()
#: Names, because a constant of a compiled graph can't be a function.
_OF_MODELS = {"everything": _everything, "window both ways": _both_ways}
