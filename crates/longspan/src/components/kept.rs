//! Components that calls of the same sizes share.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::List;
use crate::error::Result;

/// Lists that are kept.
const KEPT: usize = 4;

/// Lists of components by what they were made for; the one that was used last is the last to go.
/// Clones share them.
#[derive(Debug)]
pub(crate) struct Kept<K>(Arc<Mutex<Entries<K>>>);

type Entries<K> = Vec<(K, Arc<List>)>;

impl<K> Clone for Kept<K> {
    fn clone(&self) -> Self {
        Kept(self.0.clone())
    }
}

impl<K> Default for Kept<K> {
    fn default() -> Self {
        Kept(Arc::default())
    }
}

impl<K: PartialEq> Kept<K> {
    /// The list for a key, made unless it is kept.
    pub(crate) fn get_or_make(
        &self,
        key: K,
        make: impl FnOnce() -> Result<List>,
    ) -> Result<Arc<List>> {
        // No lock is held while layouts are compiled, and none is waited for, so that a child of
        // `fork` finds none that its parent has taken along.
        if let Some(mut kept) = self.lock()
            && let Some(index) = kept.iter().position(|(known, _)| *known == key)
        {
            let known = kept.remove(index);
            let list = known.1.clone();
            kept.push(known);
            return Ok(list);
        }
        let list = Arc::new(make()?);
        if let Some(mut kept) = self.lock() {
            if kept.len() == KEPT {
                kept.remove(0);
            }
            kept.push((key, list.clone()));
        }
        Ok(list)
    }

    /// The lists, unless another thread has them at the moment.
    fn lock(&self) -> Option<MutexGuard<'_, Entries<K>>> {
        match self.0.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(kept)) => Some(kept.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
