//! The terms of a union that are dense in an order of residues.

use super::{Expr, Lengths, Pattern};

/// Segments of at most this many tokens of a residue are blocks of one layout over all of them, not
/// views of their own.
const SHORT: u64 = 256;

/// Maximum number of terms in orders of their own.
const MAX_TERMS: usize = 16;

/// Which queries and keys are views in which a term is dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residues {
    /// Congruent modulo `modulus`.
    Congruent { modulus: u64 },
    /// `offset` modulo `rate`, counted from the start of their segment.
    Segments { segment: u64, rate: u64, offset: u64 },
}

impl Residues {
    pub(crate) fn modulus(&self) -> u64 {
        match *self {
            Residues::Congruent { modulus } => modulus,
            Residues::Segments { rate, .. } => rate,
        }
    }

    /// Whether no pair has both.
    fn is_disjoint(&self, other: &Residues) -> bool {
        match (self, other) {
            (
                Residues::Segments { segment, rate, offset },
                Residues::Segments { segment: other_segment, rate: other_rate, offset: other },
            ) => (segment, rate) == (other_segment, other_rate) && offset != other,
            _ => false,
        }
    }
}

/// A term whose pairs lie in the views of an order of residues.
#[derive(Clone, PartialEq)]
pub(crate) struct Term {
    pub(crate) residues: Residues,
    /// The sequences of `packed` within which residues count.
    pub(crate) sequences: Option<(Lengths, Lengths)>,
    /// The whole term.
    pattern: Pattern,
    /// What else holds of the pairs of a view.
    pub(crate) remainder: Pattern,
}

/// A pattern as a union of disjoint parts.
pub(crate) struct Terms {
    /// What has no order of its own.
    pub(crate) natural: Option<Pattern>,
    /// Terms with an order, at least one.
    pub(crate) ordered: Vec<Term>,
}

impl Pattern {
    /// Splits the pattern into a part in natural order and terms in orders of residues, so that every
    /// pair is in one of them. `None` where there are no such terms, or too many.
    pub(crate) fn terms(&self) -> Option<Terms> {
        if !self.has_residues() {
            return None;
        }
        let (natural, found) = self.split();
        let mut ordered: Vec<Term> = Vec::new();
        for term in found {
            let same = |known: &&mut Term| {
                known.residues == term.residues && known.sequences == term.sequences
            };
            match ordered.iter_mut().find(same) {
                Some(known) => {
                    known.pattern = known.pattern.clone() | term.pattern;
                    known.remainder = known.remainder.clone() | term.remainder;
                }
                None => ordered.push(term),
            }
        }
        if ordered.is_empty() || ordered.len() > MAX_TERMS {
            return None;
        }
        for index in 0..ordered.len() {
            let (earlier, rest) = ordered.split_at_mut(index);
            let term = &mut rest[0];
            let overlaps = |other: &&Term| {
                other.sequences != term.sequences || !other.residues.is_disjoint(&term.residues)
            };
            let earlier = earlier.iter().filter(overlaps).map(|term| &term.pattern);
            for pattern in natural.iter().chain(earlier) {
                term.remainder = term.remainder.clone() & !pattern.clone();
            }
        }
        // Nested too deep with exclusions; the pattern itself is not.
        let valid = |pattern: &Pattern| pattern.check().is_ok();
        (natural.iter().all(valid) && ordered.iter().all(|term| valid(&term.remainder)))
            .then_some(Terms { natural, ordered })
    }

    /// Whether any primitive is dense in an order of residues.
    fn has_residues(&self) -> bool {
        match &self.0 {
            Expr::Strided { stride } => *stride > 1,
            Expr::Dilated { rate, .. } => *rate > 1,
            Expr::And(parts) | Expr::Or(parts) => parts.iter().any(Pattern::has_residues),
            Expr::Packed { inner, .. } => inner.has_residues(),
            // The complement of a view is dense in no order.
            _ => false,
        }
    }

    /// The longest stride or dilation rate anywhere in it; 0 without any.
    pub(crate) fn longest_step(&self) -> u64 {
        match &self.0 {
            Expr::Strided { stride } => *stride,
            Expr::Dilated { rate, .. } => *rate,
            Expr::And(parts) | Expr::Or(parts) => {
                parts.iter().map(Pattern::longest_step).max().unwrap_or(0)
            }
            Expr::Packed { inner, .. } | Expr::Not(inner) => inner.longest_step(),
            _ => 0,
        }
    }

    /// The part without an order, and the terms with one; they may overlap.
    fn split(&self) -> (Option<Pattern>, Vec<Term>) {
        if let Some(term) = self.term() {
            return (None, vec![term]);
        }
        match &self.0 {
            Expr::Or(parts) => {
                let (mut natural, mut ordered) = (None, Vec::new());
                for part in parts {
                    let (own, terms) = part.split();
                    natural = union(natural, own);
                    ordered.extend(terms);
                }
                (natural, ordered)
            }
            Expr::And(parts) => {
                // No operand is a term; one is a union with terms.
                let Some(index) = parts.iter().position(Pattern::has_residues) else {
                    return (Some(self.clone()), Vec::new());
                };
                let others = parts.iter().enumerate().filter(|(other, _)| *other != index);
                let others = others.map(|(_, part)| part.clone());
                let others = others.reduce(|all, part| all & part).expect("two or more operands");
                let (natural, terms) = parts[index].split();
                let terms = terms.into_iter().map(|term| others.clone() & term.pattern);
                let (rest, mut ordered) = terms_or_natural(terms);
                // Other operands may be unions with terms too.
                let Some(own) = natural else { return (rest, ordered) };
                let natural = others.clone() & own.clone();
                // Each turn leaves one operand fewer with residues, or is the last one.
                if !others.has_residues() || own.has_residues() {
                    return (union(rest, Some(natural)), ordered);
                }
                let (natural, more) = natural.split();
                ordered.extend(more);
                (union(rest, natural), ordered)
            }
            Expr::Packed { queries, keys, inner } => {
                let packed = |inner| packed(queries, keys, inner);
                let (natural, terms) = inner.split();
                let terms = terms.into_iter().map(|term| packed(term.pattern));
                let (rest, ordered) = terms_or_natural(terms);
                (union(natural.map(packed), rest), ordered)
            }
            _ => (Some(self.clone()), Vec::new()),
        }
    }

    /// The pattern as one term: where all its pairs lie in the views of one order.
    fn term(&self) -> Option<Term> {
        let new = |residues, remainder| Term {
            residues,
            sequences: None,
            pattern: self.clone(),
            remainder,
        };
        match &self.0 {
            Expr::Strided { stride } if *stride > 1 => {
                Some(new(Residues::Congruent { modulus: *stride }, Pattern::full()))
            }
            &Expr::Dilated { segment, rate, offset } if rate > 1 => {
                let short = segment.is_multiple_of(rate) && segment / rate <= SHORT;
                Some(if short {
                    let segment = super::MAX_ARGUMENT;
                    new(Residues::Segments { segment, rate, offset }, self.clone())
                } else {
                    new(Residues::Segments { segment, rate, offset }, Pattern::full())
                })
            }
            Expr::And(parts) => {
                let terms = parts.iter().map(Pattern::term).enumerate();
                let terms = terms.filter_map(|(index, term)| Some((index, term?)));
                let (index, best) = terms.max_by_key(|(_, term)| term.residues.modulus())?;
                let others = parts.iter().enumerate().filter(|(other, _)| *other != index);
                let remainder = others.fold(best.remainder, |all, (_, part)| {
                    if all == Pattern::full() { part.clone() } else { all & part.clone() }
                });
                Some(Term { pattern: self.clone(), remainder, ..best })
            }
            Expr::Packed { queries, keys, inner } => {
                let term = inner.term().filter(|term| term.sequences.is_none())?;
                Some(Term {
                    sequences: Some((queries.clone(), keys.clone())),
                    pattern: self.clone(),
                    remainder: packed(queries, keys, term.remainder),
                    ..term
                })
            }
            _ => None,
        }
    }

    /// Whether a pair is active by the distance of its positions alone.
    pub(crate) fn is_relative(&self) -> bool {
        match &self.0 {
            Expr::Full | Expr::Causal | Expr::Window { .. } | Expr::Strided { .. } => true,
            Expr::And(_) | Expr::Or(_) | Expr::Not(_) => {
                self.parts().iter().all(Pattern::is_relative)
            }
            _ => false,
        }
    }
}

/// Patterns as terms; those that are none, as one pattern.
fn terms_or_natural(patterns: impl Iterator<Item = Pattern>) -> (Option<Pattern>, Vec<Term>) {
    let (mut natural, mut ordered) = (None, Vec::new());
    for pattern in patterns {
        match pattern.term() {
            Some(term) => ordered.push(term),
            None => natural = union(natural, Some(pattern)),
        }
    }
    (natural, ordered)
}

fn union(all: Option<Pattern>, more: Option<Pattern>) -> Option<Pattern> {
    match (all, more) {
        (Some(all), Some(more)) => Some(all | more),
        (all, more) => all.or(more),
    }
}

fn packed(queries: &Lengths, keys: &Lengths, inner: Pattern) -> Pattern {
    let levels = inner.1 + 1;
    Pattern(
        Expr::Packed { queries: queries.clone(), keys: keys.clone(), inner: inner.into() },
        levels,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Residues and remainders of terms.
    type Ordered = Vec<(Residues, String)>;

    fn text(pattern: &str) -> Option<(Option<String>, Ordered)> {
        let terms = pattern.parse::<Pattern>().unwrap().terms()?;
        let ordered = terms.ordered.iter().map(|term| (term.residues, term.remainder.to_string()));
        Some((terms.natural.map(|natural| natural.to_string()), ordered.collect()))
    }

    #[test]
    fn terms_are_those_of_unions() {
        let congruent = |modulus| Residues::Congruent { modulus };
        let some = |text: &str| Some(text.to_string());
        for natural in ["causal", "window(3, 4) | sinks(2)", "!strided(4)", "strided(1)"] {
            assert_eq!(text(natural), None);
        }
        assert_eq!(text("strided(64)"), Some((None, vec![(congruent(64), "full".into())])));
        assert_eq!(
            text("causal & (window(64, 0) | strided(128) | sinks(3))"),
            Some((
                some("causal & (window(64, 0) | sinks(3))"),
                vec![(congruent(128), "causal & !(causal & (window(64, 0) | sinks(3)))".into())]
            ))
        );
        // Of two orders the one with fewer pairs.
        assert_eq!(
            text("strided(4) & strided(6)"),
            Some((None, vec![(congruent(6), "strided(4)".into())]))
        );
        // Disjoint offsets exclude nothing; short segments are blocks of one layout.
        let segments = |segment, rate, offset| Residues::Segments { segment, rate, offset };
        assert_eq!(
            text("dilated(2048, 4) | dilated(2048, 4, 1) | strided(8)"),
            Some((
                None,
                vec![
                    (segments(2048, 4, 0), "full".into()),
                    (segments(2048, 4, 1), "full".into()),
                    (congruent(8), "full & !dilated(2048, 4) & !dilated(2048, 4, 1)".into()),
                ]
            ))
        );
        assert_eq!(
            text("dilated(64, 4)"),
            Some((None, vec![(segments(1 << 61, 4, 0), "dilated(64, 4)".into())]))
        );
        assert_eq!(
            text("packed([5, 3], [5, 3], causal & strided(2) | sinks(1))"),
            Some((
                some("packed([5, 3], [5, 3], sinks(1))"),
                vec![(
                    congruent(2),
                    "packed([5, 3], [5, 3], causal) & !packed([5, 3], [5, 3], sinks(1))".into()
                )]
            ))
        );
        assert_eq!(
            text("packed([4], [4], packed([2, 2], [2, 2], strided(2)) | strided(2))"),
            Some((
                some("packed([4], [4], packed([2, 2], [2, 2], strided(2)))"),
                vec![(
                    congruent(2),
                    "packed([4], [4], full) & !packed([4], [4], packed([2, 2], [2, 2], strided(2)))"
                        .into()
                )]
            ))
        );
        assert_eq!(
            text("(causal | strided(3)) & (window(1, 1) | strided(5))")
                .map(|(_, terms)| terms.len()),
            Some(2)
        );
    }
}
