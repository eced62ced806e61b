//! Modules by themselves: layer norm against its definition, attention around other attentions.

use crate::common::{compare, difference, random};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarMap};
use longspan_candle::{
    Block, BlockConfig, LayerNorm, Multihead, MultiheadAttention, MultiheadConfig, Positions,
    SparseAttention, seeded,
};

/// Values and all gradients, for rows of one number and of many, and more rows than a piece.
#[test]
fn layer_norm() -> Result<()> {
    for (rows, size) in [(1, 1), (3, 2), (5, 17), (130, 64), (64, 300)] {
        let vars = VarMap::new();
        let norm = LayerNorm::new(size, 1e-3, seeded(&vars, 1, DType::F32))?;
        let part = |name| vars.data().lock().unwrap()[name].clone();
        let (weight, bias) = (part("weight"), part("bias"));
        weight.set(&random(2, (1, 1, 1, size))?.reshape(size)?)?;
        bias.set(&random(3, (1, 1, 1, size))?.reshape(size)?)?;
        let x = Var::from_tensor(&(random(4, (1, 1, rows, size))?.reshape((rows, size))? + 0.5)?)?;
        let factors = random(5, (1, 1, rows, size))?.reshape((rows, size))?;

        let wide = |var: &Var| Var::from_tensor(&var.to_dtype(DType::F64)?);
        let inputs = [x, weight, bias];
        let [x, weight, bias] = &inputs;
        let doubles = [wide(x)?, wide(weight)?, wide(bias)?];
        let expected = {
            let x = doubles[0].broadcast_sub(&doubles[0].mean_keepdim(D::Minus1)?)?;
            let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
            let x = x.broadcast_div(&(variance + 1e-3)?.sqrt()?)?;
            x.broadcast_mul(&doubles[1])?.broadcast_add(&doubles[2])?
        };
        let found = norm.forward(x)?;
        // A mean and a deviation of up to 300 terms, in 16 sums: 20 roundings, and some. A row of
        // one has no deviation, and is divided by √ε.
        let near = 64.0 * 2_f64.powi(-24);
        compare("y", &found, &expected, near);
        let found = (found * &factors)?.sum_all()?.backward()?;
        let expected = (expected * factors.to_dtype(DType::F64)?)?.sum_all()?.backward()?;
        for (name, (var, double)) in ["x", "weight", "bias"].iter().zip(inputs.iter().zip(&doubles))
        {
            let (found, expected) = (found.get(var).unwrap(), expected.get(double).unwrap());
            // Sums over rows have as many terms; numbers cancel that are up to 1/√ε times as large.
            compare(name, found, expected, 32.0 * near);
        }
    }
    Ok(())
}

#[test]
fn layer_norm_of_others() -> Result<()> {
    let norm = LayerNorm::new(8, 1e-5, seeded(&VarMap::new(), 1, DType::F32))?;
    let x = random(1, (1, 8, 3, 8))?;
    // A view is read by its numbers, not as it lies.
    let turned = x.transpose(1, 3)?;
    compare("view", &norm.forward(&turned)?, &norm.forward(&turned.contiguous()?)?, 0.0);
    // Rounded once on the way in, once on the way out.
    let half = norm.forward(&x.to_dtype(DType::BF16)?)?;
    assert_eq!(half.dtype(), DType::BF16);
    compare("bf16", &half, &norm.forward(&x)?, 3.0 * 2_f64.powi(-8));
    let none = Tensor::zeros((0, 8), DType::F32, &Device::Cpu)?;
    assert_eq!(norm.forward(&none)?.dims(), [0, 8]);
    let message = norm.forward(&x.narrow(3, 0, 7)?).unwrap_err().to_string();
    assert!(message.contains("[1, 8, 3, 7]") && message.contains("expected 8"), "{message}");
    let message = norm.forward(&x.to_dtype(DType::F64)?).unwrap_err().to_string();
    assert!(message.contains("f64"), "{message}");
    Ok(())
}

/// A token that attends to itself alone and that no other token attends to is a value, projected twice.
#[test]
fn attention_to_oneself() -> Result<()> {
    let vars = VarMap::new();
    let config = MultiheadConfig::plain(12, 3);
    let alone: SparseAttention = "window(0, 0)".parse()?;
    let layer = MultiheadAttention::new(&config, alone, seeded(&vars, 1, DType::F32))?;
    let x = random(1, (1, 2, 40, 12))?.squeeze(0)?;
    let part = |name: &str| vars.data().lock().unwrap()[name].as_tensor().clone();
    let rows = x.reshape((80, 12))?;
    let values = rows.matmul(&part("v_proj.weight").t()?)?;
    let expected = values.matmul(&part("out_proj.weight").t()?)?.reshape((2, 40, 12))?;
    // Two sums of twelve terms.
    compare("out", &layer.forward(&x)?, &expected, 32.0 * 2_f64.powi(-24));
    assert!(!vars.data().lock().unwrap().contains_key("inner_attn_ln.weight"));
    Ok(())
}

/// As a share of the largest element: angles of up to 37 are rounded to f32 as sines, then turned
/// and summed, by both of the layers that are compared.
const TURNED: f64 = 64.0 / (1 << 24) as f64;

/// Rotary positions know distances alone: what a window sees doesn't depend on where it stands.
/// Without positions, neither does the order inside it matter.
#[test]
fn positions_are_relative() -> Result<()> {
    let near: fn() -> Result<SparseAttention> = || "causal & window(5, 0)".parse();
    let layer = |positions| {
        let config = MultiheadConfig { positions, ..MultiheadConfig::magneto(16, 2, 4) };
        Multihead::new(&config, near()?, seeded(&VarMap::new(), 1, DType::F32))
    };
    let x = random(1, (1, 1, 30, 16))?.squeeze(0)?;
    let shifted = Tensor::cat(&[&random(2, (1, 1, 7, 16))?.squeeze(0)?, &x], 1)?;
    let swapped = Tensor::cat(
        &[&x.narrow(1, 0, 10)?, &x.narrow(1, 11, 1)?, &x.narrow(1, 10, 1)?, &x.narrow(1, 12, 18)?],
        1,
    )?;
    let (rotary, none) = (layer(Positions::default())?, layer(Positions::None)?);
    for layer in [&rotary, &none] {
        let (here, there) = (layer.forward(&x)?, layer.forward(&shifted)?.narrow(1, 7, 30)?);
        // The first five see what was put before them.
        let past = |x: &Tensor| x.narrow(1, 5, 25);
        compare("shifted", &past(&there)?, &past(&here)?, TURNED);
    }
    let last = |layer: &Multihead<SparseAttention>, x: &Tensor| layer.forward(x)?.narrow(1, 13, 1);
    compare("swapped", &last(&none, &swapped)?, &last(&none, &x)?, TURNED);
    let difference = difference(&last(&rotary, &swapped)?, &last(&rotary, &x)?)?;
    assert!((1e-2..f64::INFINITY).contains(&difference), "{difference}");
    Ok(())
}

/// Every weight of a block has a gradient, and what goes in has one.
#[test]
fn a_block_learns() -> Result<()> {
    let vars = VarMap::new();
    let config = BlockConfig {
        attention: MultiheadConfig::magneto(16, 2, 1),
        intermediate_size: 24,
        layer_norm_eps: 1e-5,
    };
    let near: SparseAttention = "window(3, 3)".parse()?;
    let block = Block::new(&config, near, seeded(&vars, 1, DType::F32))?;
    let x = Var::from_tensor(&random(1, (1, 2, 50, 16))?.squeeze(0)?)?;
    let gradients = block.forward(&x)?.sqr()?.mean_all()?.backward()?;
    assert!(gradients.get(&x).is_some());
    assert_eq!(vars.all_vars().len(), 20);
    for (name, var) in vars.data().lock().unwrap().iter() {
        let gradient = gradients.get(var).unwrap_or_else(|| panic!("no gradient for {name}"));
        assert!(gradient.abs()?.sum_all()?.to_scalar::<f32>()? > 0.0, "{name}");
    }
    Ok(())
}
