//! Panics inside calls: the call fails at once, and the next one runs on all workers with the right
//! bits.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use longspan::fault::{self, Site};
use longspan::{
    GradientsMut, Hook, Isa, Order, OutputGradient, OutputMut, OutputRef, Pool, Progress,
};
use longspan_testing::{AttentionCase, Rule, Values, seeded_bytes};

mod common;

use common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

/// Where a panic comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Hook,
    Site(Site),
}

const SOURCES: [Source; 3] = [Source::Hook, Source::Site(Site::Kernel), Source::Site(Site::Mask)];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    Backward,
}

struct Calls {
    tensors: Tensors,
    right: Values<f32>,
}

impl Calls {
    /// One pass, with a hook.
    fn run(
        &self,
        attention: &longspan::Attention,
        pass: Pass,
        hook: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> longspan::Result<()> {
        let (sizes, inputs, hook) = (&self.tensors.sizes, self.tensors.inputs(), Hook::new(hook));
        match pass {
            Pass::Forward => {
                let mut out = Buffer::poisoned(dims_out(sizes), PLACEMENT);
                let mut lse = vec![0.0; sizes.rows()];
                let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
                attention.forward_into(inputs, output, hook)
            }
            Pass::Backward => {
                let out = Buffer::of(&self.right.out, dims_out(sizes), PLACEMENT);
                let mut dq = Buffer::poisoned(dims_q(sizes), PLACEMENT);
                let mut dk = Buffer::poisoned(dims_k(sizes), PLACEMENT);
                let mut dv = Buffer::poisoned(dims_v(sizes), PLACEMENT);
                let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
                let (saved, gradient) = (
                    OutputRef { out: out.view(), lse: &self.right.lse, lse_lo: None },
                    OutputGradient { dout: self.tensors.dout.view(), dlse: None },
                );
                attention.backward_into(inputs, saved, gradient, gradients, hook)
            }
        }
    }

    /// How often a source is passed in a call.
    fn passes(&self, attention: &longspan::Attention, pass: Pass, source: Source) -> usize {
        let mut polls = 0;
        if let Source::Site(site) = source {
            fault::arm(site, 1 << 40);
        }
        let mut count = |_| {
            polls += 1;
            ControlFlow::Continue(())
        };
        self.run(attention, pass, &mut count).unwrap();
        match source {
            Source::Hook => polls,
            Source::Site(site) => (1 << 40) - fault::disarm(site).unwrap(),
        }
    }

    /// A call whose source panics after so many passes; how long it took to fail.
    fn fail(
        &self,
        attention: &longspan::Attention,
        pass: Pass,
        source: Source,
        after: usize,
    ) -> Option<Duration> {
        let mut left = after;
        let mut hook = |_| {
            if matches!(source, Source::Hook) {
                left = left.checked_sub(1).expect("injected in the hook");
            }
            ControlFlow::Continue(())
        };
        if let Source::Site(site) = source {
            fault::arm(site, after);
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run(attention, pass, &mut hook)));
        let took = start.elapsed();
        if let Source::Site(site) = source {
            fault::disarm(site);
        }
        outcome.is_err().then_some(took)
    }
}

#[test]
fn calls_fail_at_once_and_the_next_runs_on_all_workers() {
    let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 300, right: 0 }]);
    let case =
        AttentionCase { heads_q: 4, heads_kv: 4, ..AttentionCase::new("panics", rule, 1_100) };
    let tensors = Tensors::of(&case.unmasked(), PLACEMENT);
    let alone = attention(&case, Isa::best(), 1);
    let right = Run { attention: &alone, tensors: &tensors, results: PLACEMENT }.both();
    let calls = Calls { tensors, right };
    let observed = Arc::new(Observed::new(Pool::new(8).unwrap()));
    // The panics are many, and meant.
    std::panic::set_hook(Box::new(|_| {}));

    let count = number("LONGSPAN_CASES", 200) as usize;
    let draws = seeded_bytes(number("LONGSPAN_SEED", 1), 4 * count);
    let passes = [Pass::Forward, Pass::Backward]
        .map(|pass| SOURCES.map(|source| calls.passes(&alone, pass, source)));
    let (mut failed, mut slowest) = (0, Duration::ZERO);
    for (index, draw) in draws.chunks_exact(4).enumerate() {
        let source = SOURCES[index % SOURCES.len()];
        let pass = if draw[0] % 2 == 0 { Pass::Forward } else { Pass::Backward };
        let threads = 1 + usize::from(draw[1] % 8);
        let what = format!("{index}: {source:?}, {pass:?}, {threads} threads");
        let attention = attention(&case, Isa::best(), threads).executor(observed.clone());
        let passes = passes[pass as usize][index % SOURCES.len()];
        assert!(passes > 10, "{what}: {passes} passes");
        // The hook of one of several threads runs less often than that of one.
        let last = if matches!(source, Source::Hook) { passes / (2 * threads) } else { passes };
        let after = usize::from(u16::from_le_bytes([draw[2], draw[3]])) % last.max(1);
        observed.take();
        if let Some(took) = calls.fail(&attention, pass, source, after) {
            failed += 1;
            slowest = slowest.max(took);
            assert!(took < Duration::from_secs(1), "{what} after {after}: {took:?}");
        } else {
            // Other threads have done the work before the caller's hook ran as often as that.
            assert!(
                matches!(source, Source::Hook) && threads > 1,
                "{what} after {after}: no panic"
            );
        }
        observed.take();
        let next =
            Run { attention: &attention, tensors: &calls.tensors, results: PLACEMENT }.both();
        assert_eq!(next, calls.right, "{what} after {after}");
        let seen = observed.take();
        assert!(seen.iter().all(|&(asked, seen)| asked == seen), "{what}: {seen:?}");
        let all = seen.iter().filter(|call| call.1 == threads).count();
        assert!(all >= 2 || threads == 1, "{what}: {seen:?}");
    }
    let _ = std::panic::take_hook();
    assert!(failed * 10 >= count * 9, "{failed} of {count} calls failed");
    eprintln!("{failed} of {count} calls failed, the slowest after {slowest:?}");
}
