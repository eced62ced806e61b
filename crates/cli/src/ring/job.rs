//! The job of every rank: both passes, and the collection of results on rank 0.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytemuck::Pod;
use longspan::{
    Dims, Element, ElementType, Gradients, Inputs, Isa, Order, Output, Positions, Tensor, Threads,
};
use longspan_ring::{
    Buffer, Failure, Hop, Incoming, Local, Options, Outgoing, Problem, Reduction, Ring, Shards,
    Sparsity, Transport, Wire,
};

use super::agree::agree;
use super::recorder::{Log, Recorder};
use crate::args;
use crate::args::{FoldOrder, Map};
use crate::choice::{self, Why};
use crate::compile::{self, BadInput};
use crate::random;

/// Tokens up to which `--check` is allowed: the oracle takes minutes beyond.
const MAX_CHECKED: usize = 8_192;

/// Grain of the shards with which results don't depend on the number of ranks.
const TILE: usize = 64;

pub(super) const ORDER: Order = Order::Bhsd;

/// The job, the same on every rank.
pub(super) struct Job {
    pub(super) sparsity: Sparsity,
    pub(super) wire: Wire,
    pub(super) map: Map,
    pub(super) fold: Reduction,
    pub(super) shards: Shards,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) element: ElementType,
    pub(super) isa: Isa,
    pub(super) threads: NonZeroUsize,
    pub(super) repeat: NonZeroUsize,
    timeout: Duration,
    results: Results,
}

/// Whether rank 0 collects the results of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Results {
    Keep,
    Collect,
}

impl Job {
    /// The job over `ranks` ranks, of which `here` share this process.
    pub(super) fn new(args: &args::Ring, ranks: usize, here: NonZeroUsize) -> Result<Self> {
        let patterns = compile::patterns(&args.input.pattern)?;
        let (heads, kv_heads) = args.tensors.heads(&patterns);
        patterns.get(0, heads)?;
        if !heads.is_multiple_of(kv_heads) {
            let message =
                format!("{heads} query heads, expected a multiple of --kv-heads {kv_heads}");
            return Err(BadInput(message).into());
        }
        let tokens = args.input.tokens;
        if args.check && tokens > MAX_CHECKED {
            let message = format!("--check of {tokens} tokens, expected at most {MAX_CHECKED}");
            return Err(BadInput(message).into());
        }
        let (fold, grain) = match args.fold {
            FoldOrder::Overlapped => (Reduction::Overlapped, 1),
            FoldOrder::Reproducible => (Reduction::Reproducible, TILE),
        };
        let wire = args.wire.wire;
        if args.check && wire != Wire::Exact {
            let message = "--check compares with one process, within the errors of exact keys: \
                           expected --wire exact";
            return Err(BadInput(message.into()).into());
        }
        let sparsity = args.branches.sparsity(patterns)?;
        let shards = args.shards.shards(&sparsity, tokens, ranks, grain)?;
        let threads = choice::threads(args.threads)?;
        let threads = match threads.why {
            Why::Default(_) => NonZeroUsize::new(threads.value.get() / here),
            Why::Option(_) | Why::Variable(_) => Some(threads.value),
        };
        Ok(Job {
            sparsity,
            wire,
            map: args.shards,
            fold,
            shards,
            tokens,
            heads,
            kv_heads,
            dim: args.tensors.head_dim(),
            element: args.tensors.dtype,
            isa: choice::isa(None)?.value,
            threads: threads.unwrap_or(NonZeroUsize::MIN),
            repeat: args.repeat,
            timeout: args.timeout,
            results: if args.check { Results::Collect } else { Results::Keep },
        })
    }

    pub(super) fn query_dims(&self, tokens: usize) -> Dims {
        Dims { batch: 1, tokens, heads: self.heads, dim: self.dim }
    }

    pub(super) fn key_dims(&self, tokens: usize) -> Dims {
        Dims { heads: self.kv_heads, ..self.query_dims(tokens) }
    }

    fn problem(&self, shards: Shards) -> Problem {
        Problem::new(self.sparsity.clone(), shards)
            .heads(self.heads, self.kv_heads)
            .dims(self.dim, self.dim)
            .element(self.element)
            .reduction(self.fold)
            .wire(self.wire)
    }

    fn options(&self) -> Options {
        let threads = Threads::Count(self.threads.get());
        Options { timeout: self.timeout, threads, isa: Some(self.isa), ..Options::default() }
    }
}

/// Queries, keys, values and the output's gradient of some tokens.
pub(super) struct Tensors<E> {
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    pub(super) dout: Tensor<E>,
}

impl<E: Element> Tensors<E> {
    pub(super) fn of(job: &Job, held: &Positions) -> Result<Self> {
        let count = held.len();
        let positions = held.progressions().flat_map(|piece| {
            (0..piece.len).map(move |index| piece.start as usize + index * piece.step)
        });
        let positions: Vec<usize> = positions.collect();
        let tensor = |seed, dims: Dims| {
            let shape = (dims.heads, job.tokens, dims.dim);
            Tensor::new(random::rows(seed, shape, positions.iter().copied()), dims, ORDER)
        };
        let (queries, keys) = (job.query_dims(count), job.key_dims(count));
        Ok(Tensors {
            q: tensor(0, queries)?,
            k: tensor(1, keys)?,
            v: tensor(2, keys)?,
            dout: tensor(3, queries)?,
        })
    }

    pub(super) fn inputs(&self) -> Inputs<'_, E> {
        Inputs { q: self.q.view(), k: self.k.view(), v: self.v.view() }
    }
}

/// The statistics of one rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RankStats {
    pub(super) tokens: u64,
    /// Active pairs that it computes.
    pub(super) pairs: u64,
    /// Bytes of one forward and one backward pass.
    pub(super) received: u64,
    pub(super) needed: u64,
    pub(super) sent: u64,
    pub(super) peak_held: u64,
    /// Nanoseconds of the fastest passes.
    pub(super) forward: u64,
    pub(super) backward: u64,
    /// Nanoseconds waited with nothing to compute, per forward and backward pass.
    pub(super) waiting: u64,
    /// Nanoseconds of the same messages alone.
    pub(super) alone: u64,
}

const WORDS: usize = 10;

impl RankStats {
    fn to_words(self) -> [u64; WORDS] {
        let RankStats { tokens, pairs, received, needed, sent, peak_held, .. } = self;
        let RankStats { forward, backward, waiting, alone, .. } = self;
        [tokens, pairs, received, needed, sent, peak_held, forward, backward, waiting, alone]
    }

    fn of_words(words: [u64; WORDS]) -> Self {
        let [tokens, pairs, received, needed, sent, peak_held, forward, backward, waiting, alone] =
            words;
        RankStats {
            tokens,
            pairs,
            received,
            needed,
            sent,
            peak_held,
            forward,
            backward,
            waiting,
            alone,
        }
    }
}

/// Statistics and results of all ranks.
pub(super) struct Outcome {
    pub(super) shares: Vec<RankStats>,
    /// Per rank, with `--check`: out, lse, dq, dk and dv as f32, concatenated.
    pub(super) results: Option<Vec<Vec<f32>>>,
}

/// Both passes on one rank; rank 0 returns the statistics of all.
pub(super) fn work<E: Element + Pod>(
    transport: &mut dyn Transport,
    job: &Job,
) -> Result<Option<Outcome>> {
    let settings = [("--repeat", job.repeat.get() as u64), ("--check", job.results as u64)];
    agree(transport, settings, job.timeout)?;
    let rank = transport.rank();
    let held = job.shards.rank(rank);
    let mine = Tensors::<E>::of(job, held)?;
    let log = Log::default();
    let mut recorder = Recorder::new(transport, log.clone());
    let mut ring = Ring::new(&mut recorder, job.problem(job.shards.clone()), job.options())?;
    let mut fastest: Option<(Duration, Duration)> = None;
    let inputs = mine.inputs();
    let mut output = Output::zeros(mine.dout.view().dims(), ORDER)?;
    let mut gradients = Gradients::zeros(&inputs)?;
    for _ in 0..job.repeat.get() {
        log.clear();
        let start = Instant::now();
        ring.forward_into(inputs, output.as_mut())?;
        let forward = start.elapsed();
        let (saved, gradient) = (&output, mine.dout.view());
        ring.backward_into(inputs, saved, gradient, gradients.as_mut())?;
        let backward = start.elapsed() - forward;
        if fastest.is_none_or(|(f, b)| forward + backward < f + b) {
            fastest = Some((forward, backward));
        }
    }
    let (tally, (needed_forward, needed_backward)) = (ring.tally(), ring.bytes_needed());
    let pairs = ring.active_pairs()?;
    drop(ring);
    let alone = log.replay(transport, job.timeout)?;

    let times = job.repeat.get() as u64;
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let (forward, backward) = fastest.unwrap_or_default();
    let share = RankStats {
        tokens: held.len() as u64,
        pairs: u64::try_from(pairs).unwrap_or(u64::MAX),
        received: tally.received / times,
        needed: needed_forward + needed_backward,
        sent: tally.sent / times,
        peak_held: tally.most_held,
        forward: nanoseconds(forward),
        backward: nanoseconds(backward),
        waiting: nanoseconds(tally.waiting) / times,
        alone: nanoseconds(alone),
    };
    let words = share.to_words();
    let shares = collect(transport, &words, |_| WORDS, job.timeout)?;
    let results = match job.results {
        Results::Collect => {
            let mine = flat(&output, &gradients);
            let each = |rank| flat_len(job, job.shards.rank(rank).len());
            collect(transport, &mine, each, job.timeout)?
        }
        Results::Keep => None,
    };
    Ok(shares.map(|shares| {
        let share = |words: Vec<u64>| RankStats::of_words(words.try_into().expect("as many words"));
        Outcome { shares: shares.into_iter().map(share).collect(), results }
    }))
}

/// The same by a ring of one rank, which holds all tokens.
pub(super) fn alone<E: Element + Pod>(
    job: &Job,
    all: &Tensors<E>,
) -> longspan_ring::Result<(Output<E>, Gradients<E>)> {
    let shards = Shards::contiguous(job.tokens, 1, 1)?;
    let transport = Local::ranks(1).remove(0);
    let mut ring = Ring::new(transport, job.problem(shards), job.options())?;
    let inputs = all.inputs();
    let output = ring.forward(inputs)?;
    let gradients = ring.backward(inputs, &output, all.dout.view())?;
    Ok((output, gradients))
}

/// All results as f32, concatenated.
pub(super) fn flat<E: Element>(output: &Output<E>, gradients: &Gradients<E>) -> Vec<f32> {
    let wide =
        |tensor: &Tensor<E>| tensor.as_slice().iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let Gradients { dq, dk, dv, .. } = gradients;
    [wide(&output.out), output.lse.clone(), wide(dq), wide(dk), wide(dv)].concat()
}

/// Elements of each result for `tokens` tokens: out, lse, dq, dk, dv.
pub(super) fn lens(job: &Job, tokens: usize) -> [usize; 5] {
    let queries = tokens * job.heads;
    let keys = tokens * job.kv_heads * job.dim;
    [queries * job.dim, queries, queries * job.dim, keys, keys]
}

fn flat_len(job: &Job, tokens: usize) -> usize {
    lens(job, tokens).into_iter().sum()
}

/// Gathers one list per rank, of a length that all ranks know, on rank 0.
fn collect<N: Pod>(
    transport: &mut dyn Transport,
    mine: &[N],
    len: impl Fn(usize) -> usize,
    timeout: Duration,
) -> Result<Option<Vec<Vec<N>>>, Failure> {
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    if transport.rank() != 0 {
        sends.push(Outgoing { to: 0, bytes: Buffer::from(bytemuck::cast_slice::<N, u8>(mine)) });
    } else {
        let buffer = |rank| Buffer::zeroed(len(rank) * size_of::<N>());
        receives.extend((1..transport.size()).map(|from| Incoming { from, bytes: buffer(from) }));
    }
    let hop = Hop { sends: &mut sends, receives: &mut receives, timeout };
    transport.hop(hop, &mut |_| ())?;
    if transport.rank() != 0 {
        return Ok(None);
    }
    let others =
        receives.iter().map(|receive| bytemuck::cast_slice::<u8, N>(&receive.bytes).to_vec());
    Ok(Some(std::iter::once(mine.to_vec()).chain(others).collect()))
}
