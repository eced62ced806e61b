//! Who adds what to which gradient, and in which order.
//!
//! One pass over the keys computes each score once, and writes three gradients. A unit is a *slab*
//! of keys of one key head: it holds their dK and dV in scratch while it goes through the queries
//! that see them, so these have one writer. dQ has many: every slab that a query sees. They take
//! turns. Queries are cut into *bands*, and for each band (and head) the slabs that touch it are a
//! *chain*: a slab waits for the one before it in the chain, adds its part, and lets the next one
//! go. The order is that of the keys, whatever the threads.
//!
//! ```text
//!            slab 0   slab 1   slab 2        a chain runs from left to right;
//! band 0       ·                             a unit goes from bottom to top, so that
//! band 1       · ────── ·                    in a causal or windowed layout the unit on
//! band 2       · ────── · ────── ·           its left has always been there before it
//! ```
//!
//! Units are claimed from left to right. The leftmost unit at work waits for nobody, so there is
//! always progress, with any number of threads.
//!
//! A slab that is a large part of all the work (a sink) is cut into parts by its bands, a band that
//! is (a global query) into several chains; each part and each chain but the first adds to a buffer
//! of its own, and the buffers are added up at the end, in order.

use std::ops::Range;

use longspan_pattern::Layout;

use super::Plan as Streams;
use crate::attention::Layouts;
use crate::check::Sizes;
use crate::error::Result;
use crate::exec::Monitor;

/// Keys of a slab: their five matrices have to stay in the second-level cache.
const SLAB: usize = 256;
/// Queries of a band, at least.
const BAND: usize = 256;
/// Bands of a long sequence, at most: the list of turns has slabs × bands entries.
const BANDS: usize = 1_024;
/// A slab may be this part of all the work before it is cut, and a chain that part.
const SLAB_SHARE: u64 = 32;
const CHAIN_SHARE: u64 = 8;
/// What is worth a buffer of its own, in pairs.
const FEWEST: u64 = 32 * 64 * 64;

/// A slab's turn at a band.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) band: u32,
    pub(crate) chain: u32,
    /// How many turns of the chain come before it.
    pub(crate) rank: u32,
    /// Pairs of active blocks.
    weight: u32,
}

/// The turns of one layout.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Those of slab `s` are from `starts[s]` to `starts[s + 1]`, last band first.
    starts: Vec<u32>,
    turns: Vec<Turn>,
    /// For each chain, the buffer it adds to; nothing for dQ itself.
    pub(crate) buffers: Vec<Option<u32>>,
    /// The bands that have buffers, in order.
    pub(crate) buffered: Vec<u32>,
    by_band: Vec<(u32, Turn)>,
    /// For one band, pairs of each slab, and whole slabs inside a run as differences.
    weights: Vec<u64>,
    steps: Vec<i64>,
    ends: Vec<u32>,
}

impl Turns {
    /// The turns of a slab, last band first.
    pub(crate) fn of(&self, slab: u32) -> &[Turn] {
        let slab = slab as usize;
        &self.turns[self.starts[slab] as usize..self.starts[slab + 1] as usize]
    }

    fn fill(
        &mut self,
        layout: &Layout,
        grid: Grid,
        chain_limit: u64,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let (slabs, bands) = (grid.slabs(layout), grid.bands(layout));
        self.buffers.clear();
        self.buffered.clear();
        self.by_band.clear();
        self.starts.clear();
        self.starts.resize(slabs + 1, 0);
        let (weights, steps) = (&mut self.weights, &mut self.steps);
        weights.resize(slabs + 1, 0);
        steps.resize(slabs + 1, 0);
        let block = layout.block().get();
        let (keys, slab) = (layout.keys() as usize, grid.slab);
        for band in 0..bands as u32 {
            monitor.check()?;
            weights.fill(0);
            steps.fill(0);
            for row in grid.rows(layout, band) {
                for run in layout.row(row) {
                    let (start, end) = (run.start as usize * block, run.end() as usize * block);
                    let end = end.min(keys);
                    let (first, last) = (start / slab, (end - 1) / slab);
                    if first == last {
                        weights[first] += (end - start) as u64;
                        continue;
                    }
                    weights[first] += ((first + 1) * slab - start) as u64;
                    weights[last] += (end - last * slab) as u64;
                    steps[first + 1] += slab as i64;
                    steps[last] -= slab as i64;
                }
            }
            let (mut whole, mut so_far, mut rank) = (0, 0, 0);
            let mut fresh = true;
            for slab in 0..slabs {
                whole += steps[slab];
                let weight = (weights[slab] + whole as u64) * block as u64;
                if weight == 0 {
                    continue;
                }
                if fresh || so_far + weight > chain_limit {
                    let buffer = (!fresh).then_some(self.buffered.len() as u32);
                    if buffer.is_some() {
                        self.buffered.push(band);
                    }
                    self.buffers.push(buffer);
                    (fresh, so_far, rank) = (false, 0, 0);
                }
                so_far += weight;
                let chain = self.buffers.len() as u32 - 1;
                let weight = u32::try_from(weight).unwrap_or(u32::MAX);
                self.by_band.push((slab as u32, Turn { band, chain, rank, weight }));
                self.starts[slab + 1] += 1;
                rank += 1;
            }
        }
        for slab in 0..slabs {
            self.starts[slab + 1] += self.starts[slab];
        }
        // Filled from the back, so that the last band comes first.
        self.ends.clear();
        self.ends.extend_from_slice(&self.starts[1..]);
        let nothing = Turn { band: 0, chain: 0, rank: 0, weight: 0 };
        self.turns.clear();
        self.turns.resize(self.by_band.len(), nothing);
        for &(slab, turn) in &self.by_band {
            let end = &mut self.ends[slab as usize];
            *end -= 1;
            self.turns[*end as usize] = turn;
        }
        Ok(())
    }
}

/// How keys and queries are cut, in tokens. A row of blocks belongs to the band that its first
/// query is in; slabs may cut blocks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Grid {
    pub(crate) slab: usize,
    pub(crate) band: usize,
}

impl Grid {
    fn slabs(&self, layout: &Layout) -> usize {
        (layout.keys() as usize).div_ceil(self.slab)
    }

    fn bands(&self, layout: &Layout) -> usize {
        (layout.queries() as usize).div_ceil(self.band)
    }

    /// The rows of blocks of a band.
    pub(crate) fn rows(&self, layout: &Layout, band: u32) -> Range<u32> {
        let first = |band: usize| (band * self.band).div_ceil(layout.block().get()) as u32;
        let (start, end) = (first(band as usize), first(band as usize + 1));
        start.min(layout.rows().end)..end.min(layout.rows().end)
    }
}

/// Streams that share a key head: they add to the same dK and dV.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family {
    pub(crate) entry: u32,
    pub(crate) key_head: u32,
    /// From the first stream to before the second.
    pub(crate) streams: (u32, u32),
}

/// A slab of a family, or some bands of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) family: u32,
    pub(crate) slab: u32,
    pub(crate) bands: (u32, u32),
    /// The buffer that dK and dV go to; nothing for the tensors themselves.
    pub(crate) buffer: Option<u32>,
}

/// What the backward pass knows of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamTurns {
    /// Its layout's turns among all.
    pub(crate) turns: u32,
    /// The first of its counters: one for each chain, head after head.
    pub(crate) counters: usize,
    /// The first of its dQ buffers, likewise.
    pub(crate) buffers: usize,
}

/// The work of a backward call.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) grid: Grid,
    pub(crate) turns: Vec<Turns>,
    pub(crate) families: Vec<Family>,
    pub(crate) streams: Vec<StreamTurns>,
    pub(crate) units: Vec<Unit>,
    /// Chains of all heads, dQ buffers of all heads, dK/dV buffers.
    pub(crate) counters: usize,
    pub(crate) query_buffers: usize,
    pub(crate) key_buffers: usize,
    /// Active blocks × query heads.
    pub(crate) weight: u64,
    /// Pairs of one slab, a band each.
    weights: Vec<u64>,
}

impl Plan {
    /// Lists units and turns for streams that were listed before.
    pub(crate) fn fill(
        &mut self,
        streams: &Streams,
        layouts: &Layouts,
        sizes: &Sizes,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let band = sizes.queries.div_ceil(BANDS).next_multiple_of(BAND).max(BAND);
        self.grid = Grid { slab: SLAB, band };
        self.families.clear();
        self.streams.clear();
        self.units.clear();
        (self.counters, self.query_buffers, self.key_buffers) = (0, 0, 0);

        let count = streams.stream_count() as u32;
        let mut pairs = 0;
        self.weight = 0;
        for number in 0..count {
            let stream = streams.stream(layouts, sizes, number);
            let layout = stream.layout;
            let blocks: u64 = layout.rows().map(|row| super::blocks_of(layout, row)).sum();
            let block = layout.block().get() as u64;
            self.weight += blocks * stream.heads.len() as u64;
            pairs += blocks * stream.heads.len() as u64 * block * block;
        }
        let chain_limit = (pairs / CHAIN_SHARE).max(2 * FEWEST);
        let slab_limit = (pairs / SLAB_SHARE).max(FEWEST);

        let distinct = layouts.distinct();
        self.turns.resize_with(self.turns.len().max(distinct.len()), Turns::default);
        for (turns, layout) in self.turns.iter_mut().zip(distinct) {
            turns.fill(layout, self.grid, chain_limit, monitor)?;
        }
        for number in 0..count {
            let stream = streams.stream(layouts, sizes, number);
            let turns = layouts.index(stream.entry, stream.heads[0] as usize);
            let (counters, buffers) = (self.counters, self.query_buffers);
            self.counters += self.turns[turns].buffers.len() * stream.heads.len();
            self.query_buffers += self.turns[turns].buffered.len() * stream.heads.len();
            self.streams.push(StreamTurns { turns: turns as u32, counters, buffers });
            let (entry, key_head) = (stream.entry as u32, stream.key_head as u32);
            match self.families.last_mut() {
                Some(last) if (last.entry, last.key_head) == (entry, key_head) => {
                    last.streams.1 = number + 1;
                }
                _ => self.families.push(Family { entry, key_head, streams: (number, number + 1) }),
            }
        }
        // Slab by slab over all families: neighbours in the list rarely wait for each other.
        let bands = sizes.queries.div_ceil(self.grid.band);
        let mut weights = std::mem::take(&mut self.weights);
        weights.resize(bands, 0);
        for slab in 0..sizes.keys.div_ceil(self.grid.slab) as u32 {
            monitor.check()?;
            for family in 0..self.families.len() as u32 {
                self.add_units(streams, layouts, sizes, (family, slab), slab_limit, &mut weights);
            }
        }
        self.weights = weights;
        Ok(())
    }

    fn add_units(
        &mut self,
        streams: &Streams,
        layouts: &Layouts,
        sizes: &Sizes,
        (family, slab): (u32, u32),
        limit: u64,
        weights: &mut [u64],
    ) {
        weights.fill(0);
        let members = self.families[family as usize].streams;
        for number in members.0..members.1 {
            let heads = streams.stream(layouts, sizes, number).heads.len() as u64;
            let turns = &self.turns[self.streams[number as usize].turns as usize];
            for turn in turns.of(slab) {
                weights[turn.band as usize] += u64::from(turn.weight) * heads;
            }
        }
        let total: u64 = weights.iter().sum();
        let parts = total.div_ceil(limit);
        let bands = weights.len() as u32;
        if parts <= 1 {
            if total > 0 {
                self.units.push(Unit { family, slab, bands: (0, bands), buffer: None });
            }
            return;
        }
        let (mut from, mut so_far, mut part) = (0, 0, 1);
        for band in 0..bands {
            so_far += weights[band as usize];
            if so_far * parts >= total * part || band + 1 == bands {
                let buffer = Some(self.key_buffers as u32);
                self.units.push(Unit { family, slab, bands: (from, band + 1), buffer });
                self.key_buffers += 1;
                from = band + 1;
                part = so_far * parts / total + 1;
            }
        }
    }
}
