//! Memory that a call takes before it is made.

use super::passes::calls;
use super::{List, Part};
use crate::arguments::{Inputs, Pass};
use crate::dims::Sizes;
use crate::driver;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::options::Options;
use crate::workspace::Workspace;

/// Bytes that the first call of a pass allocates: results, sums and the workspace.
pub(crate) fn bytes_needed<E: Element>(
    components: &List,
    options: &Options,
    inputs: &Inputs<'_, E>,
    sizes: &Sizes,
    pass: Pass,
) -> Result<usize> {
    // Calls follow one another, in one workspace that is kept.
    let (mut space, mut workspace, mut rows) = (Workspace::default(), 0, 0);
    for (entry, component) in calls(components, sizes.batch) {
        if entry > 0 && component.place.is_none() {
            continue;
        }
        let (options, selected) = component.call(options, inputs, entry);
        // Rows that are not all are gathered: log-sum-exp in two parts, and delta.
        if let (Part::Some { .. }, Pass::Backward) = (component.part, pass) {
            let biases: usize = options.gradient_lens().into_iter().flatten().sum();
            rows = rows.max((3 * selected.q.dims().rows() + biases) * size_of::<f32>());
        }
        let layouts = &component.layouts;
        let bytes = match pass {
            Pass::Forward => driver::forward_bytes(&options, layouts, &selected, &mut space)?,
            Pass::Backward => driver::backward_bytes(&options, layouts, &selected, &mut space)?,
        };
        workspace = workspace.max(bytes);
    }
    let sums = match (pass, E::TYPE) {
        (Pass::Forward, ElementType::Bf16 | ElementType::F16) if !components.disjoint => {
            sizes.output().rows() * sizes.value_dim * size_of::<f32>()
        }
        _ => 0,
    };
    Ok(driver::bytes::of_results::<E>(options, sizes, pass) + sums + workspace + rows)
}
