//! Layouts kept for the next call.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use lru::LruCache;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::error::Result;
use crate::layout::Layout;
use crate::pattern::Pattern;
use crate::shape::Shape;

/// Layouts with at most this many rows of blocks (a decode step, a short prompt) aren't kept: they
/// cost less than a look-up is worth, and every step has a new one.
const FEW_ROWS: u64 = 4;

/// Layouts by pattern and shape, within a number of bytes; the least recently used goes first.
///
/// Threads that ask for the same new layout at the same time wait for one of them to compile it.
/// A cache lives in one process and holds what this version of the crate compiled.
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
    state: Mutex<State>,
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
type Slot = Arc<OnceLock<Result<Arc<Layout>>>>;

struct State {
    kept: LruCache<Key, Arc<Layout>, FxBuildHasher>,
    under_way: FxHashMap<Key, Slot>,
    stats: CacheStats,
}

impl LayoutCache {
    /// A cache of at most `most_bytes` bytes.
    pub fn new(most_bytes: usize) -> Self {
        let state = State {
            kept: LruCache::unbounded_with_hasher(FxBuildHasher),
            under_way: FxHashMap::default(),
            stats: CacheStats::default(),
        };
        LayoutCache { most_bytes, state: Mutex::new(state) }
    }

    /// The layout of `pattern` for `shape`, compiled if it isn't there.
    pub fn get(&self, pattern: &Pattern, shape: &Shape) -> Result<Arc<Layout>> {
        if shape.row_count() <= FEW_ROWS {
            self.lock().stats.passed += 1;
            return Layout::compile(pattern, shape).map(Arc::new);
        }
        let key = (pattern.clone(), shape.clone());
        let slot = {
            let mut state = self.lock();
            if let Some(layout) = state.kept.get(&key).cloned() {
                state.stats.hits += 1;
                return Ok(layout);
            }
            match state.under_way.get(&key).cloned() {
                Some(slot) => {
                    state.stats.hits += 1;
                    slot
                }
                None => {
                    state.stats.misses += 1;
                    let slot = Slot::default();
                    state.under_way.insert(key.clone(), slot.clone());
                    slot
                }
            }
        };
        // Whoever comes first compiles; the others wait here, without the lock.
        let layout = slot.get_or_init(|| Layout::compile(pattern, shape).map(Arc::new)).clone();
        self.finish(&key, &slot, &layout);
        layout
    }

    /// Moves a finished layout from those under way to those kept; once, whoever gets here first.
    fn finish(&self, key: &Key, slot: &Slot, layout: &Result<Arc<Layout>>) {
        let mut state = self.lock();
        if !state.under_way.get(key).is_some_and(|found| Arc::ptr_eq(found, slot)) {
            return;
        }
        state.under_way.remove(key);
        if let Ok(layout) = layout {
            state.kept.put(key.clone(), layout.clone());
            self.make_room(&mut state);
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
