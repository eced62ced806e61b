//! Evaluates a pattern per row and per block of a frame. Used by compilation, masks and contents.
//!
//! [`Evaluator::row`] runs the coverage queries of a row and cuts the intervals at block edges
//! (`block_ranges.rs`). Where that leaves a block Unknown, [`Evaluator::classify`] evaluates its
//! bits.
//!
//! Queries and keys are lists of progressions. There is one coverage query per pair of
//! progressions, and the intervals for the queries of one row are joined. With many progressions
//! of keys, only those that the row can attend to are queried (`key_index.rs`).

use std::ops::Range;

use super::block_ranges::{BlockRange, cut};
use super::key_index::KeyIndex;
use crate::coverage::interval::{Interval, join, push};
use crate::coverage::{Edges, KeyRange, LoweredPattern, PositionRange};
use crate::meter::{INTERVAL, Meter};
use crate::pattern::Pattern;
use crate::positions::{Positions, TokenRange};
use crate::shape::Frame;

/// Maximum number of key progressions for which repeating rows are searched: with more, the search
/// takes longer than it saves.
const MAX_REPEAT_RANGES: usize = 64;

/// The exact class of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockClass {
    Empty,
    Full,
    Partial,
}

/// A pattern, lowered for one frame.
pub(crate) struct Evaluator<'a> {
    frame: &'a Frame,
    lowered: LoweredPattern,
    index: Option<KeyIndex>,
    intervals: Vec<Interval>,
    found: Vec<Interval>,
    joined: Vec<Interval>,
    words: Vec<u64>,
    edges: Edges,
}

impl<'a> Evaluator<'a> {
    pub(crate) fn new(pattern: &Pattern, frame: &'a Frame) -> Self {
        Evaluator {
            frame,
            lowered: LoweredPattern::new(pattern, frame.valid.as_ref(), view(&frame.keys)),
            index: KeyIndex::new(&frame.keys),
            intervals: Vec::new(),
            found: Vec::new(),
            joined: Vec::new(),
            words: vec![0; frame.block.get()],
            edges: Edges::default(),
        }
    }

    /// Replaces `out` by the ranges of a row, ascending.
    pub(crate) fn row(&mut self, row: u32, meter: &mut Meter<'_>, out: &mut Vec<BlockRange>) {
        self.intervals.clear();
        for (offset, queries) in position_ranges(&self.frame.queries, self.frame.row_tokens(row)) {
            self.found.clear();
            self.coverage(queries, meter);
            if offset == 0 {
                std::mem::swap(&mut self.intervals, &mut self.found);
            } else {
                self.joined.clear();
                meter.spend(INTERVAL * (self.intervals.len() + self.found.len()) as u64);
                join(&self.intervals, &self.found, &mut self.joined);
                std::mem::swap(&mut self.intervals, &mut self.joined);
            }
        }
        out.clear();
        meter.spend(INTERVAL * self.intervals.len() as u64);
        cut(&self.intervals, self.frame, out);
    }

    /// Whether whole blocks of a diagonal have the same mask: see `diagonal.rs`.
    pub(crate) fn is_toeplitz(&self) -> bool {
        match (self.frame.queries.token_ranges(), self.frame.keys.token_ranges()) {
            ([queries], [keys]) => queries.step == keys.step && self.lowered.is_toeplitz(),
            _ => false,
        }
    }

    /// The number of rows after `row` that equal it with some blocks moved by one per row; `None`
    /// if there are none in this frame.
    pub(crate) fn repeating_rows(&mut self, row: u32, meter: &mut Meter<'_>) -> Option<u32> {
        let Evaluator { frame, lowered, edges, .. } = self;
        let block = frame.block.get() as i64;
        let token_ranges = frame.keys.token_ranges();
        if token_ranges.len() > MAX_REPEAT_RANGES {
            return None;
        }
        let tokens = frame.row_tokens(row);
        let Some(queries) = only_range(&frame.queries, tokens.clone()) else { return Some(0) };
        if queries.len < block {
            return Some(0);
        }
        // Whole rows that follow in the same progression.
        let current = &frame.queries.token_ranges()[frame.queries.token_range_of(tokens.start)];
        let mut rows = (current.local + current.len - tokens.end) / block;
        for token_range in token_ranges {
            let keys = KeyRange {
                start: token_range
                    .start
                    .checked_sub(token_range.local.checked_mul(token_range.step)?)?,
                step: token_range.step,
                low: token_range.local,
                high: token_range.local + token_range.len,
                block,
                max_intervals: 0,
            };
            rows = rows.min(lowered.edges(queries, keys, meter, edges)?);
            if rows == 0 {
                break;
            }
            rows = rows.min(edges.rows_apart(block));
        }
        Some(rows.min((frame.rows.end - 1 - row).into()) as u32)
    }

    /// Appends to `found` the intervals of `queries`, by local key index.
    fn coverage(&mut self, queries: PositionRange, meter: &mut Meter<'_>) {
        let Evaluator { frame, lowered, index, found, joined: scratch, .. } = self;
        let (block, max_intervals) = (frame.divisor.by, frame.max_intervals());
        let token_ranges = frame.keys.token_ranges();
        let mut query_token_range =
            |lowered: &mut LoweredPattern, token_range: &TokenRange, meter: &mut Meter<'_>| {
                let (start, step, high) = (token_range.start, token_range.step, token_range.len);
                let keys = KeyRange { start, step, low: 0, high, block, max_intervals };
                if token_range.local == 0 {
                    return lowered.coverage(queries, keys, meter, found);
                }
                scratch.clear();
                lowered.coverage(queries, keys, meter, scratch);
                meter.spend(INTERVAL * scratch.len() as u64);
                for interval in &*scratch {
                    let (start, end) =
                        (interval.start + token_range.local, interval.end + token_range.local);
                    push(found, Interval { start, end, ..*interval });
                }
            };
        match index {
            None => token_ranges
                .iter()
                .for_each(|token_range| query_token_range(lowered, token_range, meter)),
            Some(index) => {
                for &chosen in index.choose(lowered, queries, (block, max_intervals), meter) {
                    query_token_range(lowered, &token_ranges[chosen as usize], meter);
                }
            }
        }
    }

    /// Evaluates the bits of a block until its class is decided.
    pub(crate) fn classify(&mut self, row: u32, column: u32, meter: &mut Meter<'_>) -> BlockClass {
        let (mut active, mut masked) = (false, false);
        let Evaluator { frame, lowered, words, .. } = self;
        for (_, queries) in position_ranges(&frame.queries, frame.row_tokens(row)) {
            // One query mostly has both an active and a masked pair.
            for part in [queries.part(0, 1), queries.part(queries.len - 1, 1), queries] {
                let words = &mut words[..part.len as usize];
                for (_, keys) in position_ranges(&frame.keys, frame.column_tokens(column)) {
                    for keys in words_of(keys) {
                        lowered.fill(part, keys, meter, words);
                        let all = u64::MAX >> (64 - keys.len);
                        active |= words.iter().any(|&word| word != 0);
                        masked |= words.iter().any(|&word| word != all);
                        if active && masked {
                            return BlockClass::Partial;
                        }
                    }
                }
            }
        }
        if active { BlockClass::Full } else { BlockClass::Empty }
    }

    /// Replaces `out` by the mask of a block, [`BlockSize::words`](crate::BlockSize::words) words
    /// per query.
    pub(crate) fn mask(&mut self, row: u32, column: u32, meter: &mut Meter<'_>, out: &mut [u64]) {
        let Evaluator { frame, lowered, words, .. } = self;
        let per_row = frame.block.words();
        out.fill(0);
        for (first_row, queries) in position_ranges(&frame.queries, frame.row_tokens(row)) {
            let words = &mut words[..queries.len as usize];
            for (offset, keys) in position_ranges(&frame.keys, frame.column_tokens(column)) {
                let mut at = offset as usize;
                for keys in words_of(keys) {
                    lowered.fill(queries, keys, meter, words);
                    let rows = out[first_row as usize * per_row..].chunks_exact_mut(per_row);
                    let (word, shift) = (at / 64, at % 64);
                    for (row, &bits) in rows.zip(&*words) {
                        row[word] |= bits << shift;
                        if shift > 0 && word + 1 < per_row {
                            row[word + 1] |= bits >> (64 - shift);
                        }
                    }
                    at += keys.len as usize;
                }
            }
        }
    }

    /// See [`LoweredPattern::signature`].
    pub(crate) fn signature(
        &mut self,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Option<&[i64]> {
        let queries = only_range(&self.frame.queries, self.frame.row_tokens(row))?;
        let keys = only_range(&self.frame.keys, self.frame.column_tokens(column))?;
        self.lowered.signature(queries, keys, meter)
    }
}

/// The range of key positions.
fn view(keys: &Positions) -> Range<i64> {
    keys.extremes().map_or(0..0, |(first, last)| first..last + 1)
}

/// The progressions of a range of local tokens, each with its offset in the range.
fn position_ranges(
    positions: &Positions,
    tokens: Range<i64>,
) -> impl Iterator<Item = (i64, PositionRange)> + '_ {
    let token_ranges = positions.token_ranges();
    let first = if token_ranges.len() == 1 || tokens.is_empty() {
        0
    } else {
        positions.token_range_of(tokens.start)
    };
    token_ranges[first..].iter().take_while(move |token_range| token_range.local < tokens.end).map(
        move |token_range| {
            let start = tokens.start.max(token_range.local);
            let len = tokens.end.min(token_range.local + token_range.len) - start;
            let whole = PositionRange {
                start: token_range.start,
                step: token_range.step,
                len: token_range.len,
            };
            (start - tokens.start, whole.part(start - token_range.local, len))
        },
    )
}

/// The progression of a range of local tokens, if it is only one.
fn only_range(positions: &Positions, tokens: Range<i64>) -> Option<PositionRange> {
    let len = tokens.end - tokens.start;
    let (_, range) = position_ranges(positions, tokens).next()?;
    (range.len == len).then_some(range)
}

/// Keys in groups of at most 64.
fn words_of(keys: PositionRange) -> impl Iterator<Item = PositionRange> {
    (0..keys.len).step_by(64).map(move |start| keys.part(start, (keys.len - start).min(64)))
}
