//! A case, run on real tensors, and how wrong it is.

use longspan::{
    Attention, BiasTable, BlockSize, ComputeTypes, Dilated, Dims, Dropout, Element, ElementType,
    GradientsMut, Heads, Hook, Inputs, Isa, Layout, LayoutSet, Layouts, Order, OutputGradient,
    OutputMut, OutputRef, Padding, Pattern, Positions, Progression, Score, Shape, Threads,
};
use longspan_testing::{
    Answer, AttentionCase, Axes, Case, Measure, Problem, Sample, Sizes, Steps, Table, Transform,
    Values, naive, truth,
};

use super::buffer::{BufferOf, Number, Placement};

/// A number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
        Err(_) => default,
    }
}

/// The cases of at most `LONGSPAN_PAIRS` queries × keys, for emulators and instrumented builds.
pub(crate) fn short<C>(
    cases: impl IntoIterator<Item = C>,
    sizes: impl Fn(&C) -> Sizes,
) -> impl Iterator<Item = C> {
    let most = number("LONGSPAN_PAIRS", u64::MAX);
    let mut cases = cases
        .into_iter()
        .filter(move |case| {
            let Sizes { tokens_q, tokens_k, .. } = sizes(case);
            (tokens_q * tokens_k) as u64 <= most
        })
        .peekable();
    assert!(cases.peek().is_some(), "no case has at most {most} pairs");
    cases
}

pub(crate) fn dims_q(sizes: &Sizes) -> Dims {
    Dims { batch: sizes.batch, tokens: sizes.tokens_q, heads: sizes.heads_q, dim: sizes.dim_k }
}

pub(crate) fn dims_k(sizes: &Sizes) -> Dims {
    Dims { batch: sizes.batch, tokens: sizes.tokens_k, heads: sizes.heads_kv, dim: sizes.dim_k }
}

pub(crate) fn dims_v(sizes: &Sizes) -> Dims {
    Dims { dim: sizes.dim_v, ..dims_k(sizes) }
}

pub(crate) fn dims_out(sizes: &Sizes) -> Dims {
    Dims { dim: sizes.dim_v, ..dims_q(sizes) }
}

/// A pattern's layout for so many queries and keys.
pub(crate) fn compile(pattern: &str, queries: usize, keys: usize) -> Layout {
    let pattern: Pattern = pattern.parse().unwrap();
    Layout::compile(&pattern, &Shape::new(queries, keys)).unwrap()
}

fn positions(steps: &[Steps]) -> Positions {
    let steps = steps.iter().map(|s| Progression {
        start: s.start,
        step: s.step as usize,
        len: s.len as usize,
    });
    Positions::new(steps).unwrap()
}

fn shape(case: &Case) -> Shape {
    let block = BlockSize::new(case.block.into()).unwrap();
    let mut shape = Shape::new(case.tokens_q as usize, case.tokens_k as usize).block(block);
    if let Some(offset) = case.query_offset {
        shape = shape.query_offset(offset);
    }
    if let Some(offset) = case.key_offset {
        shape = shape.key_offset(offset);
    }
    if let Some(map) = &case.query_map {
        shape = shape.query_map(positions(map));
    }
    if let Some(map) = &case.key_map {
        shape = shape.key_map(positions(map));
    }
    if let Some(bytes) = case.mask_bytes {
        shape = shape.mask_bytes(bytes);
    }
    shape
}

/// The layouts of a case as a set, one a batch entry and head.
pub(crate) fn compile_set(case: &AttentionCase) -> LayoutSet {
    let heads: Heads = case.pattern_text().parse().unwrap();
    let padding = match &case.padding[..] {
        [] => Padding::None(case.batch),
        each => Padding::Each(each.to_vec()),
    };
    LayoutSet::compile(&heads, case.heads_q, &shape(&case.layout), &padding, None).unwrap()
}

/// The layouts of a case: one for all where one does, else a set.
pub(crate) fn layouts(case: &AttentionCase) -> Layouts {
    if !case.per_head.is_empty() || !case.padding.is_empty() {
        return compile_set(case).into();
    }
    let pattern: Pattern = case.pattern_text().parse().unwrap();
    Layout::compile(&pattern, &shape(&case.layout)).unwrap().into()
}

pub(crate) fn score(transform: &Transform) -> Score {
    let mut score = Score::default();
    if let Some(cap) = transform.softcap {
        score = score.softcap(cap);
    }
    if !transform.slopes.is_empty() {
        score = score.alibi_slopes(&transform.slopes[..]);
    }
    if let Some(Table { values, left, right }) = &transform.table {
        score = score.bias_table(BiasTable::new(values, *left, *right).unwrap());
    }
    score
}

/// A case's layouts and options on an instruction set.
pub(crate) fn attention(case: &AttentionCase, isa: Isa, threads: usize) -> Attention {
    let threads = Threads::Count(threads);
    let attention = Attention::new(layouts(case)).score(score(&case.transform)).isa(isa);
    let mut attention = attention.threads(threads);
    if let Some((p, seed)) = case.transform.dropout {
        attention = attention.dropout(Dropout::new(p, seed).unwrap());
    }
    if let Some(logits) = &case.sink_logits {
        attention = attention.sink_logits(logits.as_slice());
    }
    match case.scale {
        Some(scale) => attention.scale(scale),
        None => attention,
    }
}

/// The tensors of a problem, laid out.
pub(crate) struct TensorsOf<E> {
    pub(crate) sizes: Sizes,
    pub(crate) q: BufferOf<E>,
    pub(crate) k: BufferOf<E>,
    pub(crate) v: BufferOf<E>,
    pub(crate) dout: BufferOf<E>,
    pub(crate) dlse: Option<Vec<f32>>,
    /// How many sink logits there are.
    pub(crate) sinks: Option<usize>,
    /// Elements of the bias table and of the slopes, where there are any.
    pub(crate) table: Option<usize>,
    pub(crate) slopes: Option<usize>,
}

pub(crate) type Tensors = TensorsOf<f32>;

impl<E: Number> TensorsOf<E> {
    /// Every tensor as the placement says.
    pub(crate) fn of(problem: &Problem, placement: Placement) -> Self {
        Self::mixed(problem, [placement; 4])
    }

    /// Queries, keys, values and the output's gradient each as their placement says.
    pub(crate) fn mixed(problem: &Problem, placements: [Placement; 4]) -> Self {
        let sizes = problem.sizes;
        let [q, k, v, dout] = placements;
        TensorsOf {
            sizes,
            q: BufferOf::of(&problem.q, dims_q(&sizes), q),
            k: BufferOf::of(&problem.k, dims_k(&sizes), k),
            v: BufferOf::of(&problem.v, dims_v(&sizes), v),
            dout: BufferOf::of(&problem.dout, dims_out(&sizes), dout),
            dlse: problem.dlse.clone(),
            sinks: problem.sink_logits.as_ref().map(Vec::len),
            table: problem.transform.table.as_ref().map(|table| table.values.len()),
            slopes: Some(problem.transform.slopes.len()).filter(|&len| len > 0),
        }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_, E> {
        Inputs { q: self.q.view(), k: self.k.view(), v: self.v.view() }
    }
}

/// Whether the backward pass gets the rest of the log-sum-exp.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rest {
    Given,
    Left,
}

/// What has both passes.
pub(crate) trait Engine<E: Element> {
    fn forward(&self, inputs: Inputs<'_, E>, output: OutputMut<'_, E>) -> longspan::Result<()>;

    fn backward(
        &self,
        inputs: Inputs<'_, E>,
        saved: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
        gradients: GradientsMut<'_, E>,
    ) -> longspan::Result<()>;
}

macro_rules! engine {
    ($type:ty) => {
        impl<E: Element> Engine<E> for $type {
            fn forward(
                &self,
                inputs: Inputs<'_, E>,
                output: OutputMut<'_, E>,
            ) -> longspan::Result<()> {
                self.forward_into(inputs, output, Hook::none())
            }

            fn backward(
                &self,
                inputs: Inputs<'_, E>,
                saved: OutputRef<'_, E>,
                gradient: OutputGradient<'_, E>,
                gradients: GradientsMut<'_, E>,
            ) -> longspan::Result<()> {
                self.backward_into(inputs, saved, gradient, gradients, Hook::none())
            }
        }
    };
}

engine!(Attention);
engine!(Dilated);

/// Both passes over some tensors, into poisoned results.
pub(crate) struct Run<'a, E> {
    pub(crate) attention: &'a dyn Engine<E>,
    pub(crate) tensors: &'a TensorsOf<E>,
    /// Where outputs and gradients are laid.
    pub(crate) results: Placement,
}

impl<E: Number> Run<'_, E> {
    /// Results of both passes, dense; panics if a call fails or writes between elements.
    pub(crate) fn both(&self) -> Values<f32> {
        self.both_with(Rest::Given)
    }

    /// The same, with or without the rest of the log-sum-exp for the backward pass.
    pub(crate) fn both_with(&self, rest: Rest) -> Values<f32> {
        let TensorsOf { sizes, dout, dlse, sinks, table, slopes, .. } = self.tensors;
        let inputs = self.tensors.inputs();
        let (out, lse, lse_lo) = self.forward();
        let mut dq = BufferOf::poisoned(dims_q(sizes), self.results);
        let mut dk = BufferOf::poisoned(dims_k(sizes), self.results);
        let mut dv = BufferOf::poisoned(dims_v(sizes), self.results);
        let poisoned = |len: Option<usize>| vec![f32::NAN; len.unwrap_or(0)];
        let mut dsink_logits = poisoned(*sinks);
        let (mut dbias_table, mut dalibi_slopes) = (poisoned(*table), poisoned(*slopes));
        let gradients = GradientsMut {
            dsink_logits: sinks.is_some().then_some(&mut dsink_logits),
            dbias_table: table.is_some().then_some(&mut dbias_table),
            dalibi_slopes: slopes.is_some().then_some(&mut dalibi_slopes),
            ..GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut())
        };
        let (saved, gradient) = (
            OutputRef {
                out: out.view(),
                lse: &lse,
                lse_lo: (rest == Rest::Given).then_some(&lse_lo[..]),
            },
            OutputGradient { dout: dout.view(), dlse: dlse.as_deref() },
        );
        self.attention.backward(inputs, saved, gradient, gradients).unwrap();
        let (dq, dk, dv) = (dq.dense(), dk.dense(), dv.dense());
        Values { out: out.dense(), lse, dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes }
    }

    /// Output, log-sum-exp and its rest.
    fn forward(&self) -> (BufferOf<E>, Vec<f32>, Vec<f32>) {
        let sizes = &self.tensors.sizes;
        let mut out = BufferOf::poisoned(dims_out(sizes), self.results);
        let mut lse = vec![f32::NAN; sizes.rows()];
        let mut lse_lo = lse.clone();
        let rest = Some(&mut lse_lo[..]);
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: rest };
        self.attention.forward(self.tensors.inputs(), output).unwrap();
        (out, lse, lse_lo)
    }
}

/// Errors of a result on an instruction set, by the rule that this one has for such numbers.
pub(crate) fn measures<E: Number>(
    isa: Isa,
    problem: &Problem,
    answers: (&Answer<f64>, &Values<f32>),
    got: &Values<f32>,
    sample: Sample,
) -> Vec<Measure> {
    let types = Dilated::new([(1, 1)]).unwrap().isa(isa).compute_types::<E>().unwrap();
    measures_of(types, problem, answers, got, sample)
}

/// Errors of a result, by the rule of the products that it is made of.
pub(crate) fn measures_of(
    types: ComputeTypes,
    problem: &Problem,
    (truth, naive): (&Answer<f64>, &Values<f32>),
    got: &Values<f32>,
    sample: Sample,
) -> Vec<Measure> {
    let rule = match (types.stored, types.multiplied) {
        (ElementType::Bf16, ElementType::Bf16) => Measure::on_matrix_unit,
        (ElementType::F32, ElementType::Bf16) => Measure::of_split_products,
        _ => |measure| measure,
    };
    Measure::all(problem, truth, naive, got, sample).into_iter().map(rule).collect()
}

/// Every instruction set that this CPU has against the oracle; what is wrong, a line each.
pub(crate) fn check<E: Number>(case: &AttentionCase, placement: Option<Placement>) -> Vec<String> {
    check_with::<E>(case, placement, |attention| attention)
}

/// The same with further options.
pub(crate) fn check_with<E: Number>(
    case: &AttentionCase,
    placement: Option<Placement>,
    options: impl Fn(Attention) -> Attention,
) -> Vec<String> {
    let problem = case.problem().rounded(E::PRECISION);
    let (truth, naive) = (truth(&problem, case.sample), naive(&problem, case.sample));
    let order = match case.axes {
        Axes::TokenHead => Order::Bshd,
        Axes::HeadToken => Order::Bhsd,
    };
    let placement = placement.unwrap_or(Placement::Contiguous(order));
    let tensors = TensorsOf::<E>::of(&problem, placement);
    let mut wrong = Vec::new();
    for (n, isa) in Isa::available().into_iter().enumerate() {
        let attention = options(attention(case, isa, 1 + n % 2));
        let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
        let types = attention.compute_types::<E>().unwrap();
        for measure in measures_of(types, &problem, (&truth, &naive), &got, case.sample) {
            if !measure.holds() {
                wrong.push(format!("{isa} {} {measure}\n    {case}, {placement:?}", E::TYPE));
            }
        }
    }
    wrong
}

/// Checks cases and says of all of them what is wrong.
pub(crate) fn check_all<E: Number>(cases: impl IntoIterator<Item = AttentionCase>) {
    check_all_with::<E>(cases, |attention| attention);
}

/// The same with further options.
pub(crate) fn check_all_with<E: Number>(
    cases: impl IntoIterator<Item = AttentionCase>,
    options: fn(Attention) -> Attention,
) {
    let mut count = 0;
    let mut wrong = Vec::new();
    for case in short(cases, AttentionCase::sizes) {
        count += 1;
        let caught = std::panic::catch_unwind(|| check_with::<E>(&case, None, options));
        wrong.extend(caught.unwrap_or_else(|_| vec![format!("panicked\n    {case}")]));
    }
    eprintln!("{count} cases of {}", E::TYPE);
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The bits of numbers: NaN equals itself, and 0 is not −0.
pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}
