//! Layouts of some blocks of another layout.

use super::compile::push_run;
use super::{Layout, Run};
use crate::error::{Error, Result};

impl Layout {
    /// The blocks of this layout that are listed too: what a selector chose. Row `r` lists
    /// `columns[starts[r]..starts[r + 1]]`, ascending; listed blocks that this layout does not have
    /// are ignored, and masks are those of this layout.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, RunKind, Shape};
    ///
    /// let causal = Layout::compile(&Pattern::causal(), &Shape::new(192, 192))?;
    /// let kept = causal.keep_blocks(&[0, 1, 3, 5], &[0, 0, 2, 0, 2])?;
    /// // Block (1, 2) is above the diagonal; (2, 2) is on it and stays Partial.
    /// let row = |row| kept.row(row).iter().map(|run| (run.start, run.kind())).collect::<Vec<_>>();
    /// assert_eq!(row(1), [(0, RunKind::Full)]);
    /// assert_eq!(row(2), [(0, RunKind::Full), (2, RunKind::Partial)]);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn keep_blocks(&self, starts: &[usize], columns: &[u32]) -> Result<Self> {
        let rows = self.frame.rows.len();
        if starts.len() != rows + 1 || starts[0] != 0 || starts[rows] != columns.len() {
            let blocks = columns.len();
            return Err(Error::Blocks(format!(
                "{} row starts, expected {} from 0 to {blocks}",
                starts.len(),
                rows + 1
            )));
        }
        let mut runs = Vec::new();
        let mut run_starts = Vec::with_capacity(rows + 1);
        run_starts.push(0);
        for (index, row) in self.frame.rows.clone().enumerate() {
            let listed = columns.get(starts[index]..starts[index + 1]);
            let Some(listed) = listed.filter(|listed| listed.is_sorted_by(|a, b| a < b)) else {
                return Err(Error::Blocks(format!("row {row}: expected ascending columns")));
            };
            let first = runs.len();
            let mut own = self.row(row).iter().peekable();
            for &column in listed {
                while own.next_if(|run| run.end() <= column).is_some() {}
                match own.peek() {
                    Some(run) if run.start <= column => {
                        push_run(&mut runs, first, Run { start: column, len: 1, ..**run });
                    }
                    Some(_) => {}
                    None => break,
                }
            }
            match u32::try_from(runs.len()) {
                Ok(len) if runs.len() <= self.frame.max_runs() => run_starts.push(len),
                _ => {
                    let (limit, row) = (self.frame.max_bytes, row.into());
                    return Err(Error::TooLarge { limit, row, rows: rows as u64 });
                }
            }
        }
        let (frame, pattern) = (self.frame.clone(), self.pattern.clone());
        let mut kept =
            Layout::new(frame, pattern, run_starts, runs, self.content.table.clone(), (0, 0));
        kept.positioning = self.positioning.clone();
        kept.whole = false;
        Ok(kept)
    }
}
