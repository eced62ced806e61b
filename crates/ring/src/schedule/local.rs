//! When a rank computes over its local keys.
//!
//! They depend on no message, so they are kept for hops with nothing else to compute, or little. An
//! *uncovered* hop is one whose messages are in flight before anything has been received, or after
//! everything received has been computed. On three ranks, backward:
//!
//! ```text
//! in flight   keys         keys       gradients   gradients
//! computed    local keys   the 1st    the 2nd     local keys
//! ```
//!
//! Two uncovered hops get a part of the local keys each, in proportion to their bytes: the first one,
//! and of the others the one with most bytes, the last of equals. Not more: a rank that computes over
//! local keys is late for its next step, and ranks that do so in different steps wait for each other.
//!
//! ```text
//! keys        |   1st   |        2nd        |   1st   |
//! ```
//!
//! Later keys have fewer queries in a causal pattern, and as many in a window. As long as that changes
//! evenly, a part around the middle has the same share of the pairs as of the keys, without counting
//! pairs. Only bytes and tokens decide, so that every caller gets the same parts.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Leg, Message, Part, Payload, Step, TILE};

/// Received data is little to compute where the messages in flight exceed this multiple of its bytes:
/// a few sinks, while the gradients of a window are in flight.
const LITTLE: u64 = 8;

/// A hop with messages and nothing to compute, or little.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Uncovered {
    label: u32,
    /// Bytes in one direction, the larger one.
    bytes: u64,
}

/// The uncovered hops that get a part, at most two, in order.
pub(super) fn uncovered(steps: &BTreeMap<u32, Step>) -> Vec<Uncovered> {
    let mut found = Vec::new();
    let mut due = 0;
    for (&label, step) in steps {
        let sum = |messages: &[Message]| messages.iter().map(Message::bytes).sum::<u64>();
        let bytes = sum(&step.sends).max(sum(&step.receives));
        if bytes > LITTLE * due {
            found.push(Uncovered { label, bytes });
        }
        let received = |part: &&Part| {
            matches!(
                (part.payload, part.leg),
                (Payload::ReceivedKeys(_) | Payload::RemoteQueries(_), Leg::Outbound)
            )
        };
        due = step.work.iter().filter(received).map(|part| part.bytes as u64).sum();
    }
    let mut found = found.into_iter();
    let first = found.next();
    first.into_iter().chain(found.max_by_key(|hop| hop.bytes)).collect()
}

/// Ascending parts of `keys` local keys, and the step after which each is computed: in the hop of the
/// next one.
pub(super) fn parts(keys: usize, hops: &[Uncovered]) -> Vec<(u32, Range<usize>)> {
    let after = |hop: &Uncovered| hop.label - 1;
    let [first, last] = hops else {
        return vec![(hops.first().map_or(0, after), 0..keys)];
    };
    let all = u128::from(first.bytes) + u128::from(last.bytes);
    let side = (keys as u128 * u128::from(first.bytes) / (2 * all)) as usize;
    // On edges of blocks, so that no further block is split.
    let nearest = |key: usize| (key + TILE / 2) / TILE * TILE;
    let (start, end) = (nearest(side), nearest(keys - side).min(keys));
    if start == 0 {
        // Too few to split.
        let most = if last.bytes > first.bytes { last } else { first };
        return vec![(after(most), 0..keys)];
    }
    let split = [(after(first), 0..start), (after(last), start..end), (after(first), end..keys)];
    split.into_iter().filter(|(_, part)| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hops(bytes: &[u64]) -> Vec<Uncovered> {
        let uncovered = |(hop, &bytes)| Uncovered { label: 1 + 2 * hop as u32, bytes };
        bytes.iter().enumerate().map(uncovered).collect()
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

    /// Causal pairs, which decrease evenly, are divided as bytes are.
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
    fn few_keys_are_not_split() {
        assert_eq!(parts(100, &hops(&[5, 5])), [(0, 0..100)]);
        assert_eq!(parts(100, &hops(&[5, 6])), [(2, 0..100)]);
        assert_eq!(parts(100, &[]), [(0, 0..100)]);
        assert_eq!(parts(256, &hops(&[5, 5])), [(0, 0..64), (2, 64..192), (0, 192..256)]);
    }
}
