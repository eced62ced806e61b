//! Who computes what, decided by layouts and shapes alone.
//!
//! Threads claim units of work one after the other; a unit's result depends on nothing but the
//! unit. So the same bits come out whatever the number of threads.
//!
//! A [`Stream`] is a batch entry and the query heads that share a key head and a layout: its keys
//! are read once for all of them. A forward [`Unit`] is a few neighbouring rows of blocks of a
//! stream. A row that
//! is heavier than a fixed share of all the work, such as that of a global token, or a single query
//! over a long cache, is cut into parts by its columns, and the states of the parts are merged.

pub(crate) mod backward;

use longspan_pattern::{Layout, Run, RunKind};

use crate::dims::Sizes;
use crate::layouts::Layouts;
use crate::simd::LANES;
use crate::tensor::size_of_list;

/// A row may be this part of all the work before it is cut: eight threads still find eight pieces
/// each.
const SHARE: u64 = 64;
/// Blocks of a part that are worth a merge.
const FEWEST: u64 = 32;
/// The most query tokens × heads that go through the keys together: keys and values are then read
/// from the outer caches once for all of them, and packed queries and sums still stay in the second
/// level.
const MOST_LANES: usize = 512;

/// Units that a call should have at least.
const UNITS: usize = 32;

/// Query heads that read the same keys under the same layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) entry: usize,
    pub(crate) key_head: usize,
    /// Query heads.
    pub(crate) heads: &'a [u32],
    /// The first row of the entry among all rows, and the rows per head.
    base: usize,
    queries: usize,
}

impl Stream<'_> {
    /// Tokens × heads of a whole row of blocks.
    pub(crate) fn lanes(&self) -> usize {
        self.layout.block().get().min(self.queries) * self.heads.len()
    }

    /// The number of a row among `[batch, head, token]`.
    pub(crate) fn row(&self, head: usize, token: usize) -> usize {
        self.base + head * self.queries + token
    }
}

#[derive(Debug, Clone, Copy)]
struct StreamEntry {
    entry: u32,
    key_head: u32,
    /// Its query heads among all listed.
    heads: (u32, u32),
}

/// Neighbouring rows of blocks of a stream, or a part of the columns of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) stream: u32,
    /// From the first row to before the second.
    pub(crate) rows: (u32, u32),
    /// From the first column to before the second.
    pub(crate) columns: (u32, u32),
    /// The first row of its state among those of parts, for a part.
    pub(crate) part: Option<u32>,
}

/// A row that was cut: `parts` states of `lanes` rows each, from `first` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) stream: u32,
    pub(crate) row: u32,
    pub(crate) first: u32,
    pub(crate) parts: u32,
    pub(crate) lanes: u32,
}

/// What becomes of rows that see no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EmptyRows {
    /// They are written: output 0.
    Write,
    /// They are left as they are, since nothing is added to them.
    Skip,
}

/// The work of a call.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    streams: Vec<StreamEntry>,
    heads: Vec<u32>,
    pub(crate) units: Vec<Unit>,
    pub(crate) cuts: Vec<Cut>,
    /// Rows of all parts' states.
    pub(crate) part_rows: usize,
    /// Tiles of the largest unit, and of the widest row.
    pub(crate) tiles: usize,
    pub(crate) row_tiles: usize,
    /// Runs and Partial blocks of the row that has most.
    pub(crate) pieces: usize,
    /// Active blocks × query heads.
    pub(crate) weight: u64,
}

impl Plan {
    pub(crate) fn bytes(&self) -> usize {
        let Plan { streams, heads, units, cuts, .. } = self;
        size_of_list(streams) + size_of_list(heads) + size_of_list(units) + size_of_list(cuts)
    }

    /// How many streams there are.
    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// A stream by its number.
    pub(crate) fn stream<'a>(
        &'a self,
        layouts: &'a Layouts,
        sizes: &Sizes,
        number: u32,
    ) -> Stream<'a> {
        let StreamEntry { entry, key_head, heads } = self.streams[number as usize];
        let heads = &self.heads[heads.0 as usize..heads.1 as usize];
        let entry = entry as usize;
        Stream {
            layout: layouts.get(entry, heads[0] as usize),
            entry,
            key_head: key_head as usize,
            heads,
            base: entry * sizes.heads * sizes.queries,
            queries: sizes.queries,
        }
    }

    /// Lists the streams of a call. Heads of a stream together have at most `most` lanes per row.
    pub(crate) fn list_streams(&mut self, layouts: &Layouts, sizes: &Sizes, most: usize) {
        self.streams.clear();
        self.heads.clear();
        if sizes.queries == 0 || sizes.key_heads == 0 {
            return;
        }
        let group = sizes.heads / sizes.key_heads;
        for entry in 0..sizes.batch {
            for key_head in 0..sizes.key_heads {
                let heads = key_head * group..(key_head + 1) * group;
                let index = |head| layouts.index(entry, head);
                for head in heads.clone() {
                    // The first head with a layout opens the streams of all that share it.
                    if (heads.start..head).any(|earlier| index(earlier) == index(head)) {
                        continue;
                    }
                    let layout = layouts.get(entry, head);
                    let tokens = layout.block().get().min(sizes.queries);
                    let heads_together = (most / tokens).max(1);
                    let mut open = 0;
                    for head in (head..heads.end).filter(|&other| index(other) == index(head)) {
                        if open == 0 || open == heads_together {
                            let at = self.heads.len() as u32;
                            let (entry, key_head) = (entry as u32, key_head as u32);
                            self.streams.push(StreamEntry { entry, key_head, heads: (at, at) });
                            open = 0;
                        }
                        self.heads.push(head as u32);
                        open += 1;
                        let last = self.streams.last_mut().expect("just pushed");
                        last.heads.1 = self.heads.len() as u32;
                    }
                }
            }
        }
    }

    /// Lists the units of the forward pass, parts of heavy rows first.
    pub(crate) fn forward(&mut self, layouts: &Layouts, sizes: &Sizes, empty_rows: EmptyRows) {
        self.list_streams(layouts, sizes, MOST_LANES);
        let mut units = std::mem::take(&mut self.units);
        let mut cuts = std::mem::take(&mut self.cuts);
        units.clear();
        cuts.clear();
        let (mut weight, mut part_rows) = (0, 0);
        let (mut tiles, mut row_tiles) = (0, 0);
        let streams = 0..self.streams.len() as u32;
        let rows = |number| self.stream(layouts, sizes, number).layout.rows().len();
        let rows = streams.map(rows).sum::<usize>();
        for number in 0..self.streams.len() as u32 {
            let stream = self.stream(layouts, sizes, number);
            let blocks: u64 = stream.layout.rows().map(|row| blocks_of(stream.layout, row)).sum();
            let lanes = stream.lanes();
            row_tiles = row_tiles.max(lanes.div_ceil(LANES));
            tiles = tiles.max(lanes.div_ceil(LANES) * together(lanes, rows) as usize);
            weight += blocks * stream.heads.len() as u64;
        }
        let pieces = layouts.distinct().iter().flat_map(|layout| {
            layout.rows().map(|row| layout.row(row).iter().map(pieces_of).sum::<usize>())
        });
        self.pieces = pieces.max().unwrap_or(0);
        let limit = (weight / SHARE).max(FEWEST);
        for number in 0..self.streams.len() as u32 {
            let stream = self.stream(layouts, sizes, number);
            let (layout, heads) = (stream.layout, stream.heads.len() as u64);
            for row in layout.rows() {
                let blocks = blocks_of(layout, row);
                let parts = (blocks * heads).div_ceil(limit).min(blocks.div_ceil(FEWEST / 2));
                if parts <= 1 {
                    continue;
                }
                let lanes = (layout.row_tokens(row).len() * stream.heads.len()) as u32;
                cuts.push(Cut {
                    stream: number,
                    row,
                    first: part_rows,
                    parts: parts as u32,
                    lanes,
                });
                let mut from = 0;
                for part in 0..parts {
                    let to = match part + 1 == parts {
                        true => layout.columns(),
                        false => column_after(layout, row, blocks * (part + 1) / parts),
                    };
                    let (columns, part) = ((from, to), Some(part_rows));
                    units.push(Unit { stream: number, rows: (row, row + 1), columns, part });
                    part_rows += lanes;
                    from = to;
                }
            }
        }
        // From the last row to the first: where rows differ, as in causal layouts, the heavy ones
        // come first and the light ones fill up the end.
        for number in 0..self.streams.len() as u32 {
            let stream = self.stream(layouts, sizes, number);
            let (layout, most) = (stream.layout, together(stream.lanes(), rows));
            let is_out = |row| {
                let cut = |cut: &Cut| (cut.stream, cut.row);
                (empty_rows == EmptyRows::Skip && layout.row(row).is_empty())
                    || cuts.binary_search_by_key(&(number, row), cut).is_ok()
            };
            let mut end = layout.rows().end;
            while end > layout.rows().start {
                let mut start = end - 1;
                if is_out(start) {
                    end = start;
                    continue;
                }
                while start > layout.rows().start && end - start < most && !is_out(start - 1) {
                    start -= 1;
                }
                let columns = (0, layout.columns());
                units.push(Unit { stream: number, rows: (start, end), columns, part: None });
                end = start;
            }
        }
        (self.units, self.cuts) = (units, cuts);
        (self.weight, self.part_rows) = (weight, part_rows as usize);
        (self.tiles, self.row_tiles) = (tiles, row_tiles);
    }
}

/// The most rows of a unit.
pub(crate) const MOST_ROWS: usize = 8;

/// How many of `rows` rows of so many lanes go through the keys together. Short calls keep units
/// for a few threads.
fn together(lanes: usize, rows: usize) -> u32 {
    (MOST_LANES / lanes.max(1)).min(rows / UNITS).clamp(1, MOST_ROWS) as u32
}

/// Active blocks of a row.
pub(crate) fn blocks_of(layout: &Layout, row: u32) -> u64 {
    layout.row(row).iter().map(|run| u64::from(run.len)).sum()
}

/// Into how many pieces a run falls: one, or each of its Partial blocks. Sharing with other rows
/// may cut a Full run in two.
pub(crate) fn pieces_of(run: &Run) -> usize {
    if run.kind() == RunKind::Full { 2 } else { run.len as usize }
}

/// The column after the first `blocks` active blocks of a row.
fn column_after(layout: &Layout, row: u32, mut blocks: u64) -> u32 {
    for run in layout.row(row) {
        let len = u64::from(run.len);
        if blocks <= len {
            return run.start + blocks as u32;
        }
        blocks -= len;
    }
    layout.columns()
}
