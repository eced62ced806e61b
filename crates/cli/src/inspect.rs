//! From a pattern's text to its layouts.
//!
//! ```text
//! text → Heads → one compilation a distinct pattern → one layout a distinct result
//! ```
//!
//! Heads whose patterns are spelled differently but let the same pairs through share a layout:
//! that is [`LayoutSet`]'s doing, and what the table and the pictures show.

use std::io::{IsTerminal, Write, stdout};
use std::sync::Arc;

use anyhow::{Context, Result};
use longspan_pattern::{BlockSize, Error, Heads, Layout, LayoutSet, Shape};

use crate::args::Inspect;
use crate::compile::{self, BadInput};
use crate::number::{bytes, shortened, thousands};
use crate::progress::Stage;
use crate::{plot, report, terminal};

/// Characters kept of a pattern's text, which may hold a million lengths.
const TEXT: usize = 2_000;

/// Everything there is to say about a pattern at a length.
pub(crate) struct Inspection {
    /// The pattern, printed back and cut to a bearable length.
    pub(crate) pattern: String,
    pub(crate) block: u64,
    pub(crate) query_offset: i64,
    pub(crate) key_offset: i64,
    pub(crate) head_dim: u32,
    pub(crate) by_head: ByHead,
    pub(crate) layouts: Vec<Arc<Layout>>,
    pub(crate) heads: Vec<Head>,
    /// The head to draw, where one was asked for.
    pub(crate) drawn: Option<usize>,
    /// What all compilations took.
    pub(crate) compile_ms: f64,
}

/// Whether heads are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByHead {
    /// One pattern, shown once.
    No,
    /// One line a head.
    Yes,
}

pub(crate) struct Head {
    pub(crate) pattern: String,
    /// Which of the layouts it has.
    pub(crate) layout: usize,
    /// What compiling its pattern took.
    pub(crate) compile_ms: f64,
}

impl Inspection {
    /// Whether only some rows of blocks were compiled.
    pub(crate) fn some_rows(&self) -> bool {
        let layout = &self.layouts[0];
        layout.rows().len() as u64 != layout.queries().div_ceil(self.block)
    }

    /// The layouts to draw, each with the heads that have it.
    pub(crate) fn drawn(&self) -> Vec<(usize, Vec<usize>)> {
        if let Some(head) = self.drawn {
            return vec![(self.heads[head].layout, vec![head])];
        }
        let heads_of = |layout| {
            let has = |&head: &usize| self.heads[head].layout == layout;
            (0..self.heads.len()).filter(has).collect()
        };
        (0..self.layouts.len()).map(|layout| (layout, heads_of(layout))).collect()
    }
}

/// `longspan inspect`
pub(crate) fn run(args: &Inspect) -> Result<()> {
    let inspection = inspect(args)?;
    let mut files = Vec::new();
    for (path, format) in [(&args.png, plot::Format::Png), (&args.svg, plot::Format::Svg)] {
        let Some(path) = path else { continue };
        let stage = Stage::new(format!("drawing {}", path.display()));
        let picture = plot::draw(&inspection, format)?;
        std::fs::write(path, &picture.file)
            .with_context(|| format!("can't write {}", path.display()))?;
        drop(stage);
        files.push((path.as_path(), picture.size));
    }

    let mut out = stdout().lock();
    if args.json {
        report::json(&inspection, &mut out)?;
    } else {
        report::summary(&inspection, &files, &mut out)?;
        if !args.no_picture {
            let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            let ink = match out.is_terminal() && !no_color {
                true => terminal::Ink::Colour,
                false => terminal::Ink::Shades,
            };
            let stage = Stage::new("drawing");
            let picture = terminal::picture(&inspection, ink)?;
            drop(stage);
            write!(out, "\n{picture}")?;
        }
    }
    out.flush()?;
    Ok(())
}

fn inspect(args: &Inspect) -> Result<Inspection> {
    let patterns = compile::patterns(&args.pattern)?;
    let (heads, by_head) = count_heads(&patterns, args)?;
    if let Some(head) = args.head.filter(|&head| head >= heads) {
        let rule = format!("--head is {head}, expected less than {heads}, the number of heads");
        return Err(BadInput(rule).into());
    }

    let queries = args.queries.unwrap_or(args.tokens);
    let shape = shape(args, queries)?;
    let compiled = compile::by_head(&patterns, heads, &shape).map_err(in_our_words)?;
    let stage = Stage::new("counting pairs");
    for distinct in &compiled.distinct {
        distinct.layout.counts().map_err(in_our_words)?;
    }
    drop(stage);
    let stage = Stage::new("hashing");
    let set = LayoutSet::new(1, heads, (0..heads).map(|head| compiled.of(head).layout.clone()))?;
    for layout in set.layouts() {
        layout.hash().map_err(in_our_words)?;
    }
    drop(stage);

    let layout_of = |head| {
        let layout = set.get(0, head);
        let same = |held: &Arc<Layout>| std::ptr::eq(&**held, layout);
        set.layouts().iter().position(same).expect("a set holds what it gives")
    };
    Ok(Inspection {
        pattern: shortened(&patterns, TEXT),
        block: args.block,
        query_offset: args.query_offset.unwrap_or_else(|| {
            // Compilation has checked that both are at most 2^60.
            args.tokens as i64 - queries as i64
        }),
        key_offset: args.key_offset,
        head_dim: args.head_dim,
        by_head,
        layouts: set.layouts().to_vec(),
        heads: (0..heads)
            .map(|head| Head {
                pattern: shortened(compiled.of(head).pattern, TEXT),
                layout: layout_of(head),
                compile_ms: compiled.of(head).ms,
            })
            .collect(),
        drawn: args.head,
        compile_ms: compiled.ms(),
    })
}

fn count_heads(patterns: &Heads, args: &Inspect) -> Result<(usize, ByHead)> {
    match (args.heads, patterns.count()) {
        (None, None) => Ok((1, ByHead::No)),
        (None | Some(None), Some(count)) => Ok((count, ByHead::Yes)),
        (Some(Some(heads)), _) => Ok((heads, ByHead::Yes)),
        (Some(None), None) => {
            let rule = "--heads has no number, expected one: the pattern is the same for all heads";
            Err(BadInput(rule.into()).into())
        }
    }
}

fn shape(args: &Inspect, queries: u64) -> Result<Shape> {
    let block = BlockSize::new(args.block)?;
    let mut shape = Shape::new(queries, args.tokens)
        .block(block)
        .key_offset(args.key_offset)
        .max_work(args.max_work);
    if let Some(offset) = args.query_offset {
        shape = shape.query_offset(offset);
    }
    if let Some(rows) = &args.rows {
        shape = shape.rows(rows.within(queries.div_ceil(args.block)));
    }
    if let Some(valid) = &args.valid {
        shape = shape.valid_keys(valid.within(args.tokens));
    }
    Ok(shape)
}

/// The library's advice names its own functions; here it has to name options.
fn in_our_words(error: Error) -> anyhow::Error {
    match error {
        Error::TooLarge { limit, row, rows } => {
            let (row, rows) = (thousands(row), thousands(rows));
            let limit = bytes(limit as usize);
            let advice = "use a larger --block, or fewer rows with --rows";
            BadInput(format!("the layout outgrew {limit} at row {row} of {rows}: {advice}")).into()
        }
        Error::TooMuchWork { work, expression, limit, row, rows } => {
            let (limit, row, rows) = (thousands(limit), thousands(row), thousands(rows));
            BadInput(format!(
                "{work} takes more than {limit} units of work, reached at row {row} of {rows}, \
                 mostly for `{expression}`: use fewer --tokens, fewer rows with --rows, a larger \
                 --block, strides and periods that divide it, or a larger --max-work"
            ))
            .into()
        }
        error => error.into(),
    }
}
