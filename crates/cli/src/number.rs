//! Human-readable numbers and text.

use std::fmt::{self, Display, Write};

use indicatif::HumanFloatCount;

/// Integers that are not negative.
pub(crate) trait Whole: Display {}

impl Whole for u32 {}
impl Whole for u64 {}
impl Whole for u128 {}
impl Whole for usize {}

/// `8,192`; indicatif's `HumanCount` has 64 bits only.
pub(crate) fn thousands(number: impl Whole) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 query`, `8,192 queries`
pub(crate) fn count(number: impl Whole, what: &str) -> String {
    let number = thousands(number);
    let name = match what.strip_suffix('y') {
        _ if number == "1" => what.to_string(),
        Some(stem) if what != "key" => format!("{stem}ies"),
        _ => format!("{what}s"),
    };
    format!("{number} {name}")
}

/// Three significant digits, no exponent while that is readable: `3.14`, `0.0977`, `1,234`.
pub(crate) fn significant(number: f64) -> String {
    if number == 0.0 {
        return "0".into();
    }
    let magnitude = number.abs().log10().floor() as i32;
    if magnitude < -6 {
        return format!("{number:.2e}");
    }
    format!("{:.*}", (2 - magnitude).max(0) as usize, HumanFloatCount(number))
}

/// A share as `3.25 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{} %", significant(100.0 * share))
}

/// `1.43 GFLOP`
pub(crate) fn flops(count: u128) -> String {
    let mut value = count as f64;
    let mut prefix = "";
    for next in ["k", "M", "G", "T", "P", "E", "Z", "Y"] {
        if value < 999.5 {
            break;
        }
        value /= 1_000.0;
        prefix = next;
    }
    format!("{} {prefix}FLOP", significant(value))
}

/// `6.56 KiB`
pub(crate) fn bytes(count: usize) -> String {
    let mut value = count as f64;
    let mut unit = "bytes";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1_023.5 {
            break;
        }
        value /= 1_024.0;
        unit = next;
    }
    format!("{} {unit}", significant(value))
}

/// `1.5 s`, `250 ms`, `12.3 µs`
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        0.0 => "0".into(),
        s if s >= 1.0 => format!("{} s", significant(s)),
        s if s >= 1e-3 => format!("{} ms", significant(s * 1e3)),
        s => format!("{} µs", significant(s * 1e6)),
    }
}

/// A token count with the suffixes of arguments where it is exact: `256k`, `1M`, `1,000`.
pub(crate) fn short(tokens: usize) -> String {
    let exact = |shift: u32, suffix: &str| {
        let unit = 1usize << shift;
        (tokens >= unit && tokens.is_multiple_of(unit))
            .then(|| format!("{}{suffix}", thousands(tokens >> shift)))
    };
    exact(30, "G")
        .or_else(|| exact(20, "M"))
        .or_else(|| exact(10, "k"))
        .unwrap_or_else(|| thousands(tokens))
}

/// The text of a value, cut to `limit` characters. Formatting stops there, so the cost doesn't
/// depend on the length of a pattern.
pub(crate) fn shortened(what: &impl Display, limit: usize) -> String {
    struct Cut {
        text: String,
        left: usize,
    }
    impl Write for Cut {
        fn write_str(&mut self, piece: &str) -> fmt::Result {
            for c in piece.chars() {
                if self.left == 0 {
                    return Err(fmt::Error);
                }
                self.left -= 1;
                self.text.push(c);
            }
            Ok(())
        }
    }
    let mut cut = Cut { text: String::new(), left: limit };
    if write!(cut, "{what}").is_err() {
        cut.text.pop();
        cut.text.push('…');
    }
    cut.text
}

/// Indices with runs joined: `0–3, 7`.
pub(crate) fn ranges(numbers: &[usize]) -> String {
    let mut text = String::new();
    for group in numbers.chunk_by(|a, b| a + 1 == *b) {
        let separator = if text.is_empty() { "" } else { ", " };
        let (first, last) = (group[0], group[group.len() - 1]);
        text += &match group.len() {
            1 => format!("{separator}{first}"),
            2 => format!("{separator}{first}, {last}"),
            _ => format!("{separator}{first}–{last}"),
        };
    }
    text
}

/// The title of an axis, and a note where index 0 has another position than 0.
pub(crate) fn axis(what: &str, offset: i64) -> (String, Option<String>) {
    if offset == 0 {
        return (format!("{what} position"), None);
    }
    let sign = if offset < 0 { '−' } else { '+' };
    let note = format!("position = index {sign} {}", thousands(offset.unsigned_abs()));
    (format!("{what} index"), Some(note))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable() {
        assert_eq!(thousands(0u32), "0");
        assert_eq!(thousands(999u32), "999");
        assert_eq!(thousands(1_048_576u32), "1,048,576");
        assert_eq!(count(1u32, "query"), "1 query");
        assert_eq!(count(2_000u32, "query"), "2,000 queries");
        assert_eq!(count(0u32, "key"), "0 keys");
        assert_eq!(percent(0.032_5), "3.25 %");
        assert_eq!(percent(1.0), "100 %");
        assert_eq!(percent(0.000_976_6), "0.0977 %");
        assert_eq!(significant(99.96), "100");
        assert_eq!(significant(20.0), "20");
        assert_eq!(significant(1_234.6), "1,235");
        assert_eq!(significant(1e-9), "1.00e-9");
        assert_eq!(flops(999), "999 FLOP");
        assert_eq!(flops(1_430_000_000), "1.43 GFLOP");
        assert_eq!(bytes(512), "512 bytes");
        assert_eq!(bytes(6_720), "6.56 KiB");
        assert_eq!(time(0.0), "0");
        assert_eq!(time(1.5), "1.5 s");
        assert_eq!(time(0.25), "250 ms");
        assert_eq!(time(1.23e-5), "12.3 µs");
        assert_eq!(short(1 << 20), "1M");
        assert_eq!(short(65_536), "64k");
        assert_eq!(short(1_000), "1,000");
    }

    #[test]
    fn axes_note_offsets() {
        assert_eq!(axis("key", 0), ("key position".into(), None));
        let (name, note) = axis("query", -1_000);
        assert_eq!(
            (name.as_str(), note.as_deref()),
            ("query index", Some("position = index − 1,000"))
        );
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(shortened(&"causal", 6), "causal");
        assert_eq!(shortened(&"causal!", 6), "causa…");
    }

    #[test]
    fn runs_of_numbers() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0–3, 7, 9, 10");
    }
}
