//! Random cases of attention: a random layout case and a random draw for every other axis.

use super::{AttentionCase, Axes, Table};
use crate::case::Case;
use crate::rule::Rule;
use crate::splitmix::element;

/// Head dims: those that models have, and those that no vector divides.
const DIMS: [usize; 16] = [1, 2, 3, 7, 8, 15, 16, 17, 24, 33, 40, 64, 65, 80, 96, 128];

/// The most scores times head dim a random case has, so that an oracle takes milliseconds.
const MOST_WORK: usize = 24_000_000;

impl AttentionCase {
    /// The case of a seed: the same on every machine. Every kind of pattern, map, offset and block
    /// size turns up, and every pair of the other axes does within a few hundred seeds.
    pub fn from_seed(seed: u64) -> AttentionCase {
        let mut drawn = 0;
        let mut draw = |choices: usize| {
            drawn += 1;
            (element(seed ^ 0xA77E, drawn) % choices as u64) as usize
        };
        let layout = Case { rows: None, key_padding: None, ..Case::seeded(seed, false) };
        let tokens_k = layout.tokens_k;
        let mut case = AttentionCase::new(format!("seed {seed}"), layout.rule.clone(), 0);
        case.layout = layout;
        case.dim_k = DIMS[draw(DIMS.len())];
        case.dim_v = if draw(2) == 0 { case.dim_k } else { DIMS[draw(DIMS.len())] };
        case.heads_kv = 1 + draw(3);
        case.heads_q = case.heads_kv * [1, 1, 2, 3, 8][draw(5)];
        case.batch = [1, 1, 2, 3][draw(4)];
        if draw(4) == 0 {
            case.padding = (0..case.batch)
                .map(|_| {
                    let end = |n: usize| n % (tokens_k as usize + 1);
                    let (a, b) = (end(draw(1 << 20)), end(draw(1 << 20)));
                    a.min(b)..a.max(b)
                })
                .collect();
        }
        case.axes = [Axes::TokenHead, Axes::HeadToken][draw(2)];
        case.scale = [None, None, Some(0.5), Some(-0.1)][draw(4)];
        let plain = draw(2) == 0;
        if !plain && draw(3) == 0 {
            case.transform.softcap = Some([0.7, 5.0, 50.0][draw(3)]);
        }
        if !plain && draw(2) == 0 && case.layout.rule.sequences().is_some() {
            let slopes = (0..case.heads_q).map(|h| 0.5_f32.powi(h as i32 + 1));
            case.transform.slopes = slopes.collect();
        }
        if !plain && draw(2) == 0 && case.layout.rule.sequences().is_some() {
            let reach = [0, 1, 5, 33, 200];
            let (left, right) = (reach[draw(5)], reach[draw(5)]);
            case.transform.table = Some(Table::normal(case.heads_q, left, right, seed));
        }
        if !plain && draw(3) == 0 {
            case.transform.dropout = Some(([0.1, 0.5, 0.9][draw(3)], seed));
        }
        case.lse_gradient = draw(3) == 0;
        let logits = [-3.0, 0.0, 0.5, 2.0, 7.5, f32::NEG_INFINITY];
        case.sink_logits =
            (draw(4) == 0).then(|| (0..case.heads_q).map(|_| logits[draw(logits.len())]).collect());
        case.seed = seed;
        case.fewer_heads();
        case
    }

    /// A small case of a seed, most of them with several additions: an oracle takes microseconds.
    pub fn small(seed: u64) -> AttentionCase {
        let mut drawn = 0;
        let mut draw = |choices: usize| {
            drawn += 1;
            (element(seed ^ 0x5A11, drawn) % choices as u64) as usize
        };
        let (tokens_q, tokens_k) = (1 + draw(40), 1 + draw(70));
        let rule = match draw(5) {
            0 => Rule::Full,
            1 => Rule::Causal,
            2 => Rule::Window { left: draw(20) as u64, right: draw(6) as u64 },
            3 => Rule::Or(vec![Rule::Strided { stride: 3 }, Rule::Sinks { n: 2 }]),
            _ => {
                let (q, k) = (draw(tokens_q + 1) as u64, draw(tokens_k + 1) as u64);
                Rule::Packed {
                    queries: vec![q, tokens_q as u64 - q],
                    keys: vec![k, tokens_k as u64 - k],
                    inner: Box::new(if draw(2) == 0 { Rule::Full } else { Rule::Causal }),
                }
            }
        };
        let mut case = AttentionCase::new(format!("small {seed}"), rule, tokens_k as u64);
        case.layout.tokens_q = tokens_q as u64;
        case.layout.block = [16, 32, 64][draw(3)];
        (case.dim_k, case.dim_v) = (1 + draw(20), 1 + draw(20));
        case.heads_kv = 1 + draw(2);
        case.heads_q = case.heads_kv * (1 + draw(3));
        case.batch = 1 + draw(2);
        case.axes = [Axes::TokenHead, Axes::HeadToken][draw(2)];
        if draw(2) == 0 {
            case.transform.softcap = Some([0.7, 5.0][draw(2)]);
        }
        if draw(2) == 0 {
            case.transform.slopes = (0..case.heads_q).map(|head| 0.1 * head as f32).collect();
        }
        if draw(2) == 0 {
            let (left, right) = (draw(30), draw(30));
            case.transform.table = Some(Table::normal(case.heads_q, left, right, seed));
        }
        if draw(2) == 0 {
            case.transform.dropout = Some(([0.1, 0.5, 0.9][draw(3)], seed));
        }
        case.sink_logits = (draw(2) == 0).then(|| (0..case.heads_q).map(|h| h as f32).collect());
        case.lse_gradient = draw(2) == 0;
        case.seed = seed;
        case
    }

    /// Takes sequences, then groups, then key heads away until the case is small enough.
    fn fewer_heads(&mut self) {
        let sizes = self.sizes();
        let work = sizes.tokens_q * sizes.tokens_k * (self.dim_k + self.dim_v);
        while work * self.batch * self.heads_q > MOST_WORK {
            if self.batch > 1 {
                self.batch -= 1;
                self.padding.truncate(self.batch);
            } else if self.heads_q > self.heads_kv {
                self.heads_q -= self.heads_kv;
            } else if self.heads_kv > 1 {
                (self.heads_kv, self.heads_q) = (1, 1);
            } else {
                break;
            }
        }
        self.transform.slopes.truncate(self.heads_q);
        if let Some(Table { values, left, right }) = &mut self.transform.table {
            values.truncate(self.heads_q * (*left + *right + 1));
        }
        if let Some(logits) = &mut self.sink_logits {
            logits.truncate(self.heads_q);
        }
    }
}
