//! What a caller asks the ranks of a process group to compute, read from Python's arguments.

use std::time::Duration;

use longspan::{ElementType, Score};
use longspan_ring::{Problem, Shards, Sparsity, Wire};
use pyo3::prelude::*;

use crate::dilated::Dilated;
use crate::errors;
use crate::pattern::Pattern;
use crate::tensor::by_dtype;

/// What a caller asks ranks to compute: batch entries, heads of queries and of keys, head dims of keys and
/// of values in `sizes`.
pub(crate) struct Asked<'a, 'py> {
    pub(crate) pattern: &'a Bound<'py, PyAny>,
    pub(crate) shards: &'a str,
    pub(crate) tokens: usize,
    pub(crate) sizes: (usize, usize, usize, usize, usize),
    pub(crate) dtype: &'a str,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
}

impl Asked<'_, '_> {
    pub(crate) fn element(&self) -> PyResult<ElementType> {
        by_dtype(self.dtype).ok_or_else(|| errors::kind(format!("no kernel of {}", self.dtype)))
    }

    /// The problem of the ranks of a group, keys and values sent as they are.
    pub(crate) fn problem(&self, ranks: usize) -> PyResult<Problem> {
        let (batch, heads, key_heads, dim, value_dim) = self.sizes;
        let sparsity = known(self.pattern)?;
        let shards = self::shards(self.shards, self.tokens, ranks, Some(&sparsity))?;
        let mut problem = Problem::new(sparsity, shards)
            .batch(batch)
            .heads(heads, key_heads)
            .dims(dim, value_dim)
            .element(self.element()?);
        if let Some(scale) = self.scale {
            problem = problem.scale(scale);
        }
        if let Some(cap) = self.softcap {
            problem = problem.score(Score::default().softcap(cap));
        }
        Ok(problem)
    }
}

pub(crate) fn known(pattern: &Bound<'_, PyAny>) -> PyResult<Sparsity> {
    if let Ok(dilated) = pattern.cast::<Dilated>() {
        return Ok(dilated.get().shared().into());
    }
    let heads = Pattern::of(pattern)?;
    heads
        .map(Sparsity::from)
        .ok_or_else(|| errors::kind("expected a longspan.Pattern, its text, or a longspan.Dilated"))
}

pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        errors::value(format!("timeout is {seconds}, expected seconds: 0 or more, and finite"))
    })
}

/// How keys and values are sent: a format's name, or a bound on the error of an element.
pub(crate) fn wire(value: &Bound<'_, PyAny>) -> PyResult<Wire> {
    let name = match value.extract::<String>() {
        Ok(name) => name,
        Err(_) => match value.extract::<f32>() {
            Ok(bound) => return Wire::within(bound).map_err(errors::raise_ring),
            Err(_) => value.get_type().name()?.to_string(),
        },
    };
    match &*name {
        "exact" => Ok(Wire::Exact),
        "bf16" => Ok(Wire::Bf16),
        "int8" => Ok(Wire::Int8),
        other => Err(errors::value(format!(
            "wire is {other:?}, expected \"exact\", \"bf16\", \"int8\", or the largest error of an \
             element as a float"
        ))),
    }
}

pub(crate) fn shards(
    name: &str,
    tokens: usize,
    ranks: usize,
    sparsity: Option<&Sparsity>,
) -> PyResult<Shards> {
    match name {
        "balanced" => match sparsity {
            Some(sparsity) => Shards::balanced(sparsity.clone(), tokens, ranks, 1),
            None => {
                return Err(errors::value(
                    "shards is \"balanced\" without a pattern, expected the pattern whose work is \
                     balanced",
                ));
            }
        },
        "contiguous" => Shards::contiguous(tokens, ranks, 1),
        "zigzag" => Shards::zigzag(tokens, ranks, 1),
        "striped" => Shards::striped(tokens, ranks, 1),
        other => {
            return Err(errors::value(format!(
                "shards is {other:?}, expected \"contiguous\" (one range per rank), \"zigzag\" (a \
                 range from the front and one from the back), \"striped\" (every n-th token of n \
                 ranks) or \"balanced\" (equal work for a pattern)"
            )));
        }
    }
    .map_err(errors::raise_ring)
}
