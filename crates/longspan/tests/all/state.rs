//! Partial softmaxes: keys in pieces, merges in any order, gradients piece by piece.

use longspan::{
    Attention, BlockSize, Dims, GradientsMut, Hook, Inputs, Isa, Layout, Order, Output,
    OutputGradient, OutputMut, OutputRef, Pattern, Positions, Progression, RowStatistics, Shape,
    State, Strides, Tensor, View, ViewMut, merge_outputs, row_deltas,
};
use longspan_testing::{
    Answer, AttentionCase, Measure, Problem, Rule, Sample, Transform, Values, naive, normals, truth,
};

use crate::common::*;

const ORDER: Order = Order::Bhsd;

/// A case whose keys are at hand in pieces: local key numbers of each.
struct Pieces {
    case: AttentionCase,
    problem: Problem,
    truth: Answer<f64>,
    naive: Values<f32>,
    pieces: Vec<Progression>,
}

/// Keys cut at odd places, every third key, nothing at all.
fn all_pieces() -> Vec<Pieces> {
    let local = Rule::And(vec![Rule::Causal, Rule::Window { left: 90, right: 0 }]);
    let case = |rule| AttentionCase {
        batch: 2,
        heads_q: 6,
        heads_kv: 2,
        dim_k: 24,
        dim_v: 20,
        lse_gradient: true,
        ..AttentionCase::new("pieces", rule, 190)
    };
    let steps = |start, step, len| Progression { start, step, len };
    let cuts = vec![steps(0, 1, 65), steps(65, 1, 1), steps(66, 1, 0), steps(66, 1, 124)];
    let stripes = vec![steps(0, 3, 64), steps(1, 3, 63), steps(2, 3, 63)];
    let slopes = Transform::alibi((1..=6).map(|n| n as f32 / 10.0).collect());
    let mut all = Vec::new();
    for pieces in [cuts, stripes] {
        for case in [
            case(Rule::Causal),
            case(local.clone()),
            case(Rule::Full),
            AttentionCase { transform: slopes.clone(), ..case(Rule::Causal) },
        ] {
            let problem = case.problem();
            let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
            all.push(Pieces { case, problem, truth, naive, pieces: pieces.clone() });
        }
    }
    all
}

impl Pieces {
    fn attention(&self, piece: &Progression, isa: Isa) -> Attention {
        let pattern: Pattern = self.case.pattern_text().parse().unwrap();
        let shape = Shape::new(190, 190)
            .key_map(Positions::new([*piece]).unwrap())
            .block(BlockSize::new(32).unwrap());
        let layout = Layout::compile(&pattern, &shape).unwrap();
        Attention::new(layout).score(score(&self.case.transform)).isa(isa)
    }

    /// The tokens of a piece of keys or values, or of their gradients: a strided part.
    fn extent(&self, piece: &Progression, dim: usize) -> (usize, Dims, Strides) {
        let sizes = &self.problem.sizes;
        let dims = Dims { batch: 2, tokens: piece.len, heads: 2, dim };
        let token = (piece.step * dim) as isize;
        let head = (sizes.tokens_k * dim) as isize;
        let strides = Strides { batch: 2 * head, tokens: token, heads: head, dim: 1 };
        (piece.start as usize * dim, dims, strides)
    }

    fn inputs(&self, piece: &Progression) -> Inputs<'_> {
        let Problem { sizes, q, k, v, .. } = &self.problem;
        let part = |data, dim| {
            let (first, dims, strides) = self.extent(piece, dim);
            View::strided(data, first, dims, strides).unwrap()
        };
        Inputs {
            q: View::new(q, dims_q(sizes), ORDER).unwrap(),
            k: part(k, sizes.dim_k),
            v: part(v, sizes.dim_v),
        }
    }

    fn state(&self) -> State {
        State::empty(dims_out(&self.problem.sizes)).unwrap()
    }

    fn check(&self, got: &Values<f32>, tensors: usize, what: &str) {
        let measures = Measure::all(&self.problem, &self.truth, &self.naive, got, Sample::ALL);
        for measure in measures.iter().take(tensors) {
            assert!(measure.holds(), "{what}, {measure}, {}", self.case);
        }
    }

    fn values(&self, out: Vec<f32>, lse: Vec<f32>) -> Values<f32> {
        let sizes = &self.problem.sizes;
        let zeros = |len| vec![0.0; len];
        let (dq, dk, dv) = (zeros(sizes.q()), zeros(sizes.k()), zeros(sizes.v()));
        let dalibi_slopes = zeros(self.problem.transform.slopes.len());
        Values { out, lse, dq, dk, dv, dalibi_slopes, ..Values::default() }
    }
}

#[test]
fn keys_in_pieces_are_the_whole() {
    for parts in all_pieces() {
        for isa in Isa::available() {
            // One state that goes on from piece to piece.
            let mut state = parts.state();
            for piece in &parts.pieces {
                let inputs = parts.inputs(piece);
                parts.attention(piece, isa).extend(inputs, &mut state, Hook::none()).unwrap();
            }
            let output = state.finish(ORDER).unwrap();
            let got = parts.values(output.out.into_vec(), output.lse);
            parts.check(&got, 2, &format!("extended, {isa}"));

            // A state a piece, merged from the last to the first.
            let mut merged = parts.state();
            for piece in parts.pieces.iter().rev() {
                let mut state = parts.state();
                let inputs = parts.inputs(piece);
                parts.attention(piece, isa).extend(inputs, &mut state, Hook::none()).unwrap();
                merged.merge(&state).unwrap();
            }
            let output = merged.finish(ORDER).unwrap();
            let got = parts.values(output.out.into_vec(), output.lse);
            parts.check(&got, 2, &format!("merged, {isa}"));

            // An output a piece.
            let sizes = &parts.problem.sizes;
            let mut out = Tensor::filled(0.0, dims_out(sizes), ORDER).unwrap();
            let mut lse = vec![f32::NEG_INFINITY; sizes.rows()];
            let mut lse_lo = vec![0.0; sizes.rows()];
            for piece in &parts.pieces {
                let Inputs { q, k, v } = parts.inputs(piece);
                let output = parts.attention(piece, isa).forward(Inputs::new(q, k, v)).unwrap();
                let rest = Some(&mut lse_lo[..]);
                let into = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: rest };
                merge_outputs(into, output.out.view(), &output.lse).unwrap();
            }
            let got = parts.values(out.into_vec(), lse);
            parts.check(&got, 2, &format!("outputs merged, {isa}"));
        }
    }
}

/// Backward over pieces of the keys, with the final statistics of each row, adds up to the whole;
/// and adds to what was there.
#[test]
fn gradients_in_pieces_are_the_whole() {
    for parts in all_pieces() {
        let Problem { sizes, dout, dlse, .. } = &parts.problem;
        for isa in Isa::available() {
            let mut state = parts.state();
            for piece in &parts.pieces {
                let inputs = parts.inputs(piece);
                parts.attention(piece, isa).extend(inputs, &mut state, Hook::none()).unwrap();
            }
            let output = state.finish(ORDER).unwrap();
            let dout = View::new(dout, dims_out(sizes), ORDER).unwrap();
            let gradient = OutputGradient { dout, dlse: dlse.as_deref() };
            let mut delta = vec![0.0; sizes.rows()];
            row_deltas(&output, gradient, &mut delta).unwrap();

            let run = |start: f32| {
                let mut dq = vec![start; sizes.q()];
                let mut slopes = vec![start; parts.problem.transform.slopes.len()];
                let (mut dk, mut dv) = (vec![start; sizes.k()], vec![start; sizes.v()]);
                for piece in &parts.pieces {
                    let key = parts.extent(piece, sizes.dim_k);
                    let value = parts.extent(piece, sizes.dim_v);
                    let mut gradients = GradientsMut::new(
                        ViewMut::new(&mut dq, dims_q(sizes), ORDER).unwrap(),
                        ViewMut::strided(&mut dk, key.0, key.1, key.2).unwrap(),
                        ViewMut::strided(&mut dv, value.0, value.1, value.2).unwrap(),
                    );
                    gradients.dalibi_slopes = (!slopes.is_empty()).then_some(&mut slopes[..]);
                    let OutputRef { lse, lse_lo, .. } = (&output).into();
                    let rows = RowStatistics { lse, lse_lo, delta: &delta };
                    let attention = parts.attention(piece, isa);
                    let inputs = parts.inputs(piece);
                    attention.accumulate(inputs, dout, rows, gradients, Hook::none()).unwrap();
                }
                [dq, dk, dv, slopes]
            };
            let (from_zero, from_one) = (run(0.0), run(1.0));
            for (zero, one) in from_zero.iter().zip(&from_one) {
                for (zero, one) in zero.iter().zip(one) {
                    // Two pieces' and one's roundings of numbers up to 1 + |gradient|.
                    assert!((zero + 1.0 - one).abs() < 4e-6 * (1.0 + zero.abs()), "{zero} {one}");
                }
            }
            let (out, lse) = (output.out.as_slice().to_vec(), output.lse.clone());
            let [dq, dk, dv, dalibi_slopes] = from_zero;
            let values = Values { out, lse, dq, dk, dv, dalibi_slopes, ..Values::default() };
            parts.check(&values, 6, &format!("accumulated, {isa}"));
        }
    }
}

/// A state over some keys of random rows, some of which have seen nothing.
fn some_state(seed: u64) -> State {
    let dims = Dims { batch: 1, tokens: 40, heads: 2, dim: 8 };
    let numbers = |n, len, scale: f32| {
        normals(seed * 10 + n, len).into_iter().map(|x| x * scale).collect::<Vec<f32>>()
    };
    let mut state = State::empty(dims).unwrap();
    let tensor = |n, scale, dims: Dims| {
        Tensor::new(numbers(n, dims.elements().unwrap(), scale), dims, ORDER).unwrap()
    };
    let keys = Dims { tokens: 30, ..dims };
    let (q, k, v) = (tensor(0, 3.0, dims), tensor(1, 3.0, keys), tensor(2, 1.0, keys));
    let shape = Shape::new(40, 30).query_offset(seed as i64 * 3 - 7);
    let layout = Layout::compile(&"causal".parse().unwrap(), &shape).unwrap();
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    Attention::new(layout).extend(inputs, &mut state, Hook::none()).unwrap();
    state
}

fn merged(a: &State, b: &State) -> State {
    let mut state = a.clone();
    state.merge(b).unwrap();
    state
}

fn same_bits(a: &State, b: &State) -> bool {
    bits(a.maxima()) == bits(b.maxima())
        && bits(a.totals()) == bits(b.totals())
        && bits(a.sums()) == bits(b.sums())
}

#[test]
fn merging_with_nothing_is_the_identity_to_the_bit() {
    let state = some_state(1);
    assert!(state.maxima().contains(&f32::NEG_INFINITY));
    assert!(state.maxima().iter().any(|m| m.is_finite()));
    let nothing = State::empty(state.dims()).unwrap();
    assert!(same_bits(&merged(&state, &nothing), &state));
    assert!(same_bits(&merged(&nothing, &state), &state));
    assert!(same_bits(&merged(&nothing, &nothing), &nothing));

    // The form for outputs.
    let output = state.finish(ORDER).unwrap();
    let empty = nothing.finish(ORDER).unwrap();
    for (into, other) in [(&output, &empty), (&empty, &output)] {
        let Output { mut out, mut lse, mut lse_lo } = into.clone();
        let from = other.out.view();
        let into = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: Some(&mut lse_lo) };
        merge_outputs(into, from, &other.lse).unwrap();
        assert_eq!(bits(out.as_slice()), bits(output.out.as_slice()));
        assert_eq!(bits(&lse), bits(&output.lse));
        assert!(lse_lo.iter().all(|rest| rest.is_finite()));
    }
}

/// What is extended stays as it was, to the bit, where a query sees none of the keys.
#[test]
fn rows_that_see_nothing_stay() {
    let dims = Dims { batch: 1, tokens: 300, heads: 2, dim: 8 };
    let x = Tensor::new(normals(3, 300 * 2 * 8), dims, ORDER).unwrap();
    let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    let layout = std::sync::Arc::new(compile("sinks(5) & window(100, 0)", 300, 300));
    for isa in Isa::available() {
        let attention = Attention::new(layout.clone()).isa(isa);
        let odd = [f32::NAN, -2.5, 1e-42, 7.0];
        let rows = |len: usize| odd.iter().copied().cycle().take(len).collect::<Vec<_>>();
        let before = State::from_parts(dims, vec![-3.5; 600], rows(600), rows(600 * 8)).unwrap();
        let mut after = before.clone();
        attention.extend(inputs, &mut after, Hook::none()).unwrap();
        for row in (0..600).filter(|row| row % 300 > 104) {
            let of = |state: &State| {
                let sums = state.sums()[row * 8..][..8].iter();
                let numbers = [state.maxima()[row], state.totals()[row]];
                numbers.iter().chain(sums).map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(of(&after), of(&before), "{isa}, row {row}");
        }
        assert_ne!(after.maxima()[0].to_bits(), before.maxima()[0].to_bits(), "{isa}");
    }
}

#[test]
fn merging_commutes() {
    for seed in 1..20 {
        let (a, b) = (some_state(seed), some_state(seed + 100));
        assert!(same_bits(&merged(&a, &b), &merged(&b, &a)), "{seed}");
    }
}

/// `(a ∘ b) ∘ c` and `a ∘ (b ∘ c)` differ by the roundings of four merges. Each multiplies by two
/// exponentials that are off by 2 units of roundoff at most and adds, 4 units relative to sums of
/// absolute values. Outputs are averages of values, so 16 units of the largest value bound them;
/// the same relative error of a total is an absolute one of its logarithm.
#[test]
fn merging_is_associative_within_its_bound() {
    let unit = 0.5 * f32::EPSILON;
    for seed in 1..40 {
        let [a, b, c] = [some_state(seed), some_state(seed + 100), some_state(seed + 200)];
        let left = merged(&merged(&a, &b), &c).finish(ORDER).unwrap();
        let right = merged(&a, &merged(&b, &c)).finish(ORDER).unwrap();
        for (x, y) in left.lse.iter().zip(&right.lse) {
            let bound = unit * (16.0 + 2.0 * x.abs());
            assert!(x == y || (x - y).abs() <= bound, "lse {x} and {y}, seed {seed}");
        }
        // Values are unit-normal numbers; none of these is beyond 5.
        for (x, y) in left.out.as_slice().iter().zip(right.out.as_slice()) {
            assert!((x - y).abs() <= 16.0 * unit * 5.0, "out {x} and {y}, seed {seed}");
        }
    }
}

/// A state whose every row has one key with this score and value.
fn one_key(score: f32, value: f32) -> State {
    let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 1 };
    let tensor = |x| Tensor::new(vec![x], dims, ORDER).unwrap();
    let (q, k, v) = (tensor(score), tensor(1.0), tensor(value));
    let mut state = State::empty(dims).unwrap();
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let attention = Attention::new(compile("full", 1, 1)).scale(1.0);
    attention.extend(inputs, &mut state, Hook::none()).unwrap();
    state
}

#[test]
fn merging_is_stable() {
    for score in [0.0, 80.0, -80.0, 1e30, -1e30, 3e38, -3e38] {
        // The same weight on 1 and 3.
        let output = merged(&one_key(score, 1.0), &one_key(score, 3.0)).finish(ORDER).unwrap();
        assert_eq!(output.out.as_slice(), [2.0], "{score}");
        let expected = (f64::from(score) + 2.0_f64.ln()) as f32;
        // One rounding to f32, 2⁻²⁴ of it, and two thirds of one for the logarithm's own error.
        assert!((output.lse[0] - expected).abs() <= expected.abs() * 1e-7, "{score}");
        // A lower one weighs nothing beside it.
        if score > -1e30 {
            let lower = one_key(-1e30, 7.0);
            let high = one_key(score, 1.0);
            for state in [merged(&high, &lower), merged(&lower, &high)] {
                let output = state.finish(ORDER).unwrap();
                assert_eq!((output.out.as_slice(), output.lse[0]), (&[1.0][..], score));
            }
        }
    }
    // Many of them, all alike.
    let mut state = one_key(-500.0, 1.0);
    for _ in 1..1024 {
        state.merge(&one_key(-500.0, 1.0)).unwrap();
    }
    let output = state.finish(ORDER).unwrap();
    assert_eq!(output.out.as_slice(), [1.0]);
    // Totals of equal scores are whole numbers, so exact; both sides are rounded to f32 near 493,
    // by half of 2⁻¹⁵ each.
    assert!((output.lse[0] - (-500.0 + 1024_f32.ln())).abs() <= 2.0_f32.powi(-15));
}

/// How far the log-sum-exp in two parts is above a score.
fn above(score: f32, lse: f32, lse_lo: f32) -> f64 {
    (f64::from(lse) - f64::from(score)) + f64::from(lse_lo)
}

/// The log-sum-exp of three equal scores is ln 3 above them, though one f32 can't say so. A logarithm of
/// f32 near 1 is off by up to an ulp, 2⁻²³ = 1.2e-7, and its two parts by a rounding of the second;
/// outputs are averages of 1, off by a few units of 2⁻²⁴, of which 16 are 1e-6.
#[test]
fn the_rest_is_what_rounding_leaves_out() {
    for score in [0.0, 1e-30, 7.3, -80.0, 12345.6, -3e8, 2.0e9, 1e30, -1e30, 3e38] {
        let mut state = one_key(score, 1.0);
        state.merge(&one_key(score, 1.0)).unwrap();
        state.merge(&one_key(score, 1.0)).unwrap();
        let Output { lse, lse_lo, .. } = state.finish(ORDER).unwrap();
        let got = above(score, lse[0], lse_lo[0]);
        assert!((got - 3.0_f64.ln()).abs() < 2e-7, "{score}: {got}");

        // And of outputs: one that has it, and one of a key alone, which has none to give.
        let [two, one] = [merged(&one_key(score, 1.0), &one_key(score, 1.0)), one_key(score, 1.0)];
        let mut into = two.finish(ORDER).unwrap();
        let other = one.finish(ORDER).unwrap();
        assert_eq!((other.lse[0], other.lse_lo[0]), (score, 0.0));
        let Output { out, lse, lse_lo } = &mut into;
        let target = OutputMut { out: out.view_mut(), lse, lse_lo: Some(lse_lo) };
        merge_outputs(target, other.out.view(), &other.lse).unwrap();
        let got = above(score, into.lse[0], into.lse_lo[0]);
        assert!((got - 3.0_f64.ln()).abs() < 2e-7, "{score}: {got} of outputs");
        assert!((into.out.as_slice()[0] - 1.0).abs() < 1e-6, "{score}");
    }
    // Where there is no finite number, there is nothing to add to it.
    for score in [f32::NAN, f32::INFINITY] {
        let output = one_key(score, 1.0).finish(ORDER).unwrap();
        assert!(!output.lse[0].is_finite() && output.lse_lo == [0.0], "{output:?}");
    }
}

/// A key in two states counts twice: that is LongNet's merge, and why unions are patterns.
#[test]
fn a_key_seen_twice_counts_twice() {
    let state = some_state(3);
    let (once, twice) =
        (state.finish(ORDER).unwrap(), merged(&state, &state).finish(ORDER).unwrap());
    // Log-sum-exps below 32 are rounded to 2⁻²⁰ = 1e-6, here three times, and the logarithm is off by a
    // fraction of that. An output is divided by a total that is off by a few units of 2⁻²⁴; 16 are 1e-6.
    for (a, b) in once.lse.iter().zip(&twice.lse) {
        assert!(a == b && a.is_infinite() || (a + 2.0_f32.ln() - b).abs() < 4e-6, "{a} {b}");
    }
    for (a, b) in once.out.as_slice().iter().zip(twice.out.as_slice()) {
        assert!((a - b).abs() <= 1e-6 * a.abs(), "{a} {b}");
    }
}

/// No gradient through the log-sum-exp is a gradient of zero.
#[test]
fn a_zero_gradient_of_lse_is_none() {
    let case = AttentionCase::new("dlse", Rule::Causal, 100);
    let mut problem = case.problem();
    let placement = Placement::Contiguous(ORDER);
    let run = |problem: &Problem| {
        let tensors = Tensors::of(problem, placement);
        let attention = attention(&case, Isa::best(), 1);
        Run { attention: &attention, tensors: &tensors, results: placement }.both()
    };
    let none = run(&problem);
    problem.dlse = Some(vec![0.0; problem.sizes.rows()]);
    assert_eq!(none, run(&problem));
    problem.dlse = Some(vec![1.0; problem.sizes.rows()]);
    assert_ne!(none.dq, run(&problem).dq);
}
