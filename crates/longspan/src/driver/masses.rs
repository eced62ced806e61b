//! Estimates of block masses on workers, in bands of rows.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use longspan_pattern::{Layout, Run, RunKind};

#[cfg(target_arch = "x86_64")]
use super::on_matrix_unit;
use super::summaries::Summaries;
use super::{FusedPass, dispatch, dispatch_on_dtype};
use crate::dims::Sizes;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::{Monitor, Tasks};
use crate::kernel::fused::FusedKernel;
use crate::kernel::masses::{Band, BandScratch, Masses};
use crate::layouts::Layouts;
use crate::options::Options;
use crate::tensor::{Raw, View};

/// What is estimated.
pub(crate) struct Estimate<'a, 'h, E> {
    pub(crate) options: &'a Options,
    /// The blocks whose masses are estimated.
    pub(crate) base: &'a Layouts,
    /// Which of them, where that is not all.
    pub(crate) candidates: Candidates<'a, E>,
    /// Whether query heads that share keys share their masses.
    pub(crate) shared: bool,
    pub(crate) sizes: Sizes,
    /// Key heads of batch entries, counted through all entries. Summaries are of these alone.
    pub(crate) key_heads: Range<usize>,
    pub(crate) q: View<'a, E>,
    pub(crate) summaries: &'a Summaries<E>,
    pub(crate) monitor: &'a Monitor<'h>,
}

/// Which blocks of a layout masses are estimated of.
pub(crate) enum Candidates<'a, E> {
    All,
    /// Those in larger blocks that were chosen before, for each stream. Rows are larger too.
    Chosen {
        chosen: &'a [Chosen],
        factor: usize,
    },
    /// Those in larger blocks of keys that are chosen for each row by their masses, where they are
    /// more than so many. Larger blocks of which a row does not have every pair are kept, and not
    /// among those that are chosen from: their summaries have keys that a chunk of the prompt may
    /// not have yet.
    Wide {
        summaries: &'a Summaries<E>,
        above: usize,
        choose: &'a ChooseRuns<'a>,
    },
}

/// Chooses some of the columns of a row by the masses of all columns.
pub(crate) type ChooseRuns<'a> = dyn Fn(&[Run], &[f32]) -> Vec<u32> + Sync + 'a;

/// A row of an entry and a head (the first of its group, where masses are shared), and its
/// candidates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<'a> {
    pub(crate) entry: usize,
    pub(crate) head: usize,
    pub(crate) row: u32,
    pub(crate) runs: &'a [Run],
}

/// Chooses candidates of a row by the masses of all columns.
pub(crate) type Choose<'a> = dyn Fn(Row<'_>, &[f32]) -> Vec<u32> + Sync + 'a;

/// The chosen columns of rows that follow each other.
#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    /// Where each row's columns start, and where the last one's end.
    pub(crate) starts: Vec<usize>,
    pub(crate) columns: Vec<u32>,
}

impl Default for Chosen {
    fn default() -> Self {
        Chosen { starts: vec![0], columns: Vec::new() }
    }
}

impl Chosen {
    /// Adds a row.
    pub(crate) fn push(&mut self, columns: &[u32]) {
        self.columns.extend(columns);
        self.starts.push(self.columns.len());
    }

    pub(crate) fn row(&self, row: usize) -> &[u32] {
        &self.columns[self.starts[row]..self.starts[row + 1]]
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.starts.windows(2).map(|ends| &self.columns[ends[0]..ends[1]])
    }
}

impl<E: Element> Estimate<'_, '_, E> {
    /// Query heads per key head.
    fn heads_per_key_head(&self) -> usize {
        self.sizes.heads / self.sizes.key_heads
    }

    /// Query heads that share their masses.
    fn heads_per_stream(&self) -> usize {
        if self.shared { self.heads_per_key_head() } else { 1 }
    }

    /// The choice of each stream, the query heads that share their masses, of each key head.
    pub(crate) fn run(&self, choose: &Choose<'_>) -> Result<Vec<Chosen>> {
        let mut chosen = Vec::new();
        let pass = EstimatePass { call: self, choose, chosen: &mut chosen };
        dispatch_on_dtype!(EstimatePass, pass)?;
        Ok(chosen)
    }
}

struct EstimatePass<'a, 'h, E> {
    call: &'a Estimate<'a, 'h, E>,
    choose: &'a Choose<'a>,
    chosen: &'a mut Vec<Chosen>,
}

/// Rows of the heads of a stream.
struct Rows<'a> {
    layout: &'a Layout,
    entry: usize,
    heads: Range<usize>,
    /// The key head, among those of which there are summaries.
    summarized: usize,
    rows: Range<u32>,
}

impl<E: Element> FusedPass<E> for EstimatePass<'_, '_, E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()> {
        let EstimatePass { call, choose, chosen } = self;
        let Estimate { options, base, ref sizes, summaries, monitor, .. } = *call;
        let workers = options.workers()?;
        let first = base.distinct().first();
        let per_band = summaries.sampling.rows_per_band() as u32;
        let rows = first.map_or(0, |layout| layout.rows().end);
        let (per_stream, bands) = (call.heads_per_stream(), rows.div_ceil(per_band) as usize);
        let streams_per_key_head = call.heads_per_key_head() / per_stream;
        let streams = call.key_heads.len() * streams_per_key_head;
        let tasks = streams * bands;
        let results: Vec<OnceLock<Chosen>> = (0..tasks).map(|_| OnceLock::new()).collect();
        let spare: Mutex<Vec<BandScratch>> = Mutex::default();
        Tasks::counted(tasks, monitor).run(workers, &|task| {
            let (stream, band) = (task / bands, (task % bands) as u32);
            let summarized = stream / streams_per_key_head;
            let key_head = call.key_heads.start + summarized;
            let (entry, key_head) = (key_head / sizes.key_heads, key_head % sizes.key_heads);
            let first_head =
                key_head * call.heads_per_key_head() + stream % streams_per_key_head * per_stream;
            let rows = Rows {
                layout: base.get(entry, first_head),
                entry,
                heads: first_head..first_head + per_stream,
                summarized,
                rows: band * per_band..((band + 1) * per_band).min(rows),
            };
            let taken = spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut scratch = taken.unwrap_or_default();
            let _session = tiles.session();
            let runs = call.candidates(tiles, &rows, stream, &mut scratch);
            let masses = call.masses(tiles, summaries, &rows, &runs, &mut scratch);
            let mut chosen = Chosen::default();
            for (row, (runs, masses)) in rows.rows.zip(runs.iter().zip(&masses)) {
                chosen.push(&choose(Row { entry, head: first_head, row, runs }, masses));
            }
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
            // Each task runs once.
            let _ = results[task].set(chosen);
        })?;
        let mut results = results.into_iter().map(|result| result.into_inner().unwrap_or_default());
        for _ in 0..streams {
            let mut all = Chosen::default();
            for band in results.by_ref().take(bands) {
                band.rows().for_each(|row| all.push(row));
            }
            chosen.push(all);
        }
        Ok(())
    }
}

impl<E: Element> Estimate<'_, '_, E> {
    /// The masses of all columns for each row; a session of this thread is alive.
    fn masses<X: FusedKernel<Element = E>>(
        &self,
        tiles: X,
        summaries: &Summaries<E>,
        rows: &Rows<'_>,
        runs: &[Vec<Run>],
        scratch: &mut BandScratch,
    ) -> Vec<Vec<f32>> {
        let dim = self.sizes.dim;
        let kernel = Masses {
            tiles,
            sampling: summaries.sampling,
            scale: self.options.scale.unwrap_or(1.0 / (dim as f32).sqrt()),
            q: Raw::read(&self.q),
            groups: Raw::read(&summaries.terms.view()),
            members: &summaries.members,
            weights: &summaries.weights,
            variances: &summaries.variances,
            dim,
            columns: summaries.columns,
            layout: rows.layout,
        };
        let mut masses = vec![vec![0.0; summaries.columns]; runs.len()];
        for head in rows.heads.clone() {
            let &Rows { entry, summarized, .. } = rows;
            let band = Band { entry, head, summarized, rows: rows.rows.clone(), runs };
            // SAFETY: `check` has found the sizes of the layouts in both tensors, which are borrowed
            // for the call; summaries have all groups of the keys. The sampling was validated, bands
            // have its rows, and the session is this thread's.
            unsafe { kernel.band(&band, scratch, &mut masses) };
        }
        masses
    }

    /// The blocks of each row whose masses are estimated.
    fn candidates<X: FusedKernel<Element = E>>(
        &self,
        tiles: X,
        rows: &Rows<'_>,
        stream: usize,
        scratch: &mut BandScratch,
    ) -> Vec<Vec<Run>> {
        let row = |row: u32| rows.layout.row(row);
        match self.candidates {
            Candidates::All => rows.rows.clone().map(|index| row(index).to_vec()).collect(),
            Candidates::Chosen { chosen, factor } => {
                let listed = |index: u32| chosen[stream].row(index as usize / factor);
                let each = rows.rows.clone();
                each.map(|index| within(row(index), listed(index), factor as u32)).collect()
            }
            Candidates::Wide { summaries: wide, above, choose } => {
                let factor = (wide.sampling.keys / self.summaries.sampling.keys) as u32;
                let whole: Vec<_> =
                    rows.rows.clone().map(|index| whole_blocks(row(index), factor)).collect();
                let many = |runs: &[Run]| blocks(runs) > above;
                let masses = if whole.iter().any(|runs| many(runs)) {
                    self.masses(tiles, wide, rows, &whole, scratch)
                } else {
                    vec![Vec::new(); whole.len()]
                };
                let each = rows.rows.clone().zip(whole.iter().zip(&masses));
                each.map(|(index, (runs, masses))| {
                    if !many(runs) {
                        return row(index).to_vec();
                    }
                    let chosen = choose(runs, masses);
                    let is_whole =
                        |column| runs.iter().any(|run| (run.start..run.end()).contains(&column));
                    let kept =
                        |column: &u32| chosen.binary_search(column).is_ok() || !is_whole(*column);
                    let kept: Vec<u32> = (0..wide.columns as u32).filter(kept).collect();
                    within(row(index), &kept, factor)
                })
                .collect()
            }
        }
    }
}

fn blocks(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

/// The blocks of runs that are in larger blocks, `factor` times as large.
fn within(runs: &[Run], columns: &[u32], factor: u32) -> Vec<Run> {
    let mut parts = Vec::new();
    let mut runs = runs.iter().peekable();
    for listed in columns.chunk_by(|a, b| a + 1 == *b) {
        let (start, end) = (listed[0] * factor, (listed[listed.len() - 1] + 1) * factor);
        while runs.next_if(|run| run.end() <= start).is_some() {}
        for run in runs.clone().take_while(|run| run.start < end) {
            let mut part = *run;
            part.start = run.start.max(start);
            part.len = run.end().min(end) - part.start;
            parts.push(part);
        }
    }
    parts
}

/// The larger blocks, `factor` times as large, of which runs have every pair.
fn whole_blocks(runs: &[Run], factor: u32) -> Vec<Run> {
    let full = runs.iter().filter(|run| run.kind() == RunKind::Full);
    let inside = full.map(|run| run.start.div_ceil(factor)..run.end() / factor);
    inside
        .filter(|range| !range.is_empty())
        .map(|range| Run::full(range.start, range.end - range.start))
        .collect()
}

#[cfg(test)]
mod tests;
