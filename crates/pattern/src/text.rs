//! The text form of patterns: parser and printer. Above `pattern` and `heads`.
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
//! One token of lookahead decides every production, so an error is at the token that failed and
//! lists the expected ones. Memory is at most a fixed number of bytes per byte of text, and
//! nesting is bounded.

mod parse;
mod print;
