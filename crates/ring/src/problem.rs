//! The problem that all ranks compute, equal on every rank. Every module of the pipeline reads it.

use std::sync::Arc;

use longspan::{Dims, Dropout, ElementType, Score};
use twox_hash::XxHash3_64;

use crate::error::Result;
use crate::shards::Shards;
use crate::sparsity::{Band, Sparsity};
use crate::wire::{Extent, Wire};

/// Order in which keys are reduced into the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Remote keys in order of arrival, local keys while nothing else is available: hides most of the
    /// transfers. Same bits for the same number of ranks.
    #[default]
    Overlapped,
    /// All keys in ascending order, in tiles of 64. Outputs and log-sum-exps then have the same bits
    /// for every number of ranks, including one; gradients do not. Edges of shards must be multiples
    /// of 64. Whole tiles are sent, a rank waits for keys that precede its own, and short tiles make
    /// kernels slower.
    Reproducible,
}

/// The problem that all ranks compute: what queries attend to, shards, shapes and dtype.
///
/// ```
/// use longspan::{ElementType, Heads};
/// use longspan_ring::{Problem, Shards};
///
/// let pattern: Heads = "causal & (window(512, 0) | sinks(4))".parse()?;
/// let shards = Shards::contiguous(100_000, 4, 1)?;
/// let problem = Problem::new(pattern, shards).heads(8, 2).dims(64, 64).element(ElementType::Bf16);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub(crate) sparsity: Sparsity,
    pub(crate) shards: Shards,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) element: ElementType,
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) dropout: Option<Dropout>,
    pub(crate) sink_logits: Option<Arc<[f32]>>,
    pub(crate) wire: Wire,
    pub(crate) reduction: Reduction,
}

impl Problem {
    /// One batch entry, one head, head dim 64, f32, scores scaled by `1/√dim`; the methods below set the
    /// rest.
    pub fn new(sparsity: impl Into<Sparsity>, shards: Shards) -> Self {
        Problem {
            sparsity: sparsity.into(),
            shards,
            batch: 1,
            heads: 1,
            key_heads: 1,
            dim: 64,
            value_dim: 64,
            element: ElementType::F32,
            scale: None,
            score: Score::default(),
            dropout: None,
            sink_logits: None,
            wire: Wire::Exact,
            reduction: Reduction::Overlapped,
        }
    }

    /// Sets the number of batch entries.
    #[must_use]
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }

    /// Sets the number of query heads, and of key and value heads.
    #[must_use]
    pub fn heads(mut self, queries: usize, keys: usize) -> Self {
        (self.heads, self.key_heads) = (queries, keys);
        self
    }

    /// Sets the head dim of queries and keys, and of values.
    #[must_use]
    pub fn dims(mut self, keys: usize, values: usize) -> Self {
        (self.dim, self.value_dim) = (keys, values);
        self
    }

    /// Sets the dtype of all tensors.
    #[must_use]
    pub fn element(mut self, element: ElementType) -> Self {
        self.element = element;
        self
    }

    /// Sets the factor of the scores.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets dropout of probabilities. Pairs are dropped by their global positions: the same ones for
    /// any number of ranks.
    #[must_use]
    pub fn dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Sets what is done to scores before the softmax.
    #[must_use]
    pub fn score(mut self, score: Score) -> Self {
        self.score = score;
        self
    }

    /// Sets the sink logits, one per query head: see [`longspan::Options::sink_logits`]. A sink
    /// counts once per row, on the rank of its query. [`Ring::set_sink_logits`](crate::Ring::set_sink_logits)
    /// changes them later.
    #[must_use]
    pub fn sink_logits(mut self, logits: impl Into<Arc<[f32]>>) -> Self {
        self.sink_logits = Some(logits.into());
        self
    }

    /// Sets the wire format of keys and values.
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Sets the order in which keys are reduced into the results.
    #[must_use]
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// The tokens of each rank.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Key heads that share a demand.
    pub(crate) fn bands(&self) -> Result<Vec<Band>> {
        self.sparsity.bands(self.heads, self.key_heads)
    }

    /// Bytes of one token's keys and values of a band in memory.
    pub(crate) fn key_bytes(&self, band: &Band) -> usize {
        self.batch * band.key_heads.len() * (self.dim + self.value_dim) * self.element.size()
    }

    pub(crate) fn key_extent(&self, band: &Band, tokens: usize) -> Extent {
        Extent { heads: self.batch * band.key_heads.len(), tokens, dim: self.dim }
    }

    pub(crate) fn value_extent(&self, band: &Band, tokens: usize) -> Extent {
        Extent { dim: self.value_dim, ..self.key_extent(band, tokens) }
    }

    /// Bytes of the keys and values of `tokens` tokens of a band on the wire, at most.
    pub(crate) fn keys_len(&self, band: &Band, tokens: usize) -> usize {
        let extents = [self.key_extent(band, tokens), self.value_extent(band, tokens)];
        extents.into_iter().map(|extent| self.wire.len(extent, self.element)).sum()
    }

    /// Bytes of the gradients of one token's keys and values of a band.
    pub(crate) fn key_gradient_bytes(&self, band: &Band) -> usize {
        self.batch * band.key_heads.len() * (self.dim + self.value_dim) * size_of::<f32>()
    }

    /// Bytes of one remote query of a band and of its returned partial softmax.
    pub(crate) fn remote_query_bytes(&self, band: &Band) -> usize {
        band.heads.len() * (self.query_bytes() + self.state_bytes())
    }

    /// Bytes of one query and head.
    pub(crate) fn query_bytes(&self) -> usize {
        self.batch * self.dim * self.element.size()
    }

    pub(crate) fn state_bytes(&self) -> usize {
        self.batch * (self.value_dim + 2) * size_of::<f32>()
    }

    /// Bytes of one remote query and head in the backward pass: q, dout, and three f32 per row.
    pub(crate) fn backward_query_bytes(&self) -> usize {
        let tensors = (self.dim + self.value_dim) * self.element.size();
        self.batch * (tensors + 3 * size_of::<f32>())
    }

    pub(crate) fn query_gradient_bytes(&self) -> usize {
        self.batch * self.dim * size_of::<f32>()
    }

    pub(crate) fn query_dims(&self, tokens: usize) -> Dims {
        Dims { batch: self.batch, tokens, heads: self.heads, dim: self.dim }
    }

    pub(crate) fn key_dims(&self, tokens: usize) -> Dims {
        Dims { heads: self.key_heads, ..self.query_dims(tokens) }
    }

    pub(crate) fn value_dims(&self, tokens: usize) -> Dims {
        Dims { dim: self.value_dim, ..self.key_dims(tokens) }
    }

    pub(crate) fn output_dims(&self, tokens: usize) -> Dims {
        Dims { dim: self.value_dim, ..self.query_dims(tokens) }
    }

    /// Everything that must be equal on all ranks.
    pub(crate) fn fields(&self) -> Vec<Field> {
        let field = |name, identity: String, value: String| Field {
            name,
            hash: XxHash3_64::oneshot(identity.as_bytes()),
            value,
        };
        let plain = |name, value: String| field(name, value.clone(), value);
        let scale = self.scale.map_or("1/√head_dim".to_owned(), |scale| scale.to_string());
        // Numbers are printed with as many digits as tell them apart.
        let sinks = self.sink_logits.as_deref();
        let sinks = sinks.map_or("none".to_owned(), |sinks| format!("{sinks:?}"));
        vec![
            plain("Longspan's version", env!("CARGO_PKG_VERSION").to_owned()),
            plain("pattern", self.sparsity.to_string()),
            plain("shards", format!("{:?}", self.shards)),
            plain("batch", self.batch.to_string()),
            plain("heads", self.heads.to_string()),
            plain("kv_heads", self.key_heads.to_string()),
            plain("head_dim", self.dim.to_string()),
            plain("value_dim", self.value_dim.to_string()),
            plain("dtype", self.element.to_string()),
            plain("wire", format!("{:?}", self.wire)),
            plain("reduction", format!("{:?}", self.reduction)),
            field("scale", format!("{:?}", self.scale.map(f32::to_bits)), scale),
            plain("score", format!("{:?}", self.score)),
            plain("dropout", format!("{:?}", self.dropout)),
            plain("sink_logits", sinks),
        ]
    }
}

/// A part of a problem, as ranks compare it.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) hash: u64,
    /// As errors print it.
    pub(crate) value: String,
}
