//! Whatever one rank meets, all ranks end with an error, soon, and nobody with a wrong number.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longspan::Pattern;
use longspan_ring::{
    Error, Failure, Hop, Local, Meanwhile, Options, Problem, Ring, Shards, Transport,
};
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

mod common;

use common::*;

const RANKS: usize = 4;
const TOKENS: u64 = 600;
const PATIENCE: Duration = Duration::from_millis(300);

/// What happens to one rank.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// It ends.
    Dies,
    /// It stops for longer than anybody waits.
    Stalls,
    /// A bit of what it sends is turned.
    Flips,
    /// It sends one byte more.
    Grows,
    /// It sends what was meant for the hop before.
    Repeats,
}

const FAULTS: [Fault; 5] = [Fault::Dies, Fault::Stalls, Fault::Flips, Fault::Grows, Fault::Repeats];

/// A rank to which something happens at one of its hops.
struct Unlucky {
    local: Local,
    fault: Fault,
    hops_left: usize,
    hops: &'static AtomicUsize,
    bit: usize,
    last: Vec<longspan_ring::Outgoing>,
}

impl Transport for Unlucky {
    fn rank(&self) -> usize {
        self.local.rank()
    }

    fn size(&self) -> usize {
        self.local.size()
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        // What sends nothing can't send it wrongly.
        let sends = !hop.sends.is_empty();
        self.hops.fetch_add(usize::from(sends), Ordering::Relaxed);
        if self.hops_left > 0 || !sends {
            self.hops_left -= usize::from(sends);
            if sends {
                self.last = hop.sends.to_vec();
            }
            return self.local.hop(hop, meanwhile);
        }
        self.hops_left = usize::MAX;
        match self.fault {
            Fault::Dies => panic!("killed, as the test wants it"),
            Fault::Stalls => std::thread::sleep(4 * PATIENCE),
            Fault::Flips => {
                for send in &mut *hop.sends {
                    // Behind the header's checksum nothing is read up to its end.
                    let bits = 8 * (send.bytes.len() - 16);
                    let bit = self.bit % bits;
                    let bit = if bit < 8 * 48 { bit } else { bit + 8 * 16 };
                    send.bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
            Fault::Grows => {
                for send in &mut *hop.sends {
                    send.bytes.resize(send.bytes.len() + 1);
                }
            }
            Fault::Repeats => {
                for send in &mut *hop.sends {
                    if let Some(last) = self.last.iter().find(|last| last.to == send.to) {
                        send.bytes = last.bytes.clone();
                    } else {
                        send.bytes.fill(0);
                    }
                }
            }
        }
        self.local.hop(hop, meanwhile)
    }
}

fn case() -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left: 200, right: 0 }, Rule::Sinks { n: 3 }]);
    AttentionCase::new("faults", Rule::And(vec![Rule::Causal, sinks]), TOKENS)
}

/// Both passes of a rank, until an error.
fn pass<T: Transport>(transport: T, problem: Problem, numbers: &Numbers) -> Result<Results, Error> {
    let share = Share::of(numbers, &positions(problem.shards(), transport.rank()));
    both_with(transport, problem, &share, Options { patience: PATIENCE, ..options() })
}

/// Hops in which any rank has sent something, of all runs.
static HOPS: AtomicUsize = AtomicUsize::new(0);

type Ended = (Result<Results, Error>, Duration);

fn run(
    numbers: &Numbers,
    shards: &Shards,
    unlucky: usize,
    fault: Fault,
    hop: usize,
    bit: usize,
) -> Vec<Ended> {
    let case = case();
    std::thread::scope(|scope| {
        let start = Instant::now();
        let spawn = |(rank, local): (usize, Local)| {
            let problem = problem(&case, shards.clone());
            scope.spawn(move || {
                let hops_left = if rank == unlucky { hop } else { usize::MAX };
                let last = Vec::new();
                let transport = Unlucky { local, fault, hops_left, hops: &HOPS, bit, last };
                let caught = std::panic::AssertUnwindSafe(|| pass(transport, problem, numbers));
                let ended = std::panic::catch_unwind(caught);
                let died = || Error::Failing;
                (ended.unwrap_or_else(|_| Err(died())), start.elapsed())
            })
        };
        let ranks: Vec<_> = Local::ranks(RANKS).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Faults at every hop, to every rank in turn.
#[test]
fn faults_end_in_errors_everywhere() {
    let numbers = case().unmasked();
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    let expected = run(&numbers, &shards, RANKS, Fault::Dies, 0, 0);
    // Of one rank, on average.
    let most = HOPS.load(Ordering::Relaxed) / RANKS;
    assert!(most > 10, "{most} hops");
    let (mut errors_everywhere, mut nothing_happened, mut too_late) = (0, 0, 0);
    for number in 0..150 {
        let (unlucky, fault) = (number % RANKS, FAULTS[number % FAULTS.len()]);
        let hop = (number * 7) % most;
        let ended = run(&numbers, &shards, unlucky, fault, hop, number * 1_237);
        let what = format!("rank {unlucky}, {fault:?} at hop {hop}");
        let mut well = 0;
        for (rank, (result, after)) in ended.iter().enumerate() {
            assert!(
                *after < 4 * PATIENCE + Duration::from_secs(2),
                "{what}: rank {rank} after {after:?}"
            );
            match result {
                Ok(got) => {
                    let expected = expected[rank].0.as_ref().unwrap();
                    let same = got.out == expected.out && got.dq == expected.dq;
                    assert!(same && got.dk == expected.dk, "{what}: wrong numbers on rank {rank}");
                    well += 1;
                }
                Err(error) => {
                    let text = error.to_string();
                    let named = text.contains("rank") || rank == unlucky;
                    assert!(named, "{what}: rank {rank} says {text}");
                }
            }
        }
        match well {
            0 => errors_everywhere += 1,
            // It happened after the last hop, or to a message that was the same.
            RANKS => nothing_happened += 1,
            // It happened to the last messages of all, which say that everybody has a result.
            _ => too_late += 1,
        }
    }
    let counts = format!("{errors_everywhere} / {nothing_happened} / {too_late}");
    assert!(errors_everywhere > 100 && too_late < 15, "{counts}");
}

#[test]
fn ranks_that_mean_different_things_say_who() {
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(RANKS).into_iter().enumerate() {
            let window = if rank == 2 { 31 } else { 30 };
            let pattern = Pattern::window(window, 0).unwrap();
            let problem = Problem::new(pattern, shards.clone());
            scope.spawn(move || {
                let error = Ring::new(transport, problem, options()).unwrap_err();
                let Error::Disagree { what, differ, agree, .. } = &error else { panic!("{error}") };
                assert_eq!(what, "the pattern");
                let others = [0, 1, 3];
                let expected: (&[usize], &[usize]) =
                    if rank == 2 { (&[2], &others) } else { (&others, &[2]) };
                assert_eq!((&agree[..], &differ[..]), expected);
            });
        }
    });
}

#[test]
fn a_wrong_shape_on_one_rank_ends_the_pass_for_all() {
    let case = case();
    let numbers = case.unmasked();
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(RANKS).into_iter().enumerate() {
            let problem = problem(&case, shards.clone());
            let (shards, numbers) = (&shards, &numbers);
            scope.spawn(move || {
                let mut chosen = positions(shards, rank);
                if rank == 1 {
                    chosen.pop();
                }
                let share = Share::of(numbers, &chosen);
                let mut ring = Ring::new(transport, problem, options()).unwrap();
                let inputs = share.inputs();
                let error = ring.forward(inputs.q, inputs.k, inputs.v).unwrap_err();
                match rank {
                    1 => assert!(error.to_string().contains("149 tokens, expected 150"), "{error}"),
                    _ => assert!(matches!(error, Error::GivenUp { rank: Some(1), .. }), "{error}"),
                }
                let again = ring.forward(inputs.q, inputs.k, inputs.v).unwrap_err();
                assert_eq!(again, Error::Failing);
            });
        }
    });
}
