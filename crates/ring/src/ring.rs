//! Attention around a ring: what a caller writes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Pod, cast_slice_mut};
use longspan::{
    Arrived, Attention, Dims, Element, ElementType, Executor, Gradients, GradientsMut, Heads, Hook,
    Inputs, Isa, Layout, LayoutSet, Layouts, Output, OutputMut, Padding, Pool, Positions,
    Precision, RowStatistics, Shape, State, Threads, View, ViewMut,
};

use longspan_pattern::Sight;

use crate::bytes::{Reader, write_tokens};
use crate::deal::{self, Deal};
use crate::error::{Error, Result};
use crate::link::Link;
use crate::message::{Doing, END};
use crate::pass::{self, Backward, Forward, Pass, Stopped, Sums, Tally};
use crate::problem::{Fold, Problem};
use crate::schedule::{Known, Schedule, Step, TILE};
use crate::tokens::{self, Tokens};
use crate::transport::{Poll, Transport};
use crate::want::{self, Want};
use crate::wire::Wire;

/// How a rank computes and waits; may differ between ranks.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a rank waits for messages while it has nothing to compute: longer than any other
    /// rank computes at a stretch. After it the pass fails.
    pub patience: Duration,
    /// Threads of this rank's kernels.
    pub threads: Threads,
    /// What they belong to: a pool of this rank's own where left out, so that ranks that are threads
    /// of one process don't share workers.
    pub executor: Option<Arc<dyn Executor>>,
    /// See [`Attention::isa`].
    pub isa: Option<Isa>,
    /// See [`Attention::precision`].
    pub precision: Precision,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            patience: Duration::from_secs(60),
            threads: Threads::Auto,
            executor: None,
            isa: None,
            precision: Precision::Fastest,
        }
    }
}

/// Attention over one sequence that many ranks hold, seen from one of them.
///
/// Every rank makes a ring of the same [`Problem`], and calls the same passes in the same order
/// with its own tokens. Each gets its own rows of the results, equal to those of one process that
/// holds everything.
///
/// ```
/// use longspan::{Dims, Order, Pattern, Tensor};
/// use longspan_ring::{Local, Options, Problem, Ring, Shards};
///
/// let pattern: Pattern = "causal & window(20, 0)".parse()?;
/// let shards = Shards::contiguous(100, 2, 1)?;
/// std::thread::scope(|scope| {
///     for transport in Local::ranks(2) {
///         let problem = Problem::new(pattern.clone(), shards.clone()).dims(8, 8);
///         scope.spawn(move || {
///             let mut ring = Ring::new(transport, problem, Options::default()).unwrap();
///             let dims = Dims { batch: 1, tokens: 50, heads: 1, dim: 8 };
///             let x = Tensor::filled(1.0_f32, dims, Order::BatchTokenHeadDim).unwrap();
///             let output = ring.forward(x.view(), x.view(), x.view()).unwrap();
///             assert!(output.out.as_slice().iter().all(|x| (x - 1.0).abs() < 1e-6));
///         });
///     }
/// });
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ring<T> {
    transport: T,
    patience: Duration,
    works: Works,
    calls: u32,
    failed: bool,
    tally: Tally,
    /// Memory of the last forward pass, for the next.
    state: Option<State>,
}

/// All that passes read.
#[derive(Debug)]
pub(crate) struct Works {
    pub(crate) problem: Problem,
    pub(crate) schedule: Schedule,
    /// Over no tokens: the threads and the scratch of the others.
    pub(crate) kernels: Attention,
    /// Over this rank's own keys, over each arrival's, and of each hosting's queries.
    pub(crate) own: Vec<Vec<Piece>>,
    pub(crate) arrivals: Vec<Vec<Piece>>,
    pub(crate) hostings: Vec<Attention>,
}

/// Kernels over some of the keys that came together.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) attention: Attention,
    pub(crate) keys: Range<usize>,
}

/// Bytes that ranks tell each other at the end.
const DONE: &[u8] = &[1; 8];

impl<T: Transport> Ring<T> {
    /// Ranks agree that they mean the same, and each works out what it sends and receives.
    pub fn new(mut transport: T, problem: Problem, mut options: Options) -> Result<Self> {
        if options.executor.is_none() {
            options.executor = Some(Arc::new(Pool::new(options.threads.count()?)?));
        }
        let mut link = Link::new(&mut transport, Doing::Agreeing, 0, options.patience);
        let works = match prepare(&mut link, problem, &options) {
            Ok(works) => works,
            Err(error) => {
                return Err(link.give_up(error, 0, []));
            }
        };
        let (patience, tally) = (options.patience, Tally::default());
        Ok(Ring { transport, patience, works, calls: 0, failed: false, tally, state: None })
    }

    /// What it computes.
    pub fn problem(&self) -> &Problem {
        &self.works.problem
    }

    /// What passes have come to since it was made.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Bytes that this rank receives in a forward and in a backward pass, headers left out; at most,
    /// where the wire's lengths depend on the numbers.
    pub fn bytes_needed(&self) -> (u64, u64) {
        let bytes = |steps: &[Step]| {
            steps.iter().flat_map(|step| &step.receives).map(|message| message.bytes()).sum()
        };
        (bytes(&self.works.schedule.forward), bytes(&self.works.schedule.backward))
    }

    /// Pairs of queries and keys that this rank computes in each pass, of one batch entry.
    pub fn active_pairs(&self) -> Result<u128> {
        let Works { own, arrivals, hostings, problem, .. } = &self.works;
        let pieces = own.iter().chain(arrivals).flatten().map(|piece| &piece.attention);
        let pairs = |attention: &Attention| {
            let layout = |head| attention.layouts().get(0, head);
            (0..problem.heads)
                .map(|head| Ok(layout(head).counts()?.active_pairs))
                .sum::<Result<u128>>()
        };
        pieces.chain(hostings).map(pairs).sum()
    }

    /// Gives the transport back.
    pub fn into_transport(self) -> T {
        self.transport
    }

    /// Output and log-sum-exp of this rank's queries.
    pub fn forward<E: Element + Pod>(
        &mut self,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Output<E>> {
        let dims = self.works.problem.output_dims(q.dims().tokens);
        let mut output = Output::zeros(dims, q.order())?;
        self.forward_into(Inputs { q, k, v }, output.as_mut())?;
        Ok(output)
    }

    /// Output and log-sum-exp of this rank's queries, written where `output` says. A ring keeps as many
    /// f32 as the output has numbers from call to call.
    pub fn forward_into<E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
    ) -> Result<()> {
        let (works, before) = (&self.works, self.state.take());
        let rank = self.transport.rank();
        let mut call = Call {
            transport: &mut self.transport,
            patience: self.patience,
            failed: &mut self.failed,
            calls: &mut self.calls,
            tally: &mut self.tally,
        };
        let pass = call.run(Doing::Forward, &works.schedule.forward, |poll| {
            works.check(rank, &inputs)?;
            output.check(&inputs)?;
            Forward::new(works, inputs, before, Hook::new(&mut |_| poll()))
        })?;
        let kernels = &works.kernels;
        call.finish(Doing::Forward, |poll| {
            Ok(kernels.finish_state(&pass.state, output, Hook::new(&mut |_| poll()))?)
        })?;
        self.state = Some(pass.state);
        Ok(())
    }

    /// Gradients with respect to this rank's queries, keys and values.
    pub fn backward<E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
    ) -> Result<Gradients<E>> {
        let mut gradients = Gradients::zeros(&inputs)?;
        self.backward_into(inputs, arrived, gradients.as_mut())?;
        Ok(gradients)
    }

    /// Gradients, written where `gradients` says. They are summed up there if they are f32 and lie one
    /// after the other as `[batch, head, token, dim]`; others take as much memory in f32 meanwhile. After an error they
    /// mean nothing.
    pub fn backward_into<E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
        gradients: GradientsMut<'_, E>,
    ) -> Result<()> {
        let works = &self.works;
        let rank = self.transport.rank();
        let dims = works.problem.output_dims(inputs.q.dims().tokens);
        let mut delta = vec![0.0; dims.batch * dims.heads * dims.tokens];
        let GradientsMut { mut dq, mut dk, mut dv } = gradients;
        let mut beside = [const { Vec::new() }; 3];
        let mut call = Call {
            transport: &mut self.transport,
            patience: self.patience,
            failed: &mut self.failed,
            calls: &mut self.calls,
            tally: &mut self.tally,
        };
        let pass = call.run(Doing::Backward, &works.schedule.backward, |poll| {
            works.check(rank, &inputs)?;
            same("out", arrived.out.dims(), dims)?;
            let own = GradientsMut { dq: dq.reborrow(), dk: dk.reborrow(), dv: dv.reborrow() };
            own.check(&inputs, &arrived)?;
            works.kernels.row_deltas(arrived, &mut delta, Hook::new(&mut |_| poll()))?;
            let Arrived { lse, lse_rest, dout, .. } = arrived;
            let rows = RowStatistics { lse, lse_rest, delta: &delta };
            let [q, k, v] = &mut beside;
            let (dq, dk) = (sums(&mut dq, q, poll)?, sums(&mut dk, k, poll)?);
            let sums = Sums { dq, dk, dv: sums(&mut dv, v, poll)? };
            Ok(Backward::new(works, inputs, dout, rows, sums))
        });
        drop(pass?);
        call.finish(Doing::Backward, |poll| {
            let sums = beside.iter().zip([dq, dk, dv]).filter(|(sums, _)| !sums.is_empty());
            for (sums, gradient) in sums {
                works.kernels.round(sums, gradient, Hook::new(&mut |_| poll()))?;
            }
            Ok(())
        })
    }
}

/// What a pass needs of a ring.
struct Call<'a> {
    transport: &'a mut dyn Transport,
    patience: Duration,
    failed: &'a mut bool,
    calls: &'a mut u32,
    tally: &'a mut Tally,
}

impl Call<'_> {
    /// Makes a pass and runs it, or tells the others that this rank can't.
    fn run<P: Pass>(
        &mut self,
        doing: Doing,
        steps: &[Step],
        make: impl FnOnce(&mut Poll<'_>) -> Result<P>,
    ) -> Result<P> {
        if *self.failed {
            return Err(Error::Failing);
        }
        *self.calls += 1;
        let mut link = Link::new(self.transport, doing, *self.calls, self.patience);
        // A rank whose own arguments are wrong owes all messages.
        let refused =
            |error: Error| Stopped { error: error.into(), step: 0, owed: pass::owed(steps) };
        let pass = link.compute(0, make);
        let ended = pass.map_err(refused).and_then(|mut pass| {
            pass::run(&mut link, steps, &mut pass, self.tally)?;
            // No rank has a result before all have.
            match link.gather(END, DONE, "the end of the pass") {
                Ok(_) => Ok(pass),
                Err(error) => Err(Stopped { error: error.into(), step: END, owed: Vec::new() }),
            }
        });
        ended.map_err(|Stopped { error, step, owed }| {
            *self.failed = true;
            link.give_up(*error, step, owed)
        })
    }

    /// What is left to do once all ranks are at the end of a pass.
    fn finish(
        &mut self,
        doing: Doing,
        work: impl FnOnce(&mut Poll<'_>) -> Result<()>,
    ) -> Result<()> {
        Link::new(self.transport, doing, *self.calls, self.patience).compute(END, work)
    }
}

impl Works {
    fn check<E: Element>(&self, rank: usize, inputs: &Inputs<'_, E>) -> Result<()> {
        let problem = &self.problem;
        let tokens = problem.shards.rank(rank).len() as usize;
        if E::TYPE != problem.element {
            let (got, expected) = (E::TYPE, problem.element);
            return Err(Error::Elements { got, expected });
        }
        same("q", inputs.q.dims(), problem.query_dims(tokens))?;
        same("k", inputs.k.dims(), problem.key_dims(tokens))?;
        same("v", inputs.v.dims(), problem.value_dims(tokens))?;
        for (tensor, view) in [("k", &inputs.k), ("v", &inputs.v)] {
            if problem.wire == Wire::Int8 && !is_finite(view) {
                return Err(Error::NotFinite { tensor });
            }
        }
        Ok(())
    }
}

fn is_finite<E: Element>(view: &View<'_, E>) -> bool {
    let dims = view.dims();
    let mut row = vec![E::default(); dims.dim];
    (0..dims.batch * dims.heads * dims.tokens).all(|index| {
        let (head, token) = (index / dims.tokens, index % dims.tokens);
        view.copy_row(head / dims.heads, token, head % dims.heads, &mut row);
        row.iter().all(|x| x.to_f32().is_finite())
    })
}

fn same(tensor: &'static str, got: Dims, expected: Dims) -> Result<()> {
    let axes = [
        ("batch entries", got.batch, expected.batch, "as the ring was made for"),
        ("tokens", got.tokens, expected.tokens, "as the shards say"),
        ("heads", got.heads, expected.heads, "as the ring was made for"),
        ("numbers a head", got.dim, expected.dim, "as the ring was made for"),
    ];
    for (axis, got, expected, why) in axes {
        if got != expected {
            return Err(Error::Shape { tensor, axis, got, expected, why });
        }
    }
    Ok(())
}

/// Zeros to add a gradient up in, `[batch, head, token, dim]`: its own memory where that is so, or
/// else memory beside it.
fn sums<'b, E: Element + Pod>(
    gradient: &'b mut ViewMut<'_, E>,
    beside: &'b mut Vec<f32>,
    poll: &mut Poll<'_>,
) -> Result<&'b mut [f32]> {
    /// Elements that are cleared between two polls, in about a millisecond.
    const CHUNK: usize = 1 << 20;
    let elements = gradient.dims().elements().unwrap_or(0);
    match gradient.as_mut_slice() {
        Some(own) if E::TYPE == ElementType::F32 => {
            let own: &mut [f32] = cast_slice_mut(own);
            for chunk in own.chunks_mut(CHUNK) {
                chunk.fill(0.0);
                if poll().is_break() {
                    return Err(longspan::Error::Stopped { done: 0, total: 0 }.into());
                }
            }
            Ok(own)
        }
        _ => {
            *beside = vec![0.0; elements];
            Ok(beside)
        }
    }
}

/// Agrees with the other ranks, and makes the schedule and its layouts.
fn prepare(link: &mut Link<'_>, problem: Problem, options: &Options) -> Result<Works> {
    let (rank, ranks) = (link.rank(), link.size());
    agree(link, &problem)?;
    if problem.shards.ranks() != ranks {
        return Err(Error::Ranks { shards: problem.shards.ranks(), ranks });
    }
    if problem.fold == Fold::Reproducible {
        problem.shards.check_edges(TILE as u64)?;
    }
    let pattern = want::any_head(&problem.pattern, problem.heads)?;
    let mut sight = Sight::new(&pattern);
    let wants = link.compute(0, |poll| {
        let want = |owner| match owner == rank {
            true => Ok(Want::default()),
            false => Want::of(&problem, &pattern, &mut sight, rank, owner, poll),
        };
        (0..ranks).map(want).collect::<Result<Vec<_>>>()
    })?;

    let (wanted, guests) = ask(link, &wants)?;
    let deal = Deal::of(&problem, rank, wanted);
    let said: Vec<_> = (0..ranks).map(|to| deal.for_rank(to)).collect();
    let heard = link.exchange(DEALS, &said, "how keys reach this rank")?;
    let dealt = heard.iter().enumerate().map(|(owner, bytes)| deal::read(owner, bytes));
    let dealt = dealt.collect::<Result<Vec<_>>>()?;
    let known = Known { rank, wants: &wants, dealt: &dealt, deal: &deal, guests: &guests };
    let schedule = Schedule::new(&problem, &known);

    let works = link.compute(0, |poll| layouts(rank, problem, schedule, options, poll))?;
    link.gather(END, DONE, "the end of the preparation")?;
    Ok(works)
}

/// Compiles the layouts of a schedule.
fn layouts(
    rank: usize,
    problem: Problem,
    schedule: Schedule,
    options: &Options,
    poll: &mut Poll<'_>,
) -> Result<Works> {
    let held = problem.shards.rank(rank);
    let nothing = Positions::default();
    let kernels = attention(&problem, options, &nothing, &nothing, poll)?;
    let mut make = |queries: &Positions, keys: &Positions| -> Result<Attention> {
        Ok(attention(&problem, options, queries, keys, poll)?.share_scratch(&kernels))
    };
    let hostings = schedule.hostings.iter().map(|hosting| make(&hosting.positions, held));
    let hostings = hostings.collect::<Result<_>>()?;
    let mut pieces = |queries: &Positions, keys: &Positions| -> Result<Vec<Piece>> {
        let count = keys.len() as usize;
        let size = if problem.fold == Fold::Overlapped { count } else { TILE };
        let cut = |from: usize| {
            let keys_here = from..(from + size).min(count);
            let numbers = Tokens::range(from as i64, keys_here.len() as u64)?;
            let attention = make(queries, &tokens::stand(keys, &numbers))?;
            Ok(Piece { attention, keys: keys_here })
        };
        (0..count).step_by(size.max(1)).map(cut).collect()
    };
    let own = schedule.own.iter().map(|own| {
        let numbers = Tokens::range(own.start as i64, own.len() as u64)?;
        pieces(held, &tokens::stand(held, &numbers))
    });
    let own = own.collect::<Result<_>>()?;
    let arrivals = schedule.arrivals.iter().map(|arrival| match &arrival.stay {
        Some(stay) => pieces(&tokens::stand(held, stay), &arrival.positions),
        None => pieces(held, &arrival.positions),
    });
    let arrivals = arrivals.collect::<Result<_>>()?;
    Ok(Works { problem, schedule, kernels, own, arrivals, hostings })
}

/// First steps of what ranks tell each other while they agree; ranks are fewer than between them.
const WANTS: u32 = 1 << 20;
const DEALS: u32 = 1 << 21;

/// Whether all ranks mean the same.
fn agree(link: &mut Link<'_>, problem: &Problem) -> Result<()> {
    let digest = problem.digest();
    let mine: Vec<u8> = digest.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect();
    let said = link.gather(0, &mine, "what the ring computes")?;
    for (index, (what, _)) in digest.iter().enumerate() {
        let field = |bytes: &[u8]| bytes[8 * index..8 * index + 8].to_vec();
        let same = |rank: &usize| field(&said[*rank]) == field(&mine);
        let (agree, differ): (Vec<_>, Vec<_>) = (0..said.len()).partition(same);
        if !differ.is_empty() {
            let what = (*what).to_owned();
            return Err(Error::Disagree { what, rank: link.rank(), agree, differ });
        }
    }
    Ok(())
}

/// Tells every rank what this one wants of it; returns what each wants of this one: keys, and to
/// send queries.
fn ask(link: &mut Link<'_>, wants: &[Want]) -> Result<(Vec<Tokens>, Vec<Tokens>)> {
    let said = wants.iter().map(|want| {
        let mut bytes = Vec::new();
        if *want != Want::default() {
            write_tokens(&mut bytes, &want.keys);
            write_tokens(&mut bytes, &want.guests);
        }
        bytes
    });
    let said: Vec<_> = said.collect();
    let heard = link.exchange(WANTS, &said, "which keys are wanted")?;
    let mut wanted = Vec::with_capacity(heard.len());
    let mut guests = Vec::with_capacity(heard.len());
    for bytes in &heard {
        let mut reader = Reader::new(bytes);
        let empty = bytes.is_empty();
        let mut read = || if empty { Ok(Tokens::default()) } else { reader.tokens() };
        wanted.push(read()?);
        guests.push(read()?);
    }
    Ok((wanted, guests))
}

/// The kernels over some queries and keys.
fn attention(
    problem: &Problem,
    options: &Options,
    queries: &Positions,
    keys: &Positions,
    poll: &mut Poll<'_>,
) -> Result<Attention> {
    let tokens = problem.shards.tokens();
    let shape = Shape::new(tokens, tokens).query_map(queries.clone()).key_map(keys.clone());
    let layouts: Layouts = match &problem.pattern {
        Heads::Same(pattern) => Layout::compile_with(pattern, &shape, |_, _| poll())?.into(),
        heads => {
            let padding = Padding::None(problem.batch);
            let poll = |_, _| poll();
            LayoutSet::compile_with(heads, problem.heads, &shape, &padding, None, poll)?.into()
        }
    };
    let mut attention = Attention::new(layouts)
        .score(problem.score.clone())
        .threads(options.threads)
        .precision(options.precision);
    if let Some(executor) = &options.executor {
        attention = attention.executor(executor.clone());
    }
    if let Some(scale) = problem.scale {
        attention = attention.scale(scale);
    }
    if let Some(isa) = options.isa {
        attention = attention.isa(isa);
    }
    Ok(attention)
}
