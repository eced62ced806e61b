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

use longspan_pattern::{Layout, LayoutSet, Pattern, Positions, Progression, Shape};

use super::sequences::{Members, Sequence};
use super::{Branch, Overlap};
use crate::components::{Component, HeadMap, Part};
use crate::error::Result;
use crate::exec::Monitor;
use crate::tensor::{Selection, Steps};

/// Segments of so many tokens of a branch, or fewer, are no calls of their own but blocks of one
/// layout over all of them.
const SHORT: usize = 256;

/// What components are made for.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a, 'h> {
    pub(super) branches: &'a [Branch],
    pub(super) within: &'a Pattern,
    pub(super) also: Option<&'a Pattern>,
    pub(super) overlap: Overlap,
    pub(super) sequence: &'a Sequence,
    pub(super) heads: &'a HeadMap,
    pub(super) monitor: &'a Monitor<'h>,
    /// Of all sequences: those of one length have the same.
    pub(super) compiled: &'a RefCell<CompiledLayouts>,
}

/// Layouts by pattern and shape.
pub(super) type CompiledLayouts = HashMap<(Pattern, Shape), Arc<Layout>>;

/// Tokens of a tensor whose positions are those of one offset in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tokens {
    /// Where the segment starts.
    segment: i64,
    indices: Steps,
    positions: Progression,
}

impl Tokens {
    /// From the first token to the one behind the last.
    fn span(&self) -> usize {
        self.indices.step * (self.indices.count - 1) + 1
    }
}

/// Queries and keys of one segment.
#[derive(Debug, Clone, Copy)]
struct Segment {
    queries: Tokens,
    keys: Tokens,
}

/// How many of the first segments are entries of one view: those that look like the first, each as
/// far from the one before as the second is from the first.
fn alike(segments: &[Segment]) -> usize {
    let [first, rest @ ..] = segments else { return 0 };
    let [second, ..] = rest else { return 1 };
    let step = |from: &Segment, to: &Segment, of: fn(&Segment) -> Tokens| {
        let (from, to) = (of(from), of(to));
        let looks = |tokens: &Tokens| (tokens.indices.step, tokens.indices.count);
        let step = to.indices.first.checked_sub(from.indices.first)?;
        (looks(&from) == looks(&to) && step >= from.span()).then_some(step)
    };
    let steps = |from: &Segment, to: &Segment| {
        Some((step(from, to, |s| s.queries)?, step(from, to, |s| s.keys)?))
    };
    let Some(expected) = steps(first, second) else { return 1 };
    let goes_on = |pair: &&[Segment]| steps(&pair[0], &pair[1]) == Some(expected);
    1 + segments.windows(2).take_while(goes_on).count()
}

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
        let key_runs = self.sequence.keys.runs()?;
        for (first_query, queries) in self.sequence.queries.runs()? {
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
            let (group, others) = rest.split_at(alike(rest));
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
                let select = |of: fn(&Segment) -> Tokens, heads| {
                    let Tokens { indices, .. } = of(first);
                    let next = group.get(1).map(|next| of(next).indices.first - indices.first);
                    let (first, step, count) = (indices.first, next.unwrap_or(1), group.len());
                    Selection {
                        entry: 0,
                        segments: Steps { first, step, count },
                        tokens: Steps { first: 0, ..indices },
                        heads,
                    }
                };
                let (queries, keys) =
                    (select(|s| s.queries, query_heads), select(|s| s.keys, key_heads));
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
        let Sequence { tokens, queries, keys, .. } = self.sequence;
        let (tokens, rate) = (*tokens as i128, i128::from(branch.rate()));
        let length = if whole { tokens } else { i128::from(branch.segment()).min(tokens) };
        let of = |members: &Members, range: (i128, i128)| {
            tokens_of(members, range, length, rate, offset.into())
        };
        let all_queries = of(queries, (0, tokens));
        let starts = || all_queries.iter().map(|tokens| i128::from(tokens.segment));
        let (Some(first), Some(last)) = (starts().min(), starts().max()) else {
            return Vec::new();
        };
        let mut by_segment: HashMap<i64, Vec<Tokens>> = HashMap::new();
        for tokens in of(keys, (first, (last + length).min(tokens))) {
            by_segment.entry(tokens.segment).or_default().push(tokens);
        }
        let mut segments = Vec::new();
        for queries in all_queries {
            for &keys in by_segment.get(&queries.segment).into_iter().flatten() {
                segments.push(Segment { queries, keys });
            }
        }
        segments
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
        let shape = self.sequence.shape.clone().query_map(queries.clone()).key_map(keys.clone());
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

/// Tokens at positions `offset` modulo `rate` of each segment of `length` positions between two, the
/// first of which starts a segment; in the order of progressions and segments.
fn tokens_of(
    members: &Members,
    (first_position, tokens): (i128, i128),
    length: i128,
    rate: i128,
    offset: i128,
) -> Vec<Tokens> {
    let mut found = Vec::new();
    for (index, progression) in members.progressions() {
        let (start, step) = (i128::from(progression.start), progression.step as i128);
        let end = start + step * (progression.len as i128 - 1) + 1;
        let start_at = start.max(first_position);
        let mut segment = if length == 0 { tokens } else { start_at / length * length };
        while segment < end.min(tokens) {
            let next = (segment + length).min(tokens);
            // Indices i in the progression with segment ≤ start + step · i < next.
            let from = ((segment - start).max(0) + step - 1) / step;
            let to = ((next - start + step - 1) / step).min(progression.len as i128);
            if let Some((first, period)) = congruent(step, offset - (start - segment), rate) {
                let first = from + (first - from).rem_euclid(period);
                if first < to {
                    let count = ((to - 1 - first) / period + 1) as usize;
                    // A period of more than all tokens is that of a single one.
                    let period = if count == 1 { 1 } else { period };
                    let indices =
                        Steps { first: index + first as usize, step: period as usize, count };
                    let positions = Progression {
                        start: (start + step * first) as i64,
                        step: (step * period) as usize,
                        len: count,
                    };
                    found.push(Tokens { segment: segment as i64, indices, positions });
                }
            }
            segment += length;
        }
    }
    found
}

/// The least `i ≥ 0` with `step · i ≡ rest` modulo `rate`, and the distance of further ones.
fn congruent(step: i128, rest: i128, rate: i128) -> Option<(i128, i128)> {
    // Euclid's algorithm: step · inverse ≡ divisor.
    let (mut divisor, mut next) = (step.rem_euclid(rate), rate);
    let (mut inverse, mut other) = (1, 0);
    while next != 0 {
        let quotient = divisor / next;
        (divisor, next) = (next, divisor - quotient * next);
        (inverse, other) = (other, inverse - quotient * other);
    }
    let period = rate / divisor;
    let rest = rest.rem_euclid(rate);
    (rest % divisor == 0).then(|| ((rest / divisor * inverse).rem_euclid(period), period))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token at its offset in a segment is in one of the lists, with its position.
    #[test]
    fn tokens_are_those_of_the_offset() {
        let mut seen = 0;
        for (start, step, len) in
            [(0, 1, 50), (3, 1, 40), (1, 4, 20), (5, 6, 11), (-7, 1, 30), (90, 3, 9), (2, 7, 1)]
        {
            let before = Progression { start: 0, step: 1, len: 2 };
            let all = Positions::new([before, Progression { start, step, len }]).unwrap();
            for (length, rate) in [(100, 1), (16, 4), (10, 3), (7, 7), (100, 64), (5, 6)] {
                for offset in 0..rate {
                    let found = tokens_of(&Members::all(&all), (0, 100), length, rate, offset);
                    let mut indices = Vec::new();
                    for tokens in &found {
                        for i in 0..tokens.indices.count {
                            let index = tokens.indices.first + i * tokens.indices.step;
                            let position =
                                tokens.positions.start + (i * tokens.positions.step) as i64;
                            assert_eq!(all.get(index), Some(position));
                            assert_eq!(position / length as i64 * length as i64, tokens.segment);
                            indices.push(index);
                        }
                    }
                    let expected: Vec<_> = (0..all.len())
                        .filter(|&index| {
                            let position = i128::from(all.get(index).unwrap());
                            (0..100).contains(&position)
                                && position.rem_euclid(length) % rate == offset
                        })
                        .collect();
                    indices.sort_unstable();
                    assert_eq!(indices, expected, "{start} {step} {len}, {length} {rate} {offset}");
                    seen += indices.len();
                }
            }
        }
        assert!(seen > 500, "{seen}");
    }
}
