//! What a LongNet is made of.

use candle_core::{Result, bail};
use longspan::{Branch, Dilated, Heads, Overlap, Pattern};
use serde::{Deserialize, Serialize};

use super::{Either, Reach};
use crate::multihead::Positions;
use crate::sparse::SparseAttention;
use crate::tensor::foreign;

/// Sizes and choices of a LongNet; the defaults are the paper's base model.
///
/// As JSON it is a model's `config.json`: what is left out has its default, what isn't known is
/// refused.
///
/// ```
/// use longspan_candle::longnet::{AttentionConfig, Config};
///
/// let text = r#"{"hidden_size": 256, "num_attention_heads": 8, "attention": {"pattern": "window(512, 512)"}}"#;
/// let config: Config = serde_json::from_str(text).unwrap();
/// assert_eq!((config.hidden_size, config.num_hidden_layers), (256, 12));
/// assert!(matches!(config.attention, AttentionConfig::Pattern(_)));
/// assert!(serde_json::from_str::<Config>(r#"{"hidden": 256}"#).is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Ids of the language model; the encoder has none. The paper doesn't say; 256 are bytes.
    pub vocab_size: usize,
    /// Elements per token.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads, which divide the hidden size.
    pub num_attention_heads: usize,
    /// Elements per token inside feed-forward networks.
    pub intermediate_size: usize,
    /// What norms add to the variance.
    pub layer_norm_eps: f64,
    /// How heads know where tokens stand; the paper has XPOS.
    pub positions: Positions,
    /// Which queries attend to which keys.
    pub attention: AttentionConfig,
}

/// Which queries attend to which keys in a LongNet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionConfig {
    /// The paper's branches, the first segment with the first rate and so on.
    Dilated {
        /// Tokens per segment.
        segment_lengths: Vec<u64>,
        /// Distance between selected tokens.
        dilation_rates: Vec<u64>,
        /// One more branch, a pattern: see [`Dilated::also`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        also: Option<Pattern>,
        /// How branches that see the same key combine.
        #[serde(
            default,
            alias = "counting",
            skip_serializing_if = "is_paper",
            with = "OverlapName"
        )]
        overlap: Overlap,
    },
    /// A pattern in their place, or one per head.
    Pattern(Heads),
}

/// [`Overlap`] as Python spells it; the aliases are the names of earlier files.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Overlap", rename_all = "snake_case")]
enum OverlapName {
    #[serde(alias = "each branch")]
    Weighted,
    #[serde(alias = "once")]
    Union,
}

fn is_paper(overlap: &Overlap) -> bool {
    *overlap == Overlap::Weighted
}

impl AttentionConfig {
    /// The paper's branches, and nothing else.
    pub fn dilated(
        segment_lengths: impl Into<Vec<u64>>,
        dilation_rates: impl Into<Vec<u64>>,
    ) -> Self {
        AttentionConfig::Dilated {
            segment_lengths: segment_lengths.into(),
            dilation_rates: dilation_rates.into(),
            also: None,
            overlap: Overlap::Weighted,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            vocab_size: 256,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3_072,
            layer_norm_eps: 1e-5,
            positions: Positions::default(),
            attention: AttentionConfig::default(),
        }
    }
}

impl Default for AttentionConfig {
    fn default() -> Self {
        AttentionConfig::dilated([2_048, 4_096, 8_192, 16_384, 32_768], [1, 2, 4, 6, 12])
    }
}

impl Config {
    /// Refuses what no model can be made of, where nothing else would.
    pub(super) fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("intermediate_size", self.intermediate_size),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            bail!("{name} is 0, expected at least 1")
        }
        if !(self.layer_norm_eps.is_finite() && self.layer_norm_eps > 0.0) {
            bail!("layer_norm_eps is {}, expected a finite number over 0", self.layer_norm_eps)
        }
        if let AttentionConfig::Pattern(heads) = &self.attention
            && let Some(count) = heads.count()
            && count != self.num_attention_heads
        {
            bail!("patterns for {count} heads, expected {}", self.num_attention_heads)
        }
        Ok(())
    }
}

impl AttentionConfig {
    pub(super) fn make(&self, reach: Reach) -> Result<Either> {
        let cut = |pattern: &Pattern| match reach {
            Reach::Both => pattern.clone(),
            Reach::Causal => pattern.clone() & Pattern::causal(),
        };
        match self {
            AttentionConfig::Dilated { segment_lengths, dilation_rates, also, overlap } => {
                if segment_lengths.len() != dilation_rates.len() {
                    bail!(
                        "{} segment_lengths and {} dilation_rates, expected as many",
                        segment_lengths.len(),
                        dilation_rates.len()
                    )
                }
                let branches = segment_lengths
                    .iter()
                    .zip(dilation_rates)
                    .map(|(&segment, &rate)| Branch::new(segment, rate))
                    .collect::<longspan::Result<Vec<_>>>()
                    .map_err(foreign)?;
                let mut dilated = Dilated::new(branches)
                    .map_err(foreign)?
                    .within(cut(&Pattern::full()))
                    .overlap(*overlap);
                if let Some(also) = also {
                    dilated = dilated.also(also.clone());
                }
                Ok(Either::Dilated(dilated.into()))
            }
            AttentionConfig::Pattern(heads) => {
                let heads = match heads.count() {
                    None => heads.get(0, 1).map(&cut).map(Heads::from),
                    Some(count) => (0..count)
                        .map(|head| heads.get(head, count).map(&cut))
                        .collect::<std::result::Result<Vec<_>, _>>()
                        .and_then(Heads::each),
                };
                let sparse = SparseAttention::new(heads.map_err(foreign)?);
                Ok(Either::Pattern(Box::new(sparse)))
            }
        }
    }
}
