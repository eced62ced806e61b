//! A named case of attention: what a layout is compiled for, and the axes that a layout hasn't.

use std::fmt::{Display, Formatter};
use std::ops::Range;

use super::{Problem, Sample, Seen, Sizes, Transform, normals};
use crate::case::Case;
use crate::rule::Rule;

/// The order of a tensor's axes in memory, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// `[batch, token, head, dim]`.
    TokenHead,
    /// `[batch, head, token, dim]`.
    HeadToken,
}

/// One case of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCase {
    /// What to call it.
    pub name: String,
    /// Rule, lengths, offsets, maps and block size. Its rule is that of every head unless
    /// `per_head` says otherwise; `rows` and `key_padding` are left out.
    pub layout: Case,
    /// One rule per query head; empty where they share the layout's.
    pub per_head: Vec<Rule>,
    /// Numbers of the keys that are not padding, one range per batch entry; empty without padding.
    pub padding: Vec<Range<usize>>,
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Heads of keys and values.
    pub heads_kv: usize,
    /// Numbers of a query and of a key.
    pub dim_k: usize,
    /// Numbers of a value.
    pub dim_v: usize,
    /// Order of the axes of all tensors.
    pub axes: Axes,
    /// What scores are multiplied by; `1/√dim_k` where left out.
    pub scale: Option<f32>,
    /// What is done to scores.
    pub transform: Transform,
    /// A sink logit per query head.
    pub sink_logits: Option<Vec<f32>>,
    /// Whether a gradient arrives at the log-sum-exp too.
    pub lse_gradient: bool,
    /// Which tokens are compared.
    pub sample: Sample,
    /// Where the numbers come from.
    pub seed: u64,
}

impl AttentionCase {
    /// A rule over as many queries as keys, one sequence, two heads of 32 numbers.
    pub fn new(name: impl Into<String>, rule: Rule, tokens: u64) -> AttentionCase {
        AttentionCase {
            name: name.into(),
            layout: Case {
                rule,
                tokens_q: tokens,
                tokens_k: tokens,
                query_offset: None,
                key_offset: None,
                block: 64,
                rows: None,
                query_map: None,
                key_map: None,
                key_padding: None,
                mask_bytes: None,
            },
            per_head: vec![],
            padding: vec![],
            batch: 1,
            heads_q: 2,
            heads_kv: 2,
            dim_k: 32,
            dim_v: 32,
            axes: Axes::TokenHead,
            scale: None,
            transform: Transform::default(),
            sink_logits: None,
            lse_gradient: false,
            sample: Sample::ALL,
            seed: 1,
        }
    }

    /// The text of the patterns: one, or `heads([…])`.
    pub fn pattern_text(&self) -> String {
        if self.per_head.is_empty() {
            return self.layout.rule.to_string();
        }
        let rules: Vec<String> = self.per_head.iter().map(ToString::to_string).collect();
        format!("heads([{}])", rules.join(", "))
    }

    /// Sizes of all axes.
    pub fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch,
            tokens_q: self.layout.query_positions().len(),
            tokens_k: self.layout.key_positions().len(),
            heads_q: self.heads_q,
            heads_kv: self.heads_kv,
            dim_k: self.dim_k,
            dim_v: self.dim_v,
        }
    }

    /// Unit-normal numbers and everything that the definition needs to know.
    pub fn problem(&self) -> Problem {
        let mut problem = self.unmasked();
        problem.seen = self.seen(&problem.query_positions, &problem.key_positions);
        problem
    }

    /// The same numbers with everything seen, for those who need no truth: asking a rule about
    /// every pair takes longer than most kernels do.
    pub fn unmasked(&self) -> Problem {
        let sizes = self.sizes();
        let mut problem = Problem::normal(sizes, self.seed);
        let default = problem.scale;
        problem.scale = self.scale.map_or(default, f64::from);
        problem.transform = self.transform.clone();
        problem.sink_logits = self.sink_logits.clone();
        let (queries, keys) = (self.layout.query_positions(), self.layout.key_positions());
        if self.transform.has_distances() {
            let within = |rule: &Rule| {
                let sequences = rule.sequences().expect("a pattern with distances");
                let queries = queries.iter().map(|&query| sequences.query(query)).collect();
                [queries, keys.iter().map(|&key| sequences.key(key)).collect()]
            };
            problem.score_positions = self.rules().iter().map(within).collect();
        }
        (problem.query_positions, problem.key_positions) = (queries, keys);
        problem.dlse = self.lse_gradient.then(|| normals(self.seed ^ 0xD15E, sizes.rows()));
        // Far keys have large scores where they are biased by distance.
        let biased = self.transform.has_distances();
        problem.unit_scale = problem.scale.abs() <= default && !biased;
        problem
    }

    /// One rule for all heads, or one each.
    fn rules(&self) -> &[Rule] {
        if self.per_head.is_empty() {
            std::slice::from_ref(&self.layout.rule)
        } else {
            &self.per_head[..]
        }
    }

    fn seen(&self, queries: &[i64], keys: &[i64]) -> Seen {
        let rules = self.rules();
        let origin = self.layout.key_origin();
        let valid = |entry: usize, key: i64| {
            let number = usize::try_from(key - origin);
            self.padding.is_empty() || number.is_ok_and(|n| self.padding[entry].contains(&n))
        };
        let entries = if self.padding.is_empty() { 1 } else { self.padding.len() };
        let which = |entry, head| (entry % entries) * rules.len() + head % rules.len();
        Seen::each((self.batch, self.heads_q), (queries.len(), keys.len()), which, |n, i, j| {
            valid(n / rules.len(), keys[j]) && rules[n % rules.len()].allows(queries[i], keys[j])
        })
    }
}

impl Display for AttentionCase {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Case { tokens_q, tokens_k, block, .. } = self.layout;
        write!(f, "{}: {}", self.name, self.pattern_text())?;
        write!(f, " on {tokens_q} x {tokens_k}, block {block}, batch {}", self.batch)?;
        write!(f, ", heads {} of {}", self.heads_q, self.heads_kv)?;
        write!(f, ", dims {} and {}, {:?}", self.dim_k, self.dim_v, self.axes)?;
        if self.layout.query_offset.is_some() || self.layout.key_offset.is_some() {
            write!(f, ", offsets {}", self.layout.query_origin())?;
            write!(f, " and {}", self.layout.key_origin())?;
        }
        for (what, map) in
            [("query_map", &self.layout.query_map), ("key_map", &self.layout.key_map)]
        {
            if let Some(map) = map {
                let steps: Vec<String> = map.iter().map(ToString::to_string).collect();
                write!(f, ", {what} [{}]", steps.join(", "))?;
            }
        }
        if !self.padding.is_empty() {
            write!(f, ", key_padding {:?}", self.padding)?;
        }
        if let Some(scale) = self.scale {
            write!(f, ", scale {scale}")?;
        }
        if self.transform != Transform::default() {
            write!(f, ", {:?}", self.transform)?;
        }
        if let Some(logits) = &self.sink_logits {
            write!(f, ", sinks {logits:?}")?;
        }
        if self.lse_gradient {
            write!(f, ", with dlse")?;
        }
        write!(f, ", seed {}", self.seed)
    }
}
