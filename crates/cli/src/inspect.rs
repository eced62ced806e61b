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
use std::path::Path;

use anyhow::{Context, Result};

pub(crate) use self::inspection::Inspection;
use crate::args::{Inspect, Pictures};
use crate::plot::Format;
use crate::progress::Stage;
use crate::tty;

/// `longspan inspect`
pub(crate) fn run(args: &Inspect) -> Result<()> {
    let inspection = inspection::inspect(args)?;
    let files = write_files(&inspection, &args.pictures)?;
    let warnings = advice::warnings(&inspection)?;
    let mut out = stdout().lock();
    if args.json {
        report::json(&inspection, &warnings, &mut out)?;
    } else {
        report::summary(&inspection, &files, &mut out)?;
        if !args.pictures.no_picture {
            write!(out, "\n{}", characters(&inspection)?)?;
        }
    }
    out.flush()?;
    for warning in &warnings {
        writeln!(stderr(), "warning: {warning}")?;
    }
    Ok(())
}

/// Draws into the files that were asked for; their sizes in pixels.
pub(crate) fn write_files<'a>(
    inspection: &Inspection,
    pictures: &'a Pictures,
) -> Result<Vec<(&'a Path, (u32, u32))>> {
    let mut files = Vec::new();
    for (path, format) in [(&pictures.png, Format::Png), (&pictures.svg, Format::Svg)] {
        let Some(path) = path else { continue };
        let stage = Stage::new(format!("drawing {}", path.display()));
        let picture = figure::draw(inspection, format)?;
        std::fs::write(path, &picture.file)
            .with_context(|| format!("can't write {}", path.display()))?;
        drop(stage);
        files.push((path.as_path(), picture.size));
    }
    Ok(files)
}

/// A picture for this terminal.
pub(crate) fn characters(inspection: &Inspection) -> Result<String> {
    let ink = match tty::has_color() {
        true => terminal::Ink::Color,
        false => terminal::Ink::Shades,
    };
    let stage = Stage::new("drawing");
    let picture = terminal::picture(inspection, ink, tty::columns())?;
    drop(stage);
    Ok(picture)
}
