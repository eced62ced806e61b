//! From positions to blocks: what a row of query blocks has along the keys.
//!
//! [`Walker::row`] asks the plan about the row's queries and cuts the answer at block edges:
//!
//! ```text
//! segments of keys   ··[ Mixed )[      Full       )[Mixed)····[ Unknown )··
//! blocks             |     |     |     |     |     |     |     |     |
//! pieces                [ Mixed ][ Full          ][Mixed ]  [ Unknown    ]
//! ```
//!
//! A block inside one segment has that segment's class. A block with several, or with a gap, is
//! Mixed as soon as one part shows a pair that is seen and one a pair that isn't; where that can't
//! be told it is Unknown, and [`Walker::classify`] looks at its positions.
//!
//! Queries and keys at hand are lists of progressions. The plan is asked for each pair of
//! progressions, answers for the queries of one row are joined, and with many progressions of keys
//! only those are asked about that hold positions which the row can see at all.

use std::ops::Range;

use crate::meter::{Meter, SEGMENT};
use crate::pattern::Pattern;
use crate::plan::arith::gcd;
use crate::plan::segment::{Class, Segment, join, push};
use crate::plan::{Band, Edges, Keys, Plan};
use crate::positions::{Piece, Positions};
use crate::shape::Frame;

/// A stretch of blocks with one answer. Blocks `period` apart have the same mask; 0 promises
/// nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) class: Class,
    pub(crate) period: u32,
}

/// What a look at the positions of a block shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    Nothing,
    Everything,
    Some,
}

/// Answers for rows and blocks of one pattern in one frame.
pub(crate) struct Walker<'a> {
    frame: &'a Frame,
    plan: Plan,
    index: Option<Index>,
    answer: Vec<Segment>,
    found: Vec<Segment>,
    joined: Vec<Segment>,
    words: Vec<u64>,
    edges: Edges,
}

impl<'a> Walker<'a> {
    pub(crate) fn new(pattern: &Pattern, frame: &'a Frame) -> Self {
        Walker {
            frame,
            plan: Plan::new(pattern, frame.valid.as_ref(), view(&frame.keys)),
            index: Index::new(&frame.keys),
            answer: Vec::new(),
            found: Vec::new(),
            joined: Vec::new(),
            words: vec![0; frame.block.get()],
            edges: Edges::default(),
        }
    }

    /// Replaces `out` by what the row has, ascending.
    pub(crate) fn row(&mut self, row: u32, meter: &mut Meter<'_>, out: &mut Vec<Stretch>) {
        self.answer.clear();
        for (offset, band) in bands(&self.frame.queries, self.frame.row_tokens(row)) {
            self.found.clear();
            self.ask(band, meter);
            if offset == 0 {
                std::mem::swap(&mut self.answer, &mut self.found);
            } else {
                self.joined.clear();
                meter.spend(SEGMENT * (self.answer.len() + self.found.len()) as u64);
                join(&self.answer, &self.found, &mut self.joined);
                std::mem::swap(&mut self.answer, &mut self.joined);
            }
        }
        out.clear();
        meter.spend(SEGMENT * self.answer.len() as u64);
        cut(&self.answer, self.frame, out);
    }

    /// Whether whole blocks of a diagonal have the same mask: see `diagonal.rs`.
    pub(crate) fn by_difference(&self) -> bool {
        match (self.frame.queries.pieces(), self.frame.keys.pieces()) {
            ([queries], [keys]) => queries.step == keys.step && self.plan.by_difference(),
            _ => false,
        }
    }

    /// How many rows after `row` are this row with some of its blocks moved along by one a row;
    /// `None` if that can't happen in this frame.
    pub(crate) fn steady(&mut self, row: u32, meter: &mut Meter<'_>) -> Option<u32> {
        let Walker { frame, plan, edges, .. } = self;
        let block = frame.block.get() as i64;
        let pieces = frame.keys.pieces();
        if pieces.len() > MOST_STEADY {
            return None;
        }
        let tokens = frame.row_tokens(row);
        let Some(band) = only_band(&frame.queries, tokens.clone()) else { return Some(0) };
        if band.len < block {
            return Some(0);
        }
        // Whole rows that follow in the same progression of queries.
        let held = &frame.queries.pieces()[frame.queries.piece_of(tokens.start)];
        let mut rows = (held.local + held.len - tokens.end) / block;
        for piece in pieces {
            let keys = Keys {
                start: piece.start.checked_sub(piece.local.checked_mul(piece.step)?)?,
                step: piece.step,
                low: piece.local,
                high: piece.local + piece.len,
                block,
                most: 0,
            };
            rows = rows.min(plan.edges(band, keys, meter, edges)?);
            if rows == 0 {
                break;
            }
            rows = rows.min(edges.rows_apart(block));
        }
        Some(rows.min((frame.rows.end - 1 - row).into()) as u32)
    }

    /// Appends to `found` what the band sees, by local key number.
    fn ask(&mut self, band: Band, meter: &mut Meter<'_>) {
        let Walker { frame, plan, index, found, joined: scratch, .. } = self;
        let (block, most) = (frame.divisor.by, frame.most_runs());
        let pieces = frame.keys.pieces();
        let mut ask_piece = |plan: &mut Plan, piece: &Piece, meter: &mut Meter<'_>| {
            let (start, step, high) = (piece.start, piece.step, piece.len);
            let keys = Keys { start, step, low: 0, high, block, most };
            if piece.local == 0 {
                return plan.ask(band, keys, meter, found);
            }
            scratch.clear();
            plan.ask(band, keys, meter, scratch);
            meter.spend(SEGMENT * scratch.len() as u64);
            for segment in &*scratch {
                let (start, end) = (segment.start + piece.local, segment.end + piece.local);
                push(found, Segment { start, end, ..*segment });
            }
        };
        match index {
            None => pieces.iter().for_each(|piece| ask_piece(plan, piece, meter)),
            Some(index) => {
                for &chosen in index.choose(plan, band, (block, most), meter) {
                    ask_piece(plan, &pieces[chosen as usize], meter);
                }
            }
        }
    }

    /// Looks at the positions of a block, no further than needed.
    pub(crate) fn classify(&mut self, row: u32, column: u32, meter: &mut Meter<'_>) -> Seen {
        let (mut seen, mut unseen) = (false, false);
        let Walker { frame, plan, words, .. } = self;
        for (_, band) in bands(&frame.queries, frame.row_tokens(row)) {
            // One query of a block mostly shows both a pair that is seen and one that isn't.
            for part in [band.part(0, 1), band.part(band.len - 1, 1), band] {
                let words = &mut words[..part.len as usize];
                for (_, keys) in bands(&frame.keys, frame.column_tokens(column)) {
                    for keys in words_of(keys) {
                        plan.fill(part, keys, meter, words);
                        let all = u64::MAX >> (64 - keys.len);
                        seen |= words.iter().any(|&word| word != 0);
                        unseen |= words.iter().any(|&word| word != all);
                        if seen && unseen {
                            return Seen::Some;
                        }
                    }
                }
            }
        }
        if seen { Seen::Everything } else { Seen::Nothing }
    }

    /// Replaces `out` by the mask of a block, [`BlockSize::words`](crate::BlockSize::words) words
    /// a query.
    pub(crate) fn mask(&mut self, row: u32, column: u32, meter: &mut Meter<'_>, out: &mut [u64]) {
        let Walker { frame, plan, words, .. } = self;
        let per_row = frame.block.words();
        out.fill(0);
        for (first_row, band) in bands(&frame.queries, frame.row_tokens(row)) {
            let words = &mut words[..band.len as usize];
            for (offset, keys) in bands(&frame.keys, frame.column_tokens(column)) {
                let mut at = offset as usize;
                for keys in words_of(keys) {
                    plan.fill(band, keys, meter, words);
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

    /// What the mask of a block depends on, if that is short: see
    /// [`Plan::signature`].
    pub(crate) fn signature(
        &mut self,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Option<&[i64]> {
        let queries = only_band(&self.frame.queries, self.frame.row_tokens(row))?;
        let keys = only_band(&self.frame.keys, self.frame.column_tokens(column))?;
        self.plan.signature(queries, keys, meter)
    }
}

/// The positions that keys have.
fn view(keys: &Positions) -> Range<i64> {
    keys.extremes().map_or(0..0, |(first, last)| first..last + 1)
}

/// The progressions that make up a range of local tokens, each with its offset in the range.
fn bands(positions: &Positions, tokens: Range<i64>) -> impl Iterator<Item = (i64, Band)> + '_ {
    let pieces = positions.pieces();
    let first =
        if pieces.len() == 1 || tokens.is_empty() { 0 } else { positions.piece_of(tokens.start) };
    pieces[first..].iter().take_while(move |piece| piece.local < tokens.end).map(move |piece| {
        let start = tokens.start.max(piece.local);
        let len = tokens.end.min(piece.local + piece.len) - start;
        let band = Band { start: piece.start, step: piece.step, len: piece.len };
        (start - tokens.start, band.part(start - piece.local, len))
    })
}

/// The progression of a range of local tokens, if it is only one.
fn only_band(positions: &Positions, tokens: Range<i64>) -> Option<Band> {
    let len = tokens.end - tokens.start;
    let (_, band) = bands(positions, tokens).next()?;
    (band.len == len).then_some(band)
}

/// Keys in groups of at most 64.
fn words_of(keys: Band) -> impl Iterator<Item = Band> {
    (0..keys.len).step_by(64).map(move |start| keys.part(start, (keys.len - start).min(64)))
}

/// Cuts a row's answer at block edges.
fn cut(segments: &[Segment], frame: &Frame, out: &mut Vec<Stretch>) {
    let blocks = frame.divisor;
    let block = blocks.by;
    let total = frame.keys.len() as i64;
    let mut edge = Edge::default();
    for &Segment { start, end, class, period } in segments {
        let first = blocks.floor(start);
        // A last block that is cut short counts as whole only where it needs no mask.
        let whole_end = if class == Class::Full && end == total {
            i64::from(frame.columns)
        } else {
            blocks.floor(end)
        };
        let whole_start = first + i64::from(first * block < start);
        if whole_start > first {
            edge.add(first, end.min(whole_start * block) - start, class, frame, out);
        }
        if whole_start < whole_end {
            edge.flush(frame, out);
            let period = match period {
                0 | 1 => period,
                _ => (i64::from(period) / gcd(period.into(), block)) as u32,
            };
            let (start, end) = (whole_start as u32, whole_end as u32);
            out.push(Stretch { start, end, class, period });
        }
        let rest = end - whole_start.max(whole_end) * block;
        if rest > 0 {
            edge.add(whole_start.max(whole_end), rest, class, frame, out);
        }
    }
    edge.flush(frame, out);
}

/// A block that more than one segment touches.
#[derive(Default)]
struct Edge {
    block: i64,
    covered: i64,
    seen: bool,
    unseen: bool,
    unknown: bool,
}

impl Edge {
    fn add(
        &mut self,
        block: i64,
        tokens: i64,
        class: Class,
        frame: &Frame,
        out: &mut Vec<Stretch>,
    ) {
        if self.block != block {
            self.flush(frame, out);
            self.block = block;
        }
        self.covered += tokens;
        self.seen |= class != Class::Unknown;
        self.unseen |= class == Class::Mixed;
        self.unknown |= class == Class::Unknown;
    }

    #[inline]
    fn flush(&mut self, frame: &Frame, out: &mut Vec<Stretch>) {
        if self.covered > 0 {
            self.finish(frame, out);
        }
    }

    #[cold]
    fn finish(&mut self, frame: &Frame, out: &mut Vec<Stretch>) {
        let Edge { block, covered, seen, unseen, unknown } = std::mem::take(self);
        let tokens = frame.column_tokens(block as u32);
        let unseen = unseen || covered < tokens.end - tokens.start;
        let class = match (seen, unseen, unknown) {
            (true, true, _) => Class::Mixed,
            (_, _, true) => Class::Unknown,
            _ => Class::Full,
        };
        let start = block as u32;
        out.push(Stretch { start, end: start + 1, class, period: 0 });
    }
}

/// Finds the progressions of keys that a band can see, where there are many.
struct Index {
    /// First and last position and number of each progression, by first position.
    pieces: Vec<(i64, i64, u32)>,
    /// The farthest last position up to and including each of them.
    reach: Vec<i64>,
    seen: Vec<Segment>,
    chosen: Vec<u32>,
}

/// Up to this many progressions are simply all asked: fewer questions than finding out which.
const FEW: usize = 4;

/// With more progressions of keys than this, looking for rows that repeat takes longer than it
/// saves.
const MOST_STEADY: usize = 64;

impl Index {
    fn new(keys: &Positions) -> Option<Self> {
        if keys.pieces().len() <= FEW {
            return None;
        }
        let mut pieces: Vec<_> =
            (0..).zip(keys.pieces()).map(|(i, p)| (p.start, p.last(), i)).collect();
        pieces.sort_unstable();
        let mut farthest = i64::MIN;
        let reach = pieces
            .iter()
            .map(|piece| {
                farthest = farthest.max(piece.1);
                farthest
            })
            .collect();
        Some(Index { pieces, reach, seen: Vec::new(), chosen: Vec::new() })
    }

    /// The numbers of the progressions worth asking about, ascending. What the band sees of all
    /// positions, held or not, tells where to look.
    fn choose(
        &mut self,
        plan: &mut Plan,
        band: Band,
        (block, most): (i64, usize),
        meter: &mut Meter<'_>,
    ) -> &[u32] {
        let Index { pieces, reach, seen, chosen } = self;
        let start = pieces[0].0;
        let end = reach[reach.len() - 1] + 1;
        seen.clear();
        let keys = Keys { start, step: 1, low: 0, high: end - start, block, most };
        plan.ask(band, keys, meter, seen);
        meter.spend(SEGMENT * seen.len() as u64);
        chosen.clear();
        let mut seen = seen.iter().peekable();
        while let Some(segment) = seen.next() {
            let (low, mut high) = (segment.start + start, segment.end + start);
            while let Some(next) = seen.next_if(|next| next.start + start - high < block) {
                high = next.end + start;
            }
            let from = reach.partition_point(|&last| last < low);
            let to = pieces.partition_point(|piece| piece.0 < high);
            let near = pieces[from..to.max(from)].iter();
            meter.spend(SEGMENT * near.len() as u64);
            chosen.extend(near.filter(|piece| piece.1 >= low).map(|piece| piece.2));
        }
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }
}
