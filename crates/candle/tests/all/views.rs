//! Tensors that lie in memory in other ways, read where they are.

use crate::common::{Case, Sees, random};
use candle_core::{DType, Result, Tensor, Var};
use longspan_candle::SparseAttention;

const WINDOW: Sees = |_, _, q, k| k <= q && q - k <= 20;
const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn case(dtype: DType) -> Case {
    let case = Case::new("causal & window(20, 0)", WINDOW);
    Case { dtype, batch: 2, heads: 4, key_heads: 2, ..case }
}

/// `(batch, tokens, heads, dim)` as projections make them, and results that lie likewise.
#[test]
fn transposed() -> Result<()> {
    for dtype in TYPES {
        let case = case(dtype);
        let Case { batch, heads, key_heads, queries, keys, dim, value_dim, .. } = case;
        let make = |seed, shape| Var::from_tensor(&random(seed, shape)?.to_dtype(dtype)?);
        let inputs = [
            make(1, (batch, queries, heads, dim))?,
            make(2, (batch, keys, key_heads, dim))?,
            make(3, (batch, keys, key_heads, value_dim))?,
        ];
        let [q, k, v] = inputs.each_ref().map(|input| input.transpose(1, 2));
        let (q, k, v) = (q?, k?, v?);
        case.check_views(&inputs, &q, &k, &v)?;

        let sparse: SparseAttention = case.text.parse()?;
        let out = sparse.forward(&q, &k, &v)?;
        assert!(out.transpose(1, 2)?.is_contiguous());
        // Only the queries decide.
        let out = sparse.forward(&q.contiguous()?, &k, &v)?;
        assert!(out.is_contiguous());
    }
    Ok(())
}

/// Dims before tokens, as some caches have their keys.
#[test]
fn dims_outside() -> Result<()> {
    let case = case(DType::F32);
    let [q, k, v] = case.inputs()?;
    let k = Var::from_tensor(&k.transpose(2, 3)?.contiguous()?)?;
    let inputs = [q.clone(), k.clone(), v.clone()];
    case.check_views(&inputs, &q, &k.transpose(2, 3)?, &v)
}

/// Slices of larger tensors, along every axis.
#[test]
fn narrowed() -> Result<()> {
    for dtype in TYPES {
        let case = case(dtype);
        let Case { batch, heads, key_heads, queries, keys, dim, value_dim, .. } = case;
        let make = |seed, shape| Var::from_tensor(&random(seed, shape)?.to_dtype(dtype)?);
        let inputs = [
            make(1, (batch + 1, heads + 2, queries + 3, dim + 4))?,
            make(2, (batch + 4, key_heads + 3, keys + 2, dim + 1))?,
            make(3, (batch + 2, key_heads + 1, keys + 4, value_dim + 3))?,
        ];
        let narrow = |input: &Tensor, sizes: [usize; 4], start: usize| {
            (0..4).try_fold(input.clone(), |x, axis| x.narrow(axis, start, sizes[axis]))
        };
        let q = narrow(&inputs[0], [batch, heads, queries, dim], 1)?;
        let k = narrow(&inputs[1], [batch, key_heads, keys, dim], 1)?;
        let v = narrow(&inputs[2], [batch, key_heads, keys, value_dim], 1)?;
        case.check_views(&inputs, &q, &k, &v)?;
    }
    Ok(())
}

/// Queries, keys and values in one tensor, as one projection makes them.
#[test]
fn one_projection() -> Result<()> {
    let case = Case { key_heads: 4, ..case(DType::F32) };
    let Case { batch, heads, queries, dim, .. } = case;
    let all = Var::from_tensor(&random(5, (batch, queries, 3 * heads, dim))?)?;
    let part = |index: usize| all.narrow(2, index * heads, heads)?.transpose(1, 2);
    case.check_views(std::slice::from_ref(&all), &part(0)?, &part(1)?, &part(2)?)
}

/// One key head for all, one batch entry for all, one token for all: strides of 0.
#[test]
fn broadcast() -> Result<()> {
    for dtype in TYPES {
        let case = Case { key_heads: 4, ..case(dtype) };
        let Case { batch, heads, queries, keys, dim, value_dim, .. } = case;
        let make = |seed, shape| Var::from_tensor(&random(seed, shape)?.to_dtype(dtype)?);
        let inputs = [
            make(1, (1, heads, queries, dim))?,
            make(2, (batch, 1, keys, dim))?,
            make(3, (1, 1, 1, value_dim))?,
        ];
        let q = inputs[0].broadcast_as((batch, heads, queries, dim))?;
        let k = inputs[1].broadcast_as((batch, heads, keys, dim))?;
        let v = inputs[2].broadcast_as((batch, heads, keys, value_dim))?;
        // candle sums a broadcast's gradient in its own type, one rounding a term.
        if dtype == DType::F32 {
            case.check_views(&inputs, &q, &k, &v)?;
        }
        let sparse: SparseAttention = case.text.parse()?;
        let views = sparse.forward(&q, &k, &v)?;
        let copies = sparse.forward(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?)?;
        assert_eq!(crate::common::numbers(&views)?, crate::common::numbers(&copies)?);
    }
    Ok(())
}
