//! More than 2³¹ elements, and offsets beyond 2³¹ in either direction.
//!
//! The memory is mapped and never reserved: only pages that somebody touches exist. Keys that a
//! sparse pattern leaves out are never touched, which the test checks by what the process holds.

use longspan::{
    Attention, Dims, GradientsMut, Hook, Inputs, Isa, Layout, OutputGradient, OutputMut, OutputRef,
    Pattern, RowStatistics, Shape, Strides, View, ViewMut, row_deltas,
};
use longspan_testing::{
    AttentionCase, Measure, Problem, Rule, Sample, Seen, Sizes, Values, naive, truth,
};

mod common;

use common::*;

/// Zeros that take no memory until they are written.
struct Map {
    first: *mut f32,
    len: usize,
}

impl Map {
    fn new(len: usize) -> Map {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new anonymous mapping.
        let first = unsafe { libc::mmap(std::ptr::null_mut(), len * 4, access, flags, -1, 0) };
        assert_ne!(first, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Map { first: first.cast(), len }
    }

    fn slice(&mut self) -> &mut [f32] {
        // SAFETY: the mapping is ours, and all zeros is a number.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and slices of it are gone.
        unsafe { libc::munmap(self.first.cast(), self.len * 4) };
    }
}

/// Bytes of memory that the process holds.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

fn check(problem: &Problem, got: &Values<f32>, what: &str) {
    let (truth, naive) = (truth(problem, Sample::ALL), naive(problem, Sample::ALL));
    for measure in Measure::all(problem, &truth, &naive, got, Sample::ALL) {
        assert!(measure.holds(), "{what}, {measure}");
    }
}

/// A tensor of few elements, thrown over 2³³ bytes and more, the last token first in memory.
struct Thrown {
    map: Map,
    dims: Dims,
    strides: Strides,
    first: usize,
}

impl Thrown {
    fn new(dims: Dims) -> Thrown {
        let far = (1_usize << 32) / dims.tokens;
        let strides = Strides {
            batch: 1,
            tokens: -(far as isize),
            heads: far as isize / 5,
            dim: 1 + far as isize / 700,
        };
        let first = far * (dims.tokens - 1);
        let last = (dims.heads - 1) * (far / 5) + (dims.dim - 1) * (1 + far / 700);
        Thrown { map: Map::new(first + last + 1), dims, strides, first }
    }

    fn of(dense: &[f32], dims: Dims) -> Thrown {
        let mut thrown = Thrown::new(dims);
        for (n, &x) in dense.iter().enumerate() {
            let place = thrown.place(n);
            thrown.map.slice()[place] = x;
        }
        thrown
    }

    fn place(&self, n: usize) -> usize {
        let Dims { tokens, dim, .. } = self.dims;
        let (h, t, d) = (n / (tokens * dim), n / dim % tokens, n % dim);
        let offset = h as isize * self.strides.heads
            + t as isize * self.strides.tokens
            + d as isize * self.strides.dim;
        (self.first as isize + offset) as usize
    }

    fn dense(&mut self) -> Vec<f32> {
        let places: Vec<usize> =
            (0..self.dims.elements().unwrap()).map(|n| self.place(n)).collect();
        places.into_iter().map(|place| self.map.slice()[place]).collect()
    }

    fn view(&mut self) -> View<'_, f32> {
        let (first, dims, strides) = (self.first, self.dims, self.strides);
        View::strided(self.map.slice(), first, dims, strides).unwrap()
    }

    fn view_mut(&mut self) -> ViewMut<'_, f32> {
        let (first, dims, strides) = (self.first, self.dims, self.strides);
        ViewMut::strided(self.map.slice(), first, dims, strides).unwrap()
    }
}

fn offsets_past_two_to_the_31() {
    let case = AttentionCase {
        heads_q: 4,
        heads_kv: 2,
        dim_k: 9,
        dim_v: 7,
        ..AttentionCase::new("thrown", Rule::SlidingWindow { width: 30 }, 70)
    };
    let problem = case.problem();
    let sizes = problem.sizes;
    let mut q = Thrown::of(&problem.q, dims_q(&sizes));
    let mut k = Thrown::of(&problem.k, dims_k(&sizes));
    let mut v = Thrown::of(&problem.v, dims_v(&sizes));
    let mut dout = Thrown::of(&problem.dout, dims_out(&sizes));
    assert!(q.place(69 * 9) == 0 && q.first > 1 << 31);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let dout = dout.view();
    for isa in Isa::available() {
        let attention = attention(&case, isa, 2);
        let mut out = Thrown::new(dims_out(&sizes));
        let mut lse = vec![0.0; sizes.rows()];
        let mut lse_lo = lse.clone();
        let rest = Some(&mut lse_lo[..]);
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: rest };
        attention.forward_into(inputs, output, Hook::none()).unwrap();
        let mut dq = Thrown::new(dims_q(&sizes));
        let mut dk = Thrown::new(dims_k(&sizes));
        let mut dv = Thrown::new(dims_v(&sizes));
        let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        let lse_lo = Some(&lse_lo[..]);
        let (saved, gradient) =
            (OutputRef { out: out.view(), lse: &lse, lse_lo }, OutputGradient { dout, dlse: None });
        attention.backward_into(inputs, saved, gradient, gradients, Hook::none()).unwrap();
        let (dq, dk, dv) = (dq.dense(), dk.dense(), dv.dense());
        let got = Values { out: out.dense(), lse, dq, dk, dv, ..Values::default() };
        check(&problem, &got, &isa.to_string());
    }
}

const QUERIES: usize = 70;
const DIM: usize = 64;
const SINKS: usize = 5;
const WINDOW: usize = 100;
/// Keys that somebody sees: the sinks and the last ones.
const SEEN: usize = SINKS + WINDOW + QUERIES;

/// Few queries at the end of many keys, most of them not seen.
fn few_of_many(keys: usize) {
    let sizes = Sizes {
        batch: 1,
        tokens_q: QUERIES,
        tokens_k: SEEN,
        heads_q: 1,
        heads_kv: 1,
        dim_k: DIM,
        dim_v: DIM,
    };
    // The oracle knows of the keys that are seen only.
    let seen = Seen::shared(QUERIES, SEEN, |i, j| {
        j < SINKS || (j <= i + SINKS + WINDOW && j >= i + SINKS)
    });
    let problem = Problem { seen, ..Problem::normal(sizes, 11) };
    let spread = |numbers: &[f32]| {
        let mut map = Map::new(keys * DIM);
        let (front, back) = numbers.split_at(SINKS * DIM);
        map.slice()[..front.len()].copy_from_slice(front);
        let start = keys * DIM - back.len();
        map.slice()[start..].copy_from_slice(back);
        map
    };
    let gather = |map: &mut Map| {
        let start = (keys - WINDOW - QUERIES) * DIM;
        let slice = map.slice();
        [&slice[..SINKS * DIM], &slice[start..]].concat()
    };
    let dims = |tokens| Dims { batch: 1, tokens, heads: 1, dim: DIM };
    let order = dense_order();
    let (mut k, mut v) = (spread(&problem.k), spread(&problem.v));
    let inputs = Inputs {
        q: View::new(&problem.q, dims(QUERIES), order).unwrap(),
        k: View::new(k.slice(), dims(keys), order).unwrap(),
        v: View::new(v.slice(), dims(keys), order).unwrap(),
    };
    let dout = View::new(&problem.dout, dims(QUERIES), order).unwrap();
    let pattern: Pattern =
        format!("causal & (window({WINDOW}, 0) | sinks({SINKS}))").parse().unwrap();
    let layout = Layout::compile(&pattern, &Shape::new(QUERIES, keys)).unwrap();
    let attention = Attention::new(layout);
    let before = resident();
    let output = attention.forward(inputs).unwrap();
    let mut delta = vec![0.0; QUERIES];
    row_deltas(&output, dout, &mut delta).unwrap();
    let (mut dq, mut dk, mut dv) =
        (vec![0.0; QUERIES * DIM], Map::new(keys * DIM), Map::new(keys * DIM));
    let gradients = GradientsMut::new(
        ViewMut::new(&mut dq, dims(QUERIES), order).unwrap(),
        ViewMut::new(dk.slice(), dims(keys), order).unwrap(),
        ViewMut::new(dv.slice(), dims(keys), order).unwrap(),
    );
    let (lse, lse_lo) = (&output.lse[..], Some(&output.lse_lo[..]));
    let rows = RowStatistics { lse, lse_lo, delta: &delta };
    attention.accumulate(inputs, dout, rows, gradients, Hook::none()).unwrap();
    // Besides what was touched: the columns of the transpose, 8 bytes per block.
    let held = resident().saturating_sub(before);
    let most = (16 << 20) + keys;
    assert!(held < most, "{held} bytes of {} were touched, {most} expected", 4 * 4 * keys * DIM);
    let got = Values {
        out: output.out.as_slice().to_vec(),
        lse: output.lse.clone(),
        dq,
        dk: gather(&mut dk),
        dv: gather(&mut dv),
        ..Values::default()
    };
    check(&problem, &got, &format!("{keys} keys"));
}

/// One test, so that nothing else in the process allocates while memory is measured.
#[test]
fn tensors_past_two_to_the_31() {
    offsets_past_two_to_the_31();
    // A sixty-fourth first: should unseen keys be touched, this fails before memory runs out.
    few_of_many(1 << 20);
    few_of_many((1 << 26) + 37);
}
