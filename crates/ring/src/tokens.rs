//! Sets of tokens of one rank, by index in its shard. Any module may use it.

use longspan::{Positions, Progression};

/// Ascending token indices, as progressions.
pub(crate) type Tokens = Positions;

/// The indices whose bits are set.
pub(crate) fn of_bits(bits: &[u64]) -> Tokens {
    let mut found = Vec::new();
    // Single tokens that may be a progression.
    let mut comb: Option<Progression> = None;
    let mut index = 0;
    let end = bits.len() * 64;
    while let Some(start) = next(bits, index, true) {
        let stop = next(bits, start, false).unwrap_or(end);
        let (start_at, len) = (start as i64, stop - start);
        index = stop;
        if len > 1 {
            found.extend(comb.take());
            found.push(Progression { start: start_at, step: 1, len });
            continue;
        }
        comb = Some(match comb {
            None => Progression { start: start_at, step: 1, len: 1 },
            Some(comb) => {
                let gap = (start_at - comb.start) as usize - comb.step * (comb.len - 1);
                if comb.len == 1 || gap == comb.step {
                    Progression { step: gap, len: comb.len + 1, ..comb }
                } else {
                    found.push(comb);
                    Progression { start: start_at, step: 1, len: 1 }
                }
            }
        });
    }
    found.extend(comb);
    Positions::new(found).expect("token indices fit")
}

/// The first index from `from` on whose bit is (not) set.
fn next(bits: &[u64], from: usize, set: bool) -> Option<usize> {
    let flip = if set { 0 } else { u64::MAX };
    let mut keep = u64::MAX << (from % 64);
    for (index, &word) in bits.iter().enumerate().skip(from / 64) {
        let word = (word ^ flip) & keep;
        if word != 0 {
            return Some(index * 64 + word.trailing_zeros() as usize);
        }
        keep = u64::MAX;
    }
    None
}

/// Every index.
pub(crate) fn indices(tokens: &Tokens) -> impl Iterator<Item = usize> + '_ {
    tokens.progressions().flat_map(|p| (0..p.len).map(move |i| p.start as usize + i * p.step))
}

/// One bit per index below `count`, set for those in `tokens`.
pub(crate) fn to_bits(tokens: &Tokens, count: usize) -> Vec<u64> {
    let mut bits = vec![0; count.div_ceil(64)];
    indices(tokens).for_each(|index| bits[index / 64] |= 1 << (index % 64));
    bits
}

/// Positions of tokens of the shard `held`.
pub(crate) fn positions_of(held: &Positions, tokens: &Tokens) -> Positions {
    let mut pieces = Vec::new();
    // (first index, progression) of the shard.
    let mut first = 0;
    let held: Vec<_> = held
        .progressions()
        .map(|piece| {
            let from = first;
            first += piece.len;
            (from, piece)
        })
        .collect();
    for chosen in tokens.progressions() {
        let mut index = 0;
        while index < chosen.len {
            let token = chosen.start as usize + index * chosen.step;
            let (from, piece) = held[held.partition_point(|(from, _)| *from <= token) - 1];
            let inside = from + piece.len - token;
            let len = inside.div_ceil(chosen.step).min(chosen.len - index);
            let start = piece.start + ((token - from) * piece.step) as i64;
            pieces.push(Progression { start, step: chosen.step * piece.step, len });
            index += len;
        }
    }
    Positions::new(pieces).expect("positions of the shard")
}

#[cfg(test)]
mod tests {
    use longspan_testing::Random;

    use super::*;

    #[test]
    fn bits_become_progressions_and_back() {
        for seed in 0..200_u64 {
            let mut random = Random::new(seed);
            let bits: Vec<u64> = (0..4)
                .map(|word| {
                    let x = random.bits();
                    match seed % 4 {
                        0 => x,
                        1 => x & (x >> 3) & 0x1111_1111_1111_1111,
                        2 => 0x4924_9249_2492_4924 >> (word % 3),
                        _ => u64::MAX << (x % 64),
                    }
                })
                .collect();
            let tokens = of_bits(&bits);
            assert_eq!(to_bits(&tokens, 256), bits, "{tokens:?}");
            assert!(indices(&tokens).is_sorted());
        }
        assert!(of_bits(&[]).is_empty());
    }

    #[test]
    fn every_fourth_is_one_progression() {
        let tokens = of_bits(&[0x2222_2222_2222_2222; 8]);
        let expected = Progression { start: 1, step: 4, len: 128 };
        assert_eq!(tokens.progressions().collect::<Vec<_>>(), [expected]);
    }

    #[test]
    fn positions_are_those_of_the_shard() {
        let held = Positions::new([
            Progression { start: 100, step: 1, len: 10 },
            Progression { start: 7, step: 3, len: 5 },
        ])
        .unwrap();
        let tokens = Positions::new([
            Progression { start: 1, step: 4, len: 4 },
            Progression { start: 14, step: 1, len: 1 },
        ])
        .unwrap();
        let found = positions_of(&held, &tokens);
        let positions: Vec<_> = (0..found.len()).map(|i| found.get(i).unwrap()).collect();
        let expected: Vec<_> = indices(&tokens).map(|n| held.get(n).unwrap()).collect();
        assert_eq!(positions, expected);
    }
}
