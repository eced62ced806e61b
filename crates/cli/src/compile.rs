//! From the text of patterns to layouts, for every subcommand that takes a pattern.
//!
//! Heads with the same pattern share a compilation.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use longspan_pattern::{Heads, Layout, Pattern, Shape};

use crate::progress::Stage;

/// Invalid input that is detected by this command, not by the library.
#[derive(Debug)]
pub(crate) struct BadInput(pub(crate) String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// Parses the patterns of an argument, or of the file named after `@`.
pub(crate) fn patterns(argument: &str) -> anyhow::Result<Heads> {
    let Some(path) = argument.strip_prefix('@') else {
        return Ok(argument.parse()?);
    };
    let stage = Stage::new(format!("reading {path}"));
    let text = std::fs::read_to_string(path)
        .map_err(|error| BadInput(format!("can't read the pattern from {path}: {error}")))?;
    let patterns = text.parse()?;
    drop(stage);
    Ok(patterns)
}

/// The layouts of all heads.
pub(crate) struct Compiled<'a> {
    /// One per distinct pattern.
    pub(crate) distinct: Vec<Distinct<'a>>,
    /// Index into `distinct` per head.
    each: Vec<usize>,
}

pub(crate) struct Distinct<'a> {
    pub(crate) pattern: &'a Pattern,
    pub(crate) layout: Arc<Layout>,
    /// Compile time.
    pub(crate) ms: f64,
}

impl Compiled<'_> {
    pub(crate) fn of(&self, head: usize) -> &Distinct<'_> {
        &self.distinct[self.each[head]]
    }

    /// Time of all compilations.
    pub(crate) fn ms(&self) -> f64 {
        self.distinct.iter().map(|distinct| distinct.ms).sum()
    }
}

/// Compiles the pattern of each of `heads` heads.
pub(crate) fn by_head<'a>(
    patterns: &'a Heads,
    heads: usize,
    shape: &Shape,
) -> longspan_pattern::Result<Compiled<'a>> {
    let mut compiled = Compiled { distinct: Vec::new(), each: Vec::with_capacity(heads) };
    let of_each = (0..heads).map(|head| patterns.get(head, heads));
    let of_each: Vec<_> = of_each.collect::<longspan_pattern::Result<_>>()?;
    let shape = &shape.clone().block_for(of_each.iter().copied());
    for (head, pattern) in of_each.into_iter().enumerate() {
        let known = compiled.distinct.iter().position(|known| known.pattern == pattern);
        let index = match known {
            Some(index) => index,
            None => {
                let stage = Stage::new(match heads {
                    1 => "compiling".to_string(),
                    _ => format!("compiling head {head}"),
                });
                let start = Instant::now();
                let layout = Layout::compile_with(pattern, shape, |done, total| {
                    stage.at(done, total);
                    ControlFlow::Continue(())
                })?;
                let ms = start.elapsed().as_secs_f64() * 1e3;
                compiled.distinct.push(Distinct { pattern, layout: Arc::new(layout), ms });
                compiled.distinct.len() - 1
            }
        };
        compiled.each.push(index);
    }
    Ok(compiled)
}
