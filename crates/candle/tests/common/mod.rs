//! A case, candle's dense attention for it, and how far results may be from that.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use longspan_candle::SparseAttention;
use longspan_testing::{assert_close, largest_difference, normals};

/// Whether a query position sees a key position, by batch entry and head.
pub(crate) type Sees = fn(usize, usize, i64, i64) -> bool;

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) text: &'static str,
    pub(crate) sees: Sees,
    pub(crate) dtype: DType,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) valid: Option<Vec<Range<usize>>>,
}

impl Case {
    pub(crate) fn new(text: &'static str, sees: Sees) -> Self {
        Case {
            text,
            sees,
            dtype: DType::F32,
            batch: 1,
            heads: 2,
            key_heads: 2,
            queries: 90,
            keys: 90,
            dim: 16,
            value_dim: 16,
            valid: None,
        }
    }

    /// Normally distributed; the same for every call.
    pub(crate) fn inputs(&self) -> Result<[Var; 3]> {
        let Case { batch, heads, key_heads, queries, keys, dim, value_dim, dtype, .. } = *self;
        let make = |seed, shape| Var::from_tensor(&random(seed, shape)?.to_dtype(dtype)?);
        Ok([
            make(1, (batch, heads, queries, dim))?,
            make(2, (batch, key_heads, keys, dim))?,
            make(3, (batch, key_heads, keys, value_dim))?,
        ])
    }

    /// Output and all gradients against the dense formula.
    pub(crate) fn check(&self) -> Result<()> {
        let inputs = self.inputs()?;
        let [q, k, v] = &inputs;
        self.check_views(&inputs, q, k, v)
    }

    /// Likewise for `q`, `k`, `v` made from `inputs`, with respect to which gradients are taken.
    pub(crate) fn check_views(
        &self,
        inputs: &[Var],
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<()> {
        let sparse: SparseAttention = self.text.parse()?;
        let out = match &self.valid {
            Some(valid) => sparse.forward_padded(q, k, v, valid)?,
            None => sparse.forward(q, k, v)?,
        };
        assert_eq!(out.dtype(), self.dtype);
        let (expected, _) = dense(self, None, q, k, v)?;
        compare("out", &out, &expected, self.tolerance().out);

        // Numbers that the type holds, so that the gradient arrives unrounded.
        let weights = random(4, out.dims4()?)?.to_dtype(self.dtype)?.to_dtype(DType::F64)?;
        let loss = |out: &Tensor| (out.to_dtype(DType::F64)? * &weights)?.sum_all()?.backward();
        let (found, expected) = (loss(&out)?, loss(&expected)?);
        for (index, input) in inputs.iter().enumerate() {
            let name = format!("gradient of input {index}");
            let (found, expected) = (found.get(input), expected.get(input));
            let found = found.expect("a gradient");
            assert_eq!((found.dims(), found.dtype()), (input.dims(), input.dtype()));
            compare(&name, found, expected.expect("a gradient"), self.tolerance().gradient);
        }
        Ok(())
    }

    pub(crate) fn tolerance(&self) -> Tolerance {
        tolerance(self.dtype)
    }

    /// 1 where a query sees a key, `(batch, heads, queries, keys)`.
    fn mask(&self) -> Result<Tensor> {
        let Case { batch, heads, queries, keys, sees, .. } = *self;
        let mut mask = Vec::with_capacity(batch * heads * queries * keys);
        for entry in 0..batch {
            for head in 0..heads {
                for query in 0..queries {
                    let query = (query + keys - queries) as i64;
                    mask.extend((0..keys).map(|key| sees(entry, head, query, key as i64) as u8));
                }
            }
        }
        Tensor::from_vec(mask, (batch, heads, queries, keys), &Device::Cpu)
    }
}

/// `softmax(q kᵗ scale + mask) v` in candle's operations, in f64, and the log-sum-exp; rows that
/// see nothing are 0 and −∞.
pub(crate) fn dense(
    case: &Case,
    scale: Option<f64>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let wide = |x: &Tensor| x.to_dtype(DType::F64);
    // A key head for each query head.
    let spread = |x: &Tensor| {
        let (batch, heads, tokens, dim) = x.dims4()?;
        let shared = case.heads / heads;
        let x = x.unsqueeze(2)?.broadcast_as((batch, heads, shared, tokens, dim))?;
        x.contiguous()?.reshape((batch, heads * shared, tokens, dim))
    };
    let (q, k, v) = (wide(q)?.contiguous()?, spread(&wide(k)?)?, spread(&wide(v)?)?);
    let scale = scale.unwrap_or(1.0 / (case.dim as f64).sqrt());
    let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? * scale)?;
    let mask = case.mask()?;
    let far = Tensor::full(-1e30_f64, scores.shape(), &Device::Cpu)?;
    let scores = mask.where_cond(&scores, &far)?;
    // Any number will do that keeps the exponentials in range: no gradient flows through it.
    let most = scores.max_keepdim(D::Minus1)?.detach();
    let seen = scores.broadcast_sub(&most)?.exp()?.mul(&mask.to_dtype(DType::F64)?)?;
    let sums = seen.sum_keepdim(D::Minus1)?;
    let empty = sums.eq(0.0)?.to_dtype(DType::F64)?;
    let out = seen.broadcast_div(&(&sums + empty)?)?.matmul(&v)?;
    let lse = (sums.log()? + most)?.squeeze(D::Minus1)?;
    Ok((out, lse))
}

/// How far numbers may be off, as a share of the largest of their tensor, or of 1.
#[derive(Clone, Copy)]
pub(crate) struct Tolerance {
    pub(crate) out: f64,
    pub(crate) gradient: f64,
}

/// With `u` the unit roundoff of f32, 2⁻²⁴: scores of normal numbers are below 8 and summed in
/// pieces of 16, so they are off by up to 8 u, as are the logarithm of their sum and with it a
/// probability: 16 u. In gradients two of them are subtracted and multiplied with a third: 48 u.
///
/// bf16 and f16 compute in f32 and round a result once: `h`, 2⁻⁸ and 2⁻¹¹. On a matrix unit
/// probabilities are rounded to `h` too before they meet the values: 2 h. The backward pass reads
/// the rounded output (one h in every row's delta), rounds probabilities and their gradients (one
/// h each) and its result: 4 h.
pub(crate) fn tolerance(dtype: DType) -> Tolerance {
    let f32 = 2_f64.powi(-24);
    let half = match dtype {
        DType::F32 => 0.0,
        DType::BF16 => 2_f64.powi(-8),
        DType::F16 => 2_f64.powi(-11),
        other => panic!("no tolerance for {other:?}"),
    };
    Tolerance { out: 16.0 * f32 + 2.0 * half, gradient: 48.0 * f32 + 4.0 * half }
}

/// All numbers of a tensor, in f64.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// The largest difference of two tensors of one shape; infinite where an element is NaN.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    Ok(largest_difference(&numbers(a)?, &numbers(b)?))
}

#[track_caller]
pub(crate) fn compare(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let (found, expected) = (numbers(found).unwrap(), numbers(expected).unwrap());
    // Gradients may cancel to 0 (one key, equal values); what they are summed of is near 1.
    let finite = |x: &&f64| x.is_finite();
    let most = expected.iter().filter(finite).fold(1.0, |most: f64, x| most.max(x.abs()));
    assert_close(what, &found, &expected, tolerance * most);
}

/// Normal numbers, f32: candle's own can't be seeded on the CPU.
pub(crate) fn random(seed: u64, shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    let data = normals(seed, shape.0 * shape.1 * shape.2 * shape.3);
    Tensor::from_vec(data, shape, &Device::Cpu)
}
