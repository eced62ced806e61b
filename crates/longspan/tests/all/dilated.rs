//! Dilated attention against the equations of its paper, and what it must be equal to.
//!
//! The oracle writes the equations out branch by branch in `f64`; the error rule is that of all
//! other tests, with keys that stand in several branches listed several times.

use std::ops::ControlFlow;

use half::{bf16, f16};
use longspan::{
    Attention, Branch, Dilated, Dims, Error, Heads, Hook, Inputs, Isa, LayoutSet, Order, OutputMut,
    Overlap, Padding, Pattern, Score, Shape, Tensor, Threads,
};
use longspan_testing::{
    LongNet, Measure, Problem, Rule, Sample, Sizes, Values, assert_close, naive, normals, truth,
};

use crate::common::*;

/// How far elements of two engines may be apart. With `u = 2⁻²⁴`, scores of normal elements are below
/// 8 and summed in pieces of 16, so each engine is off by up to 16 u of the largest element in outputs
/// and 48 u in gradients. Largest elements are about 4, so two engines differ by 128 u = 8e-6 and
/// 384 u = 2e-5 at most. Errors are of either sign: 7e-7 was measured, of which this is three times.
const ENGINES: f64 = 2e-6;

/// Likewise of two oracles in `f64`: sums of up to 1,800 terms (600 keys in three branches), whose
/// absolute values add up to less than 500, `1_800 · 2⁻⁵³ · 500`.
const ORACLES: f64 = 1e-10;

/// Branches over so many tokens and heads.
#[derive(Clone, Debug)]
struct Case {
    net: LongNet,
    sizes: Sizes,
    placement: Placement,
}

fn case(branches: &[(i64, i64)], within: Rule, tokens: usize, heads: usize) -> Case {
    let sizes = Sizes {
        batch: 1,
        tokens_q: tokens,
        tokens_k: tokens,
        heads_q: heads,
        heads_kv: heads,
        dim_k: 32,
        dim_v: 32,
    };
    Case {
        net: LongNet { branches: branches.to_vec(), within, also: None, once: false },
        sizes,
        placement: Placement::Contiguous(Order::Bshd),
    }
}

impl Case {
    fn once(mut self) -> Self {
        self.net.once = true;
        self
    }

    fn also(mut self, rule: Rule) -> Self {
        self.net.also = Some(rule);
        self
    }

    fn with(mut self, change: impl Fn(&mut Sizes)) -> Self {
        change(&mut self.sizes);
        self
    }

    fn placed(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    fn problem(&self) -> Problem {
        let mut problem = Problem::normal(self.sizes, 3);
        problem.dlse = Some(normals(5, self.sizes.rows()));
        problem.seen = self.net.seen(&problem);
        problem
    }

    fn dilated(&self) -> Dilated {
        let branches = self.net.branches.iter().map(|&(w, r)| Branch::new(w as u64, r as u64));
        let overlap = if self.net.once { Overlap::Union } else { Overlap::Weighted };
        let within: Pattern = self.net.within.to_string().parse().unwrap();
        let branches = branches.map(Result::unwrap);
        let dilated = Dilated::new(branches).unwrap().within(within).overlap(overlap);
        match &self.net.also {
            Some(also) => dilated.also(also.to_string().parse().unwrap()),
            None => dilated,
        }
    }

    /// What is wrong on any instruction set, a line each.
    fn check<E: Number>(&self) -> Vec<String> {
        let problem = self.problem().rounded(E::PRECISION);
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let tensors = TensorsOf::<E>::of(&problem, self.placement);
        let mut wrong = Vec::new();
        for (n, isa) in Isa::available().into_iter().enumerate() {
            let threads = Threads::Count(1 + n % 2);
            let dilated = self.dilated().isa(isa).threads(threads);
            let run = Run { attention: &dilated, tensors: &tensors, results: self.placement };
            let got = run.both();
            for measure in measures::<E>(isa, &problem, (&truth, &naive), &got, Sample::ALL) {
                if !measure.holds() {
                    wrong.push(format!("{isa} {} {measure}\n    {self:?}", E::TYPE));
                }
            }
        }
        wrong
    }
}

/// The odd cases: short last segments, rates that don't divide, heads that don't either, one token,
/// queries that no branch has, GQA of every kind, documents, Sq ≠ Sk.
fn cases() -> Vec<Case> {
    let paper = [(64, 1), (128, 2), (256, 4)];
    let documents = || Rule::Documents(vec![100, 0, 57, 3, 140]);
    let packed = || Rule::And(vec![Rule::Causal, documents()]);
    let cases = vec![
        case(&paper, Rule::Full, 512, 4),
        case(&paper, Rule::Causal, 512, 4),
        case(&paper, Rule::Causal, 487, 4),
        case(&paper, Rule::Full, 487, 3),
        case(&[(300, 1), (600, 2)], Rule::Causal, 577, 2),
        case(&[(600, 1)], Rule::Full, 577, 1),
        case(&[(50, 3), (70, 4), (31, 1)], Rule::Causal, 331, 5),
        case(&[(50, 3), (70, 4)], Rule::Full, 331, 5),
        case(&[(7, 7), (5, 9)], Rule::Full, 61, 4),
        case(&[(1, 1), (3, 2)], Rule::Causal, 40, 2),
        case(&paper, Rule::Causal, 1, 4),
        case(&paper, Rule::Full, 2, 4),
        case(&[(64, 1), (4, 1_000_000)], Rule::Full, 90, 3),
        case(&paper, documents(), 300, 4),
        case(&paper, packed(), 300, 4),
        case(&[(90, 4), (200, 6)], packed(), 300, 12),
        case(&paper, Rule::Window { left: 20, right: 5 }, 300, 4),
        case(&paper, Rule::Causal, 300, 8).with(|sizes| sizes.heads_kv = 2),
        case(&paper, Rule::Causal, 300, 8).with(|sizes| sizes.heads_kv = 4),
        case(&[(64, 3), (64, 1)], Rule::Causal, 200, 8).with(|sizes| sizes.heads_kv = 2),
        case(&[(96, 6)], Rule::Full, 200, 12).with(|sizes| sizes.heads_kv = 4),
        case(&paper, Rule::Full, 200, 6).with(|sizes| sizes.heads_kv = 1),
        case(&paper, Rule::Causal, 300, 4).with(|sizes| (sizes.dim_k, sizes.dim_v) = (19, 45)),
        case(&paper, Rule::Full, 300, 3).with(|sizes| sizes.batch = 3),
        case(&paper, Rule::Causal, 300, 4).with(|sizes| sizes.tokens_q = 1),
        case(&paper, Rule::Causal, 300, 4).with(|sizes| sizes.tokens_q = 143),
        case(&paper, Rule::Full, 100, 4).with(|sizes| sizes.tokens_q = 130),
    ];
    short(cases, |case| case.sizes).collect()
}

fn verdict(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// What breaks the error rule in f32 on the instruction set that calls choose, a line each.
fn complaints(problem: &Problem, got: &Values<f32>) -> Vec<String> {
    let (truth, naive) = (truth(problem, Sample::ALL), naive(problem, Sample::ALL));
    let measures = Measure::all(problem, &truth, &naive, got, Sample::ALL);
    measures.iter().filter(|measure| !measure.holds()).map(Measure::to_string).collect()
}

/// All results of two engines that compute the same.
fn assert_same(what: &str, got: &Values<f32>, expected: &Values<f32>) {
    for (tensor, got, expected) in [
        ("out", &got.out, &expected.out),
        ("lse", &got.lse, &expected.lse),
        ("dq", &got.dq, &expected.dq),
        ("dk", &got.dk, &expected.dk),
        ("dv", &got.dv, &expected.dv),
    ] {
        assert_close(format_args!("{what}: {tensor}"), got, expected, ENGINES);
    }
}

#[test]
fn equal_to_the_paper() {
    verdict(cases().iter().flat_map(Case::check::<f32>).collect());
}

#[test]
fn the_union_counts_once() {
    verdict(cases().into_iter().flat_map(|case| case.once().check::<f32>()).collect());
}

/// Besides their branches queries see a window, sinks, what comes behind the last key, or nothing.
#[test]
fn branches_and_pattern() {
    let window = || Rule::Window { left: 30, right: 7 };
    let nothing = || Rule::Not(Box::new(Rule::Full));
    for also in [window, || Rule::Sinks { n: 5 }, || Rule::Causal, nothing] {
        let cases = cases().into_iter().map(|case| case.also(also()));
        let both = cases.flat_map(|case| [case.clone(), case.once()]);
        verdict(both.step_by(7).flat_map(|case| case.check::<f32>()).collect());
    }
    verdict(cases()[0].clone().also(window()).once().check::<bf16>());
}

#[test]
fn half_types() {
    let every_third = || cases().into_iter().step_by(3);
    verdict(every_third().flat_map(|case| case.check::<bf16>()).collect());
    verdict(every_third().flat_map(|case| case.once().check::<f16>()).collect());
}

#[test]
fn any_strides() {
    let case = case(&[(30, 1), (60, 2), (95, 3)], Rule::Causal, 133, 6)
        .with(|sizes| (sizes.heads_kv, sizes.batch) = (3, 2));
    let placements = Placement::ALL.into_iter();
    verdict(
        placements.flat_map(|placement| case.clone().placed(placement).check::<f32>()).collect(),
    );
}

/// The oracle that the rule is measured by and the equations, on the cases of this file.
#[test]
fn oracles_agree() {
    for case in cases() {
        let problem = case.problem();
        let (equations, lists) =
            (case.net.equations(&problem), truth(&problem, Sample::ALL).values);
        for (what, a, b) in [
            ("out", &equations.out, &lists.out),
            ("lse", &equations.lse, &lists.lse),
            ("dq", &equations.dq, &lists.dq),
            ("dk", &equations.dk, &lists.dk),
            ("dv", &equations.dv, &lists.dv),
        ] {
            assert_close(format_args!("{what} of {case:?}"), a, b, ORACLES);
        }
    }
}

/// One branch that holds everything is full attention.
#[test]
fn one_whole_branch_is_full_attention() {
    let case = case(&[(1_000, 1)], Rule::Causal, 257, 3);
    let problem = case.problem();
    let tensors = Tensors::of(&problem, case.placement);
    let attention = Attention::new(compile("causal", 257, 257));
    let both = |engine: &dyn Engine<f32>| {
        Run { attention: engine, tensors: &tensors, results: case.placement }.both()
    };
    let (dilated, full) = (both(&case.dilated()), both(&attention));
    assert_same("one branch", &dilated, &full);
}

/// The union is what the pattern algebra says.
#[test]
fn the_union_is_pattern() {
    let case = case(&[(40, 1), (80, 2), (120, 3)], Rule::Causal, 210, 4).once();
    let problem = case.problem();
    let tensors = Tensors::of(&problem, case.placement);
    let dilated = case.dilated();
    let union = (0..4u64).map(|head| {
        let of = |w, r| Pattern::dilated(w, r, head % r).unwrap();
        Pattern::causal() & (of(40, 1) | of(80, 2) | of(120, 3))
    });
    let heads = Heads::each(union).unwrap();
    let shape = Shape::new(210, 210);
    let set = LayoutSet::compile(&heads, 4, &shape, &Padding::None(1), None).unwrap();
    let attention = Attention::new(set);
    let both = |engine: &dyn Engine<f32>| {
        Run { attention: engine, tensors: &tensors, results: case.placement }.both()
    };
    let (dilated, pattern) = (both(&dilated), both(&attention));
    assert_same("the union", &dilated, &pattern);
}

/// The same bits for any number of threads, and for a second call.
#[test]
fn threads_change_nothing() {
    let case = case(&[(128, 1), (512, 3)], Rule::Causal, 1_000, 6);
    let problem = case.problem();
    let tensors = Tensors::of(&problem, case.placement);
    let run = |threads| {
        let threads = Threads::Count(threads);
        let dilated = case.dilated().threads(threads);
        let run = Run { attention: &dilated, tensors: &tensors, results: case.placement };
        let (first, second) = (run.both(), run.both());
        assert_eq!(bits(&first.out), bits(&second.out));
        first
    };
    let (one, three) = (run(1), run(3));
    for (a, b) in [(&one.out, &three.out), (&one.dq, &three.dq), (&one.dk, &three.dk)] {
        assert_eq!(bits(a), bits(b));
    }
}

/// Distances of ALiBi are those of positions, slopes those of heads.
#[test]
fn scores_are_transformed() {
    let slopes = vec![0.5, 0.25, 0.125, 0.0625];
    let case = case(&[(40, 1), (80, 2)], Rule::Causal, 150, 4);
    for (transform, score) in [
        (longspan_testing::Transform::softcap(2.0), Score::default().softcap(2.0)),
        (
            longspan_testing::Transform::alibi(slopes.clone()),
            Score::default().alibi_slopes(slopes.as_slice()),
        ),
    ] {
        let mut problem = case.problem();
        problem.transform = transform;
        problem.unit_scale = false;
        let tensors = Tensors::of(&problem, case.placement);
        let dilated = case.dilated().score(score);
        let got = Run { attention: &dilated, tensors: &tensors, results: case.placement }.both();
        verdict(complaints(&problem, &got));
    }
}

/// A sink counts once per row, not once per branch, and for queries that no branch has.
#[test]
fn sinks_count_once() {
    fn check<E: Number>(case: &Case) {
        let mut problem = case.problem().rounded(E::PRECISION);
        let logits: Vec<f32> = (0..case.sizes.heads_q).map(|head| 1.5 - head as f32).collect();
        problem.sink_logits = Some(logits.clone());
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let tensors = TensorsOf::<E>::of(&problem, case.placement);
        for isa in Isa::available() {
            let dilated = case.dilated().isa(isa).sink_logits(logits.as_slice());
            let run = Run { attention: &dilated, tensors: &tensors, results: case.placement };
            let measures = measures::<E>(isa, &problem, (&truth, &naive), &run.both(), Sample::ALL);
            assert_eq!(measures.len(), 6);
            for measure in measures {
                assert!(measure.holds(), "{isa} {} {measure}\n    {case:?}", E::TYPE);
            }
        }
    }
    for case in [
        case(&[(64, 1), (128, 2), (256, 4)], Rule::Causal, 300, 4),
        case(&[(50, 3), (70, 4)], Rule::Full, 331, 5),
        case(&[(64, 1), (128, 2)], Rule::Causal, 200, 4).also(Rule::Window { left: 9, right: 0 }),
    ] {
        check::<f32>(&case);
        check::<half::bf16>(&case);
        check::<half::f16>(&case);
    }
}

/// Queries of a cache that was allocated beforehand say where they stand.
#[test]
fn offsets() {
    let case = case(&[(40, 1), (80, 2)], Rule::Causal, 200, 4).with(|sizes| sizes.tokens_q = 10);
    let mut problem = case.problem();
    problem.query_positions = (100..110).collect();
    problem.seen = case.net.seen(&problem);
    let tensors = Tensors::of(&problem, case.placement);
    let dilated = case.dilated().query_offset(100);
    let got = Run { attention: &dilated, tensors: &tensors, results: case.placement }.both();
    verdict(complaints(&problem, &got));
}

#[test]
fn progress_and_stopping() {
    let case = case(&[(128, 1), (512, 2)], Rule::Full, 1_024, 4);
    let dims = dims_q(&case.sizes);
    let x = Tensor::filled(0.5_f32, dims, Order::Bshd).unwrap();
    let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    let dilated = case.dilated().threads(Threads::Count(1));
    let call = |between: &mut dyn FnMut(longspan::Progress) -> ControlFlow<()>| {
        let mut out = Tensor::filled(0.0_f32, dims, Order::Bshd).unwrap();
        let mut lse = vec![0.0; 4 * 1_024];
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
        dilated.forward_into(inputs, output, Hook::new(between))
    };
    let mut seen = Vec::new();
    call(&mut |progress| {
        seen.push(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(seen.is_sorted_by_key(|progress| progress.done));
    let last = seen.last().unwrap();
    assert_eq!(last.done, last.total);
    let stopped = call(&mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped { .. })), "{stopped:?}");
}

#[test]
fn what_is_refused() {
    assert_eq!(Dilated::new([(1, 1); 0]).unwrap_err(), Error::NoBranches);
    assert!(Branch::new(0, 1).is_err() && Branch::new(8, 0).is_err());
    let dilated = Dilated::new([Branch::new(8, 2).unwrap()]).unwrap();
    let tensor = |dim| {
        let dims = Dims { batch: 1, tokens: 5, heads: 2, dim };
        Tensor::filled(0.0_f32, dims, Order::Bshd).unwrap()
    };
    let (q, k) = (tensor(4), tensor(5));
    assert!(matches!(
        dilated.forward(Inputs::new(q.view(), k.view(), k.view())),
        Err(Error::Shape { tensor: "k", .. })
    ));
    // Documents that end elsewhere.
    let dilated = dilated.within(Pattern::documents([4]).unwrap());
    assert!(matches!(
        dilated.forward(Inputs::new(q.view(), q.view(), q.view())),
        Err(Error::Pattern(_))
    ));
    // Nothing at all is no error.
    let none = Tensor::filled(0.0_f32, Dims { batch: 1, tokens: 0, heads: 2, dim: 4 }, q.order());
    let none = none.unwrap();
    let dilated = dilated.within(Pattern::full());
    let output = dilated.forward(Inputs::new(none.view(), none.view(), none.view())).unwrap();
    let (saved, gradient) = (&output, none.view());
    let inputs = Inputs { q: none.view(), k: none.view(), v: none.view() };
    assert!(dilated.backward(inputs, saved, gradient).unwrap().dq.as_slice().is_empty());
}

/// Queries beyond the last key attend to the keys of their segment, as the pattern does, in short
/// segments and in long ones.
#[test]
fn queries_beyond_the_keys() {
    let dims = |tokens| Dims { batch: 1, tokens, heads: 2, dim: 8 };
    let make = |tokens: usize, seed| {
        let numbers = normals(seed, dims(tokens).elements().unwrap());
        Tensor::<f32>::new(numbers, dims(tokens), Order::Bhsd).unwrap()
    };
    let (q, k) = (make(60, 1), make(700, 2));
    let inputs = Inputs::new(q.view(), k.view(), k.view());
    for (segment, rate) in [(1_000, 2), (400, 2), (900, 3)] {
        let dilated = Dilated::new([(segment, rate)]).unwrap().query_offset(690);
        let got = dilated.forward(inputs).unwrap();
        let heads: Heads =
            format!("heads([dilated({segment}, {rate}), dilated({segment}, {rate}, 1)])")
                .parse()
                .unwrap();
        let shape = Shape::new(60, 700).query_offset(690);
        let set = LayoutSet::compile(&heads, 2, &shape, &Padding::None(1), None).unwrap();
        let expected = Attention::new(set).forward(inputs).unwrap();
        assert!(got.lse[20..60].iter().any(|lse| lse.is_finite()), "({segment}, {rate})");
        for (a, b) in got.out.as_slice().iter().zip(expected.out.as_slice()) {
            // Weights of one sum to 1, so rounding of both is below 16 ulps of values up to 4.
            assert!((a - b).abs() < 4e-6, "({segment}, {rate}): {a}, expected {b}");
        }
    }
}
