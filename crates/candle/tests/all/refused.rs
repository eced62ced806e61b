//! What can't be done is an error that says what would be.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use longspan_candle::longspan::{Attention, Layout, Options, Pattern, Shape};
use longspan_candle::{SparseAttention, attention};

fn zeros(shape: [usize; 4], dtype: DType) -> Tensor {
    Tensor::zeros(&shape, dtype, &Device::Cpu).unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("no error; expected {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message}: expected {part:?}");
    }
}

#[test]
fn element_types() {
    let causal: SparseAttention = "causal".parse().unwrap();
    let [single, double, half] =
        [DType::F32, DType::F64, DType::BF16].map(|dtype| zeros([1, 2, 8, 4], dtype));
    let ids = zeros([1, 2, 8, 4], DType::U32);
    let call = |q, k, v| causal.forward(q, k, v);
    refused(call(&double, &double, &double), &["q holds f64", "f32, bf16 or f16", "to_dtype"]);
    refused(call(&single, &ids, &single), &["k holds u32", "f32, bf16 or f16"]);
    refused(call(&single, &single, &half), &["v holds bf16 and q f32", "to_dtype"]);
    refused(call(&half, &single, &half), &["k holds f32 and q bf16"]);
}

#[test]
fn shapes() {
    let causal: SparseAttention = "causal".parse().unwrap();
    let make = |shape| zeros(shape, DType::F32);
    let q = make([2, 4, 8, 16]);
    let call = |k: [usize; 4], v: [usize; 4]| causal.forward(&q, &make(k), &make(v));
    assert!(call([2, 2, 8, 16], [2, 2, 8, 5]).is_ok());
    refused(call([1, 4, 8, 16], [1, 4, 8, 16]), &["k has batch 1, expected 2"]);
    refused(call([2, 4, 8, 12], [2, 4, 8, 16]), &["k has head dim 12, expected 16"]);
    refused(call([2, 4, 8, 16], [2, 4, 9, 16]), &["v has tokens 9, expected 8"]);
    refused(call([2, 4, 8, 16], [2, 2, 8, 16]), &["v has heads 2, expected 4"]);
    refused(call([2, 3, 8, 16], [2, 3, 8, 16]), &["4 query heads and 3 key heads", "multiple"]);
    refused(call([2, 4, 8, 16], [2, 4, 8, 300]), &["v has head dim 300, expected 1 to 256"]);
    let flat = q.flatten_to(1).unwrap();
    let message = ["q has shape [8, 8, 16]", "(batch, heads, tokens, dim)"];
    refused(causal.forward(&flat, &q, &q), &message);
    refused(causal.forward(&q, &q, &q.get(0).unwrap()), &["v has shape [4, 8, 16]"]);
}

#[test]
fn layouts_and_patterns() {
    let x = zeros([2, 4, 8, 16], DType::F32);
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(9, 9)).unwrap();
    let longer = Arc::new(Attention::new(layout));
    refused(attention(&longer, &x, &x, &x), &["q has tokens 8, expected 9", "layout"]);
    let three: SparseAttention = "heads([causal, full, causal])".parse().unwrap();
    refused(three.forward(&x, &x, &x), &["3", "4"]);
    let causal: SparseAttention = "causal".parse().unwrap();
    refused(causal.forward_padded(&x, &x, &x, &[]), &["0 ranges", "2 batch entries"]);
    refused(causal.forward_padded(&x, &x, &x, &[0..8, 0..9]), &["9"]);
    refused("casual".parse::<SparseAttention>(), &["causal"]);
    let endless = causal.options(Options::default().scale(f32::INFINITY));
    refused(endless.forward(&x, &x, &x), &["the scale is inf", "finite"]);
}

/// Nothing in, nothing out.
#[test]
fn empty_tensors() -> Result<()> {
    let causal: SparseAttention = "causal".parse()?;
    for shape in [[0, 2, 8, 4], [1, 0, 8, 4]] {
        let x = zeros(shape, DType::F32);
        assert_eq!(causal.forward(&x, &x, &x)?.dims(), shape);
    }
    Ok(())
}

/// The README's example is the one at the top of the crate, which runs.
#[test]
fn readme() {
    let code = |text: &str| -> Vec<String> {
        let lines = text.lines().skip_while(|line| !line.contains("use longspan_candle"));
        lines.take_while(|line| !line.contains("```")).map(str::to_owned).collect()
    };
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = code(&std::fs::read_to_string(root).expect("a README"));
    let library = include_str!("../../src/lib.rs");
    let library = library.lines().filter(|line| line.starts_with("//!") && !line.contains("# Ok"));
    let library: Vec<_> = library.map(|l| l.trim_start_matches("//!")).collect();
    let library: Vec<_> = library.iter().map(|l| l.strip_prefix(' ').unwrap_or(l)).collect();
    let library = code(&library.join("\n"));
    assert!(!readme.is_empty());
    assert_eq!(readme, library);
}
