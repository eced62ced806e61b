//! A tiny forward and backward pass, to see whether instruction sets agree.
//!
//! It takes milliseconds and finds a CPU or a build that is broken; whether results are *right* is
//! for `longspan verify` to say.

use std::num::NonZeroUsize;

use longspan::{
    Arrived, Attention, Dims, Element, ElementType, Inputs, Isa, Layout, Order, Pattern, Result,
    Shape, Tensor, Threads,
};

use crate::element::with_element;
use crate::random;

/// All numbers of a result, by tensor.
pub(super) type Numbers = Vec<(&'static str, Vec<f32>)>;

/// Root mean square difference, as a share of the results' own, above which two kernels disagree.
/// Each may be off by 12 times what rounding costs (0.425 · 2⁻²⁴, 3·10⁻⁸), so kernels that are right
/// differ by up to 6·10⁻⁷, and 10⁻⁶ is that with little room; one row that misses one of its 45 keys
/// makes 10⁻³.
///
/// Results of bf16 and f16 are rounded, and AMX rounds what it multiplies too: each rounding is
/// off by 0.4 units at most on average, and gradients have several of them.
fn most(element: ElementType) -> f64 {
    match element {
        ElementType::Bf16 => 4.0 / f64::from(1 << 8),
        ElementType::F16 => 4.0 / f64::from(1 << 11),
        _ => 1e-6,
    }
}

/// Both passes over 150 tokens: four heads on two, dims that no vector divides, a window and sinks.
pub(super) fn compute(isa: Isa, element: ElementType) -> Result<Numbers> {
    with_element!(element, E => compute_with::<E>(isa))
}

fn compute_with<E: Element>(isa: Isa) -> Result<Numbers> {
    let tokens = 150;
    let pattern: Pattern = "causal & (window(40, 0) | sinks(4))".parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(tokens as u64, tokens as u64))?;
    let attention = Attention::new(layout).isa(isa).threads(Threads::Count(NonZeroUsize::MIN));
    let make = |seed, heads, dim| {
        let dims = Dims { batch: 1, tokens, heads, dim };
        let data = random::normals::<E>(seed, tokens * heads * dim, NonZeroUsize::MIN);
        Tensor::new(data, dims, Order::BatchTokenHeadDim)
    };
    let (q, k, v, dout) = (make(0, 4, 27)?, make(1, 2, 27)?, make(2, 2, 21)?, make(3, 4, 21)?);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let output = attention.forward(inputs.q, inputs.k, inputs.v)?;
    let gradients = attention.backward(inputs, Arrived::of(&output, dout.view()))?;
    let widened = |tensor: Tensor<E>| tensor.as_slice().iter().map(|x| x.to_f32()).collect();
    Ok(vec![
        ("out", widened(output.out)),
        ("lse", output.lse),
        ("dq", widened(gradients.dq)),
        ("dk", widened(gradients.dk)),
        ("dv", widened(gradients.dv)),
    ])
}

/// The largest difference of a tensor as a share of its size, or what is wrong.
pub(super) fn compare(
    element: ElementType,
    expected: &Result<Numbers>,
    got: &Result<Numbers>,
) -> std::result::Result<f64, String> {
    let expected = expected.as_ref().map_err(ToString::to_string)?;
    let got = got.as_ref().map_err(ToString::to_string)?;
    let (limit, mut most) = (most(element), 0.0_f64);
    for ((tensor, expected), (_, got)) in expected.iter().zip(got) {
        let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
        let pairs = expected.iter().zip(got).map(|(&a, &b)| f64::from(a) - f64::from(b));
        let size = squares(&mut expected.iter().map(|&x| f64::from(x)));
        let difference = (squares(&mut { pairs }) / size).sqrt();
        if difference.is_nan() || difference > limit || expected.len() != got.len() {
            return Err(format!(
                "{element}: {tensor} differs from that of the portable kernels by {difference:.1e} of its \
                 size, expected at most {limit:.0e}; run `longspan verify` and report what it says"
            ));
        }
        most = most.max(difference);
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_agree() {
        for element in ElementType::ALL {
            let expected = compute(Isa::Portable, element);
            for isa in Isa::available() {
                let difference = compare(element, &expected, &compute(isa, element)).unwrap();
                assert!(difference < most(element) / 2.0, "{isa}, {element}: {difference}");
            }
        }
    }

    #[test]
    fn disagreement_is_seen() -> Result<()> {
        for (element, off) in ElementType::ALL.into_iter().zip([0.1, 10.0, 10.0]) {
            let expected = compute(Isa::Portable, element);
            for (n, tensor) in ["out", "lse", "dq", "dk", "dv"].into_iter().enumerate() {
                for spoil in [f32::NAN, off] {
                    let mut got = compute(Isa::Portable, element)?;
                    got[n].1[33] += spoil;
                    let message = compare(element, &expected, &Ok(got)).unwrap_err();
                    assert!(message.starts_with(&format!("{element}: {tensor}")), "{message}");
                }
            }
        }
        Ok(())
    }
}
