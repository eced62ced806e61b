//! Which keys of a tile each query of a tile sees.

use longspan_pattern::{Layout, Masks, RunKind};

use super::{KeyPanel, Patch, QUERIES, QueryTile};
use crate::exec::fault::{Site, fault};
use crate::simd::LANES;

/// Keys whose queries are looked up together: a whole number of vectors, and of pieces of a sum.
pub(super) const STRIP: usize = 32;
/// Strips of a tile.
pub(super) const STRIPS: usize = LANES / STRIP;

/// Whether a row of blocks sees any key of the key panel.
pub(super) fn sees(layout: &Layout, row: u32, panel: &KeyPanel) -> bool {
    let block = layout.block().get();
    let (first, last) = (panel.first / block, (panel.first + panel.keys - 1) / block);
    let runs = layout.row(row);
    let at = runs.partition_point(|run| run.end() as usize <= first);
    runs.get(at).is_some_and(|run| run.start as usize <= last)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    Empty,
    Full,
    Partial,
}

/// Which of up to 64 keys each query of a tile sees.
///
/// Bits are written only for a Partial answer. A tile of keys is one block, a part of one, or
/// pieces of several.
pub(super) fn cover(
    layout: &Layout,
    tile: &QueryTile,
    (key, keys): (usize, usize),
    masks: &mut Masks<'_>,
    bits: &mut [u64; QUERIES],
) -> Coverage {
    let block = layout.block().get();
    let per_row = layout.block().words();
    let runs = layout.row(tile.row);
    let mut at = runs.partition_point(|run| run.end() as usize * block <= key);
    let full = u64::MAX >> (64 - keys);
    let mut next = key;
    while next < key + keys {
        let Some(run) = runs.get(at).filter(|run| (run.start as usize * block) < key + keys) else {
            break;
        };
        let start = (run.start as usize * block).max(next);
        let run_end = (run.end() as usize * block).min(key + keys);
        if run.kind() == RunKind::Full {
            if start == key && run_end == key + keys {
                return Coverage::Full;
            }
            let ones = (u64::MAX >> (64 - (run_end - start))) << (start - key);
            bits[..tile.queries].iter_mut().for_each(|bits| *bits |= ones);
            next = run_end;
            at += 1;
            continue;
        }
        let column = start / block;
        let end = ((column + 1) * block).min(run_end);
        fault(Site::Mask);
        let words = masks.get(tile.row, column as u32, run);
        let shift = start - column * block;
        for (query, bits) in bits[..tile.queries].iter_mut().enumerate() {
            let words = &words[(tile.within + query) * per_row..][..per_row];
            let mut word = words[shift / 64] >> (shift % 64);
            if !shift.is_multiple_of(64) && shift / 64 + 1 < per_row {
                word |= words[shift / 64 + 1] << (64 - shift % 64);
            }
            *bits |= (word & (u64::MAX >> (64 - (end - start)))) << (start - key);
        }
        next = end;
        if end == run.end() as usize * block {
            at += 1;
        }
    }
    let bits = &bits[..tile.queries];
    if bits.iter().all(|&bits| bits == 0) {
        Coverage::Empty
    } else if bits.iter().all(|&bits| bits == full) {
        Coverage::Full
    } else {
        Coverage::Partial
    }
}

/// The parts of a tile where some query sees a key: per [`STRIP`] of keys, the queries from the first
/// that does to the last one, counted from `first`. Strips of the same queries are one part; parts may
/// be empty.
pub(super) fn patches(bits: &[u64], first: usize, keys: usize) -> [Patch; STRIPS] {
    let mut patches: [Patch; STRIPS] = Default::default();
    let mut last = 0;
    for key in (0..keys).step_by(STRIP) {
        let end = keys.min(key + STRIP);
        let strip = u64::MAX >> (LANES - (end - key)) << key;
        let sees = |word: &u64| word & strip != 0;
        let start = bits.iter().position(sees).unwrap_or(0);
        let after = bits.iter().rposition(sees).map_or(start, |last| last + 1);
        let queries = first + start..first + after;
        if key > 0 && patches[last].queries == queries {
            patches[last].keys.end = end;
        } else {
            last = key / STRIP;
            patches[last] = Patch { queries, keys: key..end };
        }
    }
    patches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_hold_every_pair_and_leave_out_the_corners() {
        let parts = |bits: &[u64], keys| {
            let parts = patches(bits, 0, keys).into_iter().filter(|part| !part.queries.is_empty());
            parts.map(|Patch { queries, keys }| (queries, keys)).collect::<Vec<_>>()
        };
        let lower: Vec<u64> = (0..64).map(|query| u64::MAX >> (63 - query)).collect();
        assert_eq!(parts(&lower, 64), [(0..64, 0..32), (32..64, 32..64)]);
        // A comb: every strip has all queries.
        assert_eq!(parts(&[1 << 63 | 1; 5], 64), [(0..5, 0..64)]);
        // Nothing in between, and a last strip that is short.
        assert_eq!(parts(&[0, 1, 0, 1 << 40], 41), [(1..2, 0..32), (3..4, 32..41)]);
        assert_eq!(parts(&[0, 0], 64), []);
    }
}
