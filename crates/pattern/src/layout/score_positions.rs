//! Positions of tokens as score biases use them.

use super::Layout;
use crate::error::{Error, Result};
use crate::pattern::{Positioning, Sequences};

/// Positions of the tokens of a layout as score biases use them: global ones, or those within a
/// sequence of `packed` (see [`Layout::score_positions`]). Lookups of neighbors are fast.
pub struct ScorePositions<'a> {
    layout: &'a Layout,
    sequences: Option<&'a Sequences>,
    /// Indices of the sequences of the last query and key.
    hints: [usize; 2],
}

impl Layout {
    /// The positions that the innermost primitives of the pattern use. Biases that depend on
    /// distances (ALiBi, tables) use them too, so that packed sequences equal separate ones. An error
    /// where parts of the pattern use different positions.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let packed = Pattern::packed([2, 3], [4, 3], Pattern::causal())?;
    /// let layout = Layout::compile(&packed, &Shape::new(5, 7))?;
    /// let mut positions = layout.score_positions()?;
    /// assert_eq!((0..5).map(|i| positions.query(i)).collect::<Vec<_>>(), [2, 3, 0, 1, 2]);
    /// assert_eq!((0..7).map(|j| positions.key(j)).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2]);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn score_positions(&self) -> Result<ScorePositions<'_>> {
        let sequences = match &self.positioning {
            Positioning::Global => None,
            Positioning::Within(sequences) => Some(sequences),
            Positioning::Mixed => return Err(Error::ScorePositions),
        };
        Ok(ScorePositions { layout: self, sequences, hints: [0; 2] })
    }

    /// Whether tokens have the same positions in both layouts, for biases too.
    pub(crate) fn same_positions(&self, other: &Layout) -> bool {
        self.positioning == other.positioning
            && self.query_positions() == other.query_positions()
            && self.key_positions() == other.key_positions()
    }
}

impl ScorePositions<'_> {
    /// The position of the query with local index `index`; 0 if no sequence contains it.
    pub fn query(&mut self, index: usize) -> i64 {
        let position = self.layout.query_positions().get(index);
        self.within(position, |sequences, position, hints| sequences.query(position, &mut hints[0]))
    }

    /// The position of the key with local index `index`; 0 if no sequence contains it.
    pub fn key(&mut self, index: usize) -> i64 {
        let position = self.layout.key_positions().get(index);
        self.within(position, |sequences, position, hints| sequences.key(position, &mut hints[1]))
    }

    fn within(
        &mut self,
        position: Option<i64>,
        find: impl FnOnce(&Sequences, i64, &mut [usize; 2]) -> Option<i64>,
    ) -> i64 {
        let hints = &mut self.hints;
        match self.sequences {
            None => position,
            Some(sequences) => position.and_then(|position| find(sequences, position, hints)),
        }
        .unwrap_or(0)
    }
}
