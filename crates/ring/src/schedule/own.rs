//! When a rank works on its own keys.
//!
//! They wait for nobody, so they are kept for hops that have nothing else to compute, or little: a
//! *bare* hop is one whose messages travel before anything has come that could be worked on, or after
//! all of it has been. On three ranks, backward:
//!
//! ```text
//! travels     keys       keys       gradients   gradients
//! worked on   own keys   the 1st    the 2nd     own keys
//! ```
//!
//! Two bare hops get a part of the own keys each, in proportion to their bytes: the first one, and of
//! the others the one with most bytes, the last of equals. Not more: a rank that works on own keys is
//! late for its next step, and where ranks do so at different steps they wait for each other in turn.
//!
//! ```text
//! keys        |   1st   |        2nd        |   1st   |
//! ```
//!
//! Keys further along are seen by fewer queries of a causal pattern, and by as many of a window. As
//! long as that falls or rises evenly, a part that lies around the middle has the same share of the
//! pairs as of the keys, and nobody has to count pairs. Bytes and tokens alone decide, so that
//! whoever makes the schedule cuts at the same places.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{About, Message, Part, Step, TILE, Way};

/// What has come is little to compute beside messages of more than so many times its bytes: a few
/// sinks, while a window's gradients travel.
const LITTLE: u64 = 8;

/// A hop with messages and nothing to compute, or little.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bare {
    label: u32,
    /// What travels one way.
    bytes: u64,
}

/// The bare hops among some steps that get a part, at most two, in their order.
pub(super) fn bare(steps: &BTreeMap<u32, Step>) -> Vec<Bare> {
    let mut found = Vec::new();
    let mut due = 0;
    for (&label, step) in steps {
        let sum = |messages: &[Message]| messages.iter().map(Message::bytes).sum::<u64>();
        let bytes = sum(&step.sends).max(sum(&step.receives));
        if bytes > LITTLE * due {
            found.push(Bare { label, bytes });
        }
        let comes = |part: &&Part| {
            matches!((part.about, part.way), (About::Arrival(_) | About::Hosting(_), Way::Out))
        };
        due = step.work.iter().filter(comes).map(|part| part.bytes as u64).sum();
    }
    let mut found = found.into_iter();
    let first = found.next();
    first.into_iter().chain(found.max_by_key(|bare| bare.bytes)).collect()
}

/// Parts of so many own keys in ascending order, and the step after which each is worked on: in the
/// hop of the next one.
pub(super) fn parts(keys: usize, bare: &[Bare]) -> Vec<(u32, Range<usize>)> {
    let after = |bare: &Bare| bare.label - 1;
    let [first, last] = bare else {
        return vec![(bare.first().map_or(0, after), 0..keys)];
    };
    let all = u128::from(first.bytes) + u128::from(last.bytes);
    let side = (keys as u128 * u128::from(first.bytes) / (2 * all)) as usize;
    // On edges of blocks, so that no more of them are cut than are by themselves.
    let nearest = |key: usize| (key + TILE / 2) / TILE * TILE;
    let (start, end) = (nearest(side), nearest(keys - side).min(keys));
    if start == 0 {
        // Too few to be cut.
        let most = if last.bytes > first.bytes { last } else { first };
        return vec![(after(most), 0..keys)];
    }
    let cut = [(after(first), 0..start), (after(last), start..end), (after(first), end..keys)];
    cut.into_iter().filter(|(_, part)| !part.is_empty()).collect()
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
            for bytes in [&[][..], &[7], &[5, 5], &[1, 2], &[9, 1], &[1, 1_000_000]] {
                let parts = parts(keys, &hops(bytes));
                let mut end = 0;
                for (_, part) in &parts {
                    assert_eq!(part.start, end, "{keys} keys, {bytes:?}: {parts:?}");
                    assert!(keys == 0 || !part.is_empty(), "{keys} keys, {bytes:?}: {parts:?}");
                    assert!(part.start % TILE == 0, "{parts:?}");
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
        for bytes in [[5, 5], [1, 2], [4, 1]] {
            let parts = parts(keys, &hops(&bytes));
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
