//! JAX's calls: handlers of XLA, which run without the interpreter.
//!
//! Tensors are `(batch, token, head, dim)`. A handler has the arguments `q, k, v`, for the backward pass
//! `out, lse, lse_lo, dout, dlse`, and then those that the attribute `operands` names:
//!
//! | operand | axes | |
//! |---|---|---|
//! | `cu_seqlens_q`, `cu_seqlens_k` | sequences + 1 | bounds of packed sequences |
//! | `key_padding` | batch, 2 | the first and the end of the keys that are tokens |
//! | `query_lengths` | batch | queries that are tokens; the others see no key |
//! | `mask` | batch or 1, head or 1, query, key | pairs, beside the pattern |
//! | `sink_logits`, `alibi_slopes` | head | |
//! | `bias_table` | head, distance | |
//! | `seed` | 2 | of dropout |
//!
//! Gradients of sink logits, table and slopes follow those of `q, k, v` where there are such.

use std::sync::Arc;

use longspan::{
    Attention, BiasTable, Dilated, Dims, Dropout, Element, ElementType, GradientsMut, Heads, Hook,
    Inputs, LayoutSet, Layouts, OutputGradient, OutputMut, OutputRef, Overlap, Padding, Pattern,
    Precision, Score, Shape,
};

use pyo3::prelude::*;

use crate::engine::Engine;
use crate::options;
use crate::tensor::with_element;
use crate::xla::{self, Buffer, Call, CallFrame, Handler, Result, invalid};

/// The addresses of the handlers, by the names under which they are registered with XLA. For the package's own
/// glue.
#[pyfunction]
pub(crate) fn jax_handlers() -> [(&'static str, usize); 2] {
    let handlers: [(_, Handler); 2] =
        [("longspan_forward", forward), ("longspan_backward", backward)];
    handlers.map(|(name, handler)| (name, handler as usize))
}

/// # Safety
///
/// XLA calls it, with a frame.
unsafe extern "C" fn forward(frame: *mut CallFrame) -> *mut xla::Error {
    // SAFETY: as this function demands.
    unsafe { xla::handle(frame, run_forward) }
}

/// # Safety
///
/// XLA calls it, with a frame.
unsafe extern "C" fn backward(frame: *mut CallFrame) -> *mut xla::Error {
    // SAFETY: as this function demands.
    unsafe { xla::handle(frame, run_backward) }
}

fn run_forward(call: &Call<'_>) -> Result<()> {
    let Problem { engine, tensors, .. } = Problem::read(call, 3)?;
    let (out, lse, lse_lo) = (call.result(0)?, call.result(1)?, call.result(2)?);
    with_element!(tensors.element, E => {
        let lse_lo = Some(lse_lo.floats_mut()?);
        let output = OutputMut { out: out.view_mut::<E>()?, lse: lse.floats_mut()?, lse_lo };
        engine.forward(tensors.inputs()?, output, Hook::none())?;
    });
    Ok(())
}

fn run_backward(call: &Call<'_>) -> Result<()> {
    let Problem { engine, tensors, learned } = Problem::read(call, 8)?;
    let (out, lse, lse_lo) = (call.argument(3)?, call.argument(4)?, call.argument(5)?);
    let (dout, dlse) = (call.argument(6)?, call.argument(7)?);
    let (dq, dk, dv) = (call.result(0)?, call.result(1)?, call.result(2)?);
    let mut lists = [const { None }; 3];
    let mut next = 3;
    for (list, present) in lists.iter_mut().zip(learned) {
        if present {
            *list = Some(call.result(next)?.floats_mut()?);
            next += 1;
        }
    }
    let [dsink_logits, dbias_table, dalibi_slopes] = lists;
    with_element!(tensors.element, E => {
        let output = OutputRef {
            out: out.view::<E>()?,
            lse: lse.floats()?,
            lse_lo: Some(lse_lo.floats()?),
        };
        let gradient = OutputGradient { dout: dout.view()?, dlse: Some(dlse.floats()?) };
        let gradients = GradientsMut {
            dsink_logits,
            dbias_table,
            dalibi_slopes,
            ..GradientsMut::new(dq.view_mut::<E>()?, dk.view_mut()?, dv.view_mut()?)
        };
        engine.backward(tensors.inputs()?, output, gradient, gradients, Hook::none())?;
    });
    Ok(())
}

/// Queries, keys and values.
struct Tensors<'a> {
    element: ElementType,
    q: Buffer<'a>,
    k: Buffer<'a>,
    v: Buffer<'a>,
}

impl<'a> Tensors<'a> {
    fn inputs<E: Element>(&self) -> Result<Inputs<'a, E>> {
        Ok(Inputs { q: self.q.view()?, k: self.k.view()?, v: self.v.view()? })
    }
}

/// What a call computes.
struct Problem<'a> {
    engine: Engine,
    tensors: Tensors<'a>,
    /// Whether there are sink logits, a bias table, slopes.
    learned: [bool; 3],
}

/// Arguments behind the tensors.
#[derive(Default)]
struct Operands<'a> {
    cu_seqlens: [Option<Vec<u64>>; 2],
    key_padding: Option<Vec<u64>>,
    query_lengths: Option<Vec<u64>>,
    mask: Option<Buffer<'a>>,
    sink_logits: Option<&'a [f32]>,
    bias_table: Option<Buffer<'a>>,
    alibi_slopes: Option<&'a [f32]>,
    seed: Option<u64>,
}

impl<'a> Operands<'a> {
    fn read(call: &Call<'a>, first: usize) -> Result<Self> {
        let mut read = Operands::default();
        let names = call.text("operands")?.unwrap_or_default();
        for (index, name) in names.split(',').filter(|name| !name.is_empty()).enumerate() {
            let buffer = call.argument(first + index)?;
            match name {
                "cu_seqlens_q" => read.cu_seqlens[0] = Some(buffer.lengths(name)?),
                "cu_seqlens_k" => read.cu_seqlens[1] = Some(buffer.lengths(name)?),
                "key_padding" => read.key_padding = Some(buffer.lengths(name)?),
                "query_lengths" => read.query_lengths = Some(buffer.lengths(name)?),
                "mask" => read.mask = Some(buffer),
                "sink_logits" => read.sink_logits = Some(buffer.floats()?),
                "bias_table" => read.bias_table = Some(buffer),
                "alibi_slopes" => read.alibi_slopes = Some(buffer.floats()?),
                "seed" => {
                    let &[low, high] = buffer.words()? else {
                        return Err(invalid("seed: expected two words"));
                    };
                    read.seed = Some(u64::from(high) << 32 | u64::from(low));
                }
                other => return Err(invalid(format!("operand {other:?} is not known"))),
            }
        }
        Ok(read)
    }
}

impl<'a> Problem<'a> {
    /// `first` is the place of the first operand.
    fn read(call: &Call<'a>, first: usize) -> Result<Self> {
        let (q, k, v) = (call.argument(0)?, call.argument(1)?, call.argument(2)?);
        let tensors = Tensors { element: q.element()?, q, k, v };
        let operands = Operands::read(call, first)?;
        let learned = [
            operands.sink_logits.is_some(),
            operands.bias_table.is_some(),
            operands.alibi_slopes.is_some(),
        ];
        let calls = calls(call, &operands)?;
        let (queries, keys) = (q.tensor_dims()?, k.tensor_dims()?);
        let engine = match call.integers("segment_lengths")? {
            Some(lengths) => Engine::Dilated(dilated(call, &lengths, operands)?.options(calls)),
            None => {
                let layouts = layouts(call, operands, queries, keys)?;
                Engine::Attention(Attention::new(layouts).options(calls))
            }
        };
        Ok(Problem { engine, tensors, learned })
    }
}

/// Options of a call.
fn calls(call: &Call<'_>, operands: &Operands<'_>) -> Result<longspan::Options> {
    let mut score = Score::default();
    if let Some(cap) = call.f32("softcap")? {
        score = score.softcap(cap);
    }
    if let Some(slopes) = operands.alibi_slopes {
        score = score.alibi_slopes(slopes);
    }
    if let Some(table) = &operands.bias_table {
        let columns = table.dims.last().map_or(0, |&columns| columns as usize);
        let right = call.i64("bias_right")?.unwrap_or(0) as usize;
        let left = columns.checked_sub(right + 1).ok_or_else(|| {
            invalid(format!(
                "bias_right is {right} and bias_table has {columns} columns, expected it below that"
            ))
        })?;
        score = score.bias_table(BiasTable::new(table.floats()?, left, right)?);
    }
    let mut calls = options::shared().score(score);
    if let Some(scale) = call.f32("scale")? {
        calls = calls.scale(scale);
    }
    if let Some(logits) = operands.sink_logits {
        calls = calls.sink_logits(logits);
    }
    if let (Some(p), Some(seed)) = (call.f64("dropout_p")?, operands.seed) {
        calls = calls.dropout(Dropout::new(p, seed)?);
    }
    if let Some(threads) = call.i64("threads")? {
        calls = calls.threads(threads as usize);
    }
    if let Some(precision) = call.text("precision")? {
        calls = calls.precision(precision.parse::<Precision>()?);
    }
    Ok(calls)
}

/// Layouts of a pattern, through the cache of the module, or of a mask.
fn layouts(call: &Call<'_>, operands: Operands<'_>, q: Dims, k: Dims) -> Result<Layouts> {
    let mut shape = Shape::new(q.tokens, k.tokens);
    if let Some(offset) = call.i64("query_offset")? {
        shape = shape.query_offset(offset);
    }
    if let Some(offset) = call.i64("key_offset")? {
        shape = shape.key_offset(offset);
    }
    if let Some(mask) = operands.mask {
        return of_mask(mask, shape, q, k);
    }
    let mut patterns: Heads = call.text("pattern")?.unwrap_or("full").parse()?;
    if let Some(queries) = &operands.cu_seqlens[0] {
        let keys = operands.cu_seqlens[1].as_ref().unwrap_or(queries);
        patterns = patterns.packed_cu_seqlens(queries, keys)?;
    }
    if let Some(lengths) = &operands.query_lengths {
        let entries = (0..).zip(lengths).map(|(entry, &length)| {
            let queries = Pattern::queries(0, length.min(q.tokens as u64))?;
            let head =
                |head| Ok(patterns.entry(entry).get(head, q.heads)?.clone() & queries.clone());
            Ok(Heads::each((0..q.heads).map(head).collect::<Result<Vec<_>>>()?)?)
        });
        patterns = Heads::batch(entries.collect::<Result<Vec<_>>>()?)?;
    }
    let cache = options::layouts();
    let padding = match &operands.key_padding {
        Some(bounds) => {
            let ranges = bounds.as_chunks::<2>().0.iter();
            Padding::Each(ranges.map(|&[first, end]| first as usize..end as usize).collect())
        }
        None => Padding::None(q.batch),
    };
    match (&patterns, &padding) {
        (Heads::Same(pattern), Padding::None(_)) => Ok(Layouts::One(cache.get(pattern, &shape)?)),
        _ => {
            let set = LayoutSet::compile(&patterns, q.heads, &shape, &padding, Some(cache))?;
            Ok(Layouts::Each(set))
        }
    }
}

/// Layouts of a mask of pairs, `(batch or 1, head or 1, query, key)`.
fn of_mask(mask: Buffer<'_>, shape: Shape, q: Dims, k: Dims) -> Result<Layouts> {
    let fail =
        || invalid(format!("mask has dims {:?}, expected those of {q:?} and {k:?}", mask.dims));
    let &[entries, heads, queries, keys] = mask.dims else { return Err(fail()) };
    let [entries, heads, queries, keys] = [entries, heads, queries, keys].map(|size| size as usize);
    let fits = |size: usize, full: usize| size == 1 || size == full;
    if !fits(entries, q.batch) || !fits(heads, q.heads) || (queries, keys) != (q.tokens, k.tokens) {
        return Err(fail());
    }
    let (active, pairs) = (mask.flags()?, queries * keys);
    let layout = |number: usize| {
        let own = &active[number * pairs..][..pairs];
        Ok(Arc::new(longspan::Layout::from_mask(own, shape.clone())?))
    };
    let made: Vec<_> = (0..entries * heads).map(layout).collect::<Result<_>>()?;
    if let [layout] = &made[..] {
        return Ok(Layouts::One(layout.clone()));
    }
    let of_each = (0..q.batch).flat_map(|entry| (0..q.heads).map(move |head| (entry, head)));
    let each = of_each.map(|(entry, head)| made[entry % entries * heads + head % heads].clone());
    Ok(Layouts::Each(LayoutSet::new(q.batch, q.heads, each)?))
}

/// LongNet's branches.
fn dilated(call: &Call<'_>, lengths: &[i64], operands: Operands<'_>) -> Result<Dilated> {
    let rates = call.integers("dilation_rates")?.unwrap_or_default();
    let pairs = lengths.iter().zip(&rates).map(|(&length, &rate)| (length as u64, rate as u64));
    let mut made = Dilated::new(pairs)?;
    if let Some(text) = call.text("within")? {
        made = made.within(text.parse()?);
    }
    if let Some(text) = call.text("also")? {
        made = made.also(text.parse()?);
    }
    if call.text("overlap")? == Some("union") {
        made = made.overlap(Overlap::Union);
    }
    if let Some(offset) = call.i64("query_offset")? {
        made = made.query_offset(offset);
    }
    if let Some(queries) = &operands.cu_seqlens[0] {
        let keys = operands.cu_seqlens[1].as_ref().unwrap_or(queries);
        made = made.packed_cu_seqlens(queries, keys)?;
    }
    if let Some(bounds) = &operands.key_padding {
        let ranges = bounds.as_chunks::<2>().0.iter();
        made = made.padded(ranges.map(|&[first, end]| first as usize..end as usize));
    }
    Ok(made)
}
