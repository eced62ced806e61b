//! The text form of patterns.
//!
//! ```text
//! heads   = "heads(" "[" or { "," or } "]" ")" | or
//! or      = and { "|" and }
//! and     = unary { "&" unary }
//! unary   = ( "!" | "~" ) unary | "(" or ")" | name [ "(" arguments ")" ]
//! ```
//!
//! Arguments are numbers (`1_000` may have underscores), lists `[…]` of numbers, of levels
//! `(window, stride, grain)` or of rows of blocks, and the inner pattern of `packed`.
//!
//! One look ahead decides everything, so an error is where reading stopped and names what could
//! have stood there. What is read takes at most a fixed number of bytes for each byte of text, and
//! nesting is bounded; a short text can't make a large pattern.

mod parse;
mod print;

use std::fmt;

/// Where and why the text of a pattern doesn't parse.
///
/// Prints itself with a caret under the place:
///
/// ```
/// use longspan_pattern::Pattern;
///
/// let error = "causal & windw(256, 0)".parse::<Pattern>().unwrap_err();
/// assert_eq!(error.to_string(), "\
/// expected a pattern, found `windw`; did you mean `window`?
///   causal & windw(256, 0)
///            ^^^^^");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    message: String,
    offset: usize,
    excerpt: String,
    /// Columns of the excerpt before the caret, and carets.
    caret: (usize, usize),
}

/// Characters of the text that an error shows before and after its place.
const EXCERPT: usize = 48;

impl ParseError {
    fn new(text: &str, offset: usize, len: usize, message: String) -> Self {
        let before: Vec<char> = text[..offset].chars().rev().take(EXCERPT + 1).collect();
        let after: Vec<char> = text[offset..].chars().take(EXCERPT + 1).collect();
        let visible = |c: &char| if c.is_control() { ' ' } else { *c };
        let mut excerpt = String::new();
        if before.len() > EXCERPT {
            excerpt.push('…');
        }
        excerpt.extend(before.iter().take(EXCERPT).rev().map(visible));
        let column = excerpt.chars().count();
        excerpt.extend(after.iter().take(EXCERPT).map(visible));
        if after.len() > EXCERPT {
            excerpt.push('…');
        }
        let carets = text[offset..offset + len].chars().count().clamp(1, EXCERPT);
        ParseError { message, offset, excerpt, caret: (column, carets) }
    }

    /// The byte of the text at which it stopped making sense.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (column, carets) = self.caret;
        writeln!(f, "{}", self.message)?;
        writeln!(f, "  {}", self.excerpt)?;
        write!(f, "  {:column$}{:^<carets$}", "", "")
    }
}

impl std::error::Error for ParseError {}
