//! Tokens by residue: the views with a step in which `strided` and `dilated` are dense. Above
//! `positions`; used by `layout` and by dilated attention.
//!
//! Queries and keys attend to each other in `strided(m)` where their positions are congruent modulo
//! `m`, and in `dilated` within one segment too. Where the tokens of a tensor are a progression of
//! positions, those of one residue are again a progression: every so many tokens, a view with a
//! step. A [`Segment`] is such a view of queries and one of keys.

use std::collections::HashMap;

use crate::arith::Congruence;
use crate::error::Result;
use crate::positions::{Positions, Progression};

/// The indices `first, first + step, …`, `count` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Steps {
    /// The first index.
    pub first: usize,
    /// Difference of consecutive indices.
    pub step: usize,
    /// Number of indices.
    pub count: usize,
}

impl Steps {
    /// The last index; the first if there are none.
    pub fn last(&self) -> usize {
        self.first + self.step * self.count.saturating_sub(1)
    }

    /// All of them, ascending.
    pub fn indices(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |index| self.first + index * self.step)
    }
}

/// Residues that are looked at per segment, at most.
const LOOKS: usize = 64;

/// Tokens of a tensor: progressions of positions, each with the index of its first token.
#[derive(Debug, Clone, Default)]
pub struct Members(Vec<(usize, Progression)>);

impl Members {
    /// All tokens at these positions.
    pub fn all(positions: &Positions) -> Self {
        let mut first = 0;
        let with_index = |progression: Progression| {
            let index = first;
            first += progression.len;
            (index, progression)
        };
        Members(positions.progressions().map(with_index).collect())
    }

    /// The tokens whose positions are in each of the ranges between ascending bounds; positions are
    /// moved by `shift` of their range.
    ///
    /// ```
    /// use longspan_pattern::{Positions, residues::Members};
    ///
    /// let ranges = Members::in_ranges(&Positions::range(0, 10)?, &[0, 4, 10], |range| [0, -4][range]);
    /// let (index, second) = ranges[1].progressions().next().unwrap();
    /// assert_eq!((index, second.start, second.len), (4, 0, 6));
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn in_ranges(
        positions: &Positions,
        bounds: &[i64],
        shift: impl Fn(usize) -> i64,
    ) -> Vec<Members> {
        let mut members = vec![Members::default(); bounds.len().saturating_sub(1)];
        let mut before = 0;
        for Progression { start, step, len } in positions.progressions() {
            let (first, stride) = (i128::from(start), step as i128);
            let behind = first + stride * len as i128;
            // Tokens of the progression before a bound.
            let count = |bound: i64| {
                let distance = (i128::from(bound) - first).max(0) + stride - 1;
                (distance / stride).min(len as i128) as usize
            };
            let range =
                bounds.partition_point(|&bound| i128::from(bound) <= first).saturating_sub(1);
            for (range, own) in members.iter_mut().enumerate().skip(range) {
                if i128::from(bounds[range]) >= behind {
                    break;
                }
                let (from, to) = (count(bounds[range]), count(bounds[range + 1]));
                if from < to {
                    let start = start + (step * from) as i64 + shift(range);
                    own.0.push((before + from, Progression { start, step, len: to - from }));
                }
            }
            before += len;
        }
        members
    }

    /// The progressions, each with the index of its first token.
    pub fn progressions(&self) -> impl Iterator<Item = (usize, Progression)> + '_ {
        self.0.iter().copied()
    }

    /// Tokens with adjacent indices: the index of the first, and the positions of all.
    pub fn adjacent(&self) -> Result<Vec<(usize, Positions)>> {
        let adjacent = |a: &(usize, Progression), b: &(usize, Progression)| a.0 + a.1.len == b.0;
        let run = |run: &[(usize, Progression)]| {
            Ok((run[0].0, Positions::new(run.iter().map(|member| member.1))?))
        };
        self.0.chunk_by(adjacent).map(run).collect()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One past the last position, at least 0.
    fn end(&self) -> i64 {
        let ends = self.0.iter().map(|(_, progression)| progression.last() as i64 + 1);
        ends.max().unwrap_or(0).max(0)
    }
}

/// Tokens of a tensor whose positions are one residue within a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens {
    /// Where the segment starts.
    pub segment: i64,
    /// Which tokens they are.
    pub indices: Steps,
    /// Their positions.
    pub positions: Progression,
}

impl Tokens {
    /// From the first token to one past the last.
    fn span(&self) -> usize {
        self.indices.step * (self.indices.count - 1) + 1
    }
}

/// Queries and keys of one residue and segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The queries.
    pub queries: Tokens,
    /// The keys.
    pub keys: Tokens,
}

/// The first segments that are the entries of one view, and how many there are: of both queries and
/// keys as many tokens, each segment as far behind the one before as the second is behind the first,
/// and no token in two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alike {
    /// Segments.
    pub count: usize,
    /// Tokens from one segment to the next, of queries and of keys.
    pub steps: (usize, usize),
}

impl Alike {
    /// How many of the first segments go together; at least one if there are any.
    pub fn of(segments: &[Segment]) -> Self {
        let one = Alike { count: segments.len().min(1), steps: (1, 1) };
        let [first, second, ..] = segments else { return one };
        let steps = |from: &Segment, to: &Segment| {
            let step = |from: Tokens, to: Tokens| {
                let looks = |tokens: Tokens| (tokens.indices.step, tokens.indices.count);
                let step = to.indices.first.checked_sub(from.indices.first)?;
                (looks(from) == looks(to) && step > 0).then_some(step)
            };
            Some((step(from.queries, to.queries)?, step(from.keys, to.keys)?))
        };
        let Some(expected) = steps(first, second) else { return one };
        // Segments follow each other, or all begin within the first step of the first.
        let most = |tokens: Tokens, step: usize| match step >= tokens.span() {
            true => usize::MAX,
            false => (tokens.indices.step - 1) / step + 1,
        };
        let most = most(first.queries, expected.0).min(most(first.keys, expected.1));
        let goes_on = |pair: &&[Segment]| steps(&pair[0], &pair[1]) == Some(expected);
        let count = 1 + segments.windows(2).take(most - 1).take_while(goes_on).count();
        if count == 1 { one } else { Alike { count, steps: expected } }
    }
}

/// Every progression of queries with every progression of keys, where their positions are congruent
/// modulo `modulus`: residue by residue. `None` if there are more than `most` segments, or far more
/// residues to look at.
///
/// ```
/// use longspan_pattern::{Positions, residues::{Alike, Members, strided}};
///
/// let all = Members::all(&Positions::range(0, 10)?);
/// let segments = strided(&all, &all, 4, 100).unwrap();
/// // 0, 4, 8 and 1, 5, 9; then 2, 6 and 3, 7.
/// assert_eq!(segments.len(), 4);
/// assert_eq!(Alike::of(&segments), Alike { count: 2, steps: (1, 1) });
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub fn strided(
    queries: &Members,
    keys: &Members,
    modulus: u64,
    most: usize,
) -> Option<Vec<Segment>> {
    let modulus = modulus as i64;
    let (mut segments, mut looked) = (Vec::new(), 0_usize);
    for (query_index, query) in queries.progressions() {
        let period = Congruence::new(query.step as i64, modulus).period as usize;
        for (key_index, key) in keys.progressions() {
            let congruence = Congruence::new(key.step as i64, modulus);
            // Most residues of the queries may be of no key.
            looked = looked.saturating_add(period.min(query.len));
            if looked / LOOKS > most {
                return None;
            }
            for first in 0..period.min(query.len) {
                let position = query.start + (query.step * first) as i64;
                let Some(first_key) = congruence.first(key.start - position) else { continue };
                let first_key = first_key as usize;
                if first_key >= key.len {
                    continue;
                }
                if segments.len() == most {
                    return None;
                }
                segments.push(Segment {
                    queries: every(query_index, query, first, period, 0),
                    keys: every(key_index, key, first_key, congruence.period as usize, 0),
                });
            }
        }
    }
    Some(segments)
}

/// Every `period`-th token of a progression from the `first` on.
fn every(
    index: usize,
    Progression { start, step, len }: Progression,
    first: usize,
    period: usize,
    segment: i64,
) -> Tokens {
    let count = (len - 1 - first) / period + 1;
    // A period of more than all tokens is that of a single one.
    let period = if count == 1 { 1 } else { period };
    Tokens {
        segment,
        indices: Steps { first: index + first, step: period, count },
        positions: Progression {
            start: start + (step * first) as i64,
            step: step * period,
            len: count,
        },
    }
}

/// Every progression of queries with every progression of keys in the same segment of `length`
/// positions from 0 on, at positions `offset` modulo `rate` from its start. `None` if there are more
/// than `most` of them.
pub fn dilated(
    queries: &Members,
    keys: &Members,
    (length, rate, offset): (u64, u64, u64),
    most: usize,
) -> Option<Vec<Segment>> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let (rate, offset) = (rate as i64, offset as i64);
    let branch = (length, rate, offset);
    let all_queries = tokens_of(queries, (0, queries.end()), branch, most)?;
    let starts = || all_queries.iter().map(|tokens| tokens.segment);
    let (Some(first), Some(last)) = (starts().min(), starts().max()) else {
        return Some(Vec::new());
    };
    let mut by_segment: HashMap<i64, Vec<Tokens>> = HashMap::new();
    let end = last.saturating_add(length).min(keys.end());
    for tokens in tokens_of(keys, (first, end), branch, most)? {
        by_segment.entry(tokens.segment).or_default().push(tokens);
    }
    let mut segments = Vec::new();
    for queries in all_queries {
        for &keys in by_segment.get(&queries.segment).into_iter().flatten() {
            if segments.len() == most {
                return None;
            }
            segments.push(Segment { queries, keys });
        }
    }
    Some(segments)
}

/// Tokens at positions `offset` modulo `rate` of each segment of `length` positions between two, the
/// first of which starts a segment; in the order of progressions and segments. `None` if more than
/// `most` segments have some.
fn tokens_of(
    members: &Members,
    (from, end): (i64, i64),
    (length, rate, offset): (i64, i64, i64),
    most: usize,
) -> Option<Vec<Tokens>> {
    let mut found = Vec::new();
    for (index, progression) in members.progressions() {
        let (start, step) = (progression.start, progression.step as i64);
        let congruence = Congruence::new(step, rate);
        let end = end.min(progression.last() as i64 + 1);
        let mut segment = start.max(from) / length * length;
        while segment < end {
            let next = segment.saturating_add(length).min(end);
            // Indices i in the progression with segment ≤ start + step · i < next.
            let low = ((segment - start).max(0) + step - 1) / step;
            let high = (next - start + step - 1) / step;
            if let Some(first) = congruence.first(start - segment - offset) {
                let first = low + (first - low).rem_euclid(congruence.period);
                if first < high {
                    if found.len() == most {
                        return None;
                    }
                    let part = Progression { len: high as usize, ..progression };
                    let (first, period) = (first as usize, congruence.period as usize);
                    found.push(every(index, part, first, period, segment));
                }
            }
            segment = segment.saturating_add(length);
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(start: i64, step: usize, len: usize) -> Progression {
        Progression { start, step, len }
    }

    /// Every token at its offset in a segment is in one of the lists, with its position.
    #[test]
    fn tokens_are_those_of_the_offset() {
        let mut seen = 0;
        for (start, step, len) in
            [(0, 1, 50), (3, 1, 40), (1, 4, 20), (5, 6, 11), (-7, 1, 30), (90, 3, 9), (2, 7, 1)]
        {
            let all = Positions::new([steps(0, 1, 2), steps(start, step, len)]).unwrap();
            for (length, rate) in [(100, 1), (16, 4), (10, 3), (7, 7), (100, 64), (5, 6)] {
                for offset in 0..rate {
                    let members = Members::all(&all);
                    let of = |most| tokens_of(&members, (0, 100), (length, rate, offset), most);
                    let found = of(usize::MAX).unwrap();
                    assert_eq!(of(found.len()).as_ref(), Some(&found));
                    assert!(found.is_empty() || of(found.len() - 1).is_none());
                    let mut indices = Vec::new();
                    for tokens in &found {
                        for (i, index) in tokens.indices.indices().enumerate() {
                            let position =
                                tokens.positions.start + (i * tokens.positions.step) as i64;
                            assert_eq!(all.get(index), Some(position));
                            assert_eq!(position / length * length, tokens.segment);
                            indices.push(index);
                        }
                    }
                    let expected: Vec<_> = (0..all.len())
                        .filter(|&index| {
                            let position = all.get(index).unwrap();
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

    /// Every pair of congruent positions is in one segment, and groups of segments are disjoint views.
    #[test]
    fn pairs_are_the_congruent_ones() {
        let maps = [
            vec![steps(0, 1, 50)],
            vec![steps(-9, 1, 20), steps(30, 3, 7)],
            vec![steps(5, 6, 11), steps(2, 4, 9), steps(1, 1, 1)],
        ];
        let mut joined = 0;
        for queries in &maps {
            for keys in &maps {
                let [queries, keys] =
                    [queries, keys].map(|map| Positions::new(map.iter().copied()).unwrap());
                for modulus in [1, 2, 3, 4, 6, 7, 64] {
                    let [q, k] = [&queries, &keys].map(Members::all);
                    let segments = strided(&q, &k, modulus, usize::MAX).unwrap();
                    let mut pairs = Vec::new();
                    for segment in &segments {
                        for query in segment.queries.indices.indices() {
                            pairs.extend(segment.keys.indices.indices().map(|key| (query, key)));
                        }
                    }
                    let position = |map: &Positions, index| map.get(index).unwrap();
                    let holds = |&(q, k): &(usize, usize)| {
                        let distance = position(&queries, q) - position(&keys, k);
                        distance.rem_euclid(modulus as i64) == 0
                    };
                    let all = (0..queries.len()).flat_map(|q| (0..keys.len()).map(move |k| (q, k)));
                    let expected: Vec<_> = all.filter(holds).collect();
                    pairs.sort_unstable();
                    assert_eq!(pairs, expected);
                    assert_eq!(strided(&q, &k, modulus, segments.len() - 1), None);
                    let mut rest = &segments[..];
                    while !rest.is_empty() {
                        let Alike { count, steps } = Alike::of(rest);
                        let group = &rest[..count];
                        type Side = fn(&Segment) -> Tokens;
                        let (queries, keys): (Side, Side) = (|s| s.queries, |s| s.keys);
                        for (of, step) in [(queries, steps.0), (keys, steps.1)] {
                            let first = of(&group[0]).indices.first;
                            for (entry, segment) in group.iter().enumerate() {
                                assert_eq!(of(segment).indices.first, first + entry * step);
                            }
                            let tokens = group.iter().flat_map(|s| of(s).indices.indices());
                            let mut tokens: Vec<_> = tokens.collect();
                            let all = tokens.len();
                            tokens.sort_unstable();
                            tokens.dedup();
                            assert_eq!(tokens.len(), all);
                        }
                        joined += usize::from(count > 1);
                        rest = &rest[count..];
                    }
                }
            }
        }
        assert!(joined > 20, "{joined}");
    }

    /// Every token is in the range of its position, at its index.
    #[test]
    fn tokens_are_in_the_ranges_of_their_positions() {
        let progressions = [(3, 1, 40), (90, 3, 9), (44, 7, 6), (-2, 2, 4), (50, 1, 1)];
        let positions = progressions.map(|(start, step, len)| steps(start, step, len));
        let positions = Positions::new(positions).unwrap();
        let bounds = [0, 5, 5, 43, 44, 60, 100, 101];
        let found = Members::in_ranges(&positions, &bounds, |range| -bounds[range]);
        let mut seen = 0;
        for (range, members) in found.iter().enumerate() {
            for (index, Progression { start, step, len }) in members.progressions() {
                for i in 0..len {
                    let position = start + (step * i) as i64 + bounds[range];
                    assert_eq!(positions.get(index + i), Some(position));
                    assert!((bounds[range]..bounds[range + 1]).contains(&position));
                    seen += 1;
                }
            }
        }
        let inside = |&index: &usize| (0..101).contains(&positions.get(index).unwrap());
        assert_eq!(seen, (0..positions.len()).filter(inside).count());
    }

    #[test]
    fn adjacent_tokens_are_together() {
        let members = |list: &[(usize, i64, usize)]| {
            let member = |&(index, start, len)| (index, steps(start, 1, len));
            Members(list.iter().map(member).collect()).adjacent().unwrap()
        };
        let runs = members(&[(2, 0, 3), (5, 10, 2), (9, 20, 1)]);
        assert_eq!(
            runs.iter().map(|run| (run.0, run.1.len())).collect::<Vec<_>>(),
            [(2, 5), (9, 1)]
        );
    }
}
