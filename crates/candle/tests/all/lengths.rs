//! Sequences of several lengths in one batch: results and gradients of one call per sequence, of the
//! attention and of whole models.

use std::ops::Range;

use crate::common::{compare, random};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarMap};
use longspan_candle::longnet::{AttentionConfig, Config, LongNetEncoder, LongNetLM};
use longspan_candle::longspan::{Branch, Dilated, Pattern};
use longspan_candle::{DilatedAttention, Lengths, MultiheadDilatedAttention, seeded};

/// Matrix products of other sizes round otherwise, relative to the largest element: three times 1.7e-6, within which
/// all results here are.
const NEAR: f64 = 5e-6;

fn attention() -> DilatedAttention {
    let branches = [(16, 1), (40, 3), (90, 4)].map(|(w, r)| Branch::new(w, r).unwrap());
    let dilated = Dilated::new(branches).unwrap().within(Pattern::causal());
    dilated.also(Pattern::sliding_window(5).unwrap()).into()
}

/// Batch entries and tokens of each sequence.
type Sequences = Vec<(usize, Range<usize>)>;

fn lengths() -> [(Lengths, (usize, usize), Sequences); 2] {
    let valid = vec![0..75, 30..101, 13..14, 7..60];
    let entries = valid.iter().cloned().enumerate().collect();
    let bounds = vec![0_u64, 33, 33, 34, 101];
    let packed = bounds.windows(2).map(|ends| (0, ends[0] as usize..ends[1] as usize)).collect();
    [(Lengths::Padded(valid), (4, 101), entries), (Lengths::Packed(bounds), (1, 101), packed)]
}

/// Tokens of a batch entry, along an axis.
fn part(x: &Tensor, axis: usize, entry: usize, range: &Range<usize>) -> Result<Tensor> {
    x.narrow(0, entry, 1)?.narrow(axis, range.start, range.len())
}

#[test]
fn attention_within_sequences() -> Result<()> {
    let attention = attention();
    for (lengths, (batch, tokens), sequences) in lengths() {
        let make = |seed, heads| Var::from_tensor(&random(seed, (batch, heads, tokens, 16))?);
        let inputs = [make(1, 4)?, make(2, 2)?, make(3, 2)?];
        let [q, k, v] = &inputs;
        let out = match &lengths {
            Lengths::Padded(valid) => attention.forward_padded(q, k, v, valid)?,
            Lengths::Packed(bounds) => attention.forward_packed(q, k, v, bounds, bounds)?,
            Lengths::Whole => unreachable!("not here"),
        };
        let weights = random(4, (batch, 4, tokens, 16))?;
        let found = (&out * &weights)?.sum_all()?.backward()?;
        let mut rows = 0;
        for (entry, range) in sequences {
            let own = |x: &Tensor| part(x, 2, entry, &range);
            let parts = [own(q)?, own(k)?, own(v)?].map(|x| Var::from_tensor(&x).unwrap());
            let one = attention.forward(&parts[0], &parts[1], &parts[2])?;
            compare("out", &own(&out)?, &one, NEAR);
            let expected = (one * own(&weights)?)?.sum_all()?.backward()?;
            for (input, part) in inputs.iter().zip(&parts) {
                let found = own(found.get(input).expect("a gradient"))?;
                compare("gradient", &found, expected.get(part).expect("a gradient"), NEAR);
            }
            rows += range.len();
        }
        // Rows outside of sequences, and only they, are zero.
        let sums = out.abs()?.sum(3)?.sum(1)?.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(sums.iter().filter(|sum| **sum != 0.0).count(), rows);
    }
    Ok(())
}

fn config() -> Config {
    Config {
        hidden_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        intermediate_size: 48,
        attention: AttentionConfig::dilated([16, 40, 90], [1, 3, 4]),
        ..Config::default()
    }
}

/// Logits, and gradients of all weights: rotary positions count from the first token too.
#[test]
fn models_within_sequences() -> Result<()> {
    let vars = VarMap::new();
    let model = LongNetLM::new(&config(), seeded(&vars, 3, DType::F32))?;
    for (lengths, (batch, tokens), sequences) in lengths() {
        let ids: Vec<u32> = (0..batch * tokens).map(|i| (i * i % 251) as u32).collect();
        let ids = Tensor::from_vec(ids, (batch, tokens), &Device::Cpu)?;
        let weights = random(5, (1, batch, tokens, 256))?.squeeze(0)?;
        let logits = model.forward_lengths(&ids, &lengths)?;
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let mut expected = loss.clone();
        for (entry, range) in sequences.into_iter().filter(|(_, range)| !range.is_empty()) {
            let own = |x: &Tensor| part(x, 1, entry, &range);
            let one = model.forward(&own(&ids)?)?;
            compare("logits", &own(&logits)?, &one, 4.0 * NEAR);
            loss = (loss + (own(&logits)? * own(&weights)?)?.sum_all()?)?;
            expected = (expected + (one * own(&weights)?)?.sum_all()?)?;
        }
        let (found, expected) = (loss.backward()?, expected.backward()?);
        for var in vars.all_vars() {
            let (found, expected) = (found.get(&var), expected.get(&var));
            compare("weights", found.expect("one"), expected.expect("a gradient"), NEAR);
        }
    }
    Ok(())
}

/// An encoder, and a layer with a pattern in place of branches.
#[test]
fn encoders_within_sequences() -> Result<()> {
    for attention in [config().attention, AttentionConfig::Pattern("window(9, 4)".parse().unwrap())]
    {
        let config = Config { attention, ..config() };
        let encoder = LongNetEncoder::new(&config, seeded(&VarMap::new(), 3, DType::F32))?;
        for (lengths, (batch, tokens), sequences) in lengths() {
            let x = random(6, (1, batch, tokens, 32))?.squeeze(0)?;
            let y = encoder.forward_lengths(&x, &lengths)?;
            for (entry, range) in sequences.into_iter().filter(|(_, range)| !range.is_empty()) {
                let one = encoder.forward(&part(&x, 1, entry, &range)?)?;
                compare("encoder", &part(&y, 1, entry, &range)?, &one, 4.0 * NEAR);
            }
        }
    }
    Ok(())
}

#[test]
fn wrong_lengths_are_errors() -> Result<()> {
    let layer = MultiheadDilatedAttention::new(
        &longspan_candle::MultiheadConfig::magneto(32, 4, 2),
        attention(),
        seeded(&VarMap::new(), 3, DType::F32),
    )?;
    let x = random(6, (1, 2, 50, 32))?.squeeze(0)?;
    let message = |lengths| layer.forward_lengths(&x, &lengths).unwrap_err().to_string();
    let refused = |lengths, expected: &str| {
        let message = message(lengths);
        assert!(message.starts_with(expected), "{message}");
    };
    let valid = Lengths::Padded(std::iter::once(0..50).collect());
    refused(valid, "lengths of 1 batch entries, expected 2 as the tokens");
    let outside = Lengths::Padded(vec![0..50, 3..51]);
    refused(outside, "a sequence of tokens 3..51, expected an ascending range of 50");
    refused(Lengths::Packed(vec![0, 50]), "lengths of 1 batch entries, expected 2");
    let one = x.narrow(0, 0, 1)?;
    let message = |bounds| layer.forward_lengths(&one, &Lengths::Packed(bounds)).unwrap_err();
    assert!(message(vec![0, 49]).to_string().contains("expected 50 (the tokens of q)"));
    assert!(message(vec![1, 50]).to_string().contains("ascending from 0 on"));
    Ok(())
}
