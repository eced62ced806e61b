//! An LRU cache of layouts. Above `layout`; used by `set`.

use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use lru::LruCache;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::meter::ignore_progress;
use crate::pattern::Pattern;
use crate::shape::Shape;

/// Layouts with at most this many rows of blocks (a decode step, a short prompt) are not cached:
/// compiling them is cheap, and every step has a new one.
const FEW_ROWS: u64 = 4;

/// Interval at which a thread that waits for another's compilation calls its own hook.
const WAIT: Duration = Duration::from_millis(20);

/// Layouts by pattern and shape, within a memory limit; evicts the least recently used.
///
/// Concurrent requests for the same new layout compile it once. A cache is local to its process. A
/// forked process starts with the layouts of its parent; pending compilations of the parent are
/// not inherited.
///
/// ```
/// use longspan_pattern::{LayoutCache, Pattern, Shape};
///
/// let cache = LayoutCache::new(64 << 20);
/// let shape = Shape::new(65_536, 65_536);
/// let first = cache.get(&Pattern::causal(), &shape)?;
/// let again = cache.get(&Pattern::causal(), &shape)?;
/// assert!(std::sync::Arc::ptr_eq(&first, &again));
/// assert_eq!((cache.stats().hits, cache.stats().misses), (1, 1));
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub struct LayoutCache {
    max_bytes: usize,
    store: Store,
}

/// The state of one process. A lock held by a thread while another forks stays locked in the child,
/// so each process has its own state, linked to that of its parent.
struct Store {
    process: u32,
    state: Mutex<State>,
    forked: OnceLock<Box<Store>>,
}

impl Store {
    fn new(cached: LruCache<Key, Arc<Layout>, FxBuildHasher>) -> Self {
        let state = State { cached, pending: FxHashMap::default(), stats: CacheStats::default() };
        Store { process: std::process::id(), state: Mutex::new(state), forked: OnceLock::new() }
    }

    /// The state of this process: the last of the chain, or a new one with the layouts of its
    /// predecessor, unless that is locked.
    fn of_this_process(&self) -> &Mutex<State> {
        let mut store = self;
        let process = std::process::id();
        while store.process != process {
            store = store.forked.get_or_init(|| {
                let cached = match store.state.try_lock() {
                    Ok(mut state) => std::mem::replace(&mut state.cached, unbounded()),
                    Err(TryLockError::Poisoned(state)) => {
                        std::mem::replace(&mut state.into_inner().cached, unbounded())
                    }
                    Err(TryLockError::WouldBlock) => unbounded(),
                };
                Box::new(Store::new(cached))
            });
        }
        &store.state
    }
}

fn unbounded() -> LruCache<Key, Arc<Layout>, FxBuildHasher> {
    LruCache::unbounded_with_hasher(FxBuildHasher)
}

/// Counters and current size of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Requests for cached or pending layouts.
    pub hits: u64,
    /// Requests that compiled a layout.
    pub misses: u64,
    /// Requests for layouts of few rows, which bypass the cache.
    pub passed: u64,
    /// Layouts evicted, or larger than the cache.
    pub evicted: u64,
    /// Cached layouts.
    pub layouts: usize,
    /// Their memory in bytes, including transposes and patterns.
    pub bytes: usize,
}

type Key = (Pattern, Shape);

/// A pending compilation that other threads may wait for.
#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Outcome>>,
    done: Condvar,
}

/// Result of a pending compilation.
#[derive(Clone)]
enum Outcome {
    Done(Result<Arc<Layout>>),
    /// Stopped by its hook, or panicked; a waiting thread compiles instead.
    Abandoned,
}

struct State {
    cached: LruCache<Key, Arc<Layout>, FxBuildHasher>,
    pending: FxHashMap<Key, Arc<Slot>>,
    stats: CacheStats,
}

impl LayoutCache {
    /// A cache of at most `max_bytes` bytes.
    pub fn new(max_bytes: usize) -> Self {
        LayoutCache { max_bytes, store: Store::new(unbounded()) }
    }

    /// The layout of `pattern` for `shape`, compiled on a miss.
    pub fn get(&self, pattern: &Pattern, shape: &Shape) -> Result<Arc<Layout>> {
        self.get_with(pattern, shape, ignore_progress)
    }

    /// The same with a progress hook, also called while another thread compiles the layout: see
    /// [`Layout::compile_with`].
    pub fn get_with(
        &self,
        pattern: &Pattern,
        shape: &Shape,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Arc<Layout>> {
        if shape.row_count() <= FEW_ROWS {
            self.lock().stats.passed += 1;
            return Layout::compile_with(pattern, shape, progress).map(Arc::new);
        }
        let key = (pattern.clone(), shape.clone());
        let mut counted = false;
        loop {
            let mut state = self.lock();
            let hit = |state: &mut State, counted: bool| {
                state.stats.hits += u64::from(!counted);
            };
            if let Some(layout) = state.cached.get(&key).cloned() {
                hit(&mut state, counted);
                return Ok(layout);
            }
            if let Some(slot) = state.pending.get(&key).cloned() {
                hit(&mut state, counted);
                counted = true;
                drop(state);
                match slot.wait(shape.row_count(), &mut progress)? {
                    Outcome::Done(layout) => return layout,
                    Outcome::Abandoned => continue,
                }
            }
            state.stats.misses += 1;
            let slot = Arc::new(Slot::default());
            state.pending.insert(key.clone(), slot.clone());
            drop(state);
            let task = Task { cache: self, key: &key, slot: &slot };
            let layout = Layout::compile_with(pattern, shape, progress).map(Arc::new);
            task.finish(&layout);
            return layout;
        }
    }

    /// Evicts the least recently used layouts beyond the limit. Sizes are recomputed, as layouts grow
    /// with their transpose.
    fn evict(&self, state: &mut State) {
        let mut bytes = cached_bytes(state);
        while bytes > self.max_bytes {
            let Some((key, layout)) = state.cached.pop_lru() else { break };
            bytes -= entry_bytes(&key, &layout);
            state.stats.evicted += 1;
        }
    }

    /// Counters and current size.
    pub fn stats(&self) -> CacheStats {
        let mut state = self.lock();
        self.evict(&mut state);
        CacheStats { layouts: state.cached.len(), bytes: cached_bytes(&state), ..state.stats }
    }

    /// Drops every layout.
    pub fn clear(&self) {
        self.lock().cached.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock leaves the state inconsistent.
        self.store.of_this_process().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Waits for the outcome, calling the hook at intervals.
    fn wait(
        &self,
        rows: u64,
        progress: &mut impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Outcome> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return Ok(outcome.clone());
            }
            let (after, _) =
                self.done.wait_timeout(outcome, WAIT).unwrap_or_else(PoisonError::into_inner);
            drop(after);
            if progress(0, rows).is_break() {
                return Err(Error::Stopped { row: 0, rows });
            }
            outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A pending compilation; abandoned if dropped without an outcome.
struct Task<'a> {
    cache: &'a LayoutCache,
    key: &'a Key,
    slot: &'a Arc<Slot>,
}

impl Task<'_> {
    /// Stores the layout and publishes the outcome.
    fn finish(self, layout: &Result<Arc<Layout>>) {
        if let Ok(layout) = layout {
            let mut state = self.cache.lock();
            state.cached.put(self.key.clone(), layout.clone());
            self.cache.evict(&mut state);
        }
        *self.slot.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(match layout {
            Err(Error::Stopped { .. }) => Outcome::Abandoned,
            layout => Outcome::Done(layout.clone()),
        });
    }
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        if state.pending.get(self.key).is_some_and(|slot| Arc::ptr_eq(slot, self.slot)) {
            state.pending.remove(self.key);
        }
        drop(state);
        let mut outcome = self.slot.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.get_or_insert(Outcome::Abandoned);
        drop(outcome);
        self.slot.done.notify_all();
    }
}

fn cached_bytes(state: &State) -> usize {
    state.cached.iter().map(|(key, layout)| entry_bytes(key, layout)).sum()
}

/// Memory of an entry: the layout, and the pattern in its key, which may have a million lengths.
fn entry_bytes(key: &Key, layout: &Layout) -> usize {
    layout.bytes() + key.0.bytes()
}

impl std::fmt::Debug for LayoutCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayoutCache")
            .field("max_bytes", &self.max_bytes)
            .field("stats", &self.stats())
            .finish()
    }
}
