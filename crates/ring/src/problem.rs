//! What a ring computes: the same on every rank.

use longspan::{Dims, ElementType, Heads, Score};
use twox_hash::XxHash3_64;

use crate::shards::Shards;
use crate::wire::{Extent, Wire};

/// In which order keys are folded into the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fold {
    /// Others' keys as they come, own ones while nothing else can be worked on: what hides most of
    /// the transfers. The same bits for the same number of ranks.
    #[default]
    Overlapped,
    /// All keys in ascending order, in tiles of 64. Outputs and log-sum-exps then have the same bits
    /// for every number of ranks, one included; gradients haven't. Edges of shards have to be
    /// multiples of 64. Whole tiles travel, a rank waits for keys that stand before its own, and
    /// short tiles make kernels slower.
    Reproducible,
}

/// What a ring computes: the same on every rank.
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
    pub(crate) pattern: Heads,
    pub(crate) shards: Shards,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) element: ElementType,
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) wire: Wire,
    pub(crate) fold: Fold,
}

impl Problem {
    /// One batch entry and head of 64 f32 numbers, scores scaled by `1/√dim`; the rest is below.
    pub fn new(pattern: impl Into<Heads>, shards: Shards) -> Self {
        Problem {
            pattern: pattern.into(),
            shards,
            batch: 1,
            heads: 1,
            key_heads: 1,
            dim: 64,
            value_dim: 64,
            element: ElementType::F32,
            scale: None,
            score: Score::Plain,
            wire: Wire::Exact,
            fold: Fold::Overlapped,
        }
    }

    /// Batch entries.
    #[must_use]
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }

    /// Heads of queries, and of keys and values.
    #[must_use]
    pub fn heads(mut self, queries: usize, keys: usize) -> Self {
        (self.heads, self.key_heads) = (queries, keys);
        self
    }

    /// Numbers a head, of queries and keys, and of values.
    #[must_use]
    pub fn dims(mut self, keys: usize, values: usize) -> Self {
        (self.dim, self.value_dim) = (keys, values);
        self
    }

    /// What tensors hold.
    #[must_use]
    pub fn element(mut self, element: ElementType) -> Self {
        self.element = element;
        self
    }

    /// What scores are multiplied by.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// What is done to scores before the softmax.
    #[must_use]
    pub fn score(mut self, score: Score) -> Self {
        self.score = score;
        self
    }

    /// How keys and values travel.
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// In which order keys are folded into the results.
    #[must_use]
    pub fn fold(mut self, fold: Fold) -> Self {
        self.fold = fold;
        self
    }

    /// Which tokens each rank holds.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Bytes of one token's keys and values.
    pub(crate) fn key_bytes(&self) -> usize {
        self.batch * self.key_heads * (self.dim + self.value_dim) * self.element.size()
    }

    pub(crate) fn key_extent(&self, tokens: usize) -> Extent {
        Extent { heads: self.batch * self.key_heads, tokens, dim: self.dim }
    }

    pub(crate) fn value_extent(&self, tokens: usize) -> Extent {
        Extent { dim: self.value_dim, ..self.key_extent(tokens) }
    }

    /// Bytes of so many tokens' keys and values on their way, at most.
    pub(crate) fn keys_len(&self, tokens: usize) -> usize {
        let extents = [self.key_extent(tokens), self.value_extent(tokens)];
        extents.into_iter().map(|extent| self.wire.len(extent, self.element)).sum()
    }

    /// Bytes of the gradients of one token's keys and values.
    pub(crate) fn key_gradient_bytes(&self) -> usize {
        self.batch * self.key_heads * (self.dim + self.value_dim) * size_of::<f32>()
    }

    /// Bytes of one query on its way, and of its partial softmax on the way back.
    pub(crate) fn guest_bytes(&self) -> usize {
        self.query_bytes() + self.state_bytes()
    }

    pub(crate) fn query_bytes(&self) -> usize {
        self.batch * self.heads * self.dim * self.element.size()
    }

    pub(crate) fn state_bytes(&self) -> usize {
        self.batch * self.heads * (self.value_dim + 2) * size_of::<f32>()
    }

    /// Bytes of one query on its way in the backward pass: itself, its output's gradient, three
    /// numbers a row.
    pub(crate) fn arrived_bytes(&self) -> usize {
        let numbers = (self.dim + self.value_dim) * self.element.size();
        self.batch * self.heads * (numbers + 3 * size_of::<f32>())
    }

    pub(crate) fn query_gradient_bytes(&self) -> usize {
        self.batch * self.heads * self.dim * size_of::<f32>()
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

    /// Hashes of everything that ranks have to agree about, with names.
    pub(crate) fn digest(&self) -> [(&'static str, u64); 5] {
        let hash = |text: String| XxHash3_64::oneshot(text.as_bytes());
        let shape = (self.batch, self.heads, self.key_heads, self.dim, self.value_dim);
        let scale = self.scale.map(f32::to_bits);
        let slopes = match &self.score {
            Score::Alibi(slopes) => slopes.iter().map(|slope| slope.to_bits()).collect(),
            Score::Softcap(cap) => vec![cap.to_bits()],
            _ => Vec::new(),
        };
        let kind = std::mem::discriminant(&self.score);
        [
            ("Longspan's version", hash(env!("CARGO_PKG_VERSION").to_owned())),
            ("the pattern", hash(self.pattern.to_string())),
            ("the shards", hash(format!("{:?}", self.shards))),
            (
                "shapes, types and wire",
                hash(format!("{shape:?} {} {:?} {:?}", self.element, self.wire, self.fold)),
            ),
            ("scale and score", hash(format!("{scale:?} {kind:?} {slopes:?}"))),
        ]
    }
}
