//! Layouts kept for the next call.

use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use lru::LruCache;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::meter::go_on;
use crate::pattern::Pattern;
use crate::shape::Shape;

/// Layouts with at most this many rows of blocks (a decode step, a short prompt) aren't kept: they
/// cost less than a look-up is worth, and every step has a new one.
const FEW_ROWS: u64 = 4;

/// How long a thread waits for another one's compilation before it calls its own hook.
const WAIT: Duration = Duration::from_millis(20);

/// Layouts by pattern and shape, within a number of bytes; the least recently used goes first.
///
/// Threads that ask for the same new layout at the same time wait for one of them to compile it.
/// A cache lives in one process and holds what this version of the crate compiled. A process that
/// is forked off starts with the layouts that its parent held; what the parent's threads were
/// compiling at that moment it compiles itself.
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
    most_bytes: usize,
    store: Store,
}

/// The state of one process. A lock that a thread held while another thread forked stays locked in
/// the child, so each process has a state of its own, linked to that of its parent.
struct Store {
    process: u32,
    state: Mutex<State>,
    forked: OnceLock<Box<Store>>,
}

impl Store {
    fn new(kept: LruCache<Key, Arc<Layout>, FxBuildHasher>) -> Self {
        let state = State { kept, under_way: FxHashMap::default(), stats: CacheStats::default() };
        Store { process: std::process::id(), state: Mutex::new(state), forked: OnceLock::new() }
    }

    /// The state of this process: the last of the chain, or a new one behind it with the layouts
    /// of the one before, unless a thread was changing them.
    fn of_this_process(&self) -> &Mutex<State> {
        let mut store = self;
        let process = std::process::id();
        while store.process != process {
            store = store.forked.get_or_init(|| {
                let kept = match store.state.try_lock() {
                    Ok(mut state) => std::mem::replace(&mut state.kept, unbounded()),
                    Err(TryLockError::Poisoned(state)) => {
                        std::mem::replace(&mut state.into_inner().kept, unbounded())
                    }
                    Err(TryLockError::WouldBlock) => unbounded(),
                };
                Box::new(Store::new(kept))
            });
        }
        &store.state
    }
}

fn unbounded() -> LruCache<Key, Arc<Layout>, FxBuildHasher> {
    LruCache::unbounded_with_hasher(FxBuildHasher)
}

/// What a cache has done so far and holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Layouts that were there, or on their way.
    pub hits: u64,
    /// Layouts that had to be compiled.
    pub misses: u64,
    /// Layouts of few rows, compiled and not kept.
    pub passed: u64,
    /// Layouts that were dropped to make room, or never fitted.
    pub evicted: u64,
    /// Layouts held now.
    pub layouts: usize,
    /// Bytes they take now, transposes and patterns included.
    pub bytes: usize,
}

type Key = (Pattern, Shape);

/// A layout that one thread compiles and others wait for.
#[derive(Default)]
struct Slot {
    outcome: Mutex<Option<Outcome>>,
    done: Condvar,
}

/// What became of a compilation.
#[derive(Clone)]
enum Outcome {
    Done(Result<Arc<Layout>>),
    /// Its hook stopped it, or it panicked; one of those that wait compiles instead.
    Abandoned,
}

struct State {
    kept: LruCache<Key, Arc<Layout>, FxBuildHasher>,
    under_way: FxHashMap<Key, Arc<Slot>>,
    stats: CacheStats,
}

impl LayoutCache {
    /// A cache of at most `most_bytes` bytes.
    pub fn new(most_bytes: usize) -> Self {
        LayoutCache { most_bytes, store: Store::new(unbounded()) }
    }

    /// The layout of `pattern` for `shape`, compiled if it isn't there.
    pub fn get(&self, pattern: &Pattern, shape: &Shape) -> Result<Arc<Layout>> {
        self.get_with(pattern, shape, go_on)
    }

    /// The same, with a hook that may end the work, also while another thread compiles the layout:
    /// see [`Layout::compile_with`].
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
            if let Some(layout) = state.kept.get(&key).cloned() {
                hit(&mut state, counted);
                return Ok(layout);
            }
            if let Some(slot) = state.under_way.get(&key).cloned() {
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
            state.under_way.insert(key.clone(), slot.clone());
            drop(state);
            let task = Task { cache: self, key: &key, slot: &slot };
            let layout = Layout::compile_with(pattern, shape, progress).map(Arc::new);
            task.finish(&layout);
            return layout;
        }
    }

    /// Drops the least recently used layouts until the rest fits. Layouts grow when their
    /// transpose is made, so their sizes are taken anew.
    fn make_room(&self, state: &mut State) {
        let mut bytes = held(state);
        while bytes > self.most_bytes {
            let Some((key, layout)) = state.kept.pop_lru() else { break };
            bytes -= weight(&key, &layout);
            state.stats.evicted += 1;
        }
    }

    /// What the cache has done so far and holds now.
    pub fn stats(&self) -> CacheStats {
        let mut state = self.lock();
        self.make_room(&mut state);
        CacheStats { layouts: state.kept.len(), bytes: held(&state), ..state.stats }
    }

    /// Drops every layout.
    pub fn clear(&self) {
        self.lock().kept.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can leave the state half-changed.
        self.store.of_this_process().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Waits for the outcome, and calls the hook while it does.
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

/// A compilation under way; one that ends without an outcome, by a panic, is abandoned.
struct Task<'a> {
    cache: &'a LayoutCache,
    key: &'a Key,
    slot: &'a Arc<Slot>,
}

impl Task<'_> {
    /// Hands the outcome to those that wait, and keeps the layout.
    fn finish(self, layout: &Result<Arc<Layout>>) {
        if let Ok(layout) = layout {
            let mut state = self.cache.lock();
            state.kept.put(self.key.clone(), layout.clone());
            self.cache.make_room(&mut state);
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
        if state.under_way.get(self.key).is_some_and(|held| Arc::ptr_eq(held, self.slot)) {
            state.under_way.remove(self.key);
        }
        drop(state);
        let mut outcome = self.slot.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        outcome.get_or_insert(Outcome::Abandoned);
        drop(outcome);
        self.slot.done.notify_all();
    }
}

fn held(state: &State) -> usize {
    state.kept.iter().map(|(key, layout)| weight(key, layout)).sum()
}

/// What an entry takes: the layout, and the pattern in its key, which may list a million lengths.
fn weight(key: &Key, layout: &Layout) -> usize {
    layout.bytes() + key.0.bytes()
}

impl std::fmt::Debug for LayoutCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayoutCache")
            .field("most_bytes", &self.most_bytes)
            .field("stats", &self.stats())
            .finish()
    }
}
