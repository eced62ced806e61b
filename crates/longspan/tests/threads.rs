//! Threads and processes: many callers at once, `fork`, what the environment says.
//!
//! Tests that need another process start this binary again, with one ignored test as its work.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use longspan::{Attention, Error, Inputs, Isa, Order, Threads};
use longspan_testing::{AttentionCase, Rule, Values};

mod common;

use common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

fn case(tokens: u64) -> AttentionCase {
    let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 200, right: 0 }]);
    AttentionCase { heads_q: 4, ..AttentionCase::new("threads", rule, tokens) }
}

fn both(case: &AttentionCase, attention: &Attention) -> Values<f32> {
    let tensors = Tensors::of(&case.unmasked(), PLACEMENT);
    Run { attention, tensors: &tensors, results: PLACEMENT }.both()
}

/// Threads of Longspan's pool in this process. A thread has its creator's name until it first runs, so
/// those with ours are waited for.
fn workers() -> usize {
    let own = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
    for _ in 0..1000 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let names: Vec<String> = names.collect();
        if names.iter().filter(|&name| *name == own).count() == 1 {
            return names.iter().filter(|name| name.starts_with("longspan-")).count();
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("threads that never run");
}

#[test]
fn many_callers_at_once() {
    let case = case(1000);
    let shared = attention(&case, Isa::best(), 2);
    let expected = both(&case, &shared);
    std::thread::scope(|scope| {
        for caller in 0..6 {
            let (case, shared, expected) = (&case, &shared, &expected);
            scope.spawn(move || {
                let own = attention(case, Isa::best(), 1 + caller % 3);
                for _ in 0..5 {
                    assert_eq!(&both(case, shared), expected, "caller {caller}, shared");
                    assert_eq!(&both(case, &own), expected, "caller {caller}, own");
                }
            });
        }
    });
}

#[test]
fn threads_that_are_asked_for_are_used() {
    let case = case(3000);
    both(&case, &attention(&case, Isa::best(), 1));
    let before = workers();
    both(&case, &attention(&case, Isa::best(), 5));
    assert!(workers() >= 4 && workers() > before.min(3), "{} workers, {before} before", workers());
}

/// Runs `work` in a child process made by `fork`; true if it returned true.
fn forked(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child computes and leaves without running anything of the parent's.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            // Should it hang, as a child that waits for threads it hasn't got does.
            libc::alarm(60);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(i32::from(!outcome.unwrap_or(false)));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn works_after_fork() {
    let case = case(2000);
    let attention = attention(&case, Isa::best(), 4);
    let expected = both(&case, &attention);
    assert!(workers() >= 3);
    // The test itself can fail.
    assert!(!forked(|| false));
    for _ in 0..3 {
        assert!(forked(|| {
            let alone = workers() == 0;
            let same = both(&case, &attention) == expected;
            // The child has a pool of its own, and may fork again.
            let grandchild = || forked(|| both(&case, &attention) == expected && workers() >= 3);
            alone && same && workers() >= 3 && grandchild()
        }));
    }
    assert_eq!(both(&case, &attention), expected);
}

#[test]
fn works_after_fork_while_others_compute() {
    let case = case(1500);
    let expected = both(&case, &attention(&case, Isa::best(), 3));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let attention = attention(&case, Isa::best(), 3);
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(both(&case, &attention), expected);
            }
        });
        let own = attention(&case, Isa::best(), 3);
        let all = (0..10).all(|_| forked(|| both(&case, &own) == expected));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(all);
    });
}

/// This binary once more, with one ignored test and an environment; its output.
fn child(test: &str, environment: &[(&str, &OsStr)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env_remove("LONGSPAN_THREADS").env_remove("LONGSPAN_ISA");
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{environment:?}: {text}\n{errors}");
    assert!(text.contains("1 passed"), "{test} didn't run: {text}");
    text
}

/// Says how a call with no options went, and how many workers it made.
#[test]
#[ignore = "run by others as a child process"]
#[allow(clippy::print_stdout)]
fn say_what_happens() {
    let case = case(3000);
    let attention = Attention::new(layouts(&case));
    let tensors = Tensors::of(&case.unmasked(), PLACEMENT);
    let Err(error) =
        attention.forward(Inputs::new(tensors.q.view(), tensors.k.view(), tensors.v.view()))
    else {
        println!("\nsaid: fine, {} threads, {} workers", Threads::Auto.count().unwrap(), workers());
        return;
    };
    println!("\nsaid: {error}");
    assert!(matches!(error, Error::Environment { .. } | Error::Isa { .. }), "{error:?}");
    // Options come before the environment.
    let threads = Threads::Count(2);
    let attention = Attention::new(layouts(&case)).isa(Isa::best()).threads(threads);
    attention.forward(Inputs::new(tensors.q.view(), tensors.k.view(), tensors.v.view())).unwrap();
}

fn said(environment: &[(&str, &OsStr)]) -> String {
    let text = child("say_what_happens", environment);
    let said = text.lines().find_map(|line| line.strip_prefix("said: "));
    said.unwrap_or_else(|| panic!("nothing said: {text}")).to_owned()
}

#[test]
fn the_environment_sets_threads() {
    for (value, workers) in [("1", 0), ("2", 1), ("3", 2), (" 6 ", 5)] {
        let expected = format!("fine, {} threads, {workers} workers", workers + 1);
        assert_eq!(said(&[("LONGSPAN_THREADS", value.as_ref())]), expected);
    }
    // Nothing, or an empty value: as many as the process may use.
    let threads = std::thread::available_parallelism().unwrap().get();
    let expected = format!("fine, {threads} threads, {} workers", threads - 1);
    assert_eq!(said(&[]), expected);
    assert_eq!(said(&[("LONGSPAN_THREADS", "".as_ref())]), expected);
    for value in ["0", "-1", "many", "1.5", "2 3", "4097", "99999999999999999999999"] {
        let said = said(&[("LONGSPAN_THREADS", value.as_ref())]);
        assert!(said.contains("LONGSPAN_THREADS") && said.contains(value), "{value}: {said}");
        assert!(said.contains("1 to 4096"), "{said}");
    }
    // Bytes that aren't text are refused too, not passed over.
    let said = said(&[("LONGSPAN_THREADS", OsStr::from_bytes(b"4\xFF"))]);
    assert!(said.contains("LONGSPAN_THREADS"), "{said}");
}

#[test]
fn the_environment_sets_the_instruction_set() {
    for isa in Isa::available() {
        for name in [isa.to_string(), isa.to_string().to_uppercase()] {
            assert!(said(&[("LONGSPAN_ISA", name.as_ref())]).starts_with("fine"), "{name}");
        }
    }
    assert!(said(&[("LONGSPAN_ISA", "".as_ref())]).starts_with("fine"));
    for value in ["sse9", "avx", "best", "portable,avx2"] {
        let said = said(&[("LONGSPAN_ISA", value.as_ref())]);
        assert!(said.contains("LONGSPAN_ISA") && said.contains(value), "{value}: {said}");
        assert!(said.contains("portable") && said.contains("avx512"), "{said}");
    }
    for isa in [Isa::Neon, Isa::Avx2, Isa::Avx512] {
        if !isa.is_available() {
            let said = said(&[("LONGSPAN_ISA", isa.to_string().as_ref())]);
            assert!(said.contains(&isa.to_string()) && said.contains("portable"), "{said}");
        }
    }
    let said = said(&[("LONGSPAN_ISA", OsStr::from_bytes(b"avx2\xFF"))]);
    assert!(said.contains("LONGSPAN_ISA"), "{said}");
}

/// Bits of a call with no options, for the parent to compare.
#[test]
#[ignore = "run by others as a child process"]
#[allow(clippy::print_stdout)]
fn say_bits() {
    let case = case(300);
    let values = both(&case, &Attention::new(layouts(&case)));
    println!("\nbits: {:?}", bits(&values.dq[..500]));
}

#[test]
fn the_instruction_set_of_the_environment_is_the_one_used() {
    let case = case(300);
    for isa in Isa::available() {
        let text = child("say_bits", &[("LONGSPAN_ISA", isa.to_string().as_ref())]);
        let expected = both(&case, &attention(&case, isa, 1));
        let expected = format!("bits: {:?}", bits(&expected.dq[..500]));
        assert!(text.contains(&expected), "{isa}");
    }
}
