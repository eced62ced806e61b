//! Outputs and gradients against candle's own: the dense formula in candle's operations, in f64,
//! differentiated by candle.

use std::sync::Arc;

use crate::common::{Case, Sees, compare, dense, difference, numbers};
use candle_core::{DType, Result, Tensor, Var};
use longspan_candle::longspan::{
    Attention, Dims, Inputs, Layout, Options, Order, Padding, Pattern, Shape, Tensor as Plain,
};
use longspan_candle::{SparseAttention, attention, attention_with_lse};

const CAUSAL: Sees = |_, _, q, k| k <= q;
const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn patterns() -> Result<()> {
    let window: Sees = |_, _, q, k| k <= q && q - k <= 9;
    let sinks: Sees = |_, _, q, k| k <= q && (q - k <= 9 || k < 3);
    let strided: Sees = |_, _, q, k| (q - k).rem_euclid(3) == 0;
    for dtype in TYPES {
        for (text, sees) in [
            ("full", (|_, _, _, _| true) as Sees),
            ("causal", CAUSAL),
            ("causal & window(9, 0)", window),
            ("causal & (window(9, 0) | sinks(3))", sinks),
            ("strided(3)", strided),
        ] {
            Case { dtype, ..Case::new(text, sees) }.check()?;
        }
    }
    Ok(())
}

#[test]
fn shared_key_heads_and_other_value_dims() -> Result<()> {
    for dtype in TYPES {
        let case = Case::new("causal & window(30, 0)", |_, _, q, k| k <= q && q - k <= 30);
        let case = Case { dtype, batch: 2, heads: 6, ..case };
        for (key_heads, dim, value_dim) in [(6, 8, 24), (3, 17, 5), (2, 64, 64), (1, 1, 1)] {
            Case { key_heads, dim, value_dim, ..case.clone() }.check()?;
        }
    }
    Ok(())
}

/// One, a block less one, a block, a block and one, and what divides by nothing.
#[test]
fn odd_sizes() -> Result<()> {
    for (queries, keys) in [(1, 1), (63, 63), (64, 64), (65, 65), (131, 197), (1, 130), (2, 65)] {
        // The queries are the last positions.
        Case { queries, keys, ..Case::new("causal", CAUSAL) }.check()?;
    }
    Ok(())
}

#[test]
fn a_pattern_per_head() -> Result<()> {
    let sees: Sees = |_, head, q, k| match head {
        0 => k <= q,
        1 => (q - k).abs() <= 4,
        _ => k < 2,
    };
    let case = Case::new("heads([causal, window(4, 4), sinks(2)])", sees);
    for dtype in TYPES {
        Case { dtype, batch: 2, heads: 3, key_heads: 1, ..case.clone() }.check()?;
    }
    Ok(())
}

#[test]
fn padding_by_batch_entry() -> Result<()> {
    // The second entry has nothing at all, the third padding on the left: rows that see nothing.
    let sees: Sees = |entry, _, q, k| match entry {
        0 => k <= q,
        1 => false,
        _ => k <= q && (20..70).contains(&k),
    };
    for dtype in TYPES {
        let valid = Some(vec![0..90, 0..0, 20..70]);
        Case { dtype, batch: 3, valid, ..Case::new("causal", sees) }.check()?;
    }
    Ok(())
}

/// Queries that see no key: output 0, log-sum-exp −∞, gradient 0 wherever only they contribute.
#[test]
fn empty_rows() -> Result<()> {
    // No query is 100 positions after any key.
    let case = Case::new("window(200, 0) & !window(100, 100)", |_, _, q, k| q - k > 100);
    Case { queries: 130, keys: 130, ..case.clone() }.check()?;
    let nothing = Case::new("window(200, 0) & !window(100, 100)", |_, _, _, _| false);
    for dtype in TYPES {
        let [q, k, v] = Case { dtype, ..nothing.clone() }.inputs()?;
        let sparse: SparseAttention = nothing.text.parse()?;
        let out = sparse.forward(&q, &k, &v)?;
        let gradients = out.to_dtype(DType::F32)?.sum_all()?.backward()?;
        let mut found = vec![out];
        for input in [&q, &k, &v] {
            found.push(gradients.get(input).expect("a gradient").clone());
        }
        for tensor in found {
            assert!(numbers(&tensor)?.iter().all(|x| *x == 0.0));
        }
    }
    Ok(())
}

#[test]
fn options_are_honoured() -> Result<()> {
    let case = Case::new("causal", CAUSAL);
    let [q, k, v] = case.inputs()?;
    let sparse: SparseAttention = "causal".parse()?;
    let with = |sparse: &SparseAttention| sparse.forward(&q, &k, &v);
    let plain = with(&sparse)?;
    // A second call with other options has them: nothing of the first is left.
    let scaled = with(&sparse.options(Options::default().scale(0.9)))?;
    let expected = dense(&case, Some(0.9), &q, &k, &v)?.0;
    compare("scaled", &scaled, &expected, case.tolerance().out);
    let capped =
        with(&"causal".parse::<SparseAttention>()?.options(Options::default().softcap(0.1)))?;
    for other in [scaled, capped] {
        // A tenth less of scores near 1 moves outputs of unit scale by percents.
        let difference = difference(&plain, &other)?;
        assert!((1e-2..f64::INFINITY).contains(&difference), "{difference}");
    }
    Ok(())
}

/// Gradients through the log-sum-exp alone, and through both.
#[test]
fn gradients_through_the_log_sum_exp() -> Result<()> {
    for dtype in TYPES {
        let case = Case { dtype, heads: 4, key_heads: 2, ..Case::new("causal", CAUSAL) };
        let inputs = case.inputs()?;
        let [q, k, v] = &inputs;
        let sparse: SparseAttention = "causal".parse()?;
        let shape = Shape::new(case.queries, case.keys);
        let compiled = sparse.compile(&shape, case.heads, &Padding::None(case.batch))?;
        let (out, lse) = attention_with_lse(&compiled, q, k, v)?;
        let (dense_out, dense_lse) = dense(&case, None, q, k, v)?;
        assert_eq!(lse.dtype(), DType::F32);
        compare("lse", &lse, &dense_lse, crate::common::tolerance(DType::F32).out);

        let loss = |out: &Tensor, lse: &Tensor| -> Result<[Tensor; 2]> {
            let lse = lse.to_dtype(DType::F64)?.sqr()?.sum_all()?;
            let out = out.to_dtype(DType::F64)?.sum_all()?;
            Ok([(&lse + out)?, lse])
        };
        for (found, expected) in loss(&out, &lse)?.iter().zip(loss(&dense_out, &dense_lse)?) {
            let (found, expected) = (found.backward()?, expected.backward()?);
            for (name, input) in ["dq", "dk", "dv"].into_iter().zip(&inputs) {
                let none = input.zeros_like()?;
                let (found, expected) = (found.get(input), expected.get(input));
                let (found, expected) = (found.unwrap_or(&none), expected.unwrap_or(&none));
                compare(name, found, expected, case.tolerance().gradient);
            }
        }
    }
    Ok(())
}

/// The bits that Longspan has without candle, where all of the log-sum-exp is needed: its last bit
/// as f32 is worth more than 1.
#[test]
fn the_same_bits() -> Result<()> {
    let case = Case::new("causal", CAUSAL);
    let dims = Dims { batch: 1, tokens: case.keys, heads: case.heads, dim: case.dim };
    let tokens = case.keys;
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(tokens, tokens)).unwrap();
    let huge = Arc::new(Attention::new(layout).scale(1e8));
    // Equal keys share the weight, which the logarithm of their number says.
    let [q, k, v] = case.inputs()?;
    let k = Var::from_tensor(&k.narrow(2, 0, 1)?.broadcast_as(k.shape())?.contiguous()?)?;
    let inputs = [q, k, v];
    let plain = |x: &Tensor| {
        let data = x.flatten_all()?.to_vec1::<f32>()?;
        Ok::<_, candle_core::Error>(Plain::new(data, dims, Order::Bhsd).unwrap())
    };

    let [q, k, v] = &inputs;
    let out = attention(&huge, q, k, v)?;
    // The gradient of Σ out² / 2.
    let found = (out.sqr()? * 0.5)?.sum_all()?.backward()?;

    let (q, k, v) = (plain(q)?, plain(k)?, plain(v)?);
    let views = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let output = huge.forward(Inputs::new(views.q, views.k, views.v)).unwrap();
    assert!(output.lse.iter().any(|lse| lse.abs() > 2_f32.powi(25)));
    let (saved, gradient) = (&output, output.out.view());
    let expected = huge.backward(views, saved, gradient).unwrap();

    assert_eq!(plain(&out)?, output.out);
    for (input, expected) in inputs.iter().zip([expected.dq, expected.dk, expected.dv]) {
        assert_eq!(plain(found.get(input).expect("a gradient"))?, expected);
    }
    Ok(())
}

/// The same tensor as queries, keys and values: its gradient is the sum of three.
#[test]
fn one_tensor_three_times() -> Result<()> {
    let case = Case::new("causal", CAUSAL);
    let x = case.inputs()?[0].clone();
    let sparse: SparseAttention = "causal".parse()?;
    let weights = x.detach().sin()?;
    let gradient = |out: Tensor| -> Result<Tensor> {
        let weights = weights.to_dtype(out.dtype())?;
        let gradients = (out * weights)?.sum_all()?.backward()?;
        Ok(gradients.get(&x).expect("a gradient").clone())
    };
    let found = gradient(sparse.forward(&x, &x, &x)?)?;
    let expected = gradient(dense(&case, None, &x, &x, &x)?.0)?;
    compare("dx", &found, &expected, case.tolerance().gradient);
    Ok(())
}

/// Two backward passes through one forward pass, and a graph that outlives the attention.
#[test]
fn a_graph_is_walked_twice() -> Result<()> {
    let [q, k, v] = Case::new("causal", CAUSAL).inputs()?;
    let loss = {
        let sparse: SparseAttention = "causal".parse()?;
        sparse.forward(&q, &k, &v)?.sqr()?.sum_all()?
    };
    let (first, second) = (loss.backward()?, loss.backward()?);
    for input in [&q, &k, &v] {
        let numbers = |store: &candle_core::backprop::GradStore| {
            numbers(store.get(input).expect("a gradient"))
        };
        assert_eq!(numbers(&first)?, numbers(&second)?);
    }
    Ok(())
}

/// Inputs without gradients leave no graph behind.
#[test]
fn nothing_to_differentiate() -> Result<()> {
    let [q, k, v] = Case::new("causal", CAUSAL).inputs()?;
    let sparse: SparseAttention = "causal".parse()?;
    let out = sparse.forward(&q.detach(), &k.detach(), &v.detach())?;
    assert!(!out.track_op());
    let only_k = sparse.forward(&q.detach(), &k, &v.detach())?;
    let gradients = only_k.sum_all()?.backward()?;
    assert!(gradients.get(&k).is_some());
    Ok(())
}
