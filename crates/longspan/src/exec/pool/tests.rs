use std::ops::ControlFlow;
use std::sync::Barrier;
use std::sync::atomic::AtomicUsize;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use super::*;

/// Long beyond anything that is waited for here.
const LATE: Duration = Duration::from_secs(20);

/// Waits for `done`.
fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LATE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a job whose threads wait until `threads` different ones take part. Fails where that many
/// never do.
fn run_on_exactly(pool: &dyn Executor, threads: usize) {
    let seen: Mutex<Vec<ThreadId>> = Mutex::default();
    pool.run(threads, &|| {
        let own = std::thread::current().id();
        let mut list = seen.lock().unwrap();
        if !list.contains(&own) {
            list.push(own);
        }
        drop(list);
        wait_until("not all workers take part", || seen.lock().unwrap().len() >= threads);
        ControlFlow::Break(())
    });
    assert_eq!(seen.lock().unwrap().len(), threads);
}

/// Claims of `0..total`, each once.
fn counted(pool: &dyn Executor, threads: usize, total: usize) {
    let next = AtomicUsize::new(0);
    let counts: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
    pool.run(threads, &|| match counts.get(next.fetch_add(1, Ordering::Relaxed)) {
        Some(count) => {
            count.fetch_add(1, Ordering::Relaxed);
            ControlFlow::Continue(())
        }
        None => ControlFlow::Break(()),
    });
    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads}");
}

#[test]
fn every_task_runs_once_on_all_threads() {
    let pool = Pool::new(17).unwrap();
    for threads in [1, 2, 3, 17] {
        counted(&pool, threads, 1_000);
        run_on_exactly(&pool, threads);
    }
    // No more than the pool has.
    let small = Pool::new(2).unwrap();
    counted(&small, 50, 1_000);
    assert_eq!(small.shared().lock().workers, 1);
}

#[test]
fn a_panic_reaches_the_caller_and_all_workers_live() {
    let pool = Pool::new(4).unwrap();
    for victim in 0..20 {
        let (steps, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(4, &|| {
                if failed.load(Ordering::Relaxed) {
                    return ControlFlow::Break(());
                }
                if steps.fetch_add(1, Ordering::Relaxed) == victim {
                    failed.store(true, Ordering::Relaxed);
                    panic!("panic number {victim}");
                }
                std::thread::yield_now();
                ControlFlow::Continue(())
            });
        }));
        // What was thrown arrives, whichever thread threw it.
        let payload = outcome.unwrap_err();
        assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("panic number {victim}"));
        run_on_exactly(&pool, 4);
    }
}

/// Callers on one pool at the same time: each has workers beside it, observed.
#[test]
fn concurrent_callers_share_the_workers() {
    for (threads, callers) in [(4, 2), (2, 2), (3, 5)] {
        let pool = Pool::new(threads).unwrap();
        let begin = Barrier::new(callers);
        let helped: Vec<AtomicBool> = (0..callers).map(|_| AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for caller in 0..callers {
                let (pool, begin, helped) = (&pool, &begin, &helped);
                scope.spawn(move || {
                    let own = std::thread::current().id();
                    begin.wait();
                    let start = Instant::now();
                    // No caller returns before all had workers, so that none takes over those of a
                    // finished call.
                    pool.run(threads, &|| {
                        if std::thread::current().id() != own {
                            helped[caller].store(true, Ordering::Relaxed);
                        }
                        assert!(start.elapsed() < LATE, "caller {caller} of {callers} works alone");
                        std::thread::sleep(Duration::from_micros(100));
                        match helped.iter().all(|helped| helped.load(Ordering::Relaxed)) {
                            true => ControlFlow::Break(()),
                            false => ControlFlow::Continue(()),
                        }
                    });
                });
            }
        });
        assert_eq!(pool.shared().lock().workers, threads - 1, "no caller got new workers");
    }
}

/// A caller that has nothing left to do but wait goes on calling its step.
#[test]
fn waiting_callers_poll() {
    let pool = Pool::new(2).unwrap();
    let (caller, polls) = (std::thread::current().id(), AtomicUsize::new(0));
    pool.run(2, &|| {
        if std::thread::current().id() == caller {
            polls.fetch_add(1, Ordering::Relaxed);
        } else {
            wait_until("the caller doesn't poll", || polls.load(Ordering::Relaxed) >= 3);
        }
        // The caller leaves no time for the worker to miss the job.
        let waits = polls.load(Ordering::Relaxed) == 1;
        while waits && pool.shared().lock().jobs[0].running == 0 {
            std::thread::yield_now();
        }
        ControlFlow::Break(())
    });
    assert!(polls.into_inner() >= 3);
}

#[test]
fn a_step_may_run_jobs_of_its_own() {
    let pool = Pool::new(3).unwrap();
    let left = AtomicUsize::new(20);
    pool.run(3, &|| {
        counted(&pool, 3, 10);
        let take = |left: usize| left.checked_sub(1);
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    });
}

#[test]
fn trimmed_and_dropped_pools_end_their_workers() {
    let pool = Pool::new(3).unwrap();
    run_on_exactly(&pool, 3);
    let shared = Arc::downgrade(&pool.shared());
    // The pool and two workers.
    assert_eq!(shared.strong_count(), 3);
    pool.trim();
    wait_until("workers that don't end", || shared.strong_count() == 1);
    run_on_exactly(&pool, 3);
    assert_eq!(shared.strong_count(), 3);
    pool.join();
    assert_eq!(shared.strong_count(), 1, "workers that were waited for");
    run_on_exactly(&pool, 3);
    drop(pool);
    wait_until("workers that outlive their pool", || shared.strong_count() == 0);
}

#[test]
fn sizes_are_checked() {
    for threads in [0, 4_097] {
        let error = Pool::new(threads).unwrap_err().to_string();
        assert!(error.contains(&threads.to_string()) && error.contains("1 to 4096"), "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn workers_stay_on_their_cpus() {
    let cpu = pin::allowed()[0];
    let pool = Pool::new(3).unwrap().pin([cpu]).unwrap();
    let caller = std::thread::current().id();
    run_on_exactly(&pool, 3);
    let left = AtomicUsize::new(100);
    pool.run(3, &|| {
        if std::thread::current().id() != caller {
            assert_eq!(pin::allowed(), [cpu]);
        }
        let take = |left: usize| left.checked_sub(1);
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    });
    let error = Pool::new(2).unwrap().pin([cpu, 99_999]).unwrap_err().to_string();
    assert!(error.contains("CPU 99999") && error.contains(&cpu.to_string()), "{error}");
    assert!(Pool::new(2).unwrap().pin([]).unwrap_err().to_string().contains("at least one"));
}
