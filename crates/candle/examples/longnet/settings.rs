//! What a training can be told, and what follows from it.

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use longspan_candle::longnet::{AttentionConfig, Config};
use longspan_candle::longspan::{Layout, Overlap, Pattern, Shape};
use serde::Serialize;

/// Tokens that windows see, themselves included.
const WINDOW: u64 = 1_024;

/// The first branch has segments of so many tokens at most: what it costs mustn't grow with the
/// context.
const NEAREST: u64 = 1_024;

/// Rates double from branch to branch up to this.
const MOST_RATE: u64 = 8;

/// Which queries attend to which keys; causal all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Attention {
    /// Every token that came before.
    Dense,
    /// The last ones.
    Window,
    /// LongNet's branches.
    Dilated,
    /// LongNet's branches and the last ones, each key once.
    DilatedWindow,
}

/// Everything that the curve depends on, beside the text.
#[derive(Debug, Clone, Args, Serialize)]
pub(crate) struct Settings {
    /// Which queries attend to which keys
    #[arg(long, value_enum, default_value = "dilated")]
    pub(crate) attention: Attention,
    /// Bytes per sequence
    #[arg(long, default_value_t = 16_384)]
    pub(crate) context: usize,
    /// Sequences a step
    #[arg(long, default_value_t = 1)]
    pub(crate) batch: usize,
    /// Elements per token
    #[arg(long, default_value_t = 256)]
    pub(crate) hidden: usize,
    /// Layers
    #[arg(long, default_value_t = 4)]
    pub(crate) layers: usize,
    /// Heads
    #[arg(long, default_value_t = 8)]
    pub(crate) heads: usize,
    /// Bytes that a window sees, with `window` and `dilated-window` [default: 1024]
    #[arg(long)]
    pub(crate) window: Option<u64>,
    /// Segments of the branches, with `dilated` and `dilated-window` [default: 1024, or a 16th of the
    /// context, then twice as long each, up to the context]
    #[arg(long, value_delimiter = ',', requires = "rates")]
    pub(crate) segments: Option<Vec<u64>>,
    /// Rates of the branches [default: 1, 2, 4, 8, 8, … as far as there are heads]
    #[arg(long, value_delimiter = ',', requires = "segments")]
    pub(crate) rates: Option<Vec<u64>>,
    /// Steps to take
    #[arg(long, required_unless_present = "budget", conflicts_with = "budget")]
    pub(crate) steps: Option<usize>,
    /// Floating-point operations to spend, in place of a number of steps
    #[arg(long)]
    pub(crate) budget: Option<f64>,
    /// The learning rate, once it is warm; it falls to a tenth
    #[arg(long, default_value_t = 2e-3)]
    pub(crate) rate: f64,
    /// Steps until it is
    #[arg(long, default_value_t = 20)]
    pub(crate) warmup: usize,
    /// Bytes at the end of the text to validate with, a multiple of the context
    #[arg(long, default_value_t = 262_144)]
    pub(crate) validation: usize,
    /// Steps between validations; there is one after the last step
    #[arg(long, default_value_t = 50)]
    pub(crate) validate_every: usize,
    /// What weights and places in the text are drawn with
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl Settings {
    /// The model's.
    pub(crate) fn config(&self) -> Result<Config> {
        ensure!(self.context > 0 && self.batch > 0, "a context and a batch of at least 1");
        ensure!(self.validate_every > 0, "validations at least 1 step apart");
        Ok(Config {
            vocab_size: 256,
            hidden_size: self.hidden,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            intermediate_size: 4 * self.hidden,
            attention: self.attention()?,
            ..Config::default()
        })
    }

    fn attention(&self) -> Result<AttentionConfig> {
        use Attention::{Dense, Dilated, DilatedWindow, Window};
        if self.window.is_some() && matches!(self.attention, Dense | Dilated) {
            bail!("--window with an attention that has none: expected window or dilated-window")
        }
        if self.segments.is_some() && matches!(self.attention, Dense | Window) {
            bail!("--segments with an attention that has none: expected dilated or dilated-window")
        }
        let window = || Pattern::sliding_window(self.window.unwrap_or(WINDOW));
        let dilated = |also, overlap| -> Result<AttentionConfig> {
            let (segment_lengths, dilation_rates) = self.branches()?.into_iter().unzip();
            Ok(AttentionConfig::Dilated { segment_lengths, dilation_rates, also, overlap })
        };
        Ok(match self.attention {
            Dense => AttentionConfig::Pattern(Pattern::full().into()),
            Window => AttentionConfig::Pattern(window()?.into()),
            Dilated => dilated(None, Overlap::Weighted)?,
            DilatedWindow => dilated(Some(window()?), Overlap::Union)?,
        })
    }

    /// Segments and rates.
    fn branches(&self) -> Result<Vec<(u64, u64)>> {
        if let (Some(segments), Some(rates)) = (&self.segments, &self.rates) {
            ensure!(
                segments.len() == rates.len(),
                "{} segments and {} rates, expected as many",
                segments.len(),
                rates.len()
            );
            return Ok(segments.iter().copied().zip(rates.iter().copied()).collect());
        }
        let context = self.context as u64;
        let first = (context / 16).clamp(1, NEAREST);
        let longer = std::iter::successors(Some(first), |segment| {
            (*segment < context).then(|| (2 * segment).min(context))
        });
        // With more rate than heads there would be tokens that no head has.
        let most = MOST_RATE.min(self.heads as u64);
        let rate = |branch: usize| most.min(1 << branch.min(63));
        Ok(longer.enumerate().map(|(branch, segment)| (segment, rate(branch))).collect())
    }

    /// Floating-point operations of a step: products alone, of weights (2 a weight and token forward,
    /// 4 backward) and of pairs that see each other (2 and 5 products).
    pub(crate) fn flops(&self, config: &Config) -> Result<f64> {
        let (h, f) = (config.hidden_size as f64, config.intermediate_size as f64);
        let layers = config.num_hidden_layers as f64;
        let weights = layers * (4.0 * h * h + 2.0 * h * f) + config.vocab_size as f64 * h;
        let tokens = (self.context * self.batch) as f64;
        let shape = Shape::new(self.context, self.context);
        let pairs = |pattern: Pattern| -> Result<u128> {
            let layout = Layout::compile(&(pattern & Pattern::causal()), &shape)?;
            Ok(layout.counts()?.active_pairs)
        };
        let mut seen = 0;
        for head in 0..config.num_attention_heads {
            seen += match &config.attention {
                AttentionConfig::Pattern(heads) => {
                    pairs(heads.get(head, config.num_attention_heads)?.clone())?
                }
                AttentionConfig::Dilated { segment_lengths, dilation_rates, also, overlap } => {
                    let branches = segment_lengths.iter().zip(dilation_rates);
                    let mut each = branches
                        .map(|(&segment, &rate)| {
                            Pattern::dilated(segment, rate, head as u64 % rate)
                        })
                        .chain(also.clone().map(Ok))
                        .collect::<Result<Vec<_>, _>>()?;
                    if *overlap == Overlap::Union {
                        each = each.into_iter().reduce(|all, one| all | one).into_iter().collect();
                    }
                    each.into_iter().map(pairs).sum::<Result<u128>>()?
                }
            };
        }
        let dim = h / config.num_attention_heads as f64;
        let attention = layers * self.batch as f64 * seen as f64 * 7.0 * 2.0 * dim;
        Ok(6.0 * weights * tokens + attention)
    }

    /// Steps to take, for steps of so many operations.
    pub(crate) fn total(&self, flops: f64) -> Result<usize> {
        let steps = match (self.steps, self.budget) {
            (Some(steps), None) => steps,
            (None, Some(budget)) => (budget / flops) as usize,
            _ => bail!("expected either steps or a budget"),
        };
        ensure!(steps > 0, "no step to take: a step costs {flops:.3e} operations");
        Ok(steps)
    }

    /// The learning rate of a step: up in a line, down in a cosine to a tenth.
    pub(crate) fn rate(&self, step: usize, total: usize) -> f64 {
        if step < self.warmup {
            return self.rate * (step + 1) as f64 / self.warmup as f64;
        }
        let done = (step - self.warmup) as f64 / (total - self.warmup).max(1) as f64;
        self.rate * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
    }
}
