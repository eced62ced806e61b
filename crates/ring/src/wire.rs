//! Wire formats of keys and values: exact, or compressed within an error bound. Passes encode and
//! decode with it; `problem` computes message lengths.
//!
//! A *block* is up to 64 tokens of one batch entry and head, of keys or of values. Its formats:
//!
//! ```text
//! exact   the elements in their dtype
//! bf16    the nearest bf16 values                               2 bytes per element
//! int8    round(x / scale), scale = largest |x| / 127           1 byte per element and a scale (f32)
//! ```
//!
//! Results (partial softmaxes, log-sum-exps, gradients) are always sent exactly.

use bytemuck::{Pod, cast_slice};
use half::bf16;
use longspan::{Element, ElementType};

use crate::error::{Error, Result};

/// Wire format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum Wire {
    /// In their dtype.
    #[default]
    Exact,
    /// As the nearest bf16 values.
    Bf16,
    /// As 8-bit integers with one scale per 64 tokens of a head: errors of at most 1/254 of the largest
    /// magnitude. Non-finite values are rejected.
    Int8,
    /// The smallest of these formats per 64 tokens of a head in which no error exceeds this bound; made
    /// by [`Wire::within`].
    #[non_exhaustive]
    Within(f32),
}

impl Wire {
    /// The smallest formats in which no error exceeds `bound`.
    ///
    /// ```
    /// use longspan_ring::Wire;
    ///
    /// assert!(Wire::within(1e-2).is_ok());
    /// assert!(Wire::within(f32::NAN).is_err());
    /// ```
    pub fn within(bound: f32) -> Result<Self> {
        if bound.is_finite() && bound >= 0.0 {
            Ok(Wire::Within(bound))
        } else {
            Err(Error::Bound { bound })
        }
    }
}

/// Tokens per block.
const BLOCK: usize = 64;

/// The format of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Exact,
    Bf16,
    Int8,
}

impl Format {
    const ALL: [Format; 3] = [Format::Exact, Format::Bf16, Format::Int8];

    /// Bytes of a block of `elements` elements.
    fn len(self, elements: usize, element: ElementType) -> usize {
        match self {
            Format::Exact => elements * element.size(),
            Format::Bf16 => elements * 2,
            Format::Int8 => elements + size_of::<f32>(),
        }
    }
}

/// Rows of tokens of several heads, `[head, token, dim]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    pub(crate) dim: usize,
}

impl Extent {
    pub(crate) fn elements(&self) -> usize {
        self.heads * self.tokens * self.dim
    }

    fn blocks(&self) -> usize {
        self.heads * self.tokens.div_ceil(BLOCK)
    }

    /// Elements of each block, in order.
    fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let Extent { heads, tokens, dim } = *self;
        let lens = move |_| (0..tokens).step_by(BLOCK).map(move |at| BLOCK.min(tokens - at) * dim);
        (0..heads).flat_map(lens)
    }
}

impl Wire {
    /// The format of all blocks, where it is fixed.
    fn format(self) -> Option<Format> {
        match self {
            Wire::Exact => Some(Format::Exact),
            Wire::Bf16 => Some(Format::Bf16),
            Wire::Int8 => Some(Format::Int8),
            Wire::Within(_) => None,
        }
    }

    /// Whether lengths depend on the values.
    pub(crate) fn varies(self) -> bool {
        self.format().is_none()
    }

    /// Bytes of rows of this extent, at most.
    pub(crate) fn len(self, extent: Extent, element: ElementType) -> usize {
        let bytes = |format: Format| extent.sizes().map(|n| format.len(n, element)).sum::<usize>();
        match self.format() {
            Some(Format::Exact) => extent.elements() * element.size(),
            Some(format) => bytes(format),
            // One tag per block, and no block larger than an exact one.
            None => extent.blocks() + extent.elements() * element.size(),
        }
    }

    /// Appends encoded rows.
    pub(crate) fn encode<E: Element + Pod>(self, rows: &[E], extent: Extent, into: &mut Vec<u8>) {
        debug_assert_eq!(rows.len(), extent.elements());
        if self == Wire::Exact {
            into.extend_from_slice(cast_slice(rows));
            return;
        }
        let tags = into.len();
        if self.varies() {
            into.resize(tags + extent.blocks(), 0);
        }
        let mut rest = rows;
        for (index, size) in extent.sizes().enumerate() {
            let (block, behind) = rest.split_at(size);
            rest = behind;
            let format = match self {
                Wire::Within(bound) => smallest(block, bound),
                _ => self.format().expect("a fixed format"),
            };
            if self.varies() {
                into[tags + index] = format as u8;
            }
            match format {
                Format::Exact => into.extend_from_slice(cast_slice(block)),
                Format::Bf16 => {
                    let bits = |x: &E| bf16::from_f32(x.to_f32()).to_bits().to_le_bytes();
                    into.extend(block.iter().flat_map(bits));
                }
                Format::Int8 => {
                    let scale = scale(block);
                    into.extend_from_slice(&scale.to_le_bytes());
                    into.extend(block.iter().map(|x| quantize(x.to_f32(), scale) as u8));
                }
            }
        }
    }

    /// Decodes rows; returns them and the remaining bytes. None where the bytes are truncated or
    /// invalid.
    pub(crate) fn decode<E: Element + Pod>(
        self,
        bytes: &[u8],
        extent: Extent,
    ) -> Option<(Vec<E>, &[u8])> {
        let mut rows = Vec::with_capacity(extent.elements());
        let (tags, mut rest) = match self.varies() {
            true => bytes.split_at_checked(extent.blocks())?,
            false => (&[][..], bytes),
        };
        for (index, size) in extent.sizes().enumerate() {
            let format = match self.format() {
                Some(format) => format,
                None => *Format::ALL.get(usize::from(tags[index]))?,
            };
            let (block, behind) = rest.split_at_checked(format.len(size, E::TYPE))?;
            rest = behind;
            match format {
                Format::Exact => {
                    let each = block.chunks_exact(size_of::<E>());
                    rows.extend(each.map(bytemuck::pod_read_unaligned::<E>));
                }
                Format::Bf16 => rows.extend(
                    block
                        .chunks_exact(2)
                        .map(|bits| E::from_f32(bf16::from_le_bytes([bits[0], bits[1]]).to_f32())),
                ),
                Format::Int8 => {
                    let (scale, block) = block.split_at(size_of::<f32>());
                    let scale = f32::from_le_bytes(scale.try_into().ok()?);
                    let value = |&x: &u8| E::from_f32(f32::from(x as i8) * scale);
                    rows.extend(block.iter().map(value));
                }
            }
        }
        Some((rows, rest))
    }
}

fn scale<E: Element>(block: &[E]) -> f32 {
    block.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max) / 127.0
}

fn quantize(x: f32, scale: f32) -> i8 {
    if scale == 0.0 { 0 } else { (x / scale).round() as i8 }
}

/// The smallest format in which no error exceeds the bound. Non-finite values never satisfy one.
fn smallest<E: Element>(block: &[E], bound: f32) -> Format {
    let within = |round_trip: &dyn Fn(f32) -> f32| {
        block.iter().all(|x| {
            let x = x.to_f32();
            (E::from_f32(round_trip(x)).to_f32() - x).abs() <= bound
        })
    };
    let scale = scale(block);
    if within(&|x| f32::from(quantize(x, scale)) * scale) {
        Format::Int8
    } else if E::TYPE == ElementType::F32 && within(&|x| bf16::from_f32(x).to_f32()) {
        Format::Bf16
    } else {
        Format::Exact
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use longspan_testing::largest_difference;

    use super::*;

    fn values<E: Element>(count: usize) -> Vec<E> {
        (0..count).map(|i| E::from_f32((i as f32 * 0.37).sin() * (1 + i % 5) as f32)).collect()
    }

    fn round_trip<E: Element + Pod>(wire: Wire, rows: &[E], extent: Extent) -> (usize, Vec<E>) {
        let mut bytes = Vec::new();
        wire.encode(rows, extent, &mut bytes);
        assert!(bytes.len() <= wire.len(extent, E::TYPE));
        assert!(wire.varies() || bytes.len() == wire.len(extent, E::TYPE));
        let len = bytes.len();
        bytes.push(7);
        let (back, rest) = wire.decode(&bytes, extent).unwrap();
        assert_eq!(rest, [7]);
        assert!(wire.decode::<E>(&bytes[..len - 1], extent).is_none());
        (len, back)
    }

    fn each<E: Element + Pod>() {
        let extent = Extent { heads: 3, tokens: 150, dim: 7 };
        let rows: Vec<E> = values(extent.elements());
        let off = |back: &[E]| {
            let wide = |list: &[E]| list.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
            largest_difference(&wide(&rows), &wide(back))
        };
        assert_eq!(round_trip(Wire::Exact, &rows, extent).1, rows);
        assert!(off(&round_trip(Wire::Bf16, &rows, extent).1) <= 5.0 / 256.0);
        // Half a quantization step, and the rounding of the result to its dtype.
        assert!(off(&round_trip(Wire::Int8, &rows, extent).1) <= 5.0 / 254.0 + 5.0 / 256.0);
        let mut before = usize::MAX;
        for bound in [0.0, 1e-3, 1e-2, 1e-1] {
            let (len, back) = round_trip(Wire::within(bound).unwrap(), &rows, extent);
            assert!(off(&back) <= f64::from(bound), "{bound}");
            assert!(len <= before);
            before = len;
        }
        let tags = 3 * 3;
        assert_eq!(before, Wire::Int8.len(extent, E::TYPE) + tags);
    }

    #[test]
    fn errors_are_within_their_bound() {
        each::<f32>();
        each::<bf16>();
        each::<f16>();
    }

    #[test]
    fn non_finite_values_are_kept() {
        let extent = Extent { heads: 1, tokens: 3, dim: 1 };
        let rows = [1.0_f32, f32::NAN, f32::INFINITY];
        for wire in [Wire::Exact, Wire::Bf16, Wire::within(10.0).unwrap()] {
            let (_, back) = round_trip(wire, &rows, extent);
            assert!(back[1].is_nan() && back[2] == f32::INFINITY, "{wire:?}");
        }
    }

    #[test]
    fn zeros_and_no_tokens() {
        let extent = Extent { heads: 2, tokens: 5, dim: 3 };
        assert_eq!(round_trip(Wire::Int8, &[0.0_f32; 30], extent).1, [0.0; 30]);
        let none = Extent { tokens: 0, ..extent };
        let mut bytes = Vec::new();
        Wire::within(0.1).unwrap().encode::<f32>(&[], none, &mut bytes);
        assert!(bytes.is_empty());
    }
}
