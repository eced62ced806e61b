//! Tables with aligned columns.

use std::io::{Result, Write};

/// Prints rows of cells; every column is as wide as its widest cell. The first `left` columns and
/// the last one are left-aligned, the others right-aligned.
pub(crate) fn print<const N: usize>(
    rows: &[[String; N]],
    left: usize,
    out: &mut impl Write,
) -> Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            line += &match column {
                _ if column < left || column + 1 == N => format!("{gap}{cell:<width$}"),
                _ => format!("{gap}{cell:>width$}"),
            };
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() -> Result<()> {
        let row = |cells: [&str; 3]| cells.map(String::from);
        let mut out = Vec::new();
        print(&[row(["name", "ms", "note"]), row(["a", "12.5", "×"])], 1, &mut out)?;
        assert_eq!(String::from_utf8_lossy(&out), "name    ms  note\na     12.5  ×\n");
        Ok(())
    }
}
