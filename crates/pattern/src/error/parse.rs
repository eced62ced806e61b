//! Syntax errors of pattern text, constructed by `text`.

use std::fmt;

/// Position and reason of a syntax error in the text of a pattern.
///
/// Displayed with a caret under the position:
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
    /// Column of the first caret in the excerpt, and number of carets.
    caret: (usize, usize),
}

/// Characters of text shown before and after the position.
const EXCERPT: usize = 48;

impl ParseError {
    pub(crate) fn new(text: &str, offset: usize, len: usize, message: String) -> Self {
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

    /// Byte offset of the error in the text.
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
