//! The functions that make patterns, named as in the text form.

use std::ops::Range;

use longspan::{Heads, Level, Pattern as Rule};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{Whole, Wholes, described, elements};
use crate::errors;
use crate::pattern::Pattern;

fn made(rule: Result<Rule, longspan_pattern::Error>) -> PyResult<Pattern> {
    rule.map(|rule| Pattern(rule.into())).map_err(errors::raise_pattern)
}

/// A pattern, or the text of one, that is the same for all heads.
pub(crate) fn inner(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Rule> {
    match Pattern::of(object)? {
        Some(Heads::Same(rule)) => Ok(rule),
        Some(_) => Err(errors::value(format!(
            "{name}: heads(…) is outermost: give patterns that are the same for all heads"
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
#[pyo3(signature = (left=None, right=None), text_signature = "(left, right)")]
pub(crate) fn window(
    left: Option<&Bound<'_, PyAny>>,
    right: Option<&Bound<'_, PyAny>>,
) -> PyResult<Pattern> {
    made(Rule::window(side("left", left)?, side("right", right)?))
}

/// How far a window reaches to one side.
fn side(name: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    match object {
        Some(object) => object.extract::<Whole>().map(|side| side.0).map_err(|error| {
            let py = object.py();
            match error.is_instance_of::<PyTypeError>(py) {
                true => errors::kind(format!("{name} is {}", error.value(py))),
                false => error,
            }
        }),
        None => Err(errors::kind(format!(
            "{name} is missing or None: `window` takes two integers, `window(left, right)`, as \
             window(256, 0) for the 256 positions before the query and its own; for no bound on a \
             side give the number of tokens"
        ))),
    }
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

/// The first `tokens` keys, for every query.
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

/// Keys at some positions, for every query: `from_ <= key < to`.
///
/// >>> import longspan
/// >>> longspan.keys(500, 501).allows(3, 500), longspan.keys(500, 501).allows(3, 501)
/// (True, False)
#[pyfunction]
pub(crate) fn keys(from_: Whole, to: Whole) -> PyResult<Pattern> {
    made(Rule::keys(from_.0, to.0))
}

/// Every key, for queries at some positions: `from_ <= query < to`. A global token anywhere is
/// `keys(a, b) | queries(a, b)`.
///
/// >>> import longspan
/// >>> longspan.queries(500, 501).allows(500, 3), longspan.queries(500, 501).allows(501, 3)
/// (True, False)
#[pyfunction]
pub(crate) fn queries(from_: Whole, to: Whole) -> PyResult<Pattern> {
    made(Rule::queries(from_.0, to.0))
}

/// Neighbors in a grid of one to four axes whose cells are the positions from 0 on, the last axis
/// fastest: on every axis the coordinates differ by at most its radius. Neighborhoods are clipped at
/// the borders (NATTEN shifts them inward instead).
///
/// >>> import longspan
/// >>> pattern = longspan.neighborhood([3, 5], [1, 1])
/// >>> [key for key in range(15) if pattern.allows(2, key)]
/// [1, 2, 3, 6, 7, 8]
#[pyfunction]
pub(crate) fn neighborhood(sizes: Wholes, radii: Wholes) -> PyResult<Pattern> {
    made(Rule::neighborhood(sizes.0, radii.0))
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
/// Positions continue across documents; `packed` restarts at 0 in each.
///
/// >>> import longspan
/// >>> longspan.documents([3, 5]).allows(4, 3), longspan.documents([3, 5]).allows(4, 2)
/// (True, False)
#[pyfunction]
pub(crate) fn documents(lengths: Wholes) -> PyResult<Pattern> {
    made(Rule::documents(lengths.0))
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
    query_lengths: Wholes,
    key_lengths: Wholes,
    inner: &Bound<'_, PyAny>,
) -> PyResult<Pattern> {
    let rule = self::inner("packed", inner)?;
    made(Rule::packed(query_lengths.0, key_lengths.0, rule))
}

/// `packed` by the positions at which sequences begin, and the end: flash-attn's `cu_seqlens_q` and
/// `cu_seqlens_k`, ascending from 0.
///
/// >>> import longspan
/// >>> longspan.packed_cu_seqlens([0, 3, 8], [0, 3, 8], "causal")
/// longspan.Pattern("packed([3, 5], [3, 5], causal)")
#[pyfunction]
pub(crate) fn packed_cu_seqlens(
    cu_seqlens_q: Wholes,
    cu_seqlens_k: Wholes,
    inner: &Bound<'_, PyAny>,
) -> PyResult<Pattern> {
    let rule = self::inner("packed_cu_seqlens", inner)?;
    made(Rule::packed_cu_seqlens(&cu_seqlens_q.0, &cu_seqlens_k.0, rule))
}

/// Block `i` sees itself and blocks `i - r` and `i + r` for each rate.
///
/// >>> import longspan
/// >>> [key for key in range(10) if longspan.blocks_dilated(1, [2]).allows(5, key)]
/// [3, 5, 7]
#[pyfunction]
pub(crate) fn blocks_dilated(block: Whole, rates: Wholes) -> PyResult<Pattern> {
    made(Rule::blocks_dilated(block.0, rates.0))
}

/// Block `i` sees itself and the blocks whose index differs from `i` in one bit.
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

/// An explicit mask of blocks: for each row of query blocks the key blocks that it sees, ascending,
/// as indices or as pairs `(first, end)`. Query blocks past the last row see nothing.
///
/// >>> import longspan, numpy
/// >>> print(longspan.blocks(64, [[0], [(0, 2)], [0, 2]]))
/// blocks(64, [[0], [0..2], [0, 2]])
///
/// A boolean matrix, an array or a tensor, has a row per query block and a column per key block:
///
/// >>> print(longspan.blocks(64, numpy.tri(3, dtype=bool)))
/// blocks(64, [[0], [0..2], [0..3]])
#[pyfunction]
pub(crate) fn blocks(block: Whole, rows: &Bound<'_, PyAny>) -> PyResult<Pattern> {
    let ranges = match rows.getattr_opt("dtype")? {
        Some(dtype) => {
            let (dtype, axes) = (dtype.str()?.to_string(), rows.getattr("ndim")?.extract()?);
            matrix(rows, &dtype, axes)?
        }
        None => lists(rows)?,
    };
    made(Rule::blocks(block.0, ranges))
}

/// The ranges of key blocks of each row of a boolean matrix.
fn matrix(rows: &Bound<'_, PyAny>, dtype: &str, axes: usize) -> PyResult<Vec<Vec<Range<u64>>>> {
    if !["bool", "torch.bool"].contains(&dtype) || axes != 2 {
        return Err(errors::value(format!(
            "rows is an array of {dtype} with {axes} axes, expected a boolean matrix (query blocks × \
             key blocks), or a list of the key blocks of each row"
        )));
    }
    let rows: Vec<Vec<bool>> = elements(rows)?.extract()?;
    let ranges = |row: Vec<bool>| {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for at in (0..row.len()).filter(|&at| row[at]).map(|at| at as u64) {
            match ranges.last_mut() {
                Some(last) if last.end == at => last.end += 1,
                _ => ranges.push(at..at + 1),
            }
        }
        ranges
    };
    Ok(rows.into_iter().map(ranges).collect())
}

/// The ranges of key blocks of each row of a list.
fn lists(rows: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<Range<u64>>>> {
    let wrong = |name: String, object: &Bound<'_, PyAny>, expected| -> PyResult<PyErr> {
        Ok(errors::kind(format!("{name} is {}, expected {expected}", described(object)?)))
    };
    let Ok(items) = rows.try_iter() else {
        let expected = "a boolean matrix, or a list of the key blocks of each row";
        return Err(wrong("rows".into(), rows, expected)?);
    };
    let mut all = Vec::new();
    for (i, row) in items.enumerate() {
        let row = elements(&row?)?;
        let Ok(items) = row.try_iter() else {
            return Err(wrong(format!("rows[{i}]"), &row, "a list of key blocks")?);
        };
        let mut ranges = Vec::new();
        for (j, item) in items.enumerate() {
            let item = item?;
            if let Ok((first, end)) = item.extract::<(Whole, Whole)>() {
                ranges.push(first.0..end.0);
                continue;
            }
            match item.extract::<Whole>() {
                Ok(Whole(at)) => ranges.push(at..at.saturating_add(1)),
                Err(error) if error.is_instance_of::<PyTypeError>(rows.py()) => {
                    let expected = "the index of a key block, or a pair (first, end); give a \
                                    boolean matrix as an array";
                    return Err(wrong(format!("rows[{i}][{j}]"), &item, expected)?);
                }
                Err(error) => return Err(error),
            }
        }
        all.push(ranges);
    }
    Ok(all)
}

/// One pattern per query head. Outermost only.
///
/// >>> import longspan
/// >>> longspan.heads([longspan.causal(), "causal & window(64, 0)"]).heads
/// 2
#[pyfunction]
pub(crate) fn heads(patterns: &Bound<'_, PyAny>) -> PyResult<Pattern> {
    let Ok(patterns) = patterns.extract::<Vec<Bound<'_, PyAny>>>() else {
        return Err(errors::kind(format!(
            "heads: {}, expected a list of patterns, one per query head",
            described(patterns)?
        )));
    };
    let rules = patterns.iter().map(|pattern| inner("heads", pattern));
    let rules = rules.collect::<PyResult<Vec<_>>>()?;
    Heads::each(rules).map(Pattern).map_err(errors::raise_pattern)
}

/// One pattern, or `heads(...)`, per batch entry. Outermost only. Calls take a list of patterns as well.
///
/// >>> import longspan
/// >>> longspan.batch([longspan.causal(), "causal & window(64, 0)"]).batch
/// 2
#[pyfunction]
pub(crate) fn batch(patterns: &Bound<'_, PyAny>) -> PyResult<Pattern> {
    let Ok(patterns) = patterns.extract::<Vec<Bound<'_, PyAny>>>() else {
        return Err(errors::kind(format!(
            "batch: {}, expected a list of patterns, one per batch entry",
            described(patterns)?
        )));
    };
    let mut entries = Vec::with_capacity(patterns.len());
    for (index, pattern) in patterns.iter().enumerate() {
        let Some(entry) = Pattern::of(pattern)? else {
            return Err(errors::kind(format!(
                "batch: entry {index} is {}, expected a longspan.Pattern or its text",
                described(pattern)?
            )));
        };
        entries.push(entry);
    }
    Heads::batch(entries).map(Pattern).map_err(errors::raise_pattern)
}
