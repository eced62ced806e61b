//! A small forward and backward pass that compares the instruction sets with each other.
//!
//! It takes milliseconds and detects a broken CPU or build; `longspan verify` checks correctness.

use std::num::NonZeroUsize;

use longspan::{
    Attention, Dims, Element, ElementType, Inputs, Isa, Layout, Order, Pattern, Result, Shape,
    Tensor, Threads,
};

use crate::element::with_element;
use crate::random;

/// All elements of a result, by tensor.
pub(super) type Tensors = Vec<(&'static str, Vec<f32>)>;

/// Root mean square difference, as a share of the results' own, above which two kernels disagree.
/// The error of each is at most 12 times the rounding error (0.425 · 2⁻²⁴, 3·10⁻⁸), so correct kernels
/// differ by up to 6·10⁻⁷; 10⁻⁶ adds a small margin. One row that misses one of its 45 keys differs by
/// 10⁻³.
///
/// Results of bf16 and f16 are rounded, and AMX rounds its operands too: the mean error per
/// rounding is at most 0.4 units, and gradients have several.
fn most(element: ElementType) -> f64 {
    match element {
        ElementType::Bf16 => 4.0 / f64::from(1 << 8),
        ElementType::F16 => 4.0 / f64::from(1 << 11),
        _ => 1e-6,
    }
}

/// Both passes over 150 tokens: four heads on two, dims that no vector divides, a window and sinks.
pub(super) fn compute(isa: Isa, element: ElementType) -> Result<Tensors> {
    with_element!(element, E => compute_with::<E>(isa))
}

fn compute_with<E: Element>(isa: Isa) -> Result<Tensors> {
    let tokens = 150;
    let pattern: Pattern = "causal & (window(40, 0) | sinks(4))".parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(tokens, tokens))?;
    let attention = Attention::new(layout).isa(isa).threads(Threads::Count(1));
    let make = |seed, heads, dim| {
        let dims = Dims { batch: 1, tokens, heads, dim };
        let data = random::normals::<E>(seed, tokens * heads * dim, NonZeroUsize::MIN);
        Tensor::new(data, dims, Order::Bshd)
    };
    let (q, k, v, dout) = (make(0, 4, 27)?, make(1, 2, 27)?, make(2, 2, 21)?, make(3, 4, 21)?);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let output = attention.forward(inputs)?;
    let gradients = attention.backward(inputs, &output, dout.view())?;
    let widened = |tensor: Tensor<E>| tensor.as_slice().iter().map(|x| x.to_f32()).collect();
    Ok(vec![
        ("out", widened(output.out)),
        ("lse", output.lse),
        ("dq", widened(gradients.dq)),
        ("dk", widened(gradients.dk)),
        ("dv", widened(gradients.dv)),
    ])
}

/// The largest difference of a tensor as a share of its norm, or an error.
pub(super) fn compare(
    element: ElementType,
    expected: &Result<Tensors>,
    got: &Result<Tensors>,
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
                 size, expected at most {limit:.0e}; run `longspan verify` and report its output"
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
    fn disagreement_is_detected() -> Result<()> {
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
