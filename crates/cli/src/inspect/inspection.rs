//! A pattern compiled at a length, for the report and the pictures.
//!
//! ```text
//! text → Heads → one compilation per distinct pattern → one layout per distinct result
//! ```
//!
//! Heads whose patterns differ in spelling but have the same active pairs share a layout:
//! [`LayoutSet`] compares them.

use std::sync::Arc;

use anyhow::Result;
use longspan_pattern::{BlockSize, Error, Heads, Layout, LayoutSet, Shape};

use crate::args::Inspect;
use crate::compile::{self, BadInput};
use crate::number::{bytes, shortened, thousands};
use crate::progress::Stage;

/// Characters kept of a pattern's text: a list of document lengths may have a million.
const TEXT: usize = 2_000;

/// The layouts of a pattern at a length.
pub(crate) struct Inspection {
    /// Text of the pattern, cut to [`TEXT`] characters.
    pub(super) pattern: String,
    pub(super) block: usize,
    pub(super) query_offset: i64,
    pub(super) key_offset: i64,
    pub(super) head_dim: u32,
    pub(super) by_head: ByHead,
    pub(super) layouts: Vec<Arc<Layout>>,
    pub(super) heads: Vec<Head>,
    /// The only head to draw (`--head`).
    pub(super) drawn: Option<usize>,
    /// Time of all compilations.
    pub(super) compile_ms: f64,
}

/// Whether heads are reported separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByHead {
    /// One pattern, reported once.
    No,
    /// One line per head.
    Yes,
}

pub(super) struct Head {
    pub(super) pattern: String,
    /// Index of its layout.
    pub(super) layout: usize,
    /// Time to compile its pattern.
    pub(super) compile_ms: f64,
}

impl Inspection {
    /// The layouts of the heads of a batch entry, chosen from a pattern.
    pub(crate) fn of_entry(
        set: &LayoutSet,
        entry: usize,
        base: &Heads,
        drawn: Option<usize>,
    ) -> Self {
        let (layout, pattern) = (set.get(entry, 0), shortened(base, TEXT));
        let mut used: Vec<usize> = (0..set.heads()).map(|head| set.index(entry, head)).collect();
        used.sort_unstable();
        used.dedup();
        let head = |head| Head {
            pattern: format!("blocks of {pattern}"),
            layout: used.partition_point(|&index| index < set.index(entry, head)),
            compile_ms: 0.0,
        };
        Inspection {
            pattern: format!("blocks of {pattern}"),
            block: layout.block().get(),
            query_offset: layout.keys() as i64 - layout.queries() as i64,
            key_offset: 0,
            head_dim: 0,
            by_head: ByHead::Yes,
            layouts: used.iter().map(|&index| set.layouts()[index].clone()).collect(),
            heads: (0..set.heads()).map(head).collect(),
            drawn,
            compile_ms: 0.0,
        }
    }

    /// Whether only some rows of blocks were compiled.
    pub(super) fn some_rows(&self) -> bool {
        let layout = &self.layouts[0];
        layout.rows().len() != layout.queries().div_ceil(self.block)
    }

    /// The layouts to draw, each with its heads.
    pub(super) fn drawn(&self) -> Vec<(usize, Vec<usize>)> {
        match self.drawn {
            Some(head) => vec![(self.heads[head].layout, vec![head])],
            None => self.layouts_by_head(),
        }
    }

    /// Every layout with its heads.
    pub(super) fn layouts_by_head(&self) -> Vec<(usize, Vec<usize>)> {
        let heads_of = |layout| {
            let has = |&head: &usize| self.heads[head].layout == layout;
            (0..self.heads.len()).filter(has).collect()
        };
        (0..self.layouts.len()).map(|layout| (layout, heads_of(layout))).collect()
    }
}

/// Compiles, counts and hashes the layouts of every head.
pub(super) fn inspect(args: &Inspect) -> Result<Inspection> {
    let patterns = compile::patterns(&args.input.pattern)?;
    let (heads, by_head) = count_heads(&patterns, args)?;
    if let Some(head) = args.pictures.head.filter(|&head| head >= heads) {
        let rule = format!("--head is {head}, expected less than {heads}, the number of heads");
        return Err(BadInput(rule).into());
    }

    let queries = args.queries.unwrap_or(args.input.tokens);
    let shape = shape(args, queries)?;
    let compiled = compile::by_head(&patterns, heads, &shape).map_err(with_options)?;
    let stage = Stage::new("counting pairs");
    for distinct in &compiled.distinct {
        distinct.layout.counts().map_err(with_options)?;
    }
    drop(stage);
    let stage = Stage::new("hashing");
    let set = LayoutSet::new(1, heads, (0..heads).map(|head| compiled.of(head).layout.clone()))?;
    for layout in set.layouts() {
        layout.hash().map_err(with_options)?;
    }
    drop(stage);

    let layout_of = |head| {
        let layout = set.get(0, head);
        let same = |held: &Arc<Layout>| std::ptr::eq(&**held, layout);
        set.layouts().iter().position(same).expect("a layout of the set")
    };
    Ok(Inspection {
        pattern: shortened(&patterns, TEXT),
        block: set.get(0, 0).block().get(),
        query_offset: args.query_offset.unwrap_or_else(|| {
            // Compilation has checked that all are at most 2^60.
            args.key_offset + args.input.tokens as i64 - queries as i64
        }),
        key_offset: args.key_offset,
        head_dim: args.head_dim.head_dim,
        by_head,
        layouts: set.layouts().to_vec(),
        heads: (0..heads)
            .map(|head| Head {
                pattern: shortened(compiled.of(head).pattern, TEXT),
                layout: layout_of(head),
                compile_ms: compiled.of(head).ms,
            })
            .collect(),
        drawn: args.pictures.head,
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

fn shape(args: &Inspect, queries: usize) -> Result<Shape> {
    let shape = Shape::new(queries, args.input.tokens);
    let mut shape = args.block.of(shape)?.key_offset(args.key_offset).max_work(args.max_work);
    if let Some(offset) = args.query_offset {
        shape = shape.query_offset(offset);
    }
    if let Some(rows) = &args.rows {
        let rows =
            rows.within(queries.div_ceil(args.block.block.unwrap_or(BlockSize::default().get())));
        shape = shape.rows(rows.start as u64..rows.end as u64);
    }
    if let Some(keys) = &args.key_padding {
        shape = shape.key_padding(keys.within(args.input.tokens));
    }
    Ok(shape)
}

/// Replaces the library's remedies, which name its functions, by options.
fn with_options(error: Error) -> anyhow::Error {
    match error {
        Error::TooLarge { limit, row, rows } => {
            let (row, rows) = (thousands(row), thousands(rows));
            let limit = bytes(limit as usize);
            let advice = "use a larger --block, or fewer rows with --rows";
            BadInput(format!("the layout exceeds {limit} at row {row} of {rows}: {advice}")).into()
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
