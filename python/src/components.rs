//! Orders of tokens: the components of a layout, and the tiles of a grid.

use longspan::{Layout, Positions, TokenSteps};
use longspan_pattern::residues::Steps;
use longspan_pattern::{PositionOrder, Progression};
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::arguments::Wholes;
use crate::{errors, signals};

/// Some pairs of a layout as dense blocks, in an order of residues: equal views of queries and keys, with a
/// step. Made by `Layout.components`.
#[pyclass(frozen, get_all, module = "longspan")]
pub(crate) struct Component {
    /// Distance of neighbors in the order; 1 is the order of tokens.
    modulus: u64,
    /// Positions per segment, where residues count within segments.
    segment: Option<u64>,
    /// Where each view of queries begins, and its tokens from there on.
    queries: (Py<PyRange>, Py<PyRange>),
    /// The same of keys.
    keys: (Py<PyRange>, Py<PyRange>),
    /// Active pairs of all views.
    active_pairs: u128,
}

#[pymethods]
impl Component {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Component { modulus, segment, queries, keys, active_pairs } = self;
        let order = match segment {
            Some(segment) => format!("modulo {modulus} in segments of {segment}"),
            None => format!("modulo {modulus}"),
        };
        let len = |range: &Py<PyRange>| range.bind(py).len();
        let (views, queries, keys) = (len(&queries.0)?, len(&queries.1)?, len(&keys.1)?);
        Ok(format!(
            "<longspan.Component {order}, {views} × ({queries} × {keys}) tokens, {active_pairs} pairs>"
        ))
    }
}

/// The components of a layout.
pub(crate) fn all(py: Python<'_>, layout: &Layout) -> PyResult<Vec<Component>> {
    let work = |watch: &mut signals::Watch| {
        let Some(split) = layout.split_with(|_, _| watch.look())? else { return Ok(Vec::new()) };
        let mut parts = Vec::new();
        for component in split.components() {
            let mut pairs = 0;
            for layout in component.layouts() {
                pairs += layout.counts_with(|_, _| watch.look())?.active_pairs;
            }
            parts.push((component, pairs));
        }
        Ok(parts)
    };
    let parts = signals::released(py, work, errors::raise_pattern)?;
    let range = |Steps { first, step, count }| {
        let end = first + step * count;
        PyRange::new_with_step(py, first as isize, end as isize, step as isize).map(Bound::unbind)
    };
    let view = |TokenSteps { segments, tokens }| PyResult::Ok((range(segments)?, range(tokens)?));
    let component = |(component, active_pairs): (&longspan_pattern::Component, u128)| {
        let (modulus, segment) = match component.order() {
            PositionOrder::Natural => (1, None),
            PositionOrder::Residues { modulus, segment } => (modulus, segment),
        };
        let (queries, keys) = (view(component.queries())?, view(component.keys())?);
        Ok(Component { modulus, segment, queries, keys, active_pairs })
    };
    parts.into_iter().map(component).collect()
}

/// The cells of a grid in the order of its tiles, as `query_map` and `key_map` of `Pattern.compile` take
/// it. Positions are those of `neighborhood`: from 0 on, the last axis fastest. In tiles of 8 x 8 or
/// 4 x 4 x 4 cells, neighborhoods are few blocks of 64 tokens; tensors have to be in the same order.
/// `longspan.torch.neighborhood_attention` does all of it.
///
/// >>> import longspan
/// >>> longspan.tiles([2, 6], [2, 3])
/// [range(0, 3), range(6, 9), range(3, 6), range(9, 12)]
/// >>> order = longspan.tiles([64, 64], [8, 8])
/// >>> pattern = longspan.neighborhood([64, 64], [6, 6])
/// >>> pattern.compile(4096).active_blocks
/// 790
/// >>> pattern.compile(4096, query_map=order, key_map=order).active_blocks
/// 484
#[pyfunction]
pub(crate) fn tiles<'py>(
    py: Python<'py>,
    sizes: Wholes,
    tile: Wholes,
) -> PyResult<Vec<Bound<'py, PyRange>>> {
    let [sizes, tile] = [sizes, tile]
        .map(|list| -> Vec<usize> { list.0.into_iter().map(|size| size as usize).collect() });
    let order = Positions::tiles(&sizes, &tile).map_err(errors::raise_pattern)?;
    ranges(py, Some(&order)).map(Option::unwrap_or_default)
}

/// A map as `Pattern.compile` takes it.
pub(crate) fn ranges<'py>(
    py: Python<'py>,
    map: Option<&Positions>,
) -> PyResult<Option<Vec<Bound<'py, PyRange>>>> {
    let Some(map) = map else { return Ok(None) };
    let range = |part: Progression| {
        let step = part.step as isize;
        let end = part.start as isize + step * part.len as isize;
        PyRange::new_with_step(py, part.start as isize, end, step)
    };
    map.progressions().map(range).collect::<PyResult<Vec<_>>>().map(Some)
}
