//! The text: bytes of files, the last of them for validation.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use longspan::splitmix64;

/// Bytes to learn from and bytes to validate with.
pub(crate) struct Text {
    bytes: Vec<u8>,
    learnt: usize,
    context: usize,
}

/// Ids, and what comes after each.
pub(crate) struct Batch {
    pub(crate) ids: Tensor,
    pub(crate) targets: Tensor,
}

impl Text {
    /// The files one after the other; of all of it the last `validation` bytes, and one that they
    /// predict, are for validation.
    pub(crate) fn read(
        files: &[impl AsRef<Path>],
        context: usize,
        validation: usize,
    ) -> Result<Self> {
        let mut bytes = Vec::new();
        for file in files {
            let file = file.as_ref();
            let more = std::fs::read(file).with_context(|| file.display().to_string())?;
            bytes.extend(more);
        }
        ensure!(
            validation > 0 && validation.is_multiple_of(context),
            "{validation} bytes for validation, expected a multiple of the context, {context}"
        );
        let least = validation + 1 + context + 1;
        ensure!(
            bytes.len() >= least,
            "{} bytes of text, expected at least {least}: {validation} for validation and {context} \
             to learn from",
            bytes.len()
        );
        let learnt = bytes.len() - validation - 1;
        Ok(Text { bytes, learnt, context })
    }

    /// What tells one text from another: its length, and FNV-1a of its bytes.
    pub(crate) fn name(&self) -> String {
        let hash = self.bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{} bytes, {hash:016x}", self.bytes.len())
    }

    /// The sequences of a step: random places, which follow from the seed and the step alone.
    pub(crate) fn batch(&self, seed: u64, step: usize, batch: usize) -> Result<Batch> {
        let places = (self.learnt - self.context) as u64;
        let start = |entry: usize| {
            let number = splitmix64(splitmix64(seed) ^ (step * batch + entry) as u64);
            (number % places) as usize
        };
        self.sequences((0..batch).map(start))
    }

    /// All of the validation text, a sequence at a time: whatever the context, the same bytes are
    /// predicted.
    pub(crate) fn validation(&self) -> impl Iterator<Item = Result<Batch>> + '_ {
        let all = self.learnt..self.bytes.len() - 1;
        all.step_by(self.context).map(|start| self.sequences([start].into_iter()))
    }

    fn sequences(&self, starts: impl ExactSizeIterator<Item = usize>) -> Result<Batch> {
        let count = starts.len();
        let (mut ids, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            let part = |range: Range<usize>| self.bytes[range].iter().map(|&byte| u32::from(byte));
            ids.extend(part(start..start + self.context));
            targets.extend(part(start + 1..start + self.context + 1));
        }
        let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (count, self.context), &Device::Cpu);
        Ok(Batch { ids: tensor(ids)?, targets: tensor(targets)? })
    }
}
