//! Warnings about layouts that the kernels compute inefficiently.
//!
//! Kernels compute whole blocks. Where most active blocks are Partial and hold few active pairs,
//! most of that work is masked, unless the pairs are dense in an order of residues.

use anyhow::Result;
use longspan::{Options, Prediction};

use super::inspection::Inspection;
use crate::number::{percent, ranges, significant};

/// Mean share of active pairs per active block below which a layout is reported: above 8 times the
/// work of its active pairs.
const SPARSE: f64 = 1.0 / 8.0;
/// Share of Partial blocks among active ones above which it is.
const PARTIAL: f64 = 0.5;
/// Time relative to dense attention above which a layout is reported that has less than half as many
/// pairs.
const NEAR_DENSE: f64 = 0.5;
/// Mean share of active pairs per active block above which that is not because of masked pairs.
const FEW: f64 = 0.5;
/// The smallest block.
const SMALLEST_BLOCK: usize = 16;

/// One warning per layout whose active blocks hold few active pairs.
pub(super) fn warnings(inspection: &Inspection) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    for (index, heads) in inspection.layouts_by_head() {
        let layout = &inspection.layouts[index];
        let rows = layout.rows();
        if rows.is_empty() || layout.columns() == 0 {
            continue;
        }
        let counts = layout.counts()?;
        // Blocks at the edges are smaller: the mean size of a block, not the nominal one.
        let first = layout.row_tokens(rows.start).start;
        let height = (layout.row_tokens(rows.end - 1).end - first) as f64 / rows.len() as f64;
        let width = layout.keys() as f64 / f64::from(layout.columns());
        let active = counts.active_blocks() as f64;
        let share = counts.active_pairs as f64 / (active * height * width);
        let prediction = Prediction::of::<f32>(layout, &Options::default())?;
        let time = prediction.relative_time;
        let near_dense = time > NEAR_DENSE && time > 2.0 * layout.density()? && share < FEW;
        let sparse = is_sparse(active, counts.partial_blocks as f64, share) && !prediction.split;
        if !(sparse || near_dense) {
            continue;
        }
        let which = match (inspection.layouts.len(), heads.len()) {
            (1, _) => String::new(),
            (_, 1) => format!("head {}: ", heads[0]),
            _ => format!("heads {}: ", ranges(&heads)),
        };
        let smaller = if inspection.block > SMALLEST_BLOCK { "a smaller --block, or " } else { "" };
        warnings.push(format!(
            "{which}most blocks hold few active pairs (mean {}): the kernels compute whole blocks, {} \
             times the active pairs, in about {} of the time of dense attention; consider \
             {smaller}an order of tokens in which active pairs are adjacent",
            percent(share),
            significant(1.0 / share),
            percent(time)
        ));
    }
    Ok(warnings)
}

fn is_sparse(active: f64, partial: f64, share: f64) -> bool {
    partial > PARTIAL * active && share > 0.0 && share < SPARSE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_thresholds_count() {
        assert!(is_sparse(10.0, 6.0, 0.12));
        // Half of the blocks are Full; one pair in eight is active; no block is active.
        assert!(!is_sparse(10.0, 5.0, 0.12));
        assert!(!is_sparse(10.0, 6.0, 0.125));
        assert!(!is_sparse(0.0, 0.0, f64::NAN));
    }
}
