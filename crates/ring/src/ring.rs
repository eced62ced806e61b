//! Public API of the ring: setup and passes of one rank. The top of the crate.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;
use longspan::{
    Dropout, Element, Gradients, GradientsMut, Hook, Inputs, Output, OutputGradient, OutputMut,
    OutputRef, Pool, RowStatistics, Score, State,
};

use crate::agreement;
use crate::arguments::{check_dims, check_inputs};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::layouts::CompiledSchedule;
use crate::options::Options;
use crate::pass::{Backward, BiasSums, DONE, Forward, GradientSums, Runner, Tally, f32_sums};
use crate::phase::{END, Phase};
use crate::problem::Problem;
use crate::transport::Transport;

/// Attention over one sequence that is sharded over ranks (context parallel), for one of the ranks.
///
/// Every rank makes a ring of the same [`Problem`], and calls the same passes in the same order with
/// its own tokens. Each rank gets its own rows of the results, equal to those of one process that
/// holds all tokens.
///
/// ```
/// use longspan::{Dims, Inputs, Order, Pattern, Tensor};
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
///             let x = Tensor::filled(1.0_f32, dims, Order::Bshd).unwrap();
///             let output = ring.forward(Inputs::new(x.view(), x.view(), x.view())).unwrap();
///             assert!(output.out.as_slice().iter().all(|x| (x - 1.0).abs() < 1e-6));
///         });
///     }
/// });
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ring<T> {
    transport: T,
    timeout: Duration,
    compiled: CompiledSchedule,
    calls: u32,
    failed: bool,
    tally: Tally,
    /// The state of the last forward pass, whose memory the next one reuses.
    state: Option<State>,
}

impl<T: Transport> Ring<T> {
    /// Checks that all ranks have equal problems, and makes this rank's schedule and layouts. A
    /// collective call.
    pub fn new(mut transport: T, problem: Problem, mut options: Options) -> Result<Self> {
        if options.executor.is_none() {
            options.executor = Some(Arc::new(Pool::new(options.threads.count()?)?));
        }
        let mut comm = Communicator::new(&mut transport, Phase::Setup, 0, options.timeout);
        let compiled = match prepare(&mut comm, problem, &options) {
            Ok(compiled) => compiled,
            Err(error) => {
                return Err(comm.abort(error, 0, []));
            }
        };
        let (timeout, tally) = (options.timeout, Tally::default());
        Ok(Ring { transport, timeout, compiled, calls: 0, failed: false, tally, state: None })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.compiled.problem
    }

    /// Changes the sink logits, one per query head; `None` is no sinks. Not a collective call:
    /// ranks do not compare them, since each row gets its sink on its own rank, but all should set
    /// the same, as they do with any parameter that an optimizer changes.
    ///
    /// ```
    /// use longspan::{Dims, Inputs, Order, Pattern, Tensor};
    /// use longspan_ring::{Local, Options, Problem, Ring, Shards};
    ///
    /// let problem = Problem::new(Pattern::full(), Shards::contiguous(3, 1, 1)?).dims(4, 4);
    /// let mut ring = Ring::new(Local::ranks(1).remove(0), problem, Options::default())?;
    /// ring.set_sink_logits(Some([3.0_f32.ln()].into()))?;
    /// let x = Tensor::filled(0.0_f32, Dims { batch: 1, tokens: 3, heads: 1, dim: 4 }, Order::Bhsd)?;
    /// let output = ring.forward(Inputs::new(x.view(), x.view(), x.view()))?;
    /// // Three keys of score 0, and a sink that weighs as much as they do.
    /// assert!((output.lse[0] - 6.0_f32.ln()).abs() < 1e-6);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_sink_logits(&mut self, logits: Option<Arc<[f32]>>) -> Result<()> {
        if let Some(logits) = &logits {
            let heads = self.compiled.problem.heads;
            longspan::Options::default().sink_logits(logits.clone()).check(heads)?;
        }
        self.compiled.set_sink_logits(logits);
        Ok(())
    }

    /// Changes what is done to scores and probabilities, as [`set_sink_logits`](Self::set_sink_logits)
    /// changes sinks: not a collective call, and all ranks have to set the same. Which pairs dropout
    /// drops is a function of its seed, so a training step has a seed of its own.
    ///
    /// ```
    /// use longspan::{Dims, Dropout, Inputs, Order, Pattern, Score, Tensor};
    /// use longspan_ring::{Local, Options, Problem, Ring, Shards};
    ///
    /// let problem = Problem::new(Pattern::full(), Shards::contiguous(3, 1, 1)?).dims(4, 4);
    /// let mut ring = Ring::new(Local::ranks(1).remove(0), problem, Options::default())?;
    /// ring.set_score(Score::default().alibi_slopes([1.0]), Some(Dropout::new(0.5, 3)?))?;
    /// let x = Tensor::filled(0.0_f32, Dims { batch: 1, tokens: 3, heads: 1, dim: 4 }, Order::Bhsd)?;
    /// let output = ring.forward(Inputs::new(x.view(), x.view(), x.view()))?;
    /// // Scores 0, −1 and −2 of the first query; dropout leaves the denominator as it is.
    /// assert!((output.lse[0] - (1.0 + (-1.0_f32).exp() + (-2.0_f32).exp()).ln()).abs() < 1e-6);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_score(&mut self, score: Score, dropout: Option<Dropout>) -> Result<()> {
        longspan::Options::default().score(score.clone()).check(self.compiled.problem.heads)?;
        self.compiled.set_score(score, dropout);
        Ok(())
    }

    /// Counters over all passes of this ring.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Bytes that this rank receives in a forward and in a backward pass, without headers; upper
    /// bounds where the wire format's lengths depend on the values.
    pub fn bytes_needed(&self) -> (u64, u64) {
        self.compiled.schedule.bytes_needed()
    }

    /// Active pairs of queries and keys that this rank computes per pass, of one batch entry.
    pub fn active_pairs(&self) -> Result<u128> {
        self.compiled.computations.active_pairs()
    }

    /// Returns the transport.
    pub fn into_transport(self) -> T {
        self.transport
    }

    /// Output and log-sum-exp of this rank's queries. A collective call.
    pub fn forward<E: Element + Pod>(&mut self, inputs: Inputs<'_, E>) -> Result<Output<E>> {
        let dims = self.compiled.problem.output_dims(inputs.q.dims().tokens);
        let mut output = Output::zeros(dims, inputs.q.order())?;
        self.forward_into(inputs, output.as_mut())?;
        Ok(output)
    }

    /// Output and log-sum-exp of this rank's queries, written to `output`. Between calls a ring keeps
    /// one f32 per element of the output.
    pub fn forward_into<E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
    ) -> Result<()> {
        let (compiled, previous) = (&self.compiled, self.state.take());
        let rank = self.transport.rank();
        let mut runner = Runner {
            transport: &mut self.transport,
            timeout: self.timeout,
            failed: &mut self.failed,
            calls: &mut self.calls,
            tally: &mut self.tally,
        };
        let pass = runner.run(Phase::Forward, &compiled.schedule.forward, |poll| {
            check_inputs(&compiled.problem, rank, &inputs)?;
            output.check(&inputs)?;
            Forward::new(compiled, inputs, previous, Hook::new(&mut |_| poll()))
        })?;
        let CompiledSchedule { kernels, problem, .. } = compiled;
        runner.finish(Phase::Forward, |poll| {
            let OutputMut { out, lse, mut lse_lo } = output;
            let written = OutputMut { out, lse: &mut *lse, lse_lo: lse_lo.as_deref_mut() };
            kernels.finish_state(&pass.state, written, Hook::new(&mut |_| poll()))?;
            let dims = pass.state.dims();
            problem.sparsity.exclude(problem.shards.rank(rank), dims, lse, lse_lo)
        })?;
        self.state = Some(pass.state);
        Ok(())
    }

    /// Gradients with respect to this rank's queries, keys and values, and what its queries
    /// contribute to those of sink logits, tables and slopes: these are parameters that every rank has, so their
    /// gradients are to be summed over ranks as those of other parameters. A collective call.
    pub fn backward<'a, E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
    ) -> Result<Gradients<E>> {
        let mut gradients = self.compiled.kernels.zero_gradients(&inputs)?;
        self.backward_into(inputs, output, gradient, gradients.as_mut())?;
        Ok(gradients)
    }

    /// Gradients, written to `gradients`. They are accumulated in place if they are f32 and contiguous
    /// as `[batch, head, token, dim]`; others need a temporary f32 per element. Unspecified after an
    /// error.
    pub fn backward_into<'a, E: Element + Pod>(
        &mut self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
        gradients: GradientsMut<'_, E>,
    ) -> Result<()> {
        let compiled = &self.compiled;
        let rank = self.transport.rank();
        let dims = compiled.problem.output_dims(inputs.q.dims().tokens);
        let mut delta = vec![0.0; dims.batch * dims.heads * dims.tokens];
        let (saved, gradient) = (output.into(), gradient.into());
        let GradientsMut { mut dq, mut dk, mut dv, .. } = gradients;
        let GradientsMut { mut dsink_logits, mut dbias_table, mut dalibi_slopes, .. } = gradients;
        let mut temporary = [const { Vec::new() }; 3];
        let mut runner = Runner {
            transport: &mut self.transport,
            timeout: self.timeout,
            failed: &mut self.failed,
            calls: &mut self.calls,
            tally: &mut self.tally,
        };
        let pass = runner.run(Phase::Backward, &compiled.schedule.backward, |poll| {
            check_inputs(&compiled.problem, rank, &inputs)?;
            check_dims("out", saved.out.dims(), dims)?;
            let own = GradientsMut {
                dsink_logits: dsink_logits.as_deref_mut(),
                dbias_table: dbias_table.as_deref_mut(),
                dalibi_slopes: dalibi_slopes.as_deref_mut(),
                ..GradientsMut::new(dq.reborrow(), dk.reborrow(), dv.reborrow())
            };
            own.check(&inputs, &saved, &gradient)?;
            compiled.kernels.row_deltas(saved, gradient, &mut delta, Hook::new(&mut |_| poll()))?;
            let OutputRef { lse, lse_lo, .. } = saved;
            let rows = RowStatistics { lse, lse_lo, delta: &delta };
            if let Some(into) = dsink_logits {
                let mut poll = |_| poll();
                compiled.kernels.sink_gradients(dims, rows, into, Hook::new(&mut poll))?;
            }
            let [q, k, v] = &mut temporary;
            let (dq, dk) = (f32_sums(&mut dq, q, poll)?, f32_sums(&mut dk, k, poll)?);
            let dv = f32_sums(&mut dv, v, poll)?;
            for list in [&mut dbias_table, &mut dalibi_slopes] {
                list.as_deref_mut().unwrap_or_default().fill(0.0);
            }
            let biases = BiasSums { table: dbias_table, slopes: dalibi_slopes };
            let sums = GradientSums { dq, dk, dv, biases };
            Ok(Backward::new(compiled, inputs, gradient.dout, rows, sums))
        });
        drop(pass?);
        runner.finish(Phase::Backward, |poll| {
            let sums = temporary.iter().zip([dq, dk, dv]).filter(|(sums, _)| !sums.is_empty());
            for (sums, gradient) in sums {
                compiled.kernels.round(sums, gradient, Hook::new(&mut |_| poll()))?;
            }
            Ok(())
        })
    }
}

/// Agrees with the other ranks on a schedule and compiles its layouts.
fn prepare(
    comm: &mut Communicator<'_>,
    problem: Problem,
    options: &Options,
) -> Result<CompiledSchedule> {
    if let Some(logits) = &problem.sink_logits {
        longspan::Options::default().sink_logits(logits.clone()).check(problem.heads)?;
    }
    let schedule = agreement::schedule(comm, &problem)?;
    let rank = comm.rank();
    let compiled =
        comm.compute(0, |poll| CompiledSchedule::new(rank, problem, schedule, options, poll))?;
    comm.allgather(END, DONE, "the end of setup")?;
    Ok(compiled)
}
