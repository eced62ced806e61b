//! Active keys of a set of queries, and active keys per query.

use std::ops::ControlFlow;

use super::{Layout, RunKind};
use crate::error::Result;
use crate::meter::ignore_progress;

impl Layout {
    /// The keys that at least one of the chosen queries attends to, one bit per key, ascending from
    /// the lowest bit of the first word. `chosen` has one bit per query; `None` selects all.
    ///
    /// Only compiled rows count.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::dilated(64, 4, 1)?, &Shape::new(64, 64))?;
    /// assert_eq!(layout.keys_seen(None)?, [0x2222_2222_2222_2222]);
    /// assert_eq!(layout.keys_seen(Some(&[0b1101]))?, [0]);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If `chosen` is shorter than the queries.
    pub fn keys_seen(&self, chosen: Option<&[u64]>) -> Result<Vec<u64>> {
        self.keys_seen_with(chosen, ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn keys_seen_with(
        &self,
        chosen: Option<&[u64]>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<u64>> {
        let mut meter = self.meter(&mut progress);
        let mut active = vec![0_u64; self.keys().div_ceil(64)];
        let per_row = self.block().words();
        let mut masks = self.masks();
        let words_per_mask = (per_row * self.block().get()) as u64;
        for row in self.rows() {
            meter.at_row((row - self.rows().start).into());
            meter.spend(words_per_mask);
            // Early exit once all keys are active.
            if row.is_power_of_two() && all(&active, 0, self.keys()) {
                break;
            }
            let queries = self.row_tokens(row);
            let counts = |query: usize| chosen.is_none_or(|bits| bit(bits, query));
            if !queries.clone().any(counts) {
                continue;
            }
            for run in self.row(row) {
                if run.kind() == RunKind::Full {
                    meter.spend(1 + u64::from(run.len) * per_row as u64);
                    let (first, last) = (run.start, run.end() - 1);
                    let to = self.column_tokens(last).end;
                    set(&mut active, self.column_tokens(first).start, to);
                    continue;
                }
                for column in run.start..run.end() {
                    meter.spend(2 * words_per_mask);
                    if meter.halted() {
                        return Err(self.halted(&meter, "reading masks"));
                    }
                    let keys = self.column_tokens(column);
                    if all(&active, keys.start, keys.end) {
                        continue;
                    }
                    let words = masks.get_with(row, column, run, &mut meter);
                    for (query, words) in queries.clone().zip(words.chunks_exact(per_row)) {
                        if counts(query) {
                            join(&mut active, keys.start, words);
                        }
                    }
                }
            }
        }
        if meter.halted() { Err(self.halted(&meter, "reading masks")) } else { Ok(active) }
    }

    /// Number of keys that each query attends to. Rows that were not compiled have 0.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::causal(), &Shape::new(3, 5))?;
    /// assert_eq!(layout.keys_by_query()?, [3, 4, 5]);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn keys_by_query(&self) -> Result<Vec<usize>> {
        self.keys_by_query_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn keys_by_query_with(
        &self,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<usize>> {
        let mut meter = self.meter(&mut progress);
        let mut counts = vec![0; self.queries()];
        let per_row = self.block().words();
        let mut masks = self.masks();
        let words_per_mask = (per_row * self.block().get()) as u64;
        for row in self.rows() {
            meter.at_row((row - self.rows().start).into());
            meter.spend(words_per_mask);
            let counts = &mut counts[self.row_tokens(row)];
            for run in self.row(row) {
                if run.kind() == RunKind::Full {
                    meter.spend(words_per_mask);
                    let to = self.column_tokens(run.end() - 1).end;
                    let keys = to - self.column_tokens(run.start).start;
                    counts.iter_mut().for_each(|count| *count += keys);
                    continue;
                }
                for column in run.start..run.end() {
                    meter.spend(2 * words_per_mask);
                    if meter.halted() {
                        return Err(self.halted(&meter, "reading masks"));
                    }
                    let words = masks.get_with(row, column, run, &mut meter);
                    for (count, words) in counts.iter_mut().zip(words.chunks_exact(per_row)) {
                        *count +=
                            words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
                    }
                }
            }
        }
        if meter.halted() { Err(self.halted(&meter, "reading masks")) } else { Ok(counts) }
    }
}

fn bit(bits: &[u64], number: usize) -> bool {
    bits[number / 64] >> (number % 64) & 1 != 0
}

/// The bits `from..to` of each word that they touch.
fn words(from: usize, to: usize) -> impl Iterator<Item = (usize, u64)> {
    (from / 64..to.div_ceil(64)).map(move |word| {
        let low = from.saturating_sub(word * 64);
        let high = (to - word * 64).min(64);
        (word, u64::MAX << low & u64::MAX >> (64 - high))
    })
}

fn set(bits: &mut [u64], from: usize, to: usize) {
    words(from, to).for_each(|(word, mask)| bits[word] |= mask);
}

fn all(bits: &[u64], from: usize, to: usize) -> bool {
    words(from, to).all(|(word, mask)| bits[word] & mask == mask)
}

/// Sets the bits of a mask row whose first bit is key `from`.
fn join(bits: &mut [u64], from: usize, mask: &[u64]) {
    let (first, shift) = (from / 64, from % 64);
    for (index, word) in mask.iter().enumerate().filter(|(_, word)| **word != 0) {
        bits[first + index] |= word << shift;
        if shift != 0 && word >> (64 - shift) != 0 {
            bits[first + index + 1] |= word >> (64 - shift);
        }
    }
}
