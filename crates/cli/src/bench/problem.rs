//! The problem of a benchmark: sizes, layouts, tensors, FLOPs.

use std::num::NonZeroUsize;
use std::ops::Range;

use anyhow::Result;
use longspan::{
    Attention, Dims, Element, ElementType, Error, Hook, Inputs, Layout, LayoutSet, Layouts, Order,
    OutputMut, Pattern, Shape, Tensor,
};
use longspan_pattern::Heads;

use crate::args::Bench;
use crate::compile::Compiled;
use crate::random;

/// Sizes of all axes, and the dtype.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) element: ElementType,
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) value_dim: usize,
}

impl Sizes {
    /// Sizes from the arguments; an error where the library refuses them or their bytes overflow.
    pub(super) fn of<E: Element>(args: &Bench, patterns: &Heads) -> Result<Self> {
        let (heads, kv_heads) = args.tensors.heads(patterns);
        let dim = args.tensors.head_dim();
        let sizes = Sizes {
            element: E::TYPE,
            batch: args.batch.get(),
            queries: args.queries.unwrap_or(args.input.tokens),
            keys: args.keys.unwrap_or(args.input.tokens),
            heads,
            kv_heads,
            dim,
            value_dim: args.value_dim.map_or(dim, |dim| dim as usize),
        };
        for dims in [sizes.dims_q(), sizes.dims_k(), sizes.dims_v(), sizes.dims_out()] {
            // Eight tensors of this size, in bytes of the largest type.
            let bytes = dims.elements().and_then(|elements| elements.checked_mul(8 * 4));
            bytes.filter(|&bytes| bytes < isize::MAX as usize).ok_or(Error::Overflow { dims })?;
        }
        patterns.get(0, heads)?;
        sizes.try_one_token::<E>()?;
        Ok(sizes)
    }

    /// A call on one token: the library's checks, before gigabytes are allocated.
    fn try_one_token<E: Element>(&self) -> longspan::Result<()> {
        let layout = Layout::compile(&Pattern::full(), &Shape::new(1, 1))?;
        let one = |dims: Dims| {
            let dims = Dims { batch: 1, tokens: 1, ..dims };
            Tensor::<E>::zeros(dims, Order::Bhsd)
        };
        let (q, k, v) = (one(self.dims_q())?, one(self.dims_k())?, one(self.dims_v())?);
        let (mut out, mut lse) = (one(self.dims_out())?, vec![0.0; self.heads]);
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
        Attention::new(layout).forward_into(inputs, output, Hook::none())
    }

    pub(super) fn dims_q(&self) -> Dims {
        Dims { batch: self.batch, tokens: self.queries, heads: self.heads, dim: self.dim }
    }

    pub(super) fn dims_k(&self) -> Dims {
        Dims { batch: self.batch, tokens: self.keys, heads: self.kv_heads, dim: self.dim }
    }

    pub(super) fn dims_v(&self) -> Dims {
        Dims { dim: self.value_dim, ..self.dims_k() }
    }

    pub(super) fn dims_out(&self) -> Dims {
        Dims { dim: self.value_dim, ..self.dims_q() }
    }

    /// Rows of the softmax.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.heads * self.queries
    }

    pub(super) fn q(&self) -> usize {
        self.rows() * self.dim
    }

    pub(super) fn k(&self) -> usize {
        self.batch * self.kv_heads * self.keys * self.dim
    }

    pub(super) fn v(&self) -> usize {
        self.batch * self.kv_heads * self.keys * self.value_dim
    }

    pub(super) fn out(&self) -> usize {
        self.rows() * self.value_dim
    }

    /// Bytes of queries, keys, values and output.
    pub(super) fn forward_bytes(&self) -> u64 {
        (self.q() + self.k() + self.v() + self.out()) as u64 * self.element.size() as u64
    }

    /// Bytes of the same, their gradients, and three f32 per row.
    pub(super) fn backward_bytes(&self) -> u64 {
        2 * self.forward_bytes() + 3 * self.rows() as u64 * 4
    }

    /// Bytes of the f32 accumulators of gradients, where the dtype isn't f32.
    pub(super) fn sum_bytes(&self) -> u64 {
        match self.element {
            ElementType::F32 => 0,
            _ => (self.q() + self.k() + self.v()) as u64 * 4,
        }
    }
}

/// Layouts and sizes, and the work that follows from both.
pub(super) struct Problem {
    pub(super) sizes: Sizes,
    pub(super) order: Order,
    pub(super) layouts: Layouts,
    /// Share of active pairs.
    pub(super) density: f64,
    pub(super) forward_flops: u128,
    pub(super) backward_flops: u128,
}

impl Problem {
    pub(super) fn new(sizes: Sizes, order: Order, compiled: &Compiled<'_>) -> Result<Self> {
        let Sizes { batch, queries, keys, heads, dim, value_dim, .. } = sizes;
        let layout = |head: usize| compiled.of(head % heads).layout.clone();
        let layouts = match compiled.distinct.len() {
            1 => Layouts::One(layout(0)),
            _ => Layouts::Each(LayoutSet::new(batch, heads, (0..batch * heads).map(layout))?),
        };
        let (dim, value_dim) = (dim as u32, value_dim as u32);
        let (mut pairs, mut forward_flops, mut backward_flops) = (0, 0, 0);
        for head in 0..heads {
            let counts = compiled.of(head).layout.counts()?;
            pairs += counts.active_pairs;
            forward_flops += batch as u128 * counts.forward_flops(dim, value_dim);
            backward_flops += batch as u128 * counts.backward_flops(dim, value_dim);
        }
        let all = queries as f64 * keys as f64 * heads as f64;
        let density = if all > 0.0 { pairs as f64 / all } else { 0.0 };
        Ok(Problem { sizes, order, layouts, density, forward_flops, backward_flops })
    }

    pub(super) fn tensor<E: Element>(
        &self,
        data: Vec<E>,
        dims: Dims,
    ) -> longspan::Result<Tensor<E>> {
        Tensor::new(data, dims, self.order)
    }

    /// Parts of keys and values as large as those that a forward pass reads, where queries are so
    /// few that reading may be the bottleneck.
    pub(super) fn reads<'a, E: Element>(&self, tensors: &'a Tensors<E>) -> Option<[&'a [E]; 2]> {
        let Sizes { batch, queries, keys, heads, kv_heads, .. } = self.sizes;
        let group = heads / kv_heads;
        if queries == 0 || queries >= keys || queries * group > DECODE_QUERIES {
            return None;
        }
        let active: usize = (0..kv_heads)
            .map(|kv| {
                let layouts = kv * group..(kv + 1) * group;
                active_keys(layouts.map(|head| self.layouts.get(0, head)))
            })
            .sum();
        let part = |tensor: &'a Tensor<E>| {
            let len = batch * active * tensor.dims().dim;
            &tensor.as_slice()[..len]
        };
        (active > 0).then(|| [part(&tensors.k), part(&tensors.v)])
    }
}

/// Queries per KV head up to which reading the keys may take longer than computing with them: a
/// key has 2 or 4 bytes per dim, and 4 FLOPs per dim and query; CPUs do 10 to 100 FLOPs per byte
/// that they read.
const DECODE_QUERIES: usize = 64;

/// Keys of the active blocks of any of the layouts.
fn active_keys<'a>(layouts: impl Iterator<Item = &'a Layout>) -> usize {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut last: Option<&Layout> = None;
    for layout in layouts {
        if last.is_some_and(|last| std::ptr::eq(last, layout)) {
            continue;
        }
        last = Some(layout);
        for run in layout.rows().flat_map(|row| layout.row(row)) {
            let first = layout.column_tokens(run.start).start;
            ranges.push(first..layout.column_tokens(run.end() - 1).end);
        }
    }
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut sum, mut end) = (0, 0);
    for range in ranges {
        sum += range.end.saturating_sub(range.start.max(end));
        end = end.max(range.end);
    }
    sum
}

/// The inputs of attention.
pub(super) struct Tensors<E> {
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
}

impl<E: Element> Tensors<E> {
    pub(super) fn new(problem: &Problem, threads: NonZeroUsize) -> longspan::Result<Self> {
        let sizes = &problem.sizes;
        let make = |seed, len, dims| problem.tensor(random::normals::<E>(seed, len, threads), dims);
        Ok(Tensors {
            q: make(0, sizes.q(), sizes.dims_q())?,
            k: make(1, sizes.k(), sizes.dims_k())?,
            v: make(2, sizes.v(), sizes.dims_v())?,
        })
    }

    pub(super) fn inputs(&self) -> Inputs<'_, E> {
        Inputs { q: self.q.view(), k: self.k.view(), v: self.v.view() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_counted_once() -> longspan_pattern::Result<()> {
        let layout = |text: &str| -> longspan_pattern::Result<Layout> {
            Layout::compile(&text.parse()?, &Shape::new(1, 1_000))
        };
        let (near, far) = (layout("window(99, 0)")?, layout("sinks(10)")?);
        let (all, none) = (layout("causal")?, layout("!full")?);
        // Keys 900..1000 lie in the blocks from 896 on.
        assert_eq!(active_keys([&near].into_iter()), 104);
        assert_eq!(active_keys([&near, &near, &far].into_iter()), 104 + 64);
        assert_eq!(active_keys([&near, &all, &far].into_iter()), 1_000);
        assert_eq!(active_keys([&none].into_iter()), 0);
        Ok(())
    }
}
