//! Layouts per hop: the attention of each computation of a schedule, and a schedule with kernels for
//! them. Passes read it; `ring` and `rank_schedule` make it once.

use std::ops::Range;
use std::sync::Arc;

use longspan::{
    Attention, BlockSize, Components, Dropout, HeadMap, Layout, Layouts, Pattern, Positions, Score,
    Shape,
};

use crate::error::{Error, Result};
use crate::options::Options;
use crate::problem::{Problem, Reduction};
use crate::schedule::{Schedule, TILE};
use crate::tokens::{self, Tokens};
use crate::transport::Poll;

/// A schedule with the kernels of its computations.
#[derive(Debug)]
pub(crate) struct CompiledSchedule {
    pub(crate) problem: Problem,
    pub(crate) schedule: Schedule,
    pub(crate) computations: Computations,
    /// Options of the kernels of all computations. They have no sinks, since no computation has
    /// all keys of a row.
    options: longspan::Options,
    /// Over no tokens; owns the threads and the workspace that the others share. It finishes rows,
    /// with the sinks of the problem.
    pub(crate) kernels: Attention,
}

/// The attention of each computation of a schedule.
#[derive(Debug)]
pub(crate) struct Computations {
    /// Local queries over each range of local keys.
    pub(crate) local_keys: Vec<Vec<KeyChunk>>,
    /// Local queries over each set of received keys.
    pub(crate) received_keys: Vec<Vec<KeyChunk>>,
    /// Each set of remote queries over all local keys.
    pub(crate) remote_queries: Vec<Components>,
}

/// Attention over some of the keys of one computation: all of them, or a tile in a reproducible
/// reduction.
#[derive(Debug)]
pub struct KeyChunk {
    /// The calls.
    pub components: Components,
    /// The keys, by index in the computation's key tensor.
    pub keys: Range<usize>,
}

impl Computations {
    /// Compiles the layouts of a rank's schedule; `block` is theirs, where it isn't the kernels' own.
    pub(crate) fn new(
        rank: usize,
        problem: &Problem,
        schedule: &Schedule,
        block: Option<BlockSize>,
        poll: &mut Poll<'_>,
    ) -> Result<Self> {
        let (held, tokens) = (problem.shards.rank(rank), problem.shards.tokens());
        let (heads, key_heads) = (problem.heads, problem.key_heads);
        let (all, bands) = (HeadMap::all(heads, key_heads), &schedule.bands);
        let mut make = |queries: &Positions, keys: &Positions, heads: &HeadMap| {
            let (sparsity, positions) = (&problem.sparsity, (queries, keys));
            let components =
                sparsity.components(tokens, positions, heads, problem.batch, block, poll)?;
            Ok::<_, Error>(components.uniform(problem.reduction == Reduction::Reproducible))
        };
        let remote = schedule
            .remote_queries
            .iter()
            .map(|remote| make(&remote.positions, held, &all.of_heads(&bands[remote.band].heads)));
        let remote_queries = remote.collect::<Result<_>>()?;
        let mut chunks = |queries: &Positions, keys: &Positions, heads: &HeadMap| {
            let count = keys.len();
            let size = if problem.reduction == Reduction::Overlapped { count } else { TILE };
            let chunk = |from: usize| {
                let range = from..(from + size).min(count);
                let indices = Tokens::range(from as i64, range.len())?;
                let components = make(queries, &tokens::positions_of(keys, &indices), heads)?;
                Ok(KeyChunk { components, keys: range })
            };
            (0..count).step_by(size.max(1)).map(chunk).collect::<Result<Vec<_>>>()
        };
        let local = schedule.local_keys.iter().map(|range| {
            let indices = Tokens::range(range.start as i64, range.len())?;
            chunks(held, &tokens::positions_of(held, &indices), &all)
        });
        let local_keys = local.collect::<Result<_>>()?;
        let received = schedule.received_keys.iter().map(|keys| {
            let heads = bands[keys.band].map(heads, key_heads);
            match &keys.queries {
                Some(queries) => {
                    chunks(&tokens::positions_of(held, queries), &keys.positions, &heads)
                }
                None => chunks(held, &keys.positions, &heads),
            }
        });
        let received_keys = received.collect::<Result<_>>()?;
        Ok(Computations { local_keys, received_keys, remote_queries })
    }

    /// The same computations with other options.
    fn set_options(&mut self, options: &longspan::Options) {
        let chunks = self.local_keys.iter_mut().chain(&mut self.received_keys).flatten();
        let components = chunks.map(|chunk| &mut chunk.components);
        for components in components.chain(&mut self.remote_queries) {
            *components = components.clone().options(options.clone());
        }
    }

    /// Active pairs of all computations of a pass, of one batch entry.
    pub(crate) fn active_pairs(&self) -> Result<u128> {
        let chunks = self.local_keys.iter().chain(&self.received_keys).flatten();
        let all = chunks.map(|chunk| &chunk.components).chain(&self.remote_queries);
        all.map(|components| Ok(components.active_pairs()?)).sum()
    }
}

impl CompiledSchedule {
    /// Compiles a rank's schedule.
    pub(crate) fn new(
        rank: usize,
        problem: Problem,
        schedule: Schedule,
        options: &Options,
        poll: &mut Poll<'_>,
    ) -> Result<Self> {
        let mut computations = Computations::new(rank, &problem, &schedule, None, poll)?;
        // Clones share workspaces.
        let options = options.kernels(&problem);
        computations.set_options(&options);
        let nothing = Layout::compile(&Pattern::full(), &Shape::new(0, 0))?.into();
        let kernels = with_sinks(&options, &nothing, &problem);
        Ok(CompiledSchedule { problem, schedule, computations, options, kernels })
    }

    /// Replaces the sinks that rows are finished with.
    pub(crate) fn set_sink_logits(&mut self, logits: Option<Arc<[f32]>>) {
        self.problem.sink_logits = logits;
        self.kernels = with_sinks(&self.options, self.kernels.layouts(), &self.problem);
    }

    /// Replaces what is done to scores and probabilities.
    pub(crate) fn set_score(&mut self, score: Score, dropout: Option<Dropout>) {
        if self.problem.score == score && self.problem.dropout == dropout {
            return;
        }
        self.options = self.options.clone().score(score.clone()).dropout(dropout);
        (self.problem.score, self.problem.dropout) = (score, dropout);
        self.computations.set_options(&self.options);
        self.kernels = with_sinks(&self.options, self.kernels.layouts(), &self.problem);
    }
}

/// The attention that finishes rows.
fn with_sinks(options: &longspan::Options, layouts: &Layouts, problem: &Problem) -> Attention {
    let attention = Attention::new(layouts.clone()).options(options.clone());
    match &problem.sink_logits {
        Some(logits) => attention.sink_logits(logits.clone()),
        None => attention,
    }
}
