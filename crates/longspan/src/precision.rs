//! Element types of products.
//!
//! | | stored | multiplied | accumulated |
//! |---|---|---|---|
//! | f32 | f32 | f32 | f32 |
//! | bf16, f16 | as they are | f32, exactly | f32 |
//! | bf16 on a matrix unit | bf16 | bf16, probabilities too | f32 |
//! | f32, `high`, on a matrix unit | f32 | bf16, three products each | f32 |
//!
//! A bf16 number is an f32 number, so the second line is as exact as the first one until its result
//! is rounded. On a matrix unit probabilities, and the gradients of scores, are rounded to bf16
//! before they are multiplied: the error of a result is then up to 1.5 times that of rounding it.
//!
//! In the last line an operand is the sum of two bf16 numbers, 16 bits of it, and a product the sum of
//! three: 4.5e-6 of each product is left out, as a root mean square, 250 times what rounding it to f32
//! costs and a sixtieth of what TF32 leaves out.

use std::fmt;
use std::str::FromStr;

use crate::dtype::ElementType;
use crate::error::{Error, Result};
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
    /// Products of f32 tensors as three of bf16 numbers where the CPU has a matrix unit: less exact than
    /// [`Highest`](Self::Highest) by about 250 times, and faster. Everything else is as it is there.
    ///
    /// Per product of two numbers the error is 4.5e-6 of it, as a root mean square (TF32 has 2.8e-4).
    /// Numbers below 2⁻¹¹⁰ keep less than 16 bits, and those below 2⁻¹²⁶ count as 0; those that 16 bits round
    /// up beyond the range of f32, within 2⁻¹⁶ of the largest, count as infinite. Products beyond that range
    /// may be NaN where they would be infinite.
    High,
    /// Products of f32 for every dtype: bf16 is widened even where a matrix unit is faster.
    Widened,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Highest => "highest",
            Precision::High => "high",
            Precision::Widened => "widened",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = || Error::PrecisionName { name: text.to_owned() };
        Precision::ALL.into_iter().find(|own| own.to_string() == text).ok_or_else(name)
    }
}

impl Precision {
    /// All there are.
    pub const ALL: [Precision; 3] = [Precision::Highest, Precision::High, Precision::Widened];

    /// What is stored, multiplied and accumulated for tensors of a type on an instruction set.
    pub(crate) fn compute_types(self, stored: ElementType, isa: Isa) -> ComputeTypes {
        let (multiplied, products) = match (self, stored, isa) {
            (Precision::Highest | Precision::High, ElementType::Bf16, Isa::Amx) => (stored, 1),
            (Precision::High, ElementType::F32, Isa::Amx) => (ElementType::Bf16, 3),
            _ => (ElementType::F32, 1),
        };
        ComputeTypes { stored, multiplied, products, accumulated: ElementType::F32 }
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
    /// Products of such numbers per product of two stored ones.
    pub products: u32,
    /// What products are summed in.
    pub accumulated: ElementType,
}
