//! Memory that a call takes before it is made.

use super::Dilated;
use crate::arguments::Pass;
use crate::check;
use crate::dims::Dims;
use crate::driver;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::{Hook, Monitor};

impl Dilated {
    /// Bytes that the first call of a pass allocates, as
    /// [`Attention::bytes_needed`](crate::Attention::bytes_needed) says. The layouts of the branches
    /// are compiled here, kept for the calls that follow, and not counted.
    ///
    /// ```
    /// use longspan::{Dilated, Dims, Pass};
    ///
    /// let dilated = Dilated::new([(512, 1), (2_048, 4)])?.threads(1);
    /// let dims = Dims { batch: 1, tokens: 4_096, heads: 4, dim: 64 };
    /// let tensor = dims.elements().unwrap() * 4;
    /// assert!(dilated.bytes_needed::<f32>([dims; 3], Pass::Backward)? > 3 * tensor);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn bytes_needed<E: Element>(&self, dims: [Dims; 3], pass: Pass) -> Result<usize> {
        let element = [E::default()];
        let inputs = driver::bytes::inputs(&element, dims)?;
        let sizes = check::tensors(&self.options, &inputs)?;
        let parts = self.parts(&sizes, &Monitor::new(Hook::none()))?;
        // Entries and parts follow one another, in one workspace.
        let mut workspace = 0;
        for part in parts.iter().filter(|_| sizes.batch > 0) {
            let entry = part.place.map_or(0, |place| place.entry);
            let (options, selected) = part.call(&self.options, &inputs, entry);
            let (inputs, rows) = (selected, selected.q.dims().rows());
            let bytes = match pass {
                Pass::Forward => driver::forward_bytes(&options, &part.layouts, &inputs)?,
                Pass::Backward => {
                    // Log-sum-exp in two parts, and delta.
                    let biases: usize = options.gradient_lens().into_iter().flatten().sum();
                    driver::backward_bytes(&options, &part.layouts, &inputs)?
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
        Ok(driver::bytes::of_results::<E>(&self.options, &sizes, pass) + sums + workspace)
    }
}
