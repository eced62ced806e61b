//! What a layout was compiled from, for engines that have kernels of their own.

use std::ops::Range;
use std::sync::Arc;

use super::Layout;
use crate::pattern::Pattern;

impl Layout {
    /// The pattern that says which pairs of Partial blocks are active, by their global positions; `None`
    /// where [blocks and masks](Layout::from_blocks) were given. It may have blocks that the layout
    /// [does not](Layout::keep_blocks).
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let pattern: Pattern = "strided(4) | window(1, 1)".parse()?;
    /// let layout = Layout::compile(&pattern, &Shape::new(100, 100))?;
    /// assert_eq!(layout.pattern(), Some(&pattern));
    /// // The pairs of a component are the rest of a term, over the positions of its tokens.
    /// let components = layout.split()?.unwrap().components();
    /// assert_eq!(components[1].layouts()[3].pattern().unwrap().to_string(), "full & !window(1, 1)");
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn pattern(&self) -> Option<&Pattern> {
        self.pattern.as_deref()
    }

    /// The positions of keys that are tokens, where the shape has
    /// [padding](crate::Shape::key_padding): the others are active in no pair.
    pub fn valid_positions(&self) -> Option<Range<i64>> {
        self.frame.valid.clone()
    }

    /// Whether both have the same blocks in the same memory, as those of equal
    /// [components](Layout::split) have; their positions may differ.
    pub fn shares_blocks(&self, other: &Layout) -> bool {
        Arc::ptr_eq(&self.content, &other.content)
    }
}
