//! The cache: memory limit, LRU eviction, one compilation per layout.

use std::ops::ControlFlow;
use std::sync::{Arc, Barrier, mpsc};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use longspan_pattern::{BlockSize, Error, Layout, LayoutCache, Pattern, Result, Shape};

fn shape(tokens: usize) -> Shape {
    Shape::new(tokens, tokens)
}

#[test]
fn the_key_has_every_parameter_of_layout() {
    let cache = LayoutCache::new(1 << 30);
    let shapes = [
        shape(4096),
        shape(4097),
        Shape::new(4095, 4096),
        shape(4096).query_offset(1),
        shape(4096).key_offset(1),
        shape(4096).block(BlockSize::new(128).unwrap()),
        shape(4096).rows(1..60),
        shape(4096).key_padding(1..4096),
        shape(4096).mask_bytes(0),
    ];
    for turn in 0..2 {
        for pattern in ["causal", "window(5, 5)"] {
            for shape in &shapes {
                cache.get(&pattern.parse().unwrap(), shape).unwrap();
            }
        }
        let all = 2 * shapes.len() as u64;
        let stats = cache.stats();
        assert_eq!((stats.misses, stats.hits), (all, turn * all));
        assert_eq!(stats.layouts as u64, all);
    }
    cache.clear();
    assert_eq!((cache.stats().layouts, cache.stats().bytes), (0, 0));
}

#[test]
fn the_least_recently_used_is_evicted_first() {
    let patterns: Vec<Pattern> = (1..=3).map(|n| Pattern::window(n, 0).unwrap()).collect();
    let roomy = LayoutCache::new(1 << 30);
    patterns.iter().for_each(|pattern| drop(roomy.get(pattern, &shape(65_536)).unwrap()));
    let all = roomy.stats().bytes;
    // Capacity for two of them.
    let cache = LayoutCache::new(all - 1);
    let get = |i: usize| cache.get(&patterns[i], &shape(65_536)).unwrap();
    let first = get(0);
    get(1);
    get(0);
    get(2);
    let stats = cache.stats();
    assert_eq!((stats.misses, stats.hits, stats.evicted, stats.layouts), (3, 1, 1, 2));
    assert!(stats.bytes < all);
    assert!(Arc::ptr_eq(&first, &get(0)), "the first was used after the second");
    get(1);
    assert_eq!(cache.stats().misses, 4, "the second was evicted");
}

#[test]
fn transposes_count_against_the_limit() {
    let causal = Pattern::causal();
    let roomy = LayoutCache::new(1 << 30);
    roomy.get(&causal, &shape(65_536)).unwrap();
    let plain = roomy.stats().bytes;
    let cache = LayoutCache::new(plain + plain / 2);
    let layout = cache.get(&causal, &shape(65_536)).unwrap();
    assert_eq!((cache.stats().layouts, cache.stats().bytes), (1, plain));
    layout.transpose().unwrap();
    assert!(layout.bytes() > plain + plain / 2);
    assert_eq!((cache.stats().layouts, cache.stats().bytes), (0, 0));
}

#[test]
fn lists_in_patterns_count_against_the_limit() {
    let cache = LayoutCache::new(1 << 30);
    let documents = Pattern::documents(vec![1; 100_000]).unwrap();
    let layout = cache.get(&documents, &shape(100_000)).unwrap();
    assert!(cache.stats().bytes >= layout.bytes() + 800_000);
}

#[test]
fn a_layout_larger_than_the_cache_is_returned() {
    let cache = LayoutCache::new(10);
    assert_eq!(cache.get(&Pattern::causal(), &shape(4096)).unwrap().rows(), 0..64);
    let stats = cache.stats();
    assert_eq!((stats.layouts, stats.bytes, stats.evicted), (0, 0, 1));
}

#[test]
fn many_threads_compile_once() {
    let cache = LayoutCache::new(1 << 30);
    let threads = 16;
    let barrier = Barrier::new(threads);
    // Slow to compile, so that all threads wait for it.
    let pattern: Pattern = "hierarchical([(4096, 2, 64), (65536, 8, 64)])".parse().unwrap();
    let layouts: Vec<_> = std::thread::scope(|scope| {
        let request = || {
            barrier.wait();
            cache.get(&pattern, &shape(1 << 19)).unwrap()
        };
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(request)).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    assert!(layouts.iter().all(|layout| Arc::ptr_eq(layout, &layouts[0])));
    let stats = cache.stats();
    assert_eq!((stats.misses, stats.hits), (1, threads as u64 - 1));
}

#[test]
fn layouts_of_few_rows_bypass_the_cache() {
    let cache = LayoutCache::new(1 << 30);
    for step in 0..100 {
        cache.get(&Pattern::causal(), &Shape::new(1, 1_000_000 + step)).unwrap();
    }
    cache.get(&Pattern::causal(), &shape(1 << 20).rows(7..9)).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.passed, stats.misses, stats.layouts, stats.bytes), (101, 0, 0, 0));
}

#[test]
fn errors_are_not_cached() {
    let cache = LayoutCache::new(1 << 30);
    let documents = Pattern::documents([5]).unwrap();
    for turn in 1..=2 {
        assert!(cache.get(&documents, &shape(4096)).is_err());
        let stats = cache.stats();
        assert_eq!((stats.misses, stats.layouts), (turn, 0));
    }
}

#[test]
fn a_waiting_thread_takes_over_stopped_compilation() {
    let cache = LayoutCache::new(1 << 30);
    let (started, has_started) = mpsc::channel();
    let (stop, stopped) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let cache = &cache;
        let first = scope.spawn(move || {
            cache.get_with(&Pattern::causal(), &shape(65_536), |_, _| {
                started.send(()).unwrap();
                stopped.recv().unwrap();
                ControlFlow::Break(())
            })
        });
        has_started.recv().unwrap();
        let second = scope.spawn(|| cache.get(&Pattern::causal(), &shape(65_536)));
        std::thread::sleep(Duration::from_millis(50));
        stop.send(()).unwrap();
        assert!(matches!(first.join().unwrap(), Err(Error::Stopped { .. })));
        assert_eq!(second.join().unwrap().unwrap().rows(), 0..1024);
    });
    assert_eq!(cache.stats().layouts, 1);
}

/// A thread that compiles a layout, stopped in its hook until the sender is used.
fn compile_halfway<'scope>(
    scope: &'scope Scope<'scope, '_>,
    cache: &'scope LayoutCache,
) -> (ScopedJoinHandle<'scope, Result<Arc<Layout>>>, mpsc::Sender<()>) {
    let (started, has_started) = mpsc::channel();
    let (resume, resumed) = mpsc::channel();
    let compiling = scope.spawn(move || {
        let mut called = false;
        cache.get_with(&Pattern::causal(), &shape(65_536), |_, _| {
            if !std::mem::replace(&mut called, true) {
                started.send(()).unwrap();
                resumed.recv().unwrap();
            }
            ControlFlow::Continue(())
        })
    });
    has_started.recv().unwrap();
    (compiling, resume)
}

#[test]
fn a_waiting_thread_can_be_stopped() {
    let cache = LayoutCache::new(1 << 30);
    std::thread::scope(|scope| {
        let (compiling, resume) = compile_halfway(scope, &cache);
        // The hook is called every 20 ms; a loaded machine may take ten times as long, but not every
        // time.
        let latency = || {
            let start = Instant::now();
            let stopped =
                cache.get_with(&Pattern::causal(), &shape(65_536), |_, _| ControlFlow::Break(()));
            assert_eq!(stopped.unwrap_err(), Error::Stopped { row: 0, rows: 1024 });
            start.elapsed()
        };
        let latencies: Vec<Duration> = (0..6).map(|_| latency()).collect();
        resume.send(()).unwrap();
        assert!(compiling.join().unwrap().is_ok());
        assert!(latencies.iter().min().unwrap() < &Duration::from_millis(200), "{latencies:?}");
    });
}

/// Forks while another thread compiles; the child does not have that thread.
#[test]
fn a_forked_process_recompiles_pending_layouts() {
    let cache = LayoutCache::new(1 << 30);
    let kept = cache.get(&Pattern::full(), &shape(65_536)).unwrap();
    std::thread::scope(|scope| {
        let (compiling, resume) = compile_halfway(scope, &cache);
        // SAFETY: the child calls the library, and ends without unwinding or running destructors.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "no process");
        if child == 0 {
            // SAFETY: a call without conditions; it ends a child that waits forever.
            unsafe { libc::alarm(20) };
            let layout = cache.get(&Pattern::causal(), &shape(65_536));
            let again = cache.get(&Pattern::full(), &shape(65_536));
            let right = layout.is_ok_and(|layout| layout.rows() == (0..1024))
                && again.is_ok_and(|again| Arc::ptr_eq(&again, &kept));
            // SAFETY: ends the process.
            unsafe { libc::_exit(if right { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child forked above.
        let ended = unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!((ended, status), (child, 0), "the child was ended by a signal or failed");
        resume.send(()).unwrap();
        assert!(compiling.join().unwrap().is_ok());
    });
}
