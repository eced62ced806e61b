//! A branch as calls of the kernels on strided views.
//!
//! Heads of one offset see the same tokens of a segment, `offset, offset + rate, …`: a view with a
//! step. Segments of one length are the batch entries of that view, so that a call has them all;
//! the last, short one has a call of its own. Positions go along, so whatever else a query may not
//! see (what comes later, other documents) is a layout over those positions.

use std::sync::Arc;

use longspan_pattern::{Layout, LayoutSet, Pattern, Positions, Progression, Shape};

use super::{Branch, Overlap};
use crate::dims::Sizes;
use crate::error::Result;
use crate::exec::Monitor;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::score::HeadPart;
use crate::tensor::{Selection, Steps};

/// Segments of so many tokens of a branch, or fewer, are no calls of their own but blocks of one
/// layout over all of them.
const SHORT: usize = 256;

/// One call.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) layouts: Layouts,
    queries: Selection,
    keys: Selection,
    /// Active blocks × query heads.
    pub(super) weight: usize,
}

impl Part {
    /// Queries of a batch entry.
    pub(super) fn queries(&self, entry: usize) -> Selection {
        Selection { entry, ..self.queries }
    }

    /// Keys of a batch entry.
    pub(super) fn keys(&self, entry: usize) -> Selection {
        Selection { entry, ..self.keys }
    }

    /// Options for the heads of this part and a batch entry.
    pub(super) fn options(&self, all: &Options, entry: usize, of: usize) -> Options {
        // Rows are finished once all parts have been added, and get their sinks then.
        let mut options = Options { sink_logits: None, ..all.clone() };
        let Steps { first, step, count } = self.queries.heads;
        options.score = all.score.of_heads(first, step, count);
        if let Some(dropout) = &mut options.dropout {
            dropout.part = Some(HeadPart { entry, first, step, of });
        }
        options
    }
}

/// What parts are made for.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a, 'h> {
    pub(super) branches: &'a [Branch],
    pub(super) within: &'a Pattern,
    pub(super) also: Option<&'a Pattern>,
    pub(super) overlap: Overlap,
    /// The position of the first query.
    pub(super) query_offset: i64,
    pub(super) sizes: Sizes,
    pub(super) monitor: &'a Monitor<'h>,
}

/// A segment of the sequence whose tokens of one offset are `first, first + rate, …`.
#[derive(Clone, Copy)]
struct Segment {
    start: i64,
    queries: Progression,
    keys: Progression,
}

impl Segment {
    /// Whether a view of both with one stride is right: `later` looks like this one, moved.
    fn looks_like(&self, later: &Segment) -> bool {
        let lens = |s: &Segment| (s.queries.len, s.keys.len, s.queries.start - s.start);
        lens(self) == lens(later)
    }
}

impl Maker<'_, '_> {
    /// All calls, branch by branch.
    pub(super) fn parts(&self) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        parts.extend(self.also.map(|also| self.everywhere(also)).transpose()?.flatten());
        for (index, branch) in self.branches.iter().enumerate() {
            let heads = self.sizes.heads as u64;
            for offset in 0..branch.rate().min(heads) {
                self.offset(index, offset, &mut parts)?;
            }
        }
        Ok(parts)
    }

    /// The call over all tokens of all heads, if they see anything.
    fn everywhere(&self, also: &Pattern) -> Result<Option<Part>> {
        let Sizes { queries, keys, heads, key_heads, .. } = self.sizes;
        let layout = self.compile(&(self.within.clone() & also.clone()), &self.shape())?;
        let weight = self.blocks(&layout)? * heads;
        let all = |count| Steps { first: 0, step: 1, count };
        let select = |tokens, heads| Selection {
            entry: 0,
            segments: all(1),
            tokens: all(tokens),
            heads: all(heads),
        };
        Ok((weight > 0).then(|| Part {
            layouts: layout.into(),
            queries: select(queries, heads),
            keys: select(keys, key_heads),
            weight,
        }))
    }

    /// The calls of a branch for heads of one offset.
    fn offset(&self, index: usize, offset: u64, parts: &mut Vec<Part>) -> Result<()> {
        let branch = self.branches[index];
        let whole = self.whole(branch);
        let segments = self.segments(branch, offset, whole);
        let mut rest = &segments[..];
        while let [first, ..] = rest {
            let alike = rest.iter().take_while(|segment| first.looks_like(segment)).count();
            let (group, others) = rest.split_at(alike);
            rest = others;
            for (query_heads, key_heads) in self.heads(branch.rate(), offset) {
                let mut patterns: Vec<Pattern> = Vec::new();
                for head in 0..query_heads.count {
                    let head = query_heads.first + head * query_heads.step;
                    let mut pattern = self.pattern(index, head as u64)?;
                    if whole {
                        let own = Pattern::dilated(branch.segment(), branch.rate(), offset)?;
                        pattern = pattern & own;
                    }
                    patterns.push(pattern);
                }
                let layouts = self.layouts(group, &patterns)?;
                let mut weight = 0;
                for entry in 0..group.len() {
                    for head in 0..patterns.len() {
                        weight += self.blocks(layouts.get(entry, head))?;
                    }
                }
                if weight == 0 {
                    continue;
                }
                let select = |of: fn(&Segment) -> Progression, origin: i64, heads| {
                    let tokens = of(first);
                    let step = group.get(1).map_or(1, |next| of(next).start - tokens.start);
                    let start = (tokens.start - origin) as usize;
                    Selection {
                        entry: 0,
                        segments: Steps { first: start, step: step as usize, count: group.len() },
                        tokens: Steps { first: 0, step: tokens.step, count: tokens.len },
                        heads,
                    }
                };
                parts.push(Part {
                    queries: select(|s| s.queries, self.query_offset, query_heads),
                    keys: select(|s| s.keys, 0, key_heads),
                    layouts: layouts.into(),
                    weight,
                });
            }
        }
        Ok(())
    }

    /// Whether short segments are blocks of one layout: their tokens have one step then, all of
    /// them.
    fn whole(&self, branch: Branch) -> bool {
        let Branch { segment, rate } = branch;
        segment.is_multiple_of(rate) && segment / rate <= SHORT as u64
    }

    /// The segments that have queries and keys of an offset.
    fn segments(&self, branch: Branch, offset: u64, whole: bool) -> Vec<Segment> {
        let keys = self.sizes.keys as i64;
        let first_query = self.query_offset;
        let end_query = first_query + self.sizes.queries as i64;
        // Beyond the last key there is nothing to see.
        let last = keys.min(end_query);
        let segment = if whole { keys } else { (branch.segment().min(keys as u64)) as i64 };
        let rate = branch.rate().min(i64::MAX as u64) as i64;
        let mut segments = Vec::new();
        let mut start = if segment == 0 { last } else { first_query.max(0) / segment * segment };
        while start < last {
            let end = (start + segment).min(keys);
            let origin = start.saturating_add(offset as i64);
            let from = |low: i64, end: i64| {
                let skip = (low - origin).max(0);
                let first = origin.saturating_add((skip + rate - 1) / rate * rate);
                let len = if first < end { (end - 1 - first) / rate + 1 } else { 0 };
                Progression { start: first, step: rate as usize, len: len as usize }
            };
            let keys = from(start, end);
            let queries = from(first_query.max(start), end.min(end_query));
            if keys.len > 0 && queries.len > 0 {
                segments.push(Segment { start, queries, keys });
            }
            start += segment;
        }
        segments
    }

    /// Query heads of an offset, in groups whose key heads have a step too.
    fn heads(&self, rate: u64, offset: u64) -> Vec<(Steps, Steps)> {
        let Sizes { heads, key_heads, .. } = self.sizes;
        let group = heads / key_heads;
        let (first, step) = (offset as usize, usize::try_from(rate).unwrap_or(usize::MAX));
        let count = (heads - first).div_ceil(step);
        let all = Steps { first, step, count };
        if group.is_multiple_of(step) {
            return vec![(all, Steps { first: 0, step: 1, count: key_heads })];
        }
        if step.is_multiple_of(group) {
            return vec![(all, Steps { first: first / group, step: step / group, count })];
        }
        let one = |first| Steps { first, step: 1, count: 1 };
        (first..heads).step_by(step).map(|head| (one(head), one(head / group))).collect()
    }

    /// What a head of a branch may see of its segments.
    fn pattern(&self, index: usize, head: u64) -> Result<Pattern> {
        let mut pattern = self.within.clone();
        if self.overlap == Overlap::Union {
            if let Some(also) = self.also {
                pattern = pattern & !also.clone();
            }
            for earlier in &self.branches[..index] {
                let Branch { segment, rate } = *earlier;
                pattern = pattern & !Pattern::dilated(segment, rate, head % rate)?;
            }
        }
        Ok(pattern)
    }

    /// All queries and keys.
    fn shape(&self) -> Shape {
        let Sizes { queries, keys, .. } = self.sizes;
        Shape::new(queries, keys).query_offset(self.query_offset)
    }

    fn compile(&self, pattern: &Pattern, shape: &Shape) -> Result<Layout> {
        Ok(Layout::compile_with(pattern, shape, |_, _| self.monitor.flow())?)
    }

    /// Active blocks of a layout.
    fn blocks(&self, layout: &Layout) -> Result<usize> {
        Ok(layout.counts_with(|_, _| self.monitor.flow())?.active_blocks() as usize)
    }

    /// A layout for every segment and head.
    fn layouts(&self, segments: &[Segment], patterns: &[Pattern]) -> Result<LayoutSet> {
        let shape = self.shape();
        let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(segments.len() * patterns.len());
        for segment in segments {
            let shape = shape
                .clone()
                .query_map(Positions::new([segment.queries])?)
                .key_map(Positions::new([segment.keys])?);
            let own = layouts.len();
            for (head, pattern) in patterns.iter().enumerate() {
                let layout = match patterns[..head].iter().position(|earlier| earlier == pattern) {
                    Some(known) => layouts[own + known].clone(),
                    None => Arc::new(self.compile(pattern, &shape)?),
                };
                layouts.push(layout);
            }
        }
        let (entries, heads) = (segments.len(), patterns.len());
        Ok(LayoutSet::new_with(entries, heads, layouts, |_, _| self.monitor.flow())?)
    }
}
