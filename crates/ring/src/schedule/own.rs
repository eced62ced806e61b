//! When a rank works on its own keys.
//!
//! They wait for nobody, so they are kept for hops that have nothing else to compute: a *bare* hop
//! is one whose messages travel before anything has come that could be worked on, or after all of it
//! has been. On three ranks, backward:
//!
//! ```text
//! travels     keys       keys       gradients   gradients
//! worked on   own keys   the 1st    the 2nd     own keys
//! ```
//!
//! Each bare hop gets a part of the own keys in proportion to its bytes. Parts lie around each other,
//! the first one outside:
//!
//! ```text
//! keys        |  1st  |  2nd  |      3rd      |  2nd  |  1st  |
//! ```
//!
//! Keys further along are seen by fewer queries of a causal pattern, and by as many of a window. As
//! long as that falls or rises evenly, a part that lies around the middle has the same share of the
//! pairs as of the keys, and nobody has to count pairs. Bytes and tokens alone decide, so that
//! whoever makes the schedule cuts at the same places.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{About, Step, TILE, Way};

/// Bare hops that get a part, those with most bytes: every part is a call of the kernels.
const MOST: usize = 4;

/// A hop with messages and nothing to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bare {
    label: u32,
    /// What travels one way.
    bytes: u64,
}

/// The bare hops among some steps, in their order.
pub(super) fn bare(steps: &BTreeMap<u32, Step>) -> Vec<Bare> {
    let mut found = Vec::new();
    let mut covered = false;
    for (&label, step) in steps {
        let bytes = |messages: &[super::Message]| messages.iter().map(|m| m.bytes()).sum::<u64>();
        let bytes = bytes(&step.sends).max(bytes(&step.receives));
        if bytes > 0 && !covered {
            found.push(Bare { label, bytes });
        }
        covered = step.work.iter().any(|part| {
            matches!((part.about, part.way), (About::Arrival(_) | About::Hosting(_), Way::Out))
        });
    }
    while found.len() > MOST {
        let (least, _) = found.iter().enumerate().min_by_key(|(_, bare)| bare.bytes).expect("some");
        found.remove(least);
    }
    found
}

/// Parts of so many own keys in ascending order, and the step after which each is worked on: in the
/// hop of the next one.
pub(super) fn parts(keys: usize, bare: &[Bare]) -> Vec<(u32, Range<usize>)> {
    let all = bare.iter().map(|bare| u128::from(bare.bytes)).sum::<u128>();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let mut left = 0..keys;
    let mut given = 0;
    for Bare { label, bytes } in &bare[..bare.len().saturating_sub(1)] {
        given += u128::from(*bytes);
        let side = (keys as u128 * given / (2 * all)) as usize;
        // On edges of blocks, so that no more of them are cut than are by themselves.
        let nearest = |key: usize| (key + TILE / 2) / TILE * TILE;
        let (start, end) = (nearest(side), nearest(keys - side).min(left.end));
        if start > left.start {
            before.push((label - 1, left.start..start));
            after.push((label - 1, end..left.end));
            left = start..end;
        }
    }
    let last = match before.is_empty() {
        // Too few to be cut: the first hop of those with most bytes has all of them.
        true => bare.iter().rev().max_by_key(|bare| bare.bytes),
        false => bare.last(),
    };
    before.push((last.map_or(0, |bare| bare.label - 1), left));
    before.extend(after.into_iter().rev());
    before.retain(|(_, part)| !part.is_empty());
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hops(bytes: &[u64]) -> Vec<Bare> {
        let bare = |(hop, &bytes)| Bare { label: 1 + 2 * hop as u32, bytes };
        bytes.iter().enumerate().map(bare).collect()
    }

    #[test]
    fn parts_are_all_keys_once() {
        for keys in [0, 1, 63, 64, 128, 255, 256, 257, 640, 1_000, 8_192, 100_003] {
            for bytes in [&[][..], &[7], &[5, 5], &[1, 2], &[9, 1, 9], &[1, 1_000_000], &[3; 4]] {
                let parts = parts(keys, &hops(bytes));
                let mut end = 0;
                for (_, part) in &parts {
                    assert_eq!(part.start, end, "{keys} keys, {bytes:?}: {parts:?}");
                    assert!(!part.is_empty() && part.start % TILE == 0, "{parts:?}");
                    end = part.end;
                }
                assert_eq!(end, keys, "{keys} keys, {bytes:?}: {parts:?}");
            }
        }
    }

    /// Causal pairs, which fall evenly, are shared as bytes are.
    #[test]
    fn hops_get_work_by_their_bytes() {
        let keys = 64_000;
        for bytes in [&[5, 5][..], &[1, 2], &[4, 1, 3]] {
            let parts = parts(keys, &hops(bytes));
            let all = (keys * (keys + 1) / 2) as f64;
            for (hop, share) in bytes.iter().enumerate() {
                let mine = parts.iter().filter(|(label, _)| *label == 2 * hop as u32);
                let pairs = mine.flat_map(|(_, part)| part.clone()).map(|key| keys - key);
                let got = pairs.sum::<usize>() as f64 / all;
                let expected = *share as f64 / bytes.iter().sum::<u64>() as f64;
                assert!((got - expected).abs() < 0.01, "{bytes:?}: hop {hop} has {got}");
            }
        }
    }

    #[test]
    fn few_keys_are_not_cut() {
        assert_eq!(parts(100, &hops(&[5, 5])), [(0, 0..100)]);
        assert_eq!(parts(100, &hops(&[5, 6])), [(2, 0..100)]);
        assert_eq!(parts(100, &[]), [(0, 0..100)]);
        assert_eq!(parts(256, &hops(&[5, 5])), [(0, 0..64), (2, 64..192), (0, 192..256)]);
    }
}
