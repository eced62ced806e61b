//! The operators `&`, `|` and `!`.

use std::ops::{BitAnd, BitOr, Not};

use super::{Expr, MAX_DEPTH, Pattern};

/// Operators cannot fail. One that would exceed the nesting limit returns a pattern whose every use
/// is an error: see [`Pattern::check`].
impl BitAnd for Pattern {
    type Output = Pattern;

    fn bitand(self, other: Pattern) -> Pattern {
        // A disjunction inside a conjunction needs parentheses.
        let levels = |part: &Pattern| part.1 + u8::from(matches!(part.0, Expr::Or(_)));
        let levels = levels(&self).max(levels(&other));
        combined(self, other, levels, Expr::And, |expr| match expr {
            Expr::And(parts) => Ok(parts),
            expr => Err(expr),
        })
    }
}

impl BitOr for Pattern {
    type Output = Pattern;

    fn bitor(self, other: Pattern) -> Pattern {
        let levels = self.1.max(other.1);
        combined(self, other, levels, Expr::Or, |expr| match expr {
            Expr::Or(parts) => Ok(parts),
            expr => Err(expr),
        })
    }
}

/// Two patterns in one list. Lists of the same operator are joined; the first grows in place, so a
/// chain takes time linear in its length.
fn combined(
    first: Pattern,
    second: Pattern,
    levels: u8,
    list: fn(Vec<Pattern>) -> Expr,
    parts: fn(Expr) -> Result<Vec<Pattern>, Expr>,
) -> Pattern {
    if levels > MAX_DEPTH || first.is_too_deep() || second.is_too_deep() {
        return Pattern(Expr::TooDeep, 0);
    }
    let Pattern(expr, own) = first;
    let mut all = parts(expr).unwrap_or_else(|expr| vec![Pattern(expr, own)]);
    let Pattern(expr, own) = second;
    match parts(expr) {
        Ok(more) => all.extend(more),
        Err(expr) => all.push(Pattern(expr, own)),
    }
    Pattern(list(all), levels)
}

impl Not for Pattern {
    type Output = Pattern;

    fn not(self) -> Pattern {
        let levels = self.1 + 1 + u8::from(matches!(self.0, Expr::And(_) | Expr::Or(_)));
        match self.0 {
            Expr::Not(inner) => *inner,
            Expr::TooDeep => self,
            _ if levels > MAX_DEPTH => Pattern(Expr::TooDeep, 0),
            _ => Pattern(Expr::Not(Box::new(self)), levels),
        }
    }
}
