//! `longspan inspect`: a pattern at a length, in numbers and pictures.
//!
//! ```text
//! inspection (compiled layouts) → report    summary or JSON
//!                               → advice    warnings
//!                               → terminal  picture of characters
//!                               → axis, grid → figure → crate::plot   PNG, SVG
//! ```

mod advice;
mod axis;
mod figure;
mod grid;
mod inspection;
mod report;
mod terminal;

use std::io::{Write, stderr, stdout};

use anyhow::{Context, Result};

use crate::args::Inspect;
use crate::plot::Format;
use crate::progress::Stage;
use crate::tty;

/// `longspan inspect`
pub(crate) fn run(args: &Inspect) -> Result<()> {
    let inspection = inspection::inspect(args)?;
    let mut files = Vec::new();
    for (path, format) in [(&args.png, Format::Png), (&args.svg, Format::Svg)] {
        let Some(path) = path else { continue };
        let stage = Stage::new(format!("drawing {}", path.display()));
        let picture = figure::draw(&inspection, format)?;
        std::fs::write(path, &picture.file)
            .with_context(|| format!("can't write {}", path.display()))?;
        drop(stage);
        files.push((path.as_path(), picture.size));
    }

    let warnings = advice::warnings(&inspection)?;
    let mut out = stdout().lock();
    if args.json {
        report::json(&inspection, &warnings, &mut out)?;
    } else {
        report::summary(&inspection, &files, &mut out)?;
        if !args.no_picture {
            let ink = match tty::has_color() {
                true => terminal::Ink::Color,
                false => terminal::Ink::Shades,
            };
            let stage = Stage::new("drawing");
            let picture = terminal::picture(&inspection, ink, tty::columns())?;
            drop(stage);
            write!(out, "\n{picture}")?;
        }
    }
    out.flush()?;
    for warning in &warnings {
        writeln!(stderr(), "warning: {warning}")?;
    }
    Ok(())
}
