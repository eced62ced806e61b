//! Runs a pass from start to synchronization, and aborts on errors.

use std::time::Duration;

use super::{Pass, PassFailure, Tally, receivers, run};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::phase::{END, Phase};
use crate::schedule::Step;
use crate::transport::{Poll, Transport};

/// Contents of the messages that synchronize ranks at the end of a phase.
pub(crate) const DONE: &[u8] = &[1; 8];

/// The parts of a ring that a pass uses.
pub(crate) struct Runner<'a> {
    pub(crate) transport: &'a mut dyn Transport,
    pub(crate) timeout: Duration,
    pub(crate) failed: &'a mut bool,
    pub(crate) calls: &'a mut u32,
    pub(crate) tally: &'a mut Tally,
}

impl Runner<'_> {
    /// Makes a pass and runs it; on an error aborts on all ranks.
    pub(crate) fn run<P: Pass>(
        &mut self,
        phase: Phase,
        steps: &[Step],
        make: impl FnOnce(&mut Poll<'_>) -> Result<P>,
    ) -> Result<P> {
        if *self.failed {
            return Err(Error::Failing);
        }
        *self.calls += 1;
        let mut comm = Communicator::new(self.transport, phase, *self.calls, self.timeout);
        // With invalid arguments none of the rank's messages is sent.
        let refused = |error: Error| PassFailure {
            error: error.into(),
            step: 0,
            receivers: receivers(steps),
        };
        let pass = comm.compute(0, make);
        let ended = pass.map_err(refused).and_then(|mut pass| {
            run(&mut comm, steps, &mut pass, self.tally)?;
            // No rank returns a result before all ranks have theirs.
            match comm.allgather(END, DONE, "the end of the pass") {
                Ok(_) => Ok(pass),
                Err(error) => {
                    Err(PassFailure { error: error.into(), step: END, receivers: Vec::new() })
                }
            }
        });
        ended.map_err(|PassFailure { error, step, receivers }| {
            *self.failed = true;
            comm.abort(*error, step, receivers)
        })
    }

    /// Local work after all ranks have reached the end of a pass.
    pub(crate) fn finish(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&mut Poll<'_>) -> Result<()>,
    ) -> Result<()> {
        Communicator::new(self.transport, phase, *self.calls, self.timeout).compute(END, work)
    }
}
