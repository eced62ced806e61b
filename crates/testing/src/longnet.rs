//! LongNet's dilated attention as the paper writes it (arXiv 2307.02486), branch by branch in `f64`.
//!
//! For a branch of segment `w` and rate `r`, head `h` and its offset `s = h mod r`, segment `i` has
//! the tokens `i·w + s, i·w + s + r, …` before its end:
//!
//! ```text
//! Q̃_i, K̃_i, Ṽ_i = rows i·w + s, i·w + s + r, …         sparsify   (3–5; offsets: 11 on)
//! Õ_i = softmax(Q̃_i K̃_iᵀ) Ṽ_i                          attend     (6)
//! O|b = Õ_i's rows back in their places, 0 elsewhere    scatter    (7, 8)
//! O   = Σ_b α_b O|b,   α_b = s_b / Σ_c s_c              mix        (9, 10)
//! ```
//!
//! with `s_b` the denominator of the branch's softmax. Gradients go through the mixing: with
//! `lse_b = ln s_b`, what arrives at a branch's output is `α_b dO`, and at its log-sum-exp
//! `α_b (dO · O|b − dO · O + dlse)`.
//!
//! [`LongNet::seen`] says the same in another way, as lists of keys in which one that two branches
//! have stands twice; with it [`truth`](crate::truth) and [`Measure`](crate::Measure) serve here
//! too. That both agree is a test of each.

use std::ops::Range;

use crate::attention::{Problem, Seen, Sizes, Transform, Values};
use crate::rule::Rule;

/// Branches, and what they are cut with.
#[derive(Clone, Debug, PartialEq)]
pub struct LongNet {
    /// Segment length and rate of each branch.
    pub branches: Vec<(i64, i64)>,
    /// What else a query may see.
    pub within: Rule,
    /// What queries see besides, as one more branch.
    pub also: Option<Rule>,
    /// Whether a key that several branches have counts once.
    pub once: bool,
}

/// One sequence of a batch entry: its queries and keys in the tensors, and the position of the first
/// query in it. That of its first key is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Queries.
    pub queries: Range<usize>,
    /// Keys.
    pub keys: Range<usize>,
    /// Where the first query is.
    pub first: i64,
}

impl Span {
    /// The valid keys of a batch entry, and the queries among `queries` at their positions; that of the
    /// first query is `offset`.
    pub fn padded(valid: Range<usize>, queries: usize, offset: i64) -> Self {
        let (start, end) = (valid.start as i64, valid.end as i64);
        let inside = |query: &usize| (start..end).contains(&(*query as i64 + offset));
        let first = (0..queries).find(inside).unwrap_or(0);
        let count = (0..queries).filter(inside).count();
        let position = first as i64 + offset - start;
        Span { queries: first..first + count, keys: valid, first: position }
    }

    /// Sequences side by side, of which bounds are given.
    pub fn packed(queries: &[u64], keys: &[u64]) -> Vec<Self> {
        let range = |bounds: &[u64]| bounds[0] as usize..bounds[1] as usize;
        let span = |(queries, keys): (&[u64], &[u64])| {
            let (queries, keys) = (range(queries), range(keys));
            let first = keys.len() as i64 - queries.len() as i64;
            Span { queries, keys, first }
        };
        queries.windows(2).zip(keys.windows(2)).map(span).collect()
    }
}

impl LongNet {
    /// Whether a branch has a position for a head.
    fn has(&self, branch: usize, head: usize, position: i64) -> bool {
        let (w, r) = self.branches[branch];
        position >= 0 && (position % w) % r == head as i64 % r
    }

    /// Whether a query sees a key in a branch.
    fn sees(&self, branch: usize, head: usize, query: i64, key: i64) -> bool {
        let w = self.branches[branch].0;
        self.has(branch, head, query)
            && self.has(branch, head, key)
            && query / w == key / w
            && self.within.allows(query, key)
    }

    /// The keys of each query, once for each branch that has them or once in all.
    pub fn seen(&self, problem: &Problem) -> Seen {
        let Problem { query_positions, key_positions, sizes, .. } = problem;
        let keys = |head: usize, query: i64| {
            let numbered = key_positions.iter().enumerate();
            numbered.flat_map(|(number, &key)| self.times(head, query, key, number)).collect()
        };
        let rows = |head| query_positions.iter().map(|&query| keys(head, query)).collect();
        Seen::listed(sizes.batch, (0..sizes.heads_q).map(rows).collect())
    }

    /// The same within each sequence of a batch entry: positions count from its first key.
    pub fn seen_in(&self, problem: &Problem, entries: &[Vec<Span>]) -> Seen {
        let Sizes { heads_q, tokens_q, .. } = problem.sizes;
        let keys = |spans: &[Span], head: usize, query: usize| {
            let span = spans.iter().find(|span| span.queries.contains(&query));
            let seen = |span: &Span| {
                let position = span.first + (query - span.queries.start) as i64;
                let numbered = span.keys.clone().enumerate();
                numbered
                    .flat_map(|(key, number)| self.times(head, position, key as i64, number))
                    .collect()
            };
            span.map_or_else(Vec::new, seen)
        };
        let rows = |spans: &Vec<Span>, head| {
            (0..tokens_q).map(|query| keys(spans, head, query)).collect::<Vec<_>>()
        };
        let heads = |spans| (0..heads_q).map(move |head| rows(spans, head));
        Seen::listed_each(entries.iter().flat_map(heads).collect(), heads_q)
    }

    /// The number of a key, as often as it counts for a query.
    fn times(&self, head: usize, query: i64, key: i64, number: usize) -> impl Iterator<Item = u32> {
        let branches = 0..self.branches.len();
        let times = branches.filter(|&branch| self.sees(branch, head, query, key)).count();
        let besides = self.also.iter().any(|also| also.allows(query, key));
        let times = times + usize::from(besides && self.within.allows(query, key));
        std::iter::repeat_n(number as u32, if self.once { times.min(1) } else { times })
    }

    /// Output, log-sum-exp and gradients by the equations above; keys count once a branch.
    ///
    /// # Panics
    ///
    /// If keys are to count once, queries see others besides, scores are transformed, or there are
    /// sinks: the paper has none of it.
    pub fn equations(&self, problem: &Problem) -> Values<f64> {
        let plain = problem.transform == Transform::default() && problem.sink_logits.is_none();
        let paper = !self.once && self.also.is_none() && plain;
        assert!(paper, "not in the paper");
        let Sizes { batch, heads_q, heads_kv, tokens_q, tokens_k, dim_k, dim_v } = problem.sizes;
        let zeros = |len: usize| vec![0.0; len];
        let sizes = &problem.sizes;
        let mut values = Values {
            out: zeros(sizes.out()),
            lse: vec![f64::NEG_INFINITY; sizes.rows()],
            dq: zeros(sizes.q()),
            dk: zeros(sizes.k()),
            dv: zeros(sizes.v()),
            ..Values::default()
        };
        for (entry, head) in (0..batch).flat_map(|b| (0..heads_q).map(move |h| (b, h))) {
            let key_head = entry * heads_kv + head / (heads_q / heads_kv);
            let row = |query: usize| (entry * heads_q + head) * tokens_q + query;
            let key = |key: usize| key_head * tokens_k + key;
            let branches: Vec<Vec<Rows>> =
                (0..self.branches.len()).map(|b| self.attend(problem, b, head, row, key)).collect();
            for query in 0..tokens_q {
                // Those branches that have this query, with what they made of it.
                let mine: Vec<&Rows> =
                    branches.iter().flatten().filter(|rows| rows.query == query).collect();
                if mine.is_empty() {
                    continue;
                }
                let row = row(query);
                let dout = wide(&problem.dout[row * dim_v..][..dim_v]);
                let dlse = problem.dlse.as_ref().map_or(0.0, |dlse| f64::from(dlse[row]));
                let most = mine.iter().map(|rows| rows.lse).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = mine.iter().map(|rows| (rows.lse - most).exp()).sum();
                let alpha = |rows: &Rows| (rows.lse - most).exp() / total;
                for rows in &mine {
                    for (sum, x) in values.out[row * dim_v..].iter_mut().zip(&rows.out) {
                        *sum += alpha(rows) * x;
                    }
                }
                values.lse[row] = most + total.ln();
                let out = values.out[row * dim_v..][..dim_v].to_vec();
                for rows in &mine {
                    let a = alpha(rows);
                    let to_lse = a * (dot(&dout, &rows.out) - dot(&dout, &out) + dlse);
                    let to_out: Vec<f64> = dout.iter().map(|x| a * x).collect();
                    let delta = dot(&to_out, &rows.out);
                    let q = wide(&problem.q[row * dim_k..][..dim_k]);
                    for &(number, p) in &rows.keys {
                        let at = key(number);
                        let k = wide(&problem.k[at * dim_k..][..dim_k]);
                        let v = wide(&problem.v[at * dim_v..][..dim_v]);
                        let ds = problem.scale * p * (dot(&to_out, &v) - delta + to_lse);
                        add(&mut values.dq[row * dim_k..], ds, &k);
                        add(&mut values.dk[at * dim_k..], ds, &q);
                        add(&mut values.dv[at * dim_v..], p, &to_out);
                    }
                }
            }
        }
        values
    }

    /// One branch for one head: its segments made sparse, and attention over each.
    fn attend(
        &self,
        problem: &Problem,
        branch: usize,
        head: usize,
        row: impl Fn(usize) -> usize,
        key: impl Fn(usize) -> usize,
    ) -> Vec<Rows> {
        let Sizes { dim_k, dim_v, .. } = problem.sizes;
        let (w, r) = self.branches[branch];
        let end = problem.key_positions.last().map_or(0, |last| last + 1);
        let mut results = Vec::new();
        for start in (0..end).step_by(w as usize) {
            let sparse: Vec<i64> =
                (start + head as i64 % r..end.min(start + w)).step_by(r as usize).collect();
            let places = |positions: &[i64]| -> Vec<usize> {
                let found = sparse.iter().map(|p| positions.iter().position(|x| x == p));
                found.flatten().collect()
            };
            let keys = places(&problem.key_positions);
            for query in places(&problem.query_positions) {
                let position = problem.query_positions[query];
                let q = wide(&problem.q[row(query) * dim_k..][..dim_k]);
                let scores: Vec<(usize, f64)> = keys
                    .iter()
                    .filter(|&&k| self.within.allows(position, problem.key_positions[k]))
                    .map(|&number| {
                        let k = wide(&problem.k[key(number) * dim_k..][..dim_k]);
                        (number, problem.scale * dot(&q, &k))
                    })
                    .collect();
                if scores.is_empty() {
                    continue;
                }
                let most = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s.1 - most).exp()).sum();
                let keys: Vec<(usize, f64)> =
                    scores.iter().map(|&(key, s)| (key, (s - most).exp() / sum)).collect();
                let mut out = vec![0.0; dim_v];
                for &(number, p) in &keys {
                    add(&mut out, p, &wide(&problem.v[key(number) * dim_v..][..dim_v]));
                }
                results.push(Rows { query, out, lse: most + sum.ln(), keys });
            }
        }
        results
    }
}

/// What a branch made of a query: its output, its log-sum-exp, its keys with their probabilities.
struct Rows {
    query: usize,
    out: Vec<f64>,
    lse: f64,
    keys: Vec<(usize, f64)>,
}

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(into: &mut [f64], factor: f64, term: &[f64]) {
    for (sum, x) in into.iter_mut().zip(term) {
        *sum += factor * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sample, truth};

    fn problem(net: &LongNet, tokens: usize, heads: (usize, usize)) -> Problem {
        let (tokens_q, tokens_k) = (tokens, tokens);
        let sizes = Sizes {
            batch: 2,
            tokens_q,
            tokens_k,
            heads_q: heads.0,
            heads_kv: heads.1,
            dim_k: 3,
            dim_v: 4,
        };
        let mut problem = Problem::normal(sizes, 7);
        problem.dlse = Some(crate::normals(9, sizes.rows()));
        problem.seen = net.seen(&problem);
        problem
    }

    fn close(a: &[f64], b: &[f64]) -> bool {
        let near = |(x, y): (&f64, &f64)| x == y || (x - y).abs() < 1e-12;
        a.len() == b.len() && a.iter().zip(b).all(near)
    }

    /// The equations and the lists of keys with repeats say the same.
    #[test]
    fn equations_and_lists_agree() {
        for (branches, within, tokens, heads) in [
            (vec![(4, 1), (8, 2), (16, 4)], Rule::Full, 32, (4, 4)),
            (vec![(4, 1), (8, 2), (16, 4)], Rule::Causal, 29, (4, 2)),
            (vec![(5, 2), (7, 3)], Rule::Causal, 23, (6, 2)),
            (vec![(100, 1)], Rule::Full, 11, (1, 1)),
            (vec![(6, 6), (3, 5)], Rule::Full, 13, (3, 3)),
        ] {
            let net = LongNet { branches, within, also: None, once: false };
            let problem = problem(&net, tokens, heads);
            let equations = net.equations(&problem);
            let lists = truth(&problem, Sample::ALL).values;
            assert!(close(&equations.out, &lists.out), "out of {net:?}");
            assert!(close(&equations.lse, &lists.lse), "lse of {net:?}");
            assert!(close(&equations.dq, &lists.dq), "dq of {net:?}");
            assert!(close(&equations.dk, &lists.dk), "dk of {net:?}");
            assert!(close(&equations.dv, &lists.dv), "dv of {net:?}");
        }
    }

    /// Gradients through the mixing are those of finite differences.
    #[test]
    fn gradients_are_differences() {
        let branches = vec![(4, 1), (8, 2), (9, 3)];
        let net = LongNet { branches, within: Rule::Causal, also: None, once: false };
        let problem = problem(&net, 11, (2, 1));
        let loss = |problem: &Problem| {
            let Values { out, lse, .. } = net.equations(problem);
            let dlse = problem.dlse.as_ref().expect("the problem has one");
            let finite = lse.iter().zip(dlse).filter(|(lse, _)| lse.is_finite());
            dot(&out, &wide(&problem.dout))
                + finite.map(|(lse, &d)| lse * f64::from(d)).sum::<f64>()
        };
        let values = net.equations(&problem);
        type Pick = fn(&mut Problem) -> &mut Vec<f32>;
        let tensors: [(&[f64], Pick); 3] =
            [(&values.dq, |p| &mut p.q), (&values.dk, |p| &mut p.k), (&values.dv, |p| &mut p.v)];
        for (gradient, pick) in tensors {
            for (index, &expected) in gradient.iter().enumerate().step_by(5) {
                // A step that f32 can hold, whatever the number is.
                let step = 1.0_f32 / 1024.0;
                let moved = |by: f32| {
                    let mut moved = problem.clone();
                    let number = &mut pick(&mut moved)[index];
                    let before = *number;
                    *number += by;
                    let by = f64::from(*number) - f64::from(before);
                    (loss(&moved), by)
                };
                let ((above, up), (below, down)) = (moved(step), moved(-step));
                let slope = (above - below) / (up - down);
                assert!((slope - expected).abs() < 1e-5, "{slope} for {expected} at {index}");
            }
        }
    }

    /// One token that two branches have: it weighs twice.
    #[test]
    fn two_branches_count_twice_by_hand() {
        // Two keys with scores 0 and ln 2. Branch (1, 1) sees the query's own, branch (2, 1) both.
        let branches = vec![(1, 1), (2, 1)];
        let sizes = Sizes {
            batch: 1,
            tokens_q: 2,
            tokens_k: 2,
            heads_q: 1,
            heads_kv: 1,
            dim_k: 1,
            dim_v: 1,
        };
        let mut problem = Problem {
            scale: 2.0_f64.ln(),
            q: vec![1.0, 1.0],
            k: vec![0.0, 1.0],
            v: vec![10.0, 40.0],
            ..Problem::normal(sizes, 0)
        };
        let paper =
            LongNet { branches: branches.clone(), within: Rule::Full, also: None, once: false };
        // Query 0: weights 1 + 1 for key 0, 2 for key 1. Query 1: 1 and 2 + 2.
        let twice = paper.equations(&problem).out;
        assert!(close(&twice, &[100.0 / 4.0, 170.0 / 5.0]));
        let union = LongNet { branches, within: Rule::Full, also: None, once: true };
        problem.seen = union.seen(&problem);
        let once = truth(&problem, Sample::ALL).values.out;
        assert!(close(&once, &[90.0 / 3.0, 90.0 / 3.0]));
    }
}
