//! The order in which gradients are accumulated.
//!
//! One pass over the keys computes each score once, and writes three gradients. A unit is a *panel*
//! of keys of one key head: it holds their dK and dV in scratch while it goes through the queries
//! that attend to them, so these have one writer. dQ has many: every panel that a query attends to.
//! Queries are cut into *query panels*. For each query panel (and head) the key panels that touch
//! it are a *chain*, and each of them has a *ticket*: it waits for the one before it in the chain,
//! adds its part, and passes on. The order is that of the keys, whatever the threads.
//!
//! ```text
//!                  panel 0  panel 1  panel 2      a chain runs from left to right;
//! query panel 0      ·                            a unit goes from bottom to top, so that
//! query panel 1      · ────── ·                   in a causal or windowed layout the unit on
//! query panel 2      · ────── · ────── ·          its left has always been there before it
//! ```
//!
//! Units are claimed from left to right. The leftmost unit in progress waits for no other, so there
//! is always progress, with any number of threads.
//!
//! A panel that is a large part of all the work (a sink) is cut into parts by its query panels, a
//! query panel that is (a global query) into several chains; each part and each chain but the first
//! adds to a buffer of its own, and the buffers are added up at the end, in order.

use std::ops::Range;

use longspan_pattern::Layout;

use super::Plan as Streams;
use crate::dims::Sizes;
use crate::error::Result;
use crate::exec::Monitor;
use crate::layouts::Layouts;
use crate::tensor::size_of_list;

/// Queries of a query panel, at least.
const QUERY_PANEL: usize = 256;
/// Query panels of a long sequence, at most: the list of turns has key panels × query panels
/// entries.
const QUERY_PANELS: usize = 1_024;
/// A key panel may be this part of all the work before it is cut, and a chain that part.
const KEY_PANEL_SHARE: u64 = 32;
const CHAIN_SHARE: u64 = 8;
/// What is worth a buffer of its own, in pairs.
const FEWEST: u64 = 32 * 64 * 64;

/// A key panel's turn at a query panel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) query_panel: u32,
    pub(crate) chain: u32,
    /// How many turns of the chain come before it.
    pub(crate) rank: u32,
    /// Pairs of active blocks.
    weight: u32,
}

/// The turns of one layout.
#[derive(Debug, Default)]
pub(crate) struct Tickets {
    /// Those of key panel `s` are from `starts[s]` to `starts[s + 1]`, last query panel first.
    starts: Vec<u32>,
    tickets: Vec<Ticket>,
    /// For each chain, the buffer it adds to; nothing for dQ itself.
    pub(crate) buffers: Vec<Option<u32>>,
    /// The query panels that have buffers, in order.
    pub(crate) buffered: Vec<u32>,
    by_query_panel: Vec<(u32, Ticket)>,
    /// For one query panel, pairs of each key panel, and whole key panels inside a run as
    /// differences.
    weights: Vec<u64>,
    steps: Vec<i64>,
    ends: Vec<u32>,
}

impl Tickets {
    fn bytes(&self) -> usize {
        let Tickets { starts, tickets, buffers, buffered, by_query_panel, weights, steps, ends } =
            self;
        let of_panels = size_of_list(starts) + size_of_list(tickets) + size_of_list(buffers);
        let of_queries = size_of_list(buffered) + size_of_list(by_query_panel);
        of_panels + of_queries + size_of_list(weights) + size_of_list(steps) + size_of_list(ends)
    }

    /// The turns of a key panel, last query panel first.
    pub(crate) fn of(&self, panel: u32) -> &[Ticket] {
        let panel = panel as usize;
        &self.tickets[self.starts[panel] as usize..self.starts[panel + 1] as usize]
    }

    fn fill(
        &mut self,
        layout: &Layout,
        grid: Grid,
        chain_limit: u64,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let (panels, query_panels) = (grid.panels(layout), grid.query_panels(layout));
        self.buffers.clear();
        self.buffered.clear();
        self.by_query_panel.clear();
        self.starts.clear();
        self.starts.resize(panels + 1, 0);
        let (weights, steps) = (&mut self.weights, &mut self.steps);
        weights.resize(panels + 1, 0);
        steps.resize(panels + 1, 0);
        let block = layout.block().get();
        let (keys, panel) = (layout.keys(), grid.panel);
        for query_panel in 0..query_panels as u32 {
            monitor.check()?;
            weights.fill(0);
            steps.fill(0);
            for row in grid.rows(layout, query_panel) {
                for run in layout.row(row) {
                    let (start, end) = (run.start as usize * block, run.end() as usize * block);
                    let end = end.min(keys);
                    let (first, last) = (start / panel, (end - 1) / panel);
                    if first == last {
                        weights[first] += (end - start) as u64;
                        continue;
                    }
                    weights[first] += ((first + 1) * panel - start) as u64;
                    weights[last] += (end - last * panel) as u64;
                    steps[first + 1] += panel as i64;
                    steps[last] -= panel as i64;
                }
            }
            let (mut whole, mut so_far, mut rank) = (0, 0, 0);
            let mut fresh = true;
            for panel in 0..panels {
                whole += steps[panel];
                let weight = (weights[panel] + whole as u64) * block as u64;
                if weight == 0 {
                    continue;
                }
                if fresh || so_far + weight > chain_limit {
                    let buffer = (!fresh).then_some(self.buffered.len() as u32);
                    if buffer.is_some() {
                        self.buffered.push(query_panel);
                    }
                    self.buffers.push(buffer);
                    (fresh, so_far, rank) = (false, 0, 0);
                }
                so_far += weight;
                let chain = self.buffers.len() as u32 - 1;
                let weight = u32::try_from(weight).unwrap_or(u32::MAX);
                self.by_query_panel
                    .push((panel as u32, Ticket { query_panel, chain, rank, weight }));
                self.starts[panel + 1] += 1;
                rank += 1;
            }
        }
        for panel in 0..panels {
            self.starts[panel + 1] += self.starts[panel];
        }
        // Filled from the back, so that the last query panel comes first.
        self.ends.clear();
        self.ends.extend_from_slice(&self.starts[1..]);
        let nothing = Ticket { query_panel: 0, chain: 0, rank: 0, weight: 0 };
        self.tickets.clear();
        self.tickets.resize(self.by_query_panel.len(), nothing);
        for &(panel, ticket) in &self.by_query_panel {
            let end = &mut self.ends[panel as usize];
            *end -= 1;
            self.tickets[*end as usize] = ticket;
        }
        Ok(())
    }
}

/// How keys and queries are cut, in tokens. A row of blocks belongs to the query panel that its
/// first query is in; key panels may cut blocks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Grid {
    pub(crate) panel: usize,
    pub(crate) query_panel: usize,
}

impl Grid {
    fn panels(&self, layout: &Layout) -> usize {
        layout.keys().div_ceil(self.panel)
    }

    fn query_panels(&self, layout: &Layout) -> usize {
        layout.queries().div_ceil(self.query_panel)
    }

    /// The rows of blocks of a query panel.
    pub(crate) fn rows(&self, layout: &Layout, query_panel: u32) -> Range<u32> {
        let first = |query_panel: usize| {
            (query_panel * self.query_panel).div_ceil(layout.block().get()) as u32
        };
        let (start, end) = (first(query_panel as usize), first(query_panel as usize + 1));
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

/// A key panel of a family, or some query panels of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) family: u32,
    pub(crate) panel: u32,
    pub(crate) query_panels: (u32, u32),
    /// The buffer that dK and dV go to; nothing for the tensors themselves.
    pub(crate) buffer: Option<u32>,
}

/// What the backward pass knows of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamTurns {
    /// Its layout's turns among all.
    pub(crate) tickets: u32,
    /// The first of its counters: one for each chain, head after head.
    pub(crate) counters: usize,
    /// The first of its dQ buffers, likewise.
    pub(crate) buffers: usize,
}

/// The work of a backward call.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) grid: Grid,
    pub(crate) tickets: Vec<Tickets>,
    pub(crate) families: Vec<Family>,
    pub(crate) streams: Vec<StreamTurns>,
    pub(crate) units: Vec<Unit>,
    /// Chains of all heads, dQ buffers of all heads, dK/dV buffers.
    pub(crate) counters: usize,
    pub(crate) query_buffers: usize,
    pub(crate) key_buffers: usize,
    /// Active blocks × query heads.
    pub(crate) weight: u64,
    /// Pairs of one key panel, a query panel each.
    weights: Vec<u64>,
}

impl Plan {
    pub(crate) fn bytes(&self) -> usize {
        let Plan { tickets, families, streams, units, weights, .. } = self;
        let of_tickets: usize = tickets.iter().map(Tickets::bytes).sum();
        let of_units = size_of_list(families) + size_of_list(streams) + size_of_list(units);
        of_tickets + size_of_list(tickets) + of_units + size_of_list(weights)
    }

    /// Lists units and turns, in panels of so many keys, for streams that were listed before.
    pub(crate) fn fill(
        &mut self,
        streams: &Streams,
        layouts: &Layouts,
        sizes: &Sizes,
        panel: usize,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let query_panel =
            sizes.queries.div_ceil(QUERY_PANELS).next_multiple_of(QUERY_PANEL).max(QUERY_PANEL);
        self.grid = Grid { panel, query_panel };
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
        let slab_limit = (pairs / KEY_PANEL_SHARE).max(FEWEST);

        let distinct = layouts.distinct();
        self.tickets.resize_with(self.tickets.len().max(distinct.len()), Tickets::default);
        for (tickets, layout) in self.tickets.iter_mut().zip(distinct) {
            tickets.fill(layout, self.grid, chain_limit, monitor)?;
        }
        for number in 0..count {
            let stream = streams.stream(layouts, sizes, number);
            let tickets = layouts.index(stream.entry, stream.heads[0] as usize);
            let (counters, buffers) = (self.counters, self.query_buffers);
            self.counters += self.tickets[tickets].buffers.len() * stream.heads.len();
            self.query_buffers += self.tickets[tickets].buffered.len() * stream.heads.len();
            self.streams.push(StreamTurns { tickets: tickets as u32, counters, buffers });
            let (entry, key_head) = (stream.entry as u32, stream.key_head as u32);
            match self.families.last_mut() {
                Some(last) if (last.entry, last.key_head) == (entry, key_head) => {
                    last.streams.1 = number + 1;
                }
                _ => self.families.push(Family { entry, key_head, streams: (number, number + 1) }),
            }
        }
        // Key panel by key panel over all families: neighbors in the list rarely wait for each
        // other.
        let query_panels = sizes.queries.div_ceil(self.grid.query_panel);
        let mut weights = std::mem::take(&mut self.weights);
        weights.resize(query_panels, 0);
        for panel in 0..sizes.keys.div_ceil(self.grid.panel) as u32 {
            monitor.check()?;
            for family in 0..self.families.len() as u32 {
                self.add_units(streams, layouts, sizes, (family, panel), slab_limit, &mut weights);
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
        (family, panel): (u32, u32),
        limit: u64,
        weights: &mut [u64],
    ) {
        weights.fill(0);
        let members = self.families[family as usize].streams;
        for number in members.0..members.1 {
            let heads = streams.stream(layouts, sizes, number).heads.len() as u64;
            let tickets = &self.tickets[self.streams[number as usize].tickets as usize];
            for ticket in tickets.of(panel) {
                weights[ticket.query_panel as usize] += u64::from(ticket.weight) * heads;
            }
        }
        let total: u64 = weights.iter().sum();
        let parts = total.div_ceil(limit);
        let query_panels = weights.len() as u32;
        if parts <= 1 {
            if total > 0 {
                self.units.push(Unit {
                    family,
                    panel,
                    query_panels: (0, query_panels),
                    buffer: None,
                });
            }
            return;
        }
        let (mut from, mut so_far, mut part) = (0, 0, 1);
        for query_panel in 0..query_panels {
            so_far += weights[query_panel as usize];
            if so_far * parts >= total * part || query_panel + 1 == query_panels {
                let buffer = Some(self.key_buffers as u32);
                self.units.push(Unit {
                    family,
                    panel,
                    query_panels: (from, query_panel + 1),
                    buffer,
                });
                self.key_buffers += 1;
                from = query_panel + 1;
                part = so_far * parts / total + 1;
            }
        }
    }
}
