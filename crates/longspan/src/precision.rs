//! Element types of products.
//!
//! | | stored | multiplied | accumulated |
//! |---|---|---|---|
//! | f32 | f32 | f32 | f32 |
//! | bf16, f16 | as they are | f32, exactly | f32 |
//! | bf16 on a matrix unit | bf16 | bf16, probabilities too | f32 |
//!
//! A bf16 number is an f32 number, so the second line is as exact as the first one until its result
//! is rounded. On a matrix unit probabilities, and the gradients of scores, are rounded to bf16
//! before they are multiplied: the error of a result is then up to 1.5 times that of rounding it.

use crate::dtype::ElementType;
use crate::isa::Isa;

/// The precision of products, where there is a choice. Names are those of torch's
/// `set_float32_matmul_precision`.
///
/// ```
/// use longspan::{Attention, Layout, ComputeTypes, Pattern, Precision, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(1_000, 1_000))?;
/// let attention = Attention::new(layout).precision(Precision::Widened);
/// let ComputeTypes { stored, multiplied, .. } = attention.compute_types::<half::bf16>()?;
/// assert_eq!((stored.to_string(), multiplied.to_string()), ("bf16".into(), "f32".into()));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Precision {
    /// Products at the precision of the tensors: f32 of f32, bf16 of bf16 where the CPU has a matrix
    /// unit for it.
    #[default]
    Highest,
    /// Products of f32 for every dtype: bf16 is widened even where a matrix unit is faster.
    Widened,
}

impl Precision {
    /// What is stored, multiplied and accumulated for tensors of a type on an instruction set.
    pub(crate) fn compute_types(self, stored: ElementType, isa: Isa) -> ComputeTypes {
        let on_matrix_unit =
            (self, stored, isa) == (Precision::Highest, ElementType::Bf16, Isa::Amx);
        let multiplied = if on_matrix_unit { stored } else { ElementType::F32 };
        ComputeTypes { stored, multiplied, accumulated: ElementType::F32 }
    }
}

/// The types of a computation: see [`Attention::compute_types`](crate::Attention::compute_types).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ComputeTypes {
    /// What tensors hold.
    pub stored: ElementType,
    /// What is multiplied: of probabilities too.
    pub multiplied: ElementType,
    /// What products are summed in.
    pub accumulated: ElementType,
}
