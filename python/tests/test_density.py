"""Patterns scaled to a density."""

import pytest

import longspan


def counted(pattern, queries, keys):
    """The share of pairs that a pattern allows, asked one by one."""
    first = keys - queries
    pairs = sum(pattern.allows(i + first, j) for i in range(queries) for j in range(keys))
    return pairs / (queries * keys)


@pytest.mark.parametrize(
    "text, density",
    [
        ("causal & window({}, 0)", 0.1),
        ("window({}, {})", 0.3),
        ("causal & (sliding_window({}) | sinks(8))", 0.2),
        ("strided({})", 0.05),
        ("dilated({}, 4)", 0.04),
        ("hierarchical([(16, 1, 1), ({}, 4, 16)])", 0.15),
    ],
)
@pytest.mark.parametrize("queries, keys", [(400, 400), (200, 300)])
def test_targets_are_reached(text, density, queries, keys):
    low = 4 if "dilated" in text else None
    value, pattern = longspan.scale_to_density(text, queries, density, tokens_k=keys, low=low)
    assert pattern == longspan.Pattern(text.replace("{}", str(value)))
    assert counted(pattern, queries, keys) == pytest.approx(density, rel=0.02)


def test_what_is_refused():
    for error, message, arguments, options in [
        (ValueError, "expected a text with {} in place of the parameter", ("causal", 100, 0.1), {}),
        (ValueError, "0.9 is not reached within 2 %: the nearest is 0.505 with parameter 100",
         ("causal & window({}, 0)", 100, 0.9), {}),
        (ValueError, "density: 2, expected above 0 and at most 1", ("window({}, 0)", 100, 2.0), {}),
        (ValueError, "the parameter is from 5 to 4", ("window({}, 0)", 100, 0.1), {"low": 5, "high": 4}),
        (ValueError, "block size is 8", ("window({}, 0)", 100, 0.1), {"block": 8}),
        (ValueError, "widow", ("widow({}, 0)", 100, 0.1), {}),
        (ValueError, "expected one pattern: scale that of each head by itself",
         ("heads([causal, window({}, 0)])", 100, 0.1), {}),
        (TypeError, "pattern", (longspan.causal(), 100, 0.1), {}),
    ]:
        with pytest.raises(error, match=message):
            longspan.scale_to_density(*arguments, **options)
