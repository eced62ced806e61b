//! What is printed: a summary for people, one JSON object for programs.
//!
//! With heads, what is computed (blocks, pairs, FLOPs) adds up over heads, and what is held
//! (runs, masks, bytes) over distinct layouts.

use std::io::{Error, Result, Write};
use std::path::Path;

use longspan_pattern::Layout;
use serde::Serialize;

use crate::inspect::{ByHead, Inspection};
use crate::number::{bytes, count, flops, percent, ranges, shortened, significant, thousands};
use crate::table;

/// Columns of a terminal that a line of text should stay within.
const LINE: usize = 100;

/// Numbers of one layout, or of several added up.
#[derive(Debug, Clone, Serialize)]
struct Numbers {
    rows: u64,
    columns: u32,
    runs: usize,
    active_blocks: u128,
    full_blocks: u128,
    partial_blocks: u128,
    active_pairs: u128,
    density: f64,
    forward_flops: u128,
    backward_flops: u128,
    layout_bytes: usize,
    stored_masks: usize,
    questions: u64,
    compile_ms: f64,
    /// Nothing where several layouts are added up.
    hash: Option<String>,
}

impl Numbers {
    fn of(layout: &Layout, head_dim: u32, compile_ms: f64) -> Result<Self> {
        let counts = layout.counts().map_err(Error::other)?;
        Ok(Numbers {
            rows: layout.rows().len() as u64,
            columns: layout.columns(),
            runs: layout.run_count(),
            active_blocks: counts.active_blocks(),
            full_blocks: counts.full_blocks,
            partial_blocks: counts.partial_blocks,
            active_pairs: counts.active_pairs,
            density: layout.density().map_err(Error::other)?,
            forward_flops: counts.forward_flops(head_dim, head_dim),
            backward_flops: counts.backward_flops(head_dim, head_dim),
            layout_bytes: layout.bytes(),
            stored_masks: layout.stored_masks(),
            questions: layout.questions(),
            compile_ms,
            hash: Some(layout.hash().map_err(Error::other)?.to_string()),
        })
    }

    fn of_head(inspection: &Inspection, head: usize) -> Result<Self> {
        let head = &inspection.heads[head];
        let layout = &inspection.layouts[head.layout];
        Numbers::of(layout, inspection.head_dim, head.compile_ms)
    }

    fn of_all(inspection: &Inspection) -> Result<Self> {
        let mut sum = Numbers::of_head(inspection, 0)?;
        for head in 1..inspection.heads.len() {
            let next = Numbers::of_head(inspection, head)?;
            sum.active_blocks += next.active_blocks;
            sum.full_blocks += next.full_blocks;
            sum.partial_blocks += next.partial_blocks;
            sum.active_pairs += next.active_pairs;
            sum.density += next.density;
            sum.forward_flops += next.forward_flops;
            sum.backward_flops += next.backward_flops;
        }
        sum.density /= inspection.heads.len() as f64;
        for layout in &inspection.layouts[1..] {
            sum.runs += layout.run_count();
            sum.layout_bytes += layout.bytes();
            sum.stored_masks += layout.stored_masks();
            sum.questions += layout.questions();
            sum.hash = None;
        }
        sum.compile_ms = inspection.compile_ms;
        Ok(sum)
    }
}

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    pattern: &'a str,
    tokens: u64,
    queries: u64,
    block: u64,
    query_offset: i64,
    key_offset: i64,
    head_dim: u32,
    first_row: u32,
    #[serde(flatten)]
    numbers: Numbers,
    #[serde(skip_serializing_if = "Option::is_none")]
    layouts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    heads: Option<Vec<HeadObject<'a>>>,
}

#[derive(Serialize)]
struct HeadObject<'a> {
    head: usize,
    layout: usize,
    pattern: &'a str,
    #[serde(flatten)]
    numbers: Numbers,
}

/// One JSON object and a line break.
pub(crate) fn json(inspection: &Inspection, out: &mut impl Write) -> Result<()> {
    let layout = &inspection.layouts[0];
    let by_head = inspection.by_head == ByHead::Yes;
    let head_object = |head: usize| -> Result<_> {
        Ok(HeadObject {
            head,
            layout: inspection.heads[head].layout,
            pattern: &inspection.heads[head].pattern,
            numbers: Numbers::of_head(inspection, head)?,
        })
    };
    let heads = 0..if by_head { inspection.heads.len() } else { 0 };
    let heads = heads.map(head_object).collect::<Result<_>>()?;
    let object = Object {
        version: env!("CARGO_PKG_VERSION"),
        pattern: &inspection.pattern,
        tokens: layout.keys(),
        queries: layout.queries(),
        block: inspection.block,
        query_offset: inspection.query_offset,
        key_offset: inspection.key_offset,
        head_dim: inspection.head_dim,
        first_row: layout.rows().start,
        numbers: Numbers::of_all(inspection)?,
        layouts: by_head.then_some(inspection.layouts.len()),
        heads: by_head.then_some(heads),
    };
    let text = serde_json::to_string_pretty(&object)?;
    writeln!(out, "{text}")
}

/// The summary, and a table where heads are told apart.
pub(crate) fn summary(
    inspection: &Inspection,
    files: &[(&Path, (u32, u32))],
    out: &mut impl Write,
) -> Result<()> {
    let layout = &inspection.layouts[0];
    let numbers = Numbers::of_all(inspection)?;
    let by_head = inspection.by_head == ByHead::Yes;
    let heads = inspection.heads.len();

    // Lines below two kinds of name: what is computed, and what is held.
    let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
    line("pattern", shortened(&inspection.pattern, 2 * LINE))?;
    line(
        "tokens",
        format!("{} × {}", count(layout.queries(), "query"), count(layout.keys(), "key")),
    )?;
    let rows = layout.rows();
    let which = match inspection.some_rows() {
        true => format!(" ({}..{})", rows.start, rows.end),
        false => String::new(),
    };
    let grid =
        format!("{}{which} × {}", count(numbers.rows, "row"), count(numbers.columns, "column"));
    line("blocks", format!("{} tokens a side, {grid}", inspection.block))?;
    if by_head {
        let distinct = count(inspection.layouts.len() as u64, "layout");
        line(
            "heads",
            format!("{}, {distinct}; the numbers below are for all", thousands(heads as u64)),
        )?;
    }
    let all_blocks = numbers.rows as f64 * f64::from(numbers.columns) * heads as f64;
    let share = if all_blocks > 0.0 { numbers.active_blocks as f64 / all_blocks } else { 0.0 };
    let kinds = format!(
        "{} Full + {} Partial",
        thousands(numbers.full_blocks),
        thousands(numbers.partial_blocks)
    );
    line(
        "active blocks",
        format!("{} = {kinds}, {} of all", thousands(numbers.active_blocks), percent(share)),
    )?;
    line("active pairs", thousands(numbers.active_pairs))?;
    let fewer = match numbers.density {
        0.0 => "nothing is seen".to_string(),
        0.95.. => "hardly fewer pairs than dense".to_string(),
        density => format!("{} times fewer pairs than dense", significant(1.0 / density)),
    };
    line("density", format!("{}, {fewer}", percent(numbers.density)))?;
    let (forward, backward) = (flops(numbers.forward_flops), flops(numbers.backward_flops));
    let each = if by_head { "" } else { " a head" };
    line(
        "work",
        format!("{forward} forward, {backward} backward{each}, head dim {}", inspection.head_dim),
    )?;
    line(
        "layout",
        format!(
            "{}, {}, {}",
            count(numbers.runs as u64, "run"),
            count(numbers.stored_masks as u64, "stored mask"),
            bytes(numbers.layout_bytes)
        ),
    )?;
    let questions = count(numbers.questions, "question");
    line("compiled in", format!("{} ms, {questions}", significant(numbers.compile_ms)))?;
    if let Some(hash) = &numbers.hash {
        line("hash", hash.clone())?;
    }
    for (path, (width, height)) in files {
        line("picture", format!("{} ({width} × {height})", path.display()))?;
    }
    if by_head {
        writeln!(out)?;
        heads_table(inspection, out)?;
    }
    Ok(())
}

fn heads_table(inspection: &Inspection, out: &mut impl Write) -> Result<()> {
    let header = ["head", "layout", "runs", "blocks", "pairs", "density", "forward", "pattern"];
    let mut rows = vec![header.map(String::from)];
    for (head, about) in inspection.heads.iter().enumerate() {
        let numbers = Numbers::of_head(inspection, head)?;
        rows.push([
            head.to_string(),
            about.layout.to_string(),
            thousands(numbers.runs as u64),
            thousands(numbers.active_blocks),
            thousands(numbers.active_pairs),
            percent(numbers.density),
            flops(numbers.forward_flops),
            shortened(&about.pattern, LINE / 2),
        ]);
    }
    table::print(&rows, 0, out)?;
    for (layout, heads) in inspection.drawn() {
        if heads.len() > 1 {
            writeln!(out, "heads {} share layout {layout}", ranges(&heads))?;
        }
    }
    Ok(())
}
