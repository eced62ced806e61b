//! Whatever one rank meets, all ranks end with an error, soon, and nobody with a wrong number.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longspan::{Arrived, Gradients, Inputs, Pattern};
use longspan_ring::{Error, Local, Options, Outgoing, Problem, Ring, Shards, Transport};
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

mod common;

use common::unlucky::{Unlucky, flip, grow, repeat};
use common::*;

const RANKS: usize = 4;
const TOKENS: u64 = 600;
const PATIENCE: Duration = Duration::from_millis(300);

/// What happens to one rank.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// It ends.
    Dies,
    /// It stops until all others have ended.
    Stalls,
    /// A bit of what it sends is turned.
    Flips,
    /// It sends one byte more.
    Grows,
    /// It sends what was meant for the hop before.
    Repeats,
}

const FAULTS: [Fault; 5] = [Fault::Dies, Fault::Stalls, Fault::Flips, Fault::Grows, Fault::Repeats];

fn case() -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left: 200, right: 0 }, Rule::Sinks { n: 3 }]);
    AttentionCase::new("faults", Rule::And(vec![Rule::Causal, sinks]), TOKENS)
}

/// Both passes of a rank, until an error.
fn pass<T: Transport>(transport: T, problem: Problem, numbers: &Numbers) -> Result<Results, Error> {
    let share = Share::of(numbers, &positions(problem.shards(), transport.rank()));
    both_with(transport, problem, &share, Options { patience: PATIENCE, ..options() })
}

/// What happens, to which rank, at which of the hops in which it sends something.
#[derive(Debug, Clone, Copy)]
struct Strike {
    fault: Fault,
    rank: usize,
    hop: usize,
    bit: usize,
}

/// Hops in which any rank has sent something, of all runs.
static HOPS: AtomicUsize = AtomicUsize::new(0);

type Ended = (Result<Results, Error>, Duration);

fn run(numbers: &Numbers, shards: &Shards, strike: Option<Strike>) -> Vec<Ended> {
    let case = case();
    let others_ended = &Barrier::new(RANKS);
    let stalls = strike.is_some_and(|strike| matches!(strike.fault, Fault::Stalls));
    std::thread::scope(|scope| {
        let start = Instant::now();
        let spawn = |(rank, local): (usize, Local)| {
            let problem = problem(&case, shards.clone());
            let mine = strike.filter(|strike| strike.rank == rank);
            scope.spawn(move || {
                let mut waited = false;
                let what = |sends: &mut [Outgoing], last: &[Outgoing]| {
                    let Strike { fault, bit, .. } = mine.expect("it happens to this one");
                    match fault {
                        Fault::Dies => panic!("killed, as the test wants it"),
                        Fault::Stalls => {
                            others_ended.wait();
                            waited = true;
                        }
                        Fault::Flips => flip(sends, bit),
                        Fault::Grows => grow(sends),
                        Fault::Repeats => repeat(sends, last),
                    }
                };
                let mut transport = Unlucky::new(local, mine.map(|strike| strike.hop), what);
                let caught =
                    std::panic::AssertUnwindSafe(|| pass(&mut transport, problem, numbers));
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

/// Which rank an error is about.
fn blamed(error: &Error) -> Option<usize> {
    match error {
        Error::Failed { failure, blamed, .. } => blamed.or(failure.rank()),
        Error::Message { from, .. } => Some(*from),
        Error::GivenUp { rank, .. } => *rank,
        _ => None,
    }
}

/// Faults at every hop, to every rank in turn.
#[test]
fn faults_end_in_errors_everywhere() {
    let numbers = case().unmasked();
    let shards = Shards::contiguous(TOKENS, RANKS, 1).unwrap();
    let expected = run(&numbers, &shards, None);
    // Of one rank, on average.
    let most = HOPS.load(Ordering::Relaxed) / RANKS;
    assert!(most > 10, "{most} hops");
    let (mut errors_everywhere, mut nothing_happened, mut too_late) = (0, 0, 0);
    for number in 0..150 {
        let (rank, fault) = (number % RANKS, FAULTS[number % FAULTS.len()]);
        let strike = Strike { fault, rank, hop: (number * 7) % most, bit: number * 1_237 };
        let ended = run(&numbers, &shards, Some(strike));
        let mut well = 0;
        for (rank, (result, after)) in ended.iter().enumerate() {
            let others = rank != strike.rank;
            assert!(
                !others || *after < PATIENCE + Duration::from_secs(2),
                "{strike:?}: rank {rank} after {after:?}"
            );
            match result {
                Ok(got) => {
                    let expected = expected[rank].0.as_ref().unwrap();
                    let same = got.out == expected.out && got.dq == expected.dq;
                    let same = same && got.dk == expected.dk && got.dv == expected.dv;
                    assert!(same, "{strike:?}: wrong numbers on rank {rank}");
                    well += 1;
                }
                Err(error) => {
                    let right = blamed(error) == Some(strike.rank);
                    let all = || ended.iter().map(|(ended, _)| ended.as_ref().err());
                    assert!(
                        right || !others,
                        "{strike:?}: rank {rank} says {error}\n{:#?}",
                        all().collect::<Vec<_>>()
                    );
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

#[test]
fn results_that_do_not_fit_on_one_rank_end_the_pass_for_all() {
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
                let output = ring.forward(inputs.q, inputs.k, inputs.v).unwrap();
                let mut gradients = Gradients::zeros(&inputs).unwrap();
                if rank == 1 {
                    gradients.dk = Gradients::zeros(&Inputs { k: inputs.k.tokens(0..7), ..inputs })
                        .unwrap()
                        .dk;
                }
                let arrived = Arrived::of(&output, share.dout.view());
                let error = ring.backward_into(inputs, arrived, gradients.as_mut()).unwrap_err();
                match rank {
                    1 => assert!(error.to_string().contains("dk"), "{error}"),
                    _ => assert!(matches!(error, Error::GivenUp { rank: Some(1), .. }), "{error}"),
                }
            });
        }
    });
}
