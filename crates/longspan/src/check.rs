//! Whether the arguments of a call fit each other.

use std::sync::Arc;

use longspan_pattern::Layout;

use crate::arguments::{
    GradientsMut, Inputs, OutputGradient, OutputMut, OutputRef, OutputRows, PriorState,
};
use crate::dims::{Dims, Sizes};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::layouts::Layouts;
use crate::options::Options;
use crate::softmax::RowStatistics;
use crate::tensor::{Memory, View};

/// The largest head dim: scratch is laid out for it.
pub(crate) const MOST_DIMS: usize = 256;

pub(crate) fn axis(
    tensor: &'static str,
    axis: &'static str,
    got: usize,
    expected: usize,
    why: &'static str,
) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Shape { tensor, axis, got, expected, why }) }
}

/// Whether the tensors of a call fit each other, its options and its layouts.
pub(crate) fn inputs<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
) -> Result<Sizes> {
    let sizes = tensors(options, inputs)?;
    self::layouts(layouts, inputs.q.dims(), inputs.k.dims())?;
    if options.score.is_positional() {
        for layout in layouts.distinct() {
            layout.score_positions()?;
        }
    }
    Ok(sizes)
}

/// Whether layouts are those of queries and keys of these dims.
pub(crate) fn layouts(layouts: &Layouts, q: Dims, k: Dims) -> Result<()> {
    for layout in distinct(layouts, &q)? {
        axis("q", "tokens", q.tokens, layout.queries(), "as the layout")?;
        axis("k", "tokens", k.tokens, layout.keys(), "as the layout")?;
        let rows = layout.rows();
        let all = layout.queries().div_ceil(layout.block().get());
        axis("the layout", "compiled rows", rows.len(), all, "every row of query blocks")?;
    }
    Ok(())
}

/// Batch entries × heads of a call at most: each has an entry in the list of tasks, also where there are no
/// tokens, and indices of both are 32 bits wide.
const MOST_HEADS: usize = 1 << 28;

/// Whether a tensor of these dims has as many batch entries and heads as a call can have.
pub(crate) fn heads(dims: Dims) -> Result<()> {
    match dims.batch.checked_mul(dims.heads.max(1)) {
        Some(heads) if heads <= MOST_HEADS => Ok(()),
        _ => Err(Error::TooManyHeads { dims }),
    }
}

/// Whether queries and keys of these dims fit each other, but for their head dims.
pub(crate) fn query_and_key(q: Dims, k: Dims) -> Result<()> {
    heads(q)?;
    heads(k)?;
    axis("k", "batch", k.batch, q.batch, "as q")?;
    if k.heads == 0 && q.heads != 0 || k.heads != 0 && !q.heads.is_multiple_of(k.heads) {
        return Err(Error::Heads { query: q.heads, key: k.heads });
    }
    Ok(())
}

/// Whether the tensors of a call fit each other and its options.
pub(crate) fn tensors<E: Element>(options: &Options, inputs: &Inputs<'_, E>) -> Result<Sizes> {
    let (q, k, v) = (inputs.q.dims(), inputs.k.dims(), inputs.v.dims());
    query_and_key(q, k)?;
    axis("v", "batch", v.batch, q.batch, "as q")?;
    axis("k", "head dim", k.dim, q.dim, "as q")?;
    axis("v", "tokens", v.tokens, k.tokens, "as k")?;
    axis("v", "heads", v.heads, k.heads, "as k")?;
    for (tensor, dim) in [("q", q.dim), ("v", v.dim)] {
        if !(1..=MOST_DIMS).contains(&dim) {
            return Err(Error::HeadDim { tensor, dim, most: MOST_DIMS });
        }
    }
    options.check(q.heads)?;
    let sizes = Sizes {
        batch: q.batch,
        queries: q.tokens,
        keys: k.tokens,
        heads: q.heads,
        key_heads: k.heads,
        dim: q.dim,
        value_dim: v.dim,
    };
    sizes.output().elements().ok_or(Error::Overflow { dims: sizes.output() })?;
    Ok(sizes)
}

/// The distinct layouts, where there is one for every batch entry and head.
fn distinct<'a>(layouts: &'a Layouts, q: &Dims) -> Result<&'a [Arc<Layout>]> {
    if let Layouts::Each(set) = layouts {
        axis("q", "batch", q.batch, set.batch(), "as the layout set")?;
        axis("q", "heads", q.heads, set.heads(), "as the layout set")?;
    }
    Ok(layouts.distinct())
}

pub(crate) fn same(tensor: &'static str, got: Dims, expected: Dims) -> Result<()> {
    axis(tensor, "batch", got.batch, expected.batch, "as the queries")?;
    axis(tensor, "tokens", got.tokens, expected.tokens, "as the queries")?;
    axis(tensor, "heads", got.heads, expected.heads, "as the queries")?;
    axis(tensor, "head dim", got.dim, expected.dim, "as the values")
}

pub(crate) fn like<E: Element>(
    tensor: &'static str,
    view: &View<'_, E>,
    expected: Dims,
) -> Result<()> {
    same(tensor, view.dims(), expected)
}

/// Whether a list has a number for each row.
pub(crate) fn rows(what: &'static str, len: usize, dims: Dims) -> Result<()> {
    let expected = dims.rows();
    if len == expected { Ok(()) } else { Err(Error::Length { what, len, expected }) }
}

/// Whether a list has a number for each element.
pub(crate) fn elements(what: &'static str, len: usize, dims: Dims) -> Result<()> {
    let expected = dims.elements().ok_or(Error::Overflow { dims })?;
    if len == expected { Ok(()) } else { Err(Error::Length { what, len, expected }) }
}

/// Likewise for a list that needn't be there.
pub(crate) fn optional_rows(what: &'static str, list: Option<&[f32]>, dims: Dims) -> Result<()> {
    list.map_or(Ok(()), |list| rows(what, list.len(), dims))
}

pub(crate) fn output<E: Element>(inputs: &Inputs<'_, E>, output: &OutputMut<'_, E>) -> Result<()> {
    let (q, v) = (inputs.q.dims(), inputs.v.dims());
    output_dims(output, Dims { dim: v.dim, ..q })?;
    let outputs = [
        ("out", output.out.memory()),
        ("lse", Memory::of(output.lse)),
        ("lse_lo", Memory::of(output.lse_lo.as_deref().unwrap_or_default())),
    ];
    apart(&outputs, inputs, &[])
}

/// Whether an output has these dims.
fn output_dims<E: Element>(output: &OutputMut<'_, E>, dims: Dims) -> Result<()> {
    same("out", output.out.dims(), dims)?;
    rows("lse", output.lse.len(), dims)?;
    optional_rows("lse_lo", output.lse_lo.as_deref(), dims)
}

/// Whether there are rows of these dims.
pub(crate) fn output_rows<E: Element>(rows: &OutputRows<'_, E>, dims: Dims) -> Result<()> {
    let OutputRows { out, lse, lse_lo, prior } = rows;
    let list = Dims { dim: 1, ..dims };
    same("out", out.dims(), dims)?;
    same("lse", lse.dims(), list)?;
    lse_lo.as_ref().map_or(Ok(()), |rests| same("lse_lo", rests.dims(), list))?;
    match prior {
        PriorState::Separate(sums) => same("the sums", sums.dims(), dims),
        _ => Ok(()),
    }
}

/// Whether gradients have the shapes of their tensors, and share memory with nothing that is read.
pub(crate) fn gradients<E: Element, G: Element>(
    inputs: &Inputs<'_, E>,
    read: &[Named],
    gradients: &GradientsMut<'_, G>,
) -> Result<()> {
    gradient_dims(inputs, gradients)?;
    let GradientsMut { dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } = gradients;
    let list = |list: &Option<&mut [f32]>| Memory::of(list.as_deref().unwrap_or_default());
    let outputs = [
        ("dq", dq.memory()),
        ("dk", dk.memory()),
        ("dv", dv.memory()),
        ("dsink_logits", list(dsink_logits)),
        ("dbias_table", list(dbias_table)),
        ("dalibi_slopes", list(dalibi_slopes)),
    ];
    apart(&outputs, inputs, read)
}

/// Whether gradients that a part of all keys is added to are those of the tensors and the options, and
/// apart from what is read.
pub(crate) fn accumulated<E: Element>(
    options: &Options,
    inputs: &Inputs<'_, E>,
    dout: &View<'_, E>,
    rows: &RowStatistics<'_>,
    gradients: &GradientsMut<'_>,
) -> Result<()> {
    if gradients.dsink_logits.is_some() {
        let why = "sinks belong to whole rows, not to some of their keys; sink_gradients has them";
        return Err(Error::Unexpected { what: "dsink_logits", why });
    }
    let read = [
        ("dout", dout.memory()),
        ("lse", Memory::of(rows.lse)),
        ("lse_lo", Memory::of(rows.lse_lo.unwrap_or_default())),
        ("delta", Memory::of(rows.delta)),
    ];
    self::gradients(inputs, &read, gradients)?;
    option_gradients(options, gradients)
}

/// Whether gradients have the shapes of their tensors.
pub(crate) fn gradient_dims<E: Element, G: Element>(
    inputs: &Inputs<'_, E>,
    gradients: &GradientsMut<'_, G>,
) -> Result<()> {
    let (q, k, v) = (inputs.q.dims(), inputs.k.dims(), inputs.v.dims());
    let GradientsMut { dq, dk, dv, .. } = gradients;
    for (tensor, got, expected) in
        [("dq", dq.dims(), q), ("dk", dk.dims(), k), ("dv", dv.dims(), v)]
    {
        axis(tensor, "batch", got.batch, expected.batch, "as its tensor")?;
        axis(tensor, "tokens", got.tokens, expected.tokens, "as its tensor")?;
        axis(tensor, "heads", got.heads, expected.heads, "as its tensor")?;
        axis(tensor, "head dim", got.dim, expected.dim, "as its tensor")?;
    }
    Ok(())
}

/// Whether a list has one gradient per sink logit.
pub(crate) fn sink_gradients(len: usize, heads: usize) -> Result<()> {
    let what = "dsink_logits";
    if len == heads { Ok(()) } else { Err(Error::Length { what, len, expected: heads }) }
}

/// Whether gradients of options are those of options that there are.
pub(crate) fn option_gradients<G>(
    options: &Options,
    gradients: &GradientsMut<'_, G>,
) -> Result<()> {
    let GradientsMut { dsink_logits, dbias_table, dalibi_slopes, .. } = gradients;
    let [sink_logits, bias_table, alibi_slopes] = options.gradient_lens();
    for (what, list, expected, why) in [
        ("dsink_logits", dsink_logits, sink_logits, "the attention has no sink_logits"),
        ("dbias_table", dbias_table, bias_table, "the attention has no bias_table"),
        ("dalibi_slopes", dalibi_slopes, alibi_slopes, "the attention has no alibi_slopes"),
    ] {
        let Some(len) = list.as_deref().map(<[f32]>::len) else { continue };
        match expected {
            None => return Err(Error::Unexpected { what, why }),
            Some(expected) if len != expected => return Err(Error::Length { what, len, expected }),
            _ => {}
        }
    }
    Ok(())
}

/// Whether what a backward pass adds the gradients of has the dims of the output.
pub(crate) fn statistics<E: Element>(
    dout: &View<'_, E>,
    statistics: &RowStatistics<'_>,
    dims: Dims,
) -> Result<()> {
    like("dout", dout, dims)?;
    rows("lse", statistics.lse.len(), dims)?;
    optional_rows("lse_lo", statistics.lse_lo, dims)?;
    rows("delta", statistics.delta.len(), dims)
}

/// Whether what is written shares memory with nothing else, read or written.
fn apart<E: Element>(written: &[Named], inputs: &Inputs<'_, E>, read: &[Named]) -> Result<()> {
    let inputs = [("q", inputs.q.memory()), ("k", inputs.k.memory()), ("v", inputs.v.memory())];
    for (index, &(first, memory)) in written.iter().enumerate() {
        for &(second, other) in written[index + 1..].iter().chain(&inputs).chain(read) {
            if memory.meets(&other) {
                return Err(Error::Overlap { first, second });
            }
        }
    }
    Ok(())
}

/// A tensor's name and where it lies.
pub(crate) type Named = (&'static str, Memory);

/// What the backward pass reads besides its inputs: shapes checked, and where it lies.
pub(crate) fn backward<E: Element>(
    output: &OutputRef<'_, E>,
    gradient: &OutputGradient<'_, E>,
    dims: Dims,
) -> Result<[Named; 5]> {
    like("out", &output.out, dims)?;
    like("dout", &gradient.dout, dims)?;
    rows("lse", output.lse.len(), dims)?;
    optional_rows("lse_lo", output.lse_lo, dims)?;
    optional_rows("dlse", gradient.dlse, dims)?;
    Ok([
        ("out", output.out.memory()),
        ("dout", gradient.dout.memory()),
        ("lse", Memory::of(output.lse)),
        ("lse_lo", Memory::of(output.lse_lo.unwrap_or_default())),
        ("dlse", Memory::of(gradient.dlse.unwrap_or_default())),
    ])
}

impl<E: Element> OutputMut<'_, E> {
    /// Refuses shapes other than those of an output of `inputs`, and memory that is theirs or is
    /// named twice. Calls of this library check that themselves.
    pub fn check(&self, inputs: &Inputs<'_, E>) -> Result<()> {
        output(inputs, self)
    }
}

impl<E: Element> GradientsMut<'_, E> {
    /// Refuses shapes other than those of `inputs`, `output` and `gradient`, and memory that is
    /// theirs or is named twice: see [`OutputMut::check`].
    pub fn check(
        &self,
        inputs: &Inputs<'_, E>,
        output: &OutputRef<'_, E>,
        gradient: &OutputGradient<'_, E>,
    ) -> Result<()> {
        let dims = Dims { dim: inputs.v.dims().dim, ..inputs.q.dims() };
        let read = backward(output, gradient, dims)?;
        gradients(inputs, &read, self)
    }
}

#[cfg(test)]
mod tests;
