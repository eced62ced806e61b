//! A fault of one rank ends the call with an error on all ranks, in time; no rank returns a wrong
//! result.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longspan::{Gradients, Inputs, Pattern};
use longspan_ring::{Error, Local, Options, Outgoing, Problem, Ring, Shards, Transport};
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

use crate::common::faulty::{Faulty, flip, grow, repeat};
use crate::common::*;

const RANKS: usize = 4;
const TOKENS: usize = 600;
const TIMEOUT: Duration = Duration::from_secs(1);

/// A fault of one rank.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Its thread ends.
    Dies,
    /// It stalls until all others have ended.
    Stalls,
    /// A bit of its messages is flipped.
    Flips,
    /// Its messages are one byte longer.
    Grows,
    /// It repeats the messages of the hop before.
    Repeats,
}

const FAULTS: [Fault; 5] = [Fault::Dies, Fault::Stalls, Fault::Flips, Fault::Grows, Fault::Repeats];

fn case() -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left: 200, right: 0 }, Rule::Sinks { n: 3 }]);
    AttentionCase::new("faults", Rule::And(vec![Rule::Causal, sinks]), TOKENS as u64)
}

/// Both passes of a rank, until an error.
fn pass<T: Transport>(
    transport: T,
    problem: Problem,
    numbers: &Numbers,
    timeout: Duration,
) -> Result<Results, Error> {
    let share = Share::of(numbers, &positions(problem.shards(), transport.rank()));
    both_with(transport, problem, &share, Options { timeout, ..options() })
}

/// A fault of a rank at one of the hops in which it sends.
#[derive(Debug, Clone, Copy)]
struct Injection {
    fault: Fault,
    rank: usize,
    hop: usize,
    bit: usize,
}

/// Hops with sends, of all ranks and runs.
static HOPS: AtomicUsize = AtomicUsize::new(0);

type Ended = (Result<Results, Error>, Duration);

fn run(
    numbers: &Numbers,
    shards: &Shards,
    dilated: bool,
    injection: Option<Injection>,
) -> Vec<Ended> {
    let case = case();
    let others_ended = &Barrier::new(RANKS);
    let stalls = injection.is_some_and(|injection| matches!(injection.fault, Fault::Stalls));
    std::thread::scope(|scope| {
        let start = Instant::now();
        let spawn = |(rank, local): (usize, Local)| {
            let problem = match dilated {
                true => dilated_problem(&case, shards.clone(), 400),
                false => problem(&case, shards.clone()),
            };
            let mine = injection.filter(|injection| injection.rank == rank);
            scope.spawn(move || {
                let mut waited = false;
                let what = |sends: &mut [Outgoing], last: &[Outgoing]| {
                    let Injection { fault, bit, .. } = mine.expect("injected on this rank");
                    match fault {
                        Fault::Dies => panic!("killed by the test"),
                        Fault::Stalls => {
                            others_ended.wait();
                            waited = true;
                        }
                        Fault::Flips => flip(sends, bit),
                        Fault::Grows => grow(sends),
                        Fault::Repeats => repeat(sends, last),
                    }
                };
                let mut transport = Faulty::new(local, mine.map(|injection| injection.hop), what);
                // A run without a fault must not fail on a busy machine.
                let timeout = injection.map_or(100 * TIMEOUT, |_| TIMEOUT);
                let caught = std::panic::AssertUnwindSafe(|| {
                    pass(&mut transport, problem, numbers, timeout)
                });
                let ended = std::panic::catch_unwind(caught);
                HOPS.fetch_add(transport.hops, Ordering::Relaxed);
                drop(transport);
                let took = start.elapsed();
                if stalls && !waited {
                    others_ended.wait();
                }
                (ended.unwrap_or(Err(Error::Failing)), took)
            })
        };
        let ranks: Vec<_> = Local::ranks(RANKS).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The rank that an error names.
fn suspect(error: &Error) -> Option<usize> {
    match error {
        Error::Failed { failure, suspect, .. } => suspect.or(failure.rank()),
        Error::Message { from, .. } => Some(*from),
        Error::Aborted { suspect, .. } => *suspect,
        _ => None,
    }
}

/// Faults at every hop, of every rank in turn; of a pattern, and of dilated attention.
#[test]
fn faults_end_in_errors_on_all_ranks() {
    let numbers = case().unmasked();
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    let expected = [false, true].map(|dilated| run(&numbers, &shards, dilated, None));
    // Of one rank, on average.
    let most = HOPS.load(Ordering::Relaxed) / (2 * RANKS);
    assert!(most > 10, "{most} hops");
    let (mut errors_on_all, mut no_effect, mut after_the_end) = (0, 0, 0);
    for run_index in 0..150 {
        let (rank, fault) = (run_index % RANKS, FAULTS[run_index % FAULTS.len()]);
        let injection =
            Injection { fault, rank, hop: (run_index * 7) % most, bit: run_index * 1_237 };
        // Each kind of fault with both, on every rank.
        let dilated = run_index / (RANKS * FAULTS.len()) % 2 == 1;
        let expected = &expected[usize::from(dilated)];
        let ended = run(&numbers, &shards, dilated, Some(injection));
        let mut succeeded = 0;
        for (rank, (result, after)) in ended.iter().enumerate() {
            let others = rank != injection.rank;
            assert!(
                !others || *after < TIMEOUT + Duration::from_secs(2),
                "{injection:?}: rank {rank} after {after:?}"
            );
            match result {
                Ok(got) => {
                    let expected = expected[rank].0.as_ref().unwrap();
                    let same = got.out == expected.out && got.dq == expected.dq;
                    let same = same && got.dk == expected.dk && got.dv == expected.dv;
                    assert!(same, "{injection:?}: wrong results on rank {rank}");
                    succeeded += 1;
                }
                Err(error) => {
                    let right = suspect(error) == Some(injection.rank);
                    let all = || ended.iter().map(|(ended, _)| ended.as_ref().err());
                    assert!(
                        right || !others,
                        "{injection:?}: rank {rank} reports {error}\n{:#?}",
                        all().collect::<Vec<_>>()
                    );
                }
            }
        }
        match succeeded {
            0 => errors_on_all += 1,
            // After the last hop, or without effect on the message.
            RANKS => no_effect += 1,
            // On the messages of the final synchronization.
            _ => after_the_end += 1,
        }
    }
    let counts = format!("{errors_on_all} / {no_effect} / {after_the_end}");
    assert!(errors_on_all > 100 && after_the_end < 15, "{counts}");
}

#[test]
fn mismatched_arguments_name_ranks_and_values() {
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(RANKS).into_iter().enumerate() {
            let window = if rank == 2 { 31 } else { 30 };
            let pattern = Pattern::window(window, 0).unwrap();
            let problem = Problem::new(pattern, shards.clone());
            scope.spawn(move || {
                let error = Ring::new(transport, problem, options()).unwrap_err();
                let Error::Mismatch { what, values } = &error else { panic!("{error}") };
                assert_eq!(what, "pattern");
                let expected = [
                    (vec![2], "window(31, 0)".to_owned()),
                    (vec![0, 1, 3], "window(30, 0)".to_owned()),
                ];
                assert_eq!(values[..], expected, "rank {rank}");
            });
        }
    });
}

#[test]
fn wrong_input_shape_on_one_rank_ends_the_pass_on_all() {
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
                let error = ring.forward(inputs).unwrap_err();
                match rank {
                    1 => assert!(error.to_string().contains("149 tokens, expected 150"), "{error}"),
                    _ => {
                        assert!(matches!(error, Error::Aborted { suspect: Some(1), .. }), "{error}")
                    }
                }
                let again = ring.forward(inputs).unwrap_err();
                assert_eq!(again, Error::Failing);
            });
        }
    });
}

#[test]
fn wrong_result_shape_on_one_rank_ends_the_pass_on_all() {
    let case = case();
    let numbers = case.unmasked();
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(RANKS).into_iter().enumerate() {
            let problem = problem(&case, shards.clone());
            let share = Share::of(&numbers, &positions(&shards, rank));
            scope.spawn(move || {
                let mut ring = Ring::new(transport, problem, options()).unwrap();
                let inputs = share.inputs();
                let output = ring.forward(inputs).unwrap();
                let mut gradients = Gradients::zeros(&inputs).unwrap();
                if rank == 1 {
                    gradients.dk = Gradients::zeros(&Inputs { k: inputs.k.tokens(0..7), ..inputs })
                        .unwrap()
                        .dk;
                }
                let (saved, gradient) = (&output, share.dout.view());
                let error =
                    ring.backward_into(inputs, saved, gradient, gradients.as_mut()).unwrap_err();
                match rank {
                    1 => assert!(error.to_string().contains("dk"), "{error}"),
                    _ => {
                        assert!(matches!(error, Error::Aborted { suspect: Some(1), .. }), "{error}")
                    }
                }
            });
        }
    });
}
