//! What a selection costs beside the attention that it saves.
//!
//! ```text
//! cargo run --release -p longspan --example selection_cost -- TOKENS DIM HEADS f32|bf16 BLOCKS [dense|backward]
//! ```
//!
//! Rows keep `BLOCKS` key blocks of 64; queries and keys are random. `dense` measures dense causal
//! attention beside it, `backward` both passes of both. Memory is what the selection takes at most,
//! beside the bytes of queries, keys, values and output (Linux).

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::time::Instant;

use longspan::{
    Attention, BlockSelector, Dims, Element, Inputs, Layout, Order, Output, Pattern, Selector,
    Shape, Tensor,
};

fn tensor<E: Element>(dims: Dims, seed: u32) -> Result<Tensor<E>, longspan::Error> {
    let mut state = seed;
    let mut number = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        E::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    let data = (0..dims.elements().expect("small")).map(|_| number()).collect();
    Tensor::new(data, dims, Order::Bhsd)
}

/// The largest resident size so far, in bytes, counted anew from here on.
fn peak_from_here() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    // Where it can't be reset, memory reads as 0.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    line.trim().trim_end_matches(" kB").parse().map_or(0, |kilobytes: u64| kilobytes << 10)
}

fn best(times: usize, mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..times {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn run<E: Element>(
    tokens: usize,
    dim: usize,
    heads: usize,
    cap: usize,
    beside: &str,
) -> longspan::Result<()> {
    let dims = Dims { batch: 1, tokens, heads, dim };
    let (q, k, v) = (tensor::<E>(dims, 1)?, tensor::<E>(dims, 2)?, tensor::<E>(dims, 3)?);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let mut output = Output::<E>::zeros(dims, Order::Bhsd)?;
    let selector = BlockSelector::new(Pattern::causal())
        .always("window(64, 0) | sinks(1)".parse()?)
        .mass(1.0)
        .max_blocks(cap);
    peak_from_here();
    let before = peak_from_here();
    let mut selection = selector.select(q.view(), k.view())?;
    let memory = peak_from_here() - before;
    let tensors = 4 * dims.elements().expect("small") * size_of::<E>();
    let select = best(3, || selection = selector.select(q.view(), k.view()).expect("as before"));
    let attention = Attention::new(selection.layouts().clone());
    let sparse = best(3, || {
        attention.forward_into(inputs, output.as_mut(), longspan::Hook::none()).expect("as before");
    });
    print!(
        "{tokens} tokens, d {dim}, {heads} heads, {}: density {:.4}, memory {:.4}, selection {:.1} ms, {:.3} of the sparse pass ({:.1} ms)",
        E::TYPE,
        selection.density(),
        memory as f64 / tensors as f64,
        select * 1e3,
        select / sparse,
        sparse * 1e3,
    );
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(tokens, tokens))?;
    let whole = Attention::new(layout);
    if beside == "dense" {
        let dense = best(2, || {
            whole.forward_into(inputs, output.as_mut(), longspan::Hook::none()).expect("as before");
        });
        print!(
            ", {:.4} of dense ({:.1} ms), {:.2} × end to end",
            select / dense,
            dense * 1e3,
            dense / (select + sparse)
        );
    }
    if beside == "backward" {
        let both = |attention: &Attention| {
            best(2, || {
                let output = attention.forward(inputs).expect("as before");
                attention.backward(inputs, &output, v.view()).expect("as before");
            })
        };
        let (sparse, dense) = (both(&attention), both(&whole));
        print!(", forward and backward {:.2} × end to end", dense / (select + sparse));
    }
    println!();
    Ok(())
}

fn main() -> longspan::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments[index].parse().expect("a number");
    let (tokens, dim, heads, cap) = (number(0), number(1), number(2), number(4));
    let beside = arguments.get(5).map_or("", String::as_str);
    match arguments[3].as_str() {
        "bf16" => run::<half::bf16>(tokens, dim, heads, cap, beside),
        _ => run::<f32>(tokens, dim, heads, cap, beside),
    }
}
