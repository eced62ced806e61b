//! A case: a rule and all that a layout is compiled for, and the truth about it.
//!
//! Key `j` stands at position `j + key_offset` and query `i` at `i + query_offset`; left out, they
//! are 0 and `key_offset + tokens_k − tokens_q`. A map names the positions of the local queries or keys
//! outright, offsets included, as progressions one after the other:
//!
//! ```text
//! query_map [(4, 2, 3), (9, 1, 2)]   local query   0  1  2  3  4
//!                                    position      4  6  8  9 10
//! ```
//!
//! Padding speaks of key numbers, map or no map: the key at position `p` is number
//! `p − key_offset`, and is seen only if that lies in `key_padding`.

use std::fmt::{Display, Formatter};
use std::ops::Range;

use arbitrary::{Error, Unstructured};

use crate::rule::Rule;
use crate::splitmix::seeded_bytes;

/// A rule with everything that a layout is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The pattern.
    pub rule: Rule,
    /// Queries of the whole sequence.
    pub tokens_q: u64,
    /// Keys of the whole sequence.
    pub tokens_k: u64,
    /// Position of query 0; `key_offset + tokens_k − tokens_q` where left out.
    pub query_offset: Option<i64>,
    /// Position of key 0; 0 where left out.
    pub key_offset: Option<i64>,
    /// Block size of the layout.
    pub block: u32,
    /// Rows of query blocks to compile; all of them where left out.
    pub rows: Option<Range<u64>>,
    /// Positions of the local queries; all queries in order where left out.
    pub query_map: Option<Vec<Steps>>,
    /// Positions of the local keys; all keys in order where left out.
    pub key_map: Option<Vec<Steps>>,
    /// Numbers of the keys that are not padding; all of them where left out.
    pub key_padding: Option<Range<u64>>,
    /// Byte budget of the mask table; the default one where left out.
    pub mask_bytes: Option<u64>,
}

/// An arithmetic progression of global positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// The first position.
    pub start: i64,
    /// From one position to the next; at least 1.
    pub step: u64,
    /// How many positions.
    pub len: u64,
}

impl Steps {
    /// The positions, in order.
    pub fn positions(self) -> impl Iterator<Item = i64> {
        (0..self.len).map(move |n| self.start + (n * self.step) as i64)
    }
}

impl Case {
    /// The case of a seed: the same on every machine.
    pub fn from_seed(seed: u64) -> Case {
        Case::seeded(seed, true)
    }

    /// The case of a seed whose rule may have fixed places and grids, or not.
    pub(crate) fn seeded(seed: u64, places: bool) -> Case {
        let mut len = 4096;
        loop {
            match Case::drawn(&mut Unstructured::new(&seeded_bytes(seed, len)), places) {
                Ok(case) => return case,
                Err(Error::NotEnoughData) => len *= 2,
                Err(error) => panic!("seed {seed} makes no case: {error}"),
            }
        }
    }

    /// Position of query 0.
    pub fn query_origin(&self) -> i64 {
        let aligned = self.key_origin() + self.tokens_k as i64 - self.tokens_q as i64;
        self.query_offset.unwrap_or(aligned)
    }

    /// Position of key 0.
    pub fn key_origin(&self) -> i64 {
        self.key_offset.unwrap_or(0)
    }

    /// The position of every local query.
    pub fn query_positions(&self) -> Vec<i64> {
        positions(&self.query_map, self.query_origin(), self.tokens_q)
    }

    /// The position of every local key.
    pub fn key_positions(&self) -> Vec<i64> {
        positions(&self.key_map, self.key_origin(), self.tokens_k)
    }

    /// What every local query may see of the local keys, padding applied; `rows` leaves nothing out.
    pub fn truth(&self) -> Truth {
        let (queries, keys) = (self.query_positions(), self.key_positions());
        let mut pairs = Vec::with_capacity(queries.len() * keys.len());
        for &query in &queries {
            pairs.extend(keys.iter().map(|&key| self.valid(key) && self.rule.allows(query, key)));
        }
        Truth { queries: queries.len(), keys: keys.len(), pairs }
    }

    fn valid(&self, key: i64) -> bool {
        let number = u64::try_from(key - self.key_origin());
        self.key_padding.as_ref().is_none_or(|valid| number.is_ok_and(|n| valid.contains(&n)))
    }
}

fn positions(map: &Option<Vec<Steps>>, origin: i64, tokens: u64) -> Vec<i64> {
    match map {
        Some(map) => map.iter().copied().flat_map(Steps::positions).collect(),
        None => (origin..origin + tokens as i64).collect(),
    }
}

/// The whole mask of a case, local queries × local keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Truth {
    queries: usize,
    keys: usize,
    pairs: Vec<bool>,
}

impl Truth {
    /// Number of local queries.
    pub fn queries(&self) -> usize {
        self.queries
    }

    /// Number of local keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Whether local query `i` may see local key `j`.
    pub fn get(&self, i: usize, j: usize) -> bool {
        self.row(i)[j]
    }

    /// What local query `i` may see: one `bool` for each local key.
    pub fn row(&self, i: usize) -> &[bool] {
        &self.pairs[i * self.keys..][..self.keys]
    }
}

impl Display for Case {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {} x {}", self.rule, self.tokens_q, self.tokens_k)?;
        write!(f, ", block {}", self.block)?;
        if let Some(offset) = self.query_offset {
            write!(f, ", query_offset {offset}")?;
        }
        if let Some(offset) = self.key_offset {
            write!(f, ", key_offset {offset}")?;
        }
        if let Some(rows) = &self.rows {
            write!(f, ", rows {rows:?}")?;
        }
        if let Some(map) = &self.query_map {
            write!(f, ", query_map [{}]", text(map))?;
        }
        if let Some(map) = &self.key_map {
            write!(f, ", key_map [{}]", text(map))?;
        }
        if let Some(valid) = &self.key_padding {
            write!(f, ", key_padding {valid:?}")?;
        }
        if let Some(bytes) = self.mask_bytes {
            write!(f, ", mask_bytes {bytes}")?;
        }
        Ok(())
    }
}

impl Display for Steps {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {}, {})", self.start, self.step, self.len)
    }
}

fn text(map: &[Steps]) -> String {
    map.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(tokens_q: u64, tokens_k: u64) -> Case {
        Case {
            rule: Rule::Causal,
            tokens_q,
            tokens_k,
            query_offset: None,
            key_offset: None,
            block: 16,
            rows: None,
            query_map: None,
            key_map: None,
            key_padding: None,
            mask_bytes: None,
        }
    }

    fn picture(truth: &Truth) -> Vec<String> {
        let row = |i| truth.row(i).iter().map(|&seen| if seen { '#' } else { '.' }).collect();
        (0..truth.queries()).map(row).collect()
    }

    #[test]
    fn queries_are_the_last_positions() {
        assert_eq!(case(2, 5).query_positions(), [3, 4]);
        assert_eq!(case(3, 1).query_positions(), [-2, -1, 0]);
        assert_eq!(picture(&case(2, 4).truth()), ["###.", "####"]);
        assert_eq!(picture(&case(3, 2).truth()), ["..", "#.", "##"]);
    }

    #[test]
    fn offsets_are_taken_as_given() {
        let case = Case { query_offset: Some(11), key_offset: Some(10), ..case(2, 3) };
        assert_eq!(case.query_positions(), [11, 12]);
        assert_eq!(case.key_positions(), [10, 11, 12]);
        assert_eq!(picture(&case.truth()), ["##.", "###"]);
    }

    #[test]
    fn maps_name_positions() {
        let steps = |start, step, len| Steps { start, step, len };
        let case = Case {
            query_map: Some(vec![steps(4, 2, 3), steps(9, 1, 0), steps(9, 1, 2)]),
            key_map: Some(vec![steps(9, 1, 1), steps(0, 5, 2)]),
            ..case(11, 11)
        };
        assert_eq!(case.query_positions(), [4, 6, 8, 9, 10]);
        assert_eq!(case.key_positions(), [9, 0, 5]);
        assert_eq!(picture(&case.truth()), [".#.", ".##", ".##", "###", "###"]);
    }

    #[test]
    fn padding_speaks_of_key_numbers() {
        let case = Case {
            query_offset: Some(99),
            key_offset: Some(-2),
            key_map: Some(vec![
                Steps { start: 1, step: 1, len: 2 },
                Steps { start: -2, step: 1, len: 3 },
            ]),
            key_padding: Some(1..4),
            ..case(1, 5)
        };
        assert_eq!(case.key_positions(), [1, 2, -2, -1, 0]);
        assert_eq!(picture(&case.truth()), ["#..##"]);
    }

    #[test]
    fn no_tokens_are_case() {
        assert_eq!(case(0, 3).truth().keys(), 3);
        assert_eq!(picture(&case(2, 0).truth()), ["", ""]);
    }

    #[test]
    fn display_is_one_line() {
        assert_eq!(case(2, 5).to_string(), "causal on 2 x 5, block 16");
        let case = Case {
            query_offset: Some(-3),
            rows: Some(0..1),
            key_map: Some(vec![Steps { start: 0, step: 2, len: 3 }]),
            mask_bytes: Some(0),
            ..case(2, 5)
        };
        assert_eq!(
            case.to_string(),
            "causal on 2 x 5, block 16, query_offset -3, rows 0..1, key_map [(0, 2, 3)], mask_bytes 0"
        );
    }
}
