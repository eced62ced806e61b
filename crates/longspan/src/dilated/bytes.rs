//! Memory that a call takes before it is made.

use super::Dilated;
use crate::arguments::Pass;
use crate::check;
use crate::components;
use crate::dims::Dims;
use crate::driver;
use crate::dtype::Element;
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
        components::bytes_needed(&parts, &self.options, &inputs, &sizes, pass)
    }
}
