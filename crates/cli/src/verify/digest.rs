//! A 128-bit hash of the bits of all results of one check: two builds compute the same to the bit
//! if and only if (but for collisions) their digests are equal.

use std::fmt;

use longspan_testing::Values;

/// FNV-1a with 128 bits, over lengths and elements in little-endian order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Digest(u128);

const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = (1 << 88) + 0x13b;

impl Digest {
    /// Of `out`, `lse`, `dq`, `dk` and `dv`, in this order, each as `[batch][head][token][dim]`.
    pub(super) fn of(values: &Values<f32>) -> Self {
        let Values { out, lse, dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } = values;
        let mut digest = Digest(OFFSET_BASIS);
        // Cases without options that have gradients keep the digests of before there were any.
        let options = [dsink_logits, dbias_table, dalibi_slopes];
        let options = options.into_iter().filter(|tensor| !tensor.is_empty());
        for tensor in [out, lse, dq, dk, dv].into_iter().chain(options) {
            digest.update(&(tensor.len() as u64).to_le_bytes());
            tensor.iter().for_each(|element| digest.update(&element.to_bits().to_le_bytes()));
        }
        digest
    }

    fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vector of the FNV draft.
    #[test]
    fn fnv_1a() {
        let mut digest = Digest(OFFSET_BASIS);
        digest.update(b"a");
        assert_eq!(digest.to_string(), "d228cb696f1a8caf78912b704e4a8964");
    }

    #[test]
    fn every_bit_and_every_length_counts() {
        let values = || Values {
            out: vec![1.0, 2.0],
            lse: vec![0.0],
            dq: vec![3.0],
            dk: vec![4.0],
            dv: vec![f32::NAN],
            ..Values::default()
        };
        let digest = Digest::of(&values());
        assert_eq!(digest, Digest::of(&values()));
        let mut other = values();
        other.lse[0] = -0.0;
        assert_ne!(digest, Digest::of(&other));
        let mut other = values();
        other.out.pop();
        other.lse.insert(0, 2.0);
        assert_ne!(digest, Digest::of(&other));
    }
}
