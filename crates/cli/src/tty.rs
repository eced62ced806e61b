//! The terminal at standard output: its width, and whether it shows colors.

use std::env::{var, var_os};
use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};

/// Columns of the terminal: `COLUMNS`, else what the terminal reports. `None` where standard output
/// isn't a terminal and `COLUMNS` isn't set.
pub(crate) fn columns() -> Option<usize> {
    chosen_columns(var("COLUMNS").ok().as_deref(), reported_columns)
}

/// Whether to print colors: on a terminal, unless `NO_COLOR` is set or `TERM` is `dumb`.
pub(crate) fn has_color() -> bool {
    let (no_color, term) = (var_os("NO_COLOR"), var_os("TERM"));
    allows_color(stdout().is_terminal(), no_color.as_deref(), term.as_deref())
}

fn chosen_columns(variable: Option<&str>, reported: fn() -> Option<usize>) -> Option<usize> {
    let set = variable.and_then(|text| text.trim().parse().ok()).filter(|&columns| columns > 0);
    set.or_else(reported)
}

/// See <https://no-color.org>: an empty `NO_COLOR` counts as not set.
fn allows_color(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

#[cfg(unix)]
fn reported_columns() -> Option<usize> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: `TIOCGWINSZ` writes one `winsize` to the pointer, which is valid for it; on other
    // files than terminals it fails and writes nothing.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

#[cfg(not(unix))]
fn reported_columns() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_comes_first() {
        assert_eq!(chosen_columns(Some("120"), || Some(80)), Some(120));
        for unusable in [None, Some(""), Some("0"), Some("wide")] {
            assert_eq!(chosen_columns(unusable, || Some(80)), Some(80));
        }
        assert_eq!(chosen_columns(None, || None), None);
    }

    #[test]
    fn color_needs_capable_terminal() {
        let (set, empty) = (Some(OsStr::new("1")), Some(OsStr::new("")));
        let (dumb, xterm) = (Some(OsStr::new("dumb")), Some(OsStr::new("xterm-256color")));
        assert!(allows_color(true, None, xterm) && allows_color(true, empty, None));
        assert!(!allows_color(true, set, xterm));
        assert!(!allows_color(true, None, dumb));
        assert!(!allows_color(false, None, xterm));
    }
}
