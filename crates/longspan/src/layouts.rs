//! The layouts of a call.

use std::sync::Arc;

use longspan_pattern::{Layout, LayoutSet};

/// Which layout each batch entry and query head has.
#[derive(Debug, Clone)]
pub enum Layouts {
    /// One for all, however many there are.
    One(Arc<Layout>),
    /// One per batch entry and query head.
    Each(LayoutSet),
}

impl Layouts {
    /// The layout of a batch entry and query head.
    pub fn get(&self, entry: usize, head: usize) -> &Layout {
        match self {
            Layouts::One(layout) => layout,
            Layouts::Each(set) => set.get(entry, head),
        }
    }

    /// All that differ.
    pub(crate) fn distinct(&self) -> &[Arc<Layout>] {
        match self {
            Layouts::One(layout) => std::slice::from_ref(layout),
            Layouts::Each(set) => set.layouts(),
        }
    }

    /// The number of a batch entry's and query head's layout among those.
    pub(crate) fn index(&self, entry: usize, head: usize) -> usize {
        match self {
            Layouts::One(_) => 0,
            Layouts::Each(set) => set.index(entry, head),
        }
    }
}

impl From<Layout> for Layouts {
    fn from(layout: Layout) -> Self {
        Layouts::One(Arc::new(layout))
    }
}

impl From<Arc<Layout>> for Layouts {
    fn from(layout: Arc<Layout>) -> Self {
        Layouts::One(layout)
    }
}

impl From<LayoutSet> for Layouts {
    fn from(set: LayoutSet) -> Self {
        Layouts::Each(set)
    }
}
