//! The report of an inspection: a summary as text, or one JSON object.
//!
//! Work (blocks, pairs, FLOPs) is summed over heads, storage (runs, masks, bytes) over distinct
//! layouts.

use std::io::{Error, Result, Write};
use std::path::Path;

use longspan::{Options, Prediction};
use longspan_pattern::{Layout, PositionOrder};
use serde::Serialize;

use super::inspection::{ByHead, Inspection};
use crate::number::{bytes, count, flops, percent, ranges, shortened, significant, thousands};
use crate::table;

/// Columns of a line of text.
const LINE: usize = 100;

/// Statistics of one layout, or the sums over several.
#[derive(Debug, Clone, Serialize)]
struct Statistics {
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
    coverage_queries: u64,
    compile_ms: f64,
    /// Pairs of the blocks that the kernels compute, masked ones included.
    computed_pairs: u128,
    /// Predicted time of a forward pass in f32 on this CPU, relative to dense attention.
    predicted_time: f64,
    /// What it is computed as; `None` for a sum of several layouts.
    components: Option<Vec<Part>>,
    /// `None` for a sum of several layouts.
    hash: Option<String>,
}

/// A component: views of the tokens that look alike.
#[derive(Debug, Clone, Serialize)]
struct Part {
    /// Distance of neighbors in the order in which it is dense: 1 for the order of tokens.
    modulus: u64,
    /// Positions per segment, where residues count within segments.
    segment: Option<u64>,
    views: usize,
    queries: usize,
    keys: usize,
}

impl Part {
    /// The components of a layout; one for all of it where it is computed as it is.
    fn all(layout: &Layout, prediction: &Prediction) -> Result<Vec<Part>> {
        let split = layout.split().map_err(Error::other)?.filter(|_| prediction.split);
        let Some(split) = split else {
            let (queries, keys) = (layout.queries(), layout.keys());
            return Ok(vec![Part { modulus: 1, segment: None, views: 1, queries, keys }]);
        };
        let part = |component: &longspan_pattern::Component| {
            let (modulus, segment) = match component.order() {
                PositionOrder::Natural => (1, None),
                PositionOrder::Residues { modulus, segment } => (modulus, segment),
            };
            let (views, queries) = (component.layouts().len(), component.queries().tokens.count);
            Part { modulus, segment, views, queries, keys: component.keys().tokens.count }
        };
        Ok(split.components().iter().map(part).collect())
    }
}

impl Statistics {
    fn of(layout: &Layout, head_dim: u32, compile_ms: f64) -> Result<Self> {
        let counts = layout.counts().map_err(Error::other)?;
        let prediction =
            Prediction::of::<f32>(layout, &Options::default()).map_err(Error::other)?;
        Ok(Statistics {
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
            coverage_queries: layout.coverage_queries(),
            compile_ms,
            computed_pairs: prediction.computed_pairs,
            predicted_time: prediction.relative_time,
            components: Some(Part::all(layout, &prediction)?),
            hash: Some(layout.hash().map_err(Error::other)?.to_string()),
        })
    }

    fn of_head(inspection: &Inspection, head: usize) -> Result<Self> {
        let head = &inspection.heads[head];
        let layout = &inspection.layouts[head.layout];
        Statistics::of(layout, inspection.head_dim, head.compile_ms)
    }

    fn of_all(inspection: &Inspection) -> Result<Self> {
        let mut sum = Statistics::of_head(inspection, 0)?;
        for head in 1..inspection.heads.len() {
            let next = Statistics::of_head(inspection, head)?;
            sum.active_blocks += next.active_blocks;
            sum.full_blocks += next.full_blocks;
            sum.partial_blocks += next.partial_blocks;
            sum.active_pairs += next.active_pairs;
            sum.density += next.density;
            sum.forward_flops += next.forward_flops;
            sum.backward_flops += next.backward_flops;
            sum.computed_pairs += next.computed_pairs;
            sum.predicted_time += next.predicted_time;
        }
        sum.density /= inspection.heads.len() as f64;
        sum.predicted_time /= inspection.heads.len() as f64;
        for layout in &inspection.layouts[1..] {
            sum.runs += layout.run_count();
            sum.layout_bytes += layout.bytes();
            sum.stored_masks += layout.stored_masks();
            sum.coverage_queries += layout.coverage_queries();
            (sum.hash, sum.components) = (None, None);
        }
        sum.compile_ms = inspection.compile_ms;
        Ok(sum)
    }
}

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    pattern: &'a str,
    tokens: usize,
    queries: usize,
    block: usize,
    query_offset: i64,
    key_offset: i64,
    head_dim: u32,
    first_row: u32,
    #[serde(flatten)]
    statistics: Statistics,
    #[serde(skip_serializing_if = "Option::is_none")]
    layouts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    heads: Option<Vec<HeadObject<'a>>>,
    warnings: &'a [String],
}

#[derive(Serialize)]
struct HeadObject<'a> {
    head: usize,
    layout: usize,
    pattern: &'a str,
    #[serde(flatten)]
    statistics: Statistics,
}

/// One JSON object and a line break.
pub(super) fn json(
    inspection: &Inspection,
    warnings: &[String],
    out: &mut impl Write,
) -> Result<()> {
    let layout = &inspection.layouts[0];
    let by_head = inspection.by_head == ByHead::Yes;
    let head_object = |head: usize| -> Result<_> {
        Ok(HeadObject {
            head,
            layout: inspection.heads[head].layout,
            pattern: &inspection.heads[head].pattern,
            statistics: Statistics::of_head(inspection, head)?,
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
        statistics: Statistics::of_all(inspection)?,
        layouts: by_head.then_some(inspection.layouts.len()),
        heads: by_head.then_some(heads),
        warnings,
    };
    let text = serde_json::to_string_pretty(&object)?;
    writeln!(out, "{text}")
}

/// The summary; with heads, also a table.
pub(super) fn summary(
    inspection: &Inspection,
    files: &[(&Path, (u32, u32))],
    out: &mut impl Write,
) -> Result<()> {
    let layout = &inspection.layouts[0];
    let statistics = Statistics::of_all(inspection)?;
    let by_head = inspection.by_head == ByHead::Yes;
    let heads = inspection.heads.len();

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
    let grid = format!(
        "{}{which} × {}",
        count(statistics.rows, "row"),
        count(statistics.columns, "column")
    );
    let block = inspection.block;
    line("blocks", format!("{block} × {block} tokens, {grid}"))?;
    if by_head {
        let distinct = count(inspection.layouts.len(), "layout");
        line("heads", format!("{}, {distinct}; totals over all heads below", thousands(heads)))?;
    }
    let all_blocks = statistics.rows as f64 * f64::from(statistics.columns) * heads as f64;
    let share = if all_blocks > 0.0 { statistics.active_blocks as f64 / all_blocks } else { 0.0 };
    let kinds = format!(
        "{} Full + {} Partial",
        thousands(statistics.full_blocks),
        thousands(statistics.partial_blocks)
    );
    line(
        "active blocks",
        format!("{} = {kinds}, {} of all", thousands(statistics.active_blocks), percent(share)),
    )?;
    line("active pairs", thousands(statistics.active_pairs))?;
    let fewer = match statistics.density {
        0.0 => "no active pairs".to_string(),
        0.95.. => "about as many pairs as dense".to_string(),
        density => format!("{} times fewer pairs than dense", significant(1.0 / density)),
    };
    line("density", format!("{}, {fewer}", percent(statistics.density)))?;
    let (forward, backward) = (flops(statistics.forward_flops), flops(statistics.backward_flops));
    let each = if by_head { "" } else { " per head" };
    line(
        "work",
        format!("{forward} forward, {backward} backward{each}, head dim {}", inspection.head_dim),
    )?;
    if let Some(components) =
        statistics.components.as_ref().filter(|parts| parts.len() > 1 || parts[0].modulus > 1)
    {
        let text = |part: &Part| {
            let Part { modulus, segment, views, queries, keys } = *part;
            let views = format!("{} of {queries} × {keys} tokens", count(views, "view"));
            match (modulus, segment) {
                (1, _) => "the order of tokens".to_string(),
                (_, None) => format!("residues modulo {modulus} ({views})"),
                (_, Some(segment)) => {
                    format!("residues modulo {modulus} in segments of {segment} ({views})")
                }
            }
        };
        line("computed in", components.iter().map(text).collect::<Vec<_>>().join("; "))?;
    }
    line(
        "predicted",
        format!(
            "{} of the time of dense attention, {} computed",
            percent(statistics.predicted_time),
            count(statistics.computed_pairs, "pair")
        ),
    )?;
    line(
        "layout",
        format!(
            "{}, {}, {}",
            count(statistics.runs, "run"),
            count(statistics.stored_masks, "stored mask"),
            bytes(statistics.layout_bytes)
        ),
    )?;
    let queries = count(statistics.coverage_queries, "coverage query");
    line("compiled in", format!("{} ms, {queries}", significant(statistics.compile_ms)))?;
    if let Some(hash) = &statistics.hash {
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
        let statistics = Statistics::of_head(inspection, head)?;
        rows.push([
            head.to_string(),
            about.layout.to_string(),
            thousands(statistics.runs),
            thousands(statistics.active_blocks),
            thousands(statistics.active_pairs),
            percent(statistics.density),
            flops(statistics.forward_flops),
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
