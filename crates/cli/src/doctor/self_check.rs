//! A tiny forward and backward pass, to see whether instruction sets agree.
//!
//! It takes milliseconds and finds a CPU or a build that is broken; whether results are *right* is
//! for `longspan verify` to say.

use std::num::NonZeroUsize;

use longspan::{
    Arrived, Attention, Dims, Inputs, Isa, Layout, Order, Pattern, Result, Shape, Tensor, Threads,
};

use crate::random;

/// All numbers of a result, by tensor.
pub(super) type Numbers = Vec<(&'static str, Vec<f32>)>;

/// Root mean square difference, as a share of the results' own, above which two kernels disagree.
/// Each may be off by 12 times what rounding costs (3·10⁻⁸), so 10⁻⁶ is what kernels that are
/// right may differ by, with little room; one row that misses one of its 45 keys makes 10⁻³.
const MOST: f64 = 1e-5;

/// Both passes over 150 tokens: four heads on two, dims that no vector divides, a window and sinks.
pub(super) fn compute(isa: Isa) -> Result<Numbers> {
    let tokens = 150;
    let pattern: Pattern = "causal & (window(40, 0) | sinks(4))".parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(tokens as u64, tokens as u64))?;
    let attention = Attention::new(layout).isa(isa).threads(Threads::Count(NonZeroUsize::MIN));
    let make = |seed, heads, dim| {
        let dims = Dims { batch: 1, tokens, heads, dim };
        let data = random::normals(seed, tokens * heads * dim, NonZeroUsize::MIN);
        Tensor::new(data, dims, Order::BatchTokenHeadDim)
    };
    let (q, k, v, dout) = (make(0, 4, 27)?, make(1, 2, 27)?, make(2, 2, 21)?, make(3, 4, 21)?);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let output = attention.forward(inputs.q, inputs.k, inputs.v)?;
    let gradients = attention.backward(inputs, Arrived::of(&output, dout.view()))?;
    Ok(vec![
        ("out", output.out.into_vec()),
        ("lse", output.lse),
        ("dq", gradients.dq.into_vec()),
        ("dk", gradients.dk.into_vec()),
        ("dv", gradients.dv.into_vec()),
    ])
}

/// The largest difference of a tensor as a share of its size, or what is wrong.
pub(super) fn compare(
    expected: &Result<Numbers>,
    got: &Result<Numbers>,
) -> std::result::Result<f64, String> {
    let expected = expected.as_ref().map_err(ToString::to_string)?;
    let got = got.as_ref().map_err(ToString::to_string)?;
    let mut most = 0.0_f64;
    for ((tensor, expected), (_, got)) in expected.iter().zip(got) {
        let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
        let pairs = expected.iter().zip(got).map(|(&a, &b)| f64::from(a) - f64::from(b));
        let size = squares(&mut expected.iter().map(|&x| f64::from(x)));
        let difference = (squares(&mut { pairs }) / size).sqrt();
        if difference.is_nan() || difference > MOST || expected.len() != got.len() {
            return Err(format!(
                "{tensor} differs from that of the portable kernels by {difference:.1e} of its \
                 size, expected at most {MOST:.0e}; run `longspan verify` and report what it says"
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
        let expected = compute(Isa::Portable);
        for isa in Isa::available() {
            let difference = compare(&expected, &compute(isa)).unwrap();
            assert!(difference < MOST / 5.0, "{isa}: {difference}");
        }
    }

    #[test]
    fn disagreement_is_seen() -> Result<()> {
        let expected = compute(Isa::Portable);
        for (n, tensor) in ["out", "lse", "dq", "dk", "dv"].into_iter().enumerate() {
            for spoil in [f32::NAN, 0.1] {
                let mut got = compute(Isa::Portable)?;
                got[n].1[33] += spoil;
                let message = compare(&expected, &Ok(got)).unwrap_err();
                assert!(message.starts_with(tensor), "{message}");
            }
        }
        Ok(())
    }
}
