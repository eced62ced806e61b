//! Content-adaptive sparsity: which key blocks each row of query blocks attends to, chosen from
//! queries and keys.
//!
//! ```text
//! base pattern ──▶ 2,048-key blocks ──masses──▶ candidates of candidates        very long ones
//!              └─▶ layout of 256-token blocks ──masses──▶ candidates            long sequences only
//!              └─▶ layout of blocks ∩ candidates ──masses──▶ choice ──▶ LayoutSet ──▶ Attention
//! ```
//!
//! The choice is a constant for gradients; what is computed over it is exact. What it drops is
//! measured, not assumed: [`Selection::kept_mass`].

mod choose;
mod estimator;
mod kept;
mod listed;

use std::borrow::Borrow;
use std::sync::Arc;

use longspan_pattern::{BlockSize, Heads, Layout, LayoutSet, Padding, Pattern, Shape};

pub use self::estimator::Estimator;
pub use self::kept::KeptMass;
pub use self::listed::ListedBlocks;

use self::choose::Budget;
use crate::arguments::Inputs;
use crate::check;
use crate::driver::masses::{Candidates, Chosen, Estimate, Row};
use crate::driver::summaries::{Keys, Summaries};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor};
use crate::kernel::masses::{Sampling, Terms};
use crate::layouts::Layouts;
use crate::options::Options;
use crate::score::Score;
use crate::tensor::View;

/// Which query heads have a choice of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Every query head.
    #[default]
    PerHead,
    /// Query heads that share keys have one choice, by the sum of their masses.
    PerKeyHead,
}

/// Makes layouts from the content of queries and keys.
pub trait Selector {
    /// Chooses blocks for every batch entry and query head, within `shape` and `padding`.
    fn select_with<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        shape: &Shape,
        padding: &Padding,
        hook: Hook<'_>,
    ) -> Result<Selection>;

    /// The same for queries at the last positions of the keys, without padding.
    fn select<E: Element>(&self, q: View<'_, E>, k: View<'_, E>) -> Result<Selection> {
        let shape = Shape::new(q.dims().tokens, k.dims().tokens);
        self.select_with(q, k, &shape, &Padding::None(q.dims().batch), Hook::none())
    }
}

/// Keeps the key blocks with the largest estimated attention mass.
///
/// For every row of query blocks, the smallest set of blocks of the base pattern whose estimated
/// mass reaches a share of the row's, with a floor and a cap on their number. Ties go to the lower
/// block. The choice is the same for any number of threads, other batch entries, and chunks of a
/// prompt that start at multiples of 256 positions.
///
/// ```
/// use longspan::{Attention, BlockSelector, Dims, Inputs, Order, Pattern, Selector, Tensor};
///
/// let dims = Dims { batch: 1, tokens: 2_048, heads: 1, dim: 16 };
/// let number = |i: usize| ((i * 7919 % 1_009) as f32 / 504.0 - 1.0) * 3.0;
/// let data = (0..dims.elements().unwrap()).map(number).collect();
/// let x = Tensor::new(data, dims, Order::Bhsd)?;
///
/// let selector = BlockSelector::new(Pattern::causal())
///     .always("window(64, 0) | sinks(1)".parse()?)
///     .mass(0.9)
///     .max_blocks(8);
/// let selection = selector.select(x.view(), x.view())?;
/// assert!(selection.density() < 0.5);
///
/// let attention = Attention::new(selection.layouts().clone());
/// let output = attention.forward(Inputs::new(x.view(), x.view(), x.view()))?;
/// let kept = selection.kept_mass(x.view(), x.view(), &output.lse)?;
/// assert!(kept.mean > 0.3 && kept.mean <= 1.0);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BlockSelector {
    base: Heads,
    always: Option<Pattern>,
    budget: Budget,
    estimator: Estimator,
    sharing: Sharing,
    dense_below: usize,
    coarse_from: usize,
    options: Options,
}

/// Blocks that candidates are looked for in, and what their masses are estimated by.
const COARSE: (u64, Estimator) = (256, Estimator::Clusters { queries: 8, clusters: 8 });

/// The blocks that very long rows look for candidates in first.
struct Wide {
    keys: usize,
    clusters: usize,
    /// Rows with more of them.
    above: usize,
}

/// With 8 clusters, candidates miss some of the mass of documents that come back.
const WIDE: Wide = Wide { keys: 2_048, clusters: 16, above: 64 };

/// Candidates per block of the cap, and the share of the dropped mass that may be lost with the
/// others.
const CANDIDATES: usize = 2;
const LOST: f32 = 0.1;

/// Keys that are summarized at once, at least those of a head: enough for all threads, and small
/// beside the tensors of many heads.
const SUMMARIZED: usize = 1 << 18;

/// The share of a row's blocks above which all of them are kept: leaving out the others would save
/// less than their mass is worth.
const DENSE_ABOVE: f64 = 0.9;

impl BlockSelector {
    /// Blocks of `base`, whose edges inside blocks stay as they are. By default blocks with 95 % of
    /// the mass, and no cap.
    pub fn new(base: impl Into<Heads>) -> Self {
        BlockSelector {
            base: base.into(),
            always: None,
            budget: Budget {
                mass: 0.95,
                block_mass: 0.0,
                min_blocks: 1,
                max_blocks: usize::MAX,
                all_up_to: 0,
            },
            estimator: Estimator::default(),
            sharing: Sharing::default(),
            dense_below: 1_024,
            coarse_from: 16_384,
            options: Options::default(),
        }
    }

    /// Another pattern whose blocks are chosen from.
    #[must_use]
    pub fn base(mut self, base: impl Into<Heads>) -> Self {
        self.base = base.into();
        self
    }

    /// Blocks of the base that have an active pair of this pattern are always kept.
    #[must_use]
    pub fn always(mut self, pattern: Pattern) -> Self {
        self.always = Some(pattern);
        self
    }

    /// The share of a row's estimated mass that is kept, above 0 and up to 1.
    #[must_use]
    pub fn mass(mut self, mass: f32) -> Self {
        self.budget.mass = mass;
        self
    }

    /// The least share of a row's estimated mass that a block is kept for, 0 by default. One
    /// threshold for all rows spends blocks where they hold most: at equal density it drops less
    /// than a [`mass`](Self::mass) that every row has to reach.
    #[must_use]
    pub fn block_mass(mut self, mass: f32) -> Self {
        self.budget.block_mass = mass;
        self
    }

    /// The least number of blocks per row, where the base has as many.
    #[must_use]
    pub fn min_blocks(mut self, blocks: usize) -> Self {
        self.budget.min_blocks = blocks;
        self
    }

    /// The largest number of blocks per row; those that are always kept are not counted against it
    /// where they are more.
    #[must_use]
    pub fn max_blocks(mut self, blocks: usize) -> Self {
        self.budget.max_blocks = blocks;
        self
    }

    /// How masses are estimated.
    #[must_use]
    pub fn estimator(mut self, estimator: Estimator) -> Self {
        self.estimator = estimator;
        self
    }

    /// Which heads have a choice of their own.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Rows with fewer keys keep all of them, within [`max_blocks`](Self::max_blocks): estimates would
    /// cost more than they save. 1,024 by default.
    #[must_use]
    pub fn dense_below(mut self, keys: usize) -> Self {
        self.dense_below = keys;
        self
    }

    /// Rows with as many keys look for candidates in blocks of 256 tokens first, and those of more than
    /// 131,072 keys in blocks of 2,048 keys before that; 16,384 by default.
    #[must_use]
    pub fn coarse_from(mut self, keys: usize) -> Self {
        self.coarse_from = keys;
        self
    }

    /// Scale, threads and instruction set of the estimate. Score additions and dropout are refused.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    fn check(&self) -> Result<()> {
        let Budget { mass, block_mass, min_blocks, max_blocks, .. } = self.budget;
        if !(mass > 0.0 && mass <= 1.0) {
            let rule = "a share above 0 and up to 1";
            return Err(Error::Number { what: "the mass of a selector", value: mass, rule });
        }
        if !(0.0..=1.0).contains(&block_mass) {
            let (what, rule) = ("the block_mass of a selector", "a share from 0 to 1");
            return Err(Error::Number { what, value: block_mass, rule });
        }
        if max_blocks == 0 || min_blocks > max_blocks {
            let (what, value) = ("max_blocks", max_blocks as f32);
            return Err(Error::Number { what, value, rule: "at least 1 and at least min_blocks" });
        }
        check_options(&self.options)?;
        if self.sharing == Sharing::PerKeyHead && self.base.count().is_some() {
            let why = "heads with a choice in common have one pattern; use Sharing::PerHead";
            return Err(Error::Unexpected { what: "a base pattern per head", why });
        }
        Ok(())
    }
}

impl Selector for BlockSelector {
    fn select_with<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        shape: &Shape,
        padding: &Padding,
        hook: Hook<'_>,
    ) -> Result<Selection> {
        self.check()?;
        let sizes = check::tensors(&self.options, &Inputs::new(q, k, k))?;
        let monitor = Monitor::new(hook);
        let compile = |pattern: &Heads, shape: &Shape| {
            let flow = |_, _| monitor.flow();
            LayoutSet::compile_with(pattern, sizes.heads, shape, padding, None, flow)
        };
        let base = compile(&self.base, shape)?;
        let always = self.always.clone().map(Heads::from);
        let measured =
            Measured { base: self.base.clone(), shape: shape.clone(), padding: padding.clone() };
        let finish = |layouts: LayoutSet| {
            let density = density(&layouts, &base);
            Ok(Selection { layouts, density, measured, options: self.options.clone() })
        };
        if sizes.batch * sizes.heads == 0 {
            return finish(base.clone());
        }
        let block = base.get(0, 0).block();
        let dense = (self.dense_below / block.get()).min(self.budget.max_blocks);
        let budget = Budget { all_up_to: dense, ..self.budget };
        let sampling = self.estimator.sampling(block)?;
        if base.get(0, 0).columns() as usize <= dense {
            return finish(base.clone());
        }
        let level = |shape: &Shape, base, sampling, budget| {
            let always = always.as_ref().map(|always| compile(always, shape)).transpose()?;
            Ok::<_, Error>(Level { base, always, sampling, budget })
        };
        let fine = level(shape, base.clone(), sampling, budget)?;
        let coarse_block = BlockSize::new(COARSE.0)?;
        let factor = coarse_block.get() / block.get();
        let refines = factor > 1 && coarse_block.get().is_multiple_of(block.get());
        let coarse = if refines && sizes.keys >= self.coarse_from {
            let shape = shape.clone().block(coarse_block);
            let budget = budget.widened(factor, self.coarse_from / coarse_block.get());
            let base = compile(&self.base, &shape)?;
            Some(level(&shape, base, COARSE.1.sampling(coarse_block)?, budget)?)
        } else {
            None
        };
        let shared = self.sharing == Sharing::PerKeyHead;
        let streams = if shared { sizes.key_heads } else { sizes.heads };
        let mut chosen: Vec<Arc<Layout>> = Vec::new();
        let key_heads = sizes.batch * sizes.key_heads;
        let at_once = (SUMMARIZED / sizes.keys).max(1);
        for first in (0..key_heads).step_by(at_once) {
            let key_heads = first..(first + at_once).min(key_heads);
            let (options, monitor) = (&self.options, &monitor);
            let keys = Keys { options, sizes, key_heads: key_heads.clone(), k, monitor };
            let choose = |level: &Level,
                          summaries: &Summaries<E>,
                          candidates: Candidates<'_, E>| {
                let base = &Layouts::Each(level.base.clone());
                check::inputs(options, base, &Inputs::new(q, k, k))?;
                let key_heads = key_heads.clone();
                let estimate = Estimate {
                    options,
                    base,
                    candidates,
                    shared,
                    sizes,
                    key_heads,
                    q,
                    summaries,
                    monitor,
                };
                estimate.run(&|Row { entry, head, row, runs }, masses| {
                    let always = level.always.as_ref();
                    let always = always.map_or(&[][..], |always| always.get(entry, head).row(row));
                    level.budget.choose(runs, always, masses)
                })
            };
            let summaries = keys.summarize(fine.sampling)?;
            let found = match &coarse {
                None => choose(&fine, &summaries, Candidates::All)?,
                Some(coarse) => {
                    let found = {
                        // Clusters of clusters are as good, and keys are read once.
                        let summaries = match fine.sampling.terms {
                            Terms::Clusters => keys.merge(&summaries, coarse.sampling)?,
                            _ => keys.summarize(coarse.sampling)?,
                        };
                        let wide =
                            Sampling { keys: WIDE.keys, groups: WIDE.clusters, ..coarse.sampling };
                        let wide = keys.merge(&summaries, wide)?;
                        let budget = coarse.budget.widened(CANDIDATES, WIDE.above);
                        let candidates = Candidates::Wide {
                            summaries: &wide,
                            above: WIDE.above,
                            choose: &|runs, masses| budget.choose(runs, &[], masses),
                        };
                        choose(coarse, &summaries, candidates)?
                    };
                    choose(&fine, &summaries, Candidates::Chosen { chosen: &found, factor })?
                }
            };
            drop(summaries);
            chosen.extend(keep(&base, found, chosen.len(), streams)?);
        }
        finish(with_layouts(&base, &chosen, 0, streams)?)
    }
}

/// Blocks of one size that are chosen from.
struct Level {
    base: LayoutSet,
    always: Option<LayoutSet>,
    sampling: Sampling,
    budget: Budget,
}

/// Refuses options that neither estimates nor measures of kept mass have.
fn check_options(options: &Options) -> Result<()> {
    if options.score != Score::default() {
        let why = "masses are those of products of queries and keys alone";
        return Err(Error::Unexpected { what: "a score addition of a selector", why });
    }
    if options.dropout.is_some() {
        let why = "dropout belongs to attention over the choice; give it there";
        return Err(Error::Unexpected { what: "dropout of a selector", why });
    }
    Ok(())
}

/// The blocks of `base` that were chosen for some streams, from the first one on; `streams` are those
/// of a batch entry.
fn keep(
    base: &LayoutSet,
    chosen: impl IntoIterator<Item = impl Borrow<Chosen>>,
    first: usize,
    streams: usize,
) -> Result<Vec<Arc<Layout>>> {
    let mut layouts = Vec::new();
    for (stream, chosen) in (first..).zip(chosen) {
        let chosen = chosen.borrow();
        let head = stream % streams * (base.heads() / streams);
        let whole = &base.layouts()[base.index(stream / streams, head)];
        layouts.push(Arc::new(whole.keep_blocks(&chosen.starts, &chosen.columns)?));
    }
    Ok(layouts)
}

/// `base`, with other layouts of some streams, from the first one on.
fn with_layouts(
    base: &LayoutSet,
    kept: &[Arc<Layout>],
    first: usize,
    streams: usize,
) -> Result<LayoutSet> {
    let (batch, heads) = (base.batch(), base.heads());
    let each = (0..batch * heads).map(|index| {
        let (entry, head) = (index / heads, index % heads);
        let stream = entry * streams + head * streams / heads;
        let own = stream.checked_sub(first).and_then(|index| kept.get(index));
        own.unwrap_or_else(|| &base.layouts()[base.index(entry, head)]).clone()
    });
    Ok(LayoutSet::new(batch, heads, each)?)
}

fn blocks(layout: &Layout) -> u64 {
    layout.rows().flat_map(|row| layout.row(row)).map(|run| u64::from(run.len)).sum()
}

/// The share of the base's blocks that are kept, over all batch entries and heads.
fn density(layouts: &LayoutSet, base: &LayoutSet) -> f64 {
    let all = |set: &LayoutSet| -> u64 {
        let each: Vec<u64> = set.layouts().iter().map(|layout| blocks(layout)).collect();
        let pairs = (0..set.batch()).flat_map(|entry| (0..set.heads()).map(move |h| (entry, h)));
        pairs.map(|(entry, head)| each[set.index(entry, head)]).sum()
    };
    all(layouts) as f64 / (all(base) as f64).max(1.0)
}

/// What kept mass is measured against.
#[derive(Debug, Clone)]
struct Measured {
    base: Heads,
    shape: Shape,
    padding: Padding,
}

/// What a selector chose.
#[derive(Debug, Clone)]
pub struct Selection {
    layouts: LayoutSet,
    density: f64,
    measured: Measured,
    options: Options,
}

impl Selection {
    /// The layout of every batch entry and query head.
    pub fn layouts(&self) -> &LayoutSet {
        &self.layouts
    }

    /// The share of the base's blocks that are kept: 1 where nothing is dropped, as in sequences too
    /// short for estimates to pay off.
    pub fn density(&self) -> f64 {
        self.density
    }
}
