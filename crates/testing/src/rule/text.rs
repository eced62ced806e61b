//! The text form of a rule: what the pattern parser has to read back.
//!
//! `!` binds tightest, then `&`, then `|`. Operands that are themselves `And` or `Or` stand in
//! parentheses, needed or not, so that nothing here depends on precedence. An empty `And` is
//! `full` and an empty `Or` is `!full`, as `all` and `any` of nothing are.

use std::fmt::{Display, Formatter, Result};

use super::{Level, Rule};

impl Display for Rule {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Rule::Full => write!(f, "full"),
            Rule::Causal => write!(f, "causal"),
            Rule::Window { left, right } => write!(f, "window({left}, {right})"),
            Rule::SlidingWindow { width } => write!(f, "sliding_window({width})"),
            Rule::Sinks { n } => write!(f, "sinks({n})"),
            Rule::GlobalTokens { n } => write!(f, "global_tokens({n})"),
            Rule::Keys { from, to } => write!(f, "keys({from}, {to})"),
            Rule::Queries { from, to } => write!(f, "queries({from}, {to})"),
            Rule::Neighborhood { sizes, radii } => {
                write!(f, "neighborhood({sizes:?}, {radii:?})")
            }
            Rule::Dilated { segment, rate, offset } => {
                write!(f, "dilated({segment}, {rate}, {offset})")
            }
            Rule::Strided { stride } => write!(f, "strided({stride})"),
            Rule::Hierarchical(levels) => write!(f, "hierarchical([{}])", list(levels)),
            Rule::Documents(lengths) => write!(f, "documents({lengths:?})"),
            Rule::Packed { queries, keys, inner } => {
                write!(f, "packed({queries:?}, {keys:?}, {inner})")
            }
            Rule::BlocksDilated { block, rates } => write!(f, "blocks_dilated({block}, {rates:?})"),
            Rule::Butterfly { block } => write!(f, "butterfly({block})"),
            Rule::Random { block, per_row, blocks, seed } => {
                write!(f, "random({block}, {per_row}, {blocks}, {seed})")
            }
            Rule::Blocks { block, rows } => write!(f, "blocks({block}, {rows:?})"),
            Rule::And(rules) => join(f, rules, " & ", "full"),
            Rule::Or(rules) => join(f, rules, " | ", "!full"),
            Rule::Not(rule) => write!(f, "!{}", operand(rule)),
        }
    }
}

impl Display for Level {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "({}, {}, {})", self.window, self.stride, self.grain)
    }
}

fn join(f: &mut Formatter<'_>, rules: &[Rule], operator: &str, empty: &str) -> Result {
    match rules {
        [] => write!(f, "{empty}"),
        [rule] => write!(f, "{rule}"),
        _ => write!(f, "{}", rules.iter().map(operand).collect::<Vec<_>>().join(operator)),
    }
}

fn operand(rule: &Rule) -> String {
    match rule {
        Rule::And(_) | Rule::Or(_) => format!("({rule})"),
        _ => rule.to_string(),
    }
}

fn list(items: &[impl Display]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
