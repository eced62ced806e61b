//! Patterns scaled to a density.

use longspan::{BlockSize, Heads, Shape, scale_to_density_with};
use pyo3::prelude::*;

use crate::arguments::Whole;
use crate::pattern::Pattern;
use crate::{errors, signals};

/// What stands for the free parameter in the text of a pattern.
const PLACEHOLDER: &str = "{}";

/// A pattern scaled to a density: the integer for which the text of `pattern`, with `{}` in its place,
/// has a share of active pairs nearest to `density`, and that pattern.
///
/// The density has to grow or to fall with the parameter, which is from `low` to `high`: 1 to the
/// tokens where left out. `tokens` are those of queries and of keys, or of queries where there is
/// `tokens_k`. A `ValueError` where no parameter comes within 2 % of the density, with the nearest one.
/// `block` and `max_work`: see `Pattern.compile`.
///
/// >>> import longspan
/// >>> left, pattern = longspan.scale_to_density(
/// ...     "causal & (window({}, 0) | sinks(4))", tokens=16_384, density=0.05
/// ... )
/// >>> left, print(pattern)
/// causal & (window(836, 0) | sinks(4))
/// (836, None)
/// >>> round(pattern.compile(16_384).density, 3)
/// 0.05
#[pyfunction]
#[pyo3(
    signature = (pattern, tokens, density, *, tokens_k=None, low=None, high=None, block=None,
        max_work=None),
    text_signature = "(pattern, tokens, density, *, tokens_k=None, low=None, high=None, block=None, \
        max_work=None)"
)]
#[expect(clippy::too_many_arguments, reason = "they are named in Python")]
pub(crate) fn scale_to_density(
    py: Python<'_>,
    pattern: &str,
    tokens: Whole,
    density: f64,
    tokens_k: Option<Whole>,
    low: Option<Whole>,
    high: Option<Whole>,
    block: Option<Whole>,
    max_work: Option<Whole>,
) -> PyResult<(u64, Pattern)> {
    if !pattern.contains(PLACEHOLDER) {
        return Err(errors::value(format!(
            "pattern is {pattern:?}, expected a text with {PLACEHOLDER} in place of the parameter to \
             find, as in \"causal & window({PLACEHOLDER}, 0)\""
        )));
    }
    let keys = tokens_k.map_or(tokens.0, |keys| keys.0);
    let mut shape = Shape::new(tokens.0 as usize, keys as usize);
    if let Some(block) = block {
        shape = shape.block(BlockSize::new(block.0).map_err(errors::raise_pattern)?);
    }
    if let Some(units) = max_work {
        shape = shape.max_work(units.0);
    }
    let low = low.map_or(1, |low| low.0);
    let high = high.map_or(tokens.0.max(keys).max(low), |high| high.0);
    let text = |n: u64| pattern.replace(PLACEHOLDER, &n.to_string());
    if !matches!(text(low).parse().map_err(errors::raise_pattern)?, Heads::Same(_)) {
        return Err(errors::value(
            "pattern is heads(…) or batch(…), expected one pattern: scale that of each head by itself",
        ));
    }
    let scale = |watch: &mut signals::Watch| {
        let make = |n| text(n).parse();
        scale_to_density_with(make, low..=high, &shape, density, |_, _| watch.look())
    };
    let (parameter, pattern) = signals::released(py, scale, errors::raise_pattern)?;
    Ok((parameter, Pattern(pattern.into())))
}
