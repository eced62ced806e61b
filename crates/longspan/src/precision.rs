//! What products are made of.
//!
//! | | stored | multiplied | accumulated |
//! |---|---|---|---|
//! | f32 | f32 | f32 | f32 |
//! | bf16, f16 | as they are | f32, exactly | f32 |
//! | bf16 on a matrix unit | bf16 | bf16, probabilities too | f32 |
//!
//! A bf16 number is an f32 number, so the second line is as exact as the first one until its result
//! is rounded. On a matrix unit probabilities, and the gradients of scores, are rounded to bf16 before
//! they are multiplied: the error of a result is then up to 1.5 times that of rounding it.

use crate::element::ElementType;
use crate::isa::Isa;

/// What products are made of, where there is a choice.
///
/// ```
/// use longspan::{Attention, Layout, Numbers, Pattern, Precision, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(1_000, 1_000))?;
/// let attention = Attention::new(layout).precision(Precision::Exact);
/// let Numbers { stored, multiplied, .. } = attention.numbers::<half::bf16>()?;
/// assert_eq!((stored.to_string(), multiplied.to_string()), ("bf16".into(), "f32".into()));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Precision {
    /// Whatever is fastest for what the tensors hold: bf16 products where the CPU has a matrix unit.
    #[default]
    Fastest,
    /// Products of f32 numbers.
    Exact,
}

impl Precision {
    /// What is stored, multiplied and accumulated for tensors of a type on an instruction set.
    pub(crate) fn numbers(self, stored: ElementType, isa: Isa) -> Numbers {
        let on_matrix_unit =
            (self, stored, isa) == (Precision::Fastest, ElementType::Bf16, Isa::Amx);
        let multiplied = if on_matrix_unit { stored } else { ElementType::F32 };
        Numbers { stored, multiplied, accumulated: ElementType::F32 }
    }
}

/// The types of a computation: see [`Attention::numbers`](crate::Attention::numbers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Numbers {
    /// What tensors hold.
    pub stored: ElementType,
    /// What is multiplied: of probabilities too.
    pub multiplied: ElementType,
    /// What products are summed in.
    pub accumulated: ElementType,
}
