//! The functions that make patterns, named as in the text form.

use longspan::{Heads, Level, Pattern as Rule};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::pattern::Pattern;

/// A whole number, 0 or more.
pub(crate) struct Whole(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<u64>().map(Whole).map_err(|error| {
            if object.extract::<i128>().is_err() {
                return error;
            }
            let message = format!("a number is {}, expected 0 to 2^64 − 1", &*object);
            PyValueError::new_err(message)
        })
    }
}

fn numbers(list: Vec<Whole>) -> impl Iterator<Item = u64> {
    list.into_iter().map(|Whole(number)| number)
}

fn made(rule: Result<Rule, longspan_pattern::Error>) -> PyResult<Pattern> {
    rule.map(|rule| Pattern(rule.into())).map_err(errors::raise_pattern)
}

/// A pattern, or the text of one, that is the same for all heads.
pub(crate) fn inner(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Rule> {
    match Pattern::of(object)? {
        Some(Heads::Same(rule)) => Ok(rule),
        Some(_) => Err(errors::value(format!(
            "{name}: heads(…) is outermost, expected a pattern that is the same for all heads"
        ))),
        None => Err(errors::kind(format!(
            "{name}: a {}, expected a longspan.Pattern or its text",
            object.get_type().name()?
        ))),
    }
}

/// Everything.
///
/// >>> import longspan
/// >>> longspan.full().allows(0, 1000)
/// True
#[pyfunction]
pub(crate) fn full() -> Pattern {
    Pattern(Rule::full().into())
}

/// `key <= query`.
///
/// >>> import longspan
/// >>> longspan.causal().allows(5, 5), longspan.causal().allows(5, 6)
/// (True, False)
#[pyfunction]
pub(crate) fn causal() -> Pattern {
    Pattern(Rule::causal().into())
}

/// `query - left <= key <= query + right`, both ends included.
///
/// >>> import longspan
/// >>> [key for key in range(10) if longspan.window(2, 1).allows(5, key)]
/// [3, 4, 5, 6]
#[pyfunction]
pub(crate) fn window(left: Whole, right: Whole) -> PyResult<Pattern> {
    made(Rule::window(left.0, right.0))
}

/// The last `width` positions up to and including the query's own: `window(width - 1, 0)`.
///
/// >>> import longspan
/// >>> longspan.sliding_window(256) == longspan.window(255, 0)
/// True
#[pyfunction]
pub(crate) fn sliding_window(width: Whole) -> PyResult<Pattern> {
    made(Rule::sliding_window(width.0))
}

/// The first `tokens` keys, for everybody.
///
/// >>> import longspan
/// >>> longspan.sinks(4).allows(1000, 3), longspan.sinks(4).allows(1000, 4)
/// (True, False)
#[pyfunction]
pub(crate) fn sinks(tokens: Whole) -> PyResult<Pattern> {
    made(Rule::sinks(tokens.0))
}

/// The first `tokens` positions see all and are seen by all.
///
/// >>> import longspan
/// >>> pattern = longspan.global_tokens(2)
/// >>> pattern.allows(1, 900), pattern.allows(900, 1), pattern.allows(900, 901)
/// (True, True, False)
#[pyfunction]
pub(crate) fn global_tokens(tokens: Whole) -> PyResult<Pattern> {
    made(Rule::global_tokens(tokens.0))
}

/// Query and key in the same segment of `segment` tokens, both `offset` modulo `rate` counted from
/// its start.
///
/// >>> import longspan
/// >>> [key for key in range(16) if longspan.dilated(8, 3, 1).allows(12, key)]
/// [9, 12, 15]
#[pyfunction]
#[pyo3(signature = (segment, rate, offset=Whole(0)), text_signature = "(segment, rate, offset=0)")]
pub(crate) fn dilated(segment: Whole, rate: Whole, offset: Whole) -> PyResult<Pattern> {
    made(Rule::dilated(segment.0, rate.0, offset.0))
}

/// `(query - key) % stride == 0`.
///
/// >>> import longspan
/// >>> longspan.strided(3).allows(10, 1), longspan.strided(3).allows(10, 2)
/// (True, False)
#[pyfunction]
pub(crate) fn strided(stride: Whole) -> PyResult<Pattern> {
    made(Rule::strided(stride.0))
}

/// Fine near, coarse far. Each level is `(window, stride, grain)`: keys at most `window` away whose
/// group of `grain` tokens is every `stride`-th. Any level suffices.
///
/// >>> import longspan
/// >>> pattern = longspan.hierarchical([(2, 1, 1), (8, 4, 2)])
/// >>> [key for key in range(20) if pattern.allows(12, key)]
/// [8, 9, 10, 11, 12, 13, 14, 16, 17]
#[pyfunction]
pub(crate) fn hierarchical(levels: Vec<(Whole, Whole, Whole)>) -> PyResult<Pattern> {
    made(Rule::hierarchical(levels.into_iter().map(|(window, stride, grain)| Level {
        window: window.0,
        stride: stride.0,
        grain: grain.0,
    })))
}

/// Query and key in the same document. The lengths (zero is legal) add up to the keys' tokens.
/// Positions go on counting across documents; `packed` starts anew in each.
///
/// >>> import longspan
/// >>> longspan.documents([3, 5]).allows(4, 3), longspan.documents([3, 5]).allows(4, 2)
/// (True, False)
#[pyfunction]
pub(crate) fn documents(lengths: Vec<Whole>) -> PyResult<Pattern> {
    made(Rule::documents(numbers(lengths)))
}

/// Many sequences in one call: query and key in the same sequence, and `inner` sees positions
/// counted within it, queries aligned to its last keys. So packed equals unpacked.
///
/// >>> import longspan
/// >>> packed = longspan.packed([3, 5], [3, 5], longspan.sinks(1))
/// >>> packed.allows(6, 3), packed.allows(6, 0)
/// (True, False)
#[pyfunction]
pub(crate) fn packed(
    query_lengths: Vec<Whole>,
    key_lengths: Vec<Whole>,
    inner: &Bound<'_, PyAny>,
) -> PyResult<Pattern> {
    let rule = self::inner("packed", inner)?;
    made(Rule::packed(numbers(query_lengths), numbers(key_lengths), rule))
}

/// Block `i` sees itself and blocks `i - r` and `i + r` for each rate.
///
/// >>> import longspan
/// >>> [key for key in range(10) if longspan.blocks_dilated(1, [2]).allows(5, key)]
/// [3, 5, 7]
#[pyfunction]
pub(crate) fn blocks_dilated(block: Whole, rates: Vec<Whole>) -> PyResult<Pattern> {
    made(Rule::blocks_dilated(block.0, numbers(rates)))
}

/// Block `i` sees itself and the blocks whose number differs from `i` in one bit.
///
/// >>> import longspan
/// >>> [key for key in range(16) if longspan.butterfly(1).allows(5, key)]
/// [1, 4, 5, 7, 13]
#[pyfunction]
pub(crate) fn butterfly(block: Whole) -> PyResult<Pattern> {
    made(Rule::butterfly(block.0))
}

/// Query block `i` sees `min(per_row, blocks)` distinct key blocks of the first `blocks`, drawn
/// from `seed` and `i` alone: the same on every machine.
///
/// >>> import longspan
/// >>> sum(longspan.random(1, 3, 100, 7).allows(5, key) for key in range(1000))
/// 3
#[pyfunction]
pub(crate) fn random(
    block: Whole,
    per_row: Whole,
    blocks: Whole,
    seed: Whole,
) -> PyResult<Pattern> {
    made(Rule::random(block.0, per_row.0, blocks.0, seed.0))
}

/// Blocks of a row: a block's number, or the first and one past the last of several.
#[derive(FromPyObject)]
pub(crate) enum Span {
    #[pyo3(transparent)]
    One(Whole),
    #[pyo3(transparent)]
    Range((Whole, Whole)),
}

/// An explicit mask of blocks: for each row of query blocks the key blocks that it sees, ascending,
/// as numbers or as pairs `(first, end)`. Query blocks past the last row see nothing.
///
/// >>> import longspan
/// >>> print(longspan.blocks(64, [[0], [(0, 2)], [0, 2]]))
/// blocks(64, [[0], [0..2], [0, 2]])
///
/// Of a boolean matrix: `longspan.blocks(64, [numpy.flatnonzero(row) for row in matrix])`.
#[pyfunction]
pub(crate) fn blocks(block: Whole, rows: Vec<Vec<Span>>) -> PyResult<Pattern> {
    let range = |span| match span {
        Span::One(Whole(at)) => at..at.saturating_add(1),
        Span::Range((Whole(first), Whole(end))) => first..end,
    };
    made(Rule::blocks(block.0, rows.into_iter().map(|row| row.into_iter().map(range))))
}

/// One pattern a query head. Outermost only.
///
/// >>> import longspan
/// >>> longspan.heads([longspan.causal(), "causal & window(64, 0)"]).heads
/// 2
#[pyfunction]
pub(crate) fn heads(patterns: Vec<Bound<'_, PyAny>>) -> PyResult<Pattern> {
    let rules = patterns.iter().map(|pattern| inner("heads", pattern));
    let rules = rules.collect::<PyResult<Vec<_>>>()?;
    Heads::each(rules).map(Pattern).map_err(errors::raise_pattern)
}
