//! Every layout equals its predicate at every single position.
//!
//! Random cases from `longspan-testing`: an expression over all primitives, lengths, offsets, a
//! block size, rows, position maps, padding, a mask budget. The oracle there is written from the
//! meaning of the primitives alone and shares no code with this crate; the pattern reaches it only
//! as text. `LONGSPAN_CASES` sets how many cases (20,000 where left out), `LONGSPAN_SEED` the
//! first seed.

use std::sync::atomic::{AtomicU64, Ordering};

use longspan_testing::Case;

mod common;

use common::check;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
        Err(_) => default,
    }
}

#[test]
fn layouts_equal_their_predicate_everywhere() {
    let cases = number("LONGSPAN_CASES", 20_000);
    let first = number("LONGSPAN_SEED", 0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = AtomicU64::new(0);
    let in_between = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= cases {
                        return;
                    }
                    let seed = first + case;
                    let case = Case::from_seed(seed);
                    let checked = std::panic::catch_unwind(|| check(&case));
                    match checked {
                        Ok(Ok(active)) => {
                            in_between.fetch_add(active.into(), Ordering::Relaxed);
                        }
                        Ok(Err(error)) => panic!("seed {seed}: {error}\n{case}"),
                        Err(_) => panic!("seed {seed}: panicked\n{case}"),
                    }
                }
            });
        }
    });
    // The generator must not have drifted into cases that are all empty or all full.
    let in_between = in_between.into_inner();
    assert!(in_between * 2 > cases, "only {in_between} of {cases} cases had a Partial block");
}
