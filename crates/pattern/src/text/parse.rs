//! The parser.

use std::str::FromStr;

use winnow::ascii::multispace0;
use winnow::combinator::{opt, peek};
use winnow::error::ParserError;
use winnow::stream::Stream;
use winnow::token::{any, take_while};
use winnow::{Parser, Result as Parsed};

use crate::error::{Error, ParseError, Result};
use crate::heads::Heads;
use crate::pattern::{Level, MAX_DEPTH, Pattern};

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        whole(text, |input| or(input, 0))
    }
}

impl TryFrom<String> for Pattern {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for Heads {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        whole(text, |input| match peek(name).parse_next(input) {
            Ok("batch") => outermost(input, heads, Heads::batch),
            _ => heads(input),
        })
    }
}

/// One pattern, or one per head.
fn heads(input: &mut &str) -> Parsed<Heads, Failure> {
    match peek(name).parse_next(input) {
        Ok("heads") => outermost(input, |input| or(input, 0), Heads::each),
        _ => or(input, 0).map(Heads::from),
    }
}

/// `name([item, …])`, the brackets optional.
fn outermost<T>(
    input: &mut &str,
    item: impl Fn(&mut &str) -> Parsed<T, Failure>,
    make: impl Fn(Vec<T>) -> Result<Heads>,
) -> Parsed<Heads, Failure> {
    let start = input.len();
    name(input)?;
    symbol("(").parse_next(input)?;
    let bracket = opt(symbol("[")).parse_next(input)?;
    let mut items = vec![item(input)?];
    while opt(symbol(",")).parse_next(input)?.is_some() {
        items.push(item(input)?);
    }
    if bracket.is_some() {
        symbol("]").parse_next(input)?;
    }
    symbol(")").parse_next(input)?;
    make(items).map_err(|error| Failure::because(start, input, error))
}

impl TryFrom<String> for Heads {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

/// Parses a complete text.
fn whole<T>(text: &str, parser: impl Fn(&mut &str) -> Parsed<T, Failure>) -> Result<T> {
    let mut input = text;
    let result = multispace0.parse_next(&mut input).and_then(|_: &str| parser(&mut input));
    let failure = match result {
        Ok(value) if input.is_empty() => return Ok(value),
        Ok(_) => Failure::expected(input, "`&`, `|` or the end"),
        Err(failure) => failure,
    };
    Err(failure.into_error(text).into())
}

/// Why parsing failed, and how many bytes were left.
#[derive(Debug, PartialEq)]
struct Failure {
    left: usize,
    /// Length of the offending text; 0 for the token at the position.
    len: usize,
    reason: Reason,
}

#[derive(Debug, PartialEq)]
enum Reason {
    Expected(&'static str),
    Argument(&'static str),
    Name,
    Because(Box<Error>),
}

impl ParserError<&str> for Failure {
    type Inner = Self;

    fn from_input(input: &&str) -> Self {
        Failure::expected(input, "something else")
    }

    fn into_inner(self) -> Result<Self, Self> {
        Ok(self)
    }
}

impl Failure {
    fn expected(input: &str, what: &'static str) -> Self {
        Failure { left: input.len(), len: 0, reason: Reason::Expected(what) }
    }

    /// The text read since `start` bytes were left is invalid.
    fn because(start: usize, input: &str, error: Error) -> Self {
        Failure { left: start, len: start - input.len(), reason: Reason::Because(Box::new(error)) }
    }

    fn into_error(self, text: &str) -> ParseError {
        let offset = text.len() - self.left;
        let rest = &text[offset..];
        let word = rest.len() - rest.trim_start_matches(in_name).len();
        let len = if self.len > 0 { self.len } else { word };
        let found = match (word, rest.chars().next()) {
            (_, None) => "the end".to_owned(),
            (0, Some(c)) => format!("`{}`", c.escape_debug()),
            (_, _) => format!("`{}`", shortened(&rest[..word])),
        };
        let message = match self.reason {
            Reason::Expected(what) => format!("expected {what}, found {found}"),
            Reason::Argument(name) => format!("expected a number for `{name}`, found {found}"),
            Reason::Name => {
                let hint = match suggestion(&rest[..word]) {
                    Some(name @ ("heads" | "batch")) => format!("; `{name}` must be outermost"),
                    Some(name) => format!("; did you mean `{name}`?"),
                    None => format!("; patterns are {}", NAMES.join(", ")),
                };
                format!("expected a pattern, found {found}{hint}")
            }
            Reason::Because(error) => error.to_string(),
        };
        ParseError::new(text, offset, len, message)
    }
}

fn shortened(word: &str) -> String {
    const MAX_CHARS: usize = 32;
    if word.len() <= MAX_CHARS { word.to_owned() } else { format!("{}…", &word[..MAX_CHARS]) }
}

const NAMES: [&str; 18] = [
    "full",
    "causal",
    "window",
    "sliding_window",
    "sinks",
    "global_tokens",
    "keys",
    "queries",
    "neighborhood",
    "dilated",
    "strided",
    "hierarchical",
    "documents",
    "packed",
    "blocks_dilated",
    "butterfly",
    "random",
    "blocks",
];

/// The primitive with the most similar name.
fn suggestion(word: &str) -> Option<&'static str> {
    let similarity = |name: &&str| (strsim::jaro_winkler(word, name) * 1000.0) as u32;
    let nearest = NAMES.into_iter().chain(["heads", "batch"]).max_by_key(similarity)?;
    (similarity(&nearest) > 800).then_some(nearest)
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// A symbol and trailing whitespace.
fn symbol(symbol: &'static str) -> impl Fn(&mut &str) -> Parsed<(), Failure> {
    let expected = match symbol {
        "(" => "`(`",
        ")" => "`)`",
        "[" => "`[`",
        "]" => "`]`",
        "," => "`,`",
        _ => symbol,
    };
    move |input| match input.strip_prefix(symbol) {
        Some(rest) => {
            *input = rest.trim_ascii_start();
            Ok(())
        }
        None => Err(Failure::expected(input, expected)),
    }
}

/// A name and trailing whitespace.
fn name<'a>(input: &mut &'a str) -> Parsed<&'a str, Failure> {
    let failure = Failure { left: input.len(), len: 0, reason: Reason::Name };
    (take_while(1.., in_name), multispace0)
        .parse_next(input)
        .map(|(name, _): (&str, &str)| name)
        .map_err(|_: Failure| failure)
}

#[inline(never)]
fn or(input: &mut &str, depth: usize) -> Parsed<Pattern, Failure> {
    let mut pattern = and(input, depth)?;
    while opt(symbol("|")).parse_next(input)?.is_some() {
        pattern = pattern | and(input, depth)?;
    }
    Ok(pattern)
}

fn and(input: &mut &str, depth: usize) -> Parsed<Pattern, Failure> {
    let mut pattern = unary(input, depth)?;
    while opt(symbol("&")).parse_next(input)?.is_some() {
        pattern = pattern & unary(input, depth)?;
    }
    Ok(pattern)
}

#[inline(never)]
fn unary(input: &mut &str, depth: usize) -> Parsed<Pattern, Failure> {
    if depth > usize::from(MAX_DEPTH) {
        return Err(Failure::expected(input, "at most 64 levels of nesting"));
    }
    match opt(peek(any)).parse_next(input)? {
        Some('!' | '~') => {
            any.parse_next(input)?;
            *input = input.trim_ascii_start();
            Ok(!unary(input, depth + 1)?)
        }
        Some('(') => {
            symbol("(")(input)?;
            let pattern = or(input, depth + 1)?;
            match input.strip_prefix(')') {
                Some(_) => symbol(")")(input)?,
                None => return Err(Failure::expected(input, "`&`, `|` or `)`")),
            }
            Ok(pattern)
        }
        _ if input.starts_with("packed") && peek(name).parse_next(input) == Ok("packed") => {
            packed(input, depth)
        }
        _ => primitive(input),
    }
}

/// `packed`, separate from other primitives: its inner pattern is parsed with a small stack frame.
#[inline(never)]
fn packed(input: &mut &str, depth: usize) -> Parsed<Pattern, Failure> {
    let start = input.len();
    let (queries, keys) = packed_lengths(input)?;
    let inner = or(input, depth + 1)?;
    packed_end(input, start, queries, keys, inner)
}

#[inline(never)]
fn packed_lengths(input: &mut &str) -> Parsed<(Vec<u64>, Vec<u64>), Failure> {
    name(input)?;
    symbol("(")(input)?;
    let queries = list(input, |input| number(input, "query length"))?;
    symbol(",")(input)?;
    let keys = list(input, |input| number(input, "key length"))?;
    symbol(",")(input)?;
    Ok((queries, keys))
}

#[inline(never)]
fn packed_end(
    input: &mut &str,
    start: usize,
    queries: Vec<u64>,
    keys: Vec<u64>,
    inner: Pattern,
) -> Parsed<Pattern, Failure> {
    let made = Pattern::packed(queries, keys, inner);
    let end = *input;
    symbol(")")(input)?;
    made.map_err(|error| Failure::because(start, &end[1..], error))
}

#[inline(never)]
fn primitive(input: &mut &str) -> Parsed<Pattern, Failure> {
    let start = *input;
    let name = name(input)?;
    let plain = match name {
        "full" => Some(Pattern::full()),
        "causal" => Some(Pattern::causal()),
        _ => None,
    };
    if let Some(pattern) = plain {
        // `causal()` as in Rust and Python.
        if opt(symbol("(")).parse_next(input)?.is_some() {
            symbol(")")(input)?;
        }
        return Ok(pattern);
    }
    if !NAMES.contains(&name) {
        return Err(Failure { left: start.len(), len: 0, reason: Reason::Name });
    }
    symbol("(")(input)?;
    let made = arguments(name, input)?;
    let end = *input;
    symbol(")")(input)?;
    made.map_err(|error| Failure::because(start.len(), &end[1..], error))
}

/// Parses the arguments of a primitive; the constructors validate them.
fn arguments(name: &str, input: &mut &str) -> Parsed<Result<Pattern>, Failure> {
    let number = |input: &mut &str, name| number(input, name);
    let next = |input: &mut &str, name| {
        symbol(",")(input)?;
        self::number(input, name)
    };
    Ok(match name {
        "window" => Pattern::window(number(input, "left")?, next(input, "right")?),
        "sliding_window" => Pattern::sliding_window(number(input, "width")?),
        "sinks" => Pattern::sinks(number(input, "tokens")?),
        "global_tokens" => Pattern::global_tokens(number(input, "tokens")?),
        "keys" => Pattern::keys(number(input, "from")?, next(input, "to")?),
        "queries" => Pattern::queries(number(input, "from")?, next(input, "to")?),
        "neighborhood" => {
            let sizes = list(input, |input| number(input, "size"))?;
            symbol(",")(input)?;
            Pattern::neighborhood(sizes, list(input, |input| number(input, "radius"))?)
        }
        "dilated" => {
            let (segment, rate) = (number(input, "segment")?, next(input, "rate")?);
            let offset = if input.starts_with(',') { next(input, "offset")? } else { 0 };
            Pattern::dilated(segment, rate, offset)
        }
        "strided" => Pattern::strided(number(input, "stride")?),
        "hierarchical" => Pattern::hierarchical(list(input, |input| {
            symbol("(")(input)?;
            let (window, stride) = (number(input, "window")?, next(input, "stride")?);
            let grain = next(input, "grain")?;
            symbol(")")(input)?;
            Ok(Level { window, stride, grain })
        })?),
        "documents" => Pattern::documents(list(input, |input| number(input, "length"))?),
        "blocks_dilated" => {
            let block = number(input, "block")?;
            symbol(",")(input)?;
            Pattern::blocks_dilated(block, list(input, |input| number(input, "rate"))?)
        }
        "butterfly" => Pattern::butterfly(number(input, "block")?),
        "random" => {
            let (block, per_row) = (number(input, "block")?, next(input, "per_row")?);
            Pattern::random(block, per_row, next(input, "blocks")?, next(input, "seed")?)
        }
        _ => {
            let block = number(input, "block")?;
            symbol(",")(input)?;
            let rows = list(input, |input| {
                list(input, |input| {
                    let first = number(input, "block")?;
                    if input.starts_with("..") {
                        symbol("..")(input)?;
                        return Ok(first..number(input, "end of the range")?);
                    }
                    Ok(first..first.saturating_add(1))
                })
            })?;
            Pattern::blocks(block, rows)
        }
    })
}

/// `[`, comma-separated items, `]`.
fn list<T>(
    input: &mut &str,
    mut item: impl FnMut(&mut &str) -> Parsed<T, Failure>,
) -> Parsed<Vec<T>, Failure> {
    symbol("[")(input)?;
    let mut items = Vec::new();
    while !input.starts_with(']') {
        items.push(item(input)?);
        if opt(symbol(",")).parse_next(input)?.is_none() && !input.starts_with(']') {
            return Err(Failure::expected(input, "`,` or `]`"));
        }
    }
    symbol("]")(input)?;
    Ok(items)
}

/// A number, with underscores allowed between digits, and trailing whitespace.
fn number(input: &mut &str, name: &'static str) -> Parsed<u64, Failure> {
    let start = input.checkpoint();
    let left = input.len();
    let digits: &str = take_while(1.., in_name)
        .parse_next(input)
        .map_err(|_: Failure| Failure { left, len: 0, reason: Reason::Argument(name) })?;
    let mut value = 0u64;
    for (index, byte) in digits.bytes().enumerate() {
        match byte {
            b'_' if index > 0 => continue,
            b'0'..=b'9' => {}
            _ => {
                input.reset(&start);
                return Err(Failure { left, len: 0, reason: Reason::Argument(name) });
            }
        }
        let next = value.checked_mul(10).and_then(|v| v.checked_add((byte - b'0').into()));
        value = next.ok_or(Failure {
            left,
            len: digits.len(),
            reason: Reason::Expected("a number below 2^64"),
        })?;
    }
    *input = input.trim_ascii_start();
    Ok(value)
}
