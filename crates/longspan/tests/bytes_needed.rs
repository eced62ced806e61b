//! `bytes_needed` is the memory that the first call holds at most, as its allocator saw it.
//!
//! One test, in a binary of its own: the allocator counts what the whole process does.

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use longspan::{
    Attend, Attention, BiasTable, Dilated, Dims, Element, Heads, Inputs, Isa, Layout, LayoutSet,
    Order, Overlap, Padding, Pass, Pattern, Shape, Tensor,
};

struct Peak;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Peak {
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        let held = HELD.fetch_add(size.size(), Ordering::Relaxed) + size.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: `System` demands what `GlobalAlloc` does.
        unsafe { System.alloc(size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, size: Size) {
        HELD.fetch_sub(size.size(), Ordering::Relaxed);
        // SAFETY: `System` demands what `GlobalAlloc` does.
        unsafe { System.dealloc(pointer, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Peak = Peak;

/// The result of `f`, and the most bytes that it held at once beyond those before.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.load(Ordering::SeqCst);
    MOST.store(before, Ordering::SeqCst);
    let result = f();
    (result, MOST.load(Ordering::SeqCst) - before)
}

/// What lists hold while they grow, masks that a layout does not store, threads that start: beside
/// results and workspaces of about a megabyte or more.
const SMALL: usize = 16_384;

/// Both passes of `new()`, each on workspaces of its own.
fn check<E: Element, A: Attend>(
    name: &str,
    new: impl Fn() -> A,
    dims: [Dims; 3],
    wrong: &mut Vec<String>,
) {
    let make = |dims: Dims| {
        let number = |n: usize| E::from_f32((n as f32 * 0.37).sin());
        Tensor::new((0..dims.elements().unwrap()).map(number).collect(), dims, Order::Bhsd).unwrap()
    };
    let [q, k, v] = dims.map(make);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let mut compare = |pass: Pass, needed: usize, peak: usize| {
        if peak > needed + SMALL || needed > peak + SMALL {
            wrong
                .push(format!("{name}, {pass:?}, {}: {needed} bytes needed, {peak} held", E::TYPE));
        }
    };
    let attention = new();
    let needed = attention.bytes_needed::<E>(dims, Pass::Forward).unwrap();
    let (output, held) = peak(|| attention.forward(inputs).unwrap());
    compare(Pass::Forward, needed, held);

    let attention = new();
    let needed = attention.bytes_needed::<E>(dims, Pass::Backward).unwrap();
    let (_, held) =
        peak(|| attention.backward(inputs, (&output).into(), output.out.view().into()).unwrap());
    compare(Pass::Backward, needed, held);
}

fn check_all<E: Element>(wrong: &mut Vec<String>) {
    let dims = |batch, tokens, heads, dim| Dims { batch, tokens, heads, dim };
    let compile = |text: &str, queries, keys| {
        let pattern: Pattern = text.parse().unwrap();
        Layout::compile(&pattern, &Shape::new(queries, keys)).unwrap()
    };
    let grouped = [dims(2, 1_500, 4, 64), dims(2, 1_500, 2, 64), dims(2, 1_500, 2, 48)];
    for threads in [1, 2] {
        let causal = || Attention::new(compile("causal", 1_500, 1_500)).threads(threads);
        check::<E, _>("causal", causal, grouped, wrong);
        let table = || {
            let table = BiasTable::new(&[0.1; 4 * 1_001], 1_000, 0).unwrap();
            causal().bias_table(table).alibi_slopes([0.1; 4]).sink_logits([0.5; 4])
        };
        check::<E, _>("table, slopes and sinks", table, grouped, wrong);
        let square = [dims(1, 3_000, 2, 32); 3];
        let global = || {
            Attention::new(compile("global_tokens(3) | window(100, 0)", 3_000, 3_000))
                .threads(threads)
        };
        check::<E, _>("global tokens", global, square, wrong);
        let per_head = || {
            let heads: Heads = "heads([causal, strided(7)])".parse().unwrap();
            let set =
                LayoutSet::compile(&heads, 2, &Shape::new(3_000, 3_000), &Padding::None(1), None);
            Attention::new(set.unwrap()).threads(threads)
        };
        check::<E, _>("per head", per_head, square, wrong);
        let decode = || Attention::new(compile("causal", 1, 20_000)).threads(threads);
        let one = [dims(1, 1, 8, 64), dims(1, 20_000, 2, 64), dims(1, 20_000, 2, 64)];
        check::<E, _>("decode", decode, one, wrong);
        for isa in Isa::available() {
            let window = || Attention::new(compile("causal & window(200, 0)", 1_500, 1_500));
            let window = || window().threads(threads).isa(isa);
            check::<E, _>(&format!("{isa}"), window, grouped, wrong);
        }
        let none = [dims(1, 0, 2, 8), dims(1, 5, 2, 8), dims(1, 5, 2, 8)];
        let empty = || Attention::new(compile("full", 0, 5)).threads(threads);
        check::<E, _>("no queries", empty, none, wrong);
        for overlap in [Overlap::Weighted, Overlap::Union] {
            let dilated = || {
                Dilated::new([(500, 1), (1_500, 3)])
                    .unwrap()
                    .within(Pattern::causal())
                    .overlap(overlap)
                    .threads(threads)
            };
            check::<E, _>(&format!("dilated, {overlap:?}"), dilated, grouped, wrong);
            let padded = || dilated().padded([0..1_100, 300..1_500]);
            check::<E, _>(&format!("padded, {overlap:?}"), padded, grouped, wrong);
        }
    }
}

#[test]
fn the_first_call_holds_what_it_needs() {
    // The counter counts what is held at once, not all that ever was.
    let (_, held) = peak(|| {
        drop(std::hint::black_box(vec![1_u8; 5_000]));
        std::hint::black_box(vec![1_u8; 3_000]);
    });
    assert!((5_000..6_000).contains(&held), "{held} bytes");

    let mut wrong = Vec::new();
    check_all::<f32>(&mut wrong);
    check_all::<bf16>(&mut wrong);
    check_all::<f16>(&mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // What can't be called needs nothing.
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(10, 10)).unwrap();
    let attention = Attention::new(layout);
    for (batch, tokens) in [(1, 9), (usize::MAX, 10)] {
        let dims = Dims { batch, tokens, heads: 2, dim: 8 };
        assert!(attention.bytes_needed::<f32>([dims; 3], Pass::Forward).is_err());
    }
}
