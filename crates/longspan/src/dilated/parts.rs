//! A branch as components: kernel calls on strided views.
//!
//! Heads of one offset attend to the same tokens of a segment, `offset, offset + rate, …`. Where the
//! tokens of a tensor are a progression of positions, these are a view with a step. Segments of one
//! length are the batch entries of that view, so that a call has them all; the last, short one has a
//! call of its own. Positions go along, so whatever else a query may not attend to (what comes later,
//! other documents) is a layout over those positions.
//!
//! Tokens of a shard, or of some keys of another one, are several progressions: every one of the
//! queries with every one of the keys.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use longspan_pattern::residues::{self, Alike, Segment, Steps, Tokens};
use longspan_pattern::{BlockSize, Layout, LayoutSet, Pattern, Positions, Progression, Shape};

use super::sequences::Sequence;
use super::{Branch, Overlap};
use crate::components::{Component, HeadMap, Part};
use crate::error::Result;
use crate::exec::Monitor;
use crate::tensor::Selection;

/// Segments of so many tokens of a branch, or fewer, are no calls of their own but blocks of one
/// layout over all of them.
const SHORT: usize = 256;

/// Positions of a segment that has all of them.
const ALL: u64 = 1 << 61;

/// What components are made for.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a, 'h> {
    pub(super) branches: &'a [Branch],
    pub(super) within: &'a Pattern,
    pub(super) also: Option<&'a Pattern>,
    pub(super) overlap: Overlap,
    pub(super) block: Option<BlockSize>,
    pub(super) sequence: &'a Sequence,
    pub(super) heads: &'a HeadMap,
    pub(super) monitor: &'a Monitor<'h>,
    /// Of all sequences: those of one length have the same.
    pub(super) compiled: &'a RefCell<CompiledLayouts>,
}

/// Layouts by pattern and shape.
pub(super) type CompiledLayouts = HashMap<(Pattern, Shape), Arc<Layout>>;

impl Maker<'_, '_> {
    /// All calls: those of `also` first, then branch by branch.
    pub(super) fn components(&self, components: &mut Vec<Component>) -> Result<()> {
        if let Some(also) = self.also {
            self.everywhere(&(self.within.clone() & also.clone()), components)?;
        }
        for (index, branch) in self.branches.iter().enumerate() {
            for offset in self.offsets(*branch) {
                self.offset(index, offset, components)?;
            }
        }
        Ok(())
    }

    /// The calls over all tokens of all heads, if they attend to anything.
    fn everywhere(&self, pattern: &Pattern, components: &mut Vec<Component>) -> Result<()> {
        let select = |first, tokens, heads| Selection {
            entry: 0,
            segments: Steps { first, step: 1, count: 1 },
            tokens: Steps { first: 0, step: 1, count: tokens },
            heads,
        };
        let key_runs = self.sequence.keys.adjacent()?;
        for (first_query, queries) in self.sequence.queries.adjacent()? {
            for (first_key, keys) in &key_runs {
                let layout = self.compile(pattern, &queries, keys)?;
                let blocks = self.blocks(&layout)?;
                if blocks == 0 {
                    continue;
                }
                for (query_heads, key_heads) in self.heads.calls(|_| true) {
                    components.push(Component {
                        layouts: layout.clone().into(),
                        part: Part::Some {
                            queries: select(first_query, queries.len(), query_heads),
                            keys: select(*first_key, keys.len(), key_heads),
                        },
                        weight: blocks * query_heads.count,
                        place: self.sequence.place,
                    });
                }
            }
        }
        Ok(())
    }

    /// The calls of a branch for heads of one offset.
    fn offset(&self, index: usize, offset: u64, components: &mut Vec<Component>) -> Result<()> {
        let branch = self.branches[index];
        let whole = self.whole(branch);
        let segments = self.segments(branch, offset, whole);
        let mut rest = &segments[..];
        while let [first, ..] = rest {
            let Alike { count, steps } = Alike::of(rest);
            let (group, others) = rest.split_at(count);
            rest = others;
            for (query_heads, key_heads) in
                self.heads.calls(|head| head as u64 % branch.rate() == offset)
            {
                let mut patterns: Vec<Pattern> = Vec::new();
                for head in query_heads.indices() {
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
                let select = |Tokens { indices, .. }: Tokens, step, heads| Selection {
                    entry: 0,
                    segments: Steps { first: indices.first, step, count },
                    tokens: Steps { first: 0, ..indices },
                    heads,
                };
                let queries = select(first.queries, steps.0, query_heads);
                let keys = select(first.keys, steps.1, key_heads);
                let part = Part::Some { queries, keys };
                let place = self.sequence.place;
                components.push(Component { layouts: layouts.into(), part, weight, place });
            }
        }
        Ok(())
    }

    /// Queries and keys of every call, as positions and as indices of keys, with the pattern that
    /// they are cut with and the number of heads that have it. Segments are not joined.
    pub(super) fn each_segment(
        &self,
        mut call: impl FnMut(&Pattern, usize, (Progression, Progression), Steps) -> Result<()>,
    ) -> Result<()> {
        if let Some(also) = self.also {
            let pattern = self.within.clone() & also.clone();
            let heads = self.heads.pairs().count();
            for (_, queries) in self.sequence.queries.progressions() {
                for (first, keys) in self.sequence.keys.progressions() {
                    let indices = Steps { first, step: 1, count: keys.len };
                    call(&pattern, heads, (queries, keys), indices)?;
                }
            }
        }
        for (index, branch) in self.branches.iter().enumerate() {
            for offset in self.offsets(*branch) {
                let mut patterns: Vec<(Pattern, usize)> = Vec::new();
                for (head, _) in self.heads.pairs() {
                    if head as u64 % branch.rate() == offset {
                        let pattern = self.pattern(index, head as u64)?;
                        match patterns.iter_mut().find(|(known, _)| *known == pattern) {
                            Some((_, heads)) => *heads += 1,
                            None => patterns.push((pattern, 1)),
                        }
                    }
                }
                for Segment { queries, keys } in self.segments(*branch, offset, false) {
                    for (pattern, heads) in &patterns {
                        let positions = (queries.positions, keys.positions);
                        call(pattern, *heads, positions, keys.indices)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The offsets of a branch that query heads have.
    fn offsets(&self, branch: Branch) -> Vec<u64> {
        let offsets = self.heads.pairs().map(|(head, _)| head as u64 % branch.rate());
        offsets.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether short segments are blocks of one layout: their tokens have one step then, all of
    /// them.
    fn whole(&self, branch: Branch) -> bool {
        let (segment, rate) = (branch.segment(), branch.rate());
        segment.is_multiple_of(rate) && segment / rate <= SHORT as u64
    }

    /// The segments that have queries and keys of an offset: every progression of queries with
    /// every progression of keys.
    fn segments(&self, branch: Branch, offset: u64, whole: bool) -> Vec<Segment> {
        let Sequence { queries, keys, .. } = self.sequence;
        let length = if whole { ALL } else { branch.segment() };
        let branch = (length, branch.rate(), offset);
        residues::dilated(queries, keys, branch, usize::MAX).expect("there is no limit")
    }

    /// What a head of a branch may attend to in its segments.
    fn pattern(&self, index: usize, head: u64) -> Result<Pattern> {
        let mut pattern = self.within.clone();
        if self.overlap == Overlap::Union {
            if let Some(also) = self.also {
                pattern = pattern & !also.clone();
            }
            for earlier in &self.branches[..index] {
                let (segment, rate) = (earlier.segment(), earlier.rate());
                pattern = pattern & !Pattern::dilated(segment, rate, head % rate)?;
            }
        }
        Ok(pattern)
    }

    fn compile(
        &self,
        pattern: &Pattern,
        queries: &Positions,
        keys: &Positions,
    ) -> Result<Arc<Layout>> {
        let mut shape =
            self.sequence.shape.clone().query_map(queries.clone()).key_map(keys.clone());
        if let Some(block) = self.block {
            shape = shape.block(block);
        }
        let key = (pattern.clone(), shape);
        if let Some(known) = self.compiled.borrow().get(&key) {
            return Ok(known.clone());
        }
        let layout = Layout::compile_with(pattern, &key.1, |_, _| self.monitor.flow())?;
        let layout = Arc::new(layout);
        self.compiled.borrow_mut().insert(key, layout.clone());
        Ok(layout)
    }

    /// Active blocks of a layout.
    fn blocks(&self, layout: &Layout) -> Result<usize> {
        Ok(layout.counts_with(|_, _| self.monitor.flow())?.active_blocks() as usize)
    }

    /// A layout for every segment and head.
    fn layouts(&self, segments: &[Segment], patterns: &[Pattern]) -> Result<LayoutSet> {
        let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(segments.len() * patterns.len());
        for segment in segments {
            let queries = Positions::new([segment.queries.positions])?;
            let keys = Positions::new([segment.keys.positions])?;
            let own = layouts.len();
            for (head, pattern) in patterns.iter().enumerate() {
                let layout = match patterns[..head].iter().position(|earlier| earlier == pattern) {
                    Some(known) => layouts[own + known].clone(),
                    None => self.compile(pattern, &queries, &keys)?,
                };
                layouts.push(layout);
            }
        }
        let (entries, heads) = (segments.len(), patterns.len());
        Ok(LayoutSet::new_with(entries, heads, layouts, |_, _| self.monitor.flow())?)
    }
}
