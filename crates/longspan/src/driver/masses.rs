//! Estimates of block masses on workers: summaries of keys, then bands of rows.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

#[cfg(target_arch = "x86_64")]
use super::on_matrix_unit;
use super::{FusedPass, dispatch, dispatch_on_dtype};
use crate::dims::{Dims, Order, Sizes};
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::{Arena, Monitor, Tasks, Workers};
use crate::kernel::fused::FusedKernel;
use crate::kernel::masses::{Band, BandScratch, Masses, PARTS, Sampling, Terms, part_ranges};
use crate::kernel::summary::Summarize;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::simd::Simd;
use crate::tensor::{Raw, Tensor, View};

/// Blocks that a thread summarizes at a time.
const BLOCKS: usize = 16;

/// The weight of a group without keys: its exponential is 0 beside any other.
const NOTHING: f32 = -1e30;

/// What is estimated.
pub(crate) struct Estimate<'a, 'h, E> {
    pub(crate) options: &'a Options,
    pub(crate) sampling: Sampling,
    /// The blocks whose masses are estimated.
    pub(crate) base: &'a Layouts,
    /// Whether query heads that share keys share their masses.
    pub(crate) shared: bool,
    pub(crate) sizes: Sizes,
    /// Key heads of batch entries, counted through all entries. Summaries are of these alone.
    pub(crate) key_heads: Range<usize>,
    pub(crate) q: View<'a, E>,
    pub(crate) k: View<'a, E>,
    pub(crate) monitor: &'a Monitor<'h>,
}

/// Chooses columns of a row of an entry and a head (of the first of its group, where masses are
/// shared), by the masses of all columns.
pub(crate) type Choose<'a> = dyn Fn(usize, usize, u32, &[f32]) -> Vec<u32> + Sync + 'a;

/// The chosen columns of rows that follow each other.
#[derive(Debug, Default)]
pub(crate) struct Chosen {
    pub(crate) counts: Vec<usize>,
    pub(crate) columns: Vec<u32>,
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

pub(crate) struct EstimatePass<'a, 'h, E> {
    call: &'a Estimate<'a, 'h, E>,
    choose: &'a Choose<'a>,
    chosen: &'a mut Vec<Chosen>,
}

impl<E: Element> FusedPass<E> for EstimatePass<'_, '_, E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()> {
        let EstimatePass { call, choose, chosen } = self;
        let Estimate { options, sampling, base, ref sizes, monitor, .. } = *call;
        let workers = options.workers()?;
        let Summaries { terms, members, weights, variances } =
            summarize(call, tiles.simd(), workers)?;
        let groups = Raw::read(&terms.view());
        let q = Raw::read(&call.q);
        let scale = options.scale.unwrap_or(1.0 / (sizes.dim as f32).sqrt());

        let first = base.distinct().first();
        let per_band = sampling.rows_per_band() as u32;
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
            let layout = base.get(entry, first_head);
            let band = band * per_band..((band + 1) * per_band).min(rows);
            let taken = spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut scratch = taken.unwrap_or_default();
            let _session = tiles.session();
            let dim = sizes.dim;
            let (members, weights, variances) = (&*members, &*weights, &*variances);
            let kernel = Masses {
                tiles,
                sampling,
                scale,
                q,
                groups,
                members,
                weights,
                variances,
                dim,
                layout,
            };
            let mut masses = vec![vec![0.0; layout.columns() as usize]; band.len()];
            for head in first_head..first_head + per_stream {
                let band = Band { entry, head, summarized, rows: band.clone() };
                // SAFETY: `check` has found the sizes of the layouts in both tensors, which are
                // borrowed for the call; `summarize` has written all groups of the keys. The
                // sampling was validated, bands have its rows, and the session is this thread's.
                unsafe { kernel.band(&band, &mut scratch, &mut masses) };
            }
            let mut chosen = Chosen::default();
            for (row, masses) in band.zip(&masses) {
                let columns = choose(entry, first_head, row, masses);
                chosen.counts.push(columns.len());
                chosen.columns.extend(columns);
            }
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
            // Each task runs once.
            let _ = results[task].set(chosen);
        })?;
        let mut results = results.into_iter().map(|result| result.into_inner().unwrap_or_default());
        for _ in 0..streams {
            let mut all = Chosen::default();
            for band in results.by_ref().take(bands) {
                all.counts.extend(band.counts);
                all.columns.extend(band.columns);
            }
            chosen.push(all);
        }
        Ok(())
    }
}

/// What is known of the groups of all keys.
struct Summaries<E> {
    /// `[key head of the call, group, term]`.
    terms: Tensor<E>,
    /// The keys of each, [`Sampling::words`] words.
    members: Vec<u64>,
    /// The logarithm of their number.
    weights: Vec<f32>,
    /// Their variances; none but for clusters.
    variances: Vec<[f32; PARTS]>,
}

fn summarize<E: Element, S: Simd>(
    call: &Estimate<'_, '_, E>,
    simd: S,
    workers: Workers<'_>,
) -> Result<Summaries<E>> {
    let Estimate { sampling, sizes, key_heads, monitor, .. } = call;
    let columns = sizes.keys.div_ceil(sampling.block);
    let (groups, words) = (sampling.groups, sampling.words());
    let tokens = columns * groups;
    let dim = sampling.terms(sizes.dim);
    let dims = Dims { batch: 1, tokens, heads: key_heads.len(), dim };
    let mut terms = Tensor::<E>::zeros(dims, Order::Bhsd)?;
    let blocks = key_heads.len() * columns;
    let mut members = vec![0_u64; blocks * groups * words];
    let (k, into) = (Raw::read(&call.k), Raw::write(&mut terms.view_mut()));
    // Per block: those of its groups, or none.
    let of_block = if sampling.terms == Terms::Clusters { groups } else { 0 };
    let mut variances = vec![[0.0; PARTS]; blocks * of_block];
    let mut rest = &mut *variances;
    let parts = part_ranges(sizes.dim);
    let chunks: Vec<_> = members
        .chunks_mut(BLOCKS * groups * words)
        .map(|members| {
            let len = members.len() / words / groups * of_block;
            Mutex::new((members, rest.split_off_mut(..len).unwrap_or_default()))
        })
        .collect();
    Tasks::uncounted(chunks.len(), monitor).run(workers, &|chunk| {
        let mut own = chunks[chunk].lock().unwrap_or_else(PoisonError::into_inner);
        let (members, variances) = &mut *own;
        let mut scratch = Arena::default();
        for (index, members) in members.chunks_exact_mut(groups * words).enumerate() {
            let variances = &mut variances[index * of_block..][..of_block];
            let number = chunk * BLOCKS + index;
            let (summarized, block) = (number / columns, number % columns);
            let head = key_heads.start + summarized;
            let (entry, head) = (head / sizes.key_heads, head % sizes.key_heads);
            let token = block * sampling.block;
            let keys = sampling.block.min(sizes.keys - token);
            // SAFETY: the keys are some of the tensor's, which is borrowed for the call; each block
            // of `into`, which is exclusive, is written by one task.
            unsafe {
                let source = k.head(entry, head, token);
                let into = into.head(0, summarized, block * groups).first.cast_mut();
                let (sampling, dim, scratch) = (*sampling, sizes.dim, &mut scratch);
                simd.call(Summarize {
                    sampling,
                    source,
                    keys,
                    dim,
                    into,
                    members,
                    variances,
                    parts: &parts,
                    scratch,
                });
            }
        }
    })?;
    drop(chunks);
    let logarithms: Vec<f32> = (0..=sampling.block).map(|count| (count as f32).ln()).collect();
    let weight = |members: &[u64]| {
        let count: u32 = members.iter().map(|word| word.count_ones()).sum();
        logarithms[count as usize].max(NOTHING)
    };
    let weights = members.chunks_exact(words).map(weight).collect();
    Ok(Summaries { terms, members, weights, variances })
}

#[cfg(test)]
mod tests;
