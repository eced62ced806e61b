//! Sequences of several lengths in one batch.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

/// Which tokens of a batch are one sequence.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarMap;
/// use longspan_candle::longnet::{Config, LongNetLM};
/// use longspan_candle::{Lengths, seeded};
///
/// let config = Config {
///     hidden_size: 32,
///     num_hidden_layers: 1,
///     num_attention_heads: 4,
///     intermediate_size: 64,
///     ..Config::default()
/// };
/// let model = LongNetLM::new(&config, seeded(&VarMap::new(), 1, DType::F32))?;
/// // Two texts of 17 and 12 bytes, side by side.
/// let ids = Tensor::new(&b"Attention, pleaseto all of it"[..], &Device::Cpu)?.unsqueeze(0)?;
/// let packed = Lengths::Packed(vec![0, 17, 29]);
/// let logits = model.forward_lengths(&ids, &packed)?;
/// assert_eq!(logits.dims(), [1, 29, 256]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Lengths {
    /// Every batch entry is one, with all its tokens.
    #[default]
    Whole,
    /// The valid tokens of each batch entry; the others are padding.
    Padded(Vec<Range<usize>>),
    /// Several side by side in one batch entry, from each of these tokens to the next: `cu_seqlens`.
    Packed(Vec<u64>),
}

impl Lengths {
    /// The position of each token in its sequence, `[batch, token]`, that of padding 0; none where
    /// positions are the numbers of tokens.
    pub(crate) fn positions(&self, batch: usize, tokens: usize) -> Result<Option<Arc<[usize]>>> {
        let ranges: Vec<Vec<Range<usize>>> = match self {
            Lengths::Whole => return Ok(None),
            Lengths::Padded(valid) => valid.iter().map(|valid| vec![valid.clone()]).collect(),
            Lengths::Packed(bounds) => {
                let range = |bounds: &[u64]| bounds[0] as usize..bounds[1] as usize;
                vec![bounds.windows(2).map(range).collect()]
            }
        };
        if ranges.len() != batch {
            bail!("lengths of {} batch entries, expected {batch} as the tokens", ranges.len())
        }
        let mut positions = vec![0; batch * tokens];
        for (ranges, positions) in ranges.into_iter().zip(positions.chunks_mut(tokens.max(1))) {
            for range in ranges {
                if range.start > range.end || range.end > tokens {
                    bail!("a sequence of tokens {range:?}, expected an ascending range of {tokens}")
                }
                positions[range].iter_mut().enumerate().for_each(|(token, at)| *at = token);
            }
        }
        Ok(Some(positions.into()))
    }
}
