//! Memory that a call takes before it is made.

use super::Component;
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
    // Entries and components follow one another, in one workspace.
    let mut workspace = 0;
    for component in components.iter().filter(|_| sizes.batch > 0) {
        let entry = component.place.map_or(0, |place| place.entry);
        let (options, selected) = component.call(options, inputs, entry);
        let (inputs, rows) = (selected, selected.q.dims().rows());
        let bytes = match pass {
            Pass::Forward => driver::forward_bytes(&options, &component.layouts, &inputs)?,
            Pass::Backward => {
                // Log-sum-exp in two parts, and delta.
                let biases: usize = options.gradient_lens().into_iter().flatten().sum();
                driver::backward_bytes(&options, &component.layouts, &inputs)?
                    + (3 * rows + biases) * size_of::<f32>()
            }
        };
        workspace = workspace.max(bytes);
    }
    let sums = match (pass, E::TYPE) {
        (Pass::Forward, ElementType::Bf16 | ElementType::F16) => {
            sizes.output().rows() * sizes.value_dim * size_of::<f32>()
        }
        _ => 0,
    };
    Ok(driver::bytes::of_results::<E>(options, sizes, pass) + sums + workspace)
}
