//! The positions that a pattern's primitives use: global, or within the sequences of `packed`.

use super::{Expr, Lengths, Pattern};

/// The sequences of `packed`, and positions within them. Clones share memory.
#[derive(Clone, PartialEq)]
pub(crate) struct Sequences {
    queries: Lengths,
    keys: Lengths,
}

/// The positions that the innermost primitives of a pattern use.
#[derive(Clone, PartialEq)]
pub(crate) enum Positioning {
    /// Global ones.
    Global,
    /// Those within a sequence. Every active pair lies in one.
    Within(Sequences),
    /// Different ones in different parts of the pattern.
    Mixed,
}

impl Pattern {
    /// The positions that the innermost primitives use.
    pub(crate) fn positioning(&self) -> Positioning {
        match &self.0 {
            Expr::Packed { queries, keys, inner } => match inner.positioning() {
                Positioning::Global => {
                    Positioning::Within(Sequences { queries: queries.clone(), keys: keys.clone() })
                }
                _ => Positioning::Mixed,
            },
            // Pairs of an intersection lie in the sequences of any operand.
            Expr::And(parts) => {
                let mut all = Positioning::Global;
                for part in parts {
                    match part.positioning() {
                        Positioning::Global => {}
                        other if all == Positioning::Global || all == other => all = other,
                        _ => return Positioning::Mixed,
                    }
                }
                all
            }
            // Those of a union in the sequences of one of them.
            Expr::Or(parts) => {
                let first = parts[0].positioning();
                let same = parts[1..].iter().all(|part| part.positioning() == first);
                if same { first } else { Positioning::Mixed }
            }
            Expr::Not(inner) => match inner.positioning() {
                Positioning::Global => Positioning::Global,
                _ => Positioning::Mixed,
            },
            _ => Positioning::Global,
        }
    }
}

impl Sequences {
    /// The position of a query within its sequence, aligned to the last keys; `None` outside all
    /// sequences. `hint` is the index of a sequence nearby, and becomes that of the query's.
    pub(crate) fn query(&self, position: i64, hint: &mut usize) -> Option<i64> {
        let token = position - (self.keys.total() - self.queries.total());
        if !(0..self.queries.total()).contains(&token) {
            return None;
        }
        *hint = self.queries.find(token, *hint);
        let shift = self.keys.length(*hint) - self.queries.length(*hint);
        Some(token - self.queries.start(*hint) + shift)
    }

    /// The position of a key within its sequence; `None` outside all sequences.
    pub(crate) fn key(&self, position: i64, hint: &mut usize) -> Option<i64> {
        if !(0..self.keys.total()).contains(&position) {
            return None;
        }
        *hint = self.keys.find(position, *hint);
        Some(position - self.keys.start(*hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positioning(text: &str) -> Positioning {
        text.parse::<Pattern>().unwrap().positioning()
    }

    #[test]
    fn sequences_hold_every_active_pair_or_positions_are_mixed() {
        let packed = "packed([2, 3], [4, 3], causal)";
        let Positioning::Within(sequences) = positioning(packed) else { panic!("{packed}") };
        for text in ["packed([2, 3], [4, 3], full) & window(9, 9)", &format!("{packed} | {packed}")]
        {
            assert!(positioning(text) == Positioning::Within(sequences.clone()), "{text}");
        }
        for text in ["causal", "!documents([3, 4]) | sinks(1)"] {
            assert!(positioning(text) == Positioning::Global, "{text}");
        }
        for text in [
            &format!("{packed} | sinks(1)"),
            &format!("!{packed}"),
            &format!("{packed} & packed([1, 4], [4, 3], full)"),
            "packed([4], [4], packed([2, 2], [2, 2], full))",
        ] {
            assert!(positioning(text) == Positioning::Mixed, "{text}");
        }
        // Keys 0..4 and 4..7; the queries are the last five positions, 2..4 and 4..7.
        let queries = (0..9).map(|p| sequences.query(p, &mut 0)).collect::<Vec<_>>();
        let expected = [None, None, Some(2), Some(3), Some(0), Some(1), Some(2), None, None];
        assert_eq!(queries, expected);
        let keys = (-1..8).map(|p| sequences.key(p, &mut 1)).collect::<Vec<_>>();
        let expected = [None, Some(0), Some(1), Some(2), Some(3), Some(0), Some(1), Some(2), None];
        assert_eq!(keys, expected);
    }
}
