//! Memory that a call takes before it is made.

use super::{Component, Part};
use crate::arguments::{Inputs, Pass};
use crate::dims::Sizes;
use crate::driver;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::options::Options;

/// Bytes that the first call of a pass allocates: results, sums and the workspace.
pub(crate) fn bytes_needed<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    sizes: &Sizes,
    pass: Pass,
) -> Result<usize> {
    // Entries and components follow one another, in one workspace that is kept.
    let (mut workspace, mut rows) = (0, 0);
    for component in components.iter().filter(|_| sizes.batch > 0) {
        let entry = component.place.map_or(0, |place| place.entry);
        let (options, selected) = component.call(options, inputs, entry);
        // Rows that are not all are gathered: log-sum-exp in two parts, and delta.
        if let (Part::Some { .. }, Pass::Backward) = (component.part, pass) {
            let biases: usize = options.gradient_lens().into_iter().flatten().sum();
            rows = rows.max((3 * selected.q.dims().rows() + biases) * size_of::<f32>());
        }
        let bytes = match pass {
            Pass::Forward => driver::forward_bytes(&options, &component.layouts, &selected)?,
            Pass::Backward => driver::backward_bytes(&options, &component.layouts, &selected)?,
        };
        workspace = workspace.max(bytes);
    }
    let sums = match (pass, E::TYPE) {
        (Pass::Forward, ElementType::Bf16 | ElementType::F16) => {
            sizes.output().rows() * sizes.value_dim * size_of::<f32>()
        }
        _ => 0,
    };
    Ok(driver::bytes::of_results::<E>(options, sizes, pass) + sums + workspace + rows)
}
