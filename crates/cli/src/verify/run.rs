//! A case of the table, run on the kernels.

use longspan::{
    Attention, BiasTable, BlockSize, Dims, Dropout, Element, GradientsMut, Heads, Hook, Inputs,
    Layout, LayoutSet, Layouts, Order, OutputGradient, OutputMut, OutputRef, Padding, Pattern,
    Positions, Progression, Result, Shape, Tensor,
};
use longspan_testing::{AttentionCase, Axes, Case, Problem, Sizes, Steps, Table, Values};

use super::Kernel;
use crate::element::with_element;

/// Forward and backward into tensors of NaN, so that missing writes are detected.
pub(super) fn compute(case: &AttentionCase, problem: &Problem, on: Kernel) -> Result<Values<f32>> {
    with_element!(on.element, E => compute_with::<E>(case, problem, on))
}

/// The same for one element type; the problem's elements are exact in it.
fn compute_with<E: Element>(
    case: &AttentionCase,
    problem: &Problem,
    on: Kernel,
) -> Result<Values<f32>> {
    let Sizes { batch, tokens_q, tokens_k, heads_q, heads_kv, dim_k, dim_v } = problem.sizes;
    let queries = Dims { batch, tokens: tokens_q, heads: heads_q, dim: dim_k };
    let keys = Dims { batch, tokens: tokens_k, heads: heads_kv, dim: dim_k };
    let (output, values) = (Dims { dim: dim_v, ..queries }, Dims { dim: dim_v, ..keys });
    let order = match case.axes {
        Axes::TokenHead => Order::Bshd,
        Axes::HeadToken => Order::Bhsd,
    };
    let attention = attention(case, on)?;
    let poisoned = |dims| Tensor::filled(E::from_f32(f32::NAN), dims, order);

    let q = arrange::<E>(&problem.q, queries, order)?;
    let k = arrange::<E>(&problem.k, keys, order)?;
    let v = arrange::<E>(&problem.v, values, order)?;
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let (mut out, mut lse) = (poisoned(output)?, vec![f32::NAN; problem.sizes.rows()]);
    let mut lse_lo = lse.clone();
    let into = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: Some(&mut lse_lo) };
    attention.forward_into(inputs, into, Hook::none())?;

    let dout = arrange::<E>(&problem.dout, output, order)?;
    let (mut dq, mut dk, mut dv) = (poisoned(queries)?, poisoned(keys)?, poisoned(values)?);
    let (slopes, table) = (&case.transform.slopes, &case.transform.table);
    let mut dsink_logits = vec![f32::NAN; case.sink_logits.as_ref().map_or(0, Vec::len)];
    let mut dbias_table = vec![f32::NAN; table.as_ref().map_or(0, |table| table.values.len())];
    let mut dalibi_slopes = vec![f32::NAN; slopes.len()];
    let into = GradientsMut {
        dsink_logits: case.sink_logits.is_some().then_some(&mut dsink_logits),
        dbias_table: table.is_some().then_some(&mut dbias_table),
        dalibi_slopes: (!slopes.is_empty()).then_some(&mut dalibi_slopes),
        ..GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut())
    };
    let (saved, gradient) = (
        OutputRef { out: out.view(), lse: &lse, lse_lo: Some(&lse_lo) },
        OutputGradient { dout: dout.view(), dlse: problem.dlse.as_deref() },
    );
    attention.backward_into(inputs, saved, gradient, into, Hook::none())?;
    let (out, dq, dk, dv) = (dense(&out), dense(&dq), dense(&dk), dense(&dv));
    Ok(Values { out, lse, dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes })
}

fn attention(case: &AttentionCase, on: Kernel) -> Result<Attention> {
    let mut attention = Attention::new(layouts(case)?).isa(on.isa).precision(on.precision);
    if let Some(cap) = case.transform.softcap {
        attention = attention.softcap(cap);
    }
    if !case.transform.slopes.is_empty() {
        attention = attention.alibi_slopes(&case.transform.slopes[..]);
    }
    if let Some(Table { values, left, right }) = &case.transform.table {
        attention = attention.bias_table(BiasTable::new(values, *left, *right)?);
    }
    if let Some((p, seed)) = case.transform.dropout {
        attention = attention.dropout(Dropout::new(p, seed)?);
    }
    if let Some(logits) = &case.sink_logits {
        attention = attention.sink_logits(logits.as_slice());
    }
    Ok(match case.scale {
        Some(scale) => attention.scale(scale),
        None => attention,
    })
}

/// One layout where all heads share it, else one per batch entry and head.
fn layouts(case: &AttentionCase) -> Result<Layouts> {
    let shape = shape(&case.layout)?;
    let text = case.pattern_text();
    if case.per_head.is_empty() && case.padding.is_empty() {
        let pattern: Pattern = text.parse()?;
        return Ok(Layout::compile(&pattern, &shape)?.into());
    }
    let heads: Heads = text.parse()?;
    let padding = match &case.padding[..] {
        [] => Padding::None(case.batch),
        each => Padding::Each(each.to_vec()),
    };
    Ok(LayoutSet::compile(&heads, case.heads_q, &shape, &padding, None)?.into())
}

fn shape(case: &Case) -> Result<Shape> {
    let mut shape = Shape::new(case.tokens_q as usize, case.tokens_k as usize);
    shape = shape.block(BlockSize::new(case.block.into())?);
    if let Some(offset) = case.query_offset {
        shape = shape.query_offset(offset);
    }
    if let Some(offset) = case.key_offset {
        shape = shape.key_offset(offset);
    }
    if let Some(map) = &case.query_map {
        shape = shape.query_map(positions(map)?);
    }
    if let Some(map) = &case.key_map {
        shape = shape.key_map(positions(map)?);
    }
    if let Some(bytes) = case.mask_bytes {
        shape = shape.mask_bytes(bytes);
    }
    Ok(shape)
}

fn positions(steps: &[Steps]) -> Result<Positions> {
    let steps = steps.iter().map(|s| Progression {
        start: s.start,
        step: s.step as usize,
        len: s.len as usize,
    });
    Ok(Positions::new(steps)?)
}

/// The index of every element of the oracle's order, `[batch][head][token][dim]`, in another order.
fn places(dims: Dims, order: Order) -> impl Iterator<Item = usize> {
    let Dims { batch, tokens, heads, dim } = dims;
    let token = move |b: usize, h: usize, t: usize| match order {
        Order::Bshd => ((b * tokens + t) * heads + h) * dim,
        Order::Bhsd => ((b * heads + h) * tokens + t) * dim,
    };
    let all = (0..batch).flat_map(move |b| (0..heads).map(move |h| (b, h)));
    let all = all.flat_map(move |(b, h)| (0..tokens).map(move |t| token(b, h, t)));
    all.flat_map(move |first| first..first + dim)
}

/// The oracle's elements in another order.
fn arrange<E: Element>(elements: &[f32], dims: Dims, order: Order) -> Result<Tensor<E>> {
    let mut data = vec![E::default(); elements.len()];
    for (element, index) in elements.iter().zip(places(dims, order)) {
        data[index] = E::from_f32(*element);
    }
    Tensor::new(data, dims, order)
}

/// A tensor in the oracle's order.
fn dense<E: Element>(tensor: &Tensor<E>) -> Vec<f32> {
    places(tensor.dims(), tensor.order()).map(|place| tensor.as_slice()[place].to_f32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_agree_with_views() -> Result<()> {
        let dims = Dims { batch: 2, tokens: 3, heads: 4, dim: 5 };
        let numbers: Vec<f32> = (0..120).map(|x| x as f32).collect();
        for order in [Order::Bshd, Order::Bhsd] {
            let tensor = arrange::<f32>(&numbers, dims, order)?;
            // Batch 1, head 3, token 2, dim 4 is the last; head 1 starts 15 elements after head 0.
            assert_eq!(tensor.view().get(1, 2, 3, 4), Some(119.0));
            assert_eq!(tensor.view().get(0, 0, 1, 0), Some(15.0));
            assert_eq!(tensor.view().get(0, 1, 0, 0), Some(5.0));
            assert_eq!(dense(&tensor), numbers);
        }
        Ok(())
    }
}
