//! Lengths of documents and sequences against the tokens of a call.

use super::{Expr, Lengths, Pattern};
use crate::error::{Error, Result};

impl Pattern {
    /// Checks that inner documents and sequences fill each enclosing sequence.
    pub(super) fn fits_each(&self, queries: &Lengths, keys: &Lengths) -> Result<()> {
        if !self.has_lengths() {
            return Ok(());
        }
        let mut last = None;
        for i in 0..queries.count() {
            let lengths = (queries.length(i), keys.length(i));
            if lengths.0 > 0 && lengths.1 > 0 && last != Some(lengths) {
                self.fits(lengths.0, lengths.1 - lengths.0, lengths.1)?;
                last = Some(lengths);
            }
        }
        Ok(())
    }

    fn has_lengths(&self) -> bool {
        match &self.0 {
            Expr::Documents(_) | Expr::Packed { .. } => true,
            Expr::And(parts) | Expr::Or(parts) => parts.iter().any(Pattern::has_lengths),
            Expr::Not(inner) => inner.has_lengths(),
            _ => false,
        }
    }

    /// Checks the lengths of documents and sequences against the numbers of tokens.
    pub(crate) fn fits(&self, tokens_q: i64, query_offset: i64, key_end: i64) -> Result<()> {
        const KEYS: &str = "the position after the last key";
        const QUERIES: &str = "the number of queries";
        let sum = |primitive, argument, lengths: &Lengths, tokens, rule| {
            let sum = lengths.total();
            if sum == tokens {
                return Ok(());
            }
            Err(Error::Sum { primitive, argument, sum, tokens, rule })
        };
        match &self.0 {
            Expr::Documents(lengths) => sum("documents", "lengths", lengths, key_end, KEYS),
            Expr::Packed { queries, keys, .. } => {
                sum("packed", "query lengths", queries, tokens_q, QUERIES)?;
                sum("packed", "key lengths", keys, key_end, KEYS)?;
                let expected = keys.total() - queries.total();
                if query_offset != expected {
                    return Err(Error::PackedOffset { offset: query_offset, expected });
                }
                Ok(())
            }
            Expr::And(parts) | Expr::Or(parts) => {
                parts.iter().try_for_each(|part| part.fits(tokens_q, query_offset, key_end))
            }
            Expr::Not(inner) => inner.fits(tokens_q, query_offset, key_end),
            _ => Ok(()),
        }
    }
}
