//! The printer: text that parses back to the same pattern.

use std::fmt::{self, Display, Formatter};

use crate::heads::Heads;
use crate::pattern::{Expr, Pattern};

impl Display for Pattern {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Expr::Full => f.write_str("full"),
            Expr::Causal => f.write_str("causal"),
            Expr::Window { left, right } => write!(f, "window({left}, {right})"),
            Expr::Sinks { tokens } => write!(f, "sinks({tokens})"),
            Expr::GlobalTokens { tokens } => write!(f, "global_tokens({tokens})"),
            Expr::Keys { from, to } => write!(f, "keys({from}, {to})"),
            Expr::Queries { from, to } => write!(f, "queries({from}, {to})"),
            Expr::Neighborhood { sizes, radii } => {
                f.write_str("neighborhood([")?;
                list(f, sizes, |f, size| write!(f, "{size}"))?;
                f.write_str("], [")?;
                list(f, radii, |f, radius| write!(f, "{radius}"))?;
                f.write_str("])")
            }
            Expr::Dilated { segment, rate, offset: 0 } => write!(f, "dilated({segment}, {rate})"),
            Expr::Dilated { segment, rate, offset } => {
                write!(f, "dilated({segment}, {rate}, {offset})")
            }
            Expr::Strided { stride } => write!(f, "strided({stride})"),
            Expr::Hierarchical(levels) => {
                f.write_str("hierarchical([")?;
                list(f, levels, |f, l| write!(f, "({}, {}, {})", l.window, l.stride, l.grain))?;
                f.write_str("])")
            }
            Expr::Documents(lengths) => {
                f.write_str("documents([")?;
                list(f, lengths.iter(), |f, length| write!(f, "{length}"))?;
                f.write_str("])")
            }
            Expr::Packed { queries, keys, inner } => {
                f.write_str("packed([")?;
                list(f, queries.iter(), |f, length| write!(f, "{length}"))?;
                f.write_str("], [")?;
                list(f, keys.iter(), |f, length| write!(f, "{length}"))?;
                write!(f, "], {inner})")
            }
            Expr::BlocksDilated { block, rates } => {
                write!(f, "blocks_dilated({block}, [")?;
                list(f, rates, |f, rate| write!(f, "{rate}"))?;
                f.write_str("])")
            }
            Expr::Butterfly { block } => write!(f, "butterfly({block})"),
            Expr::Random { block, per_row, blocks, seed } => {
                write!(f, "random({block}, {per_row}, {blocks}, {seed})")
            }
            Expr::Blocks { block, rows } => {
                write!(f, "blocks({block}, [")?;
                list(f, 0..rows.len() as i64, |f, row| {
                    f.write_str("[")?;
                    list(f, rows.row(row), |f, &(start, end)| match end - start {
                        1 => write!(f, "{start}"),
                        _ => write!(f, "{start}..{end}"),
                    })?;
                    f.write_str("]")
                })?;
                f.write_str("])")
            }
            Expr::TooDeep => f.write_str("<nested too deeply>"),
            Expr::And(parts) => joined(f, parts, " & ", |part| matches!(part.0, Expr::Or(_))),
            Expr::Or(parts) => joined(f, parts, " | ", |_| false),
            Expr::Not(inner) => {
                let parens = matches!(inner.0, Expr::And(_) | Expr::Or(_));
                if parens { write!(f, "!({inner})") } else { write!(f, "!{inner}") }
            }
        }
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> String {
        pattern.to_string()
    }
}

impl Display for Heads {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Heads::Same(pattern) => write!(f, "{pattern}"),
            Heads::Each(patterns) => {
                f.write_str("heads([")?;
                list(f, patterns, |f, pattern| write!(f, "{pattern}"))?;
                f.write_str("])")
            }
            Heads::Batch(entries) => {
                f.write_str("batch([")?;
                list(f, entries, |f, entry| write!(f, "{entry}"))?;
                f.write_str("])")
            }
        }
    }
}

impl From<Heads> for String {
    fn from(heads: Heads) -> String {
        heads.to_string()
    }
}

fn list<T>(
    f: &mut Formatter<'_>,
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut Formatter<'_>, T) -> fmt::Result,
) -> fmt::Result {
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            f.write_str(", ")?;
        }
        write(f, item)?;
    }
    Ok(())
}

fn joined(
    f: &mut Formatter<'_>,
    parts: &[Pattern],
    operator: &str,
    parens: impl Fn(&Pattern) -> bool,
) -> fmt::Result {
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            f.write_str(operator)?;
        }
        if parens(part) { write!(f, "({part})")? } else { write!(f, "{part}")? }
    }
    Ok(())
}
