//! Summaries of keys on workers: of the keys themselves, or of the clusters of smaller blocks.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

#[cfg(target_arch = "x86_64")]
use super::on_matrix_unit;
use super::{FusedPass, dispatch, dispatch_on_dtype};
use crate::dims::{Dims, Order, Sizes};
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::{Arena, Monitor, Tasks, Workers};
use crate::kernel::fused::FusedKernel;
use crate::kernel::masses::{PARTS, Sampling, Terms, part_ranges};
use crate::kernel::summary::{Points, Summarize};
use crate::options::Options;
use crate::simd::Simd;
use crate::tensor::{Raw, Tensor, View};

/// Blocks that a thread summarizes at a time.
const BLOCKS: usize = 16;

/// The weight of a group without keys: its exponential is 0 beside any other.
const NOTHING: f32 = -1e30;

/// Keys that are summarized.
pub(crate) struct Keys<'a, 'h, E> {
    pub(crate) options: &'a Options,
    pub(crate) sizes: Sizes,
    /// Key heads of batch entries, counted through all entries.
    pub(crate) key_heads: Range<usize>,
    pub(crate) k: View<'a, E>,
    pub(crate) monitor: &'a Monitor<'h>,
}

/// What is known of the groups of the keys of some key heads.
#[derive(Debug)]
pub(crate) struct Summaries<E> {
    pub(crate) sampling: Sampling,
    /// Blocks of a key head.
    pub(crate) columns: usize,
    /// `[1, key head of the call, group, term]`.
    pub(crate) terms: Tensor<E>,
    /// The keys of each, [`Sampling::words`] words.
    pub(crate) members: Vec<u64>,
    /// The logarithm of their number.
    pub(crate) weights: Vec<f32>,
    /// Their variances; none but for clusters.
    pub(crate) variances: Vec<[f32; PARTS]>,
}

impl<E: Element> Keys<'_, '_, E> {
    /// Summaries of keys.
    pub(crate) fn summarize(&self, sampling: Sampling) -> Result<Summaries<E>> {
        self.run(sampling, None)
    }

    /// Clusters of larger blocks, made of those of smaller ones: their keys are not read again.
    pub(crate) fn merge(&self, from: &Summaries<E>, sampling: Sampling) -> Result<Summaries<E>> {
        self.run(sampling, Some(from))
    }

    fn run(&self, sampling: Sampling, from: Option<&Summaries<E>>) -> Result<Summaries<E>> {
        let columns = self.sizes.keys.div_ceil(sampling.keys);
        let blocks = self.key_heads.len() * columns;
        let (tokens, heads) = (columns * sampling.groups, self.key_heads.len());
        let dims = Dims { batch: 1, tokens, heads, dim: sampling.terms(self.sizes.dim) };
        let clusters = if sampling.terms == Terms::Clusters { sampling.groups } else { 0 };
        let mut into = Summaries {
            sampling,
            columns,
            terms: Tensor::zeros(dims, Order::Bhsd)?,
            members: vec![0; blocks * sampling.groups * sampling.words()],
            weights: Vec::new(),
            variances: vec![[0.0; PARTS]; blocks * clusters],
        };
        dispatch_on_dtype!(SummaryPass, SummaryPass { call: self, from, into: &mut into })?;
        let logarithms: Vec<f32> = (0..=sampling.keys).map(|count| (count as f32).ln()).collect();
        let weight = |members: &[u64]| {
            let count: u32 = members.iter().map(|word| word.count_ones()).sum();
            logarithms[count as usize].max(NOTHING)
        };
        into.weights = into.members.chunks_exact(sampling.words()).map(weight).collect();
        Ok(into)
    }
}

struct SummaryPass<'a, 'h, E> {
    call: &'a Keys<'a, 'h, E>,
    from: Option<&'a Summaries<E>>,
    into: &'a mut Summaries<E>,
}

impl<E: Element> FusedPass<E> for SummaryPass<'_, '_, E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()> {
        let workers = self.call.options.workers()?;
        self.on(tiles.simd(), workers)
    }
}

impl<E: Element> SummaryPass<'_, '_, E> {
    fn on<S: Simd>(self, simd: S, workers: Workers<'_>) -> Result<()> {
        let SummaryPass { call, from, into } = self;
        let Keys { sizes, key_heads, monitor, .. } = call;
        let Summaries { sampling, columns, ref mut terms, .. } = *into;
        let (groups, words) = (sampling.groups, sampling.words());
        let (k, target) = (Raw::read(&call.k), Raw::write(&mut terms.view_mut()));
        let smaller = from.map(|from| (from, Raw::read(&from.terms.view())));
        let of_block = if sampling.terms == Terms::Clusters { groups } else { 0 };
        let mut rest = &mut *into.variances;
        let parts = part_ranges(sizes.dim);
        let chunks: Vec<_> = into
            .members
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
                // SAFETY: points are keys or groups of a tensor that is borrowed for the call; each
                // block of `target`, which is exclusive, is written by one task.
                unsafe {
                    let (source, points, count) = match smaller {
                        None => {
                            let head = key_heads.start + summarized;
                            let (entry, head) = (head / sizes.key_heads, head % sizes.key_heads);
                            let token = block * sampling.keys;
                            let count = sampling.keys.min(sizes.keys - token);
                            (k.head(entry, head, token), Points::Keys, count)
                        }
                        Some((from, terms)) => {
                            let per_block =
                                sampling.keys / from.sampling.keys * from.sampling.groups;
                            let all = from.columns * from.sampling.groups;
                            let first = block * per_block;
                            let count = per_block.min(all - first);
                            (
                                terms.head(0, summarized, first),
                                from.points(summarized * all + first, count),
                                count,
                            )
                        }
                    };
                    let into = target.head(0, summarized, block * groups).first.cast_mut();
                    let (dim, parts, scratch) = (sizes.dim, &*parts, &mut scratch);
                    simd.call(Summarize {
                        sampling,
                        source,
                        points,
                        count,
                        dim,
                        into,
                        members,
                        variances,
                        parts,
                        scratch,
                    });
                }
            }
        })
    }
}

impl<E> Summaries<E> {
    /// Some of the groups, as points of larger blocks.
    fn points(&self, first: usize, count: usize) -> Points<'_> {
        let words = self.sampling.words();
        Points::Clusters {
            sampling: self.sampling,
            members: &self.members[first * words..][..count * words],
            variances: &self.variances[first..first + count],
        }
    }
}
