//! Executors: which threads take part, several callers at once, executors of a caller's own.

use std::collections::HashSet;
use std::sync::{Arc, Barrier, Mutex};

use longspan::{Attention, Branch, Dilated, Executor, Isa, Order, Pattern, Pool, Step};
use longspan_testing::{AttentionCase, Rule, Values};

use crate::common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

/// Work for eight threads and more in both passes: 18 rows of blocks of 4 heads, and 5 slabs of keys of
/// each.
fn case() -> AttentionCase {
    let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 300, right: 0 }]);
    AttentionCase { heads_q: 4, heads_kv: 4, ..AttentionCase::new("executor", rule, 1_100) }
}

fn both(tensors: &Tensors, attention: &dyn Engine<f32>) -> Values<f32> {
    Run { attention, tensors, results: PLACEMENT }.both()
}

#[test]
fn all_threads_that_are_asked_for_take_part() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let expected = both(&tensors, &attention(&case(), Isa::best(), 1));
    let observed = Arc::new(Observed::new(Pool::new(8).unwrap()));
    for threads in 1..=8 {
        let attention = attention(&case(), Isa::best(), threads).executor(observed.clone());
        assert_eq!(both(&tensors, &attention), expected, "{threads} threads");
        let calls = observed.take();
        assert!(calls.iter().all(|&(asked, seen)| asked == seen), "{threads}: {calls:?}");
        // The forward and the backward pass at least, unless one thread needs no executor.
        let all = calls.iter().filter(|call| call.1 == threads).count();
        assert!(all >= 2 || threads == 1, "{threads} threads: {calls:?}");
        assert!(threads > 1 || calls.is_empty(), "one thread: {calls:?}");
    }
    // Where the number is left open, those of the executor.
    let attention = Attention::new(layouts(&case())).executor(observed.clone());
    assert_eq!(both(&tensors, &attention), expected);
    let calls = observed.take();
    assert!(calls.iter().filter(|call| **call == (8, 8)).count() >= 2, "{calls:?}");
}

#[test]
fn dilated_attention_takes_the_executor_too() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let dilated = || {
        let branches = [(1_100, 1), (1_100, 3)].map(|(w, r)| Branch::new(w, r).unwrap());
        Dilated::new(branches).unwrap().within(Pattern::causal()).isa(Isa::best())
    };
    let expected = both(&tensors, &dilated());
    let observed = Arc::new(Observed::new(Pool::new(3).unwrap()));
    assert_eq!(both(&tensors, &dilated().executor(observed.clone())), expected);
    let calls = observed.take();
    assert!(calls.len() >= 4 && calls.iter().all(|&(asked, seen)| asked == seen), "{calls:?}");
}

/// Records threads, and makes none of them wait.
#[derive(Debug)]
struct Recorded<'a>(&'a Pool, Mutex<HashSet<std::thread::ThreadId>>);

impl Executor for Recorded<'_> {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        self.0.run(threads, &|| {
            self.1.lock().unwrap().insert(std::thread::current().id());
            step()
        });
    }
}

#[test]
fn concurrent_callers_both_get_workers() {
    static POOL: std::sync::LazyLock<Pool> = std::sync::LazyLock::new(|| Pool::new(4).unwrap());
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let expected = both(&tensors, &attention(&case(), Isa::best(), 1));
    let begin = Barrier::new(2);
    let seen = std::thread::scope(|scope| {
        let callers = [(); 2].map(|()| {
            scope.spawn(|| {
                let recorded = Arc::new(Recorded(&POOL, Mutex::default()));
                let attention = attention(&case(), Isa::best(), 4).executor(recorded.clone());
                begin.wait();
                for _ in 0..10 {
                    assert_eq!(both(&tensors, &attention), expected);
                }
                recorded.1.lock().unwrap().len()
            })
        });
        callers.map(|caller| caller.join().unwrap())
    });
    assert!(seen.iter().all(|&threads| threads > 1), "threads of each caller: {seen:?}");
}

/// What an executor leaves undone is done all the same.
#[test]
fn executors_that_do_little_change_nothing() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let expected = both(&tensors, &attention(&case(), Isa::best(), 1));
    let attention = Attention::new(layouts(&case())).executor(Arc::new(CallerOnly));
    assert_eq!(both(&tensors, &attention), expected);
}

#[test]
fn trimmed_attention_works_on() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let pool = Arc::new(Pool::new(3).unwrap());
    let attention = attention(&case(), Isa::best(), 3).executor(pool);
    let expected = both(&tensors, &attention);
    for _ in 0..3 {
        attention.trim();
        assert_eq!(both(&tensors, &attention), expected);
    }
}
