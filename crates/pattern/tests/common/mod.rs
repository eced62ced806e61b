//! All checks of one random case, shared by the exactness test and the fuzz target.

use longspan_pattern::{
    BlockMasks, BlockSize, Blocks, Layout, Pattern, Positions, Progression, RunKind, Shape,
};
use longspan_testing::{Case, Steps, Truth};

fn positions(steps: &[Steps]) -> Positions {
    let steps = steps.iter().map(|s| Progression {
        start: s.start,
        step: s.step as usize,
        len: s.len as usize,
    });
    Positions::new(steps).unwrap()
}

fn shape(case: &Case) -> Shape {
    let block = BlockSize::new(case.block.into()).unwrap();
    let mut shape = Shape::new(case.tokens_q as usize, case.tokens_k as usize).block(block);
    if let Some(offset) = case.query_offset {
        shape = shape.query_offset(offset);
    }
    if let Some(offset) = case.key_offset {
        shape = shape.key_offset(offset);
    }
    if let Some(map) = &case.query_map {
        shape = shape.query_map(positions(map));
    }
    if let Some(map) = &case.key_map {
        shape = shape.key_map(positions(map));
    }
    if let Some(rows) = &case.rows {
        shape = shape.rows(rows.clone());
    }
    if let Some(valid) = &case.key_padding {
        shape = shape.key_padding(valid.start as usize..valid.end as usize);
    }
    if let Some(bytes) = case.mask_bytes {
        shape = shape.mask_bytes(bytes);
    }
    shape
}

/// What a case had.
pub(crate) struct Checked {
    /// A Partial block.
    pub(crate) partial: bool,
    /// Components.
    pub(crate) split: bool,
}

/// Runs all checks of one case.
pub(crate) fn check(case: &Case) -> Result<Checked, String> {
    let text = case.rule.to_string();
    let pattern: Pattern = text.parse().map_err(|e| format!("{text} does not parse: {e}"))?;
    let printed = pattern.to_string();
    if printed.parse::<Pattern>() != Ok(pattern.clone()) {
        return Err(format!("printed as {printed}, which is another pattern"));
    }
    let layout = Layout::compile(&pattern, &shape(case)).map_err(|e| e.to_string())?;
    let truth = case.truth();
    if (layout.queries(), layout.keys()) != (truth.queries(), truth.keys()) {
        return Err(format!("covers {} × {}", layout.queries(), layout.keys()));
    }
    let active = ActivePairs::read(&layout)?;
    active.compare(&layout, &truth)?;
    check_transpose(&layout)?;
    check_given_blocks(&layout, case)?;
    let split = check_components(&layout, &active)?;
    Ok(Checked { partial: active.partial > 0, split })
}

/// The active pairs of a layout, read block by block.
struct ActivePairs {
    first: usize,
    rows: Vec<Vec<bool>>,
    full: u128,
    partial: u128,
    pairs: u128,
}

impl ActivePairs {
    fn read(layout: &Layout) -> Result<Self, String> {
        let keys = layout.keys();
        let rows = layout.rows();
        let first = if rows.is_empty() { 0 } else { layout.row_tokens(rows.start).start };
        let mut active = ActivePairs { first, rows: Vec::new(), full: 0, partial: 0, pairs: 0 };
        let mut masks = layout.masks();
        for row in rows {
            let queries = layout.row_tokens(row).len();
            let start = active.rows.len();
            active.rows.resize(start + queries, vec![false; keys]);
            let mut next = 0;
            for run in layout.row(row) {
                if run.len == 0 || run.start < next || run.end() > layout.columns() {
                    return Err(format!("row {row} has run {run:?} after column {next}"));
                }
                next = run.end();
                for column in run.start..run.end() {
                    let tokens = layout.column_tokens(column);
                    let (from, width) = (tokens.start, tokens.len());
                    let words = masks.get(row, column, run);
                    let per_row = layout.block().words();
                    let bit = |i: usize, j: usize| words[i * per_row + j / 64] >> (j % 64) & 1 == 1;
                    let mut ones = 0;
                    for i in 0..layout.block().get() {
                        for j in 0..per_row * 64 {
                            let set = bit(i, j);
                            if i < queries && j < width {
                                active.rows[start + i][from + j] = set;
                            } else if set {
                                return Err(format!("block ({row}, {column}) has bit ({i}, {j})"));
                            }
                            ones += u128::from(set);
                        }
                    }
                    let all = (queries * width) as u128;
                    match run.kind() {
                        RunKind::Full if ones == all => active.full += 1,
                        RunKind::Partial if 0 < ones && ones < all => active.partial += 1,
                        kind => {
                            return Err(format!(
                                "block ({row}, {column}) is {kind:?} with {ones} of {all} pairs"
                            ));
                        }
                    }
                    active.pairs += ones;
                }
            }
        }
        Ok(active)
    }

    fn compare(&self, layout: &Layout, truth: &Truth) -> Result<(), String> {
        for (i, row) in self.rows.iter().enumerate() {
            if row != truth.row(self.first + i) {
                let j = (0..row.len()).find(|&j| row[j] != truth.get(self.first + i, j)).unwrap();
                return Err(format!("pair ({}, {j}) is {}", self.first + i, row[j]));
            }
        }
        let counts = layout.counts().map_err(|e| e.to_string())?;
        let counted = (counts.full_blocks, counts.partial_blocks, counts.active_pairs);
        if counted != (self.full, self.partial, self.pairs) {
            let expected = (self.full, self.partial, self.pairs);
            return Err(format!("counts {counted:?}, expected {expected:?}"));
        }
        let all = (self.rows.len() * truth.keys()) as f64;
        let density = if all == 0.0 { 0.0 } else { self.pairs as f64 / all };
        let got = layout.density().map_err(|e| e.to_string())?;
        if (got - density).abs() > 1e-12 {
            return Err(format!("density {got}, expected {density}"));
        }
        Ok(())
    }
}

/// Every active pair is in one component, once, at its positions. Returns whether there are any.
fn check_components(layout: &Layout, active: &ActivePairs) -> Result<bool, String> {
    let Some(split) = layout.split().map_err(|e| e.to_string())? else { return Ok(false) };
    let mut times = vec![vec![0_u32; layout.keys()]; layout.queries()];
    for component in split.components() {
        let (queries, keys) = (component.queries(), component.keys());
        let entries = queries.segments.indices().zip(keys.segments.indices());
        if [queries, keys].iter().any(|side| side.segments.count != component.layouts().len()) {
            return Err(format!("{component:?} has other segments than layouts"));
        }
        for ((first_query, first_key), own) in entries.zip(component.layouts()) {
            let pairs = ActivePairs::read(own)?;
            check_transpose(own)?;
            if own.split().map_err(|e| e.to_string())?.is_some() {
                return Err("a component is split again".into());
            }
            let tokens = |first, side: &longspan_pattern::TokenSteps| {
                side.tokens.indices().map(|token| first + token).collect::<Vec<_>>()
            };
            let (queries, keys) = (tokens(first_query, &queries), tokens(first_key, &keys));
            for (i, &query) in queries.iter().enumerate() {
                if own.query_positions().get(i) != layout.query_positions().get(query) {
                    return Err(format!("query {i} of a component is not at that of {query}"));
                }
                for (j, &key) in keys.iter().enumerate() {
                    times[query][key] += u32::from(pairs.rows[i][j]);
                }
            }
            for (j, &key) in keys.iter().enumerate() {
                if own.key_positions().get(j) != layout.key_positions().get(key) {
                    return Err(format!("key {j} of a component is not at that of {key}"));
                }
            }
        }
    }
    for (query, (times, active)) in times.iter().zip(&active.rows).enumerate() {
        for (key, (times, active)) in times.iter().zip(active).enumerate() {
            if *times != u32::from(*active) {
                return Err(format!("pair ({query}, {key}) is in {times} components"));
            }
        }
    }
    Ok(true)
}

/// The columns have the same blocks with the same masks as the rows.
fn check_transpose(layout: &Layout) -> Result<(), String> {
    let transpose = layout.transpose().map_err(|e| e.to_string())?;
    let mut by_rows = Vec::new();
    for row in layout.rows() {
        for run in layout.row(row) {
            by_rows.extend((run.start..run.end()).map(|c| (c, row, run.kind(), run.stored())));
        }
    }
    by_rows.sort_unstable_by_key(|block| (block.0, block.1));
    let mut by_columns = Vec::new();
    for column in 0..layout.columns() {
        let mut last: Option<longspan_pattern::Run> = None;
        for run in transpose.column(column) {
            let apart = last.is_none_or(|last| {
                run.start > last.end()
                    || run.start == last.end()
                        && (run.kind(), run.stored()) != (last.kind(), last.stored())
            });
            if run.len == 0 || !apart {
                return Err(format!("column {column} has {last:?} then {run:?}"));
            }
            last = Some(*run);
            let blocks = run.start..run.end();
            by_columns.extend(blocks.map(|row| (column, row, run.kind(), run.stored())));
        }
    }
    if by_rows != by_columns { Err("the transpose differs".into()) } else { Ok(()) }
}

/// A layout of the same given blocks and masks is equal, hash included; with one bit cleared it is
/// not.
fn check_given_blocks(layout: &Layout, case: &Case) -> Result<(), String> {
    let shape = Shape::new(layout.queries(), layout.keys()).block(layout.block());
    let rows = layout.rows();
    let shape = shape.rows(rows.start.into()..rows.end.into());
    let (mut starts, mut columns) = (vec![0], Vec::new());
    let (mut numbers, mut words) = (Vec::new(), Vec::<u64>::new());
    let mut masks = layout.masks();
    let per_mask = layout.block().get() * layout.block().words();
    for row in rows {
        for run in layout.row(row) {
            for column in run.start..run.end() {
                columns.push(column);
                numbers.push((run.kind() == RunKind::Partial).then(|| {
                    words.extend_from_slice(masks.get(row, column, run));
                    (words.len() / per_mask) as u32 - 1
                }));
            }
        }
        starts.push(columns.len());
    }
    let given = |words: &[u64]| {
        let masks = BlockMasks::Numbered { numbers: &numbers, words };
        let blocks = Blocks { starts: &starts, columns: &columns, masks };
        Layout::from_blocks(&shape, blocks).map_err(|e| e.to_string())
    };
    let same = given(&words)?;
    if same.hash() != layout.hash()
        || same.same_pairs(layout) != Ok(true)
        || same.counts() != layout.counts()
    {
        return Err("a layout of the same blocks differs".into());
    }
    // An arbitrary set bit, chosen by the case.
    let set: Vec<usize> = (0..words.len()).filter(|&i| words[i] != 0).collect();
    if !set.is_empty() {
        let word = set[case.tokens_k as usize % set.len()];
        words[word] &= words[word] - 1;
        if given(&words)?.hash() == layout.hash() {
            return Err("a bit was cleared and the hash is unchanged".into());
        }
    }
    Ok(())
}
